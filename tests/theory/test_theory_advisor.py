"""The advisor on problems whose R, rho, L, mu and best lam are known."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import cache

import numpy as np
import pytest
import torch

from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.data.synthetic import closed_form, synthetic_linear, synthetic_quadratic
from tailorfl.data.synthetic_classes import synthetic_digits, synthetic_logistic
from tailorfl.errors import ConfigError, DataError, DivergenceError
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.theory.advice import Advice
from tailorfl.theory.advisor import advise
from tailorfl.theory.measures import curvature, gradient_noise
from tailorfl.theory.objective import Objective
from tailorfl.theory.pilot import run_pilot
from tailorfl.theory.recommend import Situation
from tailorfl.theory.shrinkage import Errors
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.objective import LOSSES

CLIENTS, SAMPLES, DIM = 10, 200, 8
RADII = [0.0, 0.1, 0.5, 2.0]


def natural(source: Source) -> Federation:
    """Every group `client` of the source as a client; its test part tests."""
    test = torch.zeros(len(source), dtype=torch.bool) if source.test is None else source.test
    rows = [
        torch.nonzero((source.groups["client"] == i) & ~test)[:, 0].numpy()
        for i in range(len(source.group_names["client"]))
    ]
    rest = tuple(np.empty(0, dtype=np.int64) for _ in rows)
    return Federation(source, tuple(rows), rest, rest, source.group_names["client"], len(rows))


def model_for(source: Source, name: str = "linear", **options: object) -> Model:
    return Model(lambda: build(name, source.input_shape, source.outputs, **options))


def objective_for(source: Source, model: Model) -> Objective:
    return Objective(model, LOSSES[source.task], source, model.init(0))


@cache
def known(radius: float, condition: float) -> tuple[Source, Advice]:
    source = synthetic_linear(CLIENTS, SAMPLES, 1, DIM, radius, noise=1.0, condition=condition, seed=3)
    return source, advise(natural(source), model_for(source), TrainConfig())


@pytest.mark.parametrize(("radius", "condition"), [(0.0, 1.0), (0.1, 10.0), (0.5, 1.0), (2.0, 10.0)])
def test_heterogeneity_is_recovered(radius: float, condition: float) -> None:
    """Within 3 standard errors of a split-half product: noise s^2 = 2V/d a weight enters once and twice."""
    found = known(radius, condition)[1].facts
    noise = 2 * found.noise.value
    error = math.sqrt((2 * radius**2 * noise / DIM + noise**2 / DIM) / CLIENTS)
    assert abs(found.radius2 - radius**2) < 3 * error
    assert found.mode == "optimum"
    if radius >= 0.5:
        assert found.radius.value == pytest.approx(radius, rel=0.1)
        assert found.radius.low < radius < found.radius.high


@pytest.mark.parametrize("condition", [1.0, 10.0])
def test_clients_that_are_alike_keep_a_31st_of_a_deviation_where_they_are_steepest(condition: float) -> None:
    """The share h / (h + lam) of the largest curvature of a client, where no finite lam would be the best."""
    advice = known(0.0, condition)[1]
    assert advice.facts.radius2 <= 0
    steepest = advice.facts.curvature.client_smoothness
    assert steepest / (steepest + advice.lam.value) == pytest.approx(1 / 31)


def test_the_largest_pull_of_a_network_halves_its_steps() -> None:
    """1 / (L + lam) against 1 / L: in resamples of clients that nothing tells apart."""
    source = synthetic_digits(6, 30, 1, shape=(6,), classes=3, alpha=1e6, seed=0)
    advice = advise(natural(source), model_for(source, "mlp", hidden=[4]), TrainConfig(lr=0.2), rounds=1)
    steepest = advice.facts.curvature.client_smoothness
    assert advice.facts.radius.low == 0
    assert steepest / (steepest + advice.lam.high) == pytest.approx(1 / 2)


@pytest.mark.parametrize("condition", [1.0, 10.0])
def test_noise_and_curvature_are_recovered(condition: float) -> None:
    source, advice = known(0.5, condition)
    found, H = advice.facts.curvature, source.info["H"]
    each, pooled = torch.linalg.eigvalsh(H), torch.linalg.eigvalsh(H.mean(0))
    assert found.client_smoothness == pytest.approx(float(each[:, -1].max()), rel=1e-5)
    assert found.client_mu == pytest.approx(float(each[:, 0].min()), rel=1e-5)
    assert (found.mu, found.smoothness) == pytest.approx((float(pooled[0]), float(pooled[-1])), rel=1e-5)
    # of the population: eigenvalues of 2000 samples in 8 dimensions spread by 2 sqrt(8/2000) = 13 %
    assert (found.mu, found.smoothness) == pytest.approx((1.0, condition), rel=0.13)
    curvatures = np.geomspace(1, condition, DIM)
    # gradients of single samples are x times a noise of variance 1
    assert advice.facts.rho.value == pytest.approx(math.sqrt(curvatures.sum()), rel=0.05)
    # V of least squares with random features: sum of 1/h over n - d - 1
    assert advice.facts.noise.value == pytest.approx((1 / curvatures).sum() / (SAMPLES - DIM - 1), rel=0.25)
    assert advice.facts.excess == pytest.approx(DIM / SAMPLES, rel=0.1)


@pytest.mark.parametrize("condition", [1.0, 10.0])
def test_plain_baselines_come_first_where_they_are_as_good_as_the_best_pull(condition: float) -> None:
    alike, far = (known(radius, condition)[1] for radius in (0.0, 2.0))
    assert alike.facts.radius.low == 0
    assert any("alike" in note for note in alike.notes)
    assert alike.errors.pooled < alike.errors.alone / 3
    names = [[r.method for r in advice.recommendations] for advice in (alike, far)]
    assert [n[0] for n in names] == ["fedavg", "local"]
    assert all({"fedclup", "ditto", "pfedme", "perada"} < set(n) for n in names)


def test_the_heterogeneity_of_equals_is_known_to_be_small() -> None:
    """In 60 dimensions R^2 = 0 is known well within V / N."""
    source = synthetic_linear(4, 260, 1, 60, heterogeneity=0.0, seed=1)
    advice = advise(natural(source), model_for(source), TrainConfig())
    assert advice.facts.radius.high**2 < advice.facts.noise.value / 4


def mean_error(radius: float, condition: float, lams: np.ndarray) -> np.ndarray:
    """`[lams]` squared error of the coupled optimum, mean over 30 federations of the same kind as `known`."""
    draws = [
        synthetic_linear(
            CLIENTS, SAMPLES, 1, DIM, radius, noise=1.0, condition=condition, seed=100 + draw
        ).info
        for draw in range(30)
    ]
    return np.array(
        [
            np.mean(
                [
                    float((closed_form(i["H"], i["c"], i["p"], lam)[1] - i["weights"]).square().sum(1).mean())
                    for i in draws
                ]
            )
            for lam in lams
        ]
    )


@pytest.mark.parametrize("condition", [1.0, 10.0])
@pytest.mark.parametrize("radius", RADII)
def test_the_advised_pull_is_nearly_the_best(radius: float, condition: float) -> None:
    """Advised from one federation, tried on fresh ones against a grid that knows the truth.

    R = 0.1 is known within a factor of 2 only; the pull is then at least no worse than either extreme.
    """
    lam = known(radius, condition)[1].lam.value
    reached, alone, pooled, *grid = mean_error(
        radius, condition, np.array([lam, 1e-9, 1e7, *np.geomspace(1e-3, 1e3, 31)])
    )
    if radius >= 0.5:
        assert reached < 1.01 * min(grid)
    elif radius:
        assert reached < 1.05 * min(alone, pooled)
    else:
        assert reached < 0.3 * alone


def test_corollary_1_is_respected() -> None:
    """Apart, its upper limit has mu where the best pull has the mean curvature, so it is never lower."""
    for condition in (1.0, 10.0):
        advice = known(2.0, condition)[1]
        assert advice.corollary is not None
        assert not advice.corollary.together
        assert advice.lam.value <= advice.corollary.upper * (1 + 1e-9)


def test_fedclup_reaches_its_optimum_in_the_rounds_advised() -> None:
    """Algorithm 1 in numpy, with the advised step sizes, steps and rounds, from zero."""
    source, advice = known(0.5, 10.0)
    found = next(r for r in advice.recommendations if r.method == "fedclup")
    H, c = source.info["H"].numpy(), source.info["c"].numpy()
    lam, eta, steps = found.options["lam"], found.train["lr"], found.train["steps"]
    gamma = (lam + found.options["smoothness"]) / (2 * lam * found.options["smoothness"])
    w, v = np.zeros(DIM), np.zeros((CLIENTS, DIM))
    _, best = closed_form(source.info["H"], source.info["c"], source.info["p"], lam)
    assert found.rounds is not None
    for _ in range(found.rounds):
        for _ in range(steps):
            v = v - eta * (np.einsum("kij,kj->ki", H, v - c) + lam * (v - w))
        w = w - gamma * lam * (w - v).mean(0)
    left = ((v - best.numpy()) ** 2).sum(1).mean()
    assert left < 0.1 * advice.errors.coupled


def test_quadratics_of_different_bases_have_their_own_constants() -> None:
    """No label noise: what is left between halves is only what their different rows weigh."""
    source = synthetic_quadratic(6, 60, 4, heterogeneity=1.0, condition=20.0, seed=2)
    objective = objective_for(source, model_for(source))
    found = curvature(run_pilot(natural(source), objective, TrainConfig()))
    assert found.client_smoothness == pytest.approx(20, rel=1e-4)
    assert found.client_mu == pytest.approx(1, rel=1e-4)
    assert found.mu > 1
    assert found.smoothness < 20


def own_spreads(v2: np.ndarray, samples: int, dim: int) -> tuple[Source, np.ndarray]:
    """Linear regression whose clients' weights scatter each with a variance of its own."""
    rng = np.random.default_rng(5)
    weights = 1 + np.sqrt(v2)[:, None] * rng.standard_normal((len(v2), dim))
    x = rng.standard_normal((len(v2), samples, dim))
    y = np.einsum("knd,kd->kn", x, weights) + rng.standard_normal(x.shape[:2])
    owner = torch.arange(len(v2)).repeat_interleave(samples)
    names = tuple(str(k) for k in range(len(v2)))
    source = Source(
        "own spreads",
        torch.from_numpy(x.reshape(-1, dim).astype(np.float32)),
        torch.from_numpy(y.reshape(-1, 1).astype(np.float32)),
        "regression",
        1,
        groups={"client": owner},
        group_names={"client": names},
    )
    return source, ((weights - 1) ** 2).mean(1)


