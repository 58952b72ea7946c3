"""Synthetic classification: FedCLUP's logistic generator, and class prototypes for very many clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailorfl.data.cache import cache_folder, cached, key_of, mapped, mark_finite
from tailorfl.data.registry import data_source
from tailorfl.data.source import Source
from tailorfl.data.synthetic import client_layout, require_positive
from tailorfl.errors import ConfigError, check_known

Floats = NDArray[np.float32]

_SAMPLES = "samples.bin"
_BLOCK = 1 << 16  # numbers drawn and shifted at once: they stay in the cache and need no second copy


@data_source("FedCLUP's logistic data, own rule for each client")
def synthetic_logistic(
    clients: int = 10,
    samples: int = 200,
    test_samples: int = 200,
    dim: int = 10,
    heterogeneity: float = 1.0,
    label_noise: Literal["none", "sample"] = "none",
    seed: int = 0,
) -> Source:
    """Two classes by an own linear rule of each client: the synthetic data of FedCLUP.

    `x ~ N(v_k, diag(j^-1.2))` with `v_k ~ N(0, I)`; the entries of `W_k` `[2, dim]` are `N(0, R^2)`, R being
    used as a standard deviation as in the released code; the label is `argmax W_k x`. Features are then
    divided by their standard deviation over the training samples of all clients.

    Args:
        clients: number of clients.
        samples: training samples of each client.
        test_samples: test samples of each client.
        dim: number of features.
        heterogeneity: R, standard deviation of the entries of `W_k`.
        label_noise: "none" as published, which makes the unregularised optimum infinite; "sample" draws the
            label from `softmax(W_k x)`, which makes it finite.
        seed: seed of the draw.

    Returns:
        A source with group `client` and `info["weights"]` `[clients, 2, dim]`, the true `W_k` for the scaled
        features.
    """
    require_positive(clients=clients, samples=samples, test_samples=test_samples, dim=dim)
    check_known("label_noise", label_noise, ("none", "sample"))
    rng = np.random.default_rng(seed)
    rows = samples + test_samples
    deviation = np.arange(1, dim + 1) ** -0.6
    x = rng.standard_normal((clients, 1, dim)) + deviation * rng.standard_normal((clients, rows, dim))
    weights = heterogeneity * rng.standard_normal((clients, 2, dim))
    scores = np.einsum("knd,kcd->knc", x, weights)
    if label_noise == "sample":
        # argmax of scores plus Gumbel noise is a draw from their softmax
        scores += rng.gumbel(size=scores.shape)
    scale = x[:, :samples].reshape(-1, dim).std(axis=0)
    return Source(
        name="synthetic_logistic",
        x=torch.from_numpy((x / scale).astype(np.float32)).reshape(-1, dim),
        y=torch.from_numpy(scores.argmax(axis=-1)).reshape(-1),
        task="classification",
        outputs=2,
        **client_layout(clients, samples, test_samples),
        info={"weights": torch.from_numpy(weights * scale)},
    )


@data_source("class prototypes plus noise, for thousands of clients")
def synthetic_digits(
    clients: int = 100,
    samples: int = 20,
    test_samples: int = 5,
    shape: Sequence[int] = (1, 8, 8),
    classes: int = 10,
    noise: float = 0.5,
    alpha: float | None = None,
    shift: float = 0.0,
    on_disk: bool = False,
    seed: int = 0,
) -> Source:
    """Random class prototypes plus noise, made at once for as many clients as wanted (100,000 in a few seconds).

    Args:
        clients: number of clients.
        samples: training samples of each client.
        test_samples: test samples of each client.
        shape: of one sample: `(1, 8, 8)` like the digits, `(784,)` like flat MNIST, or any other.
        classes: number of classes; a prototype is uniform in [0, 1].
        noise: standard deviation of the noise on every entry.
        alpha: label skew, class shares of a client ~ Dirichlet(alpha); None for equal shares.
        shift: feature skew, standard deviation of an offset that all samples of a client share.
        on_disk: whether samples are drawn once into a file of the cache folder (`TAILORFL_CACHE`), which this start and
            all later ones map: they read of it what is used. The numbers are the same.
        seed: seed of the draw.

    Returns:
        A float32 source with group `client` and `info["prototypes"]` `[classes, *shape]`.
    """
    require_positive(clients=clients, samples=samples, test_samples=test_samples, classes=classes)
    if noise < 0 or shift < 0 or (alpha is not None and alpha <= 0):
        raise ConfigError(
            f"noise and shift must not be negative, alpha above 0; given {noise}, {shift}, {alpha}"
        )
    rng = np.random.default_rng(seed)
    rows, size = samples + test_samples, int(np.prod(shape))
    prototypes = rng.random((classes, size), dtype=np.float32)
    label = _labels(rng, clients, rows, classes, alpha)
    # Torch draws normal numbers in half the time of NumPy; they are nearly all of the work here.
    fast = torch.Generator().manual_seed(int(rng.integers(2**63)))

    def fill(into: Floats) -> None:
        _draw_into(into, prototypes, label, noise, shift, (rng, fast))

    if on_disk:
        settings = (clients, samples, test_samples, classes, noise, alpha, shift, seed)
        x = _on_disk(settings, (clients, rows, size), tuple(shape), fill)
    else:
        drawn = np.empty((clients, rows, size), dtype=np.float32)
        fill(drawn)
        x = torch.from_numpy(drawn)
    x = x.reshape(-1, *shape)
    return Source(
        name="synthetic_digits",
        x=mark_finite(x),
        y=torch.from_numpy(label).reshape(-1),
        task="classification",
        outputs=classes,
        **client_layout(clients, samples, test_samples),
        info={"prototypes": torch.from_numpy(prototypes).reshape(classes, *shape)},
    )


def _draw_into(
    into: Floats,
    prototypes: Floats,
    label: NDArray[np.int64],
    noise: float,
    shift: float,
    generators: tuple[np.random.Generator, torch.Generator],
) -> None:
    """Draw the samples of all clients `[clients, rows, size]`, of some clients after the others."""
    rng, fast = generators
    block = max(1, _BLOCK // math.prod(into.shape[1:]))
    for first in range(0, len(into), block):
        drawn = into[first : first + block]
        torch.from_numpy(drawn).normal_(0.0, noise, generator=fast)
        drawn += prototypes[label[first : first + block]]
        if shift:
            drawn += np.float32(shift) * rng.standard_normal((len(drawn), 1, into.shape[2]), dtype=np.float32)
        if not np.isfinite(drawn).all():
            raise ConfigError(f"noise and shift must give numbers that float32 holds; given {noise}, {shift}")


def _on_disk(
    settings: object, drawn: tuple[int, ...], shape: tuple[int, ...], fill: Callable[[Floats], None]
) -> Tensor:
    """Return the samples `[clients, rows, size]` that `settings` draw, each of `shape`, from the file kept of them."""

    def make(working: Path) -> None:
        fill(np.memmap(working / _SAMPLES, dtype=np.float32, mode="w+", shape=drawn))

    def opened(entry: Path) -> Tensor | None:
        file = entry / _SAMPLES
        if not file.is_file() or file.stat().st_size != math.prod(drawn) * torch.float32.itemsize:
            return None
        return mapped(file, drawn, torch.float32)

    key = key_of(settings, (drawn[0] * drawn[1], *shape), torch.__version__)
    return cached(cache_folder() / "synthetic_digits", key, make, opened)


def _labels(
    rng: np.random.Generator, clients: int, rows: int, classes: int, alpha: float | None
) -> NDArray[np.int64]:
    """Labels `[clients, rows]`; by inverting the distribution function, for all clients at once."""
    if alpha is None:
        return rng.integers(classes, size=(clients, rows))
    cumulative = rng.dirichlet(np.full(classes, alpha), size=clients).cumsum(axis=1)
    draws = rng.random((clients, rows, 1))
    # the last edge is left out: rounding may leave it below 1, and no label may lie beyond it
    label: NDArray[np.int64] = (draws > cumulative[:, None, :-1]).sum(axis=-1, dtype=np.int64)
    return label
