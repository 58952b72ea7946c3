"""Roles, selectors and layer groups: by type and position, complete, and never silently empty."""

from __future__ import annotations

import pickle
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor, nn

from tailorfl.errors import ConfigError, ModelError
from tailorfl.models import Split, available, build, layer_groups, select

CIFAR = (3, 32, 32)
TRANSFORMERS = {"bert", "llama", "vit", "minilm", "huggingface"}
"""They need an optional package, and have tests of their own."""
SELECTORS = ["all", "none", "head", "body", "extractor", "norm", "input", "head+norm", "input+head"]


class OddNames(nn.Module):
    """Nothing is called what it is: the norm is 'foo', the head 'bn', the body's linear layer 'fc'."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Embedding(7, 4)  # not used by forward
        self.fc = nn.Linear(4, 6)
        self.foo = nn.LayerNorm(6)
        self.register_buffer("head", torch.zeros(2))
        self.norm = nn.Linear(6, 6, bias=False)
        self.bn = nn.Linear(6, 3)
        self.last = nn.ReLU()


class Lists(nn.Module):
    """Convolutions in one list, batch norms in another, as in a MobileNet written by hand."""

    def __init__(self) -> None:
        super().__init__()
        widths = [(3, 8), (8, 8), (8, 16), (16, 16)]
        self.convs = nn.ModuleList([nn.Conv2d(i, o, 3) for i, o in widths])
        self.bns = nn.ModuleList([nn.BatchNorm2d(o) for _, o in widths])
        self.head = nn.Linear(16, 2)


with torch.device("meta"):  # only names and shapes matter
    MODELS: dict[str, nn.Module] = {
        **{n: build(n, CIFAR, 10) for n in available() if n not in TRANSFORMERS and n != "cox"},
        "cox": build("cox", (39,), 1),
        "odd": OddNames(),
        "lists": Lists(),
    }


def scalars(split: Split, names: Iterable[str]) -> int:
    """Of the named parameters; buffers do not count."""
    return sum(split.sizes[n] for n in names if n in split.parameters)


@given(st.sampled_from(sorted(MODELS)), st.sampled_from(SELECTORS), st.sampled_from(SELECTORS))
@settings(max_examples=150, deadline=None)
def test_roles_partition_the_state(name, personal, frozen):
    module = MODELS[name]
    split = Split.of(module, personal, frozen, allow_empty=True)
    state = module.state_dict()
    assert list(split.names) == list(state)
    assert sorted(split.shared + split.personal + split.frozen) == sorted(state)
    assert set(split.parameters) == {n for n, _ in module.named_parameters()}
    assert set(split.buffers) == {n for n, _ in module.named_buffers()}
    assert not set(split.trainable) & (set(split.frozen) | set(split.buffers))
    assert split.sizes == {n: t.numel() for n, t in state.items()}
    whole = split.select_personal(state) | split.select_shared(state) | {n: state[n] for n in split.frozen}
    assert len(whole) == len(state)
    assert all(whole[n] is state[n] for n in state)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_layer_groups_partition_the_parameters_and_the_state(name):
    module = MODELS[name]
    parameters = [n for n, _ in module.named_parameters()]
    assert sorted(n for group in layer_groups(module) for n in group) == sorted(parameters)
    grouped = [n for group in layer_groups(module, buffers=True) for n in group]
    assert sorted(grouped) == sorted(module.state_dict())
    assert all(group == tuple(n for n in module.state_dict() if n in group) for group in layer_groups(module))


def test_selectors_find_types_and_positions_under_odd_names():
    module = OddNames()
    assert select(module, "norm") == {"foo.weight", "foo.bias"}
    assert select(module, "head") == {"bn.weight", "bn.bias"}
    assert select(module, "extractor:2") == set(module.state_dict()) - {"bn.weight", "bn.bias", "norm.weight"}
    assert select(module, "input") == {"conv.weight"}
    del module.conv
    assert select(module, "input") == {"fc.weight", "fc.bias", "foo.weight", "foo.bias"}


def test_norms_of_a_list_are_found_and_paired_with_their_convolutions():
    module = Lists()
    split = Split.of(module, "norm")
    assert all(n.startswith("bns.") for n in split.personal)
    assert len(split.personal) == 4 * 5
    assert scalars(split, split.personal) == 2 * (8 + 8 + 16 + 16)
    groups = layer_groups(module)
    assert groups[2] == ("convs.2.weight", "convs.2.bias", "bns.2.weight", "bns.2.bias")
    assert len(groups) == 5
    assert {n.split(".")[0] for n in select(module, "input")} == {"convs", "bns"}
    assert "bns.0.running_mean" in select(module, "input")


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm1d(4), nn.BatchNorm3d(4), nn.SyncBatchNorm(4), nn.InstanceNorm2d(4, affine=True),
     nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.RMSNorm(4)],
    ids=lambda norm: type(norm).__name__,
)  # fmt: skip
def test_every_norm_type_is_a_norm(norm):
    module = nn.Sequential(nn.Linear(4, 4), norm)
    assert select(module, "norm") == {f"1.{n}" for n in norm.state_dict()}


@pytest.mark.parametrize(
    ("name", "classes", "selector", "expected"),
    [
        ("resnet18", 10, "input_perada", 4_728_000),
        ("resnet34", 65, "input_perada", 9_778_368),
        ("resnet18", 10, "input", 9_408 + 128),
        ("resnet18", 10, "norm", 9_600),
        ("resnet18", 10, "head", 5_130),
        ("resnet18", 65, "head", 33_345),
        ("vgg11", 10, "extractor:3", 9_225_984),
    ],
)
def test_personal_scalars_of_the_papers(name, classes, selector, expected):
    with torch.device("meta"):
        split = Split.of(build(name, CIFAR, classes), selector)
    assert scalars(split, split.personal) == expected
    assert scalars(split, split.shared) == scalars(split, split.trainable) - expected


@pytest.mark.parametrize(
    ("name", "groups"), [("resnet18", 21), ("resnet34", 37), ("resnet20", 20), ("vgg11", 11)]
)
def test_layer_group_counts(name, groups):
    assert len(layer_groups(MODELS[name])) == groups


def test_a_group_is_a_layer_with_the_norm_that_follows():
    groups = layer_groups(MODELS["resnet18"], buffers=True)
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    downsample = "layer2.0.downsample"
    assert groups[0] == ("conv1.weight", *(f"bn1.{part}" for part in norm))
    assert (f"{downsample}.0.weight", *(f"{downsample}.1.{part}" for part in norm)) in groups
    assert groups[-1] == ("fc.weight", "fc.bias")


def test_leading_norm_belongs_to_the_first_layer_and_lone_norms_to_themselves():
    linear, lone = nn.Linear(3, 1, bias=False), nn.LayerNorm(3, bias=False)
    leading = layer_groups(nn.Sequential(nn.LayerNorm(3), linear))
    assert leading == (("0.weight", "0.bias", "1.weight"),)
    assert layer_groups(nn.Sequential(nn.LayerNorm(3), lone)) == (("0.weight", "0.bias"), ("1.weight",))


def test_parametrised_and_tied_heads():
    module = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False))
    module[2].weight = module[0].weight
    assert select(module, "head") == {"0.weight"}
    normed = nn.Sequential(nn.Linear(3, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    assert select(normed, "head") == {n for n in normed.state_dict() if n.startswith("1.")}


def test_predicates_patterns_and_sums():
    module = build("resnet20", CIFAR, 10)
    assert select(module, ["linear.*", "bn1.weight"]) == {"linear.weight", "linear.bias", "bn1.weight"}
    biases = select(module, lambda name, tensor, owner: isinstance(owner, nn.Linear) and tensor.dim() == 1)
    assert biases == {"linear.bias"}
    assert select(module, "head + norm") == select(module, "head") | select(module, "norm")
    assert select(module, "none+head") == select(module, "head")
    assert select(module, "extractor:1") == select(module, "body")


class Misnamed(nn.Linear):
    """Its head is a layer that it does not have."""

    feature_layer = "haed"


MLP, LOGISTIC = build("mlp", (4,), 2), build("logistic", (4,), 2)


@pytest.mark.parametrize(
    ("module", "selector", "error", "message"),
    [
        (MLP, "norm", ModelError, r"norm matches nothing.*2 Linear.*fc1.weight"),
        (MLP, "head+norm", ModelError, "norm matches nothing"),
        (MLP, ["head.*", "classifier.*"], ModelError, r"'classifier\.\*' matches nothing"),
        (MLP, [], ModelError, "empty list"),
        (MLP, lambda name, tensor, module: False, ModelError, "predicate <lambda> matches nothing"),
        (MLP, "extractor:3", ModelError, "needs 3 linear"),
        (MLP, "extractor:0", ModelError, "1 or more"),
        (MLP, "head:2", ModelError, "only 'extractor'"),
        (MLP, "input_perada", ModelError, "ResidualBlock"),
        (LOGISTIC, "body", ModelError, "body matches nothing"),
        (nn.Conv2d(3, 2, 1), "head", ModelError, "needs 1 linear"),
        (Misnamed(4, 2), "head", ModelError, "feature_layer of a Misnamed names 'haed'"),
        (LOGISTIC, "haed", ConfigError, "Did you mean 'head'"),
        (LOGISTIC, "fc.*", ConfigError, "list"),
        (nn.LazyLinear(3), "all", ModelError, "forward pass"),
    ],
)
def test_a_selector_that_matches_nothing_says_what_is_there(module, selector, error, message):
    with pytest.raises(error, match=message):
        select(module, selector)


def test_a_part_may_be_empty_and_frozen_wins():
    mlp, resnet = build("mlp", (4,), 2), MODELS["resnet20"]
    assert Split.of(mlp, "norm", allow_empty=True) == Split.of(mlp, "none")
    assert Split.of(mlp, "none").shared == tuple(mlp.state_dict())
    assert Split.of(resnet, "all", "body").personal == ("linear.weight", "linear.bias")
    with pytest.raises(ModelError, match="also frozen"):
        Split.of(resnet, "head", "head")
    with pytest.raises(ModelError, match="without parameters"):
        Split.of(nn.ReLU(), "none")


def test_scalars_of_a_frozen_head_are_neither_trained_nor_sent():
    split = Split.of(build("mlp", (4,), 2, hidden=[3], norm="batch"), "none", "head")
    assert scalars(split, split.trainable) == scalars(split, split.shared) == 4 * 3 + 3 + 2 * 3
    assert sum(split.sizes[n] for n in split.shared if n in split.buffers) == 2 * 3 + 1


def test_selection_of_stacked_tensordicts():
    module = build("resnet20", CIFAR, 10)
    split = Split.of(module, "norm", "head")
    state = TensorDict({n: torch.randn(5, *t.shape) for n, t in module.state_dict().items()}, batch_size=[5])
    own, sent = split.select_personal(state), split.select_shared(state)
    assert isinstance(own, TensorDict)
    assert tuple(own.keys()) == split.personal
    assert own.batch_size == sent.batch_size == (5,)
    assert tuple(sent.keys()) == split.shared
    doubled = torch.func.vmap(lambda a: split.select_shared(a) * 2)(state)
    assert torch.equal(doubled["conv1.weight"], 2 * state["conv1.weight"])


def test_gradients_may_lack_buffers_but_strange_names_are_errors():
    split = Split.of(MODELS["resnet20"], "norm")
    gradients: dict[str, Tensor] = dict(MODELS["resnet20"].named_parameters())
    assert set(split.select_personal(gradients)) == set(split.personal) - set(split.buffers)
    with pytest.raises(ModelError, match="no state named"):
        split.select_shared({"linear.wieght": torch.zeros(1)})
    again = pickle.loads(pickle.dumps(split))
    assert (split, hash(split)) == (again, hash(again))