def test_every_clients_spread_and_weight_are_recovered() -> None:
    v2 = np.array([0.02, 0.05, 0.2, 0.5, 1.0, 2.0])
    samples, dim = 250, 40
    source, truth = own_spreads(v2, samples, dim)
    found = advise(natural(source), model_for(source), TrainConfig()).transfer
    assert found.v2 == pytest.approx(truth, rel=0.3, abs=0.01)  # noise of a half is 0.012
    error = 1 / samples
    alpha = (1 / (error + truth)) / (1 / (error + truth)).sum()
    assert sum(found.alpha) == pytest.approx(1)
    assert found.alpha == pytest.approx(alpha, rel=0.35, abs=0.02)
    # lambda_k of Theorem 4.2 is sigma^2 / (n v_k^2) beside the mean loss; features have variance 1, so as a
    # pull on predictions, which has no 1/2, it is half of that
    assert found.pull == pytest.approx(error / truth, rel=0.4)
    assert np.array(found.lam) / found.pull == pytest.approx(np.full(6, 0.5), rel=0.15)


def test_noise_without_gradients_of_single_samples_is_the_same() -> None:
    """Of 16 clients in 20 dimensions, two gradients each: standard deviation sqrt(2 / 320) = 8 %."""
    source = synthetic_linear(16, 200, 1, 20, seed=0)
    pilot = run_pilot(natural(source), objective_for(source, model_for(source)), TrainConfig())
    single = gradient_noise(pilot).mean()
    pilot.objective.__dict__["separable"] = False
    assert gradient_noise(pilot).mean() == pytest.approx(single, rel=0.2)


