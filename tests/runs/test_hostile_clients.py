"""One client of ten works against the others, on digits: what it costs, which rules help, and what is said of it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tailorfl import run
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.evaluation.summary import means
from tailorfl.report.document import write_report
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.cost_estimate import estimate
from tailorfl.runs.job import Job
from tailorfl.settings.loading import load

DIGITS: dict[str, Any] = {
    "data": {"name": "digits", "clients": 10, "partition": "iid"},
    "model": "logistic",
    "train": {"lr": 0.1, "epochs": 1, "batch_size": 10},
    "seeds": 1,
    "rounds": 6,
    "engine": {"name": "vectorized"},
}
RULES: dict[str, Any] = {
    "none": "none",
    "median": "median",
    "trimmed": {"rule": "trimmed_mean", "trim": 0.1},
    "krum": {"rule": "krum", "f": 1},
    "multi_krum": {"rule": "multi_krum", "f": 1},
    "norm_bound": "norm_bound",
}


@cache
def accuracy(rule: str, kind: str | None, method: str = "fedavg") -> float:
    """Of the deployed models on own test data, mean over the nine clients that are not client 4."""
    hostile = {"clients": [4], "kind": kind or "sign_flip", "from_round": 1 if kind else 10_000}
    hostile |= {"strength": 8.0} if kind == "sign_flip" else {}
    config = load(
        {
            **DIGITS,
            "methods": [method],
            "server": {"robust": RULES[rule]},
            "system": {"malicious": hostile},
        }
    )
    sim = make_simulation(Job(config, config.methods[0], 0), make_federation(config, 0))
    for _ in range(config.rounds):
        sim.step()
    found = means(evaluate(sim, Protocol(("local",))))
    return found[f"{'personal' if sim.method.has_personal else 'global'}/local/accuracy"]


def test_one_of_ten_ruins_the_mean() -> None:
    """Eight times the update of one client, turned round: the nine others and that one nearly cancel."""
    assert accuracy("none", None) > 0.85
    assert accuracy("none", "sign_flip") < accuracy("none", None) - 0.2


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "none"])
def test_every_rule_keeps_most_of_what_one_attacker_ruins(rule: str) -> None:
    assert accuracy(rule, "sign_flip") > accuracy("none", "sign_flip") + 0.15
    assert accuracy(rule, "sign_flip") > accuracy(rule, None) - 0.06


def test_personal_models_depend_less_on_what_others_send() -> None:
    lost = {m: accuracy("none", None, m) - accuracy("none", "sign_flip", m) for m in ("fedavg", "ditto")}
    assert lost["ditto"] < lost["fedavg"] - 0.1


# -- what is said ---------------------------------------------------------------------------------------------


def test_tables_and_records_are_of_the_others(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        **DIGITS,
        "rounds": 2,
        "methods": ["local", "ditto"],
        "system": {"malicious": {"clients": [1, 4], "kind": "nan"}},
    }
    result = run(settings, out=tmp_path / "hostile")
    for folder in ("local", "ditto"):
        place = tmp_path / "hostile" / folder / "seed-0"
        rows = [json.loads(line) for line in (place / "clients.jsonl").read_text().splitlines()]
        benign = {0, 2, 3, 5, 6, 7, 8, 9}
        of = {s: {r["client"] for r in rows if r["set"] == s} for s in ("local", "malicious")}
        assert of == {"local": benign, "malicious": {1, 4}}
        summary = json.loads((place / "summary.json").read_text())
        assert summary["malicious"] == {"kind": "nan", "clients": ["client-1", "client-4"]}
        assert summary["metrics"]["clients"] == 8
        rejected = {"client-1": [1, 2], "client-4": [1, 2]}
        assert summary["rejected_clients"] == (
            rejected if folder == "ditto" else {}
        )  # the other sends nothing
    assert not any("client-1" in line or "client-4" in line for line in result.worst_clients)
    write_report(result)
    text = (tmp_path / "hostile" / "report.md").read_text(encoding="utf-8")
    assert "| Ditto, seed 0 | nan | client-1, client-4 |" in text


def test_a_dry_run_says_who_is_hostile_and_tries_no_rule_on_too_few(caplog: pytest.LogCaptureFixture) -> None:
    settings = {
        **DIGITS,
        "methods": ["fedavg"],
        "server": {"robust": {"rule": "krum", "f": 3}},
        "system": {"malicious": {"share": 0.3}},
    }
    found = estimate(load(settings))
    assert (found.malicious_clients, found.aggregation) == ("3 (sign_flip)", "krum")
    assert "krum" not in caplog.text
    plain = estimate(load({**DIGITS, "methods": ["fedavg"]}))
    assert (plain.malicious_clients, plain.aggregation) == ("0", "mean")
