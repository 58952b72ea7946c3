"""FedCLUP's rules: step sizes of the theory, batches drawn once a round, and λ that changes between rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from methods.quadratics import (
    CLIENTS,
    DIM,
    LR,
    MU,
    L,
    curvature,
    global_weight,
    personal_weights,
    quadratic_federation,
    quadratic_simulation,
    shares,
)
from methods.reductions import Same, in_run, local
from methods.settings import LAM, PROX_STEPS, Card, Limit, Row
from methods.small import (
    NEWCOMER,
    TRAIN,
    after,
    assert_close,
    assert_same,
    everything,
    federation,
    parts,
    personal,
    simulation,
)
from tailorfl.core.messages import Replies
from tailorfl.core.method import make_method
from tailorfl.data.synthetic import closed_form
from tailorfl.errors import ConfigError
from tailorfl.methods.fedclup import FedCLUP
from tailorfl.methods.fedclup_lambda import Dynamic, Heuristic
from tailorfl.methods.fedclup_steps import client_step, fewest_steps, server_step
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.theory import fedclup as calculator
from tailorfl.theory.fedclup import schedule, stochastic_eta
from tailorfl.theory.fedclup_statistics import Problem, lambda_range
from tailorfl.training.cohort import TrainConfig

CONTRACTS = {
    "fedclup": Row(
        Card(whole, whole, whole, True, True),
        {"lam": 0.5},
        Limit("coupled", PROX_STEPS, {"lam": LAM}),
        same=(
            local(lam=0.0),
            replace(local(lam=0.0, local_steps=2), other_train={"steps": 2, "epochs": None}),
            in_run(
                Same("everyone", {"lam": 0.7}, "mr_mtl", {"lam": 0.7}, "personal", "personal", exact=False),
                fraction=1.0,
            ),
        ),
    ),
}


THEORY = {"local_steps": "theory", "smoothness": L, "convexity": MU}
NEVER = -1e9
"""A `tol` under which every window of errors has fallen by enough; as `-NEVER` none has."""


def clup(**options: Any) -> FedCLUP:
    """With the paper's equal weights."""
    method = make_method("fedclup", {"weights": "uniform", **options})
    assert isinstance(method, FedCLUP)
    return method


def test_a_ladder_of_values_is_the_same_method_where_all_its_options_are_written_out() -> None:
    method = clup(schedule={"kind": "dynamic", "values": [0.5, 2.0]})
    assert make_method("fedclup", method.all_options()) == method


def dynamic(**options: Any) -> dict[str, Any]:
    return {"kind": "dynamic", **options}


def lam_of(sim: Simulation) -> float:
    assert isinstance(sim.method, FedCLUP)
    return sim.method.lam_of(sim.server)


