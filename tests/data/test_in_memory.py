"""Data in memory are handed over as they are: the same numbers as of a Source, and no error shows a row of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import tailorfl
from fuzz.calls import SENTINEL, silent
from tailorfl.arguments import check_kind, check_texts
from tailorfl.data.own import OF_DATASETS, ROLES, as_source, from_table, from_tensors
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError, DataError, TailorflError
from tailorfl.printable import shown
from tailorfl.settings.experiment import ExperimentConfig

SMALL: dict[str, Any] = {
    "methods": "local,fedavg",
    "rounds": 2,
    "seeds": 1,
    "model": "logistic",
    "progress": False,
}


@pytest.fixture(scope="module")
def patients() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    age, dose = rng.normal(size=60), rng.normal(size=60)
    return pd.DataFrame(
        {
            "hospital": np.repeat(["north", "south", "west"], 20),
            "age": age,
            "dose": dose,
            "outcome": np.where(age + dose > 0, "ill", "well"),
        }
    )


class Pairs(Dataset[Any]):
    """What people write for their images: items are made when they are asked for."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, k: int) -> Any:
        return self.items[k]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.zeros(2), 0)])


def same(left: Source, right: Source) -> None:
    assert torch.equal(left.x, right.x)
    assert torch.equal(left.y, right.y)
    assert torch.equal(left.groups["client"], right.groups["client"])
    assert left.group_names["client"] == right.group_names["client"]
    assert left.info.get("classes") == right.info.get("classes")


