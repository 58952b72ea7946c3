"""Every number that the advisor recommends, written out; and what its pilot's numbers become."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import Any

import numpy as np
import pytest

from tailorfl.data.federation import Federation
from tailorfl.data.synthetic import synthetic_linear
from tailorfl.errors import DataError
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.theory.advisor import Advice, conclude
from tailorfl.theory.fedclup import schedule
from tailorfl.theory.measures import Curvature
from tailorfl.theory.objective import Objective
from tailorfl.theory.pilot import Pilot, run_pilot
from tailorfl.theory.recommend import Errors, Recommendation, Situation, perfed_ckt, recommendations
from tailorfl.theory.spread import client_spread
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.objective import LOSSES

MU, L, LAM = 1.0, 10.0, 1.0
WHOLE = Situation(LAM, L, MU, 13.0, 100, 4, 0.1, Errors(alone=1.0, pooled=2.0, coupled=0.5), initial=50.0)
"""Optima can be reached: 0.1 * 0.5 / 50 = 1e-3 of the first error may be left."""
BATCHES = dataclasses.replace(WHOLE, mu=math.nan)
"""They cannot: L (1 + 1/4) + 13/4 = 15.75 is the largest curvature of a batch of 4."""


def by_name(here: Situation) -> dict[str, Recommendation]:
    return {found.method: found for found in recommendations(here)}


def test_share_of_the_first_error_that_may_be_left() -> None:
    assert WHOLE.target == pytest.approx(1e-3)
    assert dataclasses.replace(WHOLE, initial=1e-9).target == 0.5
    assert dataclasses.replace(WHOLE, errors=Errors(1, 1, 0.25)).target == pytest.approx(5e-4)


def test_fedclup_has_the_settings_of_corollary_2() -> None:
    """eta = 1/11, K = 35, gamma = .55, rate 1 - 11/(4 * 10 * 2) = .8625: ln 1e-3 / ln .8625 = 46.7 rounds."""
    found = by_name(WHOLE)["fedclup"]
    assert found.options == {"lam": 1.0, "gamma": "theory", "smoothness": 10.0}
    assert found.train == {"lr": 0.0909, "steps": 35, "batch_size": 0}
    assert found.rounds == math.ceil(math.log(1e-3) / math.log(0.8625)) == 47
    assert "gamma = 0.55, K = 35, rate 0.863 per round" in found.why


@pytest.mark.parametrize(("lam", "beta"), [(1.0, 0.55), (0.5, 0.525), (30.0, 2.0), (100.0, 2.0)])
def test_pfedme_with_one_repetition_is_fedclup(lam: float, beta: float) -> None:
    """beta = lam gamma = (lam + L) / (2 L), at most 2; eta lam = 1; rounds of Theorem 2 for that gamma."""
    found = by_name(dataclasses.replace(WHOLE, lam=lam))["pfedme"]
    steps = math.log(16 * (2 + 64 * lam**2)) / math.log((lam + L) / (L - MU))
    assert found.options == {
        "lam": lam,
        "inner_steps": math.ceil(steps),
        "local_rounds": 1,
        "lr": float(f"{1 / lam:.3g}"),
        "personal_lr": float(f"{1 / (lam + L):.3g}"),
        "beta": beta,
    }
    x = beta / lam * lam * MU / (lam + MU)
    assert found.rounds == math.ceil(math.log(1e-3) / math.log(1 - x / 2 - x**2 / 2))
    assert found.train == {"batch_size": 0}


@pytest.mark.parametrize(
    ("samples", "batch", "lr", "repetitions", "rate"),
    [
        (100, 4, 0.1, 20, 0.05),  # 25 batches a pass, at most 20
        (12, 4, 0.01, 3, 0.333),
        (10, 4, 0.1, 3, 0.333),
        (100, 0, 0.1, 1, 1.0),  # whole data: one
        (3, 8, 0.1, 1, 1.0),
    ],
)
def test_pfedme_on_batches_moves_its_copy_by_one_exact_step(
    samples: int, batch: int, lr: float, repetitions: int, rate: float
) -> None:
    """eta lam R = 1, with R the batches of a pass."""
    here = dataclasses.replace(BATCHES, samples=samples, batch=batch, lr=lr)
    found = by_name(here)["pfedme"]
    of_a_batch = L if batch == 0 else L + (L + 13.0) / min(batch, samples)
    assert found.options == {
        "lam": 1.0,
        "inner_steps": 5,
        "local_rounds": repetitions,
        "lr": rate,
        "personal_lr": float(f"{min(lr, 1 / (of_a_batch + LAM)):.3g}"),
    }
    assert (found.train, found.rounds) == ({}, None)
    double = by_name(dataclasses.replace(here, lam=2.0))["pfedme"]
    assert double.options["lr"] == pytest.approx(rate / 2, rel=4e-3)


def test_ditto_and_perada_descend_by_the_step_of_the_pulled_problem() -> None:
    """(1 - 1/11)^(2 * 5 T) <= 1e-3 for T = 7.2; five steps a round on all data."""
    found = by_name(WHOLE)
    ditto = found["ditto"]
    assert ditto.options == {"lam": 1.0}
    assert ditto.train == {"lr": 0.0909, "steps": 5, "batch_size": 0}
    assert ditto.rounds == math.ceil(math.log(1e3) / (10 * -math.log(1 - 1 / 11))) == 8
    assert "keeps at most 0.909 of the distance" in ditto.why
    perada = found["perada"]
    assert (perada.options, perada.train, perada.rounds) == (ditto.options, ditto.train, ditto.rounds)


@pytest.mark.parametrize(
    ("batch", "trace", "curvature"),
    [
        (1, 13.0, 10 + 23),
        (2, 13.0, 10 + 23 / 2),
        (4, 0.5, 10 + 10.5 / 4),
        (4, -3.0, 10 + 10 / 4),
        (0, 13.0, 10),
    ],
)
def test_curvature_of_a_batch(batch: int, trace: float, curvature: float) -> None:
    """An estimated trace below 0 counts as 0; a batch of one has all the noise, the whole data have none."""
    here = dataclasses.replace(BATCHES, batch=batch, trace=trace, lr=10.0)
    found = by_name(here)
    assert found["ditto"].train == {"lr": float(f"{1 / (curvature + 1):.3g}")}
    repetitions = 20 if batch else 1
    assert found["pfedme"].options["local_rounds"] == repetitions
    assert found["pfedme"].options["personal_lr"] == found["ditto"].train["lr"]


def test_one_step_is_enough_where_all_curvatures_are_equal() -> None:
    """mu = L: a step of 1/L is exact."""
    here = dataclasses.replace(WHOLE, mu=L, errors=Errors(0.5, 0.5, 0.5))
    assert {by_name(here)[name].rounds for name in ("fedavg", "local")} == {1}


def test_settings_on_batches_without_a_theory() -> None:
    """The run's .1 is above 1/(15.75 + 1) and is lowered; no rounds are named."""
    found = by_name(BATCHES)
    assert list(found) == ["fedclup", "ditto", "pfedme", "perada"]
    assert found["fedclup"].options == {"lam": 1.0, "gamma": "mean"}
    for name in ("fedclup", "ditto", "perada"):
        assert found[name].train == {"lr": float(f"{1 / 16.75:.3g}")}
        assert found[name].rounds is None
    slow = by_name(dataclasses.replace(BATCHES, lr=0.05))
    assert slow["ditto"].train == {}


