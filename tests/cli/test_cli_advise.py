"""`tailorfl advise`: tables, JSON and YAML that runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

from cli.commands import invoke
from tailorfl.cli.advice import pilot
from tailorfl.runs.build import check
from tailorfl.settings.loading import load
from tailorfl.theory import advisor

LINEAR = ["data=synthetic_linear", "model=linear", "data.options.clients=9", "data.options.samples=80"]
LINEAR += ["data.options.dim=3", "data.options.heterogeneity=1.0"]
DIGITS = ["data.clients=4", "data.samples=240", "model.hidden=[8]", "--rounds", "1"]


def done(*arguments: str) -> Result:
    return invoke("advise", *arguments)


def pasted(output: str) -> dict[str, Any]:
    """The YAML behind the tables."""
    return dict(yaml.safe_load(output.split("to paste into an experiment:\n")[1]))


def test_a_convex_problem_is_known_well_and_gets_settings_that_exist() -> None:
    output = done(*LINEAR, "--quiet").stdout
    parts = ("heterogeneity R", "Corollary 1", "PerFed-CKT", "alpha_k", "Corollary 2")
    assert all(text in output for text in parts)
    config = pasted(output)
    assert [row["name"] for row in config["methods"]] == ["local", "fedclup", "ditto", "pfedme"]
    check(load(config))
    found = json.loads(done(*LINEAR, "--json", "--quiet").stdout)  # everything and nothing else
    assert found["facts"]["radius"]["value"] == pytest.approx(1.0, rel=0.15)
    assert len(found["transfer"]["alpha"]) == 9
    assert found["config"] == config


def test_a_network_is_told_what_is_not_meaningful() -> None:
    result = done(*DIGITS)
    for text in ("not meaningful", "local training of halves, 4 of 4 clients", "perfed_ckt"):
        assert text in result.stdout
    assert "note: the model or the data have no reachable optimum" in result.stdout
    assert "round 1 of 1 to a common reference, 4 clients" in result.stderr
    found = pasted(result.stdout)
    assert [row["name"] for row in found["methods"]] == ["fedclup", "ditto", "pfedme"]
    check(load(found))


def test_methods_that_need_a_public_set_are_pasted_where_there_is_one() -> None:
    output = done(*DIGITS, "data.public=digits", "data.public_samples=30", "--quiet").stdout
    names = {row["name"] for row in pasted(output)["methods"]}
    assert names == {"fedclup", "ditto", "pfedme", "perada", "perfed_ckt"}


def test_advice_on_a_recipe_runs() -> None:
    found = done("demo", "data.samples=240", "data.clients=4", "--rounds", "0", "--json", "--quiet").stdout
    settings = {
        "data": {"clients": 4, "samples": 240},
        "rounds": 1,
        "seeds": 1,
        **json.loads(found)["config"],
    }
    Path("advised.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    invoke("run", "advised.yaml", "--quiet", "--out", "out")


@pytest.mark.parametrize(
    ("own", "told", "taken"), [(5, None, 10), (30, None, 30), (200, None, 50), (30, 3, 3), (200, 70, 70)]
)
def test_a_pilot_is_as_long_as_the_experiment_within_bounds(
    own: int, told: int | None, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(advisor, "advise", lambda *_, rounds, **__: seen.append(rounds))
    settings = {"data": {"clients": 4, "samples": 240}, "methods": "local", "model": "mlp", "rounds": own}
    pilot(load(None, settings), 4, told, lambda said: None)
    assert seen == [taken]


def test_many_clients_are_cut_in_the_table_only() -> None:
    many = [text.replace("clients=9", "clients=14") for text in LINEAR]
    output = done(*many, "--clients", "12", "--quiet").stdout
    assert "12 of 14 clients" in output
    assert "2 more clients in --json" in output