def test_a_cox_model_has_advice() -> None:
    rng = np.random.default_rng(0)
    clients, samples, dim = 4, 120, 3
    x = rng.standard_normal((clients * samples, dim)).astype(np.float32)
    time = rng.exponential(np.exp(-x[:, 0])).astype(np.float32)
    event = (rng.random(len(x)) < 0.8).astype(np.float32)
    owner = torch.arange(clients).repeat_interleave(samples)
    source = Source(
        "survival",
        torch.from_numpy(x),
        torch.from_numpy(np.stack([event, time], 1)),
        "survival",
        1,
        groups={"client": owner},
        group_names={"client": tuple("abcd")},
    )
    told: list[str] = []
    advice = advise(natural(source), model_for(source, "cox"), TrainConfig(), watch=told.append)
    assert told[-1] == "curvature and gradient noise"
    assert len(told) > 1
    facts = advice.facts
    assert (facts.mode, facts.rank, facts.curvature.flat) == ("optimum", 3, 1)  # the bias changes nothing
    assert 0 < facts.curvature.mu < facts.curvature.smoothness
    assert facts.rho.value > 0
    assert advice.facts.radius2 < advice.facts.noise.value


def test_separable_classes_have_no_optimum_and_are_trained() -> None:
    source = synthetic_logistic(6, 40, 1, 3, heterogeneity=3.0, seed=0)
    facts = advise(natural(source), model_for(source, "logistic"), TrainConfig(lr=0.1)).facts
    assert facts.mode == "training"
    assert facts.radius.value > 0


