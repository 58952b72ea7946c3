"""Weight files: what is loaded, what is refused, and that the numbers mean what they should."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from tailorfl.errors import ModelError
from tailorfl.models import build, load_weights, save_weights
from tailorfl.models.skeleton import frozen_names

CIFAR = (3, 32, 32)


def small(outputs: int = 3) -> nn.Module:
    return build("mlp", (4,), outputs, hidden=[6], norm="batch")


def write_npz(path: Path, module: nn.Module) -> Path:
    np.savez(path, **{n: t.numpy() for n, t in module.state_dict().items()})
    return path


@pytest.mark.parametrize("kind", ["npz", "safetensors", "tensordict"])
def test_roundtrip(tmp_path, kind):
    source, target = small(), small()
    source.norm1.running_mean.fill_(3)
    state = source.state_dict()
    if kind == "npz":
        path = write_npz(tmp_path / "w.npz", source)
    else:
        tensors = TensorDict(state) if kind == "tensordict" else state
        path = save_weights(tensors, tmp_path / "new" / "w.safetensors")
        assert [p.name for p in path.parent.iterdir()] == ["w.safetensors"]
    report = load_weights(target, path)
    assert all(torch.equal(state[n], t) for n, t in target.state_dict().items())
    assert report.loaded == tuple(state)
    assert report.missing == report.unexpected == report.skipped == ()


def test_saved_views_and_tied_tensors_are_whole(tmp_path):
    stack = torch.arange(6.0).reshape(2, 3)
    path = save_weights({"weight": stack[1:2], "bias": stack[1, :1]}, tmp_path / "w.safetensors")
    target = nn.Linear(3, 1)
    load_weights(target, path)
    assert target.weight.tolist() == [[3, 4, 5]]
    assert target.bias.tolist() == [3]


def test_another_number_of_classes(tmp_path):
    path, target = write_npz(tmp_path / "w.npz", small(3)), small(5)
    before = {n: t.clone() for n, t in target.state_dict().items()}
    with pytest.raises(ModelError, match=r"2 tensor.*head.weight: file \(3, 6\), model \(5, 6\).*skip_head"):
        load_weights(target, path)
    assert all(torch.equal(before[n], t) for n, t in target.state_dict().items())
    report = load_weights(target, path, skip_head=True)
    assert report.skipped == ("head.weight", "head.bias")
    assert torch.equal(target.head.weight, before["head.weight"])
    assert not torch.equal(target.fc1.weight, before["fc1.weight"])


def test_batch_norm_weights_in_a_group_norm_model_are_reported(tmp_path):
    path = write_npz(tmp_path / "w.npz", small())
    report = load_weights(build("mlp", (4,), 3, hidden=[6], norm="group"), path)
    assert report.unexpected == ("norm1.running_mean", "norm1.running_var", "norm1.num_batches_tracked")
    plain = write_npz(tmp_path / "plain.npz", build("mlp", (4,), 3, hidden=[6]))
    assert "norm1.weight" in load_weights(small(), plain).missing


@pytest.mark.parametrize(
    ("hidden", "norm", "frozen", "lacking"),
    [
        ([6], "none", [], []),
        ([6, 5], "none", [], ["fc2.weight", "fc2.bias"]),
        ([6, 5], "none", ["fc1.weight", "fc2.bias"], ["fc2.bias"]),
        ([6, 5], "none", ["fc1.weight"], []),  # what trains may be new, such as an adapter
        ([6], "batch", [], ["norm1.weight", "norm1.bias", "norm1.running_mean", "norm1.running_var"]),
    ],
)
def test_a_file_without_a_part_of_the_body(tmp_path, hidden, norm, frozen, lacking):
    body = {n: t for n, t in build("mlp", (4,), 3, hidden=[6]).state_dict().items() if "head" not in n}
    target = build("mlp", (4,), 3, hidden=hidden, norm=norm)
    report = load_weights(target, save_weights(body, tmp_path / "body.safetensors"))
    assert report.lacking(target, frozen) == lacking


@pytest.mark.parametrize("trainable", ["adapter+head", "all"])
def test_adapters_are_not_expected_in_a_file(tmp_path, trainable):
    plain, adapted = (build("resnet20", CIFAR, 3, adapters=adapters) for adapters in (False, True))
    report = load_weights(adapted, write_npz(tmp_path / "w.npz", plain))
    assert any("adapter" in name for name in report.missing)
    assert report.lacking(adapted, frozen_names(adapted, trainable)) == []


def test_values_take_the_modules_type(tmp_path):
    target = small()
    load_weights(target, write_npz(tmp_path / "w.npz", small().double()))
    assert target.fc1.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("w.npz", None, "does not exist"),
        ("w.npz", b"not a zip", "cannot be read as arrays"),
        ("w.npz", nn.Linear(2, 2), r"w.npz.*weight, bias.*fc1.weight"),
        ("w.safetensors", b"not one either", "cannot be read as safetensors"),
        ("w.pt", b"", "not a weight source"),
        ("resnet18", None, "not a weight source.*torchvision:NAME"),
    ],
)
def test_unreadable_sources(tmp_path, name, content, message):
    if isinstance(content, nn.Module):
        write_npz(tmp_path / name, content)
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load_weights(small(), tmp_path / name)


def test_weights_are_saved_under_one_suffix(tmp_path):
    with pytest.raises(ModelError, match="safetensors"):
        save_weights(small().state_dict(), tmp_path / "w.npz")


def is_hub(name: str) -> bool:
    return name.split(".")[0] in ("torchvision", "timm")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a module into a folder that is searched first, where none is imported before or after."""
    for name in filter(is_hub, list(sys.modules)):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)

    def write(file: str, text: str) -> None:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)

    yield write
    for name in filter(is_hub, list(sys.modules)):
        del sys.modules[name]


