"""PerAda's distillation and FedOA's pull, as their papers state them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from methods.reductions import ALONE, THREE, WITHOUT, Same, ditto_of_perada, drawn, fedavg, in_run, local
from methods.settings import LAM, Card, Limit, Row, make
from methods.small import (
    CLASSES,
    TRAIN,
    assert_close,
    assert_same,
    federation,
    model,
    personal,
    shared,
    simulation,
)
from tailorfl.core.context import Context
from tailorfl.core.server_distill import ServerDistillation
from tailorfl.errors import ConfigError
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import twice, whole
from tailorfl.training.plan import Length

CONTRACTS = {
    "perada": Row(
        Card(whole, whole, twice, True, True),
        # Of a linear model the mean of the teachers' logits is what the student already gives: a gradient of nothing
        # but rounding, which Adam scales up to whole steps.
        {"lam": 0.5, "distil": {"steps": 3, "batch_size": 4, "lr": 1e-3, "average": "probabilities"}},
        Limit("ditto", 1, {"lam": LAM, "distil": {"steps": 0}}),
        still={"distil": {"steps": 0}},
        same=(
            fedavg("T02", lam=0.7, **WITHOUT),
            ditto_of_perada("global", **WITHOUT),
            ditto_of_perada("personal", **WITHOUT),
            ditto_of_perada("global", lam=1.4, variant="released", **WITHOUT),
            ditto_of_perada("personal", lam=1.4, variant="released", **WITHOUT),
            ditto_of_perada("global", distil={"rounds": 0}),
            ditto_of_perada("personal", distil={"rounds": 0}),
            local(lam=0.0),
            replace(local(lam=0.0, personal_epochs=3, personal_lr=0.02), other_train={**THREE, "lr": 0.02}),
            drawn("personal", personal_epochs=0),
        ),
    ),
    # Some tests look at a single round, the first, in which personal models otherwise do not train yet.
    "fedoa": Row(
        Card(whole, whole, twice, True, True),
        {"lam": 0.5, "personal_start": 0},
        still={"own_init": False},
        same=(
            Same("T07", {"lam": 0.2}, "fedit"),
            Same("T07", {"lam": 0.7, "distance": "batch_l2"}, "fedit"),
            local(lam=0.0, own_init=False, personal_start=0),
            in_run(drawn("personal", personal_start=2, own_init=False), rounds=2),
        ),
        remarks=(
            ({"lam": 0.0, "personal_start": 1}, "trains personal models alone", "test_reduction_remarks.py"),
        ),
    ),
    "fedsdr": Row(
        Card(whole, whole, twice, True, True),
        {"lam": 0.5, "personal_start": 0},
        still={"own_init": False},
        mixes_samples=True,
        same=(
            Same("T07", {"lam": 0.7}, "fedit"),
            Same("T07", ALONE, "fedoa", ALONE, "personal", "personal"),
            local(lam=0.0, own_init=False, personal_start=0),
            replace(
                local(exact=False, lam=0.7, own_init=False, personal_start=0),
                train={"batch_size": 1},
                models=("mlp",),
            ),
            in_run(drawn("personal", personal_start=2, own_init=False), rounds=2),
        ),
        remarks=(
            ({"lam": 0.0, "own_init": True}, "trains personal models alone", "test_reduction_remarks.py"),
        ),
    ),
}


PLAIN = replace(TRAIN, momentum=0.0, weight_decay=0.0)


def context() -> Context:
    return simulation("perada").context


def test_the_gradient_of_distillation_is_student_minus_teacher_over_the_batch() -> None:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(7, CLASSES, generator=rng, requires_grad=True)
    teacher = torch.randn(7, CLASSES, generator=rng).softmax(1)
    loss = ServerDistillation().loss(logits, teacher)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, (logits.detach().softmax(1) - teacher) / 7)


def test_a_student_that_equals_its_teacher_does_not_move() -> None:
    ctx = context()
    assert ctx.public is not None
    w = ctx.init
    distil = ServerDistillation(steps=5, batch_size=4)
    targets = distil.targets([(ctx.model, torch.stack([w, w]))], ctx.public)
    out = ctx.model(w, ctx.public.take(torch.arange(len(ctx.public)))).requires_grad_()
    (gradient,) = torch.autograd.grad(distil.loss(out, targets), out)
    assert float(gradient.abs().max()) < 1e-7


def test_distillation_brings_the_global_model_nearer_to_the_mean_of_the_clients_predictions() -> None:
    ctx = context()
    assert ctx.public is not None
    distil = ServerDistillation(steps=60, batch_size=6, lr=1e-2)
    teachers = torch.stack([ctx.model.init(s) for s in (1, 2, 3)])
    before = {n: t.clone() for n, t in teachers.items()}
    targets = distil.targets([(ctx.model, teachers)], ctx.public)
    rows = torch.arange(len(ctx.public))

    def distance(w: object) -> float:
        return float(distil.loss(ctx.model(w, ctx.public.take(rows)), targets))  # type: ignore[union-attr, arg-type]

    start = teachers.mean(0)
    assert distance(distil.distil(start, targets, ctx, 0)) < 0.2 * distance(start)
    assert_same({str(n): t for n, t in teachers.items()}, before)


def test_the_personal_models_do_not_see_the_distillation_of_their_own_round() -> None:
    with_kd, without = simulation("perada"), simulation(make("perada", distil={"steps": 0}))
    with_kd.step()
    without.step()
    assert_same(personal(with_kd), personal(without))
    moved = [
        float((a - b).abs().max())
        for a, b in zip(shared(with_kd).values(), shared(without).values(), strict=True)
    ]
    assert max(moved) > 1e-4


def test_the_global_path_does_not_depend_on_the_personal_models() -> None:
    one, other = (simulation(make("perada", lam=lam), rounds=3, fraction=0.6) for lam in (0.0, 5.0))
    assert_same(shared(one), shared(other))


def test_the_released_code_distils_in_the_first_rounds_only() -> None:
    method = make("perada", variant="released")
    assert method._distillation("classification").rounds == 30  # type: ignore[attr-defined]
    assert method._distillation("multilabel").rounds == 5  # type: ignore[attr-defined]
    kept = make("perada", variant="released", distil={"rounds": 2})
    assert kept._distillation("classification").rounds == 2  # type: ignore[attr-defined]
    assert make("perada")._distillation("classification").rounds is None  # type: ignore[attr-defined]


def test_without_distillation_no_public_set_is_needed() -> None:
    bare = replace(federation(), public=None)
    simulation(make("perada", distil={"steps": 0}), data=bare, rounds=1)
    with pytest.raises(ConfigError, match="public"):
        simulation("perada", data=bare)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("method", ["perada", "fedoa", "fedit", "fedlora", "pfedme"])
def test_on_a_frozen_backbone_only_the_rest_is_trained_and_sent(method: str, engine: str) -> None:
    net = Model(lambda: build("mlp", (1, 8, 8), CLASSES, hidden=(8, 6), activation="tanh"), trainable="head")
    frozen = {n: t.clone() for n, t in net.module.named_parameters() if n in net.frozen}
    sim = Simulation(make(method), federation(), net, PLAIN, seed=0)
    for _ in range(3):
        sim.step()
    d_a = 6 * CLASSES + CLASSES
    assert sim.traffic.up == 3 * 5 * d_a
    assert sim.trained_scalars == d_a * sim.method.models_trained
    for name, tensor in net.module.named_parameters():
        if name in frozen:
            assert torch.equal(tensor, frozen[name])


def test_pfedme_by_epochs_is_its_formula() -> None:
    """θ from the θ before, then φ − 2λη(φ − θ) with `lr` = 2η."""
    sim = simulation(make("pfedme", personal_epochs=2, lam=0.3, lr=0.2), train=PLAIN)
    w = sim.init
    for _ in range(2):
        ids = tuple(range(5))
        before = sim.states.get(ids)
        (theta,) = sim.run(
            ids, before, w, lambda c, s, r: (c.fit(s, prox=(0.3, r), length=Length(epochs=2)),)
        )
        sim.step()
        assert_close(personal(sim), dict(theta.items()))
        sizes = torch.tensor([15.0, 1.0, 7.0, 9.0, 3.0])
        w = w - (w - theta) * 0.06
        w = TensorDict({n: torch.tensordot(sizes / sizes.sum(), t, dims=1) for n, t in w.items()})
        assert_close(shared(sim), dict(w.items()))


def distances(sim: Simulation) -> float:
    """Mean over clients and samples of the norm of the difference of personal and global features."""
    x = sim.federation.source.take(torch.arange(len(sim.federation.source)))
    _, centre = sim.model.outputs_and_features(sim.server, x)
    found: list[Tensor] = []
    for _, models in sim.personal_models(tuple(range(5))):
        for i in range(5):
            _, z = sim.model.outputs_and_features(models[i], x)
            found.append((z - centre).norm(dim=1).mean())
    return float(torch.stack(found).mean())


def test_a_stronger_pull_brings_features_nearer() -> None:
    found = []
    for lam in (0.0, 0.2, 1.0):
        sim = simulation(
            make("fedoa", lam=lam, own_init=True), train=replace(PLAIN, epochs=5, lr=0.02), rounds=20
        )
        found.append(distances(sim))
    assert found[0] > 1.2 * found[1] > 1.2 * 1.2 * found[2]


def test_a_personal_model_starts_as_a_copy_of_the_global_one_by_default() -> None:
    sim = simulation(make("fedoa", personal_start=1), rounds=1)
    assert_same(personal(sim), {n: t.expand(5, *t.shape) for n, t in sim.init.items()})


def test_a_personal_model_may_be_drawn_anew_and_trains_from_its_first_round_on() -> None:
    sim = simulation(make("fedoa", personal_start=1, own_init=True), rounds=1)
    fresh = sim.context.fresh(0)
    assert not torch.equal(fresh["head.weight"], sim.init["head.weight"])
    assert_same(personal(sim), {n: t.expand(5, *t.shape) for n, t in fresh.items()})
    sim.step()
    assert not torch.equal(personal(sim)["head.weight"][0], fresh["head.weight"])
    eager = simulation(make("fedoa", own_init=True), rounds=1)
    assert not torch.equal(personal(eager)["head.weight"][0], fresh["head.weight"])


def test_the_model_of_a_new_client_is_the_global_one() -> None:
    for name in ("perada", "fedoa"):
        sim = simulation(name, rounds=2)
        ((_, models),) = sim.newcomer_models((5,), 0)
        assert_same({str(n): t[0] for n, t in models.items()}, shared(sim))
    assert model("mlp").frozen == frozenset()