class TestStepsOfTheTheory:
    @pytest.mark.parametrize(
        ("mu", "smoothness"), [(1.0, 10.0), (0.3, 0.4), (2.0, 2.0), (1.0, 1.0001), (1.0, 500.0)]
    )
    @pytest.mark.parametrize("lam", [0.01, 0.5, 1.0, 30.0])
    def test_are_those_of_the_calculators(self, mu: float, smoothness: float, lam: float) -> None:
        plan, at = schedule(mu, smoothness, lam), torch.tensor(lam, dtype=torch.float64)
        for gamma, eta in ((plan.gamma, plan.eta), (1 / lam, plan.eta / 2)):
            expected = calculator.fewest_steps(mu, smoothness, lam, gamma, eta)
            assert fewest_steps(lam, mu, smoothness, gamma * lam, eta) == expected
        assert float(client_step("deterministic", at, None, smoothness)) == plan.eta
        assert float(client_step("stochastic", at, mu, smoothness)) == pytest.approx(
            stochastic_eta(mu, smoothness, lam)
        )
        assert server_step("theory", lam, smoothness) == pytest.approx(plan.gamma * lam)
        assert server_step("edge", lam, smoothness) == pytest.approx(2 * plan.gamma * lam)
        assert server_step("mean", lam, smoothness) == 1

    @pytest.mark.parametrize("radius", [0.0, 0.01, 0.05, 0.08, 0.5])
    @pytest.mark.parametrize("rho", [0.2, 2.0])
    def test_corollary_1_is_that_of_the_calculator(self, radius: float, rho: float) -> None:
        method = clup(
            schedule={"kind": "corollary", "radius": radius, "rho": rho, "samples": 200, "clients": 10},
            convexity=1.0,
            smoothness=10.0,
        )
        allowed = lambda_range(Problem(1.0, 10.0, rho, radius, 200, 10))
        assert method.first_lam == pytest.approx(allowed.lower if allowed.together else allowed.upper)
        # It never changes, so nothing but w is sent.
        sim = quadratic_simulation(method.model_copy(update={"lr_rule": "deterministic"}), 2)
        sim.step()
        assert sim.traffic.down_unicast == sim.traffic.up == CLIENTS * DIM

    @pytest.mark.parametrize(("clients", "larger"), [(100, True), (10, False)])
    def test_many_clients_alike_ask_for_the_second_bound_of_corollary_1(
        self, clients: int, larger: bool
    ) -> None:
        """With R = 0 and κ = 1 it is 5 μ N - μ, and the first one 64 L - μ."""
        schedule = {"kind": "corollary", "radius": 0.0, "rho": 0.7, "samples": 20, "clients": clients}
        method = clup(schedule=schedule, convexity=2.0, smoothness=2.0)
        assert method.first_lam == pytest.approx((5 * clients if larger else 64) * 2.0 - 2.0)

    def test_the_steps_of_a_ladder_are_enough_for_each_of_its_values(self) -> None:
        ladder = (0.0, 0.1, 9.0)
        method = clup(local_steps="theory", smoothness=9.0, convexity=1.0, schedule=dynamic(values=ladder))
        # γ = 1/λ and the run's η; without a pull any number will do.
        assert method.steps_of_theory(0.05) == max(fewest_steps(lam, 1.0, 9.0, 1, 0.05) for lam in (0.1, 9.0))
        assert method.pulls == (0.1, 9.0)

    @pytest.mark.parametrize(
        ("options", "steps"),
        [
            ({"lam": 1.0, "lr_rule": "deterministic"}, 69),
            ({"lam": 0.1, "lr_rule": "deterministic"}, 169),
            ({"lam": 1.0, "lr_rule": "deterministic", "gamma": "theory"}, 35),
            ({"lam": 10.0, "lr_rule": "stochastic", "gamma": "theory"}, 248),
            ({"lam": 1.0, "smoothness": L}, calculator.fewest_steps(MU, L, 1.0, 1.0, LR)),
        ],
    )
    def test_number_of_steps_is_that_of_the_step_sizes_in_use(
        self, options: dict[str, Any], steps: int
    ) -> None:
        """For μ = 1, L = 10, whatever the run's rate where a rule replaces it; the method trains for so many."""
        options = {"smoothness": 10.0, "convexity": MU, **options}
        method = clup(**options, local_steps="theory")
        assert method.steps_of_theory(LR if "lr_rule" not in options else 0.5) == steps
        runs = [quadratic_simulation(clup(**options, local_steps=n), 2) for n in ("theory", steps)]
        assert_same(*(everything(after(sim, 1)) for sim in runs))

    def test_is_refused_where_no_number_of_steps_keeps_the_rate(self) -> None:
        for options in ({"lam": 1.0, "gamma": "edge"}, {"lam": 0.0}):
            with pytest.raises(ConfigError, match=r"edge|λ > 0"):
                clup(**options, **THEORY)
        method, plain = clup(lam=1.0, **THEORY), TrainConfig(steps=1, batch_size=0, lr=0.01)
        data, network = quadratic_federation(), quadratic_simulation("fedclup").model
        Simulation(method, data, network, plain)
        for change in (
            *({"momentum": 0.9}, {"optimizer": "adamw"}, {"schedule": "linear"}, {"clip": 1.0}),
            {"lr": 1.01 / (1 + L)},
        ):
            with pytest.raises(ConfigError, match=r"train|eta must be"):
                Simulation(method, data, network, replace(plain, **change))  # type: ignore[arg-type]

    def test_one_batch_a_round_needs_a_number_of_steps(self) -> None:
        with pytest.raises(ConfigError, match="local_steps"):
            simulation(clup(batch_reuse=True))


