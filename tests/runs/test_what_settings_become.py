"""What settings become: names that only registries know, models of methods, weights, and Python objects."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tailorfl
from runs.small import facts
from tailorfl import modules
from tailorfl.data.registry import load_source
from tailorfl.errors import ConfigError, DataError, RunError
from tailorfl.methods.ditto import Ditto
from tailorfl.models import build, save_weights
from tailorfl.runs.build import check, make_model
from tailorfl.settings.experiment import OneModelConfig
from tailorfl.settings.loading import load

SMALL: dict[str, Any] = {
    "data": {"clients": 3, "samples": 90},
    "rounds": 1,
    "seeds": 1,
    "engine": "sequential",
}

# -- names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("method=dito", "Did you mean 'ditto'?"),
        ("method={name: ditto, lamb: 1}", "Did you mean 'lam'?"),
        ("method={name: ditto, lam: -1}", "lam = -1"),
        ("method={name: ditto, model: {weights: 3}}", "methods.ditto.model.weights = 3"),
        ("method={name: ditto, model: {name: mlp, hiden: [3]}}", "Did you mean 'hidden'?"),
        ("method={name: fedavg, server: {kind: adm}}", "server.kind = 'adm'"),
        ("model=mpl", "Did you mean 'mlp'?"),
        ("model={name: mlp, hiden: [3]}", "Did you mean 'hidden'?"),
        ("engine=vectorised", "Did you mean 'vectorized'?"),
        ("engine.cluster=auto", "engine.cluster=auto needs engine.workers"),
        ("data=digit", "Did you mean 'digits'?"),
        ("data.public=mnst", "Did you mean 'mnist'?"),
        ("data={name: synthetic_linear, options: {dims: 3}}", "Did you mean 'dim'?"),
        ("data.partition=dirichlt", "Did you mean 'dirichlet'?"),
        ("data={partition: dirichlet, partition_options: {alfa: 1}}", "Did you mean 'alpha'?"),
        ("data.split={train: 0.9, val: 0.9, test: 0.5}", "add up to at most 1"),
        ("published={dito: {mean: 0.5}}", "Did you mean 'ditto'?"),
        ("methods=[{name: ditto, label: a/b}, {name: local, label: 'a b'}]", "would share the folder"),
    ],
)
def test_unknown_names_have_the_nearest_one(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(load(None, [override]))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "data={name: heart, partition: natural, partition_options: {group: client}}",
        "data={name: pacs, partition: domain, heldout_domain: sketch}",
        "data.split=perfed_ckt",
        "data.split={train: 0.8, test: official}",
    ],
)
def test_valid_settings_pass(override: str) -> None:
    check(load(None, [override]))


# -- models of methods ---------------------------------------------------------------------------------------


def test_each_method_trains_and_sends_its_part_of_its_model(tmp_path: Path) -> None:
    """Changes are laid over the experiment's model; another one starts from its own defaults."""
    lines = [
        {"name": "fedavg"},
        {"name": "ditto", "model": {"trainable": "head"}},
        {"name": "fedavg", "label": "linear", "model": {"name": "logistic"}},
    ]
    model = {"name": "mlp", "hidden": [8]}
    config = load({**SMALL, "model": model, "rounds": 2, "methods": lines, "eval": {"every": 0}})
    models = [config.model_of(method) for method in config.methods]
    assert [(m.name, m.trainable, m.options) for m in models] == [
        ("mlp", None, {"hidden": [8]}),
        ("mlp", "head", {"hidden": [8]}),
        ("logistic", None, {}),
    ]
    assert load(config.to_dict()) == config
    tailorfl.run(config, out=tmp_path)
    summaries = [facts(path) for path in tmp_path.glob("*/seed-0/summary.json")]
    everything, head, logistic = 64 * 8 + 8 + 8 * 10 + 10, 8 * 10 + 10, 64 * 10 + 10
    assert {s["label"]: (s["trained_scalars"], s["traffic"]["up"]) for s in summaries} == {
        "fedavg": (everything, 6 * everything),
        "ditto": (2 * head, 6 * head),
        "linear": (logistic, 6 * logistic),
    }


def test_weights_of_the_data_folder_are_where_the_variable_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are named without the folder's path, so that recipes hold on every machine."""
    torch.manual_seed(5)
    source = load_source("digits")
    saved = build("logistic", source.input_shape, source.outputs).state_dict()
    save_weights(saved, tmp_path / "weights" / "small.safetensors")
    monkeypatch.setenv("TAILORFL_DATA", str(tmp_path))
    config = OneModelConfig(name="logistic", weights="data:weights/small.safetensors")
    started = make_model(config, source, seed=1).init(1)
    for name, tensor in saved.items():
        torch.testing.assert_close(started[name], tensor)
    with pytest.raises(DataError, match=r"'weights/other.npz' was not found"):
        make_model(config.model_copy(update={"weights": "data:weights/other.npz"}), source, seed=1).init(1)


@pytest.mark.parametrize("frozen", [True, False])
def test_weights_that_leave_layers_of_the_body_as_they_began_are_told(
    frozen: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = load_source("digits")
    weights = tmp_path / "small.safetensors"
    save_weights(build("mlp", source.input_shape, source.outputs, hidden=[6]).state_dict(), weights)
    whole = OneModelConfig(name="mlp", hidden=[6], weights=str(weights), trainable="head" if frozen else None)
    make_model(whole, source, seed=1)
    assert not caplog.records
    deeper = whole.model_copy(update={"options": {"hidden": [6, 5]}, "skip_head": True})
    make_model(deeper, source, seed=1)
    assert [("fc2.weight" in r.getMessage(), "frozen" in r.getMessage()) for r in caplog.records] == [
        (True, frozen)
    ]


# -- Python objects ------------------------------------------------------------------------------------------


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


def test_a_method_is_the_one_of_its_name_and_options(tmp_path: Path) -> None:
    methods = [
        {"name": "ditto", "label": "named", "lam": 0.5},
        Ditto(lam=0.5),
        {"name": Ditto(lam=0.5), "label": "object"},
        {"name": Ditto, "label": "class", "lam": 0.5},
        Mine(lam=0.5),
        Mine,
    ]
    result = tailorfl.run(methods=methods, out=tmp_path / "out", **{**SMALL, "rounds": 2})
    named, *alike, other = losses(result)
    assert alike == [named] * 4
    assert other != named
    assert result.table.index[1] == "ditto"
    assert len(set(result.table.index)) == 6


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
    with pytest.raises(ConfigError, match="lambda"):
        tailorfl.run(model=lambda shape, outputs: network(), method="fedavg", **SMALL)


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


def test_completion_offers_what_is_public_alone() -> None:
    assert set(dir(tailorfl)) == {*tailorfl.__all__, "__version__"}
