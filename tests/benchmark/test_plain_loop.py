"""The plain loop that engines are measured against computes what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from methods.small import FACTORIES, TRAIN, assert_close, federation, simulation
from tailorfl.benchmark import plain_loop
from tailorfl.benchmark.clock import Seconds
from tailorfl.benchmark.plain_loop import LoopClient, PlainLoop, Variant, fastest, shuffled, variants
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.models.dropout import ChannelDropout, Dropout
from tailorfl.models.functional import Model
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort, TrainConfig

PLAIN = TrainConfig(epochs=2, batch_size=4, lr=0.05)


def batches(cohort: Cohort, position: int) -> list[Tensor]:
    """The batches that FedAvg's fit sees on a client."""
    config = cohort.config
    plan = cohort.plan((position,), "train", config.batch_size, config.epochs, config.steps, 0)
    pairs = zip(plan.rows[0], plan.count[0].tolist(), strict=True)
    return [torch.from_numpy(np.ascontiguousarray(rows[:count])) for rows, count in pairs if count]


USUAL = Variant()


def looped(sim: Simulation, variant: Variant = USUAL) -> dict[str, Tensor]:
    """FedAvg's next round by the plain loop, with the batches of the engines."""
    cohort = sim.cohort(range(sim.participants))
    loop = PlainLoop(sim.model, cohort.source, cohort.loss, cohort.config, variant)
    keys = cohort.keys(range(len(cohort.ids)), "train/noise").astype(np.int64)
    total = int(cohort.sizes.sum())
    clients = [
        LoopClient(len(rows) / total, batches(cohort, i), int(keys[i]))
        for i, rows in enumerate(cohort.members)
    ]
    return loop.round(tree.tensors(sim.server["w"]), clients)


def stepped(sim: Simulation) -> dict[str, Tensor]:
    """The next round by the engine; counters of batches are left out."""
    sim.step()
    return {n: t for n, t in tree.tensors(sim.server["w"]).items() if t.is_floating_point()}


@pytest.mark.parametrize(
    ("model", "variant"),
    [
        *((name, USUAL) for name in FACTORIES if name != "dropout"),
        *(
            (name, Variant(a, b))
            for name in ("cnn2", "batch_norm")
            for a in (False, True)
            for b in (False, True)
        ),
    ],
    ids=str,
)
def test_a_round_is_that_of_an_engine_for_every_model_and_variant(model: str, variant: Variant) -> None:
    """With momentum and weight decay."""
    sim = simulation("fedavg", model, "sequential", train=TRAIN, rounds=1)
    expected = looped(sim, variant=variant)
    assert all(t.is_contiguous() for t in expected.values())
    assert_close(stepped(sim), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"momentum": 0.9, "weight_decay": 0.1, "schedule": "linear"},
        {"optimizer": "adamw"},
        {"optimizer": "adamw", "weight_decay": 0.1, "schedule": "linear"},
        {"clip": 0.5},
        {"batch_size": 0},
        {"epochs": None, "steps": 5},
    ],
)
def test_a_round_is_that_of_an_engine_for_every_setting(changed: dict[str, Any]) -> None:
    sim = simulation("fedavg", "mlp", train=replace(PLAIN, **changed))
    expected = looped(sim)
    # AdamW divides small gradients by their own size, which turns rounding errors into visible ones.
    assert_close(stepped(sim), expected, atol=2e-4 if "optimizer" in changed else 1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", ["none", "flip_crop"])
def test_images_are_normalised_and_augmented_alike(kind: Any) -> None:
    base = federation()
    pixels = (base.source.x * 40 + 128).clamp(0, 255).to(torch.uint8)
    source = Source(
        "tiny", pixels, base.source.y, "classification", base.source.outputs, None, {}, {}, (0.5,), (0.3,),
        augment=kind,
    )  # fmt: skip
    parts = (base.train, base.val, base.test)
    sim = simulation(
        "fedavg", "mlp", data=Federation(source, *parts, base.names, base.num_clients), train=PLAIN
    )
    expected = looped(sim)
    assert_close(stepped(sim), expected, atol=1e-6, rtol=1e-4)


def test_batches_are_the_same_however_many_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = simulation("fedavg", "mlp", train=PLAIN)
    expected = looped(sim)
    monkeypatch.setattr(plain_loop, "GATHERED_BYTES", 2 * 4 * 64 * 4)  # two batches of four
    found = looped(sim)
    assert all(torch.equal(found[name], t) for name, t in expected.items())


def test_the_variant_that_takes_the_least_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = simulation("fedavg", "cnn2", train=PLAIN)
    cohort = sim.cohort((0,))
    given = (sim.model, cohort.source, cohort.loss, cohort.config)
    every = variants(*given[:2], given[3])
    assert len({str(one) for one in every}) == len(every) == 4
    monkeypatch.setattr(plain_loop, "TRIAL_SECONDS", 0.0)
    clients, start = [LoopClient(1.0, batches(cohort, 0))], tree.tensors(sim.server["w"])
    state = torch.random.get_rng_state()
    for quick in every:
        times = iter([1.0 + (one != quick) for one in every] * plain_loop.TRIAL_PASSES)

        def clock(run: Callable[[], object], times: Iterator[float] = times) -> Seconds:
            run()
            return Seconds(*[next(times)] * 2)

        monkeypatch.setattr(plain_loop, "timed", clock)
        assert fastest(*given, start, clients).variant == quick
    assert torch.equal(torch.random.get_rng_state(), state)


def test_only_what_differs_is_tried() -> None:
    flat, images = simulation("fedavg", "mlp").model, simulation("fedavg", "cnn2").model
    source, adamw = federation().source, replace(PLAIN, optimizer="adamw")
    assert variants(flat, source, PLAIN) == [Variant(False, False), Variant(False, True)]
    assert variants(images, source, adamw) == [Variant(False, False), Variant(True, False)]


def test_dropout_of_the_loop_is_that_of_torch() -> None:
    sim = simulation("fedavg", "dropout", train=PLAIN)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = looped(sim)
        torch.manual_seed(0)
        assert all(torch.equal(t, first[n]) for n, t in looped(sim).items())
        assert any(not torch.equal(t, first[n]) for n, t in looped(sim).items())


def test_dropout_of_channels_in_the_loop_is_that_of_torch() -> None:
    layers = nn.Sequential(
        nn.Conv2d(1, 2, 1), ChannelDropout(0.3), nn.Flatten(), nn.Linear(2, 2), Dropout(0.4)
    )
    copied = plain_loop._own_copy(Model(lambda: layers), False)
    assert [(type(copied[k]), copied[k].p) for k in (1, 4)] == [(nn.Dropout2d, 0.3), (nn.Dropout, 0.4)]


def test_every_pass_sees_every_row_once() -> None:
    rows = torch.arange(100, 111)
    found = shuffled(rows, 4, 22 + 4)
    assert [len(batch) for batch in found] == [4, 4, 3, 4, 4, 3, 4]
    for start in (0, 3):
        assert torch.equal(torch.cat(found[start : start + 3]).sort().values, rows)
    # a rest that is too small is left out
    assert [len(b) for b in shuffled(torch.arange(9), 4, 12, min_batch=2)] == [4, 4, 4]
    assert shuffled(torch.arange(1), 4, 3, min_batch=2) == []
    assert [len(b) for b in shuffled(torch.arange(9), 0, 18)] == [9, 9]
