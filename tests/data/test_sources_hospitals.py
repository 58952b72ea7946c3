"""The hospital federations follow the published protocol, on the real files and on small ones of the same form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.model_selection import train_test_split

from data import twins
from tailorfl.data.hospitals import HEART_CENTRES
from tailorfl.data.registry import load_source
from tailorfl.data.source import Source, check_finite
from tailorfl.errors import ConfigError, DataError

HEART = [(199, 104), (172, 89), (30, 16), (85, 45)]
ILL = [139, 98, 45, 101]
TCGA = [(248, 63), (156, 40), (164, 42), (129, 33), (129, 33), (40, 11)]


def sizes(source: Source) -> list[tuple[int, int]]:
    """(train, test) samples of every natural client."""
    assert source.test is not None
    clients = source.groups["client"]
    return [
        (int(((clients == k) & ~source.test).sum()), int(((clients == k) & source.test).sum()))
        for k in range(len(source.group_names["client"]))
    ]


@pytest.fixture(params=["real", "twin"])
def heart_files(request: pytest.FixtureRequest) -> Path:
    return twins.files_of(request, twins.heart, "flamby/processed.va.data")


def test_another_scaling_of_heart_is_refused() -> None:
    with pytest.raises(ConfigError, match="'public'"):
        load_source("heart", scaling="publik")


@pytest.fixture(params=["real", "twin"])
def tcga_files(request: pytest.FixtureRequest) -> Path:
    return twins.files_of(request, twins.tcga, "flamby/brca.csv")


def is_real(folder: Path) -> bool:
    return (folder / "README.md").exists()


def test_heart_has_the_sizes_labels_and_features_of_the_protocol(heart_files: Path) -> None:
    source = load_source("heart")
    labels = [twins.heart_rows(heart_files, centre)[1] for centre in HEART_CENTRES]
    counts = [len(own) for own in labels]
    assert sizes(source) == [(int(0.66 * n), n - int(0.66 * n)) for n in counts]
    assert source.y.tolist() == (np.concatenate(labels) > 0).tolist()
    assert source.groups["client"].tolist() == np.repeat(np.arange(4), counts).tolist()
    assert source.input_shape == (13,)
    columns = ("0", "1", "3", "4", "5", "7", "8", "9", "2_2.0", "2_3.0", "2_4.0", "6_1.0", "6_2.0")
    assert source.info["features"] == columns
    assert (source.task, source.outputs) == ("binary", 1)
    assert source.group_names["client"] == ("cleveland", "hungarian", "switzerland", "va")
    check_finite(source)
    if is_real(heart_files):
        assert sizes(source) == HEART
        assert [int((own > 0).sum()) for own in labels] == ILL


def test_heart_is_cut_as_in_the_release(heart_files: Path) -> None:
    """66/34 with seed 43, by class where each has at least 3 patients."""
    source = load_source("heart")
    assert source.test is not None
    stratified = []
    for client, centre in enumerate(HEART_CENTRES):
        ill = twins.heart_rows(heart_files, centre)[1] > 0
        balanced = min(ill.sum(), (~ill).sum()) >= 3
        stratified.append(bool(balanced))
        _, chosen = train_test_split(
            np.arange(len(ill)), train_size=0.66, random_state=43, stratify=ill if balanced else None
        )
        test = source.test[source.groups["client"] == client].numpy()
        assert sorted(chosen) == np.flatnonzero(test).tolist()
        if balanced:
            assert abs(ill[test].sum() - ill.mean() * test.sum()) <= 1
    assert stratified == [True, True, False, True]


def test_heart_is_standardised_by_training_rows_alone(heart_files: Path) -> None:
    """Each client by its own, whoever comes later by those of all, with deviations of n - 1."""
    source = load_source("heart")
    assert source.test is not None
    raw = [twins.heart_rows(heart_files, centre)[0] for centre in HEART_CENTRES]
    train = [rows[~source.test[source.groups["client"] == k].numpy()] for k, rows in enumerate(raw)]
    scaling = source.info["scaling"]
    for row, own in enumerate([*train, np.concatenate(train)]):
        np.testing.assert_allclose(scaling.mean[row], own.sum(0) / len(own), rtol=1e-12)
        squares = ((own - own.sum(0) / len(own)) ** 2).sum(0)
        np.testing.assert_allclose(
            scaling.deviation[row], np.sqrt(squares / (len(own) - 1)) + 1e-9, rtol=1e-9
        )
    newcomer = scaling.apply(torch.from_numpy(raw[0][:3])).double()  # of no client
    everyone = np.concatenate(train)
    wanted = (raw[0][:3] - everyone.mean(0)) / everyone.std(0, ddof=1)
    np.testing.assert_allclose(newcomer, wanted, atol=1e-5)
    for client in range(4):
        own_train = (source.groups["client"] == client) & ~source.test
        numbers = source.x[own_train].double()
        torch.testing.assert_close(numbers.mean(0), torch.zeros(13, dtype=torch.float64), atol=1e-5, rtol=0)
        # the cholesterol of one hospital is 0 throughout and stays 0
        varies = train[client].std(0) > 0
        assert varies.tolist() == [client != 2 or column != 3 for column in range(13)]
        deviation = numbers.std(0, correction=1)
        torch.testing.assert_close(deviation, torch.from_numpy(varies).double(), atol=1e-5, rtol=0)


def test_publicly_scaled_heart_is_a_function_of_each_patient_alone(heart_files: Path) -> None:
    """(x − c)/s cut off at ±3 of the file's own columns, with guidelines' constants; the split is the protocol's."""
    source, protocol = load_source("heart", scaling="public"), load_source("heart")
    assert source.test is not None
    assert protocol.test is not None
    assert torch.equal(source.test, protocol.test)
    assert torch.equal(source.y, protocol.y)
    assert source.info["features"] == protocol.info["features"]
    assert source.info.get("private scaling") is None
    assert "each client's own" in str(protocol.info["private scaling"])
    centres = np.array([50, 0, 120, 200, 0, 145, 0, 1, *[0] * 5])
    scales = np.array([10, 1, 20, 40, 1, 25, 1, 1, *[1] * 5])
    for client, centre in enumerate(HEART_CENTRES):
        raw = twins.heart_rows(heart_files, centre)[0]
        own = source.x[source.groups["client"] == client].double().numpy()
        assert own == pytest.approx(((raw - centres) / scales).clip(-3, 3), abs=1e-6)
        torch.testing.assert_close(
            source.info["scaling"].apply(torch.from_numpy(raw)), source.x[source.groups["client"] == client]
        )


