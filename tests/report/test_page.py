"""The page of a report: what it holds, against the result's own numbers, and what it asks for: nothing."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tailorfl
from report.tiny import TINY, invoke
from tailorfl.errors import ConfigError, RunError
from tailorfl.evaluation.comparisons import holm
from tailorfl.report.document import latex, write_report
from tailorfl.report.findings import differences, findings
from tailorfl.report.page import clients
from tailorfl.report.page.charts import Look
from tailorfl.report.page.others import paired_differences
from tailorfl.report.page.page import page
from tailorfl.report.result import ExperimentResult
from tailorfl.runs.build import make_federation

SMALL = {**TINY, "model": "logistic"}


@pytest.fixture(scope="module")
def text(run: ExperimentResult) -> str:
    return page(run)


class Tables(HTMLParser):
    """The tables of a page as lists of texts, by caption; and every address that it names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.addresses: list[str] = []
        self._in, self._caption, self._rows = "", "", list[list[str]]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        values = dict(attrs)
        self.addresses += [values[name] for name in ("src", "href", "action", "data") if values.get(name)]
        if tag == "table":
            self._caption, self._rows = "", []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
        if tag in ("td", "th", "caption"):
            self._in = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self.tables[self._caption] = self._rows
        if tag in ("td", "th", "caption"):
            self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in in ("td", "th"):
            self._rows[-1][-1] += data
        elif self._in:
            self._caption += data


def store(text: str) -> dict[str, Any]:
    """The charts and data of a page."""
    match = re.search(r'<script type="application/json" id="store">(.*?)</script>', text, re.DOTALL)
    assert match
    return dict(json.loads(match[1]))


def table_of(text: str, begin: str) -> list[list[str]]:
    (rows,) = (rows for caption, rows in Tables(text).tables.items() if caption.startswith(begin))
    return rows


def test_the_page_is_one_small_file_that_names_no_other(text: str) -> None:
    assert len(text.encode()) < 3_000_000
    assert all(address == "data:," or address.startswith("#") for address in Tables(text).addresses)
    assert "@import" not in text
    assert "url(" not in text.partition("</style>")[0]


def test_its_table_is_that_of_the_comparison(run: ExperimentResult, text: str) -> None:
    head, *rows = table_of(text, "Comparison")
    assert [row[0] for row in rows] == ["LocalTrain", "FedAvg", "Ditto"]
    place = head.index("accuracy")
    for row in rows:
        line = run.displayed.table.loc[row[0]]
        assert row[place] == f"{100 * line['mean']:.2f} ± {100 * line['mean_ci']:.2f} %"
    sets = {"on all clients' data", "on held-out clients", "on held-out clients after 10 steps"}
    assert sets <= set(table_of(text, "Other test sets")[0])


def test_the_page_begins_with_its_findings_and_the_table_with_its_metric(
    run: ExperimentResult, text: str
) -> None:
    sentences = findings(run.displayed)
    assert len(sentences) == 2
    places = [text.index(escape(sentence, quote=False).replace("'", "&#39;")) for sentence in sentences]
    assert places == sorted(places)
    assert places[-1] < text.index("<table>")
    assert table_of(text, "Comparison: mean over 3 seeds")[0][1] == "accuracy"
    report = "\n".join(file.read_text() for file in write_report(run) if file.suffix == ".md")
    assert all(sentence in report for sentence in sentences)
    assert report.index(sentences[1]) < report.index("| Method |")


def test_differences_are_paired_and_corrected(run: ExperimentResult, text: str) -> None:
    pairs = {(pair.first, pair.second): pair for pair in differences(run.means_by_job())}
    assert list(pairs) == [("local", "fedavg"), ("local", "ditto"), ("fedavg", "ditto")]
    to_local = run.differences("local")
    for label in ("fedavg", "ditto"):
        pair = pairs["local", label].pair
        line = to_local.loc[label, ["difference", "ci", "p"]].tolist()
        assert [-pair.mean, pair.half_width, pair.p_value] == pytest.approx(line)
    assert [p.adjusted for p in pairs.values()] == holm([p.pair.p_value for p in pairs.values()])
    rows = table_of(text, "Paired differences")
    value = 100 * pairs["local", "fedavg"].pair.mean
    assert rows[1][2].startswith(f"{value:+.2f} ± ")
    assert rows[2][1].startswith(f"{-value:+.2f} ± ")
    assert rows[1][1] == "–"
    stars = sum(cell.endswith("*") for row in rows[1:] for cell in row)
    assert stars == 2 * sum(pair.adjusted < 0.05 for pair in pairs.values())
    exact = table_of(text, "The same with p-values")[1:]
    assert [row[0] for row in exact] == ["LocalTrain − FedAvg", "LocalTrain − Ditto", "FedAvg − Ditto"]
    assert [row[2] for row in exact] == [f"{pair.pair.p_value:.3g}" for pair in pairs.values()]
    versions = dict(table_of(text, "Versions, machine and data")[1:])
    assert versions["torch"] == torch.__version__