def by_hospital(patients: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {str(name): rows.drop(columns="hospital") for name, rows in patients.groupby("hospital")}


def test_frames_and_datasets_are_the_sources_that_their_functions_make(patients: pd.DataFrame) -> None:
    wanted = from_table(patients, label="outcome", client="hospital")
    same(as_source(patients, {"label": "outcome", "client": "hospital"}), wanted)
    same(as_source(by_hospital(patients), {"label": "outcome"}), wanted)
    assert as_source(wanted, {}) is wanted
    x, y = torch.tensor(patients[["age", "dose"]].to_numpy()), (patients["outcome"] == "ill").to_numpy()
    owners = patients["hospital"].tolist()
    wanted = from_tensors(x, y.astype(int), clients=owners)
    same(as_source(TensorDataset(x, torch.tensor(y).long()), {"clients": owners}), wanted)
    same(as_source(Pairs([(x[k].numpy(), int(y[k])) for k in range(60)]), {"clients": owners}), wanted)


def test_a_frame_may_lack_a_column_that_others_have(
    patients: pd.DataFrame, caplog: pytest.LogCaptureFixture
) -> None:
    frames = {name: rows.drop(columns="hospital") for name, rows in patients.groupby("hospital")}
    frames["south"] = frames["south"].drop(columns="dose")
    found = as_source(frames, {"label": "outcome"})
    patients = patients.assign(dose=patients["dose"].where(patients["hospital"] != "south"))
    wanted = from_table(patients, label="outcome", client="hospital")
    assert torch.equal(found.x.nan_to_num(-9.0), wanted.x.nan_to_num(-9.0))
    assert "'dose' (south)" in caplog.text
    with pytest.raises(DataError, match="'west' lacks 'outcome'"):
        as_source({**frames, "west": frames["west"].drop(columns="outcome")}, {"label": "outcome"})
    with pytest.raises(DataError, match="'north' has a column 'age' and 'west' a column 'Age'"):
        as_source({**frames, "west": frames["west"].rename(columns={"age": "Age"})}, {"label": "outcome"})


def test_a_dataset_may_have_pictures_and_classes_by_name() -> None:
    rng = np.random.default_rng(0)
    grey, coloured = rng.integers(0, 256, (4, 5, 6), np.uint8), rng.integers(0, 256, (4, 5, 6, 3), np.uint8)
    for pixels, wanted in ((grey, grey[:, None]), (coloured, coloured.transpose(0, 3, 1, 2))):
        items = [(Image.fromarray(image), ["cat", "dog"][k % 2]) for k, image in enumerate(pixels)]
        source = as_source(Pairs(items), {"clients": [0, 0, 1, 1]})
        assert torch.equal(source.x, torch.from_numpy(wanted.copy()))
        assert source.info["classes"] == ("cat", "dog")
        assert source.y.tolist() == [0, 1, 0, 1]


def test_run_takes_them_with_the_numbers_of_a_source(patients: pd.DataFrame, tmp_path: Path) -> None:
    """`methods` as one text with commas is the list of them, as on the command line."""
    source = from_table(patients, label="outcome", client="hospital")
    wanted = tailorfl.run(source=source, out=tmp_path / "0", **SMALL).clients
    assert set(wanted["label"]) == {"local", "fedavg"}
    for number, given in enumerate(
        (
            {"data": patients, "label": "outcome", "client": "hospital"},
            {"source": patients, "label": "outcome", "client": "hospital", "data": {"seed": None}},
            {"data": by_hospital(patients), "label": "outcome"},
        ),
        start=1,
    ):
        found = tailorfl.run(out=tmp_path / str(number), **given, **SMALL).clients
        pd.testing.assert_frame_equal(found, wanted)


def test_other_settings_of_the_data_stand_beside_a_source(patients: pd.DataFrame, tmp_path: Path) -> None:
    settings = {"normalise": "client", "heldout_clients": ["west"]}
    result = tailorfl.run(
        source=patients, label="outcome", client="hospital", data=settings, out=tmp_path, **SMALL
    )
    assert result.config.data.normalise == "client"
    assert "heldout" in " ".join(result.table.columns)


def test_what_is_said_of_data_is_no_setting_by_the_same_name() -> None:
    assert not (ROLES | OF_DATASETS) & set(ExperimentConfig.model_fields)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (lambda f: f, {}, ["label="]),
        (lambda f: f, {"label": "outcom"}, ["outcom", "Did you mean 'outcome'"]),
        (lambda f: f, {"label": "outcome", "clients": "hospital"}, ["clients=", "client,"]),
        (lambda f: by_hospital(f), {"label": "outcome", "client": "hospital"}, ["client="]),
        (lambda f: {"a": f.assign(client=1)}, {"label": "outcome"}, ["'client'", "rename"]),
        (lambda f: {"a": f, "b": f.drop(columns="outcome")}, {"label": "outcome"}, ["'b' lacks 'outcome'"]),
        (lambda f: {"a": f, "b": 3}, {"label": "outcome"}, ["'b' is a int"]),
        (lambda f: f.to_numpy(), {"label": "outcome"}, ["ndarray", "from_tensors"]),
        (lambda f: Pairs([]), {}, ["Pairs", "(x, y)"]),
        (lambda f: Pairs([(torch.zeros(2), 0, 1)]), {}, ["Pairs", "(x, y)"]),
        (lambda f: Pairs([(torch.zeros(2), 0), (torch.zeros(3), 1)]), {}, ["one shape"]),
        (lambda f: Pairs([(torch.zeros(2), 0), (torch.zeros(2), [1, 2])]), {}, ["targets"]),
        (lambda f: Pairs([("text", 0)]), {}, ["no numbers"]),
        (lambda f: Stream(), {}, ["Stream", "__len__"]),
        (
            lambda f: Pairs([(torch.zeros(2), k % 2) for k in range(4)]),
            {"clients": [0, 1]},
            ["clients has 2"],
        ),
        (lambda f: Pairs([(torch.zeros(2), 0)]), {"label": "outcome"}, ["label=", "clients"]),
        (lambda f: from_table(f, "outcome"), {"label": "outcome"}, ["a Source", "label="]),
    ],
)
def test_what_is_wrong_with_data_in_memory_is_said(
    make: Callable[[pd.DataFrame], Any], options: dict[str, Any], words: list[str], patients: pd.DataFrame
) -> None:
    with pytest.raises((DataError, ConfigError)) as caught:
        as_source(make(patients), options)
    assert all(word in str(caught.value) for word in words), caught.value


