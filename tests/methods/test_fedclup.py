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
    global_weight,
    personal_weights,
    quadratic_federation,
    quadratic_simulation,
    shares,
)
from methods.reductions import in_run, local, personally
from methods.settings import LAM, PROX_STEPS, Card, Limit, Row
from methods.small import (
    NEWCOMER,
    SIZES,
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
from tailorfl.methods.fedclup import FedCLUP
from tailorfl.methods.fedclup_rules import Dynamic, Heuristic, client_step, fewest_steps, server_step
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.theory import fedclup as calculator
from tailorfl.theory.fedclup import schedule, stochastic_eta

CONTRACTS = {
    "fedclup": Row(
        Card(whole, whole, whole, True, True),
        {"lam": 0.5},
        Limit("coupled", PROX_STEPS, {"lam": LAM}),
        same=(
            local(lam=0.0),
            replace(local(lam=0.0, local_steps=2), other_train={"steps": 2, "epochs": None}),
            in_run(personally("everyone", "mr_mtl", {"lam": 0.7}, exact=False, lam=0.7), fraction=1.0),
        ),
    ),
}


NEVER = -1e9
"""A `tol` under which every window of errors has fallen by enough; as `-NEVER` none has."""


def clup(**options: Any) -> FedCLUP:
    """With the paper's equal weights."""
    method = make_method("fedclup", {"weights": "uniform", **options})
    assert isinstance(method, FedCLUP)
    return method


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
        stochastic = float(client_step("stochastic", at, mu, smoothness))
        assert stochastic == pytest.approx(stochastic_eta(mu, smoothness, lam))
        assert server_step("theory", lam, smoothness) == pytest.approx(plan.gamma * lam)
        assert server_step("edge", lam, smoothness) == pytest.approx(2 * plan.gamma * lam)
        assert server_step("mean", lam, smoothness) == 1

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
    def test_are_as_many_as_the_step_sizes_in_use_need(self, options: dict[str, Any], steps: int) -> None:
        """For μ = 1, L = 10, whatever the run's rate where a rule replaces it."""
        method = clup(**{"smoothness": 10.0, "convexity": MU, **options}, local_steps="theory")
        assert method.steps_of_theory(LR if "lr_rule" not in options else 0.5) == steps

    def test_are_those_that_clients_take(self) -> None:
        options = {"lam": 1.0, "lr_rule": "deterministic", "gamma": "theory", "smoothness": 10.0}
        runs = [clup(**options, convexity=MU, local_steps=steps) for steps in ("theory", 35)]
        assert_same(*(everything(after(quadratic_simulation(method, 2), 1)) for method in runs))


class TestDynamic:
    @pytest.mark.parametrize(
        ("engine", "rules"),
        [("sequential", {}), ("vectorized", {"gamma": "edge"}), ("vectorized", {"lr_rule": "deterministic"})],
    )
    def test_one_value_is_constant_fedclup_bit_for_bit(self, engine: str, rules: dict[str, str]) -> None:
        """Products with λ = 0.5 are exact, so it does not matter that λ is a tensor; clients also get λ itself.

        An η that follows it multiplies momentum, weight decay and clipped gradients as that of the run does.
        """
        run = {"engine": engine, "rounds": 4, "fraction": 0.6, "train": replace(TRAIN, clip=0.3)}
        rule = dynamic(values=[0.5], patience=1, tol=-NEVER)
        methods = clup(lam=0.5, smoothness=6.0, **rules), clup(schedule=rule, smoothness=6.0, **rules)
        constant, one = (simulation(method, **run) for method in methods)
        compare = assert_close if "lr_rule" in rules else assert_same
        compare(dict(constant.server.items()), dict(one.server["w"].items()))
        compare(personal(constant), personal(one))
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
        errors[0] = np.nan  # a client of a deployment that tells no metrics
        assert float(Dynamic().error(replies(sim, errors.tolist()))) == pytest.approx(errors[1:].mean())

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

    def test_clients_report_their_validation_loss_or_else_their_training_loss(self) -> None:
        """Client 0 has no validation samples left."""
        data = federation()
        without = replace(data, val=(np.empty(0, dtype=np.int64), *data.val[1:]))
        sim = simulation(clup(schedule="dynamic"), data=without)
        done, models, losses = sim.step(), personal(sim), []
        for i in range(without.num_clients):
            rows = torch.from_numpy(without.val[i] if i else without.train[0])
            outputs = sim.model({n: t[i] for n, t in models.items()}, without.source.x[rows])
            losses.append(torch.nn.functional.cross_entropy(outputs, without.source.y[rows]))
        assert done.losses["val"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)

    def test_clients_that_are_not_sampled_may_train_and_are_not_heard(self) -> None:
        """Neither their models nor their errors reach the server."""
        rule = dynamic(values=[0, 0.5, 2.0], patience=1, tol=1e-3)
        methods = (clup(schedule=rule, participation=who) for who in ("all", "sampled"))
        everyone, sampled = (simulation(method, fraction=0.4, rounds=1) for method in methods)
        assert_same(dict(everyone.server["rule"].items()), dict(sampled.server["rule"].items()))
        assert (everyone.traffic.up, len(everyone.states)) == (0, 5)
        # The round that leaves 0.
        assert after(everyone, 2).traffic.up == 2 * parts(everyone.model).d

    def test_newcomers_start_from_what_there_is(self) -> None:
        """From the initial model while nothing is sent, later from w."""
        sim = simulation(clup(schedule=dynamic(values=[0, 2.0], patience=1, tol=-NEVER)))
        wanted = dict(sim.init.items())
        for step in range(5):
            ((_, models),) = sim.newcomer_models((NEWCOMER,), 0)
            assert_same({n: t[0] for n, t in models.items()}, wanted)
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


@pytest.mark.parametrize(
    ("errors", "grows"), [((-1.0, -1.0), True), ((-1.0, -2.0), False), ((-2.0, -1.0), True)]
)
def test_errors_below_zero_must_fall_too(errors: tuple[float, float], grows: bool) -> None:
    """As validation losses of counts may be."""
    rule, sim = Dynamic(values=(0.5, 2.0), patience=1), quadratic_simulation(clup())
    lam, memory = 0.5, rule.memory()
    for error in errors:
        lam, memory = rule.after(lam, memory, replies(sim, [error] * CLIENTS), sim.server)
    assert lam == (2.0 if grows else 0.5)


def test_the_heuristic_has_a_largest_lambda_where_clients_do_not_differ() -> None:
    sim = quadratic_simulation(clup())
    for switch, lam in ((1, 7.0), (2, 0.5)):
        rule = Heuristic(switch=switch, most=7.0)
        assert rule.after(0.5, TensorDict(), replies(sim, [1.0] * CLIENTS), sim.server)[0] == lam


def test_the_heuristic_estimates_once_though_its_round_had_too_few_replies() -> None:
    sim = simulation(clup(schedule={"kind": "heuristic", "switch": 2}))
    found = []
    for least in (1, len(SIZES) + 1, 1, 1):
        sim.min_replies = least
        sim.step()
        found.append(float(sim.server["lam"]))
    assert found[0] == found[1] != found[2] == found[3]