@pytest.mark.slow
def test_a_pilot_trains_at_most_so_many_clients_thirty_by_default() -> None:
    source = synthetic_linear(40, 8, 1, 2, seed=0)
    given = natural(source), objective_for(source, model_for(source)), TrainConfig()
    assert len(run_pilot(*given).clients) == 30
    assert len(run_pilot(*given, clients=5).clients) == 5


def test_noisy_classes_have_one() -> None:
    source = synthetic_logistic(6, 300, 1, 3, heterogeneity=0.5, label_noise="sample", seed=0)
    advice = advise(natural(source), model_for(source, "logistic", bias=False), TrainConfig())
    assert advice.facts.mode == "optimum"
    assert advice.facts.curvature.flat == 3  # the same weight added to both classes
    true = source.info["weights"]
    gap = (true[:, 1] - true[:, 0]) / math.sqrt(2)  # what softmax sees of the weights, as a distance
    radius = float((gap - gap.mean(0)).square().sum(1).mean().sqrt())
    assert advice.facts.radius.value == pytest.approx(radius, rel=0.25)


def small_network() -> tuple[Federation, Model]:
    source = synthetic_digits(6, 30, 1, shape=(6,), classes=3, alpha=0.3, seed=0)
    return natural(source), model_for(source, "mlp", hidden=[32])


def test_a_network_gets_heuristics_and_is_told_so() -> None:
    federation, model = small_network()
    advice = advise(federation, model, TrainConfig(lr=0.2), rounds=2)
    facts = advice.facts
    assert (facts.mode, advice.corollary) == ("training", None)
    assert math.isnan(facts.curvature.mu)
    assert facts.curvature.smoothness > 0
    assert all(r.rounds is None for r in advice.recommendations)
    assert any("heuristic" in note for note in advice.notes)
    plain = json.loads(json.dumps(advice.to_dict(), allow_nan=False))
    assert plain["facts"]["curvature"]["mu"] is None


