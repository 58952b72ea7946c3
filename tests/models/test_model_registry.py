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
from tailorfl.models import Dropout, build, options_of

CIFAR, MNIST, LARGE = (3, 32, 32), (1, 28, 28), (3, 224, 224)
OWN = "someones_models"


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "options", "expected"),
    [
        ("logistic", (39,), 2, {}, 80),
        ("linear", (2,), 1, {}, 2),
        ("cox", (39,), 1, {}, 40),
        ("mlp", MNIST, 10, {}, 784 * 200 + 200 + 200 * 10 + 10),
        ("mlp", (13,), 1, {"hidden": [8, 4], "norm": "batch"}, 13 * 8 + 8 + 16 + 8 * 4 + 4 + 8 + 5),
        ("cnn2", MNIST, 10, {}, 421_642),
        ("lenet", CIFAR, 10, {}, 121_182),
        ("lenet", MNIST, 10, {"channels": [6, 16]}, 156 + 2416 + 256 * 120 + 120 + 120 * 84 + 84 + 840 + 10),
        ("lenet", MNIST, 10, {"channels": [10, 20], "hidden": [50]}, 260 + 5020 + 320 * 50 + 50 + 500 + 10),
        ("vgg11", CIFAR, 10, {}, 9_756_426),
        ("vgg11", CIFAR, 10, {"norm": "group"}, 9_756_426),
        ("vgg11", CIFAR, 10, {"norm": "none"}, 9_756_426 - 2 * (64 + 128 + 2 * 256 + 4 * 512)),
        ("resnet10", CIFAR, 10, {}, 4_910_922),
        ("resnet18", CIFAR, 10, {}, 11_181_642),
        ("resnet18", LARGE, 65, {}, 11_209_857),
        ("resnet34", LARGE, 65, {}, 21_318_017),
        ("resnet20", CIFAR, 10, {}, 269_722),
        ("resnet32", CIFAR, 10, {}, 464_154),
        ("resnet56", CIFAR, 10, {}, 853_018),
    ],
)
def test_parameter_counts(name, shape, outputs, options, expected):
    with torch.device("meta"):
        assert sum(p.numel() for p in build(name, shape, outputs, **options).parameters()) == expected


@pytest.mark.parametrize(
    ("name", "tensors", "expected"),
    [
        ("resnet18", 122, {
            "conv1.weight": (64, 3, 7, 7), "bn1.running_var": (64,), "layer1.0.conv1.weight": (64, 64, 3, 3),
            "layer1.1.bn2.bias": (64,), "layer2.0.downsample.0.weight": (128, 64, 1, 1),
            "layer2.0.downsample.1.running_mean": (128,), "layer4.1.conv2.weight": (512, 512, 3, 3),
            "fc.weight": (10, 512),
        }),
        ("resnet34", 218, {"layer3.5.conv2.weight": (256, 256, 3, 3), "layer4.2.bn1.num_batches_tracked": ()}),
        ("vgg11", 62, {
            "features.0.weight": (64, 3, 3, 3), "features.1.running_mean": (64,),
            "features.4.weight": (128, 64, 3, 3), "features.25.weight": (512, 512, 3, 3),
            "features.26.bias": (512,), "classifier.0.weight": (512, 512), "classifier.6.bias": (10,),
        }),
        ("vgg13", 76, {"features.3.weight": (64, 64, 3, 3), "features.31.weight": (512, 512, 3, 3)}),
        ("resnet20", 116, {"layer2.0.conv1.weight": (32, 16, 3, 3), "linear.weight": (10, 64)}),
    ],
)  # fmt: skip
def test_state_names_are_those_of_published_weights(name, tensors, expected):
    with torch.device("meta"):
        state = build(name, CIFAR, 10).state_dict()
    assert len(state) == tensors
    assert {n: tuple(state[n].shape) for n in expected} == expected


@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
@pytest.mark.parametrize("side", [17, 28, 33])
def test_resnets_take_odd_and_grey_images(stem, side):
    net = build("resnet18", (1, side, side), 4, stem=stem, width=8).eval()
    assert net(torch.zeros(2, 1, side, side)).shape == (2, 4)


@pytest.mark.parametrize("name", ["cnn2", "cnn3", "cnn5", "lenet", "ckt_cnn"])
def test_plain_cnns_adapt_to_the_smallest_and_to_oblong_images(name):
    with pytest.raises(ModelError, match=r"at least (\d+)x") as caught:
        build(name, (1, 1, 1), 3)
    least = int(str(caught.value).split("at least ")[1].split("x")[0])
    for height, width in [(least, least), (least, least + 7)]:
        assert build(name, (2, height, width), 3)(torch.zeros(5, 2, height, width)).shape == (5, 3)
    with pytest.raises(ModelError, match="at least"):
        build(name, (1, least, least - 1), 3)


@pytest.fixture
def factories(monkeypatch):
    """Models of a user, in a module that is named."""

    def net(input_shape: tuple[int, ...], outputs: int, *, width: int = 3) -> nn.Module:
        return nn.Sequential(nn.Linear(input_shape[0], width), nn.Dropout(0.5), nn.Linear(width, outputs))

    module = ModuleType(OWN)
    module.net, module.nothing = net, lambda input_shape, outputs: None
    monkeypatch.setitem(sys.modules, OWN, module)
    monkeypatch.setattr(modules, "_NAMED", {OWN: OWN, "no_such_package_here": ""})