def test_tcga_has_the_patients_of_its_files(tcga_files: Path) -> None:
    source = load_source("tcga")
    assert source.test is not None
    patients = pd.read_csv(tcga_files / "flamby/brca.csv", dtype={"pid": str}).set_index("pid")
    folds = pd.read_csv(tcga_files / "flamby/brca_train_test_split.csv").set_index("pid")["fold2"]
    listed = [pid for pid in patients.index if pid in folds.index]
    assert len(listed) == len(source) == len(folds)
    assert [folds[pid] for pid in listed] == [
        f"{'test' if test else 'train'}_{client}"
        for test, client in zip(source.test.tolist(), source.groups["client"].tolist(), strict=True)
    ]
    assert source.info["features"] == tuple(patients.columns[:39])
    np.testing.assert_allclose(source.x, patients.loc[listed].iloc[:, :39])
    np.testing.assert_allclose(source.y, patients.loc[listed][["E", "T"]])
    assert (source.task, source.outputs) == ("survival", 1)
    assert set(source.y[:, 0].tolist()) == {0.0, 1.0}
    assert torch.equal(source.strata, source.y[:, 0].long())
    check_finite(source)
    if is_real(tcga_files):
        assert sizes(source) == TCGA


def test_tcga_equals_the_same_patients_in_their_other_file(tcga_files: Path) -> None:
    table = pd.read_parquet(tcga_files / "tabular/tcga_brca.parquet")
    source = load_source("tcga")
    assert source.test is not None
    for client, region in enumerate(source.group_names["client"]):
        for part in ("train", "test"):
            rows = table[(table.region == region) & (table.split == part)]
            theirs = torch.tensor(rows.drop(columns=["split", "region"]).to_numpy("float32"))
            mine = (source.groups["client"] == client) & (source.test == (part == "test"))
            ours = torch.cat([source.x[mine], source.y[mine]], dim=1)
            # the files may list patients in another order
            assert sorted(ours.tolist()) == sorted(theirs.tolist())


@pytest.mark.parametrize("tcga_files", ["twin"], indirect=True)
def test_patients_that_one_file_lacks_are_counted(tcga_files: Path) -> None:
    file = tcga_files / "flamby/brca.csv"
    file.write_text("\n".join(file.read_text().splitlines()[:-2]) + "\n")
    with pytest.raises(DataError, match=r"2 patients of brca_train_test_split.csv are not in brca.csv"):
        load_source("tcga")
