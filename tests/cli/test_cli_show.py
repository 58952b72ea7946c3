"""`tailorfl list` and `show`: all that there is, a line each, and all about one; `--json` says the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

import tailorfl
from cli.commands import invoke
from tailorfl.cli.listing import KINDS, described, entries
from tailorfl.cli.theory import app as theory
from tailorfl.core import method as registry
from tailorfl.core.method import Family, Method, all_methods
from tailorfl.settings.listing import settings

ROOT = Path(__file__).resolve().parents[2]


def printed(*arguments: str, code: int = 0) -> str:
    return invoke(*arguments, code=code, columns=80).stdout


def as_json(*arguments: str, code: int = 0) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(printed(*arguments, "--json", code=code), parse_constant=refuse)


def test_methods_have_a_line_each() -> None:
    head, *lines, last = printed("list", "methods").splitlines()
    assert head.split() == ["Method", "Family", "On", "the", "client", "Travels", "Needs"]
    assert [line.split()[0] for line in lines] == list(all_methods())
    assert max(map(len, [head, *lines, last])) <= 80
    (line,) = [line for line in lines if line.startswith("lg_fedavg ")]
    assert re.split(r"  +", line) == ["lg_fedavg", "parts", "body", "head", "–"]
    assert "public set" in next(line for line in lines if line.startswith("feddf "))


def test_every_method_says_its_family() -> None:
    found = {name: m.family for name, m in all_methods().items() if "tailorfl." in m.__module__}
    assert all(found.values()), [name for name, family in found.items() if not family]
    assert set(found.values()) == set(get_args(Family)) - {""}
    parts = {entry["name"] for entry in entries("methods") if entry["family"] == "parts"}
    assert {"fedper", "fedrep", "fedbn"} <= parts
    for entry in entries("methods"):
        if entry["family"] == "one model":
            assert "global" in entry["evaluated"], entry["name"]
        if entry["family"] == "two models":
            assert "model" in entry["kept"] or "factors" in entry["kept"], entry["name"]


@pytest.mark.parametrize("kind", ["methods", "data", "partitions"])
def test_every_option_has_a_type_in_words_and_a_meaning(kind: str) -> None:
    bare = [
        f"{entry['name']}.{option['name']}"
        for entry in entries(kind)
        for option in entry["options"]
        if not option["type"]
        or re.search(r"<class|typing|collections|pathlib", option["type"])
        or not option["meaning"]
        or "as for" in option["meaning"]
    ]
    assert bare == []


def test_options_of_data_have_the_meanings_of_their_docstrings() -> None:
    """Also those that refer to another function, which may add something."""
    (table,), (texts,) = as_json("list", "data", "table"), as_json("list", "data", "text_table")
    of_table, of_texts = ({option["name"]: option for option in entry["options"]} for entry in (table, texts))
    assert of_table["label"]["default"] is None
    assert of_table["path"]["type"] == "text or path or data frame"
    assert of_texts["label"]["meaning"] == of_table["label"]["meaning"]
    assert of_texts["task"]["meaning"] == f"{of_table['task']['meaning']}; not generation"
    assert of_texts["sep"]["meaning"] == of_table["sep"]["meaning"]
    assert "(needed)" in printed("list", "data", "text_table")
    assert not re.search(r"^(Args|Returns|Raises):", table["text"] + texts["text"], re.MULTILINE)


def test_a_method_is_shown_with_all_that_its_file_says() -> None:
    text = printed("show", "ditto")
    for part in (
        "Li et al., ICML 2021", "family: two models", "on the client: whole model", "number (≥ 0)",
        "min over v_i:  F_i(v_i) + (λ/2)‖v_i − w*‖²", "- personal model, lam=0.0: personal model of local",
        "tests/methods/test_method_reductions.py", "tests/methods/test_two_models.py",
    ):  # fmt: skip
        assert part in text
    (found,) = as_json("show", "ditto")
    assert found["kind"] == "method"
    assert {option["name"] for option in found["options"]} == set(all_methods()["ditto"].model_fields)
    (lam,) = (option for option in found["options"] if option["name"] == "lam")
    assert {"type": "number (≥ 0)", "default": "1.0"}.items() <= lam.items()


def test_tests_that_are_named_are_there() -> None:
    for name in all_methods():
        (found,) = described(name, "methods")
        assert [test for test in found["tests"] if not (ROOT / test).is_file()] == []
        assert found["tests"], name


def test_data_models_partitions_and_recipes_are_shown_too() -> None:
    assert "1,797 digits" in printed("show", "digits")
    (model,) = as_json("show", "mlp")
    hidden = {"name": "hidden", "type": "whole number or list of whole numbers", "default": "[200]"}
    assert {**hidden, "meaning": ""} in model["options"]
    (partition,) = as_json("show", "dirichlet")
    assert partition["kind"] == "partition"
    assert "alpha" in printed("show", "dirichlet")
    (recipe,) = as_json("show", "demo")
    assert recipe["what"] in " ".join(printed("show", "demo").split())


def test_what_a_user_registered_is_listed_without_what_nobody_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Mine(Method):
        """A method of somebody's own."""

        name, title, paper = "mine", "Mine", "nowhere"

    monkeypatch.setitem(registry._REGISTRY, "mine", Mine)
    (found,) = as_json("show", "mine")
    assert (found["kept"], found["family"], found["reductions"]) == ("–", "–", [])
    assert any(line.startswith("mine ") for line in printed("list", "methods").splitlines())


