"""Data in memory are handed over as they are: the same numbers as of a Source, and no error shows a row of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
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
from tailorfl.data.own import OF_DATASETS, ROLES, as_source, from_table, from_tensors
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError, DataError, TailorflError
from tailorfl.interface import check_kind, check_texts
from tailorfl.printable import shown
from tailorfl.settings.experiment import ExperimentConfig

SMALL: dict[str, Any] = {"methods": "local,fedavg", "rounds": 1, "seeds": 1, "model": "logistic"}


@pytest.fixture(scope="module")
def patients() -> pd.DataFrame:
    age, dose = np.random.default_rng(0).normal(size=(2, 60))
    frame = pd.DataFrame({"hospital": np.repeat(["north", "south", "west"], 20), "age": age, "dose": dose})
    return frame.assign(outcome=np.where(age + dose > 0, "ill", "well"))


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


def test_tensors_may_be_columns_of_a_frame_in_any_order(patients: pd.DataFrame) -> None:
    shuffled = (
        patients.assign(ill=patients["outcome"] == "ill").sample(frac=1, random_state=0).set_index("dose")
    )
    plain = [shuffled[["age"]].to_numpy(), shuffled["ill"].to_numpy(dtype=int)]
    wanted = from_tensors(*plain, shuffled["hospital"].to_numpy(), test=shuffled["age"].to_numpy() > 60)
    same(
        from_tensors(shuffled[["age"]], shuffled["ill"], shuffled["hospital"], test=shuffled["age"] > 60),
        wanted,
    )


def test_a_dataset_may_have_pictures_and_classes_by_name() -> None:
    rng = np.random.default_rng(0)
    grey, coloured = rng.integers(0, 256, (4, 5, 6), np.uint8), rng.integers(0, 256, (4, 5, 6, 3), np.uint8)
    for pixels, wanted in ((grey, grey[:, None]), (coloured, coloured.transpose(0, 3, 1, 2))):
        items = [(Image.fromarray(image), ["cat", "dog"][k % 2]) for k, image in enumerate(pixels)]
        source = as_source(Pairs(items), {"clients": [0, 0, 1, 1]})
        assert torch.equal(source.x, torch.from_numpy(wanted.copy()))
        assert source.info["classes"] == ("cat", "dog")
        assert source.y.tolist() == [0, 1, 0, 1]
    few = Image.fromarray(coloured[0]).quantize(4)
    assert few.mode == "P"
    source = as_source(Pairs([(few, 0), (few, 1)]), {})
    assert torch.equal(source.x[0], torch.from_numpy(np.array(few.convert("RGB")).transpose(2, 0, 1).copy()))


def test_run_takes_them_with_the_numbers_of_a_source(patients: pd.DataFrame, tmp_path: Path) -> None:
    """With other settings of the data, and `methods` as one text with commas, as on the command line."""
    roles = {"label": "outcome", "client": "hospital"}
    patients.to_csv(tmp_path / "winter.csv", index=False)
    settings: dict[str, Any] = {"normalise": "client", "heldout_clients": ["west"]}
    settings["shifts"] = {"winter": str(tmp_path / "winter.csv")}
    source = from_table(patients, **roles)
    wanted = tailorfl.run(source=source, data=settings, out=tmp_path / "0", **SMALL)
    assert set(wanted.clients["label"]) == {"local", "fedavg"}
    assert wanted.config.data.normalise == "client"
    assert "heldout" in " ".join(wanted.table.columns)
    assert wanted.table["deployed.winter"].notna().all()  # every model is tested on it as a column of its own
    found = tailorfl.run(source=patients, data=settings, out=tmp_path / "1", **roles, **SMALL)
    pd.testing.assert_frame_equal(found.clients, wanted.clients)
    plain, split = (
        tailorfl.run(data=data, out=tmp_path / name, **more, **SMALL).clients
        for name, data, more in (("2", patients, roles), ("3", by_hospital(patients), {"label": "outcome"}))
    )
    pd.testing.assert_frame_equal(plain, split)


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
        (lambda f: {1: f, "1": f}, {"label": "outcome"}, ["two frames", "'1'"]),
        (lambda f: f.to_numpy(), {"label": "outcome"}, ["ndarray", "from_tensors"]),
        (lambda f: Pairs([]), {}, ["Pairs", "(x, y)"]),
        (lambda f: Pairs([(torch.zeros(2), 0, 1)]), {}, ["Pairs", "(x, y)"]),
        (lambda f: Pairs([(torch.zeros(2), 0), (torch.zeros(3), 1)]), {}, ["Pairs", "samples"]),
        (lambda f: Pairs([(torch.zeros(2), 0), (torch.zeros(2), [1, 2])]), {}, ["targets"]),
        (lambda f: Pairs([("text", 0)]), {}, ["Pairs", "not numbers"]),
        (lambda f: Stream(), {}, ["Stream", "__len__"]),
        (lambda f: Pairs([(torch.zeros(2), 0), (torch.ones(2), 1)]), {"clients": [0]}, ["clients has 1"]),
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


def test_what_is_said_of_data_is_no_setting_by_the_same_name() -> None:
    assert not (ROLES | OF_DATASETS) & set(ExperimentConfig.model_fields)


def wrong_calls(frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Mistakes with a frame: where it does not belong, in another form, or with other arguments."""
    named: dict[str, Any] = {"data": frame, "label": "outcome", "client": "hospital"}
    few = [frame, frame.to_numpy(), frame.to_dict("records"), frame.to_dict(), frame.to_numpy().tolist()]
    more = [frame.to_csv(), str(frame), frame["patient"], [frame], (frame, frame), {"path": frame}]
    more += [{"x": [frame]}, {"options": {"path": frame}}, {"path": frame.to_csv()}]
    more += [{"clients": frame}, {"partition": frame}]
    for form in (*few[1:], *more):
        yield from ({"data": form}, {"source": form, "label": "outcome"})
    for form in (*few, *more):
        yield from ({"config": form}, {**named, "train": {"lr": form}})
        yield {**named, "methods": {"name": "ditto", "lam": form}}
    for place in ("methods", "model", "train", "rounds", "seeds", "engine", "eval", "fraction", "name"):
        yield from ({**named, place: form} for form in few)
    roles = ("label", "client", "features", "task", "split", "words", "impute", "constants", "out")
    for option in (*roles, "exclude", "na_values", "sep", "decimal"):
        yield from ({**named, option: form} for form in (*few, *more[:3]))
    yield from (named, {**named, "label": "patient"}, {**named, "label": "age", "task": "survival"})
    yield from ({**named, "task": task} for task in ("regression", "multilabel", "counts", "binary"))


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def test_no_error_shows_a_row_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Neither the error nor, in a traceback, what it came of."""
    monkeypatch.chdir(tmp_path)
    frame = pd.DataFrame({"hospital": ["north", "south", "west"] * 4, "age": np.arange(12.0)})
    frame["patient"] = [f"{SENTINEL} {k}" for k in range(12)]
    frame["outcome"] = ["ill", "well", "unsure"] * 4  # names of classes are shown where they are few
    refused = 0
    for call in islice(wrong_calls(frame), 0, None, step):
        with suppress(TailorflError), silent(list(call)):
            refused += 1
            tailorfl.run(**{**SMALL, **call})
            refused -= 1
    assert refused > 200 / step


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


@pytest.mark.parametrize(
    ("value", "kinds"), [("a b", (str, Path)), (None, (int, None)), (np.float32(1), (Real,))]
)
def test_kinds_of_arguments(value: Any, kinds: Any) -> None:
    check_kind("what", value, *kinds)


@pytest.mark.parametrize(
    ("value", "kinds"),
    [("a\nb\n", (str, Path)), (None, (str,)), ([], (str, None)), (1.5, (Integral,)), (True, (Real,))],
)
def test_kinds_of_arguments_that_are_refused(value: Any, kinds: Any) -> None:
    with pytest.raises(ConfigError, match="what should be a"):
        check_kind("what", value, *kinds)


def test_lists_of_texts() -> None:
    check_texts("names", ["a"], int)
    for texts in (["a", 1], {"a"}):
        with pytest.raises(ConfigError, match="what should"):
            check_texts("what", texts)
