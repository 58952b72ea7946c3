"""What frozen layers give out is computed once: the same numbers, fewer passes, and never those of other weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tailorfl.core.method import make_method
from tailorfl.data.build import build as build_federation
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.make import make_engine
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.frozen_front import Featured, FeatureSettings, FeatureTable
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.system import MaliciousConfig, SystemConfig
from tailorfl.training.cohort import TrainConfig

OFF, AUTO = FeatureSettings("off"), FeatureSettings("auto")
EVERYWHERE = Protocol(("val", "local", "global", "heldout", "shifted"), adapt_steps=(0, 1))


def exact(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same in float64, in which sums in another order differ by nothing that matters."""

    def make() -> nn.Module:
        module = factory().double()
        module.register_forward_pre_hook(lambda _, x: (x[0].double() if x[0].is_floating_point() else x[0],))
        return module

    return make


def head_only(seed: int = 0) -> Model:
    net = exact(lambda: build("resnet10", (1, 8, 8), 10, width=8, stem="cifar", dropout=0.3))
    return Model(net, trainable="head", seed=seed)


def top_adapters(seed: int = 0) -> Model:
    net = exact(lambda: build("resnet10", (1, 8, 8), 10, width=8, stem="cifar", adapters=True))
    return Model(net, trainable=["layer4.*adapter*", "layer4.*.bn*", "fc.*"], seed=seed)


def top_lora(seed: int = 0) -> Model:
    ends = ["layer.2.attention.self.query", "layer.2.attention.self.value"]
    options: dict[str, Any] = {"vocabulary": 64, "layers": 3, "lora": 2, "lora_targets": ends}
    return Model(exact(lambda: build("bert", (9,), 3, **options)), seed=seed)


@pytest.fixture(scope="module")
def images() -> Federation:
    found = build_federation(
        "digits",
        samples=150,
        clients=5,
        heldout_clients=1,
        partition="dirichlet",
        partition_options={"alpha": 1.0},
        public="digits",
        public_samples=40,
    )
    noise = torch.Generator().manual_seed(1)
    other = replace(
        found.source, name="noisy", x=found.source.x + torch.randn(found.source.x.shape, generator=noise)
    )
    return replace(found, shifted={"noisy": other})


@pytest.fixture(scope="module")
def texts() -> Federation:
    rng = np.random.default_rng(0)
    ids = rng.integers(2, 64, (90, 9))
    ids[np.arange(9) >= rng.integers(3, 10, (90, 1))] = 0
    y = torch.from_numpy(ids[:, 0] % 3)
    source = Source("words", torch.from_numpy(ids), y, "classification", 3, info={"pad": 0})
    rows = [np.arange(90)[k::4] for k in range(4)]
    parts = [[own[:12] for own in rows], [own[12:16] for own in rows], [own[16:] for own in rows]]
    return Federation(source, *parts, names=tuple("abcd"), num_clients=4)


def simulation(
    federation: Federation,
    net: Model,
    method: str,
    features: FeatureSettings,
    engine: str = "sequential",
    options: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    **more: Any,
) -> Simulation:
    settings = {"epochs": None, "steps": 3, "batch_size": 8, "lr": 0.05, **(train or {})}
    workers = more.pop("workers", 0)
    return Simulation(
        make_method(method, dict(options or {})),
        federation,
        net,
        TrainConfig(**settings),
        engine=make_engine(engine, workers=workers),
        seed=3,
        fraction=0.5,
        features=features,
        **more,
    )


def outcome(sim: Simulation, rounds: int = 3, protocol: Protocol = EVERYWHERE) -> dict[str, Tensor]:
    """All states after some rounds, and everything that evaluations say of them."""
    for _ in range(rounds):
        sim.step()
    held = sim.dump()[0]
    order = held["clients/clients"].argsort()  # a store on disk keeps them in another one
    out = {
        p: t[order] if p.startswith("clients/") and len(t) == len(order) else t.clone()
        for p, t in held.items()
    }
    records = evaluate(sim, protocol)
    assert {str(r["set"]) for r in records} >= {"local", "global"}
    for name in ("loss", "accuracy"):
        out[name] = torch.tensor([float(r[name]) for r in records], dtype=torch.float64)
    return out


def apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest distance of two tensors of the same name, over their size."""
    assert one.keys() == other.keys()
    found = [0.0]
    for name, tensor in one.items():
        a, b = tensor.double().nan_to_num(), other[name].double().nan_to_num()
        found.append(float((a - b).norm()) / max(float(a.norm()), 1e-3))
    return max(found)


DISTILLING = {"distil": {"steps": 3, "batch_size": 16}}
CASES = [
    (head_only, "fedavg", "sequential", {}),
    (top_adapters, "perada", "vectorized", DISTILLING),
    (head_only, "knn_per", "vectorized", {}),
]
FURTHER = [
    (head_only, "fedavg", "vectorized", {}),
    (top_adapters, "perada", "sequential", DISTILLING),
    (head_only, "knn_per", "sequential", {}),
    *((net, name, engine, {}) for engine in ("sequential", "vectorized") for net, name in (
        (head_only, "ditto"), (top_adapters, "fedrep"), (top_adapters, "local"), (top_adapters, "fedproto"),
        (top_adapters, "moon"), (top_adapters, "perfed_ckt"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    ("net", "method", "engine", "options"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in FURTHER)],
)
def test_it_changes_nothing_but_the_rounding(
    images: Federation, net: Callable[[], Model], method: str, engine: str, options: Mapping[str, Any]
) -> None:
    """In states after three rounds, and in all sets of an evaluation."""
    whole = outcome(simulation(images, net(), method, OFF, options=options))
    sim = simulation(images, net(), method, AUTO, engine, options)
    assert sim.features is not None, sim.features_note
    assert apart(whole, outcome(sim)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "engine"),
    [
        ("fedoa", "vectorized"),
        pytest.param("fedoa", "sequential", marks=pytest.mark.slow),
        pytest.param("fedavg_ft", "vectorized", marks=pytest.mark.slow),
    ],
)
def test_of_a_transformer_whose_last_layer_has_lora(texts: Federation, method: str, engine: str) -> None:
    protocol = Protocol(("local", "global"))
    whole = outcome(simulation(texts, top_lora(), method, OFF), protocol=protocol)
    sim = simulation(texts, top_lora(), method, AUTO, engine)
    assert sim.features is not None, sim.features_note
    assert apart(whole, outcome(sim, protocol=protocol)) < 1e-9


def test_clients_that_train_on_flipped_labels_see_the_same_features(images: Federation) -> None:
    system = SystemConfig(malicious=MaliciousConfig(kind="label_flip", clients=(1,)))
    one, other = (
        simulation(images, head_only(), "fedavg", features, system=system) for features in (OFF, AUTO)
    )
    assert apart(outcome(one), outcome(other)) < 1e-9


def test_workers_and_files_have_the_same_bits(images: Federation, tmp_path: Path) -> None:
    expected = outcome(simulation(images, head_only(), "ditto", AUTO))
    on_disk = FeatureSettings("disk", folder=tmp_path / "new")
    several = simulation(
        replace(images), head_only(), "ditto", on_disk, workers=2, state_folder=tmp_path / "states"
    )
    assert several.features is not None
    assert several.features.on_disk
    try:
        found = outcome(several)
    finally:
        several.engine.pool.close()  # type: ignore[attr-defined]
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not [
        p for p in (tmp_path / "new").rglob("*") if p.is_file()
    ]  # it has no name and goes with the process


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


def counted(seed: int = 0) -> Model:
    def make() -> nn.Module:
        network = nn.Sequential(Counted(), nn.Linear(32, 10))
        network.feature_boundary = "0"  # type: ignore[assignment]
        return network

    return Model(make, trainable="head", seed=seed)


def test_every_sample_goes_through_the_front_once(images: Federation) -> None:
    sim = simulation(replace(images), counted(), "ditto", AUTO)
    Counted.seen = 0
    outcome(sim)
    assert (
        0 < Counted.seen <= len(images.source) + len(images.shifted["noisy"])
    )  # nothing asks for the public set
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
    federation = replace(images, public=None, shifted={})
    first = simulation(federation, counted(), "fedavg", AUTO)
    outcome(first)
    if change == "weights":
        net = counted()
        with torch.no_grad():
            net.module.get_parameter("0.linear.weight").mul_(2.0)
        other = simulation(federation, net, "fedavg", AUTO)
        assert apart(outcome(other), outcome(simulation(federation, net, "fedavg", OFF))) < 1e-5
    else:
        x, source = federation.source.x, federation.source
        if change == "data":
            x[:] = x.flip(0)
        else:
            changed = replace(source, x=(x * 16).to(torch.uint8), mean=(0.1,), std=(0.5,))
            federation = replace(federation, source=changed)
        other = simulation(federation, counted(), "fedavg", AUTO)
        assert apart(outcome(other), outcome(simulation(federation, counted(), "fedavg", OFF))) < 1e-5
        if change == "data":
            x[:] = x.flip(0)
    rows = torch.arange(20)
    assert isinstance(first.federation.source, Featured)
    assert not torch.equal(first.federation.source.take(rows), other.federation.source.take(rows))


def test_where_it_cannot_be_the_run_says_why(images: Federation, caplog: pytest.LogCaptureFixture) -> None:
    net = top_adapters()
    small = replace(images, shifted={})
    nothing = Model(lambda: build("resnet10", (1, 8, 8), 10, width=8, stem="cifar"))
    assert simulation(small, nothing, "fedavg", AUTO).features_note == "nothing is frozen"
    assert simulation(small, net, "fedavg", OFF).features_note == "engine.features is off"
    pixels = (images.source.x * 15).to(torch.uint8)
    flipped = replace(small, source=replace(images.source, x=pixels, augment="flip"))
    assert "augmented" in simulation(flipped, net, "fedavg", AUTO).features_note
    # Adapters that draw below the first one that trains.
    drawing = Model(
        lambda: build("resnet10", (1, 8, 8), 10, width=8, stem="cifar", adapters=True, dropout=0.3),
        trainable=["layer4.*adapter*", "fc.*"],
    )
    assert "stands before" in simulation(small, drawing, "fedavg", AUTO).features_note
    with caplog.at_level(logging.WARNING):
        full = simulation(small, net, "fedavg", FeatureSettings("auto", 0.0, Path("/proc/none")))
    assert full.features is None
    assert "not kept" in caplog.text


def test_beyond_the_bound_they_lie_in_a_file(images: Federation, tmp_path: Path) -> None:
    sim = simulation(images, head_only(), "fedavg", FeatureSettings("auto", 1e-6, tmp_path))
    assert sim.features is not None
    assert sim.features.on_disk
    assert str(tmp_path) in sim.features_note
    own = sum(
        int(images.sizes(part).sum()) for part in ("train", "val", "test")
    )  # not all digits that there are
    samples = own + len(images.shifted["noisy"]) + 40
    assert sim.features.bytes == samples * 64 * 8  # 8 x 8 channels of one pixel, in float64


@pytest.mark.parametrize("used", [32, 40, 64, 65])
def test_what_is_computed_at_once_are_the_features_of_all_that_somebody_has(
    images: Federation, used: int
) -> None:
    """Rows in an order of their own: the first `used`, in whole blocks of 32, have numbers; the others have none."""
    sim = simulation(images, head_only(), "fedavg", AUTO)
    assert sim.features is not None
    front = sim.features.tables[0].front
    order = np.random.default_rng(0).permutation(len(images.source)).astype(np.int64)
    table = FeatureTable(images.source, front, order, used, None)
    table.fill(torch.device("cpu"))
    computed = min(-(-used // 32) * 32, len(order))
    wanted = front(images.source.take(torch.from_numpy(order[:computed])))
    assert torch.isfinite(table.values[torch.from_numpy(order[:computed])]).all()
    torch.testing.assert_close(table.values[torch.from_numpy(order[:computed])], wanted)
    assert table.values[torch.from_numpy(order[computed:])].isnan().all()
    table.ensure(torch.from_numpy(order[-1:]))
    assert torch.isfinite(table.values[torch.from_numpy(order[-1:])]).all()
