"""Temperature scaling (Guo et al., ICML 2017): one number by which a client's logits are divided.

    T = argmin_T −(1/n) Σ_j log softmax(z_j / T)[y_j]   over the client's VALIDATION part

The predicted class stays what it is; probabilities become those that the validation samples bear out. In β = 1/T the
loss is convex, so T is where its derivative mean(Σ_k p_k z_k − z_y) changes its sign, between 1/HIGHEST and HIGHEST.
"""

from __future__ import annotations

import numpy as np

from tailorfl.evaluation.calibration import Reliability, brier, probabilities
from tailorfl.evaluation.parts import Floats
from tailorfl.evaluation.predictions import Predictions

HIGHEST = 10.0
"""A temperature lies between one over this and this: separable samples would have 0."""
FEWEST = 50
"""Validation samples from which on a temperature is fitted. With fewer it does more harm than good: of two classes and
logits that are 1.5 times as large as they should be, the likelihood of new samples falls on average with 20 and 30
samples and rises with 50; where logits are right it falls by 0.015 with 50, by 0.002 with 200."""


def fitted(predictions: Predictions) -> float | None:
    """Return the temperature of one client's validation part.

    None with fewer than `FEWEST` samples, and of a model whose outputs are not finite.
    """
    from scipy.optimize import brentq
    from scipy.special import logsumexp

    if len(predictions.y) < FEWEST or not np.isfinite(predictions.outputs).all():
        return None
    logits, y = _logits(predictions), predictions.y.ravel().astype(np.int64)

    def slope(log_beta: float) -> float:
        beta = float(np.exp(log_beta))
        scaled = beta * logits
        p = np.exp(scaled - logsumexp(scaled, axis=1, keepdims=True))
        return float(((p * logits).sum(1) - logits[np.arange(len(y)), y]).mean())

    end = float(np.log(HIGHEST))
    low, high = slope(-end), slope(end)
    if low == high == 0.0:
        return 1.0  # all logits of a sample are equal: no temperature changes anything
    if low >= 0:
        return HIGHEST
    if high <= 0:
        return 1 / HIGHEST
    return float(np.exp(-brentq(slope, -end, end, xtol=1e-10)))


def measures(predictions: Predictions, temperature: float = 1.0) -> dict[str, float]:
    """Return ece, brier and nll (mean negative log-likelihood) of one client's samples; NaN without any."""
    from scipy.special import logsumexp

    y = predictions.y.ravel().astype(np.int64)
    p = probabilities(predictions.task, predictions.outputs, temperature)
    logits = _logits(predictions) / temperature
    nll = logsumexp(logits, axis=1) - logits[np.arange(len(y)), y] if len(y) else np.array([np.nan])
    return {"ece": Reliability.of(p, y).error, "brier": brier(p, y), "nll": float(nll.mean())}


def _logits(predictions: Predictions) -> Floats:
    """Of every class, float64 [samples, classes]."""
    logits = predictions.outputs.astype(np.float64)
    return np.concatenate([np.zeros_like(logits), logits], axis=1) if predictions.task == "binary" else logits