@pytest.mark.usefixtures("factories")
def test_a_users_factory_by_dotted_path(monkeypatch):
    module = build(f"{OWN}:net", (4,), 2, width=6)
    assert module[0].out_features == 6
    assert isinstance(module[1], Dropout)
    monkeypatch.setattr(modules, "_NAMED", {})
    with pytest.raises(ConfigError, match=f"--import {OWN}"):
        build(f"{OWN}:net", (4,), 2)


ERRORS = [
    ("cnn2", (39,), {}, ModelError, r"takes images.*\(39,\).*'mlp' for vectors\.$"),
    ("resnet18", (28, 28), {}, ModelError, "takes images.*unsqueeze"),
    ("resnet18", (3, 16, 16), {}, ModelError, "at least 17x17"),
    ("vgg11", MNIST, {}, ModelError, "at least 32x32"),
    ("logistic", (), {}, ModelError, "at least one scalar"),
    ("restnet18", CIFAR, {}, ConfigError, "Did you mean 'resnet18'"),
    ("mlp", CIFAR, {"hiden": [3]}, ConfigError, r"option of model 'mlp'.*Did you mean 'hidden'"),
    ("cnn2", CIFAR, {"norm": "batchnorm"}, ConfigError, "Did you mean 'batch'"),
    ("resnet20", CIFAR, {"norm": "none"}, ConfigError, "Valid: batch, group"),
    ("resnet18", CIFAR, {"stem": "cifr"}, ConfigError, "Did you mean 'cifar'"),
    ("mlp", CIFAR, {"activation": "rellu"}, ConfigError, "Did you mean 'relu'"),
    *(("mlp", (4,), {"hidden": hidden}, ModelError, "hidden") for hidden in (True, "200", [0], [3.5])),
    *(("lenet", MNIST, {"channels": c}, ModelError, "channels") for c in ([6], [6, 16, 32], [0, 16], "616")),
    ("mlp", (4,), {"dropout": 2}, ModelError, "dropout probability"),
    ("mlp", (4,), {"outputs": 0}, ModelError, "at least one output"),
    ("cox", (4,), {}, ModelError, "one output"),
    *(
        ("mlp", (6,), {"hidden": [8, w], "norm": "group"}, ModelError, f"norm=group .* only {w};")
        for w in (1, 3)
    ),
    (f"{OWN}:missing", (4,), {}, ConfigError, "cannot be imported"),
    ("no_such_package_here:net", (4,), {}, ConfigError, "cannot be imported"),
    (f"{OWN}:nothing", (4,), {}, ModelError, "returned a NoneType"),
    (f"{OWN}:net", (4,), {"depth": 2}, ModelError, "cannot be called"),
]


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(("name", "shape", "options", "error", "message"), ERRORS)
def test_what_does_not_fit_is_an_error(name, shape, options, error, message):
    with pytest.raises(error, match=message):
        build(name, shape, **{"outputs": 10, **options})


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


def test_an_mlp_may_end_in_a_softmax_and_its_options_are_named():
    plain, ending = (build("mlp", (4,), 3, hidden=[5], softmax=softmax) for softmax in (False, True))
    ending.load_state_dict(plain.state_dict())
    x = torch.randn(6, 4)
    torch.testing.assert_close(ending(x), plain(x).softmax(dim=1))
    assert options_of("mlp") == {
        "hidden": (200,), "activation": "relu", "norm": "none", "dropout": 0.0, "softmax": False
    }  # fmt: skip


@pytest.mark.parametrize("shape", [(28, 28, 1), (28, 28, 3), (32, 32, 4), (3, 2, 9), (1, 7, 7)])
@pytest.mark.parametrize("name", ["vgg11", "lenet", "cnn2", "resnet20"])
def test_a_model_for_larger_images_recommends_only_models_that_can_be_built(name, shape):
    try:
        build(name, shape, 3)
        return
    except ModelError as error:
        message = str(error)
    assert "(channels, height, width)" in message
    assert "x.permute(0, 3, 1, 2)" in message
    recommended = re.findall(r"'(\w+)'", message.split("such as")[1])
    assert "mlp" in recommended
    assert name not in recommended
    for other in recommended:
        build(other, shape, 3)
    for other in {"cnn2", "resnet20"} - set(recommended):  # and leaves out none of the smallest
        with pytest.raises(ModelError):
            build(other, shape, 3)


@pytest.mark.parametrize("name", ["linear", "logistic"])
def test_linear_models_start_at_zero_if_asked_to(name):
    assert all(bool((p == 0).all()) for p in build(name, (5,), 2, zeros=True, bias=True).parameters())
    assert all(bool((p != 0).any()) for p in build(name, (5,), 2, bias=True).parameters())


@pytest.mark.parametrize(
    ("width", "groups"), [(4, 1), (5, 1), (8, 2), (12, 3), (16, 4), (24, 6), (32, 8), (200, 8), (512, 32)]
)
def test_a_group_of_features_of_a_vector_holds_at_least_four(width, groups):
    norm = build("mlp", (6,), 3, hidden=[width], norm="group").norm1
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == groups


@pytest.mark.parametrize("width", [8, 16])
def test_a_narrow_network_with_group_norm_learns(width):
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
