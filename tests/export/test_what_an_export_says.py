"""What is said of an export, against numbers found otherwise: differences, samples tried, metrics, columns, images."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

import tailorfl
from export.exporting import QUICK, pictures, table
from tailorfl.errors import ModelError
from tailorfl.export import folder
from tailorfl.export.folder import TOLERANCE, difference, export, loaded, sample_for
from tailorfl.export.formats import TOLERANCE as OTHER_PROGRAMS
from tailorfl.export.formats import _compared
from tailorfl.export.predict import _columns, predict
from tailorfl.export.source_code import NotWritableError, written
from tailorfl.export.transformer import merged
from tailorfl.models import build
from tailorfl.models.lora import lora_layers
from tailorfl.runs.trained_models import restore

Compare = Callable[[Tensor, Callable[[Tensor], Tensor]], float]
COMPARED: dict[str, tuple[Compare, float]] = {
    "code": (lambda x, other: difference(nn.Identity(), other, x, Path("out")), TOLERANCE),
    "a form": (lambda x, other: _compared(nn.Identity(), x, "ONNX", other), OTHER_PROGRAMS),
}


@pytest.mark.parametrize("kind", COMPARED)
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("largest", [0.25, 8.0])
def test_outputs_may_differ_by_the_tolerance_times_the_largest_output(
    kind: str, several: bool, largest: float
) -> None:
    """For several samples and for one; the difference that is told is the largest of both."""
    compare, tolerance = COMPARED[kind]
    allowed = tolerance * max(1.0, largest)
    x = torch.tensor([[largest, 0.0], [0.0, -largest]], dtype=torch.float64)
    assert compare(x, lambda x: x) == 0.0

    def off_by(share: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x + share * allowed * ((len(x) > 1) == several)

    assert compare(x, off_by(0.9)) == pytest.approx(0.9 * allowed)
    for other in (off_by(1.1), lambda x: x * torch.nan):
        with pytest.raises(ModelError):
            compare(x, other)
    assert (TOLERANCE, OTHER_PROGRAMS) == (1e-6, 1e-4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three towns, of which one never trains, and a global model."""
    home = tmp_path_factory.mktemp("towns")
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"town": np.repeat(["ash", "elm", "oak"], 30), "x": rng.normal(size=90)})
    frame["y"] = 2 * frame["x"] + rng.normal(size=90)
    frame.to_csv(home / "towns.csv", index=False)
    data = table(home / "towns.csv", ["y"], "regression", heldout_clients=["oak"])
    looks = {"every": 1, "final": ["local", "heldout"], "adapt_steps": [0, 3]}
    tailorfl.run(QUICK, method="ditto", data=data, model="linear", rounds=2, eval=looks, out=home / "run")
    return home / "run"


def test_a_model_is_tried_on_samples_of_its_own_client(run: Path) -> None:
    restored = restore(run)
    train, x = restored.sim.federation.train, restored.sim.federation.source.x
    models = list(restored.models(range(3)))
    for client, model in enumerate(models):
        assert torch.equal(sample_for(restored, model), x[torch.from_numpy(train[client][:4])])
    (shared,) = restored.global_models()
    assert torch.equal(sample_for(restored, shared), sample_for(restored, models[0]))


def test_a_late_client_has_the_metrics_of_the_steps_that_its_model_took(run: Path, tmp_path: Path) -> None:
    records = restore(run).store.clients()
    oak = records[(records["client"] == 2) & (records["model"] == "personal")].set_index("set")["mse"]
    assert oak["heldout"] != oak["heldout+3"]
    for steps, name in ((0, "heldout"), (3, "heldout+3")):
        (one,) = export(run, tmp_path / str(steps), clients=["oak"], steps=steps)
        assert one.facts["metrics"]["test"]["mse"] == oak[name]
        assert one.facts["metrics"].keys() == {"test"}
        assert one.off.keys() == {"model.py"}, "further forms are written where they are asked for"


FACTOR = 1.5


