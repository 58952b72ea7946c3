"""Clients with tables, images or texts of their own: the files, and the experiments on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from deploy.federation import deployed, experiment
from tailorfl.deploy.client_session import ClientSession, member_of
from tailorfl.deploy.policy import Policy
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.experiment import ExperimentConfig

WARDS = ("north", "east", "south", "west")
"""In another order than that of their names."""
FEW = Policy(min_count=1)
"""Of such small tables a class or a word may be that of one row."""
BERT = {"name": "bert", "hidden": 8, "layers": 1, "heads": 1, "intermediate": 8}


def write_tables(folder: Path, gaps: bool = True) -> None:
    """Four tables with numbers, words and gaps; one has no patient of one class, one measures nobody's pressure."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, ward in enumerate(WARDS):
        rng = np.random.default_rng(number)
        rows = 30 + 9 * number
        age, pain = rng.normal(60, 9, rows).round(1), rng.choice(["none", "some", "much"], rows)
        score = age / 10 + np.where(pain == "much", 2, 0) + rng.normal(size=rows)
        table = pd.DataFrame({"age": age, "pressure": rng.normal(120, 15, rows).round(), "outcome": "well"})
        table.loc[score > 6.5, "outcome"] = "ill"
        table.loc[score > 8.0, "outcome"] = "very ill"
        if gaps:
            table.insert(1, "pain", pain)
            table.loc[rng.random(rows) < 0.2, "pain"] = None
            table.loc[rng.random(rows) < 0.2, "age"] = np.nan
        if ward == "east":
            table = table[table["outcome"] != "very ill"]
            table["pressure"] = np.nan if gaps else 120.0
        table.to_csv(folder / f"{ward}.csv", index=False)


def write_images(folder: Path) -> None:
    """Folders of three clients; one has no picture of one class, one has grey ones alone."""
    for number, ward in enumerate(WARDS[:3]):
        rng = np.random.default_rng(number)
        kinds = ("cat", "dog") if ward == "east" else ("bird", "cat", "dog")
        for kind_number, kind in enumerate(kinds):
            (folder / ward / kind).mkdir(parents=True)
            for i in range(9 + 2 * number + kind_number):
                shape = (8, 6) if ward == "south" else (8, 6, 3)
                pixels = rng.integers(0, 60 + 60 * kind_number, shape, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / ward / kind / f"{i}.png")


def write_texts(folder: Path, binary: bool = False) -> None:
    """Three files of notes; one has no note of one kind, and of two kinds only one."""
    folder.mkdir(parents=True)
    words = ["calm", "good"], ["bad", "pain"], ["late", "lost"]
    names = ("well", "ill", "other")[: 2 if binary else 3]
    for number, ward in enumerate(WARDS[:3]):
        rng = np.random.default_rng(number)
        kinds = ["ill"] if ward == "east" and binary else names[: 2 if ward == "east" else 3]
        rows = [
            (" ".join(rng.choice(words[names.index(kind)], 3)) + f" {i}", kind)
            for i, kind in enumerate(rng.choice(kinds, 24 + number))
        ]
        pd.DataFrame(rows, columns=["note", "state"]).to_csv(folder / f"{ward}.csv", index=False)


def of_files(folder: Path, method: Any = "ditto", *, clients: int = 4, **changes: Any) -> ExperimentConfig:
    """An experiment on the tables of a folder; a deployment looks at the path as little as at any other machine's."""
    data = {"name": "table", "path": str(folder), "options": {"label": "outcome"}, **changes.pop("data", {})}
    deploy = {"clients": clients, **changes.pop("deploy", {})}
    return experiment(method, data=data, deploy=deploy, **changes)


def of_samples(
    name: str, folder: Path, model: Any, options: dict[str, Any], **changes: Any
) -> ExperimentConfig:
    """An experiment on the images or texts of a folder."""
    data = {"name": name, "path": str(folder), "options": options, **changes.pop("data", {})}
    deploy = {"clients": 3, **changes.pop("deploy", {})}
    return experiment("ditto", data=data, model=model, deploy=deploy, **changes)


def owners(
    folder: Path, files: Path, config: ExperimentConfig, policy: Policy = FEW
) -> dict[int, ClientSession]:
    """The wards as nodes, each with its own file or folder and the experiment that it has agreed to."""
    data = {ward: [path for path in files.iterdir() if path.stem == ward] for ward in WARDS}
    return {
        7 + i: member_of(state=folder / f"state-{w}", data=data[w][0], policy=policy, experiment=config)
        for i, w in enumerate(WARDS)
        if data[w]
    }


def is_owners_simulation(
    config: ExperimentConfig, folder: Path, files: Path, policy: Policy = FEW
) -> Simulation:
    """Deploy an experiment, and assert that all end with the states of the simulation of the same files."""
    nodes = owners(folder, files, config, policy)
    return deployed(config, folder, nodes).is_simulated(sorted(WARDS[: len(nodes)]))
