"""Several federations in one report: what is one federation, ranks against scipy, and every form of the table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import rankdata

import tailorfl
from report.tiny import TINY, invoke
from tailorfl.report.matrix import Matrix, by_federation, matrix
from tailorfl.report.page.page import matrix_page
from tailorfl.report.result import ExperimentResult

SETTINGS = {**TINY, "seeds": 2, "model": "logistic", "eval": {"every": 0, "final": ["local"]}}
LINEAR = {"data": {"name": "synthetic_linear", "clients": 3}, "model": "linear"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("matrix")
    few = {"data": {"clients": 3, "samples": 120}}
    for name, changes in (("few", few), ("more", {}), ("ditto", {"methods": ["ditto"]}), ("linear", LINEAR)):
        tailorfl.run({**SETTINGS, **changes}, out=out / name)
    return out


def loaded(folder: Path, *names: str) -> Matrix:
    found = {folder / name: ExperimentResult.load(folder / name) for name in names}
    return matrix(found, by_federation(found))


@pytest.mark.slow
def test_folders_of_the_same_data_are_one_federation(folder: Path) -> None:
    found = loaded(folder, "few", "more", "ditto")
    assert list(found.results) == ["few", "more"]
    assert found.labels == ["local", "fedavg", "ditto"]
    assert found.ranked == ["local", "fedavg"]
    assert [label for label, rank in found.ordered if rank is None] == ["ditto"]
    label, few, more, rank = (cell.text for cell in found.table.rows[-1])
    assert (label, few, rank) == ("ditto", "–", "–")
    assert more != "–"


def test_federations_of_one_folder_name_are_all_there(folder: Path) -> None:
    few, linear = (ExperimentResult.load(folder / name) for name in ("few", "linear"))
    for paths in (["a/run", "run"], ["run", "a/run"], ["a/run", "b/run"]):
        groups = by_federation(dict(zip(map(Path, paths), (few, linear), strict=True)))
        assert groups == {path: [Path(path)] for path in paths}


def test_every_federation_is_ranked_by_its_own_metric(folder: Path) -> None:
    """The third is a regression, where the smallest error is the best."""
    found = loaded(folder, "few", "more", "linear")
    assert found.ranking is not None
    scores = np.array([found.results[n].table.loc[["local", "fedavg"], "mean"] for n in found.results])
    signed = scores * np.array([[-1.0], [-1.0], [1.0]])
    assert found.results["linear"].metric == "mse"
    assert found.ranking.ranks.tolist() == rankdata(signed, axis=1).tolist()


@pytest.mark.slow
def test_the_command_writes_the_matrix_in_every_form(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    shown = invoke("report", "few", "more", "linear", "-o", "all", columns=120)
    assert "methods by federations" in shown
    names = sorted(p.name for p in Path("all").iterdir())
    assert names == ["matrix.csv", "matrix.tex", "ranks.png", "report.html"]
    federations = loaded(folder, "few", "more", "linear")
    displayed = federations.displayed
    assert displayed.labels == ["LocalTrain", "FedAvg"]
    text = Path("all/report.html").read_text()
    assert text == matrix_page(displayed).replace(f"From {folder}/", "From ")
    assert text.count("<svg xmlns=") == 2
    plain = re.sub("</?span>", "", text)
    for row in displayed.table.rows:
        assert all(cell.text in plain and cell.text in shown for cell in row)
    numbers = pd.read_csv("all/matrix.csv").set_index("label")
    assert numbers.loc["fedavg", "few"] == federations.results["few"].table.loc["fedavg", "mean"]
    assert numbers["rank"].is_monotonic_increasing
    latex = Path("all/matrix.tex").read_text()
    assert latex.count(r"\begin{") == latex.count(r"\end{") == 2
    rows = json.loads(invoke("report", "few", "more", "-o", "j.html", "--json"))
    assert [row["label"] for row in rows] == [label for label, _ in loaded(folder, "few", "more").ordered]
    invoke("report", "few", "more", "-o", "m.html", "--latex", "m.tex", "--csv", "m.csv", "--pdf", "pictures")
    assert all(Path(f"m.{suffix}").is_file() for suffix in ("html", "tex", "csv"))
    assert [file.name for file in Path("pictures").iterdir()] == ["ranks.pdf"]
    for of_one in (("--columns", "mean"), ("--target", 0)):
        invoke("report", "few", "more", "-o", "n.html", "--latex", "n.tex", *of_one, code=2)
    assert not Path("n.tex").exists()


def test_the_matrix_replaces_no_report_of_an_experiment(folder: Path) -> None:
    (folder / "few/report.html").write_text("its own")
    files = sorted((folder / "few").iterdir())
    invoke("report", folder / "few", folder / "more", "-o", folder / "few", code=2)
    assert (folder / "few/report.html").read_text() == "its own"
    assert sorted((folder / "few").iterdir()) == files


def test_too_few_federations_have_a_table_and_no_ranks(folder: Path) -> None:
    found = loaded(folder, "more", "ditto")
    assert found.ranking is None
    assert "Ranks: they need two methods" in matrix_page(found)
    assert "Average rank" in matrix_page(found)
