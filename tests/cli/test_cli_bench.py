"""`tailorfl bench`: the table, the file, the advice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.commands import invoke
from tailorfl.benchmark import measure as module
from tailorfl.settings.loading import load

SMALL = ["data.clients=4", "data.samples=160", "model=logistic", "method=fedavg"]


@pytest.fixture(autouse=True)
def _two_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 2)


def test_a_table_a_file_and_settings_to_paste() -> None:
    output = invoke("bench", *SMALL, "--seconds", "600", "-o", "found.json").stdout
    assert "one round of FedAvg, 4 clients, logistic with 650 scalars" in output
    for engine in ("plain loop", "auto", "sequential", "vectorized, 4 by itself", "vectorized, chunk 1"):
        assert engine in output
    line = next(line for line in output.splitlines() if line.startswith("recommended: "))
    load(None, line.removeprefix("recommended: ").split())
    found = json.loads(Path("found.json").read_text())
    assert found["recommendation"]["settings"] in line
    assert {"machine", "settings", "ways", "threads"} <= found.keys()
    assert [len(way["seconds"]) for way in found["ways"]] == [2] * len(found["ways"])


def test_what_the_loop_does_without_is_said() -> None:
    result = invoke("bench", *SMALL, "method=fedsam", "--seconds", "0.01", "--quiet")
    assert "the plain loop runs FedAvg" in result.stdout
    assert "3 of 4 clients" in result.stdout
    assert result.stderr == ""