def test_curvature_of_a_network_is_the_hessians() -> None:
    federation, model = small_network()
    pilot = run_pilot(federation, objective_for(federation.source, model), TrainConfig(lr=0.2), rounds=2)
    assert pilot.objective.size > 256
    assert not pilot.objective.affine
    everything = np.concatenate(pilot.rows)
    H = pilot.objective.hessian(pilot.reference, everything)
    found = curvature(pilot, probes=200)
    assert found.smoothness == pytest.approx(float(torch.linalg.eigvalsh(H)[-1]), rel=1e-3)
    assert found.trace == pytest.approx(float(torch.trace(H)), rel=0.2)


def test_equal_arguments_give_equal_advice() -> None:
    federation, model = small_network()
    first, second = (advise(federation, model, TrainConfig(lr=0.2), rounds=1, seed=4) for _ in range(2))
    same = [
        dataclasses.replace(a, facts=dataclasses.replace(a.facts, seconds=0.0)).to_dict()
        for a in (first, second)
    ]
    assert same[0] == same[1]


def test_clients_without_two_samples_are_left_out_and_named() -> None:
    source, _ = known(0.5, 1.0)
    whole = natural(source)
    train = (whole.train[0][:1], whole.train[1][:0], *whole.train[2:])
    advice = advise(dataclasses.replace(whole, train=train), model_for(source), TrainConfig())
    assert advice.facts.used == CLIENTS - 2
    assert any(note.startswith("2 clients with fewer than 2") for note in advice.notes)


@pytest.mark.parametrize("kept", [0, 1])
def test_fewer_than_two_clients_are_an_error(kept: int) -> None:
    source, _ = known(0.5, 1.0)
    whole = natural(source)
    train = tuple(rows if i < kept else rows[:1] for i, rows in enumerate(whole.train))
    with pytest.raises(DataError, match=f"here {kept} of {CLIENTS} have them"):
        advise(dataclasses.replace(whole, train=train), model_for(source), TrainConfig())


def test_nan_is_named() -> None:
    source, _ = known(0.5, 1.0)
    x = source.x.clone()
    x[7, 2] = math.nan
    broken = dataclasses.replace(source, x=x)
    with pytest.raises(DataError, match="sample 7 holds NaN"):
        advise(natural(broken), model_for(broken), TrainConfig())


def test_a_learning_rate_too_large_is_named() -> None:
    federation, model = small_network()
    with pytest.raises(DivergenceError, match=r"client '0'; try a smaller train\.lr"):
        advise(federation, model, TrainConfig(lr=1e30), rounds=1)


def test_a_pilot_that_learns_nothing_is_an_error() -> None:
    federation, model = small_network()
    with pytest.raises(DataError, match=r"train\.lr"):
        advise(federation, model, TrainConfig(lr=1e-30), rounds=0)


@pytest.mark.parametrize("wrong", [{"clients": 1}, {"rounds": -1}])
def test_wrong_settings_are_named(wrong: dict[str, int]) -> None:
    federation, model = small_network()
    with pytest.raises(ConfigError, match="clients >= 2"):
        advise(federation, model, TrainConfig(), **wrong)


def test_step_sizes_stand_the_largest_curvature_of_a_batch() -> None:
    """E[H_B^2] of Gaussian features, by simulation, is at most (L (1 + 1/B) + tr/B) H in every direction."""
    h, batch = np.array([1.0, 2.0, 10.0]), 4
    x = np.random.default_rng(0).standard_normal((20000, batch, 3)) * np.sqrt(h)
    H = np.einsum("tbi,tbj->tij", x, x) / batch
    square = np.einsum("tij,tjk->ik", H, H) / len(H)
    here = Situation(0.5, 10.0, 1.0, 13.0, 100, batch, 0.1, Errors(1, 1, 1), 1.0)
    steepest = 1 / here.eta(all_data=False, pulled=False)
    assert steepest == pytest.approx(10 * 1.25 + 13 / 4)
    assert np.diag(square) / h == pytest.approx(h * 1.25 + 13 / 4, rel=0.05)
    assert 1 / here.eta(all_data=True) == pytest.approx(10.5)
