"""Sizes, names and error messages of the registered models."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from tailorfl import modules
from tailorfl.errors import ConfigError, ModelError
from tailorfl.models import Dropout, available, build, options_of

CIFAR = (3, 32, 32)
MNIST = (1, 28, 28)


def scalars(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "options", "expected"),
    [
        ("logistic", (39,), 2, {}, 80),
        ("linear", (2,), 1, {}, 2),
        ("cox", (39,), 1, {}, 40),
        ("mlp", MNIST, 10, {}, 784 * 200 + 200 + 200 * 10 + 10),
        ("mlp", MNIST, 10, {"softmax": True}, 784 * 200 + 200 + 200 * 10 + 10),
        ("mlp", (13,), 1, {"hidden": [8, 4], "norm": "batch"}, 13 * 8 + 8 + 16 + 8 * 4 + 4 + 8 + 5),
        ("cnn2", MNIST, 10, {}, 421_642),
        ("lenet", CIFAR, 10, {}, 121_182),
        ("lenet", MNIST, 10, {"channels": [6, 16]}, 156 + 2416 + 256 * 120 + 120 + 120 * 84 + 84 + 840 + 10),
        ("lenet", MNIST, 10, {"channels": [10, 20], "hidden": [50]}, 260 + 5020 + 320 * 50 + 50 + 500 + 10),
        ("vgg11", CIFAR, 10, {}, 9_756_426),
        ("vgg11", CIFAR, 10, {"norm": "group"}, 9_756_426),
        ("vgg11", CIFAR, 10, {"norm": "none"}, 9_756_426 - 2 * (64 + 128 + 2 * 256 + 4 * 512)),
        ("resnet18", CIFAR, 10, {}, 11_181_642),
        ("resnet18", CIFAR, 10, {"norm": "group"}, 11_181_642),
        ("resnet18", CIFAR, 10, {"stem": "cifar"}, 11_181_642 - 64 * 3 * (49 - 9)),
        ("resnet18", (3, 224, 224), 65, {}, 11_209_857),
        ("resnet18", (3, 64, 64), 5, {}, 11_179_077),
        ("resnet34", (3, 224, 224), 65, {}, 21_318_017),
        ("resnet20", CIFAR, 10, {}, 269_722),
        ("resnet32", CIFAR, 10, {}, 464_154),
        ("resnet56", CIFAR, 10, {}, 853_018),
    ],
)
def test_parameter_counts(name, shape, outputs, options, expected):
    assert scalars(build(name, shape, outputs, **options)) == expected


def test_resnet18_norm_counts():
    norms = {n: m for n, m in build("resnet18", CIFAR, 10).named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert sum(scalars(m) for m in norms.values()) == 9_600
    assert sum(scalars(m) for n, m in norms.items() if n.endswith(("bn1", "bn2"))) == 7_808


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "resnet18",
            {
                "conv1.weight": (64, 3, 7, 7),
                "bn1.running_var": (64,),
                "layer1.0.conv1.weight": (64, 64, 3, 3),
                "layer1.1.bn2.bias": (64,),
                "layer2.0.downsample.0.weight": (128, 64, 1, 1),
                "layer2.0.downsample.1.running_mean": (128,),
                "layer4.1.conv2.weight": (512, 512, 3, 3),
                "fc.weight": (10, 512),
            },
        ),
        ("resnet34", {"layer3.5.conv2.weight": (256, 256, 3, 3), "layer4.2.bn1.num_batches_tracked": ()}),
        (
            "vgg11",
            {
                "features.0.weight": (64, 3, 3, 3),
                "features.1.running_mean": (64,),
                "features.4.weight": (128, 64, 3, 3),
                "features.25.weight": (512, 512, 3, 3),
                "features.26.bias": (512,),
                "classifier.0.weight": (512, 512),
                "classifier.6.bias": (10,),
            },
        ),
        ("vgg13", {"features.3.weight": (64, 64, 3, 3), "features.31.weight": (512, 512, 3, 3)}),
        ("resnet20", {"layer2.0.conv1.weight": (32, 16, 3, 3), "linear.weight": (10, 64)}),
    ],
)
def test_state_names_are_those_of_published_weights(name, expected):
    state = build(name, CIFAR, 10).state_dict()
    assert {n: tuple(state[n].shape) for n in expected} == expected


def test_whole_state_sizes_are_torchvisions():
    # 62 parameters and 60 buffers for ResNet-18; 110 and 108 for ResNet-34.
    assert len(build("resnet18", CIFAR, 10).state_dict()) == 122
    assert len(build("resnet34", CIFAR, 10).state_dict()) == 218


@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
@pytest.mark.parametrize("side", [17, 28, 33])
def test_resnets_take_odd_and_grey_images(stem, side):
    assert build("resnet18", (1, side, side), 4, stem=stem).eval()(torch.zeros(2, 1, side, side)).shape == (
        2,
        4,
    )


@pytest.mark.parametrize("name", ["cnn2", "cnn3", "cnn5", "lenet", "ckt_cnn"])
def test_plain_cnns_adapt_to_the_smallest_and_to_oblong_images(name):
    with pytest.raises(ModelError, match=r"at least (\d+)x") as caught:
        build(name, (1, 1, 1), 3)
    least = int(str(caught.value).split("at least ")[1].split("x")[0])
    for height, width in [(least, least), (least, least + 7)]:
        assert build(name, (2, height, width), 3)(torch.zeros(5, 2, height, width)).shape == (5, 3)
    with pytest.raises(ModelError, match="at least"):
        build(name, (1, least, least - 1), 3)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("cnn2", (39,), r"takes images.*\(39,\).*'mlp'"),
        ("resnet18", (28, 28), "takes images"),
        ("resnet18", (3, 16, 16), "at least 17x17"),
        ("vgg11", MNIST, "at least 32x32"),
        ("logistic", (), "at least one scalar"),
    ],
)
def test_unfitting_input_shapes(name, shape, message):
    with pytest.raises(ModelError, match=message):
        build(name, shape, 10)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("restnet18", {}, "Did you mean 'resnet18'"),
        ("mlp", {"hiden": [3]}, r"option of model 'mlp'.*Did you mean 'hidden'"),
        ("cnn2", {"norm": "batchnorm"}, "Did you mean 'batch'"),
        ("resnet20", {"norm": "none"}, "Valid: batch, group"),
        ("resnet18", {"stem": "cifr"}, "Did you mean 'cifar'"),
        ("mlp", {"activation": "rellu"}, "Did you mean 'relu'"),
    ],
)
def test_unknown_names_suggest_the_nearest(name, options, message):
    with pytest.raises(ConfigError, match=message):
        build(name, CIFAR, 10, **options)


@pytest.mark.parametrize("hidden", [True, "200", [0], [3.5]])
def test_hidden_must_be_a_list_of_widths(hidden):
    with pytest.raises(ModelError, match="hidden"):
        build("mlp", (4,), 2, hidden=hidden)


@pytest.mark.parametrize("channels", [[6], [6, 16, 32], [0, 16], "616"])
def test_channels_are_those_of_each_convolution(channels):
    with pytest.raises(ModelError, match="channels"):
        build("lenet", MNIST, 10, channels=channels)


def test_a_published_cnn_is_a_plan_with_its_own_widths():
    """Two convolutions, each with pooling and ReLU, dropout of channels between the second and its pooling."""
    model = build("lenet", MNIST, 10, channels=[10, 20], hidden=[50], dropout=0.4, channel_dropout=0.3)
    kinds = [type(part).__name__ for part in model if not isinstance(part, nn.Identity)]
    assert kinds == [
        "Conv2d", "MaxPool2d", "ReLU", "Conv2d", "ChannelDropout", "MaxPool2d", "ReLU",
        "Flatten", "Linear", "ReLU", "Dropout", "Linear",
    ]  # fmt: skip
    assert (model.channel_dropout.p, model.fc_dropout1.p) == (0.3, 0.4)
    assert not hasattr(build("lenet", MNIST, 10), "channel_dropout")


def test_an_mlp_may_end_in_a_softmax():
    torch.manual_seed(0)
    plain = build("mlp", (4,), 3, hidden=[5])
    ending = build("mlp", (4,), 3, hidden=[5], softmax=True)
    ending.load_state_dict(plain.state_dict())
    x = torch.randn(6, 4)
    torch.testing.assert_close(ending(x), plain(x).softmax(dim=1))


def test_bad_values_become_model_errors():
    with pytest.raises(ModelError, match="dropout probability"):
        build("mlp", (4,), 2, dropout=2)
    with pytest.raises(ModelError, match="at least one output"):
        build("mlp", (4,), 0)
    with pytest.raises(ModelError, match="one output"):
        build("cox", (4,), 2)


def test_every_model_is_described_and_its_options_are_named():
    assert all(len(text) > 20 and text.endswith(".") for text in available().values())
    assert options_of("mlp") == {
        "hidden": (200,), "activation": "relu", "norm": "none", "dropout": 0.0, "softmax": False
    }  # fmt: skip


def test_equal_random_states_give_equal_models():
    torch.manual_seed(3)
    first = build("resnet20", CIFAR, 10).state_dict()
    torch.manual_seed(3)
    second = build("resnet20", CIFAR, 10).state_dict()
    assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.fixture
def factories(monkeypatch):
    module = ModuleType("someones_models")

    def net(input_shape: tuple[int, ...], outputs: int, *, width: int = 3) -> nn.Module:
        return nn.Sequential(nn.Linear(input_shape[0], width), nn.Dropout(0.5), nn.Linear(width, outputs))

    module.net = net
    module.nothing = lambda input_shape, outputs: None
    monkeypatch.setitem(sys.modules, "someones_models", module)
    monkeypatch.setattr(modules, "_NAMED", {"someones_models": "someones_models", "no_such_package_here": ""})


@pytest.mark.usefixtures("factories")
def test_a_users_factory_by_dotted_path():
    module = build("someones_models:net", (4,), 2, width=6)
    assert module[0].out_features == 6
    assert isinstance(module[1], Dropout)


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("someones_models:missing", {}, "cannot be imported"),
        ("no_such_package_here:net", {}, "cannot be imported"),
        ("someones_models:nothing", {}, "returned a NoneType"),
        ("someones_models:net", {"depth": 2}, "cannot be called"),
    ],
)
def test_a_users_factory_that_fails(path, options, message):
    with pytest.raises((ConfigError, ModelError), match=message):
        build(path, (4,), 2, **options)


@pytest.mark.usefixtures("factories")
def test_a_users_factory_that_nobody_has_named(monkeypatch):
    monkeypatch.setattr(modules, "_NAMED", {})
    with pytest.raises(ConfigError, match="--import someones_models"):
        build("someones_models:net", (4,), 2)


@pytest.mark.parametrize("shape", [(28, 28, 1), (28, 28, 3), (32, 32, 4), (3, 2, 9), (1, 7, 7)])
@pytest.mark.parametrize("name", ["vgg11", "lenet", "cnn2", "resnet20"])
def test_a_model_for_larger_images_recommends_only_models_that_can_be_built(
    name: str, shape: tuple[int, ...]
) -> None:
    try:
        build(name, shape, 3)
        return
    except ModelError as error:
        told = str(error)
    assert "(channels, height, width)" in told
    assert "x.permute(0, 3, 1, 2)" in told
    recommended = re.findall(r"'(\w+)'", told.split("such as")[1])
    assert "mlp" in recommended
    assert name not in recommended
    for other in recommended:
        build(other, shape, 3)
    for other in {"cnn2", "resnet20"} - set(recommended):  # and leaves out none of the smallest
        with pytest.raises(ModelError):
            build(other, shape, 3)


@pytest.mark.parametrize("name", ["linear", "logistic"])
def test_linear_models_start_at_zero_if_asked_to(name: str) -> None:
    assert all(bool((p == 0).all()) for p in build(name, (5,), 2, zeros=True, bias=True).parameters())
    assert all(bool((p != 0).any()) for p in build(name, (5,), 2, bias=True).parameters())


@pytest.mark.parametrize(
    ("width", "groups"), [(4, 1), (5, 1), (8, 2), (12, 3), (16, 4), (24, 6), (32, 8), (200, 8), (512, 32)]
)
def test_a_group_of_features_of_a_vector_holds_at_least_four(width: int, groups: int) -> None:
    norm = build("mlp", (6,), 3, hidden=[width], norm="group").norm1
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == groups
    assert width // groups >= 4


@pytest.mark.parametrize("width", [1, 3])
def test_a_layer_too_narrow_for_a_group_is_refused(width: int) -> None:
    with pytest.raises(ModelError, match=f"norm=group .* {width} wide"):
        build("mlp", (6,), 3, hidden=[8, width], norm="group")


@pytest.mark.parametrize("width", [8, 16])
def test_a_narrow_network_with_group_norm_learns(width: int) -> None:
    """Groups of one feature are 0 whatever it is, groups of two are ±1."""
    digits = load_digits()
    x, y = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
    torch.manual_seed(0)
    net = build("mlp", (64,), 10, hidden=[width], norm="group")
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[:1000]), y[:1000]).backward()
        optimizer.step()
    assert (net(x[1000:]).argmax(1) == y[1000:]).float().mean() > 0.8
