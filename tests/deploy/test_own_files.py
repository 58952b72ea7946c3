"""Clients with files of their own: the numbers of the simulation of the same files, to the bit; what leaves them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor

from deploy.federation import Federation, asked, deployed, experiment, place_of, same, with_facts
from deploy.owned import (
    BERT,
    FEW,
    WARDS,
    is_owners_simulation,
    of_files,
    of_samples,
    owners,
    write_images,
    write_tables,
    write_texts,
)
from tailorfl.data.own import from_table
from tailorfl.deploy.client_session import member_of
from tailorfl.deploy.messages import Packet
from tailorfl.deploy.own_files import OwnTable
from tailorfl.deploy.policy import Policy
from tailorfl.errors import ConfigError, DataError, RunError
from tailorfl.export.predict import predict
from tailorfl.settings.data import DataConfig
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.training import tree

OPEN_NOISE = FEW.model_copy(update={"secret_noise": False})
"""Noise as the simulation draws it."""
SLOW: dict[str, Any] = {"marks": pytest.mark.slow}
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


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write_tables(tmp_path / "files")
    return tmp_path / "files"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    write_images(tmp_path / "images")
    return tmp_path / "images"


def of_label(normalise: str, **options: Any) -> dict[str, Any]:
    """Data of tables."""
    return {"normalise": normalise, "options": {"label": "outcome", **options}}


# -- tables -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gaps", "data"),
    [
        pytest.param(True, {"normalise": "federated"}, **SLOW),
        (True, of_label("client", impute="median")),
        (False, {"normalise": "client", "split": {"train": 0.5, "test": 0.5}}),
        pytest.param(True, of_label("federated", indicator=True), **SLOW),
        pytest.param(True, of_label("federated", min_count=8), **SLOW),
        pytest.param(False, {}, **SLOW),
    ],
)
def test_tables_give_the_numbers_of_the_simulation(gaps: bool, data: dict[str, Any], tmp_path: Path) -> None:
    write_tables(tmp_path / "files", gaps)
    is_owners_simulation(of_files(tmp_path / "files", data=data), tmp_path, tmp_path / "files")


@pytest.mark.parametrize("normalise", ["federated", pytest.param("none", **SLOW)])
def test_a_client_may_have_one_of_two_classes(normalise: str, tmp_path: Path) -> None:
    files = tmp_path / "files"
    write_tables(files, gaps=False)
    for file in files.iterdir():
        table = pd.read_csv(file).replace("very ill", "ill")
        table = table[table["outcome"] == "well"] if file.stem == "east" else table
        table.to_csv(file, index=False)
    is_owners_simulation(of_files(files, data=of_label(normalise, task="binary")), tmp_path, files)


def test_columns_may_be_named_by_numbers(tmp_path: Path) -> None:
    """As YAML reads `exclude: [2020]`."""
    file = tmp_path / "north.csv"
    file.write_text("2019,2020,2021,outcome\n" + "1,2,3,ill\n4,5,6,well\n" * 5)
    for option in ({"features": [2019, 2021]}, {"exclude": [2020]}, {"exclude": 2020}):
        options = {"label": "outcome", **option}
        source = OwnTable("north", file, FEW).read(DataConfig(name="table", options=options), ())
        assert source.info["features"] == from_table(file, **options).info["features"] == ("2019", "2021")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["federated_trees", "local_trees"])
def test_trees_on_tables_are_those_of_the_simulation(name: str, files: Path, tmp_path: Path) -> None:
    """Words of 40 levels, which take two numbers of a node."""
    for number, file in enumerate(sorted(files.iterdir())):
        table = pd.read_csv(file)
        table["bed"] = [f"bed {(row + number) % 40}" for row in range(len(table))]
        table.to_csv(file, index=False)
    method = {"name": name, "min_samples_leaf": 2, "max_leaf_nodes": 4}
    config = of_files(files, method, data=of_label("federated", indicator=True, words=["bed"]))
    assert is_owners_simulation(config, tmp_path, files).init["levels"].shape[-1] == 2


@pytest.mark.parametrize("by", ["federated", pytest.param("client", **SLOW)])
def test_files_that_differ_in_form_and_columns(
    by: str, files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """East lacks two columns, and north the weight; each client's export reads raw rows, also where columns lack."""
    as_hospitals_have_them(files)
    data = of_label(by, exclude=["patient"], words=["pain"], indicator=True)
    config = of_files(files, data=data)
    sim = is_owners_simulation(config, tmp_path, files)
    assert "'pain' (east), 'pressure' (east), 'weight' (east, north)" in caplog.text
    source = sim.federation.source
    for number, ward in enumerate(sorted(WARDS)):
        table = predict(place_of(config, tmp_path, ward) / "model", files / f"{ward}.csv")
        rows = (source.groups["client"] == number).nonzero()[:, 0]
        ((_, models),) = sim.personal_models((number,))
        expected = sim.model(tree.tensors(models[0]), source.take(rows)).softmax(1)
        assert np.allclose(table.filter(like="p(").to_numpy(), expected.detach().numpy(), atol=1e-6)
        assert table["patient"].tolist() == [f"{ward} {row:03}" for row in range(len(table))]
    with pytest.raises(DataError, match="pain, pressure, weight"):
        predict(place_of(config, tmp_path, "south") / "model", files / "east.csv")
    # it may have what the client lacked
    assert len(predict(place_of(config, tmp_path, "east") / "model", files / "south.csv")) == 48


