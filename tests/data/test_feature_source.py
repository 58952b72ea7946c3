"""Sources of features, and what the readings of a release's cut and of a test part leave to clients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tailorfl.data.build import build
from tailorfl.data.registry import load_source
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError, DataError
from tailorfl.partition import partition


def arrays(**more: object) -> dict[str, object]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(30, 4)), "y": np.arange(30) % 3, "classes": ["a", "b", "c"], **more}


def test_features_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "some.npz"
    np.savez(file, **arrays(test=np.arange(30) > 20, domain=np.arange(30) % 2, domains=["x", "y"]))  # type: ignore[arg-type]
    source = load_source("features", path=str(file))
    assert (source.name, source.outputs, source.info["classes"]) == ("features", 3, ("a", "b", "c"))
    assert source.test is not None
    assert int(source.test.sum()) == 9
    assert source.group_names["domain"] == ("x", "y")
    assert np.allclose(source.x.numpy(), arrays()["x"])


def test_a_file_of_features_that_lacks_something(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"studies/features\.py"):
        load_source("features", path=str(tmp_path / "absent.npz"))
    np.savez(tmp_path / "bad.npz", x=np.zeros((2, 3)), y=np.zeros(2))
    with pytest.raises(DataError, match="classes"):
        load_source("features", path=str(tmp_path / "bad.npz"))


@pytest.mark.parametrize("cut", ["drawn", "sorted"])
def test_the_releases_cut_takes_a_tenth_off_the_end_of_each_client(cut: str) -> None:
    strata = np.repeat(np.arange(10), 600)
    whole = partition("fedclup_classes", strata, 10, np.random.default_rng(3), options={"classes": 6})
    less = partition(
        "fedclup_classes", strata, 10, np.random.default_rng(3), options={"classes": 6, "cut": cut}
    )
    for before, after in zip(whole.train, less.train, strict=True):
        lost = np.setdiff1d(before, after)
        assert set(after) < set(before)
        assert len(lost) == round(0.1 * len(before))
        held = np.unique(strata[before])
        assert len(set(strata[lost])) == 1  # a class is 1/6 of a client, so one class loses all that is lost
        if cut == "sorted":
            assert set(strata[lost]) == {held[-1]}
    if cut == "drawn":
        last = [
            strata[np.setdiff1d(a, b)][0] == strata[a].max()
            for a, b in zip(whole.train, less.train, strict=True)
        ]
        assert not all(last)
    with pytest.raises(ConfigError, match="sorted"):
        partition("fedclup_classes", strata, 10, np.random.default_rng(3), options={"cut": "sortd"})


def test_every_client_is_tested_on_all_official_samples_of_its_classes() -> None:
    y = torch.arange(600) % 10
    test = torch.zeros(600, dtype=torch.bool)
    test[400:] = True
    source = Source("own", torch.zeros(600, 2), y, "classification", 10, test=test)
    built = build(
        source=source,
        clients=5,
        partition="labels_per_client",
        partition_options={"classes": 4},
        split={"train": 1.0, "test": "classes"},
    )
    for train, tested in zip(built.train, built.test, strict=True):
        classes = set(y[train].tolist())
        assert set(tested.tolist()) == {r for r in range(400, 600) if int(y[r]) in classes}
