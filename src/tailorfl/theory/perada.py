"""PerAda: how far the distilled global model is from its teachers, and what that means for its error.

"PerAda: Parameter-Efficient Federated Learning Personalization with Generalization Guarantees" (CVPR 2024),
the generalization bounds. All arguments called predictions are class probabilities, one row a sample.

    paper         here
    g             student, the global model after distillation
    h_m           teachers, the clients' locally trained copies of it
    p_m           personal, a client's own model
    Phi           distillation_distance, a mean L1 distance in [0, 2]
    ERR           teacher_error: mean probability that the averaged teachers give to wrong classes
    TV(D, D_aux)  total_variation of target and distillation data, in [0, 1]

The algorithm distils the softmax of averaged logits; Phi takes the average of softmax outputs, as the
theory does.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailorfl.errors import ConfigError
from tailorfl.theory.checks import require_not_negative

Floats = NDArray[np.float64]


def distillation_distance(student: ArrayLike, teachers: ArrayLike) -> float:
    """Phi = `(1/n) sum_x || g(x) - (1/M) sum_m h_m(x) ||_1`, in [0, 2].

    Args:
        student: `[samples, classes]` predictions.
        teachers: `[teachers, samples, classes]` predictions.

    Raises:
        ConfigError: if the shapes do not fit or rows are not probability vectors.
    """
    g, h = _probabilities("student", student, 2), _probabilities("teachers", teachers, 3)
    _same_shape("student", g, "a teacher", h[0])
    return float(np.abs(g - h.mean(axis=0)).sum(axis=1).mean())


def personal_gap(personal: ArrayLike, student: ArrayLike) -> float:
    """`(1/n) sum_x min(1, || p_m(x) - g(x) ||_1)`, in [0, 1]: distance of a personal from the global model.

    Args:
        personal: `[samples, classes]` predictions of the client's own model.
        student: `[samples, classes]` predictions of the global model.

    Raises:
        ConfigError: if the shapes do not fit or rows are not probability vectors.
    """
    p, g = _probabilities("personal", personal, 2), _probabilities("student", student, 2)
    _same_shape("personal", p, "student", g)
    return float(np.minimum(1, np.abs(p - g).sum(axis=1)).mean())


def error_bound(
    teacher_error: float, distance: float, total_variation: float = 0.0, gap: float = 0.0
) -> float:
    """Bound on the share of wrong answers, `2 ERR + 2 Phi + 4 TV`, and `+ 2 gap` for a personal model.

    An answer is wrong only if the right class has a probability of at most 1/2, hence the factor 2; TV
    counts twice because Phi reaches up to 2. The terms for estimating ERR and Phi from samples (complexity
    and confidence) are not included, so this is the bound for expectations. A value of 1 or more says
    nothing.

    Args:
        teacher_error: ERR on target data.
        distance: Phi on distillation data.
        total_variation: between distillation and target data; 0 if they are the same.
        gap: `personal_gap` on target data; 0 for the global model.

    Raises:
        ConfigError: if an argument is negative or beyond its range.
    """
    parts = {"teacher_error": teacher_error, "total_variation": total_variation, "gap": gap}
    require_not_negative(distance=distance, **parts)
    for name, value, most in [("distance", distance, 2.0), *((k, v, 1.0) for k, v in parts.items())]:
        if value > most:
            raise ConfigError(f"{name} must be at most {most:g}, but is {value}")
    return 2 * teacher_error + 2 * distance + 4 * total_variation + 2 * gap


def other_data_help(distance: float, total_variation: float, target_distance: float) -> bool:
    """Whether distilling on other data gives a bound no worse: `Phi_aux + 2 TV <= Phi_target`.

    The two distances belong to two students: one distilled on the auxiliary data and measured there, the
    other (not distilled, or distilled on few target data) measured on target data. For one and the same
    student Phi_target never exceeds the left side.

    Raises:
        ConfigError: if an argument is negative.
    """
    require_not_negative(distance=distance, total_variation=total_variation, target_distance=target_distance)
    return distance + 2 * total_variation <= target_distance


def _probabilities(name: str, values: ArrayLike, dimensions: int) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != dimensions or 0 in array.shape:
        shape = ("[samples, classes]", "[teachers, samples, classes]")[dimensions - 2]
        raise ConfigError(f"{name} must have the shape {shape}, but has {list(array.shape)}")
    if not (np.all(array >= 0) and np.allclose(array.sum(axis=-1), 1, atol=1e-4)):
        raise ConfigError(f"{name} must hold probabilities that sum to 1 over classes; apply softmax first")
    return array


def _same_shape(name: str, array: Floats, other: str, wanted: Floats) -> None:
    if array.shape != wanted.shape:
        raise ConfigError(
            f"{name} has the shape {list(array.shape)}, but {other} has {list(wanted.shape)}; both must be "
            "predictions for the same samples"
        )
