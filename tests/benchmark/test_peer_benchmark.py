"""What benchmarks/peers times beside tailorfl is the computation that tailorfl does."""

from __future__ import annotations

import importlib
from dataclasses import replace
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
    return {
        name: importlib.import_module(name) for name in ("compare", "peer_work", "run_plain", "run_tailorfl")
    }


@pytest.mark.parametrize("model", ["logistic", "mlp", "cnn2"])
def test_the_network_for_peers_is_that_of_the_library(programs: dict[str, ModuleType], model: str) -> None:
    work = programs["peer_work"]
    ours = build(model, work.SHAPE, 10).eval()
    theirs = work.network(model)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, *work.SHAPE)
    torch.testing.assert_close(theirs(x), ours(x), rtol=0, atol=0)


@pytest.mark.parametrize("epochs", [1, 3])
def test_the_plain_loop_and_the_library_agree_on_full_batches(
    programs: dict[str, ModuleType], epochs: int
) -> None:
    shared = programs["peer_work"]
    work = shared.make_work(shared.Case("fedavg", "logistic", 100))
    weights = {}
    for name in ("run_plain", "run_tailorfl"):
        job = shared.Job(epochs, work.case.samples, shared.CHECK_LR, rounds=2)
        programs[name].run(work, Path(), (job,))
        cpu, wall = job.seconds()
        assert len(cpu) == len(wall) == 2
        assert min(cpu) > 0
        weights[name] = job.weights
    change = max((weights["run_plain"][n] - work.init[n]).abs().max().item() for n in work.init)
    for name, ours in weights["run_tailorfl"].items():
        torch.testing.assert_close(ours, weights["run_plain"][name], rtol=0, atol=1e-3 * change)


def test_weights_are_compared_by_the_distance_of_all_of_them(
    programs: dict[str, ModuleType], tmp_path: Path
) -> None:
    """A ReLU that flips moves one row of weights by little; a hundredth of the rate is a difference."""
    shared, compare = programs["peer_work"], programs["compare"]
    work = shared.make_work(shared.Case("fedavg", "cnn2", 2))
    change = {name: torch.randn(t.shape) for name, t in work.init.items()}
    exact = {name: t + change[name] for name, t in work.init.items()}
    flipped = {name: t.clone() for name, t in exact.items()}
    largest = max(t.abs().max() for t in change.values())
    flipped["fc1.weight"][7] += 3e-3 * largest
    rate = {name: t + 1.01 * change[name] for name, t in work.init.items()}
    off = {}
    for name, weights in (("exact", exact), ("flipped", flipped), ("rate", rate)):
        torch.save(weights, tmp_path / f"{name}.pt")
        off[name] = compare.difference(tmp_path / f"{name}.pt", tmp_path / "exact.pt", work)
    row = work.init["fc1.weight"][7].numel()
    norm = torch.cat([t.flatten() for t in change.values()]).norm()
    assert off["flipped"] == pytest.approx(float(3e-3 * largest * row**0.5 / norm), rel=1e-3)
    assert off["rate"] == pytest.approx(0.01, rel=1e-3)
    assert off["exact"] == 0 < compare.TOLERANCE < off["rate"]


def test_a_client_left_out_is_a_difference(programs: dict[str, ModuleType], tmp_path: Path) -> None:
    shared, plain, compare = (programs[name] for name in ("peer_work", "run_plain", "compare"))
    work = shared.make_work(shared.Case("fedavg", "logistic", 100))
    for clients in (100, 99):
        case = replace(work.case, clients=clients)
        job = shared.Job(1, case.samples, shared.CHECK_LR, rounds=1)
        plain.run(replace(work, case=case), Path(), (job,))
        torch.save(job.weights, tmp_path / f"{clients}.pt")
    off = compare.difference(tmp_path / "99.pt", tmp_path / "100.pt", work)
    assert off > compare.TOLERANCE
