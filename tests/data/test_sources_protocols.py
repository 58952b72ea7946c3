"""Federations of hospitals and schools follow the published protocol, on the real files and on small ones like them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.model_selection import train_test_split

from data import twins
from tailorfl.data.cross_silo import HEART_CENTRES
from tailorfl.data.registry import load_source
from tailorfl.data.source import Source, check_finite
from tailorfl.errors import ConfigError, DataError

HEART = [(199, 104), (172, 89), (30, 16), (85, 45)]
ILL = [139, 98, 45, 101]
TCGA = [(248, 63), (156, 40), (164, 42), (129, 33), (129, 33), (40, 11)]


heart_files = twins.data_of(twins.heart, "flamby/processed.va.data")
school_files = twins.data_of(twins.school, "school/school.npz")
tcga_files = twins.data_of(twins.tcga, "flamby/brca.csv")


def sizes(source: Source) -> list[tuple[int, int]]:
    """(train, test) samples of every natural client."""
    names, clients = source.group_names["client"], source.groups["client"]
    train, test = (torch.bincount(clients[source.test == part], minlength=len(names)) for part in (0, 1))
    return list(zip(train.tolist(), test.tolist(), strict=True))


def is_real(folder: Path) -> bool:
    return (folder / "README.md").exists()


def test_heart_has_the_sizes_labels_and_features_of_the_protocol(heart_files: Path) -> None:
    source = load_source("heart")
    labels = [twins.heart_rows(heart_files, centre)[1] for centre in HEART_CENTRES]
    counts = [len(own) for own in labels]
    assert sizes(source) == [(int(0.66 * n), n - int(0.66 * n)) for n in counts]
    assert source.y.tolist() == (np.concatenate(labels) > 0).tolist()
    assert source.groups["client"].tolist() == np.repeat(np.arange(4), counts).tolist()
    columns = ("0", "1", "3", "4", "5", "7", "8", "9", "2_2.0", "2_3.0", "2_4.0", "6_1.0", "6_2.0")
    assert source.info["features"] == columns
    assert (source.input_shape, source.task, source.outputs) == ((13,), "binary", 1)
    assert source.group_names["client"] == ("cleveland", "hungarian", "switzerland", "va")
    check_finite(source)
    if is_real(heart_files):
        assert sizes(source) == HEART
        assert [int((own > 0).sum()) for own in labels] == ILL


def test_heart_is_cut_as_in_the_release(heart_files: Path) -> None:
    """66/34 with seed 43, by class where each has at least 3 patients."""
    source, cuts = load_source("heart"), []
    for client, centre in enumerate(HEART_CENTRES):
        ill = twins.heart_rows(heart_files, centre)[1] > 0
        cuts.append(bool(min(ill.sum(), (~ill).sum()) >= 3))
        strata = ill if cuts[-1] else None
        _, chosen = train_test_split(np.arange(len(ill)), train_size=0.66, random_state=43, stratify=strata)
        test = source.test[source.groups["client"] == client].numpy()
        assert sorted(chosen) == np.flatnonzero(test).tolist()
    assert cuts == [True, True, False, True]


def test_heart_is_standardised_by_training_rows_alone(heart_files: Path) -> None:
    """Each client by its own, whoever comes later by those of all, with deviations of n - 1."""
    source = load_source("heart")
    scaling, clients = source.info["scaling"], source.groups["client"]
    raw = [twins.heart_rows(heart_files, centre)[0] for centre in HEART_CENTRES]
    train = [rows[~source.test[clients == k].numpy()] for k, rows in enumerate(raw)]
    everyone = np.concatenate(train)
    for row, own in enumerate([*train, everyone]):
        np.testing.assert_allclose(scaling.mean[row], own.mean(0), rtol=1e-12)
        np.testing.assert_allclose(scaling.deviation[row], own.std(0, ddof=1) + 1e-9, rtol=1e-9)
    newcomer = scaling.apply(torch.from_numpy(raw[0][:3])).double()  # of no client
    np.testing.assert_allclose(newcomer, (raw[0][:3] - everyone.mean(0)) / everyone.std(0, ddof=1), atol=1e-5)
    for client in range(4):
        numbers = source.x[(clients == client) & ~source.test].double().numpy()
        np.testing.assert_allclose(numbers.mean(0), 0, atol=1e-5)
        # the cholesterol of one hospital is 0 throughout and stays 0
        varies = [client != 2 or column != 3 for column in range(13)]
        np.testing.assert_allclose(numbers.std(0, ddof=1), varies, atol=1e-5)


def test_publicly_scaled_heart_is_a_function_of_each_patient_alone(heart_files: Path) -> None:
    """(x − c)/s cut off at ±3 of the file's own columns, with guidelines' constants; the split is the protocol's."""
    source, protocol = load_source("heart", scaling="public"), load_source("heart")
    assert torch.equal(source.test, protocol.test)
    assert torch.equal(source.y, protocol.y)
    assert source.info["features"] == protocol.info["features"]
    assert source.info.get("private scaling") is None
    assert "each client's own" in str(protocol.info["private scaling"])
    centres = np.array([50, 0, 120, 200, 0, 145, 0, 1, *[0] * 5])
    scales = np.array([10, 1, 20, 40, 1, 25, 1, 1, *[1] * 5])
    for client, centre in enumerate(HEART_CENTRES):
        raw, own = twins.heart_rows(heart_files, centre)[0], source.x[source.groups["client"] == client]
        assert own.double().numpy() == pytest.approx(((raw - centres) / scales).clip(-3, 3), abs=1e-6)
        torch.testing.assert_close(source.info["scaling"].apply(torch.from_numpy(raw)), own)
    with pytest.raises(ConfigError, match="'public'"):
        load_source("heart", scaling="publik")


