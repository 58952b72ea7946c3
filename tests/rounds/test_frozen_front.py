"""What frozen layers give out is computed once: the same numbers, fewer passes, and never those of other weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from methods.settings import make
from methods.small import CLASSES, PUBLIC, assert_same, federation
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.choice import make_engine
from tailorfl.errors import ConfigError
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.frozen_front import Featured, FeatureSettings, FeatureTable
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.system import MaliciousConfig, SystemConfig
from tailorfl.training.cohort import TrainConfig

OFF, AUTO = FeatureSettings("off"), FeatureSettings("auto")
EVERYWHERE = Protocol(("val", "local", "global", "heldout", "shifted"), adapt_steps=(0, 1))


def exact(name: str, shape: tuple[int, ...], outputs: int, trainable: Any, **options: Any) -> Model:
    """A model in float64, in which sums in another order differ by nothing that matters."""

    def make() -> nn.Module:
        module = build(name, shape, outputs, **options).double()
        module.register_forward_pre_hook(lambda _, x: (x[0].double() if x[0].is_floating_point() else x[0],))
        return module

    return Model(make, trainable=trainable)


def resnet(trainable: Any, **options: Any) -> Model:
    return exact("resnet10", (1, 8, 8), CLASSES, trainable, width=8, stem="cifar", **options)


def head_only() -> Model:
    return resnet("head", dropout=0.3)


def top_adapters() -> Model:
    return resnet(["layer4.*adapter*", "layer4.*.bn*", "fc.*"], adapters=True)


def top_lora() -> Model:
    ends = ["layer.2.attention.self.query", "layer.2.attention.self.value"]
    return exact("bert", (9,), 3, None, vocabulary=64, layers=3, lora=2, lora_targets=ends)


@pytest.fixture
def images() -> Federation:
    """The tiny federation with a shifted copy of its samples."""
    base = federation()
    noise = torch.Generator().manual_seed(1)
    x = base.source.x + torch.randn(base.source.x.shape, generator=noise)
    return replace(base, shifted={"noisy": replace(base.source, name="noisy", x=x)})


@pytest.fixture(scope="module")
def texts() -> Federation:
    rng = np.random.default_rng(0)
    ids = rng.integers(2, 64, (90, 9))
    ids[np.arange(9) >= rng.integers(3, 10, (90, 1))] = 0
    y = torch.from_numpy(ids[:, 0] % 3)
    source = Source("words", torch.from_numpy(ids), y, "classification", 3, info={"pad": 0})
    rows = [np.arange(90)[k::4] for k in range(4)]
    parts = [[r[:12] for r in rows], [r[12:16] for r in rows], [r[16:] for r in rows]]
    return Federation(source, *parts, names=tuple("abcd"), num_clients=4)


def test_nobody_joins_a_run_whose_frozen_layers_are_computed_once(images: Federation) -> None:
    with pytest.raises(ConfigError, match=r"engine\.features"):
        simulation(images, head_only(), "fedavg", AUTO).extend(images)


def simulation(
    data: Federation,
    net: Model,
    method: str,
    features: FeatureSettings,
    engine: str = "sequential",
    **more: Any,
) -> Simulation:
    workers = more.pop("workers", 0)
    return Simulation(
        make(method),
        data,
        net,
        TrainConfig(epochs=None, steps=3, batch_size=8, lr=0.05),
        engine=make_engine(engine, workers=workers),
        seed=3,
        fraction=0.5,
        features=features,
        **more,
    )


def outcome(sim: Simulation, protocol: Protocol = EVERYWHERE) -> dict[str, Tensor]:
    """All states after three rounds, and everything that evaluations say of them."""
    for _ in range(3):
        sim.step()
    tensors = sim.dump()[0]
    order = tensors["clients/clients"].argsort()  # a store on disk keeps them in another one
    stored = {p for p, t in tensors.items() if p.startswith("clients/") and len(t) == len(order)}
    out = {p: t[order] if p in stored else t.clone() for p, t in tensors.items()}
    records = evaluate(sim, protocol)
    assert {str(r["set"]) for r in records} >= {"local", "global"}
    for name in ("loss", "accuracy"):
        out[name] = torch.tensor([float(r[name]) for r in records], dtype=torch.float64)
    return out


def apart(first: Simulation, second: Simulation, protocol: Protocol = EVERYWHERE) -> float:
    """The largest distance of two tensors of the same name, over their size, in what two runs come to."""
    one, other = outcome(first, protocol), outcome(second, protocol)
    assert one.keys() == other.keys()
    pairs = [(t.double().nan_to_num(), other[name].double().nan_to_num()) for name, t in one.items()]
    return max(float((a - b).norm()) / max(float(a.norm()), 1e-3) for a, b in pairs)


QUICK = [
    (top_adapters, "perada", "vectorized"),
    (head_only, "fedavg", "sequential"),
]
METHODS = [(head_only, name) for name in ("fedavg", "knn_per", "ditto")] + [
    (top_adapters, name) for name in ("perada", "fedrep", "local", "fedproto", "moon", "perfed_ckt")
]
SLOW = [(*case, e) for case in METHODS for e in ("sequential", "vectorized") if (*case, e) not in QUICK]


@pytest.mark.parametrize(
    ("net", "method", "engine"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_it_changes_nothing_but_the_rounding(
    images: Federation, net: Callable[[], Model], method: str, engine: str
) -> None:
    """In states after three rounds, and in all sets of an evaluation."""
    sim = simulation(images, net(), method, AUTO, engine)
    assert sim.features is not None, sim.features_note
    assert apart(simulation(images, net(), method, OFF), sim) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "engine"), [("fedoa", "vectorized"), ("fedoa", "sequential"), ("fedavg_ft", "vectorized")]
)
def test_of_a_transformer_whose_last_layer_has_lora(texts: Federation, method: str, engine: str) -> None:
    sim = simulation(texts, top_lora(), method, AUTO, engine)
    assert sim.features is not None, sim.features_note
    assert apart(simulation(texts, top_lora(), method, OFF), sim, Protocol(("local", "global"))) < 1e-9


def test_clients_that_train_on_flipped_labels_see_the_same_features(images: Federation) -> None:
    system = SystemConfig(malicious=MaliciousConfig(kind="label_flip", clients=(1,)))
    sims = [simulation(images, head_only(), "fedavg", features, system=system) for features in (OFF, AUTO)]
    assert apart(*sims) < 1e-9


def test_workers_and_files_have_the_same_bits(images: Federation, tmp_path: Path) -> None:
    expected = outcome(simulation(images, head_only(), "ditto", AUTO))
    disk = FeatureSettings("disk", folder=tmp_path / "new")
    sim = simulation(images, head_only(), "ditto", disk, workers=2, state_folder=tmp_path / "states")
    assert sim.features is not None
    assert sim.features.on_disk
    try:
        assert_same(outcome(sim), expected)
    finally:
        sim.engine.pool.close()  # type: ignore[attr-defined]
    files = [p for p in (tmp_path / "new").rglob("*") if p.is_file()]
    assert not files  # it has no name and goes with the process


class Counted(nn.Module):
    """A frozen layer that counts the samples that go through it."""

    seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        Counted.seen += len(x)
        out: Tensor = self.linear(x.flatten(1)).relu()
        return out


def counted() -> Model:
    def make() -> nn.Module:
        network = nn.Sequential(Counted(), nn.Linear(32, CLASSES))
        network.feature_boundary = "0"  # type: ignore[assignment]
        return network

    return Model(make, trainable="head")


def test_every_sample_goes_through_the_front_once(images: Federation) -> None:
    sim = simulation(images, counted(), "ditto", AUTO)
    Counted.seen = 0
    outcome(sim)
    assert (
        0 < Counted.seen <= len(images.source) + len(images.shifted["noisy"])
    )  # nothing asks for public samples
    at_once = Counted.seen
    outcome(sim)
    again = simulation(sim.given, counted(), "fedavg", AUTO)  # as another job on the same federation
    before = Counted.seen
    outcome(again)
    assert Counted.seen == before
    assert before - at_once <= 2 * len(sim.given.source)  # what looking for the cut took


@pytest.mark.parametrize("change", ["weights", "data", "scale"])
def test_features_of_other_weights_or_samples_are_never_used(images: Federation, change: str) -> None:
    """Runs on one federation share what is equal; here nothing is."""
    x = images.source.x.clone()
    data = replace(images, public=None, shifted={}, source=replace(images.source, x=x))
    first, net = simulation(data, counted(), "fedavg", AUTO), counted()
    outcome(first)
    if change == "weights":
        with torch.no_grad():
            net.module.get_parameter("0.linear.weight").mul_(2.0)
    elif change == "data":
        x[:] = x.flip(0)
    else:
        pixels = replace(data.source, x=(x.abs() * 16).to(torch.uint8), mean=(0.1,), std=(0.5,))
        data = replace(data, source=pixels)
    other = simulation(data, net, "fedavg", AUTO)
    assert apart(other, simulation(data, net, "fedavg", OFF)) < 1e-5
    rows = torch.arange(20)
    assert isinstance(first.federation.source, Featured)
    assert not torch.equal(first.federation.source.take(rows), other.federation.source.take(rows))


def test_where_it_cannot_be_the_run_says_why(images: Federation, caplog: pytest.LogCaptureFixture) -> None:
    plain, net = replace(images, shifted={}), top_adapters()
    pixels = (images.source.x.abs() * 15).to(torch.uint8)
    flipped = replace(plain, source=replace(images.source, x=pixels, augment="flip"))
    # Adapters that draw below the first one that trains.
    drawing = resnet(["layer4.*adapter*", "fc.*"], adapters=True, dropout=0.3)
    for data, model, features, note in (
        (plain, resnet("all"), AUTO, "nothing is frozen"),
        (plain, net, OFF, "engine.features is off"),
        (flipped, net, AUTO, "augmented"),
        (plain, drawing, AUTO, "before '"),
    ):
        assert note in simulation(data, model, "fedavg", features).features_note
    with caplog.at_level(logging.WARNING):
        full = simulation(plain, net, "fedavg", FeatureSettings("auto", 0.0, Path("/proc/none")))
    assert full.features is None
    assert "not kept" in caplog.text


def test_beyond_the_bound_they_lie_in_a_file(images: Federation, tmp_path: Path) -> None:
    sim = simulation(images, head_only(), "fedavg", FeatureSettings("auto", 1e-6, tmp_path))
    assert sim.features is not None
    assert sim.features.on_disk
    assert str(tmp_path) in sim.features_note
    clients = sum(int(images.sizes(part).sum()) for part in ("train", "val", "test"))
    samples = clients + len(images.shifted["noisy"]) + PUBLIC
    assert sim.features.bytes == samples * 64 * 8  # 8 x 8 channels of one pixel, in float64


@pytest.mark.parametrize("used", [32, 40, 64, 65])
def test_features_of_all_that_somebody_has_are_computed_at_once(images: Federation, used: int) -> None:
    """Rows in an order of their own: the first `used`, in whole blocks of 32, have numbers; the others have none."""
    sim = simulation(images, head_only(), "fedavg", AUTO)
    assert sim.features is not None
    front = sim.features.tables[0].front
    source = replace(images.source, x=images.source.x.repeat(3, 1, 1, 1), y=images.source.y.repeat(3))
    order = np.random.default_rng(0).permutation(len(source)).astype(np.int64)
    table = FeatureTable(source, front, order, used, None)
    table.fill(torch.device("cpu"))
    rows, computed = torch.from_numpy(order), min(-(-used // 32) * 32, len(order))
    torch.testing.assert_close(table.values[rows[:computed]], front(source.take(rows[:computed])))
    assert table.values[rows[computed:]].isnan().all()
    table.ensure(rows[-1:])
    assert torch.isfinite(table.values[rows[-1:]]).all()