class TestDynamic:
    @pytest.mark.parametrize(("engine", "gamma"), [("sequential", "mean"), ("vectorized", "edge")])
    def test_one_value_is_constant_fedclup_bit_for_bit(self, engine: str, gamma: str) -> None:
        """Products with λ = 0.5 are exact, so it does not matter that λ is a tensor; clients also get λ itself."""
        rules = {"gamma": gamma, "smoothness": 3.0}
        constant = simulation(clup(lam=0.5, **rules), engine=engine, rounds=4, fraction=0.6)
        rule = dynamic(values=[0.5], patience=1, tol=-NEVER)
        one = simulation(clup(schedule=rule, **rules), engine=engine, rounds=4, fraction=0.6)
        assert_same(dict(constant.server.items()), dict(one.server["w"].items()))
        assert_same(personal(constant), personal(one))
        assert one.traffic.up == constant.traffic.up
        assert one.traffic.down_unicast == constant.traffic.down_unicast + 4 * 3
        assert one.traffic.down_multicast == constant.traffic.down_multicast + 4

    @pytest.mark.parametrize("patience", [1, 3])
    def test_lambda_only_grows_and_stays_for_the_patience(self, patience: int) -> None:
        ladder = (0.1, 0.4, 1.6, 5.0)
        rule = dynamic(start=0.1, least=0.1, factor=4, most=5, patience=patience, tol=-NEVER)
        method = clup(schedule=rule, lr_rule="deterministic", smoothness=L)
        assert isinstance(method.schedule, Dynamic)
        assert method.schedule.ladder == pytest.approx(ladder)
        sim, lams = quadratic_simulation(method, 3), []
        for _ in range(5 * patience + 2):
            lams.append(lam_of(sim))
            sim.step()
        # The first window needs an error more.
        lengths = [patience + 1, patience, patience]
        expected = np.repeat(ladder, [*lengths, len(lams) - sum(lengths)])
        np.testing.assert_allclose(lams, expected)

    def test_ladder_passes_from_zero_to_the_smallest_and_ends_at_the_largest(self) -> None:
        rule = Dynamic(least=0.1, most=0.5)
        assert rule.ladder == pytest.approx((0, 0.1, 0.2, 0.4, 0.5))
        assert Dynamic(start=0.5, most=0.5).ladder == (0.5,)
        assert Dynamic(values=(0.0, 2.0)).ladder == (0.0, 2.0)

    def test_waits_while_the_error_falls_and_grows_when_it_stops(self) -> None:
        sim = quadratic_simulation(clup())
        rule = Dynamic(values=(0.5, 1.0, 4.0), patience=2, tol=0.1)
        lam, memory, lams = 0.5, rule.memory(), []
        for error in (8.0, 4.0, 2.0, 1.9, 1.85, 1.0, 0.95, 0.5, 0.49, 0.47):
            lam, memory = rule.after(lam, memory, replies(sim, [error] * CLIENTS), sim.server)
            lams.append(lam)
        # 2 → 1.85 is the first fall by less than a tenth; then 1.85 → 0.95 → 0.49 (by way of the other parity).
        assert lams == [0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0]

    def test_error_is_weighted_as_models_are(self) -> None:
        sim = quadratic_simulation(clup(weights="samples"))
        errors = np.arange(1.0, CLIENTS + 1)
        uniform = Dynamic().error(replies(sim, errors.tolist()))
        assert float(uniform) == pytest.approx(errors.mean())
        weighted = Dynamic().error(replace(replies(sim, errors.tolist()), weighting="samples"))
        assert float(weighted) == pytest.approx(float(shares("samples") @ torch.from_numpy(errors)))

    def test_nothing_travels_while_lambda_is_zero_and_v_once_when_it_leaves(self) -> None:
        sim = quadratic_simulation(clup(schedule=dynamic(values=[0, 2.0], patience=2, tol=-NEVER)), 2)
        start, alone = global_weight(sim), quadratic_simulation("local", 2)
        for _ in range(3):
            done = sim.step()
            assert set(done.traffic.as_dict().values()) == {0}
            np.testing.assert_array_equal(global_weight(sim), start)
            alone.step()
            np.testing.assert_array_equal(personal_weights(sim), personal_weights(alone))
        assert lam_of(sim) == 2.0
        done = sim.step()
        alone.step()
        assert (done.traffic.up, done.traffic.down_unicast) == (CLIENTS * DIM, 0)
        assert done.traffic.bytes_down == 8 * CLIENTS  # the flag
        np.testing.assert_array_equal(personal_weights(sim), personal_weights(alone))
        np.testing.assert_allclose(global_weight(sim), personal_weights(alone).mean(0), atol=1e-6)
        done = sim.step()
        assert (done.traffic.up, done.traffic.down_unicast) == (CLIENTS * DIM, CLIENTS * (DIM + 1))

    def test_ends_at_the_optimum_of_the_last_lambda(self) -> None:
        rule = dynamic(values=[0, 0.2, 1.5], patience=1)
        method = clup(schedule=rule, gamma="edge", lr_rule="deterministic", smoothness=L)
        sim = after(quadratic_simulation(method, 15), 45)
        w, v = closed_form(*curvature(), shares("uniform"), 1.5)
        assert lam_of(sim) == 1.5
        np.testing.assert_allclose(global_weight(sim), w.numpy(), atol=2e-5)
        np.testing.assert_allclose(personal_weights(sim), v.numpy(), atol=2e-5)

    def test_clients_report_their_validation_loss_or_else_their_training_loss(self) -> None:
        """Client 0 has no validation samples left."""
        data = federation()
        without = replace(data, val=(np.empty(0, dtype=np.int64), *data.val[1:]))
        sim = simulation(clup(schedule="dynamic"), rounds=0, data=without)
        done = sim.step()
        models, losses = personal(sim), []
        for i in range(without.num_clients):
            rows = torch.from_numpy(without.val[i] if i else without.train[0])
            outputs = sim.model({n: t[i] for n, t in models.items()}, without.source.x[rows])
            losses.append(torch.nn.functional.cross_entropy(outputs, without.source.y[rows]))
        assert done.losses["val"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)

    def test_clients_that_are_not_sampled_may_train_and_are_not_heard(self) -> None:
        """Neither their models nor their errors reach the server."""
        rule = dynamic(values=[0, 0.5, 2.0], patience=1, tol=1e-3)
        everyone, sampled = (
            simulation(clup(schedule=rule, participation=who), fraction=0.4) for who in ("all", "sampled")
        )
        everyone.step()
        sampled.step()
        memory = dict(everyone.server["rule"].items())
        assert_same(memory, dict(sampled.server["rule"].items()))
        assert everyone.traffic.up == 0
        assert len(everyone.states) == 5
        for _ in range(2):
            everyone.step()
        assert everyone.traffic.up == 2 * parts(everyone.model).d  # the round that leaves 0

    def test_newcomers_start_from_what_there_is(self) -> None:
        """From the initial model while nothing is sent, later from w."""
        sim = simulation(clup(schedule=dynamic(values=[0, 2.0], patience=1, tol=-NEVER)))
        wanted = dict(sim.init.items())
        for step in range(5):
            ((_, models),) = sim.newcomer_models((NEWCOMER,), 0)
            assert_same({n: t[0] for n, t in models.items()}, wanted)
            ((_, adapted),) = sim.newcomer_models((NEWCOMER,), 2)
            assert not torch.equal(adapted["head.weight"], models["head.weight"])
            sim.step()
            if step >= 2:
                wanted = dict(sim.server["w"].items())
        assert not torch.equal(wanted["head.weight"], sim.init["head.weight"])


