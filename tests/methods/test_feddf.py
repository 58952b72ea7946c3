"""FedDF: what the server distils, from whom, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from methods.reductions import fedavg
from methods.settings import Card, Row, make
from methods.small import (
    CLASSES,
    PUBLIC,
    TRAIN,
    assert_close,
    assert_same,
    everything,
    federation,
    model,
    shared,
    simulation,
)
from tailorfl.core.server_distill import ServerDistillation
from tailorfl.data.federation import Federation
from tailorfl.errors import ConfigError
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training import tree

CONTRACTS = {
    "feddf": Row(
        Card(whole, whole, whole, False, True),
        {"distil": {"steps": 3, "batch_size": 4, "lr": 1e-3}},
        still={"distil": {"steps": 0}},
        same=(
            fedavg("T01", distil={"steps": 0}, said=True),
            fedavg("T01", distil={"rounds": 0}, said=True),
        ),
    ),
}


MODELS = {"small": model("logistic"), "middle": model("mlp"), "large": model("batch_norm")}
"""Any names will do, as long as no folder is called so."""
ASSIGNMENT = ("small", "large", "middle", "small", "large", "middle")


def mixed(distil: dict[str, Any] | None = None, rounds: int = 2, **settings: Any) -> Simulation:
    sim = Simulation(
        make("feddf", **({} if distil is None else {"distil": distil})),
        federation(),
        MODELS,
        TRAIN,
        assignment=ASSIGNMENT,
        **settings,
    )
    for _ in range(rounds):
        sim.step()
    return sim


def test_without_distillation_every_architecture_is_fedavg_of_its_clients() -> None:
    sim = mixed({"steps": 0})
    base = federation()
    for name in ("small", "large"):
        ids = [i for i in range(base.num_clients) if ASSIGNMENT[i] == name]
        alone = Federation(
            base.source,
            *(tuple(part[i] for i in ids) for part in (base.train, base.val, base.test, base.names)),
            len(ids),
        )
        full = replace(TRAIN, batch_size=0)  # a client of another number draws other batches
        own = Simulation(make("fedavg"), alone, MODELS[name], full)
        together = Simulation(make("feddf", distil={"steps": 0}), base, MODELS, full, assignment=ASSIGNMENT)
        for _ in range(2):
            own.step()
            together.step()
        w, expected = together.global_model(name), own.global_model()
        assert w is not None
        assert expected is not None
        assert_close(tree.tensors(w), tree.tensors(expected), atol=1e-6)
    assert sim.round == 2


def test_with_one_architecture_and_no_steps_it_is_fedavg() -> None:
    assert_same(
        shared(simulation(make("feddf", distil={"steps": 0}), rounds=3)),
        shared(simulation("fedavg", rounds=3)),
    )


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize("average", ["logits", "probabilities"])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_loss_is_the_divergence_from_the_mean_of_the_teachers(
    link: Any, average: Any, temperature: float
) -> None:
    """Against the formula written out, teachers of two architectures counted once each."""
    public = federation().public
    assert public is not None
    teachers = [(MODELS["small"], 2), (MODELS["middle"], 3)]
    stacks = [
        (
            m,
            TensorDict(
                {n: torch.stack([m.init(s).get(n) for s in range(k)]) for n in tree.tensors(m.init(0))}, [k]
            ),
        )
        for m, k in teachers
    ]
    distil = ServerDistillation(temperature=temperature, average=average, link=link)
    logits = torch.stack([m(m.init(s), public.x) for m, k in teachers for s in range(k)]) / temperature

    def sigma(z: Tensor) -> Tensor:
        return z.softmax(-1) if link == "softmax" else z.sigmoid()

    expected = sigma(logits.mean(0)) if average == "logits" else sigma(logits).mean(0)
    targets = distil.targets(stacks, public)
    torch.testing.assert_close(targets, expected)
    student = MODELS["large"]
    out = student(student.init(9), public.x)
    p, q = expected, sigma(out / temperature)
    divergence = p * (p / q).log()
    if link == "sigmoid":
        divergence = divergence + (1 - p) * ((1 - p) / (1 - q)).log()
    torch.testing.assert_close(distil.loss(out, targets), divergence.sum(1).mean() * temperature**2)


def test_a_student_that_equals_its_only_teacher_does_not_move() -> None:
    sim = simulation("feddf")
    w = sim.init
    distil = ServerDistillation(steps=5, batch_size=3)
    assert sim.context.public is not None
    targets = distil.targets([(sim.model, w.unsqueeze(0))], sim.context.public)
    x = sim.context.public.x
    leaves = {n: t.clone().requires_grad_() for n, t in tree.tensors(w).items()}
    grads = torch.autograd.grad(distil.loss(sim.model(leaves, x), targets), list(leaves.values()))
    assert max(float(g.abs().max()) for g in grads) < 1e-7


def test_distillation_is_adam_by_hand_and_leaves_teachers_statistics_and_start_alone() -> None:
    sim = simulation("feddf", "batch_norm")
    start = {n: t.clone() for n, t in tree.tensors(sim.init).items()}
    targets = torch.full((PUBLIC, CLASSES), 1.0 / CLASSES)
    distil = ServerDistillation(steps=4, batch_size=PUBLIC, lr=0.01)
    assert sim.context.public is not None
    found = tree.tensors(distil.distil(sim.init, targets, sim.context, 0))
    assert_same(start, tree.tensors(sim.init))
    params = {n: start[n].clone().requires_grad_() for n in sim.model.parameters}
    optimizer = torch.optim.Adam(list(params.values()), lr=0.01)
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 0.005 * (1 + float(torch.cos(torch.tensor(torch.pi * step / 4))))
        optimizer.zero_grad()
        log_q = sim.model({**start, **params}, sim.context.public.x).log_softmax(1)
        (targets * (targets.log() - log_q)).sum(1).mean().backward()
        optimizer.step()
    assert_close(found, {**start, **{n: t.detach() for n, t in params.items()}}, atol=1e-5)
    assert_same({n: found[n] for n in sim.model.buffers}, {n: start[n] for n in sim.model.buffers})


def test_distillation_brings_the_student_towards_the_ensemble() -> None:
    sim = mixed({"steps": 0}, rounds=1)
    public = sim.context.public
    assert public is not None
    distil = ServerDistillation(steps=200, batch_size=PUBLIC, lr=0.02)
    targets = torch.nn.functional.one_hot(torch.arange(PUBLIC) % CLASSES, CLASSES) * 0.9 + 0.1 / CLASSES
    for c in sim.context.architectures.values():
        before = distil.loss(c.model(c.init, public.x), targets)
        after = distil.loss(c.model(distil.distil(c.init, targets, c, 0), public.x), targets)
        assert float(after) < 0.2 * float(before)


def test_an_architecture_of_which_nobody_took_part_still_learns_from_the_others() -> None:
    sim = mixed({"steps": 3, "batch_size": 4, "lr": 1e-2}, rounds=0, fraction=0.2)
    (client,) = sim.sample(0)
    before = {n: sim.global_model(n) for n in MODELS}
    sim.step()
    for name in MODELS:
        old, new = before[name], sim.global_model(name)
        assert old is not None
        assert new is not None
        assert not torch.equal(old.get(MODELS[name].parameters[0]), new.get(MODELS[name].parameters[0]))
    assert ASSIGNMENT[client] in MODELS


def test_the_best_model_on_validation_samples_is_kept() -> None:
    base = federation()
    sim = simulation("feddf", data=replace(base, server=base.val[0]))
    assert sim.context.validation is not None
    torch.testing.assert_close(sim.context.validation.x, base.source.x[torch.from_numpy(base.val[0])])
    wrong = torch.zeros(PUBLIC, CLASSES)
    wrong[:, (int(sim.context.validation.y[0]) + 1) % CLASSES] = 1.0  # teaches what validation contradicts
    options: dict[str, Any] = {"steps": 30, "lr": 0.1, "check_every": 1, "patience": 5}
    kept = ServerDistillation(**options, select="best").distil(sim.init, wrong, sim.context, 0)
    last = ServerDistillation(**options).distil(sim.init, wrong, sim.context, 0)

    def loss(w: TensorDict) -> float:
        source = sim.context.validation
        assert source is not None
        return float(torch.nn.functional.cross_entropy(sim.model(w, source.x), source.y))

    assert loss(kept) <= loss(sim.init) < loss(last)


def test_only_the_first_rounds_are_distilled_on_request() -> None:
    distil = {"steps": 3, "batch_size": 4, "lr": 1e-2, "rounds": 1}
    some, none = simulation(make("feddf", distil=distil)), simulation(make("feddf", distil={"steps": 0}))
    some.step()
    none.step()
    assert not torch.equal(some.server["w "].get("head.weight"), none.server["w "].get("head.weight"))
    none.server = some.server
    some.step()
    none.step()
    assert_same(everything(some), everything(none))


def test_teachers_predict_in_slices_that_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows at once as an evaluation of so many models takes; the slices change nothing."""
    sim = simulation("feddf")
    public, models = sim.context.public, torch.stack([sim.init] * 3)
    assert public is not None
    whole = ServerDistillation().targets([(sim.model, models)], public)
    monkeypatch.setattr("tailorfl.training.cohort.INPUT_BYTES", 4 * 3 * 64 * 2)  # two rows of three clients
    seen = []
    take = type(public).take
    monkeypatch.setattr(
        type(public), "take", lambda source, rows: (seen.append(len(rows)), take(source, rows))[1]
    )
    torch.testing.assert_close(ServerDistillation().targets([(sim.model, models)], public), whole)
    assert seen == [2, 2, 2]


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="public set"):
        simulation("feddf", data=replace(federation(), public=None))
    with pytest.raises(ConfigError, match="validation samples on the server"):
        simulation(make("feddf", distil={"select": "best"}))
    with pytest.raises(ConfigError, match="patience"):
        make("feddf", distil={"patience": 5})
