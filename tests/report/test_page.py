"""The page of a report: what it holds, against the result's own numbers, and what it asks for: nothing."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import tailorfl
from tailorfl.cli.main import app
from tailorfl.errors import RunError
from tailorfl.evaluation.ranks import holm
from tailorfl.report.differences import differences
from tailorfl.report.page.page import page
from tailorfl.report.result import ExperimentResult
from tailorfl.runs.build import make_federation
from tailorfl.settings.loading import load

SETTINGS: dict[str, Any] = {
    "methods": ["local", "fedavg", "ditto"],
    "rounds": 3,
    "seeds": 3,
    "fraction": 0.5,
    "model": "logistic",
    "engine": "sequential",
    "data": {"clients": 5, "heldout_clients": 2, "samples": 300},
    "eval": {"every": 1},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ExperimentResult:
    return tailorfl.run(SETTINGS, out=tmp_path_factory.mktemp("page") / "run")


@pytest.fixture(scope="module")
def text(run: ExperimentResult) -> str:
    return page(run)


class Tables(HTMLParser):
    """The tables of a page as lists of texts, by caption; and every address that it names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.addresses: list[str] = []
        self._in, self._caption, self._rows = "", "", []  # type: ignore[var-annotated]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        given = dict(attrs)
        self.addresses += [given[name] for name in ("src", "href", "action", "data") if given.get(name)]
        if tag == "table":
            self._caption, self._rows = "", []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
            self._in = "cell"
        elif tag == "caption":
            self._in = "caption"

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self.tables[self._caption] = self._rows
        if tag in ("td", "th", "caption"):
            self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "cell":
            self._rows[-1][-1] += data
        elif self._in == "caption":
            self._caption += data


