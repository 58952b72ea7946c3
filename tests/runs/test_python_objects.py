"""A model and methods passed as Python objects are those of the same names and options."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tailorfl
from tailorfl import modules
from tailorfl.errors import ConfigError, RunError
from tailorfl.methods.ditto import Ditto

SMALL: dict[str, Any] = {
    "data": {"clients": 3, "samples": 90},
    "rounds": 1,
    "seeds": 1,
    "engine": "sequential",
}


class Mine(Ditto):
    """A method of a user."""

    name = "mine"
    title = "Mine"


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


def make(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    return network()


def losses(result: tailorfl.ExperimentResult) -> list[list[float]]:
    """Of every method, the losses of its records."""
    return [records["loss"].tolist() for _, records in result.clients.groupby("label", sort=False)]


@pytest.mark.parametrize(
    "passed", [[Ditto(lam=0.5)], [{"name": Ditto(lam=0.5)}], [{"name": Ditto, "lam": 0.5}]]
)
def test_a_method_is_the_one_of_its_name_and_options(passed: list[Any], tmp_path: Path) -> None:
    named = tailorfl.run(methods=[{"name": "ditto", "lam": 0.5}], out=tmp_path / "named", **SMALL)
    result = tailorfl.run(methods=passed, out=tmp_path / "passed", **SMALL)
    assert losses(result) == losses(named)
    assert result.table.index.tolist() == ["ditto"]


def test_a_class_of_a_user_is_a_method_of_its_own(tmp_path: Path) -> None:
    methods = [Ditto(lam=0.5), Mine(lam=0.5), Mine]
    result = tailorfl.run(methods=methods, out=tmp_path / "out", **{**SMALL, "rounds": 2})
    first, second, third = losses(result)
    assert first == second != third
    assert len(set(result.table.index)) == 3


def test_a_module_is_where_every_seed_starts(tmp_path: Path) -> None:
    net = network()
    still = {**SMALL, "seeds": 2, "train": {"lr": 1e-30}}
    result = tailorfl.run(model=net, method="fedavg", out=tmp_path / "out", **still)
    for seed in (0, 1):
        trained = result.model("global", seed=seed).state_dict()
        assert sorted(map(str, trained.values())) == sorted(map(str, net.state_dict().values()))


def test_a_function_makes_the_model(tmp_path: Path) -> None:
    made = tailorfl.run(model=make, method="fedavg", out=tmp_path / "made", **SMALL)
    given = tailorfl.run(model={"name": network()}, method="fedavg", out=tmp_path / "given", **SMALL)
    assert losses(made) == losses(given)


def test_a_run_goes_on_with_the_same_module_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, folder = network(), tmp_path / "out"
    tailorfl.run(model=net, method="fedavg", out=folder, **SMALL)
    longer = tailorfl.run(out=folder, extend=True, rounds=2)
    assert longer.rounds["round"].max() == 2
    other = copy.deepcopy(net)
    with torch.no_grad():
        other[1].bias += 1
    with pytest.raises(RunError, match="model"):
        tailorfl.run(model=other, method="fedavg", out=folder, resume=True, **{**SMALL, "rounds": 2})
    monkeypatch.setattr(modules, "_GIVEN", {})  # as in another process
    with pytest.raises(ConfigError, match="given:"):
        tailorfl.run(out=folder, resume=True)


def test_what_no_module_holds_cannot_be_named() -> None:
    with pytest.raises(ConfigError, match="lambda"):
        tailorfl.run(model=lambda shape, outputs: network(), method="fedavg", **SMALL)


def test_completion_offers_what_is_public_alone() -> None:
    assert set(dir(tailorfl)) == {*tailorfl.__all__, "__version__"}
