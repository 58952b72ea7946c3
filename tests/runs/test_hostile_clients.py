"""Clients that work against the others, and jobs that diverge: what it costs, which rules help, what is said."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runs.small import facts, first_job, records, simulation_of
from tailorfl import run
from tailorfl.data.own import from_tensors
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.evaluation.summary import means
from tailorfl.report.document import write_report
from tailorfl.runs.cost_estimate import estimate
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
    system = {"malicious": hostile}
    job = first_job(DIGITS, methods=[method], server={"robust": RULES[rule]}, system=system)
    sim = simulation_of(job)
    for _ in range(job.rounds):
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
    system = {"malicious": {"clients": [1, 4], "kind": "nan"}}
    settings = {**DIGITS, "rounds": 2, "methods": ["local", "ditto"], "system": system}
    result = run(settings, out=tmp_path / "hostile")
    for folder in ("local", "ditto"):
        place = tmp_path / "hostile" / folder / "seed-0"
        rows = records(place / "clients.jsonl")
        benign = {0, 2, 3, 5, 6, 7, 8, 9}
        of = {s: {r["client"] for r in rows if r["set"] == s} for s in ("local", "malicious")}
        assert of == {"local": benign, "malicious": {1, 4}}
        summary = facts(place / "summary.json")
        assert summary["malicious"] == {"kind": "nan", "clients": ["client-1", "client-4"]}
        assert summary["metrics"]["clients"] == 8
        rejected = (
            {"client-1": [1, 2], "client-4": [1, 2]} if folder == "ditto" else {}
        )  # local sends nothing
        assert summary["rejected_clients"] == rejected
    assert not any("client-1" in line or "client-4" in line for line in result.worst_clients)
    write_report(result)
    text = (tmp_path / "hostile" / "report.md").read_text(encoding="utf-8")
    assert "| Ditto, seed 0 | nan | client-1, client-4 |" in text


def test_a_dry_run_says_who_is_hostile_and_tries_no_rule_on_too_few(caplog: pytest.LogCaptureFixture) -> None:
    krum = {"server": {"robust": {"rule": "krum", "f": 3}}, "system": {"malicious": {"share": 0.3}}}
    found = estimate(load({**DIGITS, "methods": ["fedavg"], **krum}))
    assert (found.malicious_clients, found.aggregation) == ("3 (sign_flip)", "krum")
    assert "krum" not in caplog.text
    plain = estimate(load({**DIGITS, "methods": ["fedavg"]}))
    assert (plain.malicious_clients, plain.aggregation) == ("0", "mean")


# -- of jobs that diverge ----------------------------------------------------------------------------------------


def test_a_loss_that_grows_is_divergence_though_all_numbers_are_finite(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wild = {"name": "local", "label": "wild", "train": {"lr": 1000}}
    settings = {**DIGITS, "rounds": 2, "methods": [wild, "local"]}
    with caplog.at_level(logging.WARNING, logger="tailorfl"):
        result = run(settings, out=tmp_path / "out")
    assert "wild, seed 0: the training loss" in caplog.text
    assert "grew" not in caplog.text, "it may have been as large in the first round, and may even have fallen"
    assert "local, seed 0: the training loss" not in caplog.text
    report = write_report(result)[0].read_text()
    assert "## Diverged" in report
    assert "| wild, seed 0 |" in report
    summary = result.jobs[0][0]
    rounds = result.rounds[result.rounds["label"] == "wild"]["loss/train"]
    assert summary["loss_grew"] == [rounds.iloc[0], rounds.iloc[-1]]


def test_a_rejected_client_is_named_in_summary_and_report(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 4)).astype(np.float32), rng.integers(0, 2, 90)
    clients = np.array(["Basel", "Bern", "Genf"])[np.arange(90) % 3]
    x[clients == "Bern"] *= 1e30  # the square of a logit is infinite
    source = from_tensors(x, y, clients)
    result = run(method="local", model="mlp", rounds=2, seeds=1, source=source, out=tmp_path / "out")
    assert result.jobs[0][0]["rejected_clients"] == {"Bern": [1, 2]}
    report = write_report(result)[0].read_text()
    assert "| LocalTrain, seed 0 | Bern | 2 | 1, 2 |" in report
