"""How networks of convolutions look at samples that all see: with channels last, on a few images at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tailorfl.data.source import Source
from tailorfl.engines.base import Inference
from tailorfl.engines.make import make_engine
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.training import tree
from tailorfl.training.inference import CACHED_FLOATS

SIDE, IMAGES = 16, 400


class Convolutions(TorchDispatchMode):
    """Notes of every convolution (images at once, whether channels come last in memory)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, bool]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.convolution.default:
            x = args[0]
            self.seen.append((len(x), x.stride(1) == 1 and x.stride(3) == x.shape[1]))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def source() -> Source:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(IMAGES, 1, SIDE, SIDE, generator=drawn)
    return Source("random", x, torch.zeros(IMAGES, dtype=torch.int64), "classification", 3)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_convolutions_look_at_few_images_with_channels_last(engine: str, source: Source) -> None:
    model = Model(lambda: build("cnn2", source.input_shape, 3))
    states = [model.init(seed) for seed in range(3)]
    asked = Inference(model, torch.stack(states), source, torch.arange(IMAGES))
    with torch.no_grad(), Convolutions() as noted:
        found = make_engine(engine).predict(asked)
    few = CACHED_FLOATS // SIDE**2
    assert few < IMAGES  # or nothing is cut here
    assert {last for _, last in noted.seen} == {True}
    assert max(images for images, _ in noted.seen) == few
    assert (
        sum(images for images, _ in noted.seen) == 2 * 3 * IMAGES
    )  # two layers, three models, all images once
    for outputs, state in zip(found, states, strict=True):
        module = build("cnn2", source.input_shape, 3).eval()
        module.load_state_dict(dict(tree.leaves(state)))
        with torch.no_grad():
            torch.testing.assert_close(outputs, module(source.x), atol=1e-5, rtol=1e-4)
