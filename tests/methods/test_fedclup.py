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
    WEIGHT,
    L,
    Reference,
    curvature,
    global_weight,
    personal_weights,
    quadratic_federation,
    quadratic_simulation,
    shares,
)
from methods.small import (
    NEWCOMER,
    TRAIN,
    assert_close,
    assert_same,
    everything,
    federation,
    model,
    parts,
    personal,
    simulation,
)
from tailorfl.core.messages import Replies
from tailorfl.core.method import make_method
from tailorfl.data.synthetic import closed_form
from tailorfl.errors import ConfigError
from tailorfl.methods.fedclup import FedCLUP
from tailorfl.methods.fedclup_lambda import Corollary, Dynamic, Heuristic
from tailorfl.methods.fedclup_steps import client_step, fewest_steps, server_step
from tailorfl.rounds.simulation import Simulation
from tailorfl.theory import fedclup as calculator
from tailorfl.theory.fedclup import round_rate, schedule, stochastic_eta
from tailorfl.theory.fedclup_statistics import Problem, lambda_range
from tailorfl.training.cohort import TrainConfig

NEVER = -1e9
"""A `tol` under which every window of errors has fallen by enough; as `-NEVER` none has."""


def clup(**options: Any) -> FedCLUP:
    """With the paper's equal weights."""
    found = make_method("fedclup", {"weights": "uniform", **options})
    assert isinstance(found, FedCLUP)
    return found


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
            found = fewest_steps(lam, mu, smoothness, gamma * lam, eta)
            assert found == calculator.fewest_steps(mu, smoothness, lam, gamma, eta)
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

    def test_stochastic_rule_is_what_clients_train_with(self) -> None:
        """λ = 1.5: μ(λ + L)/(4L(λ + μ)²) = 0.06 is the smaller."""
        lam, eta = 1.5, stochastic_eta(MU, L, 1.5)
        assert eta < 1 / (lam + L)
        sim = quadratic_simulation(clup(lam=lam, lr_rule="stochastic", smoothness=L, convexity=MU), 3)
        w, local = global_weight(sim), Reference()
        sim.step()
        v = [local.descend(i, w, 3, eta, lam, w) for i in range(CLIENTS)]
        np.testing.assert_allclose(personal_weights(sim), v, atol=3e-6)

    @pytest.mark.parametrize("lam", [0.3, 1.0, 4.0])
    def test_contracts_at_least_as_predicted_with_the_fewest_steps(self, lam: float) -> None:
        method = clup(
            lam=lam, gamma="theory", lr_rule="deterministic", local_steps="theory", smoothness=L, convexity=MU
        )
        plan = schedule(MU, L, lam)
        assert method.steps_of_theory(1.0) == plan.fewest_steps
        sim = quadratic_simulation(method)
        w_star = closed_form(*curvature(), shares("uniform"), lam)[0].numpy()
        errors = [((global_weight(sim) - w_star) ** 2).sum()]
        while errors[-1] > 1e-6 * errors[0]:
            sim.step()
            errors.append(((global_weight(sim) - w_star) ** 2).sum())
            assert errors[-1] <= (round_rate(MU, L, lam, plan.gamma) + 1e-6) * errors[-2]
        assert len(errors) - 1 <= plan.rounds(1e-6)

    def test_number_of_steps_is_the_methods_own_where_given(self) -> None:
        assert_same(
            everything(quadratic_run(clup(lam=1.0, local_steps=4), steps=1)),
            everything(quadratic_run(clup(lam=1.0), steps=4)),
        )
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
        ],
    )
    def test_number_of_steps_is_that_of_the_step_sizes_in_use(
        self, options: dict[str, Any], steps: int
    ) -> None:
        """For μ = 1, L = 10, whatever the run's learning rate; the method trains for so many."""
        method = clup(**options, local_steps="theory", smoothness=10.0, convexity=1.0)
        assert method.steps_of_theory(0.5) == steps
        given = clup(**options, local_steps=steps, smoothness=10.0, convexity=1.0)
        assert_same(*(everything(quadratic_run(m, rounds=1, steps=2)) for m in (method, given)))

    def test_the_runs_learning_rate_counts_where_it_is_the_one_in_use(self) -> None:
        method = clup(lam=1.0, local_steps="theory", smoothness=L, convexity=MU)
        known = calculator.fewest_steps(MU, L, 1.0, 1.0, LR)
        assert method.steps_of_theory(LR) == known
        given = method.model_copy(update={"local_steps": known})
        assert_same(*(everything(quadratic_run(m, rounds=2)) for m in (method, given)))

    def test_is_refused_where_no_number_of_steps_keeps_the_rate(self) -> None:
        known = {"local_steps": "theory", "smoothness": L, "convexity": MU}
        with pytest.raises(ConfigError, match="gamma = edge is that bound itself"):
            clup(lam=1.0, gamma="edge", **known)
        with pytest.raises(ConfigError, match="needs a λ > 0"):
            clup(lam=0.0, **known)
        with pytest.raises(ConfigError, match=r"must be at most 1/\(lam \+ smoothness\)"):
            quadratic_simulation(clup(lam=1.0, **known), lr=1.01 / (1 + L))
        plain = TrainConfig(steps=1, batch_size=0, lr=0.01)
        data, network = quadratic_federation(), quadratic_simulation("fedclup").model
        Simulation(clup(lam=1.0, **known), data, network, plain)
        for other in ({"momentum": 0.9}, {"optimizer": "adamw"}, {"schedule": "linear"}, {"clip": 1.0}):
            with pytest.raises(ConfigError, match="plain gradient steps of one size"):
                Simulation(clup(lam=1.0, **known), data, network, replace(plain, **other))  # type: ignore[arg-type]