def replies(sim: Simulation, errors: list[float]) -> Replies:
    """The replies of all clients of a quadratic simulation, with these validation errors."""
    return Replies(
        stack=sim.states.get(range(CLIENTS)),
        clients=tuple(range(CLIENTS)),
        samples=quadratic_federation().sizes(),
        weighting="uniform",
        context=sim.context,
        metrics=TensorDict({"val": torch.tensor(errors)}, batch_size=[CLIENTS]),
    )


class TestHeuristic:
    def test_has_a_largest_lambda_where_clients_do_not_differ(self) -> None:
        sim = quadratic_simulation(clup())
        same = replies(sim, [1.0] * CLIENTS)
        lam, _ = Heuristic(switch=1, most=7.0).after(0.5, TensorDict(), same, sim.server)
        assert lam == 7.0
        lam, _ = Heuristic(switch=2, most=7.0).after(0.5, TensorDict(), same, sim.server)
        assert lam == 0.5


RULES = (("gamma", "theory"), ("gamma", "edge"), ("lr_rule", "deterministic"))


class TestMistakes:
    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"lr_rule": "stochastic", "smoothness": 2.0}, "convexity"),
            ({"lr_rule": "stochastic", "convexity": 2.0}, "smoothness"),
            ({"local_steps": "theory"}, "smoothness"),
            ({"local_steps": 0}, "at least 1"),
            ({"smoothness": 1.0, "convexity": 2.0}, "must not be above"),
            ({"schedule": "corollary"}, "radius"),
            (
                {"schedule": {"kind": "corollary", "radius": 1, "rho": 1, "samples": 5, "clients": 2}},
                "smoothness",
            ),
            ({"lam": 0.0, "schedule": {"kind": "heuristic", "switch": 2}}, "heuristic"),
            *(({option: rule}, "smoothness") for option, rule in RULES),
            ({"schedule": "growing"}, "growing|kind"),
            ({"schedule": {"kind": "dynamic", "values": [1, 0.5]}}, "rise"),
            ({"schedule": {"kind": "dynamic", "values": [-1, 0.5]}}, "rise"),
            ({"schedule": {"kind": "dynamic", "values": [1], "factor": 3}}, "leave out factor"),
            ({"schedule": {"kind": "dynamic", "start": 20}}, "above most"),
            ({"schedule": {"kind": "dynamic", "factor": 1}}, "factor"),
            ({"schedule": {"kind": "dynamic", "patience": 0}}, "patience"),
            ({"schedule": {"kind": "heuristic"}}, "switch"),
            (
                {**THEORY, "schedule": {"kind": "heuristic", "switch": 1}},
                "every λ",
            ),
        ],
    )
    def test_are_named(self, options: dict[str, Any], match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            make_method("fedclup", options)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_rate_that_is_sent_is_the_rate_that_is_known(engine: str) -> None:
    """With momentum, decay and clipping: η multiplies all of them, as torch's SGD does."""
    rule = {"lr_rule": "deterministic", "smoothness": 6.0}
    train = replace(TRAIN, momentum=0.5, weight_decay=0.1, clip=0.3)
    sent = clup(schedule=dynamic(values=[0.5]), **rule)
    a, b = (
        simulation(method, engine=engine, train=train, rounds=3, fraction=0.6)
        for method in (sent, clup(lam=0.5, **rule))
    )
    assert_close(personal(a), personal(b), atol=1e-6)
