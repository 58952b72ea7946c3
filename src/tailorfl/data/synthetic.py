"""Synthetic data sets: regression problems whose optimum is known, FedCLUP's logistic data, and class prototypes.

The loss convention of regression is `0.5 * (prediction - y)**2`, mean over samples, with a linear model without bias.
The mean loss of client i is then the quadratic `F_i(w) = 0.5 (w - c_i)' H_i (w - c_i) + constant` with `H_i = X'X / n`
and `c_i` the least squares solution, so methods can be checked against closed forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailorfl.data.registry import data_source
from tailorfl.data.source import Source
from tailorfl.data.storage import cache_folder, cached, key_of, mapped, mark_finite
from tailorfl.errors import ConfigError, check_known

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]

_SAMPLES = "samples.bin"
_BLOCK = 1 << 16  # numbers drawn and shifted at once: they stay in the cache and need no second copy


@data_source("linear regression with noise, optimum known")
def synthetic_linear(
    clients: int = 10,
    samples: int = 100,
    test_samples: int = 100,
    dim: int = 10,
    heterogeneity: float = 0.5,
    noise: float = 1.0,
    condition: float = 1.0,
    seed: int = 0,
) -> Source:
    """Linear regression `y = x'w_i + noise`, one weight vector per client around a common one.

    The weights have mean exactly `w*` (norm 1) over clients and root mean square distance exactly
    `heterogeneity` from it: R of the FedCLUP analysis. Features are `N(0, diag)` with variances spaced evenly
    in logarithm from 1 (mu) to `condition` (L). Group `client`; the test part is drawn separately.

    Args:
        clients: number of clients.
        samples: training samples of each client.
        test_samples: test samples of each client.
        dim: number of features.
        heterogeneity: R, distance of client weights from the common ones.
        noise: rho, standard deviation of the noise.
        condition: ratio of the largest to the smallest feature variance.
        seed: seed of the draw.

    Returns:
        A source whose `info` holds, in float64, `weights` `[clients, dim]` and `centre` `[dim]` (the truth),
        and of the training part `H` `[clients, dim, dim]`, `c` `[clients, dim]`, `p` `[clients]` and `pooled`
        `[dim]`.
    """
    require_positive(clients=clients, samples=samples, test_samples=test_samples, dim=dim)
    _require_spread(heterogeneity, condition)
    if noise < 0:
        raise ConfigError(f"noise must not be negative, but is {noise}")
    rng = np.random.default_rng(seed)
    centre, weights = _centre_and_weights(rng, clients, dim, heterogeneity)
    deviation = np.sqrt(np.geomspace(1.0, condition, dim))
    x = rng.standard_normal((clients, samples + test_samples, dim)) * deviation
    y = np.einsum("knd,kd->kn", x, weights) + noise * rng.standard_normal(x.shape[:2])
    return _regression("synthetic_linear", x, y, samples, weights=weights, centre=centre)


@data_source("quadratics as data, closed forms known")
def synthetic_quadratic(
    clients: int = 10,
    samples: int = 10,
    dim: int = 5,
    heterogeneity: float = 1.0,
    condition: float = 10.0,
    seed: int = 0,
) -> Source:
    """Quadratics as data: the mean loss of client i is exactly `0.5 (w - c_i)' H_i (w - c_i)`.

    `H_i` has eigenvalues spaced evenly in logarithm from 1 (mu) to `condition` (L) in a random basis of each
    client, and the `c_i` lie around a common centre as in `synthetic_linear`. Rows are chosen so that `X'X /
    n = H_i`, `y = X c_i`; the test part holds other rows of the same quadratic. Only full batches see `F_i`
    itself.

    Args:
        clients: number of clients.
        samples: training samples of each client, and as many test samples; at least `dim`.
        dim: number of weights.
        heterogeneity: root mean square distance of the `c_i` from their mean.
        condition: L / mu of every client.
        seed: seed of the draw.

    Returns:
        A source with the `info` of `synthetic_linear`; `H` and `c` are those of the float32 rows.
    """
    require_positive(clients=clients, samples=samples, dim=dim)
    _require_spread(heterogeneity, condition)
    if samples < dim:
        raise ConfigError(
            f"a quadratic in {dim} weights needs at least {dim} samples per client, but samples={samples}"
        )
    rng = np.random.default_rng(seed)
    centre, optima = _centre_and_weights(rng, clients, dim, heterogeneity)
    basis = np.linalg.qr(rng.standard_normal((clients, dim, dim)))[0]
    root = np.sqrt(np.geomspace(1.0, condition, dim))[:, None] * basis.transpose(0, 2, 1)
    parts = [np.linalg.qr(rng.standard_normal((clients, samples, dim)))[0] for _ in ("train", "test")]
    x = np.sqrt(samples) * np.concatenate([orthonormal @ root for orthonormal in parts], axis=1)
    y = np.einsum("knd,kd->kn", x, optima)
    return _regression("synthetic_quadratic", x, y, samples, weights=optima, centre=centre)


def local_quadratics(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(H, c)` of the half mean squared losses of all clients.

    Args:
        x: `[clients, samples, dim]`, the same number of samples for every client.
        y: `[clients, samples]`.

    Returns:
        `H = X'X / n`, `[clients, dim, dim]`, and the least squares solution `c`, `[clients, dim]` (the
        shortest if it is not unique), both float64.
    """
    x, y = x.double(), y.double()
    hessian = x.mT @ x / x.shape[1]
    return hessian, torch.linalg.lstsq(x, y.unsqueeze(-1), driver="gelsd").solution.squeeze(-1)