def test_every_client_is_a_point_with_its_own_numbers(run: ExperimentResult, text: str) -> None:
    rows = store(text)["data"]["clients"]
    assert len(rows) == 5 * 3
    heights = sorted(row["jitter"] for row in rows)
    assert (heights[0] >= 0) & (heights[-1] < 1)
    assert np.diff(heights).min() > 1 / (3 * len(rows)), "no point hides another"
    frame = run.clients
    last = frame[(frame["round"] == 3) & (frame["set"] == "local") & (frame["seed"] == 1)]
    for row in (row for row in rows if row["seed"] == 1):
        scores = last[last["client"] == row["client"]].set_index(["label", "model"])["accuracy"]
        assert row["m0"] == row["local"] == pytest.approx(scores["local", "personal"], abs=1e-6)
        assert row["m1"] == pytest.approx(scores["fedavg", "global"], abs=1e-6)
        assert row["m2"] == pytest.approx(scores["ditto", "personal"], abs=1e-6)
    gains = np.array([row["m2"] - row["local"] for row in rows])
    line = table_of(text, "Clients of all seeds")[2]
    assert [int(cell) for cell in line[1:4]] == [(gains > 0).sum(), (gains == 0).sum(), (gains < 0).sum()]
    best, worst = (rows[int(k)] for k in (gains.argmax(), gains.argmin()))
    for cell, row, gain in ((line[5], best, gains.max()), (line[6], worst, gains.min())):
        assert cell == f"{100 * gain:+.2f} % ({row['name']}, seed {row['seed']})"


def test_worst_clients_and_labels_are_those_of_the_records(run: ExperimentResult, text: str) -> None:
    data = store(text)["data"]
    worst = {(row["label"], row["percent"]): row["mean"] for row in data["worst"]}
    for label, line in run.displayed.table.iterrows():
        assert worst[label, 100] == pytest.approx(line["mean"], abs=1e-6)
        assert worst[label, 10] == pytest.approx(line["worst10"], abs=1e-6)
    federation = make_federation(run.config, 0, None, set())
    counts = np.array([row["count"] for row in data["labels"]]).reshape(7, 10)
    assert (counts == federation.describe("train")).all()
    assert counts.sum(axis=1).tolist() == federation.sizes("train").tolist()
    shares = np.array([row["share"] for row in data["labels"]]).reshape(7, 10)
    assert shares == pytest.approx(counts / counts.sum(axis=1, keepdims=True), abs=1e-5)
    assert {(row["id"], row["of"]) for row in data["labels"]} == {
        (row["id"], int(total)) for row, total in zip(data["labels"][::10], counts.sum(axis=1), strict=True)
    }


def test_curves_have_every_evaluated_round_and_its_interval(run: ExperimentResult, text: str) -> None:
    rows = store(text)["data"]["curves"]
    assert [row["round"] for row in rows] == [1, 2, 3] * 3
    final = next(row for row in rows if row["label"] == "Ditto" and row["round"] == 3)
    line = run.table.loc["ditto"]
    assert final["mean"] == pytest.approx(line["mean"], abs=1e-6)
    assert final["high"] == pytest.approx(min(1, line["mean"] + line["mean_ci"]), abs=1e-6)


def test_what_was_not_recorded_is_left_out_with_a_word(tmp_path: Path) -> None:
    settings = {**SMALL, "methods": ["fedavg"], "eval": {"every": 0, "final": ["local"]}}
    text = page(tailorfl.run(settings, out=tmp_path / "run"))
    for words in (
        "no two methods share a seed", "only one round was evaluated", "neither LocalTrain nor its average",
        "no such set was evaluated", "every client was sampled", "no method was trained with differential privacy",
    ):  # fmt: skip
        assert words in text
    content = store(text)
    assert {"round", "bytes", "time"}.isdisjoint(content["charts"])
    assert all(content["data"][chart["spec"]["data"]["name"]] for chart in content["charts"].values())


@pytest.mark.parametrize("seeds", [2, 3])
def test_differences_need_three_seeds(seeds: int, stored: Any, tmp_path: Path) -> None:
    jobs = [stored(label, seed, [0.5 + 0.1 * seed]) for label in ("local", "ditto") for seed in range(seeds)]
    result = ExperimentResult(tmp_path, jobs).displayed
    part = paired_differences(result, Look.of(result))
    assert bool(part.tables) == (seeds == 3)
    assert bool(part.left_out) == (seeds == 2)


@pytest.mark.parametrize(("metric", "unit", "shown"), [("accuracy", " (%)", "%"), ("mse", "", "~g")])
def test_only_shares_are_in_percent(metric: str, unit: str, shown: str) -> None:
    look = Look(metric, ())
    assert (look.unit, look.axis()["format"]) == (unit, shown)