def quadratic_run(method: FedCLUP, rounds: int = 3, **settings: Any) -> Simulation:
    sim = quadratic_simulation(method, **settings)
    for _ in range(rounds):
        sim.step()
    return sim


class TestBatchReuse:
    @pytest.mark.parametrize("engine", ["sequential", "vectorized"])
    def test_takes_every_step_of_a_round_on_its_one_batch(self, engine: str) -> None:
        """By hand from the rows of the first batch; another batch in every step gives another model."""
        lam, steps, data = 0.5, 6, quadratic_federation()
        train = TrainConfig(epochs=None, steps=steps, batch_size=1, lr=0.05)
        runs = {}
        for reuse in (True, False):
            sim = quadratic_simulation(clup(lam=lam, batch_reuse=reuse), engine=engine)
            sim.train = train
            w = global_weight(sim)
            cohort = sim.cohort(range(CLIENTS))
            sim.step()
            runs[reuse] = personal_weights(sim)
        for i in range(CLIENTS):
            row = int(cohort.plan((i,), "train", 1, None, 1, 0).rows[0, 0, 0])
            x, y = data.source.x[row].double().numpy(), float(data.source.y[row])
            v = w
            for _ in range(steps):
                v = v - 0.05 * (x * (x @ v - y) + lam * (v - w))
            np.testing.assert_allclose(runs[True][i], v, atol=2e-5)
        assert np.abs(runs[True] - runs[False]).max() > 1e-2

    def test_on_full_batches_changes_nothing(self) -> None:
        """But the order in which rows are added up."""
        assert_close(
            everything(quadratic_run(clup(batch_reuse=True, local_steps=3))),
            everything(quadratic_run(clup(local_steps=3))),
            atol=1e-6,
        )

    def test_needs_a_number_of_steps(self) -> None:
        with pytest.raises(ConfigError, match="local_steps"):
            simulation(clup(batch_reuse=True))