def test_tcga_has_the_patients_of_its_files(tcga_files: Path) -> None:
    source = load_source("tcga")
    patients = pd.read_csv(tcga_files / "flamby/brca.csv", dtype={"pid": str}).set_index("pid")
    folds = pd.read_csv(tcga_files / "flamby/brca_train_test_split.csv").set_index("pid")["fold2"]
    listed = [pid for pid in patients.index if pid in folds.index]
    assert len(listed) == len(source) == len(folds)
    parts = ["test" if test else "train" for test in source.test]
    dealt = [f"{part}_{client}" for part, client in zip(parts, source.groups["client"], strict=True)]
    assert [folds[pid] for pid in listed] == dealt
    assert source.info["features"] == tuple(patients.columns[:39])
    np.testing.assert_allclose(source.x, patients.loc[listed].iloc[:, :39])
    np.testing.assert_allclose(source.y, patients.loc[listed][["E", "T"]])
    assert (source.task, source.outputs, set(source.y[:, 0].tolist())) == ("survival", 1, {0.0, 1.0})
    assert torch.equal(source.strata, source.y[:, 0].long())
    check_finite(source)
    if is_real(tcga_files):
        assert sizes(source) == TCGA


@pytest.mark.parametrize("tcga_files", ["twin"], indirect=True)
def test_patients_that_one_file_lacks_are_counted(tcga_files: Path) -> None:
    file = tcga_files / "flamby/brca.csv"
    file.write_text("\n".join(file.read_text().splitlines()[:-2]) + "\n")
    with pytest.raises(DataError, match=r"2 patients of brca_train_test_split.csv are not in brca.csv"):
        load_source("tcga")


def test_school_has_the_published_sizes_and_scores_in_0_to_1(school_files: Path) -> None:
    source = load_source("school")
    with np.load(school_files / "school/school.npz") as raw:
        assert source.y[:, 0].double().numpy() * 69 + 1 == pytest.approx(raw["y"], abs=1e-4)
        assert torch.equal(source.x, torch.from_numpy(raw["x"]))
        assert torch.bincount(source.groups["client"]).tolist() == raw["sizes"].tolist()
        pupils, schools = len(raw["y"]), len(raw["sizes"])
    assert (len(source), source.input_shape, source.task, source.outputs) == (pupils, (28,), "regression", 1)
    assert source.group_names["client"] == tuple(f"school {number}" for number in range(1, schools + 1))
    assert not is_real(school_files) or (pupils, schools) == (15_362, 139)
    assert (float(source.y.min()), float(source.y.max())) == (0, 1)
    check_finite(source)


def test_public_constants_map_each_feature_from_its_range_to_minus_1_to_1(school_files: Path) -> None:
    public, raw = load_source("school", scaling="public"), load_source("school").x
    percent = [3, 4]
    rest = [k for k in range(28) if k not in percent]
    assert torch.equal(public.x[:, rest], 2 * raw[:, rest] - 1)
    torch.testing.assert_close(public.x[:, percent], raw[:, percent] / 50 - 1)
    torch.testing.assert_close(public.info["scaling"].apply(raw[:9]), public.x[:9])
    assert "private scaling" not in public.info


def test_mistakes_with_schools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"publik.*public"):
        load_source("school", scaling="publik")
    monkeypatch.setenv("TAILORFL_DATA", str(tmp_path))
    (tmp_path / "school").mkdir()
    np.savez(tmp_path / "school" / "school.npz", x=np.zeros((3, 28)), y=np.zeros(3))
    with pytest.raises(DataError, match="sizes"):
        load_source("school")
