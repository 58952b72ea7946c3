"""Where networks are cut: found from what trains, and the rest gives what the whole network gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tailorfl.errors import ModelError
from tailorfl.models.cutting import SAMPLES, NoCut, find_cut
from tailorfl.models.front import Front
from tailorfl.models.functional import Model
from tailorfl.models.registry import build

IMAGE, IDS = (3, 17, 17), (12,)
TOP = ["layer.2.attention.self.query"]
UPPER = ["*layer.2*adapter*", "head.*"]


def net(
    name: str, shape: tuple[int, ...], trainable: str | Sequence[str] | None = None, **options: Any
) -> Model:
    return Model(lambda: build(name, shape, 4, **options), trainable=trainable, seed=1)


def samples(shape: tuple[int, ...], count: int = SAMPLES, seed: int = 0) -> Tensor:
    drawn = torch.Generator().manual_seed(seed)
    if len(shape) > 1:
        return torch.randn(count, *shape, generator=drawn)
    ids = torch.randint(2, 64, (count, *shape), generator=drawn)
    ids[0, 7:] = 0
    return ids


LAST = ["layer4.*", "fc.*"]
CUTS: dict[str, tuple[Callable[[], Model], tuple[int, ...], int, str]] = {
    "head": (lambda: net("resnet10", IMAGE, "head", width=8), IMAGE, 64, "dropout"),
    "last stage": (lambda: net("resnet10", IMAGE, LAST, width=8), IMAGE, 32 * 2 * 2, "layer3"),
    "cnn2": (lambda: net("cnn2", IMAGE, "head"), IMAGE, 128, "fc_dropout1"),
    # Hidden states of 12 tokens, and the tokens, of which masks are made.
    "lora": (
        lambda: net("bert", IDS, layers=3, vocabulary=64, lora=2, lora_targets=TOP),
        IDS,
        12 * 32 + 12,
        "base.encoder.layer.1",
    ),
    "causal": (lambda: net("llama", IDS, "head", vocabulary=64), IDS, 12 * 32 + 12, "base.norm"),
    # A prompt and two options of 4 tokens, which go through the base one after another.
    "choice": (
        lambda: net(
            "bert", (20,), layers=3, vocabulary=64, head="choice", option_length=4, lora=2, lora_targets=TOP
        ),
        (20,),
        4 * 32 + 16 * 32 + 20,
        "base.encoder.layer.1",
    ),
}


@pytest.mark.parametrize("case", CUTS)
def test_the_rest_gives_what_the_whole_network_gives(case: str) -> None:
    make, shape, width, last = CUTS[case]
    model = make()
    state = dict(model.init(1).items())
    cut = find_cut(model, state, samples(shape))
    assert cut.width == width
    assert [*cut.replaced][-1] == last
    rest, front = model.cut_at(cut), Front(model, cut, state)
    # At other values of what trains, on other samples, in another number.
    other, x = (
        {n: t + 0.1 if t.is_floating_point() else t for n, t in model.init(8).items()},
        samples(shape, 3, 2),
    )
    torch.testing.assert_close(rest(other, front(x)), model(other, x), atol=1e-5, rtol=1e-4)
    a, b = (one.outputs_and_features(other, given)[1] for one, given in ((rest, front(x)), (model, x)))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert rest.sizes == model.sizes
    assert rest.whole is model
    # Mapped over clients, as the vectorized engine does.
    several = {n: torch.stack([t, t]) for n, t in other.items()}
    kept = torch.stack([front(x), front(x.flip(0))])
    mapped = torch.func.vmap(rest)(several, kept)
    torch.testing.assert_close(mapped[1], rest(other, front(x.flip(0))), atol=1e-5, rtol=1e-4)


class Skipping(nn.Module):
    """The sample itself is read behind its frozen layer, and what that says decides in a way that no gradient tells."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.first, self.live, self.hidden = nn.Linear(6, 6), nn.Linear(6, 6), hidden
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        given = x + self.live(x).detach() if self.hidden else x
        out: Tensor = self.head(self.first(given).relu() - x)
        return out


def test_what_the_rest_reads_of_samples_is_kept_too() -> None:
    model = Model(lambda: Skipping(False), trainable="head")
    cut = find_cut(model, dict(model.init(0).items()), torch.randn(SAMPLES, 6))
    assert cut.width == 12


def test_a_front_that_depends_on_what_trains_is_not_cut() -> None:
    """Behind a detach no gradient tells so; the comparison at another state does."""
    model = Model(lambda: Skipping(True), trainable=["head.*", "live.*"])
    with pytest.raises(NoCut, match="other outputs"):
        find_cut(model, dict(model.init(0).items()), torch.randn(SAMPLES, 6))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: net("cnn2", IMAGE, "all"), "nothing is frozen"),
        (lambda: net("resnet10", IMAGE, "body", width=8), "no layer that multiplies"),
        (lambda: net("bert", IDS, layers=3, vocabulary=64, lora=2), "of a forward pass"),
        (
            lambda: net("bert", IDS, UPPER, layers=3, vocabulary=64, adapter_size=4, adapter_dropout=0.3),
            "of a forward",
        ),
    ],
)
def test_a_front_that_saves_nothing_is_not_cut(make: Callable[[], Model], why: str) -> None:
    model = make()
    shape = IDS if hasattr(model.module, "base") else IMAGE
    with pytest.raises(NoCut, match=why):
        find_cut(model, dict(model.init(1).items()), samples(shape))


def test_a_layer_that_is_left_out_does_not_run_by_itself() -> None:
    make, shape, _, last = CUTS["head"]
    model = make()
    state = dict(model.init(1).items())
    rest = model.cut_at(find_cut(model, state, samples(shape)))
    with rest.bound(state) as module, pytest.raises(ModelError, match=r"engine\.features=off"):
        module.get_submodule(last)(torch.zeros(1))
