"""Augmented training images: the same in every engine and in every fit, and nowhere but in training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from methods.settings import one_of
from methods.small import assert_close
from tailorfl.core.context import Context
from tailorfl.core.method import make_method
from tailorfl.core.server_training import ServerDistillation
from tailorfl.data.federation import Federation
from tailorfl.data.source import Augmentation, Source, augment
from tailorfl.engines.choice import make_engine
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import tree
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.plan import Length
from tailorfl.training.update import Optimizer

SIZES = (7, 1, 12, 5)
FLOAT = {"rtol": 1e-4, "atol": 1e-5}


def source(count: int, kind: Augmentation, seed: int = 0) -> Source:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (count, 1, 8, 8), generator=rng, dtype=torch.uint8)
    y = torch.randint(0, 3, (count,), generator=rng)
    return Source("pictures", x, y, "classification", 3, mean=(0.5,), std=(0.3,), augment=kind)


def federation(kind: Augmentation = "flip_crop") -> Federation:
    total = sum(SIZES)
    cuts = np.cumsum(SIZES)[:-1]
    train, val, test = (
        tuple(np.split(part, cuts)) for part in np.split(np.arange(3 * total, dtype=np.int64), 3)
    )
    public = source(16, kind, seed=9)
    return Federation(source(3 * total, kind), train, val, test, tuple("abcd"), len(SIZES), public=public)


def simulation(
    method: str = "fedavg",
    engine: str = "sequential",
    data: Federation | None = None,
    dropout: float = 0.2,
    **train: Any,
) -> Simulation:
    options = {"distil": {"steps": 5, "batch_size": 8}} if method == "feddf" else {}
    net = Model(lambda: build("mlp", (1, 8, 8), 3, hidden=(12,), dropout=dropout))
    config = TrainConfig(**{"epochs": 2, "batch_size": 4, "lr": 0.1, **train})
    chunk = 3 if engine == "vectorized" else None
    return Simulation(
        make_method(method, options), data or federation(), net, config, engine=make_engine(engine, chunk)
    )


def states(sim: Simulation) -> dict[str, Tensor]:
    """Everything after two rounds."""
    for _ in range(2):
        sim.step()
    return {n: t.clone() for n, t in sim.dump()[0].items() if not n.endswith("clients")}


@pytest.mark.parametrize("method", one_of(2, ["ditto", "pfedme", "feddf", "scaffold"]))
def test_every_engine_sees_the_same_images(method: str) -> None:
    assert_close(states(simulation(method)), states(simulation(method, "vectorized")), **FLOAT)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_evaluation_sees_images_as_they_are(engine: str) -> None:
    """Models trained alike score alike on augmented and plain federations, in metrics, losses and predictions."""
    sim = simulation("ditto", engine)
    sim.step()
    plain = simulation("ditto", engine, data=federation("none"))
    plain.load(*sim.dump())
    sets = Protocol(("val", "local", "global"))
    assert evaluate(sim, sets) == evaluate(plain, sets)

    def look(client, state, received):
        facts = {"train": client.loss(received), "val": client.loss(received, "val")}
        return (TensorDict({**facts, "public": client.predict_public(received)}, batch_size=[]),)

    found = [s.run(range(4), TensorDict({}, batch_size=[4]), s.init, look)[0] for s in (sim, plain)]
    assert_close(dict(tree.leaves(found[0])), dict(tree.leaves(found[1])), **FLOAT)


def test_the_public_term_of_a_client_sees_images_as_they_are() -> None:
    """Private images plain, public ones marked for augmentation: PerFed-CKT trains as if they were not."""
    plain = federation("none")
    marked = replace(plain, public=replace(plain.public, augment="flip_crop"))
    assert_close(*(states(simulation("perfed_ckt", data=data)) for data in (plain, marked)), **FLOAT)


def test_fits_of_one_purpose_share_images_however_they_repeat_or_are_cut() -> None:
    """The loss at a fixed point is that of the batches that were drawn."""

    def look(client, state, received):
        def loss(purpose="train", **length):
            client.fit(received, length=Length(**length), optimizer=Optimizer(lr=0.0), purpose=purpose)
            return client.metrics[purpose]

        losses = {
            "whole": loss(steps=3),
            "twice": loss(steps=3, repeat=2),
            "elsewhere": loss("other", steps=3),
            "pieces": torch.stack([loss(steps=1, first=first) for first in range(3)]).mean(),
        }
        return (TensorDict(losses, batch_size=[]),)

    sim = simulation(engine="vectorized", dropout=0.0)  # masks differ by repetition
    losses = sim.run(range(4), TensorDict({}, batch_size=[4]), sim.init, look)[0]
    torch.testing.assert_close(losses["twice"], losses["whole"])
    torch.testing.assert_close(losses["pieces"], losses["whole"])
    assert not torch.allclose(losses["elsewhere"], losses["whole"])


def test_distillation_shows_teachers_and_student_the_same_changed_images() -> None:
    """By hand on the images that the teacher was asked for; where none is changed, by the table of targets."""
    sim = simulation("feddf")
    context, start = sim.context, sim.init
    public = context.public
    assert public is not None
    distil = ServerDistillation(steps=4, batch_size=8, lr=0.01)
    other = sim.model.init(5)
    teacher = distil.teacher([(sim.model, other.unsqueeze(0))], public)
    seen: list[Tensor] = []

    def student(targets: Any, of: Context, round: int = 0) -> Tensor:
        return distil.distil(start, targets, of, round)["fc1.weight"]

    def watched(x: Tensor) -> Tensor:
        seen.append(x)
        targets = sim.model(other, x).softmax(1)
        torch.testing.assert_close(teacher(x), targets)  # type: ignore[operator]
        return targets

    first = student(watched, context)
    whole = public.take(torch.arange(len(public)))
    assert [len(x) for x in seen] == [8] * 4
    assert not any(torch.equal(image, known) for x in seen[:2] for image in x[:3] for known in whole)
    leaves = {n: t.clone().requires_grad_() for n, t in tree.leaves(start)}
    optimizer = torch.optim.Adam(leaves.values(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for x in seen:
        optimizer.zero_grad()
        distil.loss(sim.model(leaves, x), sim.model(other, x).softmax(1)).backward()
        optimizer.step()
        schedule.step()
    torch.testing.assert_close(first, leaves["fc1.weight"].detach(), **FLOAT)
    torch.testing.assert_close(student(teacher, context), first, **FLOAT)
    assert not torch.equal(student(teacher, context, 1), student(teacher, context))

    plain = replace(context, public=replace(public, augment="none"))
    table = distil.teacher([(sim.model, other.unsqueeze(0))], plain.public)  # type: ignore[arg-type]
    assert isinstance(table, Tensor)
    torch.testing.assert_close(student(teacher, plain), student(table, plain), **FLOAT)
    assert not torch.allclose(first, student(table, plain))


def test_a_step_of_training_sees_the_batch_that_its_key_makes() -> None:
    """One step of SGD on one client, against autograd on images that are augmented by hand."""
    sim = simulation("local", dropout=0.0, steps=1, epochs=None)
    cohort = sim.cohort((2,))
    rows = torch.from_numpy(cohort.plan((0,), "train", 4, None, 1, 0).rows[0, 0])
    key = torch.from_numpy(cohort.keys((0,), "train/noise").astype(np.int64))
    data = sim.federation.source
    changed = augment(data.x[rows], key[0], "flip_crop").float().div(255).sub(0.5).div(0.3)
    leaves = {n: t.clone().requires_grad_() for n, t in tree.leaves(sim.init)}
    torch.nn.functional.cross_entropy(sim.model(leaves, changed), data.y[rows]).backward()
    sim.step((2,))
    (((_, models)),) = sim.personal_models((2,))
    for name, leaf in leaves.items():
        torch.testing.assert_close(models[name][0], (leaf - 0.1 * leaf.grad).detach())
