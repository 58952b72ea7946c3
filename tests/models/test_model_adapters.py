"""Residual adapters: counts as printed, identity at first, and what belongs to the adapter part."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tailorfl.core.method import make_method
from tailorfl.data.build import build as build_federation
from tailorfl.engines.make import make_engine
from tailorfl.errors import ConfigError, ModelError
from tailorfl.models import ResidualAdapter, build, load_weights, save_weights, select
from tailorfl.models.functional import Model
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig

SMALL = (3, 17, 17)


def scalars(module: nn.Module, names: frozenset[str]) -> int:
    parameters = dict(module.named_parameters())
    return sum(parameters[name].numel() for name in names if name in parameters)


@pytest.mark.parametrize(
    ("name", "classes", "whole", "adapters", "norms", "adapter_set"),
    [
        ("resnet18", 10, 12_581_962, 1_400_320, 7_808, 1_413_258),
        ("resnet18", 65, 12_610_177, 1_400_320, 7_808, 1_441_473),
        ("resnet18", 5, 12_579_397, 1_400_320, 7_808, 1_410_693),
        ("resnet34", 65, 23_848_065, 2_530_048, 15_232, 2_578_625),
        ("resnet20", 10, 303_322, 33_600, 1_376, 35_626),
    ],
)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_counts_are_those_of_the_paper_and_of_the_small_resnets(
    name: str, classes: int, whole: int, adapters: int, norms: int, adapter_set: int, norm: str
) -> None:
    net = build(name, (3, 32, 32), classes, adapters=True, norm=norm)
    inside = [part for part in net.modules() if isinstance(part, ResidualAdapter)]
    assert sum(p.numel() for p in net.parameters()) == whole
    assert sum(p.numel() for part in inside for p in part.parameters()) == adapters
    assert scalars(net, select(net, "adapter")) == adapters + norms
    assert scalars(net, select(net, "adapter+head")) == adapter_set
    assert not any("downsample" in entry for entry in select(net, "adapter"))
    # A stage of width c with b blocks has 2b(c² + 2c).
    for at in range(1, 4 if name == "resnet20" else 5):
        stage = net.get_submodule(f"layer{at}")
        width = net.conv1.out_channels * 2 ** (at - 1)
        held = [part for part in stage.modules() if isinstance(part, ResidualAdapter)]
        assert sum(p.numel() for part in held for p in part.parameters()) == 2 * len(stage) * (
            width**2 + 2 * width
        )


@pytest.mark.parametrize("name", ["resnet18", "resnet20"])
def test_at_first_the_network_is_nearly_the_one_without(name: str, tmp_path) -> None:
    """So weights of a plain network can be loaded, and what they do is kept."""
    torch.manual_seed(0)
    plain, adapted = (
        build(name, SMALL, 4).eval(),
        build(name, SMALL, 4, adapters=True, dropout=0.3).eval(),
    )
    save_weights(plain.state_dict(), tmp_path / "plain.safetensors")
    report = load_weights(adapted, tmp_path / "plain.safetensors")
    assert set(report.missing) == {name for name in adapted.state_dict() if ".adapter" in name}
    x = torch.randn(5, *SMALL)
    torch.testing.assert_close(adapted(x), plain(x), atol=0.02, rtol=0.02)
    for part in adapted.modules():
        if isinstance(part, ResidualAdapter):
            nn.init.zeros_(part.conv.weight)
    torch.testing.assert_close(adapted(x), plain(x))


def test_an_adapter_adds_its_convolution_once() -> None:
    adapter = ResidualAdapter(8, "group", 0.0)
    x = torch.randn(2, 8, 3, 3)
    torch.testing.assert_close(
        adapter(x), x + torch.einsum("oi,bihw->bohw", adapter.conv.weight[:, :, 0, 0], adapter.norm(x))
    )
    assert float(adapter.conv.weight.std()) == pytest.approx(1e-4, rel=0.5)
    assert torch.equal(adapter.norm.weight, torch.ones(8))


@pytest.mark.parametrize(("name", "inside"), [("resnet18", 16), ("resnet20", 18)])
def test_dropout_is_in_the_adapters_or_before_the_head(name: str, inside: int) -> None:
    def places(**options: object) -> set[str]:
        net = build(name, SMALL, 4, **options)
        return {name for name, part in net.named_modules() if isinstance(part, nn.Dropout)}

    assert places() == places(adapters=True) == set()
    assert places(dropout=0.3) == {"dropout"}
    assert all(".adapter" in name for name in places(adapters=True, dropout=0.3))
    assert len(places(adapters=True, dropout=0.3)) == inside
    with pytest.raises(ConfigError, match="dropout must lie"):
        build(name, SMALL, 4, dropout=1.0)


def test_a_network_without_adapters_has_no_adapter_part() -> None:
    with pytest.raises(ModelError, match="adapters=True"):
        select(build("resnet18", SMALL, 4), "adapter")


@pytest.mark.parametrize("method", ["fedalt", "fedsim"])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_adapter_partition_keeps_adapters_on_the_client(method: str, engine: str) -> None:
    """What is sent is the network without adapters and block norms."""
    federation = build_federation("digits", samples=24, clients=2, partition="iid")
    wide = torch.nn.functional.interpolate(federation.source.x, size=(17, 17))
    federation = replace(federation, source=replace(federation.source, x=wide))
    net = Model(lambda: build("resnet18", (1, 17, 17), 10, adapters=True, norm="group"))
    train = TrainConfig(epochs=None, steps=1, batch_size=2, lr=0.01)
    sim = Simulation(
        make_method(method, {"personal_part": "adapter"}), federation, net, train, engine=make_engine(engine)
    )
    sim.step()
    sent = net.scalars - 1_400_320 - 7_808
    assert (sim.traffic.up, sim.traffic.down_unicast) == (2 * sent, 2 * sent)
    ((_, models),) = sim.personal_models((0, 1))
    name = "layer1.0.adapter1.conv.weight"
    assert not torch.equal(models[name][0], models[name][1])
    assert torch.equal(models["conv1.weight"][0], models["conv1.weight"][1])