@pytest.mark.parametrize(("option", "hint"), [("words", "'age'"), ("features", "pain")])
def test_columns_that_no_client_has_are_refused(option: str, hint: str, files: Path, tmp_path: Path) -> None:
    config = of_files(files, data=of_label("federated", **{option: ["pain", "agee"]}))
    with pytest.raises(DataError, match=rf"'agee'.*{hint}"):
        deployed(config, tmp_path, owners(tmp_path, files, config))


def test_tables_that_do_not_fit_together_are_refused_by_name(files: Path, tmp_path: Path) -> None:
    odd = pd.read_csv(files / "west.csv").rename(columns={"pain": "Pain"})
    odd.to_csv(files / "west.csv", index=False)
    config = of_files(files, data={"normalise": "federated"}, deploy={"wait_seconds": 1.0})
    with pytest.raises(RunError, match=r"3 of 4 clients.*'west': .*Pain"):
        deployed(config, tmp_path, owners(tmp_path, files, config))


def test_some_with_files_and_some_without_are_refused(files: Path, tmp_path: Path) -> None:
    config = of_files(files, deploy={"wait_seconds": 1.0})
    nodes = owners(tmp_path, files, config) | {10: member_of(state=tmp_path / "s", name="3")}
    with pytest.raises((ConfigError, RunError)):
        deployed(config, tmp_path, nodes)
    config = experiment("ditto", data={"name": "digits", "clients": 4}, deploy={"clients": 4})
    with pytest.raises(RunError, match=r"table, text_table, folder.*'digits'"):
        deployed(config, tmp_path, owners(tmp_path, files, config))


# -- images and texts ---------------------------------------------------------------------------------------


def of_images(images: Path, options: Any = None, **changes: Any) -> ExperimentConfig:
    """An experiment on images."""
    return of_samples("folder", images, "logistic", options or {}, **changes)


@pytest.mark.parametrize("options", [{}, pytest.param({"scaling": "public"}, **SLOW), {"size": [6, 6]}])
def test_images_give_the_numbers_of_the_simulation(options: Any, images: Path, tmp_path: Path) -> None:
    config = of_images(images, options)
    is_owners_simulation(config, tmp_path, images)
    table = predict(place_of(config, tmp_path, "south") / "model", images / "south" / "cat")
    assert len(table) == len(list((images / "south" / "cat").iterdir()))
    assert {"p(bird)", "p(cat)", "p(dog)"} <= set(table.columns)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "binary"])
def test_texts_give_the_numbers_of_the_simulation(task: str, tmp_path: Path) -> None:
    files, options = tmp_path / "files", {"label": "state", "text": "note", "length": 24, "task": task}
    write_texts(files, task == "binary")
    is_owners_simulation(of_samples("text_table", files, BERT, options), tmp_path, files)


