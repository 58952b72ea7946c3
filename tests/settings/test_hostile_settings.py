"""Settings that are too large, too deep, endless or unprintable are refused with the library's own words, at once."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import tailorfl
from tailorfl.cli.main import app
from tailorfl.errors import ConfigError, DataError, ModelError, RunError, first_few
from tailorfl.models.registry import build
from tailorfl.printable import harmful, visible
from tailorfl.report.experiment import run_experiment
from tailorfl.report.progress import messages
from tailorfl.runs.build import check
from tailorfl.settings.base import DEEPEST, LARGEST, MOST_VALUES
from tailorfl.settings.loading import load

HUGE = 10**23
SOON = 5.0
"""Seconds in which anything is refused, with much to spare on a busy machine."""


def refused(given: Any = None, overrides: Any = ()) -> str:
    begin = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        check(load(given, overrides))
    assert time.perf_counter() - begin < SOON
    message = str(caught.value)
    assert len(message) < 1000
    assert harmful(message, but="\n") is None
    return message


def bomb(merged: bool = False) -> str:
    """A few lines that mean 10⁹ values."""
    lines, before = ["a: &a0 {x: 1, y: 2, z: 3, u: 4, v: 5, w: 6, p: 7, q: 8, r: 9, s: 10}"], "a0"
    for level in range(1, 9):
        ten = ", ".join([f"*{before}"] * 10)
        lines.append(f"b{level}: &a{level} {{<<: [{ten}]}}" if merged else f"b{level}: &a{level} [{ten}]")
        before = f"a{level}"
    return "\n".join(lines)


BROKEN = {
    "aliases": (bomb(), "holds more than 100,000 values"),
    "merges": (bomb(merged=True), "holds more than 100,000 values"),
    "circle": ("data: &a {options: *a}", "'*a' is used inside its own definition"),
    "flow": (f"data: {'[' * 1000}{']' * 1000}", f"nests values more than {DEEPEST} levels"),
    "block": ("\n".join(f"{' ' * k}a:" for k in range(1000)), f"nests values more than {DEEPEST} levels"),
    "digits": (f"rounds: {'9' * 5000}", "holds a value that cannot be read"),
    "hexadecimal": (f"rounds: 0x{'f' * 5000}", "rounds is a whole number of 20000 bits"),
    "date": ("name: 2001-99-99", "holds a value that cannot be read"),
    "empty": ("rounds: !!int ''", "holds a value that cannot be read"),
    "file": ("x" * (2**20 + 1), "has 1,048,577 characters"),
    "text": (f"name: {'x' * 20_000}", "name is a text of 20,000 characters"),
    "key": ("? [a]\n: b", "not valid YAML"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_would_take_for_ever_or_break_the_parser(tmp_path: Path, kind: str) -> None:
    text, said = BROKEN[kind]
    file = tmp_path / "experiment.yaml"
    file.write_text(text)
    assert said in refused(file)


def nested(levels: int, start: Any, around: Callable[[Any], Any]) -> Any:
    value = start
    for _ in range(levels):
        value = around(value)
    return value


def ring() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["ring"] = value
    return value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (nested(1000, 1, lambda value: {"a": value}), f"nests values more than {DEEPEST} levels"),
        (ring(), f"nests values more than {DEEPEST} levels"),
        ({"a": nested(10, [0] * 10, lambda value: [value] * 10)}, "more than 100,000 values"),
        ({"a": [0] * MOST_VALUES}, "more than 100,000 values"),
        ({"a": 1 + 2j}, "complex number"),
    ],
    ids=["deep", "ring", "wide", "long", "complex"],
)
def test_values_of_python_have_the_same_bounds(options: Any, message: str) -> None:
    assert message in refused({"data": {"options": options}})
    assert message in refused(None, {"data": {"options": options}})
    assert "." * DEEPEST not in refused(None, [f"data.options{'.b' * 1000}=1"])


@pytest.mark.parametrize(
    "key",
    [
        "threads", "seeds", "rounds", "checkpoint_every", "data.heldout_clients", "data.clients", "data.samples",
        "data.seed", "data.public_samples", "train.steps", "train.epochs", "train.batch_size", "eval.every",
        "eval.max_samples", "engine.workers", "engine.chunk", "method.personal_epochs", "model.hidden",
        "data.partition_options.min_size", "method.rounds",
    ],
)  # fmt: skip
@pytest.mark.parametrize("number", [HUGE, -HUGE, LARGEST + 1])
def test_whole_numbers_beyond_what_is_counted_with(key: str, number: int) -> None:
    assert "is a whole number of" in refused(None, [f"{key}={number}"])


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("seeds=100000000", "seeds = 100000000: should be the number of seeds, from 1 to 10,000"),
        ("seeds=1e8", "should be the number of seeds"),
        ("seeds=0", "should be the number of seeds"),
        ("variants={a: {seeds: 100000000}}", "should be the number of seeds"),
        ("threads=1000000", "threads = 1000000: should be less than or equal to 1024"),
        ("engine.workers=100000", "engine.workers = 100000: should be less than or equal to 1024"),
        ("train.steps=1e15", "train.steps = 1000000000000000.0: should be less than or equal to 1000000000"),
        ("train.epochs=1e15", "train.epochs = 1000000000000000.0: should be less than or equal to 1000000"),
        ("train.lr=1e308", "should be a number within ±3.4e+38"),
        ("train.weight_decay=-1e39", "should be a number within ±3.4e+38"),
        ("published=null", "published = None: should be a group"),
        ("published={ditto: null}", "published has ditto = None, which is neither a note"),
        ("published={ditto: [1]}", "neither a note"),
        ("published={ditto: {mean: null}}", "published has ditto.mean = None, which should be a number"),
        ("published={ditto: {mean: .nan}}", "which should be a number"),
        ("published={ditto: {mean: true}}", "which should be a number"),
        ("published={ditto: {mean: {std: 0.1}}}", "which should be a number or {value: 0.9, std: 0.01}"),
        ("published={ditto: {mean: {value: 0.9, sd: 0.1}}}", "which should be a number or"),
        ("published={ditto: {mean: {value: 0.9, std: -0.1}}}", "which should be a number or"),
        ("published={ditto: {mean: {value: 0.9, std: x}}}", "which should be a number or"),
        ("published={runs: 0}", "published has runs = "),
        ("published={runs: 2.5}", "published has runs = "),
        ("published={runs: true}", "published has runs = "),
        ("published={ditto: {clients: 0.5}}", "which should be a list of numbers"),
        ("published={ditto: {clients: [0.5, x]}}", "which should be a list of numbers"),
        ("variants={a: {variants: {b: {}}}}", "'a' needs a name and cannot contain"),
        ("variants={'': {}}", "needs a name"),
    ],
)
def test_what_is_out_of_bounds_is_said_by_name(setting: str, said: str) -> None:
    assert said in refused(None, [setting])


def test_a_number_of_seeds_may_be_written_like_one() -> None:
    assert load(None, ["seeds=1e1"]).seeds == tuple(range(10))


@pytest.mark.parametrize(
    "character", ["\n", "\t", "\r", "\x00", "\x1b", "\x7f", "\x9b", "\u2028", "\u202e", "\ud800"]
)
def test_texts_that_would_change_how_they_are_shown(character: str) -> None:
    text = f"a{character}b"
    for settings in (
        {"name": text},
        {"method": {"name": "ditto", "label": text}},
        {"variants": {text: {}}},
        {"data": {"options": {text: 1}}},
        {"data": {"heldout_clients": [text]}},
        {"data": {"path": text}},
    ):
        assert f"the character {character!r}" in refused(settings)
    if character not in "\n\t":
        assert "published.source holds the character" in refused({"published": {"source": text}})
        assert "description holds the character" in refused({"description": text})
    else:
        assert load({"description": text, "published": {"source": text}}).description == text


@given(st.text(st.characters(codec="utf-8")))
def test_what_is_made_visible_is_harmless_and_otherwise_the_same(text: str) -> None:
    shown = visible(text)
    assert harmful(shown) is None
    if harmful(text) is None:
        assert shown == text
    assert visible(shown) == shown
    assert harmful(visible(text, but="\n"), but="\n") is None


def test_no_error_and_no_warning_reaches_the_terminal_raw(capsys: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(app, ["run", "\x1b]0;owned\x07.yaml"])
    assert result.exit_code == 2
    assert "\\x1b]0;owned\\x07.yaml" in result.stderr
    with messages(Console(stderr=True, force_terminal=False)):
        logging.getLogger("tailorfl.test").warning("client '%s' is [/odd]", "\x1b[2J")
    assert "client '\\x1b[2J' is [/odd]" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["a\x00b", "a\nb", "\x1b[31m"])
def test_a_result_folder_that_could_not_be_called_so(folder: str, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for resume in (False, True):
        with pytest.raises(ConfigError, match="in its name; leave it out"):
            tailorfl.run(None, out=folder, resume=resume)
    assert not list(tmp_path.iterdir())


def test_names_that_no_file_system_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    long = "x" * 5000
    for resume in (False, True):
        with pytest.raises(RunError, match="File name too long; choose a shorter name"):
            tailorfl.run(None, out=long, resume=resume)
    with pytest.raises(ConfigError, match="neither a file nor a recipe"):
        load(long)
    with pytest.raises(DataError, match="File name too long"):
        tailorfl.run({"data": {"name": "table", "path": f"{long}.csv", "options": {"label": "y"}}})


def test_a_model_that_no_memory_holds_is_no_traceback() -> None:
    with pytest.raises(ModelError, match=r"needs 2,560,000,000\.0 GB of memory"):
        build("mlp", (1, 8, 8), 10, hidden=[10**16])


LABELS = [
    "[/x]", "[bold]", "$x_{", r"\$", r"\[", "a\\", ":smile:", "|", "a | b", "<script>", "x" * 300, "ä日本🏥",
    "{}", "%s", "&amp;",
]  # fmt: skip


@pytest.mark.slow
def test_labels_with_signs_of_all_languages_come_out_as_they_are(tmp_path: Path) -> None:
    settings = {
        "name": "[/odd]",
        "rounds": 1,
        "seeds": 1,
        "model": "logistic",
        "data": {"clients": 3, "samples": 60},
        "methods": [{"name": "local", "label": label} for label in LABELS],
        "published": {label: {"mean": 0.5} for label in LABELS},
        "eval": {"final": ["local"]},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_experiment(load(settings), tmp_path / "out")
    result = CliRunner().invoke(app, ["report", str(tmp_path / "out")], env={"COLUMNS": "900"})
    assert result.exit_code == 0, result.output
    assert all(label in result.stdout for label in ["[/odd]", *LABELS])
    page = (tmp_path / "out" / "report.html").read_text()
    shown, scripts = page.partition('<script type="application/json"')[::2]
    assert "<script" not in shown
    # data, three libraries, the page's own
    assert scripts.count("<script>") == scripts.count("</script>") - 1 == 4
    assert "<td>a | b</td>" in page
    table = (tmp_path / "out" / "comparison.md").read_text().splitlines()
    assert len({line.count(" | ") for line in table if line.startswith("|")}) == 1


@pytest.mark.parametrize(
    ("names", "between", "said"),
    [
        ([], ", ", ""),
        (["a", "b"], ", ", "a, b"),
        (["a", "b", "c"], ", ", "a, b and 1 more"),
        (["a", "b", "c", "d"], "; ", "a; b; and 2 more"),
    ],
)
def test_many_names_are_told_by_the_first_few_and_their_number(
    names: list[str], between: str, said: str
) -> None:
    assert first_few(names, 2, between) == said
