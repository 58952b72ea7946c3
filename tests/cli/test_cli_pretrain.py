"""The command `tailorfl pretrain`: what it prints, and how it goes on."""

from __future__ import annotations

import io
import json
from typing import cast

import pytest
from click.testing import Result
from rich.console import Console

from cli.commands import invoke
from tailorfl.cli.main import INTERRUPTED
from tailorfl.cli.progress import EpochLines, LiveEpochs, watcher
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs import pretrain
from tailorfl.runs.pretrain import Epoch, Watcher

SMALL = ["data.samples=120", "rounds=2", "model.hidden=[8]", "train.batch_size=32"]


def pretrained(*arguments: str, code: int = 0) -> Result:
    return invoke("pretrain", *arguments, code=code)


def test_it_writes_says_where_and_is_used() -> None:
    result = pretrained(*SMALL, "--out", "net.safetensors")
    assert "weights: net.safetensors" in result.output
    assert "model.weights=net.safetensors" in result.output
    lines = result.stderr.splitlines()
    assert lines[0] == "mlp on digits: 2 epochs"
    assert [line.split(",")[0] for line in lines[1:]] == [f"mlp on digits: epoch {e}/2" for e in (1, 2)]
    assert "val accuracy 0." in lines[1]
    assert "test accuracy 0." in lines[1]
    used = ["run", "method=local", "data.clients=2", "rounds=1", "seeds=1", *SMALL[::2]]
    printed = json.loads(pretrained(*SMALL, "--out", "net.safetensors", "--overwrite", "--json").stdout)
    scalars = 64 * 8 + 8 + 8 * 10 + 10
    assert printed == {"weights": "net.safetensors", "report": "net.json", "scalars": scalars}
    start = ["model.weights=net.safetensors", "model.skip_head=true"]
    invoke(*used, *start)


def test_it_has_a_place_of_its_own_and_can_be_silent() -> None:
    result = pretrained(*SMALL, "--quiet")
    assert "weights: runs/digits-mlp.safetensors" in result.output
    assert result.stderr == ""
    assert "exists already" in pretrained(*SMALL, code=1).output
    pretrained(*SMALL, "--quiet", "--overwrite")


def test_an_interrupted_one_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Simulation.step

    def interrupted(sim, *arguments):
        if sim.round == 1:
            raise KeyboardInterrupt
        return real(sim, *arguments)

    monkeypatch.setattr(Simulation, "step", interrupted)
    result = pretrained(*SMALL, "--out", "a net.safetensors", code=INTERRUPTED)
    assert "continue with: tailorfl pretrain --resume 'a net.safetensors'" in result.output
    monkeypatch.setattr(Simulation, "step", real)
    result = pretrained("--resume", "a net.safetensors")
    assert "2 epochs, resumed after epoch 1" in result.stderr
    assert "weights: a net.safetensors" in result.output


def test_before_anything_is_kept_there_is_nothing_to_go_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrain, "run_jobs", interrupted)
    result = pretrained(*SMALL, code=INTERRUPTED)
    assert "interrupted" in result.output
    assert "continue with" not in result.output


def test_lines_and_bars_suit_their_console() -> None:
    plain = Console(file=io.StringIO())
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    for console, kind in ((plain, EpochLines), (terminal, LiveEpochs)):
        with watcher(console) as watch:
            assert isinstance(watch, kind)
            watch.started("mlp on digits", 2, "accuracy", 1)
            watch.epoch_done(Epoch(2, 0.1, 0.5, 0.75, float("nan"), 1.25))
    assert cast(io.StringIO, plain.file).getvalue().splitlines() == [
        "mlp on digits: 2 epochs, resumed after epoch 1",
        "mlp on digits: epoch 2/2, loss 0.5000, val accuracy 0.7500, 1.2 s",
    ]
    assert "epoch 2/2 · loss 0.5000 · val accuracy 0.7500" in cast(io.StringIO, terminal.file).getvalue()
    with watcher(terminal, quiet=True) as watch:
        assert type(watch) is Watcher
