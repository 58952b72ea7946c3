"""Mistakes on the command line: exit code, what was meant, and no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.commands import invoke
from tailorfl.runs import catalogue
from tailorfl.settings import names as stored

SMALL = ("data.clients=4", "data.samples=240", "model.hidden=[8]")
LIGHT = {
    "run data.alpha=0.1": "'data.partition_options.alpha'",
    "run lr=0.1": "'train.lr'",
    "run lam=2": "'method.lam'",
    "compare lam=2": "'methods.ditto.lam'",
    "run hidden=16": "'model.hidden'",
    "run train.rounds=3": "'rounds'",
    "run train.lr=-1": "train.lr",
    "run --rounds 10": "key=value: rounds=10",
    "compare --lr 0.2": "key=value: train.lr=0.2",
    "run rounds 10": "key=value: rounds=10",
    "run train.lr=0.1 rounds": "key=value: rounds=...",
    "run ditto": "key=value: method=ditto",
    "ditto": "'tailorfl run method=ditto'",
    "compere": "'compare'",
    "run --dry-rum": "--dry-run",
    "run method=dito": "'ditto'",
    "run model=mpl": "'mlp'",
    "run model.hiden=8": "'hidden'",
    "run data.name=digit": "'digits'",
    "run data.partition=dirichlt": "'dirichlet'",
    "run server.robust=medain": "'median'",
    "run engine=vectorised": "'vectorized'",
    "run engine.device=gpu": "should be auto, cpu, cuda or cuda:N",
    "run nowhere.yaml": "'nowhere.yaml' is neither a file nor a recipe",
    "run --resume nowhere": "'nowhere'",
    "run rounds=3 --resume nowhere --out here": "--out and --resume are given together",
    "run --force": "--force",
    "reproduce demos": "'demo'",
    "reproduce rounds=1": "'rounds=1' is neither",
    "list metods": "'methods'",
    "theory moreu": "'moreau'",
    "theory moreau --lam 0": "lam must be a positive number",
    "theory fedclup-steps --lam 1,0": "lam must be a positive number",
    "theory perfed-ckt --v2 1,x": "'1,x'",
    "theory dp --sampling poison": "'poisson'",
    "bench method=fedavgg": "'fedavg'",
    "bench --out nowhere/found.json": "--out",
    "advise data=digts": "'digits'",
    "pretrain --resume x.safetensors rounds=3": "leave out CONFIG",
    "pretrain train.lrr=1": "'train.lr'",
    "tune --resume t --budget 3": "--budget is given too",
    "tune --resume t rounds=3 --widen": "an experiment and --widen is given too",
    "compare --tune 2 --extend c": "--extend",
    "server --insecure --keys keys": "are given together",
}
"""Mistakes, all with exit code 2, that are answered without torch, the import of which takes seconds."""
OTHERS = {
    "list methods dito": "'ditto'",
    "show dito": "'ditto'",
    "show digts": "'digits'",
    "show cnn": "'cnn",
    "bench --seconds 0": "must be positive",
    "deploy leave nowhere north": "no federation has begun in 'nowhere'",
    "bench variants={a: {rounds: 1}}": "(a)",
    "data show variants={a: {rounds: 1}}": "(a)",
    "advise variants={a: {rounds: 1}}": "(a)",
    "advise --clients 1": "clients >= 2",
    "pretrain train.epochs=3": "epochs as rounds",
    "theory dp --samples 0": "samples must be at least 1",
    "theory dp --target-epsilon -1": "epsilon must be positive",
    "tune --budget many": "'many'",
    "tune --sampler best": "'best'",
    "tune search={train.learning: [1]}": "'train.learning'",
    "tune search={train.lr: 1}": "[0.01, 0.1]",
    "tune --resume nowhere": "'nowhere'",
    "tune search={train.lr: {low: 0.1, high: 1}} --sampler grid": "train.lr",
}


def words_of(line: str) -> list[str]:
    """Words of a line; blanks in braces are part of a word."""
    words: list[str] = []
    for word in line.split():
        if words and words[-1].count("{") > words[-1].count("}"):
            words[-1] += f" {word}"
        else:
            words.append(word)
    return words


@pytest.mark.parametrize("line", OTHERS)
def test_a_mistake_is_answered_with_what_was_meant(line: str) -> None:
    output = invoke(*words_of(line), code=2).output
    assert OTHERS[line] in " ".join(output.split())
    assert not Path("runs").exists()


def test_most_mistakes_are_answered_before_torch_is_imported() -> None:
    catalogue.write()  # as `make package` does, and a checkout at the first mistake
    code = (
        "import json, sys\n"
        "from typer.testing import CliRunner\n"
        "from tailorfl.cli.main import app\n"
        "for words, meant in json.load(sys.stdin):\n"
        "    result = CliRunner().invoke(app, words, env={'COLUMNS': '300'})\n"
        "    assert result.exit_code == 2 and meant in ' '.join(result.output.split()), (words, result.output)\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    light = json.dumps([(words_of(line), meant) for line, meant in LIGHT.items()])
    subprocess.run([sys.executable, "-c", code], input=light, text=True, check=True)
    assert not Path("runs").exists()


def test_names_are_collected_anew_where_the_source_was_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "catalogue.json"
    for module in (catalogue, stored):
        monkeypatch.setattr(module, "CATALOGUE", file)
    catalogue.write()
    written = json.loads(file.read_text())
    kinds = {**written["kinds"], "rules": ["median"]}
    for source, rules in ((written["source"], ["median"]), ("another", list(written["kinds"]["rules"]))):
        file.write_text(json.dumps({"source": source, "kinds": kinds}))
        assert list(stored._catalogue.__wrapped__()["rules"]) == rules
    assert json.loads(file.read_text()) == written


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("report", "."), "error: "),
        (("pretrain", "--resume", "x.safetensors"), "was never started"),
        (("advise", "data.clients=1", "data.samples=100"), "at least 2 clients"),
        (("advise", *SMALL, "--rounds", "1", "train.lr=1e30"), "train.lr"),
    ],
)
def test_other_errors_exit_with_1(words: tuple[str, ...], message: str) -> None:
    result = invoke(*words, code=1)
    assert message in result.stderr
    assert not result.stdout


def test_errors_are_printed_as_they_are_on_stderr() -> None:
    """Square brackets in a message are no markup."""
    result = invoke("run", "rounds='[red]x[/red]'", code=2)
    assert "'[red]x[/red]'" in result.stderr
    assert result.stdout == ""


def test_debug_shows_the_traceback() -> None:
    command = [sys.executable, "-m", "tailorfl.cli.main", "--debug", "run", "trian.lr=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ConfigError" in done.stderr


def test_existing_result_folder_is_kept() -> None:
    Path("mine").mkdir()
    Path("mine/config.yaml").write_text("rounds: 3\n")
    assert "--overwrite" in invoke("run", "--out", "mine", "--quiet", code=1).output
    assert Path("mine/config.yaml").read_text() == "rounds: 3\n"


@pytest.mark.parametrize("name", ["report.md", "comparison.csv"])
def test_files_that_no_experiment_wrote_are_kept(name: str) -> None:
    Path("mine").mkdir()
    Path("mine", name).write_text("my own notes")
    assert name in invoke("run", *SMALL, "rounds=1", "seeds=1", "--out", "mine", "--quiet", code=1).stderr
    assert [(file.name, file.read_text()) for file in Path("mine").iterdir()] == [(name, "my own notes")]


def test_a_comparison_is_not_tuned_for_a_folder_that_is_taken() -> None:
    Path("mine").mkdir()
    Path("mine/config.yaml").write_text("rounds: 3\n")
    assert "--overwrite" in invoke("compare", *SMALL, "--tune", "1x1", "--out", "mine", code=1).output
    assert not Path("mine-tuning").exists()


def test_a_server_that_is_stopped_says_how_to_start_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(config: Any, folder: Path, *rest: Any, **options: Any) -> None:
        folder.mkdir(parents=True)
        (folder / "config.yaml").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("tailorfl.deploy.running.run_server", stopped)
    Path("mine.py").touch()
    words = ("name=two words", "--import", "mine.py", "--insecure", "--anywhere", "--health", 8080)
    output = invoke("server", *words, code=130).output
    again = (
        "tailorfl server --import mine.py 'name=two words' --listen 127.0.0.1:8000 --out runs/two-words --insecure "
        "--anywhere --health 8080"
    )
    assert f"continue with: {again}" in output


@pytest.mark.parametrize("begun", [True, False])
def test_interrupt_says_how_to_continue_what_was_begun(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(config: Any, out: Path, **options: Any) -> None:
        if begun:
            out.mkdir()
            (out / "config.yaml").write_text(config.to_yaml())
        raise KeyboardInterrupt

    monkeypatch.setattr("tailorfl.report.experiment.run_experiment", started)
    output = invoke("run", "--out", "my results", "--quiet", code=130).output
    assert ("tailorfl run --resume 'my results'" in output) == begun


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["eval.metric=mse"], "mse"),
        (["data=synthetic_linear", "model=linear", "eval.metrics=[ece]"], "ece"),
        (["eval.target=95"], "95"),
        (["eval.select=val", "data.split={train: 0.8, val: 0.0, test: 0.2}"], "eval.select=val"),
        (
            ["eval.sets=[local, participants]", "sampling=bernoulli", "weights=uniform", "fraction=0.5",
             "train.dp={level: client, clip: 1, noise: 1}"],
            "participants",
        ),
    ],
)  # fmt: skip
def test_a_dry_run_refuses_what_a_run_refuses(settings: list[str], named: str) -> None:
    words = ["run", "method=ditto", "rounds=1", "model=logistic", *settings]
    run, dry_run = invoke(*words, code=2), invoke(*words, "--dry-run", code=2)
    (message,) = [line for line in run.output.splitlines() if "error" in line]
    assert named in message
    assert message in dry_run.output