def test_images_of_other_sizes_are_left_out_by_name(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in (images / "east").rglob("*.png"):
        Image.open(file).resize((9, 9)).save(file)
    config = of_images(images)
    result = deployed(config, tmp_path, owners(tmp_path, images, config))
    assert re.search(r"'east' is left out: .*'east' differ in x: .*data\.options\.size", caplog.text)
    assert {i for one in result.trace for i in one.sampled} == {1, 2}


@pytest.mark.parametrize("words", ["normalise=client", "partition=dirichlet"])
def test_settings_that_images_cannot_have(words: str, images: Path, tmp_path: Path) -> None:
    setting, _, value = words.partition("=")
    config = of_images(images, data={setting: value})
    with pytest.raises(
        (ConfigError, RunError), match=rf"data\.{words if setting == 'normalise' else setting}"
    ):
        deployed(config, tmp_path, owners(tmp_path, images, config))


@pytest.mark.parametrize(("scaling", "channels"), [("public", 0), ("train", 3)])
def test_no_statistic_of_public_scaling_is_told(
    scaling: str, channels: int, images: Path, tmp_path: Path
) -> None:
    config = of_images(images, {"scaling": scaling})
    own = owners(tmp_path, images, config)[7].data.of_kind(config.data)
    _, summary = own.summary(config, 5, 1, [24, 30, 39])
    assert len(summary["pixels"]) == channels
    assert (summary["source"]["mean"] is None) == (scaling == "train")


def test_channels_that_no_image_has_are_refused_before_memory_is_allocated(
    images: Path, tmp_path: Path
) -> None:
    config = of_images(images)
    own = owners(tmp_path, images, config)[7].data.of_kind(config.data)
    summary = own.summarised(config.data, own.parts(config, 5, 1, [24, 30, 39]))
    x = [[10**10, *summary.source["x"][0][1:]], "uint8"]
    lie = summary.model_copy(update={"name": "liar", "source": {**summary.source, "x": x}})
    with pytest.raises(DataError, match="'liar'"):
        own.common(config.data, [], [24, 30], [summary, lie])


def test_constants_make_the_samples_that_were_described(images: Path, tmp_path: Path) -> None:
    """The policy's limits were checked for these."""
    config = of_images(images)
    with Federation(tmp_path, owners(tmp_path, images, config)) as federation:
        federation.host(config)
    setup = federation.of_kind("setup", 7)[0][1]
    prepared = Packet.decoded(setup).facts["prepared"]
    many = {**prepared, "facts": {**prepared["facts"], "outputs": 50_000}}
    policy = Policy(min_count=1, max_numbers=2000)
    client = member_of(state=tmp_path / "new", data=images / "north", policy=policy, experiment=config)
    assert asked(client, setup).kind == "setup"
    assert "50000 outputs" in asked(client, with_facts(setup, prepared=many)).facts["reason"]
    client.close()


# -- privacy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["sample", "client"])
def test_privacy_refuses_constants_of_samples(level: str, files: Path, images: Path, tmp_path: Path) -> None:
    dp = {"level": level, "clip": 1.0, "noise": 1.0}
    private = {"train": {"epochs": 1, "batch_size": 8, "lr": 0.1, "dp": dp}, "weights": "uniform"}
    config = of_files(files, data={"normalise": "federated"}, **private)
    with pytest.raises(ConfigError, match=rf"one {level}.*data\.options\.constants"):
        deployed(config, tmp_path, owners(tmp_path, files, config))
    config = of_images(images, **private)
    with pytest.raises(ConfigError, match="scaling=public"):
        deployed(config, tmp_path / "a", owners(tmp_path / "a", images, config))
    config = of_images(images, {"scaling": "public"}, **private)
    is_owners_simulation(config, tmp_path / "b", images, OPEN_NOISE)


@pytest.mark.slow
def test_private_training_draws_from_a_secret_of_the_client(tmp_path: Path) -> None:
    """Whoever knows the experiment and its seed cannot draw batches and noise again; the client itself can."""
    files = tmp_path / "files"
    write_tables(files, gaps=False)
    config = of_files(files, {"name": "fedavg", "train": {"dp": {"clip": 1.0, "noise": 1.0}}})

    def trained(name: str) -> dict[str, Tensor]:
        return deployed(config, tmp_path / name, owners(tmp_path / name, files, config)).server_state

    sim = is_owners_simulation(config, tmp_path / "open", files, OPEN_NOISE)
    first = trained("a")
    assert all(not torch.equal(first[name], tensor) for name, tensor in tree.leaves(sim.server))
    for ward in WARDS:
        secret = tmp_path / "a" / f"state-{ward}" / "secret"
        assert len(secret.read_bytes()) == 32
        assert secret.stat().st_mode & 0o077 == 0
        (tmp_path / "b" / f"state-{ward}").mkdir(parents=True)
        shutil.copy(secret, tmp_path / "b" / f"state-{ward}")
    same(trained("b"), first)