def held(text: str) -> dict[str, Any]:
    """The charts and data of a page."""
    found = re.search(r'<script type="application/json" id="store">(.*?)</script>', text, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def table_of(text: str, begin: str) -> list[list[str]]:
    found = [rows for caption, rows in Tables(text).tables.items() if caption.startswith(begin)]
    assert len(found) == 1, list(Tables(text).tables)
    return found[0]


def test_the_page_is_one_small_file_that_names_no_other(text: str) -> None:
    assert len(text.encode()) < 3_000_000
    assert all(address == "data:," or address.startswith("#") for address in Tables(text).addresses)
    assert "@import" not in text
    assert "url(" not in text.partition("</style>")[0]


def test_its_table_is_that_of_the_comparison(run: ExperimentResult, text: str) -> None:
    head, *rows = table_of(text, "Comparison")
    assert [row[0] for row in rows] == ["local", "fedavg", "ditto"]
    place = head.index("accuracy (mean) (%)")
    for row in rows:
        line = run.table.loc[row[0]]
        assert row[place] == f"{100 * line['mean']:.2f} ± {100 * line['mean_ci']:.2f}"
    other = table_of(text, "Other test sets")
    assert {"global (%)", "heldout (%)", "heldout+10 (%)"} <= set(other[0])


def test_differences_are_paired_and_corrected(run: ExperimentResult, text: str) -> None:
    found = {(pair.first, pair.second): pair for pair in differences(run)}
    assert list(found) == [("local", "fedavg"), ("local", "ditto"), ("fedavg", "ditto")]
    to_local = run.differences("local")
    for label in ("fedavg", "ditto"):
        pair = found["local", label]
        assert -pair.mean == pytest.approx(to_local.loc[label, "difference"])
        assert pair.half_width == pytest.approx(to_local.loc[label, "ci"])
        assert pair.p_value == pytest.approx(to_local.loc[label, "p"])
    assert [p.adjusted for p in found.values()] == holm([p.p_value for p in found.values()])
    rows = table_of(text, "Paired differences")
    value = 100 * found["local", "fedavg"].mean
    assert rows[1][2].startswith(f"{value:+.2f} ± ")
    assert rows[2][1].startswith(f"{-value:+.2f} ± ")
    assert rows[1][1] == "–"
    stars = sum(cell.endswith("*") for row in rows[1:] for cell in row)
    assert stars == 2 * sum(pair.adjusted < 0.05 for pair in found.values())


def test_every_client_is_a_point_with_its_own_numbers(run: ExperimentResult, text: str) -> None:
    rows = held(text)["data"]["clients"]
    assert len(rows) == 5 * 3
    frame = run.clients
    last = frame[(frame["round"] == 3) & (frame["set"] == "local") & (frame["seed"] == 1)]
    for row in (row for row in rows if row["seed"] == 1):
        mine = last[last["client"] == row["client"]].set_index(["label", "model"])["accuracy"]
        assert row["m0"] == row["local"] == pytest.approx(mine["local", "personal"], abs=1e-6)
        assert row["m1"] == pytest.approx(mine["fedavg", "global"], abs=1e-6)
        assert row["m2"] == pytest.approx(mine["ditto", "personal"], abs=1e-6)
    ditto = [row["m2"] - row["local"] for row in rows]
    table = table_of(text, "Clients of all seeds")
    assert [int(cell) for cell in table[2][1:4]] == [
        sum(g > 0 for g in ditto), sum(g == 0 for g in ditto), sum(g < 0 for g in ditto),
    ]  # fmt: skip


def test_worst_clients_and_labels_are_those_of_the_records(run: ExperimentResult, text: str) -> None:
    data = held(text)["data"]
    worst = {(row["label"], row["percent"]): row["mean"] for row in data["worst"]}
    for label in run.table.index:
        assert worst[label, 100] == pytest.approx(run.table.loc[label, "mean"], abs=1e-6)
        assert worst[label, 10] == pytest.approx(run.table.loc[label, "worst10"], abs=1e-6)
    federation = make_federation(run.config, 0, None, set())
    counts = np.array([row["count"] for row in data["labels"]]).reshape(7, 10)
    assert (counts == federation.describe("train")).all()
    assert counts.sum(axis=1).tolist() == federation.sizes("train").tolist()


def test_curves_have_every_evaluated_round_and_its_interval(run: ExperimentResult, text: str) -> None:
    rows = held(text)["data"]["curves"]
    assert [row["round"] for row in rows] == [1, 2, 3] * 3
    final = next(row for row in rows if row["label"] == "ditto" and row["round"] == 3)
    line = run.table.loc["ditto"]
    assert final["mean"] == pytest.approx(line["mean"], abs=1e-6)
    assert final["high"] == pytest.approx(min(1, line["mean"] + line["mean_ci"]), abs=1e-6)


def test_what_was_not_recorded_is_left_out_with_a_word(tmp_path: Path) -> None:
    small = {**SETTINGS, "methods": ["fedavg"], "seeds": 1, "rounds": 1, "fraction": 1.0}
    small |= {"data": {"clients": 3, "samples": 90}, "eval": {"every": 0, "final": ["local"]}}
    text = page(tailorfl.run(small, out=tmp_path / "run"))
    for word in (
        "no two methods share a seed", "only one round was evaluated", "neither LocalTrain nor its average",
        "no such set was evaluated", "every client was sampled", "no method was trained with differential privacy",
    ):  # fmt: skip
        assert word in text
    store = held(text)
    assert {"round", "bytes", "time"}.isdisjoint(store["charts"])
    assert all(store["data"][chart["spec"]["data"]["name"]] for chart in store["charts"].values())


def test_private_runs_show_what_they_spent_and_no_labels(tmp_path: Path) -> None:
    private = {"dp": {"level": "sample", "clip": 1.0, "noise": 1.0, "accountant": "rdp"}}
    small = {**SETTINGS, "methods": ["local"], "seeds": 1, "rounds": 1, "train": private}
    result = tailorfl.run(small, out=tmp_path / "run")
    text = page(result)
    row = table_of(text, "What each job spent")[1]
    assert row[0] == "local, seed 0"
    assert row[2] == f"{result.jobs[0][0]['privacy']['epsilon']['max']:.4g}"
    assert "labels" not in held(text)["data"]
    assert "labels" not in result.jobs[0][1].config


def test_the_command_writes_the_page_and_tables_where_it_is_told(
    run: ExperimentResult, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = ["-o", "one.html", "--latex", "t.tex", "--csv", "t.csv"]
    shown = CliRunner().invoke(app, ["report", str(run.path), *wanted])
    assert shown.exit_code == 0, shown.output
    assert "one.html, t.tex, t.csv" in " ".join(shown.output.split())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.html", "t.csv", "t.tex"]
    assert Path("one.html").read_text() == text
    latex = Path("t.tex").read_text()
    assert latex.count(r"\toprule") == latex.count(r"\bottomrule") == 1
    rows = [line for line in latex.splitlines() if line.endswith(r"\\")]
    assert len({line.count("&") for line in rows}) == 1
    bold = int(run.table[[name for name in run.table if name.endswith("_best")]].to_numpy().sum())
    assert latex.count(r"\textbf{") == bold
    assert Path("t.csv").read_text().splitlines()[1].startswith("local,local,3,")


def test_labels_of_reductions_carry_their_mark_in_latex(tmp_path: Path) -> None:
    from tailorfl.report.document import latex
    from tailorfl.report.experiment import run_experiment

    method = {"name": "ditto", "label": "frozen", "lam": 0.0}
    settings = {**SETTINGS, "methods": [method], "seeds": 1, "rounds": 1}
    result = run_experiment(load(settings), tmp_path / "run")
    assert result.remarks
    text = latex(result)
    assert r"frozen $^\dagger$ &" in text
    assert r"\footnotesize $^\dagger$ frozen: " in text


def trial(number: int, score: float | None) -> dict[str, Any]:
    done = "done" if score is not None else "diverged"
    return {
        "number": number,
        "values": {"lr": 0.1},
        "score": score,
        "samples": 9,
        "seconds": 30.0,
        "state": done,
    }


def test_tuning_shows_what_was_chosen_and_what_a_budget_promises(
    run: ExperimentResult, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(run.path, tmp_path / "tuned"))
    scores = [0.5, 0.9, 0.7, None]
    method = {"space": {}, "chosen": {"train.lr": 0.4}, "rank": 1, "edges": ["train.lr is the largest"]}
    method["trials"] = [trial(k, score) for k, score in enumerate(scores)]
    facts = {"budget": {"trials": 4}, "sampler": "random", "metric": "accuracy", "methods": {"ditto": method}}
    (folder / "tuning.json").write_text(json.dumps(facts))
    text = page(ExperimentResult.load(folder))
    row = table_of(text, "Chosen by validation")[1]
    assert row == ["ditto", "train.lr=0.4", "train.lr is the largest", "1", "3 of 4", "2 min 00 s"]
    rows = held(text)["data"]["tuning"]
    # All 27 triples of draws, each as likely: the expected best by counting.
    for n in (1, 2, 3):
        best = [max(draw) for draw in itertools.product(scores[:3], repeat=n)]
        assert rows[n - 1]["mean"] == pytest.approx(float(np.mean(best)), abs=1e-6)
    (folder / "tuning.json").write_text("[]")
    with pytest.raises(RunError, match="is damaged"):
        page(ExperimentResult.load(folder))