@pytest.mark.parametrize(
    ("alone", "pooled", "expected"),
    [(1.0, 1.0, []), (0.524, 2.0, ["local"]), (0.526, 0.524, ["fedavg"]), (0.5, 0.5, ["fedavg", "local"])],
)
def test_plain_baselines_are_named_where_the_pull_gains_less_than_a_twentieth(
    alone: float, pooled: float, expected: list[str]
) -> None:
    here = dataclasses.replace(WHOLE, errors=Errors(alone, pooled, 0.5))
    found = recommendations(here)
    assert [r.method for r in found] == [*expected, "fedclup", "ditto", "pfedme", "perada"]
    for plain in found[: len(expected)]:  # no pull: a step of 1/L
        assert plain.train == {"lr": 0.1, "steps": 5, "batch_size": 0}
        assert plain.rounds == math.ceil(math.log(1e3) / (10 * -math.log(0.9)))
        assert plain.options == {}
        assert f"{alone if plain.method == 'local' else pooled:.3g}, that of the best pull 0.5" in plain.why
    without = recommendations(dataclasses.replace(here, mu=math.nan))
    assert [r.method for r in without] == ["fedclup", "ditto", "pfedme", "perada"]


def test_perfed_ckt_takes_the_median_of_what_can_be_seen() -> None:
    (found,) = perfed_ckt([3.0, math.inf, 1.0, 0.0, -1.0, math.nan, 2.0001])
    assert found.options == {"lam": 2.0}
    assert found.to_config() == {"name": "perfed_ckt", "lam": 2.0}
    assert perfed_ckt([math.inf, 0.0, math.nan]) == ()


