"""Synthetic classification: FedCLUP's logistic generator, and class prototypes for very many clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from tailorfl.data.source import Source
from tailorfl.data.synthetic import client_layout, require_positive
from tailorfl.errors import ConfigError

_BLOCK = 1 << 16  # numbers drawn and shifted at once: they stay in the cache and need no second copy


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
        clients, samples, test_samples: number of clients, and of training and test samples of each.
        dim: number of features.
        heterogeneity: R.
        label_noise: "none" as published, which makes the unregularised optimum infinite; "sample" draws the
            label from `softmax(W_k x)`, which makes it finite.
        seed: of the draw.

    Returns:
        A source with group `client` and `info["weights"]` `[clients, 2, dim]`, the true `W_k` for the scaled
        features.
    """
    require_positive(clients=clients, samples=samples, test_samples=test_samples, dim=dim)
    if label_noise not in ("none", "sample"):
        raise ConfigError(f"label_noise must be 'none' or 'sample', but is '{label_noise}'")
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
    test, groups, group_names = client_layout(clients, samples, test_samples)
    return Source(
        name="synthetic_logistic",
        x=torch.from_numpy((x / scale).astype(np.float32)).reshape(-1, dim),
        y=torch.from_numpy(scores.argmax(axis=-1)).reshape(-1),
        task="classification",
        outputs=2,
        test=test,
        groups=groups,
        group_names=group_names,
        info={"weights": torch.from_numpy(weights * scale)},
    )


def synthetic_digits(
    clients: int = 100,
    samples: int = 20,
    test_samples: int = 5,
    shape: Sequence[int] = (1, 8, 8),
    classes: int = 10,
    noise: float = 0.5,
    alpha: float | None = None,
    shift: float = 0.0,
    seed: int = 0,
) -> Source:
    """Random class prototypes plus noise, made at once for as many clients as wanted (100,000 in a few seconds).

    Args:
        clients, samples, test_samples: number of clients, and of training and test samples of each.
        shape: of one sample: `(1, 8, 8)` like the digits, `(784,)` like flat MNIST, or any other.
        classes: number of classes; a prototype is uniform in [0, 1].
        noise: standard deviation of the noise on every entry.
        alpha: label skew, class shares of a client ~ Dirichlet(alpha); None for equal shares.
        shift: feature skew, standard deviation of an offset that all samples of a client share.
        seed: of the draw.

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
    x = np.empty((clients, rows, size), dtype=np.float32)
    block = max(1, _BLOCK // (rows * size))
    for first in range(0, clients, block):
        part = slice(first, first + block)
        drawn = x[part]
        torch.from_numpy(drawn).normal_(0.0, noise, generator=fast)
        drawn += prototypes[label[part]]
        if shift:
            drawn += np.float32(shift) * rng.standard_normal((len(drawn), 1, size), dtype=np.float32)
    test, groups, group_names = client_layout(clients, samples, test_samples)
    return Source(
        name="synthetic_digits",
        x=torch.from_numpy(x).reshape(-1, *shape),
        y=torch.from_numpy(label).reshape(-1),
        task="classification",
        outputs=classes,
        test=test,
        groups=groups,
        group_names=group_names,
        info={"prototypes": torch.from_numpy(prototypes).reshape(classes, *shape)},
    )


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
