"""Clients with files of their own: the numbers of the simulation of the same files, to the bit; what leaves them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from deploy.federating import deployed, experiment, private_state, same, server_state, simulated
from tailorfl.deploy.client_session import member_of
from tailorfl.deploy.policy import Policy
from tailorfl.errors import ConfigError, DataError, RunError
from tailorfl.export.predict import predict
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.training import tree

WARDS = ("north", "east", "south", "west")
"""In another order than that of their names."""


def write(folder: Path, gaps: bool = True) -> None:
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


FORMS = ((",", ".", "utf-8"), ("|", ".", "utf-16"), (";", ",", "latin-1"), ("\t", ",", "utf-8-sig"))


def as_hospitals_have_them(files: Path) -> None:
    """Give each table another separator, decimal mark or encoding, a number of the patient, and two fewer columns."""
    for number, ward in enumerate(WARDS):
        table = pd.read_csv(files / f"{ward}.csv")
        table.insert(2, "patient", [f"{ward} {row:03}" for row in range(len(table))])
        if ward == "east":
            table = table.drop(columns=["pressure", "pain"])
        elif ward != "north":
            table = table[["outcome", "patient", "pain", "pressure", "age"]].assign(
                weight=table.index % 7 + 60.5
            )
        table = table.replace("ill", "krank für länger")
        sep, decimal, encoding = FORMS[number]
        table.to_csv(files / f"{ward}.csv", sep=sep, decimal=decimal, encoding=encoding, index=False)


def of_files(
    folder: Path, method: Any = "ditto", deploy: dict[str, Any] | None = None, **data: Any
) -> ExperimentConfig:
    """An experiment on the four tables; a deployment looks at the path as little as at any other machine's."""
    given = {"name": "table", "path": str(folder), "options": {"label": "outcome"}, **data}
    usual = {"clients": 4, "round_seconds": 60.0, "wait_seconds": 20.0}
    return experiment(method, data=given, deploy=deploy or usual)


FEW = Policy(min_count=1)
"""Of such small tables a class or a word may be that of one row."""


def clients(folder: Path, files: Path, config: ExperimentConfig, policy: Policy = FEW) -> dict[int, Any]:
    """The four wards as nodes, each with its own file and the experiment that it has agreed to."""
    return {
        7 + i: member_of(
            state=folder / f"state-{w}", data=files / f"{w}.csv", policy=policy, experiment=config
        )
        for i, w in enumerate(WARDS)
    }


@pytest.mark.parametrize(
    ("gaps", "data"),
    [
        (True, {"normalise": "federated"}),
        (True, {"normalise": "federated", "options": {"label": "outcome", "indicator": True}}),
        (True, {"normalise": "client", "options": {"label": "outcome", "impute": "median"}}),
        (True, {"normalise": "federated", "options": {"label": "outcome", "min_count": 8}}),
        (False, {}),
        (False, {"normalise": "client", "split": {"train": 0.5, "test": 0.5}}),
    ],
)
def test_own_files_give_the_numbers_of_the_simulation(
    gaps: bool, data: dict[str, Any], tmp_path: Path
) -> None:
    files = tmp_path / "files"
    write(files, gaps)
    config = of_files(files, **data)
    result = deployed(config, tmp_path, clients(tmp_path, files, config))
    sim = simulated(config)
    same(server_state(result), dict(tree.leaves(sim.server)))
    for number, ward in enumerate(sorted(WARDS)):
        own = {p: t[0] for p, t in tree.leaves(sim.states.get((number,)))}
        same(private_state(tmp_path, config, ward), own)