# what becomes of a pilot's numbers

CLIENTS, SAMPLES, DIM = 6, 40, 3
APART = np.full((CLIENTS, CLIENTS), 1.0) + 3.0 * CLIENTS / (CLIENTS - 1) * np.eye(CLIENTS)
"""Products of optima with R^2 = 3: the trace / N less the mean."""
CURVED = Curvature(smoothness=4.0, mu=0.5, client_smoothness=5.0, client_mu=0.25, trace=6.0, flat=0)


@cache
def measured() -> tuple[Federation, Pilot]:
    source = synthetic_linear(CLIENTS, SAMPLES, 1, DIM, 0.5, noise=1.0, seed=3)
    client, test = source.groups["client"], source.test
    train = tuple(np.flatnonzero((client == i) & ~test) for i in range(CLIENTS))
    none = tuple(np.empty(0, dtype=np.int64) for _ in train)
    federation = Federation(source, train, none, none, source.group_names["client"], CLIENTS)
    model = Model(lambda: build("linear", source.input_shape, source.outputs))
    objective = Objective(model, LOSSES[source.task], source, model.init(0))
    return federation, run_pilot(federation, objective, TrainConfig())


def advised(found: Curvature = CURVED, rho2: float = 2.0, **changes: Any) -> Advice:
    federation, pilot = measured()
    train = TrainConfig(lr=0.07, batch_size=8)
    return conclude(federation, dataclasses.replace(pilot, **changes), found, np.full(CLIENTS, rho2), train)


@pytest.mark.parametrize(("mode", "strongest"), [("optimum", 30 * 5.0), ("training", 5.0)])
def test_clients_that_do_not_differ_get_the_largest_pull(mode: str, strongest: float) -> None:
    """30 times the client's L where optima can be reached, else L itself, which halves the step size."""
    advice = advised(mode=mode, gram=np.zeros((CLIENTS, CLIENTS)))
    assert advice.lam.value == pytest.approx(strongest)
    assert advice.facts.radius.value == 0
    assert by_config(advice, "ditto")["lam"] == pytest.approx(strongest)


def by_config(advice: Advice, method: str) -> dict[str, Any]:
    return next(r.to_config() for r in advice.recommendations if r.method == method)


