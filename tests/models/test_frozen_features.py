"""Where features of frozen layers end, as networks declare it: the rest gives what the whole network gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tailorfl.errors import ModelError
from tailorfl.models.frozen_features import SAMPLES, FeatureExtractor, NoFeaturesError, find_boundary
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
BERT = {"layers": 3, "vocabulary": 64}
TOP_LORA = {**BERT, "lora": 2, "lora_targets": TOP}
CHOICE = {**TOP_LORA, "head": "choice", "option_length": 4}
BOUNDARIES: dict[str, tuple[Callable[[], Model], tuple[int, ...], int, str]] = {
    "head": (lambda: net("resnet10", IMAGE, "head", width=8), IMAGE, 64, "dropout"),
    "last stage": (lambda: net("resnet10", IMAGE, LAST, width=8), IMAGE, 32 * 2 * 2, "layer3.0"),
    "cnn2": (lambda: net("cnn2", IMAGE, "head"), IMAGE, 128, "fc_dropout1"),
    # Hidden states of 12 tokens, and the tokens, of which masks are made.
    "lora": (lambda: net("bert", IDS, **TOP_LORA), IDS, 12 * 32 + 12, "base.encoder.layer.1"),
    "causal": (lambda: net("llama", IDS, "head", vocabulary=64), IDS, 12 * 32 + 12, "base.norm"),
    # A prompt and two options of 4 tokens, which go through the base one after another.
    "choice": (lambda: net("bert", (20,), **CHOICE), (20,), 4 * 32 + 16 * 32 + 20, "base.encoder.layer.1"),
}


@pytest.mark.parametrize("case", BOUNDARIES)
def test_the_rest_gives_what_the_whole_network_gives(case: str) -> None:
    make, shape, width, last = BOUNDARIES[case]
    model = make()
    state = dict(model.init(1).items())
    boundary = find_boundary(model, state, samples(shape))
    assert boundary.width == width
    assert boundary.name == [*boundary.replaced][-1] == last
    rest, front = model.from_features(boundary.apply), FeatureExtractor(model, boundary, state)
    # At other values of what trains, on other samples, in another number.
    other = {n: t + 0.1 if t.is_floating_point() else t for n, t in model.init(8).items()}
    x = samples(shape, 3, 2)
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
    """Its head reads the sample itself beside what the first layer makes of it, or a live layer comes first."""

    def __init__(self, way: str, boundary: str) -> None:
        super().__init__()
        self.first, self.live, self.way = nn.Linear(6, 6), nn.Linear(6, 6), way
        self.shift = nn.Parameter(torch.zeros(6))
        self.unused, self.head = nn.Linear(6, 6), nn.Linear(6, 4)
        self.feature_boundary = boundary

    def forward(self, x: Tensor) -> Tensor:
        before = {"live": self.live(x).detach(), "shift": self.shift}.get(self.way, torch.zeros(6))
        hidden = self.first(x + before).relu()
        out: Tensor = self.head(hidden - x if self.way == "skip" else hidden)
        return out


@pytest.mark.parametrize(("way", "name"), [("skip", "first"), ("", "frist"), ("", "unused"), ("", "")])
def test_a_wrong_declaration_is_an_error_that_names_the_module(way: str, name: str) -> None:
    """The rest reads more than the module gives out, there is no such module, or it does not run."""
    model = Model(lambda: Skipping(way, name), trainable="head")
    with pytest.raises(ModelError, match=rf"feature_boundary of a Skipping names '{name}'"):
        find_boundary(model, dict(model.init(0).items()), torch.randn(SAMPLES, 6))


@pytest.mark.parametrize("way", ["live", "shift"])
def test_what_trains_before_the_boundary_is_no_mistake(way: str) -> None:
    """A layer that trains is seen in the order of the modules, a tensor of the network itself by the comparison."""
    model = Model(lambda: Skipping(way, "first"), trainable=["head.*", f"{way}*"])
    with pytest.raises(NoFeaturesError, match=r"trained .* before '"):
        find_boundary(model, dict(model.init(0).items()), torch.randn(SAMPLES, 6))


def test_of_several_boundaries_the_last_counts_before_which_all_is_frozen() -> None:
    def make() -> nn.Module:
        network = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        network.feature_boundary = ("2", "0", "1")  # type: ignore[assignment]
        return network

    for trainable, name in ((["3.*"], "2"), (["2.*"], "1"), (["1.*", "3.*"], "0")):
        model = Model(make, trainable=trainable)
        assert find_boundary(model, dict(model.init(0).items()), torch.randn(SAMPLES, 6)).name == name


@pytest.mark.parametrize(("boundary", "width"), [("0", 2 * 6 * 6), ("1", 2 * 3 * 3), ("2", 2 * 3 * 3)])
def test_a_boundary_may_be_between_a_convolution_and_its_pooling(boundary: str, width: int) -> None:
    def make() -> nn.Module:
        layers = nn.Conv2d(3, 2, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4)
        network = nn.Sequential(*layers)
        network.feature_boundary = boundary  # type: ignore[assignment]
        return network

    model, x = Model(make, trainable="head"), samples((3, 6, 6))
    state = dict(model.init(0).items())
    found = find_boundary(model, state, x)
    assert (found.name, found.width) == (boundary, width)
    kept = FeatureExtractor(model, found, state)(x)
    torch.testing.assert_close(model.from_features(found.apply)(state, kept), model(state, x))


def plain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(867, 9), nn.Linear(9, 4))


class HalfEmbedding(nn.Module):
    """Its features are bfloat16, which holds whole numbers up to 256 alone."""

    feature_boundary = "tokens"

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(64, 6, dtype=torch.bfloat16), nn.Linear(6, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.tokens(ids).float().mean(1))


@pytest.mark.parametrize(
    ("make", "shape", "why"),
    [
        (lambda: net("cnn2", IMAGE, "all"), IMAGE, "nothing is frozen"),
        (lambda: net("resnet10", IMAGE, "body", width=8), IMAGE, "before 'layer1.0'"),
        (lambda: net("bert", IDS, lora=2, **BERT), IDS, "before 'base.encoder.layer.0'"),
        (
            lambda: net("bert", IDS, UPPER, adapter_size=4, adapter_dropout=0.3, **BERT),
            IDS,
            "before 'base.encoder.layer.0'",
        ),
        (lambda: Model(plain, trainable="head"), IMAGE, "declares no feature_boundary"),
        (lambda: Model(HalfEmbedding, trainable="head"), IDS, "token ids cannot be kept as"),
    ],
)
def test_where_nothing_can_be_kept_the_reason_is_said(
    make: Callable[[], Model], shape: tuple[int, ...], why: str
) -> None:
    model = make()
    with pytest.raises(NoFeaturesError, match=why):
        find_boundary(model, dict(model.init(1).items()), samples(shape))


def test_a_layer_that_is_left_out_does_not_run_by_itself() -> None:
    make, shape, _, last = BOUNDARIES["head"]
    model = make()
    state = dict(model.init(1).items())
    rest = model.from_features(find_boundary(model, state, samples(shape)).apply)
    with rest.bound(state) as module, pytest.raises(ModelError, match=r"engine\.features=off"):
        module.get_submodule(last)(torch.zeros(1))
