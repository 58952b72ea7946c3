"""What benchmarks/peers times beside tailorfl is the computation that tailorfl does."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tailorfl.models.registry import build

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The scripts that need no peer, imported by name."""
    monkeypatch.syspath_prepend(FOLDER)
    return {name: importlib.import_module(name) for name in ("peer_work", "run_plain", "run_tailorfl")}


@pytest.mark.parametrize("model", ["logistic", "cnn2"])
def test_the_network_for_peers_is_that_of_the_library(programs: dict[str, ModuleType], model: str) -> None:
    work = programs["peer_work"]
    ours = build(model, work.SHAPE, work.CLASSES).eval()
    theirs = work.network(model)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, *work.SHAPE)
    torch.testing.assert_close(theirs(x), ours(x), rtol=0, atol=0)


@pytest.mark.parametrize("epochs", [1, 3])
def test_the_plain_loop_and_the_library_agree_on_full_batches(
    programs: dict[str, ModuleType], epochs: int
) -> None:
    shared = programs["peer_work"]
    work = shared.make_work("logistic")
    weights = {}
    for name in ("run_plain", "run_tailorfl"):
        job = shared.Job(epochs, shared.SAMPLES, shared.CHECK_LR, rounds=2)
        programs[name].run(work, Path(), (job,))
        cpu, wall = job.seconds()
        assert len(cpu) == len(wall) == 2
        assert min(cpu) > 0
        weights[name] = job.weights
    change = max((weights["run_plain"][n] - work.init[n]).abs().max().item() for n in work.init)
    for name, ours in weights["run_tailorfl"].items():
        torch.testing.assert_close(ours, weights["run_plain"][name], rtol=0, atol=1e-3 * change)