def test_the_pull_is_the_excess_over_the_heterogeneity() -> None:
    """E = rho^2 r / (tr n) = 2 * 3 / (6 * 40)."""
    advice = advised(gram=APART)
    assert advice.facts.radius2 == pytest.approx(3.0)
    assert advice.facts.excess == pytest.approx(2 * DIM / (6 * SAMPLES))
    assert advice.lam.value == pytest.approx((1 - 1 / CLIENTS) * 2 * DIM / (6 * SAMPLES) / 3.0)
    assert advice.facts.radius.value == pytest.approx(math.sqrt(3.0))
    assert advice.facts.rho.value == pytest.approx(math.sqrt(2.0))
    # Whole-data halves of 40 samples in 3 directions err as 1/(20 - 4), the whole as 1/(40 - 4).
    gaps = measured()[1].gaps
    assert advice.facts.noise.value == pytest.approx(float((gaps / 4 * (40 - 8) / (40 - 4)).mean()))


def test_excess_of_trained_models_is_a_quarter_of_their_gap_in_the_curvature() -> None:
    curved = np.linspace(0.1, 0.6, CLIENTS)
    gaps = np.linspace(1.0, 2.0, CLIENTS)
    advice = advised(mode="training", curved=curved, gaps=gaps)
    assert advice.facts.excess == pytest.approx(curved.mean() / 4)
    assert advice.facts.noise.value == pytest.approx(gaps.mean() / 4)
    assert advice.corollary is None


def test_settings_follow_from_the_clients_curvature_and_from_where_training_begins() -> None:
    """L and mu of single clients, not of their mean; rounds from the distance travelled and R^2 together."""
    advice = advised(gram=APART, travelled=9.0)
    lam = advice.lam.value
    ditto = by_config(advice, "ditto")
    assert ditto["train"]["lr"] == pytest.approx(1 / (lam + 5.0), rel=2e-3)
    target = min(0.5, 0.1 * advice.errors.coupled / (9.0 + 3.0))
    left = -math.log(1 - 0.25 / (lam + 5.0))
    assert ditto["rounds"] == math.ceil(math.log(1 / target) / (10 * left))
    assert by_config(advice, "fedclup")["smoothness"] == 5.0


def test_a_pull_of_almost_nothing_is_named_all_the_same() -> None:
    """lam is at least 1e-4 L in settings, since step sizes divide by it."""
    advice = advised(gram=1e9 * np.eye(CLIENTS))
    assert advice.lam.value < 1e-9
    assert by_config(advice, "ditto")["lam"] == pytest.approx(4e-4)


def test_no_theory_for_clients_that_do_not_determine_their_weights() -> None:
    trained = by_config(advised(mode="training"), "ditto")
    flat = by_config(advised(dataclasses.replace(CURVED, client_mu=0.0)), "ditto")
    assert "rounds" not in flat
    assert "rounds" not in trained
    # L (1 + 1/8) + 6/8 for batches of 8, and the run's .07 stands it.
    assert "train" not in trained or trained["train"]["lr"] < 0.07


