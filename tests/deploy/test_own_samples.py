"""Clients with texts or images of their own: the numbers of the simulation of the same files, to the bit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from deploy.federating import deployed, experiment, private_state, same, server_state, simulated
from deploy.tampering import trace_of
from tailorfl.deploy.client_session import member_of
from tailorfl.deploy.policy import Policy
from tailorfl.export.predict import predict
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.training import tree

WARDS = ("north", "east", "south")
"""In another order than that of their names."""
BERT = {"name": "bert", "hidden": 8, "layers": 1, "heads": 1, "intermediate": 8}


def write_images(folder: Path) -> None:
    """Three clients; one has no picture of one class, one has grey ones alone."""
    for number, ward in enumerate(WARDS):
        rng = np.random.default_rng(number)
        kinds = ("cat", "dog") if ward == "east" else ("bird", "cat", "dog")
        for place, kind in enumerate(kinds):
            (folder / ward / kind).mkdir(parents=True)
            for i in range(9 + 2 * number + place):
                shape = (8, 6) if ward == "south" else (8, 6, 3)
                pixels = rng.integers(0, 60 + 60 * place, shape, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / ward / kind / f"{i}.png")


def write_texts(folder: Path, binary: bool = False) -> None:
    """Three files of notes; one has no note of one kind, and of two kinds only one."""
    folder.mkdir(parents=True)
    words = ["calm", "good"], ["bad", "pain"], ["late", "lost"]
    names = ("well", "ill", "other")[: 2 if binary else 3]
    for number, ward in enumerate(WARDS):
        rng = np.random.default_rng(number)
        kinds = ["ill"] if ward == "east" and binary else names[: 2 if ward == "east" else 3]
        rows = [
            (" ".join(rng.choice(words[names.index(kind)], 3)) + f" {i}", kind)
            for i, kind in enumerate(rng.choice(kinds, 24 + number))
        ]
        pd.DataFrame(rows, columns=["note", "state"]).to_csv(folder / f"{ward}.csv", index=False)


def of_files(
    name: str, folder: Path, model: Any, options: Mapping[str, Any], **more: Any
) -> ExperimentConfig:
    given = {"name": name, "path": str(folder), "options": dict(options), **more.pop("data", {})}
    where = {"clients": 3, "round_seconds": 60.0, "wait_seconds": 20.0}
    return experiment("ditto", data=given, model=model, deploy=where, **more)


def clients(folder: Path, files: Path, config: ExperimentConfig, ending: str = "") -> dict[int, Any]:
    """The three wards as nodes, each with its own place and the experiment that it has agreed to."""
    few = Policy(min_count=1, secret_noise=False)  # as the simulation draws it
    return {
        7 + i: member_of(
            state=folder / f"state-{w}", data=files / f"{w}{ending}", policy=few, experiment=config
        )
        for i, w in enumerate(WARDS)
    }


def is_simulated(config: ExperimentConfig, folder: Path, nodes: dict[int, Any]) -> None:
    """Assert that the server and all clients end with the states of the simulation of the same files."""
    result = deployed(config, folder, nodes)
    sim = simulated(config)
    same(server_state(result), dict(tree.leaves(sim.server)))
    for number, ward in enumerate(sorted(WARDS)):
        own = {p: t[0] for p, t in tree.leaves(sim.states.get((number,)))}
        same(private_state(folder, config, ward), own)


@pytest.mark.parametrize("options", [{}, {"scaling": "public"}, {"size": [6, 6]}])
def test_images_give_the_numbers_of_the_simulation(options: dict[str, Any], tmp_path: Path) -> None:
    files = tmp_path / "files"
    write_images(files)
    config = of_files("folder", files, "logistic", options)
    is_simulated(config, tmp_path, clients(tmp_path, files, config))
    place = tmp_path / "state-south" / config.name / "ditto" / "seed-5" / "model"
    found = predict(place, files / "south" / "cat")
    assert len(found) == len(list((files / "south" / "cat").iterdir()))
    assert {"p(bird)", "p(cat)", "p(dog)"} <= set(found.columns)


@pytest.mark.parametrize("binary", [False, True])
def test_texts_give_the_numbers_of_the_simulation(binary: bool, tmp_path: Path) -> None:
    files = tmp_path / "files"
    write_texts(files, binary)
    options = {
        "label": "state",
        "text": "note",
        "length": 24,
        "task": "binary" if binary else "classification",
    }
    config = of_files("text_table", files, BERT, options)
    is_simulated(config, tmp_path, clients(tmp_path, files, config, ".csv"))


@pytest.mark.parametrize("level", ["sample", "client"])
def test_privacy_asks_for_public_constants(level: str, tmp_path: Path) -> None:
    files = tmp_path / "files"
    write_images(files)
    private = {"epochs": 1, "batch_size": 8, "lr": 0.1, "dp": {"level": level, "clip": 1.0, "noise": 1.0}}

    def of_private(options: dict[str, Any]) -> ExperimentConfig:
        return of_files("folder", files, "logistic", options, train=private, weights="uniform")

    config = of_private({})
    with pytest.raises(Exception, match="scaling=public"):
        deployed(config, tmp_path, clients(tmp_path, files, config))
    config = of_private({"scaling": "public"})
    is_simulated(config, tmp_path / "public", clients(tmp_path / "public", files, config))


def test_images_of_other_sizes_are_left_out_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = tmp_path / "files"
    write_images(files)
    for file in (files / "east").rglob("*.png"):
        Image.open(file).resize((9, 9)).save(file)
    config = of_files("folder", files, "logistic", {})
    result = deployed(config, tmp_path, clients(tmp_path, files, config))
    assert re.search(r"'east' is left out: .*'east' differ in x: .*data\.options\.size", caplog.text)
    assert {i for one in trace_of(result) for i in one.sampled} == {1, 2}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"normalise": "client"}, "is for numbers of a table"),
        ({"partition": "dirichlet"}, "data that lie in one place"),
    ],
)
def test_what_images_cannot_be_is_refused(data: dict[str, Any], said: str, tmp_path: Path) -> None:
    files = tmp_path / "files"
    write_images(files)
    config = of_files("folder", files, "logistic", {}, data=data)
    with pytest.raises(Exception, match=said):
        deployed(config, tmp_path, clients(tmp_path, files, config))


def test_no_statistic_of_public_scaling_is_told(tmp_path: Path) -> None:
    files = tmp_path / "files"
    write_images(files)
    for scaling, counts in (("public", 0), ("train", 3)):
        config = of_files("folder", files, "logistic", {"scaling": scaling})
        own = clients(tmp_path, files, config)[7].data.of_kind(config.data)
        _, told = own.summary(config, 5, 1, [24, 30, 39])
        assert len(told["pixels"]) == counts
        assert (told["source"]["mean"] is None) == (scaling == "train")