class Joined(nn.Module):
    """Uses torch, a part of it, a number of the module around it and a method and a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.shift = nn.Linear(3, 4), 0.25

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([functional.relu(self.inside(x)), self.more(x)], 1) * FACTOR

    def more(self, x: Tensor) -> Tensor:
        return x + self.shift


def test_a_network_is_written_as_code_or_why_it_cannot_be_is_told() -> None:
    torch.manual_seed(0)
    x, parts = torch.randn(5, 3), OrderedDict(first=nn.Linear(3, 4), then=nn.ReLU(), last=nn.Linear(4, 2))
    for network in (Joined(), nn.Sequential(parts)):
        space: dict[str, Any] = {}
        exec(written(network), space)
        copy = space["network"]()
        copy.load_state_dict(network.state_dict())
        assert torch.equal(copy(x), network(x))
        assert type(copy) is not Joined
    with pytest.raises(NotWritableError, match="two places"):
        written(nn.Sequential(part := nn.Linear(3, 3), part))
    for name in ("class", "a-b"):
        with pytest.raises(NotWritableError, match="not Python identifiers"):
            written(nn.Sequential(OrderedDict([(name, nn.Linear(3, 2))])))


class Scaled(nn.Module):
    """Multiplies by an attribute."""

    def __init__(self, factor: Any) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_layers_are_written_with_words_and_numbers_as_python_has_them() -> None:
    """Torch's texts have bare words and infinities, numpy's numbers and enumerations have texts of their own."""
    torch.manual_seed(0)
    network, x = nn.Conv2d(2, 3, 3, padding="same", padding_mode="reflect"), torch.randn(2, 2, 5, 5)
    space: dict[str, Any] = {}
    exec(written(nn.Sequential(network)), space)
    copy = space["network"]()
    copy.load_state_dict(nn.Sequential(network).state_dict())
    assert torch.equal(copy(x), network(x))
    for other in (np.sqrt(64.0), math.inf, math.nan, re.IGNORECASE):
        with pytest.raises(NotWritableError, match="neither a finite number nor a text"):
            written(Scaled(other))
    with pytest.raises(NotWritableError, match="Hardtanh has an infinite number"):
        written(nn.Hardtanh(-1.0, math.inf))


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=re.escape(str(tmp_path))):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("task", "count", "names"),
    [
        ("regression", 1, ["predicted"]),
        ("regression", 2, ["predicted(0)", "predicted(1)"]),
        ("counts", 2, ["predicted(0)", "predicted(1)"]),
        ("multilabel", 3, ["p(0)", "p(1)", "p(2)"]),
    ],
)
def test_answers_have_a_column_for_each_number(task: str, count: int, names: list[str]) -> None:
    numbers = np.arange(2.0 * count).reshape(2, count)
    found = _columns(numbers, {"task": task})
    assert list(found.columns) == names
    np.testing.assert_array_equal(found, numbers)


def test_a_grey_image_is_read_by_a_model_of_colours_as_the_same_in_three_channels(tmp_path: Path) -> None:
    data = pictures(tmp_path / "images", {"dark": 60, "light": 180}, (5, 5, 3), 6)
    tailorfl.run(QUICK, method="fedavg", data=data, model="logistic", out=tmp_path / "run")
    grey = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 5), dtype=np.uint8))
    grey.save(tmp_path / "grey.png")
    grey.convert("RGB").save(tmp_path / "colour.png")
    answers = [
        predict(tmp_path / "run", tmp_path / f"{name}.png", client="north") for name in ("grey", "colour")
    ]
    pd.testing.assert_frame_equal(*(answer.drop(columns="file") for answer in answers))


@pytest.mark.parametrize(("name", "head"), [("bert", "classification"), ("llama", "language")])
def test_a_merged_model_has_no_lora_and_the_same_outputs(name: str, head: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    net = build(name, (9,), 40 if head == "language" else 4, vocabulary=40, lora=2, head=head).eval()
    with torch.no_grad():
        for part, tensor in net.named_parameters():
            if "lora_" in part:
                tensor.normal_(std=0.1)
    x = torch.randint(3, 40, (3, 9))
    found = merged(net)
    assert lora_layers(net)
    assert not lora_layers(found)
    with torch.no_grad():
        torch.testing.assert_close(found(x), net(x), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_what_was_merged_may_differ_by_more_than_what_was_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tolerance that nothing meets each of them is refused where it is the one that counts."""
    pytest.importorskip("transformers")
    data, model = {"samples": 60, "clients": 2}, {"name": "vit", "lora": 2}
    tailorfl.run(
        QUICK, method="fedlora", data=data, model=model, rounds=1, eval={"every": 0}, out=tmp_path / "run"
    )
    for tolerance, merge in (("MERGED", True), ("TOLERANCE", False)):
        with monkeypatch.context() as patch:
            patch.setattr(folder, tolerance, -1.0)
            (one,) = export(tmp_path / "run", tmp_path / tolerance, clients=["0"], merge=not merge)
            assert one.off["model.py"] < 1e-6
            with pytest.raises(ModelError, match="gives different outputs"):
                export(tmp_path / "run", tmp_path / tolerance / "again", clients=["0"], merge=merge)