def wrong_calls(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Mistakes with a frame: where it does not belong, in another form, or with other arguments."""
    named: dict[str, Any] = {"data": frame, "label": "outcome", "client": "hospital"}
    forms = [
        *(frame.to_numpy(), frame.to_dict("records"), frame.to_dict(), frame.to_csv(), str(frame)),
        *(
            frame.to_numpy().tolist(),
            frame["patient"],
            [frame],
            (frame, frame),
            {"path": frame},
            {"x": [frame]},
        ),
        *({"options": {"path": frame}}, {"path": frame.to_csv()}, {"clients": frame}, {"partition": frame}),
    ]
    calls = [{"data": form} for form in forms]
    calls += [{"source": form, "label": "outcome"} for form in forms]
    calls += [{"config": form} for form in (*forms, frame)]
    places = ("methods", "model", "train", "rounds", "seeds", "engine", "eval", "fraction", "name")
    calls += [{**named, place: form} for place in places for form in (frame, *forms[:3], forms[5])]
    calls += [{**named, "train": {"lr": form}} for form in (frame, *forms)]
    calls += [{**named, "methods": {"name": "ditto", "lam": form}} for form in (frame, *forms)]
    options = (
        *("label", "client", "features", "task", "split", "words", "impute", "constants", "out"),
        *("exclude", "na_values", "sep", "decimal"),
    )
    calls += [{**named, option: form} for option in options for form in (frame, *forms[:7])]
    calls += [named, {**named, "label": "patient"}, {**named, "label": "age", "task": "survival"}]
    calls += [{**named, "task": task} for task in ("regression", "multilabel", "counts", "binary")]
    return calls


def test_no_error_shows_a_row_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the error nor, in a traceback, what it came of."""
    monkeypatch.chdir(tmp_path)
    frame = pd.DataFrame(
        {
            "hospital": ["north", "south", "west"] * 4,
            "age": np.arange(12.0),
            "patient": [f"{SENTINEL} {k}" for k in range(12)],
            "outcome": ["ill", "well", "unsure"] * 4,  # names of classes are shown where they are few
        }
    )
    refused = 0
    for call in wrong_calls(frame):
        with suppress(TailorflError), silent(list(call)):
            refused += 1
            tailorfl.run(**{**SMALL, **call})
            refused -= 1
    assert refused > 200


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("mlp", "'mlp'"),
        (0.5, "0.5"),
        (None, "None"),
        ([1, 2.5, None], "[1, 2.5, None]"),
        ([1, "Miller"], "a list of 2 values"),
        (("Miller",), "a tuple of 1 values"),
        (list(range(11)), "a list of 11 values"),
        ([[1]], "a list of 1 values"),
        ({"Miller": 61}, "a mapping of 1 values"),
        ("Miller\n61", "a text of 9 characters"),
        ("M" * 81, "a text of 81 characters"),
        (Tensor([1.0]), "a Tensor"),
    ],
)
def test_what_a_message_shows_of_a_value(value: Any, wanted: str) -> None:
    assert shown(value) == wanted


def test_kinds_of_arguments() -> None:
    check_kind("path", "a b", str, Path)
    check_kind("none", None, int, None)
    check_texts("names", ["a"], int)
    check_kind("number", np.float32(1), Real)
    for wrong, kinds in (("a\nb\n", (str, Path)), (None, (str,)), ([], (str, None)), (1.5, (Integral,))):
        with pytest.raises(ConfigError, match="what should be a"):
            check_kind("what", wrong, *kinds)
    with pytest.raises(ConfigError, match="a number, but is True"):
        check_kind("what", True, Real)
    with pytest.raises(ConfigError, match="hold texts"):
        check_texts("what", ["a", 1])
    with pytest.raises(ConfigError, match="what should be"):
        check_texts("what", {"a"})
