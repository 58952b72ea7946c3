"""`tailorfl bench`: the table, the file, the advice, and errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tailorfl.benchmark import measure as module
from tailorfl.cli.main import app
from tailorfl.settings.loading import load

SMALL = ["data.clients=4", "data.samples=160", "model=logistic", "method=fedavg"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(module, "MOST", 2)


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_a_table_a_file_and_settings_to_paste(tmp_path: Path) -> None:
    result = bench(*SMALL, "--seconds", "600", "--json", "found.json")
    assert result.exit_code == 0, result.output
    output = result.stdout
    assert "one round of FedAvg, 4 clients, logistic with 650 scalars" in output
    for text in (
        "plain loop",
        "auto",
        "sequential",
        "vectorized, 4 by itself",
        "vectorized, chunk 1",
    ):
        assert text in output
    line = next(line for line in output.splitlines() if line.startswith("recommended: "))
    load(None, line.removeprefix("recommended: ").split())
    found = json.loads(Path("found.json").read_text())
    assert found["recommendation"]["settings"] in line
    assert {"machine", "settings", "ways", "threads"} <= found.keys()
    assert [len(way["seconds"]) for way in found["ways"]] == [2] * len(found["ways"])


def test_what_the_loop_does_without_is_said() -> None:
    result = bench(*SMALL, "method=fedsam", "--seconds", "0.01", "--quiet")
    assert result.exit_code == 0, result.output
    assert "the plain loop is FedAvg's" in result.stdout
    assert "3 of 4 clients" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["method=fedavgg"], "Did you mean 'fedavg'"),
        (["train.lrr=1"], "lr"),
        (["engine=vectorised"], "vectorized"),
        (["--seconds", "0"], "must be positive"),
        (["--json", "nowhere/found.json"], "--json names the file to write"),
        (["missing.yaml"], "neither a file nor a recipe"),
    ],
)
def test_mistakes_are_errors_that_say_what_to_do(arguments: list[str], message: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