@pytest.mark.parametrize("problem", ["RuntimeError('operator nms does not exist')", "ImportError('x')"])
def test_a_broken_hub_package_says_what_to_install(package, problem):
    package("torchvision/__init__.py", f"raise {problem}")
    with pytest.raises(ModelError, match=r"needs the package 'torchvision'.*pip install torchvision"):
        load_weights(nn.Linear(2, 1), "torchvision:resnet18")


HUB = """
import torch
class _Weights:
    class DEFAULT:
        @staticmethod
        def get_state_dict(progress):
            return {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}
def get_model_weights(name):
    if name == "offline":
        raise OSError("no network")
    if name != "tiny":
        raise ValueError(f"Unknown model {name}")
    return _Weights
def create_model(name, pretrained):
    assert pretrained
    model = torch.nn.Linear(2, 1)
    torch.nn.init.ones_(model.weight)
    return model
"""


def test_hub_weights(package):
    package("torchvision/__init__.py", "")
    package("torchvision/models/__init__.py", HUB)
    package("timm/__init__.py", HUB)
    for source in ("torchvision:tiny", "timm:tiny"):
        target = nn.Linear(2, 1)
        assert load_weights(target, source).loaded == ("weight", "bias")
        assert target.weight.tolist() == [[1, 1]]
    for name, message in (("resnet19", "no weights for 'resnet19'"), ("offline", "no network")):
        with pytest.raises(ModelError, match=message):
            load_weights(nn.Linear(2, 1), f"torchvision:{name}")


def cifar_test_images(path: Path, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First `count` test images [count, 3, 32, 32], normalised as the weights expect, and labels."""
    from PIL import Image

    with np.load(path) as arrays:
        blob, offsets, y = arrays["jpeg_test"].tobytes(), arrays["offsets_test"], arrays["y_test"]
    files = [blob[offsets[i] : offsets[i + 1]] for i in range(count)]
    images = np.stack([np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files])
    x = torch.as_tensor(images).permute(0, 3, 1, 2) / 255
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    return (x - mean) / std, torch.as_tensor(y[:count]).long()


@pytest.mark.parametrize(
    ("name", "accuracy"),
    [
        ("resnet20", 0.810),
        pytest.param("resnet32", 0.826, marks=pytest.mark.slow),
        pytest.param("resnet56", 0.832, marks=pytest.mark.slow),
    ],
)
def test_published_cifar_weights_reach_their_accuracy(name, accuracy, need_data):
    module = build(name, CIFAR, 10).eval()
    report = load_weights(module, need_data(f"weights/{name}_cifar10.npz"))
    assert report.missing == report.unexpected == ()
    x, y = cifar_test_images(need_data("cifar10_jpeg.npz"), 500)
    with torch.no_grad():
        reached = (module(x).argmax(1) == y).double().mean().item()
    # Three standard deviations of an accuracy measured on 500 of the 10 000 images.
    assert abs(reached - accuracy) < 3 * (accuracy * (1 - accuracy) / 500) ** 0.5
