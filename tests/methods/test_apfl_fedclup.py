"""APFL and FedCLUP against their algorithm boxes in float64 numpy, over rounds of partial participation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from methods.quadratics import (
    CLIENTS,
    DIM,
    LR,
    WEIGHT,
    L,
    Reference,
    global_weight,
    personal_weights,
    quadratic_simulation,
    states,
)
from methods.reductions import Same, fedavg, in_run, local
from methods.settings import LAM, PROX_STEPS, Card, Limit, Row, make
from methods.small import assert_close, model, personal, simulation
from tailorfl.core.method import make_method
from tailorfl.errors import ConfigError
from tailorfl.methods.apfl import mix
from tailorfl.testing.contract import twice, whole
from tailorfl.training import tree

CONTRACTS = {
    "apfl": Row(
        Card(whole, whole, twice, True, True),
        {"alpha": 0.3, "adaptive": True},
        Limit("pooled_and_local", 1, {"alpha": 0.8}),
        same=(
            *(fedavg("T02", exact=False, alpha=a, adaptive=False) for a in (0.0, 0.4, 1.0)),
            local(exact=False, alpha=1.0, adaptive=False),
        ),
        remarks=(({"alpha": 0.0, "adaptive": False}, "deploys copies", "test_method_reductions.py"),),
    ),
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


class TestAPFL:
    @pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
    @pytest.mark.parametrize("adaptive", [False, True])
    def test_follows_the_algorithm_on_quadratics(self, alpha: float, adaptive: bool) -> None:
        """The mixture's gradient is taken with the w of after its step.

        Α moves once a round, before the first step.
        """
        steps, local = 3, Reference()
        sim = quadratic_simulation(
            make("apfl", alpha=alpha, adaptive=adaptive, weights="uniform"), steps, fraction=0.5
        )
        w = global_weight(sim)
        v, own, a = personal_weights(sim), np.tile(w, (CLIENTS, 1)), np.full(CLIENTS, alpha)
        moved = False
        for _ in range(12):
            ids = sim.sample(sim.round)
            for i in ids:
                own[i] = w
                if adaptive:
                    g = local.grad(i, a[i] * v[i] + (1 - a[i]) * own[i])
                    a[i], old = np.clip(a[i] - LR * g @ (v[i] - own[i]), 0, 1), a[i]
                    moved |= abs(a[i] - old) > 0.01
                for _ in range(steps):
                    own[i] = own[i] - LR * local.grad(i, own[i])
                    v[i] = v[i] - LR * a[i] * local.grad(i, a[i] * v[i] + (1 - a[i]) * own[i])
            w = np.mean(own[list(ids)], axis=0)
            sim.step()
            np.testing.assert_allclose(global_weight(sim), w, atol=3e-5)
            np.testing.assert_allclose(states(sim, "v"), v, atol=3e-5)
            np.testing.assert_allclose(sim.states.get(range(CLIENTS))["alpha"].numpy(), a, atol=3e-5)
            np.testing.assert_allclose(
                personal_weights(sim), a[:, None] * v + (1 - a[:, None]) * own, atol=3e-5
            )
        assert moved == adaptive

    def test_alpha_stays_between_zero_and_one(self) -> None:
        sim = quadratic_simulation(make("apfl", alpha=0.5, adaptive=True, weights="uniform"), 2, lr=0.5)
        seen = []
        for _ in range(10):
            sim.step()
            seen.append(sim.states.get(range(CLIENTS))["alpha"])
        alphas = torch.stack(seen)
        assert 0 <= alphas.min() <= alphas.max() <= 1

    def test_with_batches_the_mixture_keeps_its_own_statistics(self) -> None:
        """Every model of the pair counts its own batches; the mixture is of parameters only."""
        sim = simulation(make("apfl", alpha=0.4, adaptive=False, weights="uniform"), "batch_norm", rounds=2)
        state, models = sim.states.get((0,)), personal(sim, (0,))
        for name in sim.model.parameters:
            torch.testing.assert_close(models[name], 0.4 * state["v", name] + 0.6 * state["w", name])
        for name in sim.model.buffers:
            assert torch.equal(models[name], state["v", name])
        steps = 2 * 4  # 15 samples are batches of 4, 4, 4 and 3, twice
        assert int(models["1.num_batches_tracked"]) == steps

    def test_linear_models_mix_alike_in_parameters_and_logits(self) -> None:
        of, x = model("logistic"), torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        v, w = of.init(1), of.init(2)
        mixed = mix(torch.tensor(0.3), v, w)
        torch.testing.assert_close(of(mixed, x), 0.3 * of(v, x) + 0.7 * of(w, x), atol=1e-6, rtol=1e-5)
        deep = model("mlp")
        v, w = deep.init(1), deep.init(2)
        assert not torch.allclose(
            deep(mix(torch.tensor(0.3), v, w), x), 0.3 * deep(v, x) + 0.7 * deep(w, x), atol=1e-3
        )

    def test_the_first_gradient_is_that_of_the_first_training_batch(self) -> None:
        """Adaptive α uses the batch that the first step then uses."""
        sim = simulation("apfl")
        cohort = sim.cohort((0,))
        from tailorfl.core.client import Client

        with torch.no_grad():
            found = Client(cohort, torch.tensor(0)).gradient(sim.init)
        rows = torch.from_numpy(cohort.plan((0,), "train", 4, 1, None, 0).rows[0, 0])
        leaf = {n: t.clone().requires_grad_() for n, t in sim.init.items()}
        loss = torch.nn.functional.cross_entropy(
            sim.model(leaf, cohort.source.take(rows)), cohort.source.y[rows]
        )
        names = list(sim.model.parameters)
        assert_close(
            dict(found.items()),
            dict(zip(names, torch.autograd.grad(loss, [leaf[n] for n in names]), strict=True)),
        )


class TestFedCLUP:
    @pytest.mark.parametrize("gamma", ["mean", "theory", "edge"])
    @pytest.mark.parametrize("lr_rule", ["run", "deterministic"])
    def test_follows_the_algorithm_on_quadratics(self, gamma: str, lr_rule: str) -> None:
        lam, steps, local = 1.5, 4, Reference()
        step = {"mean": 1.0, "theory": (lam + L) / (2 * L), "edge": (lam + L) / L}[gamma]
        lr = LR if lr_rule == "run" else 1 / (lam + L)
        method = make("fedclup", lam=lam, gamma=gamma, smoothness=L, lr_rule=lr_rule, weights="uniform")
        sim = quadratic_simulation(method, steps, fraction=0.5)
        w, v = global_weight(sim), personal_weights(sim)
        for _ in range(12):
            ids = list(sim.sample(sim.round))
            for i in ids:
                v[i] = local.descend(i, v[i], steps, lr, lam, w)
            w = w - step / lam * lam * np.mean(w - v[ids], axis=0)
            sim.step()
            np.testing.assert_allclose(global_weight(sim), w, atol=3e-5)
            np.testing.assert_allclose(personal_weights(sim), v, atol=3e-5)

    @pytest.mark.parametrize(
        ("lam", "gamma"), [(0.5, "mean"), (0.5, "theory"), (0.5, "edge"), (4.0, "theory"), (4.0, "edge")]
    )
    def test_gamma_lambda_is_the_servers_step(self, lam: float, gamma: str) -> None:
        """γ = 1/λ, (λ+L)/(2λL) and 1/λ + 1/L."""
        rule = {"mean": 1 / lam, "theory": (lam + L) / (2 * lam * L), "edge": 1 / lam + 1 / L}
        method = make_method("fedclup", {"lam": lam, "gamma": gamma, "smoothness": L})
        assert method.server_step(lam) == pytest.approx(rule[gamma] * lam)  # type: ignore[attr-defined]

    def test_rules_that_need_the_smoothness_refuse_to_guess_it(self) -> None:
        for options in ({"gamma": "theory"}, {"gamma": "edge"}, {"lr_rule": "deterministic"}):
            with pytest.raises(ConfigError, match="smoothness"):
                make_method("fedclup", options)

    def test_without_pull_the_server_stands_still(self) -> None:
        sim = quadratic_simulation(make("fedclup", lam=0.0, weights="uniform"), 3)
        before = global_weight(sim)
        for _ in range(3):
            sim.step()
        np.testing.assert_array_equal(global_weight(sim), before)

    def test_with_batch_statistics_the_server_averages_them(self) -> None:
        sim = simulation(
            make("fedclup", gamma="theory", smoothness=2.0, weights="uniform"), "batch_norm", rounds=1
        )
        sent, w = sim.states.get(range(5)), sim.server
        for name in sim.model.buffers:
            mean = sent[name].float().mean(0) if sent[name].is_floating_point() else sent[name][0]
            torch.testing.assert_close(w[name], mean.to(w[name].dtype))

    def test_shapes_of_the_quadratic_bed(self) -> None:
        sim = quadratic_simulation(make("fedclup"))
        assert dict(tree.leaves(sim.server))[WEIGHT].shape == (1, DIM)