def uneven(sizes: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(rows[:size] for rows, size in zip(measured()[1].rows, sizes, strict=True))


def test_samples_of_a_client_are_a_harmonic_mean_and_small_halves_err_more_than_twice_as_much() -> None:
    """With r = 3, of n samples (n - 8) / (n - 4), neither below 1: errors go as 1 / n, so must their mean."""
    sizes = (4, 6, 9, 20, 40, 40)
    advice = advised(rows=uneven(sizes))
    assert advice.facts.samples == pytest.approx(6 / sum(1 / n for n in sizes))
    assert advice.facts.median_samples == 14.5
    factors = [1 / 1, 1 / 2, 1 / 5, 12 / 16, 32 / 36, 32 / 36]
    gaps = measured()[1].gaps
    assert advice.facts.noise.value == pytest.approx(float((gaps / 4 * np.array(factors)).mean()))
    assert advice.facts.excess == pytest.approx(float(np.mean([2.0 * DIM / (6 * n) for n in sizes])))


@pytest.mark.parametrize(
    ("spreads", "gap"), [((12, 6, 3, 1, 0, 0), 0.3), ((900, 600, 300, 100, -1e4, -1e4), 300.0)]
)
def test_transfer_between_clients_is_theorem_4_2_of_perfed_ckt(
    spreads: tuple[float, ...], gap: float
) -> None:
    """A weight's noise is V / d beside v_k^2; a spread below a thousandth of it cannot be seen.

    Whose spread cannot be seen is left to the others.
    """
    gram, gaps = np.diag(spreads), np.full(CLIENTS, gap)
    transfer, noise = advised(gram=gram, gaps=gaps).transfer, gap / 4 * 32 / 36
    seen, least = client_spread(gram, gaps / 2, DIM), 1e-3 * noise / DIM
    v2, shown = np.maximum(seen, least), seen > least
    assert 0 < shown.sum() < CLIENTS or gap < 1
    assert transfer.v2 == pytest.approx(seen)
    excess = 2.0 * DIM / (6 * SAMPLES)
    assert np.array(transfer.pull)[shown] == pytest.approx(excess / (DIM * v2[shown]))
    assert np.isinf(np.array(transfer.pull)[~shown]).all()
    assert np.isfinite(transfer.lam).tolist() == shown.tolist()
    share = 1 / (noise / DIM + v2)
    assert transfer.alpha == pytest.approx(share / share.sum())
    assert transfer.own_weight == pytest.approx(np.where(shown, v2 / (noise / DIM + v2), 0.0))
    assert len(transfer.clients) == CLIENTS


@pytest.mark.parametrize("broken", [{"mu": 0.0}, {"mu": -1.0}])
def test_corollary_1_needs_a_curvature_and_a_noise(broken: dict[str, float]) -> None:
    assert advised(dataclasses.replace(CURVED, **broken)).corollary is None  # type: ignore[arg-type]
    assert advised(rho2=0.0).corollary is None
    far = advised(gram=1e4 * np.eye(CLIENTS))
    assert far.corollary is not None
    radius2 = 1e4 * (1 - 1 / CLIENTS)
    assert far.corollary.upper == pytest.approx(2.0 / (SAMPLES * 0.5 * radius2))


def test_nothing_to_learn_from_is_an_error() -> None:
    for changes in ({"gaps": np.zeros(CLIENTS)}, {"gaps": np.full(CLIENTS, math.inf)}):
        with pytest.raises(DataError, match="so there is no noise to compare"):
            advised(**changes)
    with pytest.raises(DataError, match="so there is no noise to compare"):
        advised(dataclasses.replace(CURVED, smoothness=0.0))


def test_intervals_come_from_resampled_clients() -> None:
    """Values far below 1 stay what they are: nothing is floored at a number that has a unit."""
    advice = advised(gram=np.diag([0.012, 0.006, 0.003, 0.02, 0.01, 0.004]), rho2=0.02)
    for interval in (advice.lam, advice.facts.radius, advice.facts.noise, advice.facts.rho):
        assert 0 < interval.low <= interval.value <= interval.high
        assert interval.high < 1
    assert advice.facts.radius.low < advice.facts.radius.value < advice.facts.radius.high
    assert not any("cannot be distinguished from 0" in note for note in advice.notes)
    assert advised(dataclasses.replace(CURVED, smoothness=0.8)).lam.value > 0
    few = advised(rows=uneven((4,) * CLIENTS), rho2=0.3, gram=1e4 * np.eye(CLIENTS))
    assert few.corollary is not None
    assert few.corollary.upper == pytest.approx(0.3 / (4 * 0.5 * 1e4 * (1 - 1 / CLIENTS)))
    # Alike clients add nothing to the way from the start; .1 of the error of the pull may be left of it.
    near = advised(gram=np.zeros((CLIENTS, CLIENTS)), travelled=0.2)
    target = 0.1 * near.errors.coupled / 0.2
    rounds = by_config(near, "fedclup")["rounds"]
    assert rounds == schedule(0.25, 5.0, near.lam.value).rounds(target)
