"""ResNets of every width and depth, with residual adapters: counts as printed and by formula, nearly equal at first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tailorfl.errors import ConfigError, ModelError
from tailorfl.models import ResidualAdapter, build, load_weights, save_weights, select
from tailorfl.models.resnet import BLOCKS

SHAPE, SMALL = (3, 32, 32), (3, 17, 17)


def scalars(blocks: tuple[int, ...], w: int, channels: int, outputs: int, stem: int = 7) -> int:
    """Every layer counted: stem, then for each block two 3×3 convolutions and norms, and the projections."""
    total, before = channels * w * stem**2 + 2 * w, w
    for stage, count in enumerate(blocks):
        width = w * 2**stage
        for block in range(count):
            inputs = before if block == 0 else width
            total += 9 * inputs * width + 9 * width**2 + 4 * width
            if block == 0 and inputs != width:
                total += inputs * width + 2 * width
        before = width
    return total + before * outputs + outputs


def count(net: nn.Module, selector: str = "all") -> int:
    """Scalars of the parameters that a selector picks."""
    picked = select(net, selector)
    return sum(p.numel() for name, p in net.named_parameters() if name in picked)


def in_adapters(net: nn.Module) -> int:
    return sum(p.numel() for m in net.modules() if isinstance(m, ResidualAdapter) for p in m.parameters())


@pytest.fixture
def no_values() -> Iterator[None]:
    """Networks have shapes and no numbers."""
    with torch.device("meta"):
        yield


@pytest.mark.usefixtures("no_values")
@pytest.mark.parametrize(
    ("width", "norm"),
    [
        *((8, "batch"), (40, "group"), (64, "batch")),
        *(
            pytest.param(width, norm, marks=pytest.mark.slow)
            for width, norm in ((8, "group"), (40, "batch"), (64, "group"))
        ),
    ],
)
@pytest.mark.parametrize("name", ["resnet10", "resnet18", "resnet34"])
def test_counts_follow_the_formula(name: str, width: int, norm: str) -> None:
    blocks = BLOCKS[name]
    net = build(name, SHAPE, 10, width=width, norm=norm, adapters=True)
    widths = [width * 2**stage for stage in range(4)]
    adapters = [2 * depth * (w**2 + 2 * w) for depth, w in zip(blocks, widths, strict=True)]
    stages = (net.layer1, net.layer2, net.layer3, net.layer4)
    assert [in_adapters(stage) for stage in stages] == adapters
    assert [stage[0].conv2.out_channels for stage in stages] == widths
    assert count(net) == scalars(blocks, width, 3, 10) + sum(adapters)
    norms = 2 * width + sum(4 * depth * w for depth, w in zip(blocks, widths, strict=True))
    assert count(net, "adapter+head") == sum(adapters) + norms + 80 * width + 10
    small = build(name, (1, 17, 17), 4, width=width, norm=norm, stem="cifar")
    assert count(small) == scalars(blocks, width, 1, 4, stem=3)


@pytest.mark.usefixtures("no_values")
@pytest.mark.parametrize(
    ("name", "classes", "whole", "adapters", "norms", "adapter_set"),
    [
        ("resnet18", 10, 12_581_962, 1_400_320, 7_808, 1_413_258),
        ("resnet18", 65, 12_610_177, 1_400_320, 7_808, 1_441_473),
        ("resnet34", 65, 23_848_065, 2_530_048, 15_232, 2_578_625),
        ("resnet20", 10, 303_322, 33_600, 1_376, 35_626),
    ],
)
def test_counts_are_those_of_the_paper_and_of_the_small_resnets(
    name: str, classes: int, whole: int, adapters: int, norms: int, adapter_set: int
) -> None:
    net = build(name, SHAPE, classes, adapters=True)
    assert (count(net), in_adapters(net)) == (whole, adapters)
    assert (count(net, "adapter"), count(net, "adapter+head")) == (adapters + norms, adapter_set)
    assert not any("downsample" in entry for entry in select(net, "adapter"))


@pytest.mark.parametrize("name", ["resnet18", "resnet20"])
def test_at_first_the_network_is_nearly_the_one_without(name: str, tmp_path) -> None:
    """So weights of a plain network can be loaded, and what they do is kept."""
    torch.manual_seed(0)
    narrow = {"width": 16} if name == "resnet18" else {}
    plain = build(name, SMALL, 4, **narrow).eval()
    adapted = build(name, SMALL, 4, adapters=True, dropout=0.3, **narrow).eval()
    report = load_weights(adapted, save_weights(plain.state_dict(), tmp_path / "plain.safetensors"))
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
    added = torch.einsum("oi,bihw->bohw", adapter.conv.weight[:, :, 0, 0], adapter.norm(x))
    torch.testing.assert_close(adapter(x), x + added)
    assert float(adapter.conv.weight.detach().std()) == pytest.approx(1e-4, rel=0.5)
    assert torch.equal(adapter.norm.weight, torch.ones(8))


@pytest.mark.usefixtures("no_values")
@pytest.mark.parametrize(("name", "inside"), [("resnet18", 16), ("resnet20", 18)])
def test_dropout_is_in_the_adapters_or_before_the_head(name: str, inside: int) -> None:
    def places(**options: object) -> set[str]:
        net = build(name, SMALL, 4, **options)
        return {name for name, part in net.named_modules() if isinstance(part, nn.Dropout)}

    assert places() == places(adapters=True) == set()
    assert places(dropout=0.3) == {"dropout"}
    assert all(".adapter" in name for name in places(adapters=True, dropout=0.3))
    assert len(places(adapters=True, dropout=0.3)) == inside


def test_names_and_random_numbers_are_those_of_the_published_width() -> None:
    states = []
    for name, options in (("resnet18", {}), ("resnet18", {"width": 64}), ("resnet10", {"width": 8})):
        torch.manual_seed(3)
        states.append(build(name, SMALL, 4, **options).state_dict())
    published, named, ten = states
    assert all(torch.equal(value, named[key]) for key, value in published.items())
    assert list(named) == list(build("resnet18", SMALL, 4, width=8).state_dict()) == list(published)
    assert set(ten) == {key for key in published if ".1." not in key or "downsample" in key}


def test_narrow_networks_run_forward_and_backward() -> None:
    net = build("resnet10", (1, 17, 17), 3, width=8)
    net(torch.randn(4, 1, 17, 17)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("width", [0, -8, 12, 4, 8.0, True, "8"])
def test_widths_are_multiples_of_eight(width: object) -> None:
    with pytest.raises(ConfigError, match="positive multiple of 8"):
        build("resnet18", SHAPE, 10, width=width)


def test_unfitting_dropout_and_a_missing_part_are_errors() -> None:
    for name in ("resnet18", "resnet20"):
        with pytest.raises(ConfigError, match="dropout must lie"):
            build(name, SMALL, 4, dropout=1.0)
    with pytest.raises(ModelError, match="adapters=True"):
        select(build("resnet18", SMALL, 4), "adapter")