@pytest.mark.parametrize("by", ["federated", "client"])
def test_files_that_differ_in_form_and_columns_give_the_numbers_of_the_simulation(
    by: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """East lacks two columns, and north the weight; each client's export reads files that lack them too."""
    files = tmp_path / "files"
    write(files)
    as_hospitals_have_them(files)
    options = {"label": "outcome", "exclude": ["patient"], "words": ["pain"], "indicator": True}
    config = of_files(files, normalise=by, options=options)
    result = deployed(config, tmp_path, clients(tmp_path, files, config))
    assert "'pain' (east), 'pressure' (east), 'weight' (east, north)" in caplog.text
    sim = simulated(config)
    same(server_state(result), dict(tree.leaves(sim.server)))
    source = sim.federation.source
    for number, ward in enumerate(sorted(WARDS)):
        own = {p: t[0] for p, t in tree.leaves(sim.states.get((number,)))}
        same(private_state(tmp_path, config, ward), own)
        place = tmp_path / f"state-{ward}" / config.name / "ditto" / "seed-5" / "model"
        found = predict(place, files / f"{ward}.csv")
        rows = (source.groups["client"] == number).nonzero()[:, 0]
        ((_, models),) = sim.personal_models((number,))
        wanted = sim.model(tree.tensors(models[0]), source.take(rows)).softmax(1)
        assert np.allclose(found.filter(like="p(").to_numpy(), wanted.detach().numpy(), atol=1e-6)
        assert found["patient"].tolist() == [f"{ward} {row:03}" for row in range(len(found))]
    east = tmp_path / "state-east" / config.name / "ditto" / "seed-5" / "model"
    south = tmp_path / "state-south" / config.name / "ditto" / "seed-5" / "model"
    with pytest.raises(DataError, match="lacks pain, pressure, weight, which the model reads"):
        predict(south, files / "east.csv")
    assert len(predict(east, files / "south.csv")) == 48  # it may have what the client lacked


def test_columns_that_no_client_has_are_refused_with_the_nearest(tmp_path: Path) -> None:
    files = tmp_path / "files"
    write(files)
    for option in ("words", "features"):
        options = {"label": "outcome", option: ["pain", "agee"]}
        config = of_files(files, normalise="federated", options=options)
        hint = "Did you mean 'age'" if option == "words" else "Columns: pain"
        with pytest.raises(DataError, match=rf"no column 'agee'.*{hint}"):
            deployed(config, tmp_path, clients(tmp_path, files, config))


def test_the_model_on_a_clients_disk_reads_its_raw_rows(tmp_path: Path) -> None:
    files = tmp_path / "files"
    write(files)
    config = of_files(files, normalise="federated")
    deployed(config, tmp_path, clients(tmp_path, files, config))
    sim = simulated(config)
    number = sorted(WARDS).index("south")
    ((_, models),) = sim.personal_models((number,))
    source = sim.federation.source
    rows = torch.cat(
        [torch.as_tensor(sim.federation.part(part)[number]) for part in ("train", "val", "test")]
    )
    rows = rows.sort().values
    wanted = sim.model(tree.tensors(models[0]), source.take(rows)).softmax(1)
    place = tmp_path / "state-south" / config.name / "ditto" / "seed-5" / "model"
    found = predict(place, files / "south.csv")
    assert np.allclose(found.filter(like="p(").to_numpy(), wanted.detach().numpy(), atol=1e-6)


def test_tables_that_do_not_fit_together_are_refused_by_name(tmp_path: Path) -> None:
    files = tmp_path / "files"
    write(files)
    odd = pd.read_csv(files / "west.csv").rename(columns={"pain": "Pain"})
    odd.to_csv(files / "west.csv", index=False)
    config = of_files(files, normalise="federated", deploy={"clients": 4, "wait_seconds": 1.0})
    with pytest.raises(RunError, match=r"3 of 4 clients are there: .*turned away: 'west': .*Pain"):
        deployed(config, tmp_path, clients(tmp_path, files, config))


def test_some_with_files_and_some_without_are_refused(tmp_path: Path) -> None:
    files = tmp_path / "files"
    write(files)
    config = of_files(files, deploy={"clients": 4, "wait_seconds": 1.0})
    nodes = clients(tmp_path, files, config) | {10: member_of(state=tmp_path / "s", name="3")}
    with pytest.raises((ConfigError, RunError)):
        deployed(config, tmp_path, nodes)
    config = experiment("ditto", data={"name": "digits", "clients": 4}, deploy={"clients": 4})
    with pytest.raises(
        RunError, match=r"have table, text_table, folder, but the experiment's data\.name is 'digits'"
    ):
        deployed(config, tmp_path, clients(tmp_path, files, config))


def test_private_training_draws_from_a_secret_of_the_client(tmp_path: Path) -> None:
    """Whoever knows the experiment and its seed cannot draw batches and noise again; the client itself can."""
    files = tmp_path / "files"
    write(files, gaps=False)
    config = of_files(files, {"name": "fedavg", "train": {"dp": {"clip": 1.0, "noise": 1.0}}})
    open_noise = FEW.model_copy(update={"secret_noise": False})
    result = deployed(config, tmp_path / "open", clients(tmp_path / "open", files, config, open_noise))
    known = dict(tree.leaves(simulated(config).server))
    same(server_state(result), known)
    first = server_state(deployed(config, tmp_path / "a", clients(tmp_path / "a", files, config)))
    assert all(not torch.equal(first[name], tensor) for name, tensor in known.items())
    for ward in WARDS:
        secret = tmp_path / "a" / f"state-{ward}" / "secret"
        assert len(secret.read_bytes()) == 32
        assert secret.stat().st_mode & 0o077 == 0
        (tmp_path / "b" / f"state-{ward}").mkdir(parents=True)
        shutil.copy(secret, tmp_path / "b" / f"state-{ward}")
    same(server_state(deployed(config, tmp_path / "b", clients(tmp_path / "b", files, config))), first)


@pytest.mark.parametrize("level", ["sample", "client"])
def test_privacy_refuses_constants_of_samples(level: str, tmp_path: Path) -> None:
    files = tmp_path / "files"
    write(files)
    private = {
        "name": "ditto",
        "train": {"dp": {"level": level, "clip": 1.0, "noise": 1.0}},
        "weights": "uniform",
    }
    config = of_files(files, private, normalise="federated")
    with pytest.raises(ConfigError, match=rf"one {level} changes all others.*data\.options\.constants"):
        deployed(config, tmp_path, clients(tmp_path, files, config))