def test_lists_as_json_are_the_lists() -> None:
    everything = as_json("list")
    assert list(everything) == list(KINDS)
    for kind, found in everything.items():
        assert as_json("list", kind) == found
        text = printed("list", kind)
        assert all(entry["name"] in text for entry in found)
        assert found == entries(kind)
    assert as_json("list", "settings") == [vars(setting) for setting in settings()]
    assert {s["key"] for s in as_json("list", "settings", "track")} == {
        "track", "track.tensorboard", "track.mlflow", "track.wandb",
    }  # fmt: skip


THEORY = [command.name or command.callback.__name__ for command in theory.registered_commands]  # type: ignore


@pytest.mark.parametrize("command", THEORY)
def test_theory_as_json_has_the_numbers_that_it_prints(command: str) -> None:
    found, text = as_json("theory", command), printed("theory", command)
    assert found["title"].split()[0] in text
    rows = found["rows"] if "rows" in found else [found["values"]]
    numbers = [value for row in rows for value in row.values() if isinstance(value, int | float)]
    assert numbers
    shown = [f"{value:,}" if isinstance(value, int) else f"{value:.6g}" for value in numbers]
    assert all(number in text for number in shown)
    digits = re.compile(r"\d[\d.,]*(?:e[-+]?\d+)?")
    assert set(digits.findall(text)) <= set(digits.findall(" ".join([*shown, json.dumps(found)])))


def test_results_and_checks_as_json(tmp_path: Path) -> None:
    out = tmp_path / "out"
    small = {"samples": 240, "clients": 4}
    result = tailorfl.run(methods=["local", "fedavg"], seeds=2, rounds=1, data=small, out=out)
    lines = as_json("report", str(out))
    assert [line["label"] for line in lines] == ["local", "fedavg"]
    assert lines[1]["mean"] == result.table.loc["fedavg", "mean"]
    assert (lines[1]["folder"], lines[1]["variant"]) == (str(out), "")
    names = [f"{label}, seed {seed}" for label in ("local", "fedavg") for seed in (0, 1)]
    jobs = [{"job": name, "damaged": False, "problems": []} for name in names]
    assert as_json("check", str(out)) == {"experiment": "", "damaged": 0, "jobs": jobs}
    (out / "local/seed-1/clients.jsonl").write_text("")
    found = as_json("check", str(out), code=1)
    assert [job["job"] for job in found["jobs"] if job["damaged"]] == ["local, seed 1"]


@pytest.mark.usefixtures("a_quick_estimate")
def test_a_comparison_as_json_before_and_after_it(tmp_path: Path) -> None:
    asked = ("compare", "methods=local,fedavg", "seeds=1", "rounds=1", "data.samples=240", "data.clients=4")
    (costs,) = as_json(*asked, "--dry-run", "--quiet")
    assert (costs["clients"], list(costs["methods"])) == (4, ["local", "fedavg"])
    lines = as_json(*asked, "--out", str(tmp_path / "out"), "--quiet")
    assert lines == as_json("report", str(tmp_path / "out"))