def pooled_optimum(H: Tensor, c: Tensor, p: Tensor) -> Tensor:
    """Return `(sum p_i H_i)^-1 sum p_i H_i c_i`, `[dim]`: the minimiser of the weighted sum of quadratics.

    Args:
        H: `[clients, dim, dim]` curvatures. c: `[clients, dim]` local optima. p: `[clients]` weights.
    """
    curvature = torch.einsum("k,kij->ij", p, H)
    optimum: Tensor = torch.linalg.solve(curvature, torch.einsum("k,kij,kj->i", p, H, c))
    return optimum


def closed_form(H: Tensor, c: Tensor, p: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """Return `(w*, v*)`, the minimiser of `sum_i p_i (F_i(v_i) + (lam/2) ||v_i - w||^2)` over `w` and all `v_i`.

    With `A_i = (H_i + lam I)^-1 H_i`, which equals `I - lam (H_i + lam I)^-1` but stays exact for large
    `lam`: `w* = (sum p_i A_i)^-1 sum p_i A_i c_i` and `v_i* = A_i c_i + (I - A_i) w*`. `lam=0` gives `v_i* =
    c_i` and `w* = sum p_i c_i`; a large `lam` brings all of them to `pooled_optimum`.

    Args:
        H: `[clients, dim, dim]`, positive definite. c: `[clients, dim]`. p: `[clients]`, summing to 1.
        lam: strength of the coupling, not negative.

    Returns:
        `w*` `[dim]` and `v*` `[clients, dim]` in the dtype of `H`.

    Raises:
        ConfigError: if `lam` is negative.
    """
    if lam < 0:
        raise ConfigError(f"lam must not be negative, but is {lam}")
    identity = torch.eye(H.shape[-1], dtype=H.dtype, device=H.device)
    pull = torch.linalg.solve(H + lam * identity, H)
    w = pooled_optimum(pull, c, p)
    v = w + torch.einsum("kij,kj->ki", pull, c - w)
    return w, v


def client_layout(clients: int, train: int, test: int) -> dict[str, Any]:
    """Return the fields of a `Source` whose rows are ordered by client, `train` then `test` rows of each."""
    return {
        "test": (torch.arange(train + test) >= train).repeat(clients),
        "groups": {"client": torch.arange(clients).repeat_interleave(train + test)},
        "group_names": {"client": tuple(map(str, range(clients)))},
    }


def require_positive(**counts: int) -> None:
    """Check that every count is at least 1. Raises ConfigError that names the first that is not."""
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, but is {value}")


def _require_spread(heterogeneity: float, condition: float) -> None:
    if heterogeneity < 0:
        raise ConfigError(f"heterogeneity must not be negative, but is {heterogeneity}")
    if condition < 1:
        raise ConfigError(f"condition must be at least 1, but is {condition}")


def _centre_and_weights(
    rng: np.random.Generator, clients: int, dim: int, radius: float
) -> tuple[Floats, Floats]:
    """Return a unit vector `[dim]`, and `[clients, dim]` with that mean and RMS distance `radius` from it."""
    centre = rng.standard_normal(dim)
    centre /= np.linalg.norm(centre)
    offsets = rng.standard_normal((clients, dim))
    offsets -= offsets.mean(axis=0)
    if clients > 1:
        offsets *= radius / np.sqrt((offsets**2).sum(axis=1).mean())
    return centre, centre + offsets


def _regression(name: str, x: Floats, y: Floats, samples: int, weights: Floats, centre: Floats) -> Source:
    """Return a source from `x` `[clients, rows, dim]`, `y` `[clients, rows]`; the first `samples` rows train."""
    features, targets = torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.float32))
    clients, rows, dim = x.shape
    H, c = local_quadratics(features[:, :samples], targets[:, :samples])
    p = torch.full((clients,), 1.0 / clients, dtype=torch.float64)
    info = {"weights": torch.from_numpy(weights), "centre": torch.from_numpy(centre), "H": H, "c": c, "p": p}
    if clients * samples >= dim:
        info["pooled"] = pooled_optimum(H, c, p)
    return Source(
        name=name,
        x=features.reshape(-1, dim),
        y=targets.reshape(-1, 1),
        task="regression",
        outputs=1,
        info=info,
        **client_layout(clients, samples, rows - samples),
    )


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
    """Two classes by each client's own linear rule: the synthetic data of FedCLUP.

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
    """Random class prototypes plus noise, drawn at once for any number of clients (100,000 in a few seconds).

    Args:
        clients: number of clients.
        samples: training samples of each client.
        test_samples: test samples of each client.
        shape: of one sample: `(1, 8, 8)` like the digits, `(784,)` like flat MNIST, or any other.
        classes: number of classes; a prototype is uniform in [0, 1].
        noise: standard deviation of the noise on every entry.
        alpha: label skew, class shares of a client ~ Dirichlet(alpha); None for equal shares.
        shift: feature skew, standard deviation of an offset that all samples of a client share.
        on_disk: whether samples are drawn once into a file of the cache folder (`TAILORFL_CACHE`), which this and later
            runs map, reading only the samples they use. The numbers are the same.
        seed: seed of the draw.

    Returns:
        A float32 source with group `client` and `info["prototypes"]` `[classes, *shape]`.
    """
    require_positive(clients=clients, samples=samples, test_samples=test_samples, classes=classes)
    if noise < 0 or shift < 0 or (alpha is not None and alpha <= 0):
        raise ConfigError(
            f"noise and shift must not be negative, and alpha must be above 0; got {noise}, {shift}, {alpha}"
        )
    rng = np.random.default_rng(seed)
    rows, size = samples + test_samples, int(np.prod(shape))
    prototypes = rng.random((classes, size), dtype=np.float32)
    label = _labels(rng, clients, rows, classes, alpha)
    # Torch draws normal numbers in half the time of NumPy; they are nearly all of the work here.
    fast = torch.Generator().manual_seed(int(rng.integers(2**63)))

    def fill(into: Singles) -> None:
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
    into: Singles,
    prototypes: Singles,
    label: NDArray[np.int64],
    noise: float,
    shift: float,
    generators: tuple[np.random.Generator, torch.Generator],
) -> None:
    """Draw the samples of all clients `[clients, rows, size]`, a block of clients at a time."""
    rng, fast = generators
    block = max(1, _BLOCK // math.prod(into.shape[1:]))
    for first in range(0, len(into), block):
        drawn = into[first : first + block]
        torch.from_numpy(drawn).normal_(0.0, noise, generator=fast)
        drawn += prototypes[label[first : first + block]]
        if shift:
            drawn += np.float32(shift) * rng.standard_normal((len(drawn), 1, into.shape[2]), dtype=np.float32)
        if not np.isfinite(drawn).all():
            raise ConfigError(
                f"noise and shift must give numbers that fit into float32; got {noise}, {shift}"
            )


def _on_disk(
    settings: object, drawn: tuple[int, ...], shape: tuple[int, ...], fill: Callable[[Singles], None]
) -> Tensor:
    """Return the samples `[clients, rows, size]` drawn with `settings`, each of `shape`, from their cached file."""

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
    """Draw labels `[clients, rows]`, by inverting the distribution function for all clients at once."""
    if alpha is None:
        return rng.integers(classes, size=(clients, rows))
    cumulative = rng.dirichlet(np.full(classes, alpha), size=clients).cumsum(axis=1)
    draws = rng.random((clients, rows, 1))
    # the last edge is left out: rounding may leave it below 1, and no label may lie beyond it
    label: NDArray[np.int64] = (draws > cumulative[:, None, :-1]).sum(axis=-1, dtype=np.int64)
    return label