class TestDynamic:
    @pytest.mark.parametrize("engine", ["sequential", "vectorized"])
    @pytest.mark.parametrize("gamma", ["mean", "edge"])
    def test_one_value_is_constant_fedclup_bit_for_bit(self, engine: str, gamma: str) -> None:
        """Products with λ = 0.5 are exact, so it does not matter that λ is a tensor; clients also get λ itself."""
        rules = {"gamma": gamma, "smoothness": 3.0}
        constant = simulation(clup(lam=0.5, **rules), engine=engine, rounds=4, fraction=0.6)
        one = simulation(
            clup(schedule=dynamic(values=[0.5], patience=1, tol=-NEVER), **rules),
            engine=engine,
            rounds=4,
            fraction=0.6,
        )
        assert_same(dict(constant.server.items()), dict(one.server["w"].items()))
        assert_same(personal(constant), personal(one))
        assert one.traffic.up == constant.traffic.up
        assert one.traffic.down_unicast == constant.traffic.down_unicast + 4 * 3
        assert one.traffic.down_multicast == constant.traffic.down_multicast + 4

    def test_another_value_is_constant_fedclup_up_to_rounding(self) -> None:
        constant = simulation(clup(lam=0.3), rounds=3)
        one = simulation(clup(schedule=dynamic(values=[0.3])), rounds=3)
        assert_close(personal(constant), personal(one))

    @pytest.mark.parametrize("patience", [1, 3])
    def test_lambda_only_grows_and_stays_for_the_patience(self, patience: int) -> None:
        ladder = (0.1, 0.4, 1.6, 5.0)
        rule = dynamic(start=0.1, least=0.1, factor=4, most=5, patience=patience, tol=-NEVER)
        method = clup(schedule=rule, lr_rule="deterministic", smoothness=L)
        assert isinstance(method.schedule, Dynamic)
        assert method.schedule.ladder == pytest.approx(ladder)
        sim, seen = quadratic_simulation(method, 3), []
        for _ in range(5 * patience + 2):
            seen.append(lam_of(sim))
            sim.step()
        # The first window needs an error more.
        held = [patience + 1, patience, patience]
        wanted = np.repeat(ladder, [*held, len(seen) - sum(held)])
        np.testing.assert_allclose(seen, wanted)

    def test_ladder_passes_from_zero_to_the_smallest_and_ends_at_the_largest(self) -> None:
        rule = Dynamic(least=0.1, most=0.5)
        assert rule.ladder == pytest.approx((0, 0.1, 0.2, 0.4, 0.5))
        assert Dynamic(start=0.5, most=0.5).ladder == (0.5,)
        assert Dynamic(values=(0.0, 2.0)).ladder == (0.0, 2.0)

    def test_waits_while_the_error_falls_and_grows_when_it_stops(self) -> None:
        sim = quadratic_simulation(clup())
        rule = Dynamic(values=(0.5, 1.0, 4.0), patience=2, tol=0.1)
        lam, memory, seen = 0.5, rule.memory(), []
        for error in (8.0, 4.0, 2.0, 1.9, 1.85, 1.0, 0.95, 0.5, 0.49, 0.47):
            lam, memory = rule.after(lam, memory, replies(sim, [error] * CLIENTS), sim.server)
            seen.append(lam)
        # 2 → 1.85 is the first fall by less than a tenth; then 1.85 → 0.95 → 0.49 (by way of the other parity).
        assert seen == [0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0]

    def test_error_is_weighted_as_models_are(self) -> None:
        sim = quadratic_simulation(clup(weights="samples"))
        errors = np.arange(1.0, CLIENTS + 1)
        uniform = Dynamic().error(replies(sim, errors.tolist()))
        assert float(uniform) == pytest.approx(errors.mean())
        weighted = Dynamic().error(replace(replies(sim, errors.tolist()), weighting="samples"))
        assert float(weighted) == pytest.approx(float(shares("samples") @ torch.from_numpy(errors)))

    @pytest.mark.parametrize("engine", ["sequential", "vectorized"])
    def test_nothing_travels_while_lambda_is_zero_and_v_once_when_it_leaves(self, engine: str) -> None:
        sim = quadratic_simulation(
            clup(schedule=dynamic(values=[0, 2.0], patience=2, tol=-NEVER)), 2, engine=engine
        )
        start = global_weight(sim)
        alone = quadratic_simulation("local", 2, engine=engine)
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

    @pytest.mark.parametrize("gamma", ["mean", "theory", "edge"])
    @pytest.mark.parametrize("lr_rule", ["run", "deterministic", "stochastic"])
    def test_every_round_is_that_of_its_lambda(self, gamma: str, lr_rule: str) -> None:
        """η, γ and the pull follow λ; v_i and w go on."""
        ladder, steps, local = (0.0, 0.4, 1.5), 3, Reference()
        method = clup(
            gamma=gamma,
            lr_rule=lr_rule,
            smoothness=L,
            convexity=MU,
            schedule=dynamic(values=ladder, patience=2, tol=-NEVER),
        )
        sim = quadratic_simulation(method, steps, fraction=0.5)
        w, v = global_weight(sim), personal_weights(sim)
        lams = [0.0] * 4 + [0.4] * 2 + [1.5] * 4
        for t, lam in enumerate(lams):
            ids = list(sim.sample(sim.round))
            eta = {
                "run": LR,
                "deterministic": 1 / (lam + L),
                "stochastic": min(MU * (lam + L) / (4 * L * (lam + MU) ** 2), 1 / (lam + L)),
            }[lr_rule]
            for i in ids:
                v[i] = local.descend(i, v[i], steps, eta, lam, w)
            if t == 3:
                w = v[ids].mean(0)
            elif lam > 0:
                share = {"mean": 1.0, "theory": (lam + L) / (2 * L), "edge": (lam + L) / L}[gamma]
                w = w + share * (v[ids] - w).mean(0)
            sim.step()
            np.testing.assert_allclose(global_weight(sim), w, atol=3e-5)
            np.testing.assert_allclose(personal_weights(sim), v, atol=3e-5)

    @pytest.mark.parametrize("gamma", ["mean", "theory", "edge"])
    def test_ends_at_the_optimum_of_the_last_lambda(self, gamma: str) -> None:
        rule = dynamic(values=[0, 0.2, 1.5], patience=1)
        method = clup(schedule=rule, gamma=gamma, lr_rule="deterministic", smoothness=L)
        sim = quadratic_run(method, 45, steps=15)
        w, v = closed_form(*curvature(), shares("uniform"), 1.5)
        assert lam_of(sim) == 1.5
        np.testing.assert_allclose(global_weight(sim), w.numpy(), atol=2e-5)
        np.testing.assert_allclose(personal_weights(sim), v.numpy(), atol=2e-5)

    @pytest.mark.parametrize("lr_rule", ["run", "deterministic"])
    def test_engines_agree_while_lambda_moves(self, lr_rule: str) -> None:
        rule = dynamic(values=[0, 0.5, 2.0], patience=1, tol=-NEVER)
        method = clup(schedule=rule, lr_rule=lr_rule, smoothness=20.0)
        train = TrainConfig(epochs=2, batch_size=4, lr=0.05)
        first, *others = (
            simulation(method, "mlp", engine, chunk=chunk, rounds=6, train=train, fraction=0.8)
            for engine, chunk in (("sequential", None), ("vectorized", None), ("vectorized", 2))
        )
        assert lam_of(first) == 2.0
        for other in others:
            assert_close(everything(first), everything(other))
            assert other.traffic == first.traffic

    @pytest.mark.parametrize("engine", ["sequential", "vectorized"])
    @pytest.mark.parametrize("stop", range(1, 7))
    def test_resumed_anywhere_it_goes_on_exactly(self, stop: int, engine: str) -> None:
        """Silent rounds, the round of leaving 0, and both values of λ."""
        method = clup(schedule=dynamic(values=[0, 0.3, 2.0], patience=2, tol=0.5))
        whole = simulation(method, "mlp", engine, rounds=9, fraction=0.6)
        begun = simulation(method, "mlp", engine, rounds=stop, fraction=0.6)
        tensors, facts = begun.dump()
        resumed = simulation(method, "mlp", engine, fraction=0.6)
        resumed.load({name: tensor.clone() for name, tensor in tensors.items()}, facts)
        for _ in range(9 - stop):
            resumed.step()
        assert_same(everything(whole), everything(resumed))
        assert whole.traffic == resumed.traffic
        assert lam_of(whole) > 0

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
            ((_, found),) = sim.newcomer_models((NEWCOMER,), 0)
            assert_same({n: t[0] for n, t in found.items()}, wanted)
            ((_, adapted),) = sim.newcomer_models((NEWCOMER,), 2)
            assert not torch.equal(adapted["head.weight"], found["head.weight"])
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
    @pytest.mark.parametrize(
        ("samples", "constant", "spread"), [(200, 5.0, 1.0), (1, 0.5, 1e-3), (None, 3.0, 1.0)]
    )
    def test_estimates_the_heterogeneity_once(
        self, samples: int | None, constant: float, spread: float
    ) -> None:
        """The clients' optima and the start are scaled by `spread`, so that R is above or below 1/√n."""
        given = {} if samples is None else {"samples": samples}
        rule = {"kind": "heuristic", "switch": 3, "constant": constant, "most": 1e9, **given}
        data = quadratic_federation()
        data = replace(data, source=replace(data.source, y=data.source.y * spread))
        sim = quadratic_simulation(clup(lam=0.5, schedule=rule), 4, data=data)
        w = sim.server["w"] * spread
        sim.server = TensorDict({**dict(sim.server.items()), "w": w})
        sim.states.put(range(CLIENTS), w.unsqueeze(0).expand(CLIENTS))
        for _ in range(2):
            sim.step()
            assert lam_of(sim) == 0.5
        received = global_weight(sim)
        sim.step()
        n = float(data.sizes().mean()) if samples is None else samples
        radius = np.linalg.norm(personal_weights(sim) - received, axis=1).mean()
        near = spread != 1.0
        assert near == (radius < 1 / np.sqrt(n))
        wanted = constant / (np.sqrt(n) * radius) if near else constant / (n * radius**2)
        for _ in range(3):
            assert lam_of(sim) == pytest.approx(wanted, rel=1e-5)
            sim.step()

    def test_has_a_largest_lambda_where_clients_do_not_differ(self) -> None:
        sim = quadratic_simulation(clup())
        same = replies(sim, [1.0] * CLIENTS)
        lam, _ = Heuristic(switch=1, most=7.0).after(0.5, TensorDict(), same, sim.server)
        assert lam == 7.0
        lam, _ = Heuristic(switch=2, most=7.0).after(0.5, TensorDict(), same, sim.server)
        assert lam == 0.5


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
            ({"schedule": "growing"}, "growing|kind"),
            ({"schedule": {"kind": "dynamic", "values": [1, 0.5]}}, "rise"),
            ({"schedule": {"kind": "dynamic", "values": [-1, 0.5]}}, "rise"),
            ({"schedule": {"kind": "dynamic", "values": [1], "factor": 3}}, "leave out factor"),
            ({"schedule": {"kind": "dynamic", "start": 20}}, "above most"),
            ({"schedule": {"kind": "dynamic", "factor": 1}}, "factor"),
            ({"schedule": {"kind": "dynamic", "patience": 0}}, "patience"),
            ({"schedule": {"kind": "heuristic"}}, "switch"),
            (
                {
                    "schedule": {"kind": "heuristic", "switch": 1},
                    "local_steps": "theory",
                    "smoothness": 2.0,
                    "convexity": 1.0,
                },
                "every λ",
            ),
        ],
    )
    def test_are_named(self, options: dict[str, Any], match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            make_method("fedclup", options)

    def test_rules_are_made_by_name(self) -> None:
        assert clup(schedule="dynamic").schedule == Dynamic()
        rule = {"kind": "corollary", "radius": 1, "rho": 1, "samples": 5, "clients": 2}
        assert isinstance(clup(schedule=rule, smoothness=2, convexity=1).schedule, Corollary)


def test_the_card_of_a_round_with_a_changing_lambda() -> None:
    """Down d + 1, up d."""
    sim = simulation(clup(schedule=dynamic(values=[1.0, 2.0])), "batch_norm", rounds=2)
    d = parts(model("batch_norm")).d
    assert sim.traffic.up == 2 * 5 * d
    assert sim.traffic.down_unicast == 2 * 5 * (d + 1)
    assert WEIGHT not in sim.server.keys()  # noqa: SIM118


def test_the_heuristic_needs_something_to_be_sent() -> None:
    with pytest.raises(ConfigError, match="heuristic needs lam > 0"):
        make_method("fedclup", {"lam": 0.0, "schedule": {"kind": "heuristic", "switch": 2}})


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_rate_that_is_sent_is_the_rate_that_is_known(engine: str) -> None:
    """With momentum, decay and clipping: η multiplies all of them, as torch's SGD does."""
    rule = {"lr_rule": "deterministic", "smoothness": 6.0}
    train = replace(TRAIN, momentum=0.5, weight_decay=0.1, clip=0.3)
    told = clup(schedule=dynamic(values=[0.5]), **rule)
    a, b = (
        simulation(method, engine=engine, train=train, rounds=3, fraction=0.6)
        for method in (told, clup(lam=0.5, **rule))
    )
    assert_close(personal(a), personal(b), atol=1e-6)
