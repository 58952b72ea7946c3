"""Narrower and shallower ResNets: counts by formula, and the published widths as they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tailorfl.errors import ConfigError
from tailorfl.models import ResidualAdapter, build, select
from tailorfl.models.resnet import BLOCKS

SHAPE = (3, 32, 32)


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


def adapters(blocks: tuple[int, ...], w: int) -> int:
    return sum(2 * count * ((w * 2**stage) ** 2 + 2 * w * 2**stage) for stage, count in enumerate(blocks))


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("width", [8, 16, 32, 40])
@pytest.mark.parametrize("name", ["resnet10", "resnet18", "resnet34"])
def test_counts_follow_the_formula(name: str, width: int, norm: str) -> None:
    net = build(name, SHAPE, 10, width=width, norm=norm)
    assert count(net) == scalars(BLOCKS[name], width, 3, 10)
    assert [stage[0].conv2.out_channels for stage in (net.layer1, net.layer2, net.layer3, net.layer4)] == [
        width, 2 * width, 4 * width, 8 * width,
    ]  # fmt: skip
    small = build(name, (1, 17, 17), 4, width=width, norm=norm, stem="cifar")
    assert count(small) == scalars(BLOCKS[name], width, 1, 4, stem=3)


@pytest.mark.parametrize("width", [8, 16, 64])
@pytest.mark.parametrize("name", ["resnet10", "resnet18"])
def test_adapters_have_the_width_of_their_stage(name: str, width: int) -> None:
    net = build(name, SHAPE, 10, width=width, adapters=True)
    inside = [part for part in net.modules() if isinstance(part, ResidualAdapter)]
    assert sum(p.numel() for part in inside for p in part.parameters()) == adapters(BLOCKS[name], width)
    assert count(net) == scalars(BLOCKS[name], width, 3, 10) + adapters(BLOCKS[name], width)
    named = dict(net.named_parameters())
    picked = sum(named[n].numel() for n in select(net, "adapter+head") if n in named)
    norms = 2 * width + sum(4 * blocks * width * 2**stage for stage, blocks in enumerate(BLOCKS[name]))
    assert picked == adapters(BLOCKS[name], width) + norms + 80 * width + 10


def test_the_printed_counts() -> None:
    assert count(build("resnet10", SHAPE, 10)) == scalars(BLOCKS["resnet10"], 64, 3, 10) == 4_910_922
    assert count(build("resnet18", SHAPE, 10, width=64)) == 11_181_642
    assert count(build("resnet34", (3, 224, 224), 65, width=64)) == 21_318_017


@pytest.mark.parametrize("name", ["resnet18", "resnet34"])
def test_the_published_width_is_the_default(name: str) -> None:
    torch.manual_seed(3)
    plain = build(name, (3, 17, 17), 4).state_dict()
    torch.manual_seed(3)
    named = build(name, (3, 17, 17), 4, width=64).state_dict()
    assert list(plain) == list(named)
    assert all(torch.equal(value, named[key]) for key, value in plain.items())


def test_names_are_those_of_the_wide_network() -> None:
    assert list(build("resnet18", SHAPE, 10, width=8).state_dict()) == list(
        build("resnet18", SHAPE, 10).state_dict()
    )
    ten, eighteen = (build(name, SHAPE, 10, width=8).state_dict() for name in ("resnet10", "resnet18"))
    assert set(ten) == {key for key in eighteen if ".1." not in key or "downsample" in key}


def test_narrow_networks_run_forward_and_backward() -> None:
    net = build("resnet10", (1, 17, 17), 3, width=8)
    out = net(torch.randn(4, 1, 17, 17))
    assert out.shape == (4, 3)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("width", [0, -8, 12, 4, 8.0, True, "8"])
def test_widths_are_multiples_of_eight(width: object) -> None:
    with pytest.raises(ConfigError, match="positive multiple of 8"):
        build("resnet18", SHAPE, 10, width=width)
