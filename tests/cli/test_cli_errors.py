"""Mistakes on the command line: exit code, message, nearest name, and no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tailorfl.cli.main import app


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results go to an empty folder, and lines are wide enough not to wrap."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def interrupt(*arguments: Any, **options: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rnu"], "Did you mean 'run'?"),
        (["compere"], "Did you mean 'compare'?"),
        (["run", "--dry-rum"], "--dry-run"),
        (["run", "train.lrr=1"], "Did you mean 'train.lr'?"),
        (["run", "train.lr=fast"], "train.lr = 'fast': should be a number"),
        (["run", "train.lr=0.1", "rounds"], "settings are written key=value: rounds=..."),
        (["run", "method=dito"], "Did you mean 'ditto'?"),
        (["run", "method.lamb=1"], "Did you mean 'lam'?"),
        (["run", "data.name=digit"], "Did you mean 'digits'?"),
        (["run", "model=mpl"], "Did you mean 'mlp'?"),
        (["run", "engine=vectorised"], "Did you mean 'vectorized'?"),
        (["run", "data.partition=dirichlt"], "Did you mean 'dirichlet'?"),
        (["run", "nowhere.yaml"], "'nowhere.yaml' is neither a file nor a recipe"),
        (["compare", "method.lam=1"], "say which, as in methods.local.lam"),
        (["reproduce", "demos"], "Did you mean the recipe 'demo'?"),
        (["reproduce", "rounds=1"], "'rounds=1' is neither a file nor a recipe"),
        (["reproduce", "absent.yaml"], "'absent.yaml' is neither a file nor a recipe"),
        (["list", "metods"], "Did you mean 'methods'?"),
        (["run", "--resume", "nowhere"], "'nowhere' cannot be resumed: it has no config.yaml"),
        (
            ["run", "rounds=3", "--resume", "nowhere", "--out", "here"],
            "--out and --resume are given together",
        ),
    ],
)
def test_mistakes_exit_with_2_and_say_what_to_write(arguments: list[str], expected: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert expected in result.output
    assert "Traceback" not in result.output
    assert not Path("runs").exists()


def test_other_errors_exit_with_1(tmp_path: Path) -> None:
    result = invoke("report", str(tmp_path))
    assert result.exit_code == 1
    assert result.output.startswith("error: ")


def test_errors_go_to_stderr() -> None:
    result = invoke("run", "trian.lr=1")
    assert result.stdout == ""
    assert "trian" in result.stderr


def test_message_is_printed_as_it_is() -> None:
    """Square brackets in a message are no markup."""
    assert "'[red]x[/red]'" in invoke("run", "rounds='[red]x[/red]'").stderr


def test_debug_shows_the_traceback() -> None:
    command = [sys.executable, "-m", "tailorfl.cli.main", "--debug", "run", "trian.lr=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ConfigError" in done.stderr


def test_existing_result_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("rounds: 3\n")
    result = invoke("run", "--out", "mine", "--quiet")
    assert result.exit_code == 1
    assert "--overwrite" in result.output
    assert (tmp_path / "mine" / "config.yaml").read_text() == "rounds: 3\n"


def test_interrupt_says_how_to_continue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def started(config: Any, out: Path, **options: Any) -> None:
        out.mkdir()
        (out / "config.yaml").write_text(config.to_yaml())
        raise KeyboardInterrupt

    monkeypatch.setattr("tailorfl.report.experiment.run_experiment", started)
    result = invoke("run", "--out", "my results", "--quiet")
    assert result.exit_code == 130
    assert "tailorfl run --resume 'my results'" in result.output


def test_interrupt_before_anything_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailorfl.report.experiment.run_experiment", interrupt)
    result = invoke("run", "--quiet")
    assert result.exit_code == 130
    assert "--resume" not in result.output


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["eval.metric=mse"], "mse"),
        (["data=synthetic_linear", "model=linear", "eval.metrics=[ece]"], "ece"),
        (["eval.target=95"], "95"),
        (["eval.select=val", "data.split={train: 0.8, val: 0.0, test: 0.2}"], "eval.select=val"),
        (
            [
                "eval.sets=[local, participants]",
                "sampling=bernoulli",
                "weights=uniform",
                "fraction=0.5",
                "train.dp={level: client, clip: 1, noise: 1}",
            ],
            "participants",
        ),
    ],
)
def test_a_dry_run_refuses_what_a_run_refuses(settings: list[str], named: str) -> None:
    small = ["method=ditto", "rounds=1", "model=logistic", *settings]
    run, dry_run = invoke("run", *small), invoke("run", "--dry-run", *small)
    assert run.exit_code == dry_run.exit_code == 2
    (message,) = [line for line in run.output.splitlines() if "error" in line]
    assert named in message
    assert message in dry_run.output