def test_the_side_of_the_diagonal_that_gains_depends_on_the_metric() -> None:
    accuracy, error = (
        clients._against(
            Look(metric, ()), "m1", "Ditto", "LocalTrain", {"domain": [0, 1]}, metric == "mse"
        ).alt
        for metric in ("accuracy", "mse")
    )
    assert "above" in accuracy
    assert "below" in error


def test_private_runs_show_what_they_spent_and_no_labels(tmp_path: Path) -> None:
    private = {"dp": {"level": "sample", "clip": 1.0, "noise": 1.0, "accountant": "rdp"}}
    result = tailorfl.run({**SMALL, "methods": ["local"], "train": private}, out=tmp_path / "run")
    text = page(result)
    row = table_of(text, "ε that each job spent")[1]
    assert row[0] == "LocalTrain, seed 0"
    assert row[2] == f"{result.jobs[0][0]['privacy']['epsilon']['max']:.4g}"
    assert "labels" not in store(text)["data"]
    assert "labels" not in result.jobs[0][1].config


@pytest.mark.slow
@pytest.mark.usefixtures("plotting")
def test_the_command_writes_the_page_tables_and_pictures_where_it_is_told(
    run: ExperimentResult, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = ["-o", "one.html", "--latex", "t.tex", "--csv", "t.csv", "--pdf", "new/pictures"]
    written = invoke("report", run.path, *files)
    assert all(name in written for name in ("one.html", "t.tex", "t.csv", "per_round.pdf"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["new", "one.html", "t.csv", "t.tex"]
    pictures = sorted(file.name for file in Path("new/pictures").iterdir())
    assert pictures == ["per_byte.pdf", "per_client.pdf", "per_round.pdf"]
    assert Path("one.html").read_text() == text
    table = Path("t.tex").read_text()
    assert table.count(r"\toprule") == table.count(r"\bottomrule") == 1
    rows = [line for line in table.splitlines() if line.endswith(r"\\")]
    assert len({line.count("&") for line in rows}) == 1
    bold = int(run.table[[name for name in run.table if name.endswith("_best")]].to_numpy().sum())
    assert table.count(r"\textbf{") == bold
    assert Path("t.csv").read_text().splitlines()[1].startswith("local,local,3,")
    invoke("report", run.path, "-o", "one.html", "--latex", "t.tex", "--columns", "bytes,mean")
    lines = Path("t.tex").read_text().splitlines()
    assert r"Method & traffic & accuracy \\" in lines
    assert any("Mean over 3 seeds" in line for line in lines)
    invoke("report", run.path, "--columns", "mean", code=2)


def test_no_column_of_a_table_for_latex_is_empty(run: ExperimentResult) -> None:
    only = ExperimentResult(run.path, run.jobs[:3])
    assert set(only.labels) == {"local"}
    assert "share_beating_local" in [column.key for column in only.columns]
    head = next(line for line in latex(only).splitlines() if line.startswith("Method"))
    assert "clients above LocalTrain" not in head
    assert "worst" in head
    with pytest.raises(ConfigError, match="'maen'"):
        latex(run, ["maen"])


def test_labels_of_reductions_carry_their_mark_in_latex(tmp_path: Path) -> None:
    method = {"name": "ditto", "label": "frozen", "lam": 0.0}
    result = tailorfl.run({**SMALL, "methods": [method]}, out=tmp_path / "run")
    assert result.remarks
    text = latex(result)
    assert r"frozen $^\dagger$ &" in text
    assert r"\footnotesize $^\dagger$ frozen: " in text


@pytest.mark.slow
def test_tuning_shows_what_was_chosen_and_what_a_budget_promises(
    run: ExperimentResult, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(run.path, tmp_path / "tuned"))
    scores = [0.5, 0.9, 0.7, None]
    trials = [{"values": {"lr": 0.1}, "score": score, "seconds": 30.0} for score in scores]
    method = {"chosen": {"train.lr": 0.4}, "rank": 1, "edges": ["train.lr is the largest"], "trials": trials}
    facts = {"budget": {"trials": 4}, "sampler": "random", "metric": "accuracy", "methods": {"ditto": method}}
    (folder / "tuning.json").write_text(json.dumps(facts))
    text = page(ExperimentResult.load(folder))
    row = table_of(text, "Chosen by validation")[1]
    assert row == ["Ditto", "train.lr=0.4", "train.lr is the largest", "1", "3 of 4", "2 min 00 s"]
    assert 'data-value="120.0">2 min 00 s<' in text  # by which the column is sorted: 2 min 00 s after 59.0 s
    rows = store(text)["data"]["tuning"]
    # All 27 triples of draws, each as likely: the expected best by counting.
    for n in (1, 2, 3):
        best = [max(draw) for draw in itertools.product(scores[:3], repeat=n)]
        assert rows[n - 1]["mean"] == pytest.approx(float(np.mean(best)), abs=1e-6)
    (folder / "tuning.json").write_text("[]")
    with pytest.raises(RunError, match=re.escape(str(folder / "tuning.json"))):
        page(ExperimentResult.load(folder))
