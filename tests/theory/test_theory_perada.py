"""Phi is a distance, and the bounds hold for random predictions on finite data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailorfl.errors import ConfigError
from tailorfl.theory.perada import distillation_distance, error_bound, other_data_help, personal_gap

seeds = st.integers(0, 10_000)


def predictions(rng: np.random.Generator, *shape: int, sharpness: float = 0.3) -> np.ndarray:
    """`[..., classes]` random probabilities; the last number of `shape` is the number of classes."""
    return rng.dirichlet(np.full(shape[-1], sharpness), shape[:-1])


def test_distance_written_out() -> None:
    student = [[1.0, 0.0], [0.5, 0.5]]
    teachers = [[[0.0, 1.0], [0.5, 0.5]], [[1.0, 0.0], [0.1, 0.9]]]
    assert distillation_distance(student, teachers) == pytest.approx((1.0 + 0.4) / 2)
    assert personal_gap(student, [[0.0, 1.0], [0.7, 0.3]]) == pytest.approx((1.0 + 0.4) / 2)


@settings(deadline=None)
@given(seeds)
def test_distance_is_zero_at_the_mean_teacher_at_most_two_and_of_no_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    teachers, student = predictions(rng, 3, 20, 4), predictions(rng, 20, 4)
    distance = distillation_distance(student, teachers)
    assert distillation_distance(teachers.mean(0), teachers) == pytest.approx(0, abs=1e-12)
    assert 0 < distance <= 2
    order = rng.permutation(20)
    assert distillation_distance(student[order], teachers[:, order]) == pytest.approx(distance)
    assert distillation_distance(student, teachers[rng.permutation(3)]) == pytest.approx(distance)
    assert 0 <= personal_gap(student, teachers[0]) <= 1
    assert personal_gap(student, student) == 0


def test_opposite_predictions_are_two_apart() -> None:
    one, other = np.eye(2)[[0, 1]], np.eye(2)[[1, 0]]
    assert distillation_distance(one, [other, other]) == 2
    assert personal_gap(one, other) == 1


@settings(deadline=None)
@given(seeds, st.integers(2, 6), st.floats(0.02, 3))
def test_error_bound_holds_on_any_finite_data(seed: int, classes: int, sharpness: float) -> None:
    """Target and auxiliary data are two distributions over the same 15 samples."""
    rng = np.random.default_rng(seed)
    teachers = predictions(rng, 3, 15, classes, sharpness=sharpness)
    student = 0.7 * teachers.mean(0) + 0.3 * predictions(rng, 15, classes)
    personal = 0.8 * student + 0.2 * predictions(rng, 15, classes)
    right = np.where(rng.random(15) < 0.8, teachers.mean(0).argmax(1), rng.integers(0, classes, 15))
    target, auxiliary = rng.dirichlet(np.ones(15), 2)
    variation = 0.5 * np.abs(target - auxiliary).sum()
    rows = range(15)
    teacher_error = target @ (1 - teachers.mean(0)[rows, right])
    distance = auxiliary @ np.abs(student - teachers.mean(0)).sum(1)
    gap = target @ np.minimum(1, np.abs(personal - student).sum(1))
    wrong = target @ (student.argmax(1) != right)
    wrong_personal = target @ (personal.argmax(1) != right)
    assert wrong <= error_bound(teacher_error, distance, variation) + 1e-12
    assert wrong_personal <= error_bound(teacher_error, distance, variation, gap) + 1e-12
    # For one and the same student auxiliary data never beat measuring on the target.
    on_target = target @ np.abs(student - teachers.mean(0)).sum(1)
    assert on_target <= distance + 2 * variation + 1e-12


def test_bound_written_out() -> None:
    assert error_bound(0.1, 0.2) == pytest.approx(0.6)
    assert error_bound(0.1, 0.2, 0.05, 0.3) == pytest.approx(1.4)


@settings(deadline=None)
@given(st.floats(0, 1), st.floats(0, 2), st.floats(0, 1), st.floats(0, 2))
def test_other_data_help_exactly_when_the_bound_says_so(
    teacher_error: float, distance: float, variation: float, target_distance: float
) -> None:
    through_other = error_bound(teacher_error, distance, variation)
    direct = error_bound(teacher_error, target_distance)
    if abs(through_other - direct) > 1e-9:
        assert other_data_help(distance, variation, target_distance) == (through_other <= direct)


def test_impossible_values() -> None:
    good = np.full((3, 2), 0.5)
    with pytest.raises(ConfigError, match="student must hold probabilities"):
        distillation_distance(2 * good, [good])
    with pytest.raises(ConfigError, match=r"teachers must have the shape \[teachers, samples, classes\]"):
        distillation_distance(good, good)
    with pytest.raises(ConfigError, match=r"student has the shape \[3, 2\], but a teacher has \[2, 2\]"):
        distillation_distance(good, [good[:2]])
    with pytest.raises(ConfigError, match=r"personal has the shape \[2, 2\]"):
        personal_gap(good[:2], good)
    with pytest.raises(ConfigError, match="total_variation must be at most 1"):
        error_bound(0.1, 0.1, 1.5)
    with pytest.raises(ConfigError, match="distance must be 0 or a positive number"):
        error_bound(0.1, -0.1)
