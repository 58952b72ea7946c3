"""A deployment gives the states and models of the simulation to the bit, and its metrics."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from deploy.federation import (
    TRAIN,
    Deployed,
    InProcessTransport,
    deployed,
    experiment,
    records_are_equal,
    same,
    small,
)
from methods.settings import NAMES, make
from methods.settings import row as quick_options
from tailorfl.deploy.client_session import member_of
from tailorfl.deploy.experiment import for_deployment
from tailorfl.deploy.serving import host_experiment
from tailorfl.engines.devices import HOST, available
from tailorfl.errors import ConfigError
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.report.experiment import run_experiment
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.experiment import ExperimentConfig

DYNAMIC = {"kind": "dynamic", "patience": 1, "tol": 0.5, "values": [0.5, 2.0]}
PUBLIC = {"name": "digits", "clients": 4, "samples": 400, "public": "digits", "public_samples": 40}
TWO = {"name": "mlp", "hidden": [8], "larger": [{"name": "mlp", "hidden": [12]}]}
DP: dict[str, Any] = {**TRAIN, "dp": {"level": "client", "clip": 1.0, "noise": 0.5}}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "personal states and other metrics": ("ditto", {"eval": {"every": 0, "metrics": ["ece", "brier"]}}),
    "a schedule": (
        {"name": "fedclup", "lr_rule": "deterministic", "smoothness": 5, "schedule": DYNAMIC},
        {"rounds": 4},
    ),
    "models of two sizes": ("perfed_ckt", {"model": TWO, "rounds": 3, "data": PUBLIC}),
    "corrections of half of the clients": ("scaffold", {"fraction": 0.5, "rounds": 3}),
    "client-level privacy": ("fedavg", {"weights": "uniform", "train": DP}),
}
SLOW: dict[str, tuple[Any, dict[str, Any]]] = {
    "half of the clients": ("fedavg", {"fraction": 0.5, "rounds": 3}),
    "random rounds": ({"name": "l2gd", "lam": 0.3, "p": 0.5}, {"rounds": 4}),
    "robust": ("fedavg", {"server": {"robust": "median"}}),
    "buffers": ("fedbn", {"model": {"name": "mlp", "hidden": [8], "norm": "batch"}}),
    "sample-level privacy": ("ditto", {"train": {**TRAIN, "dp": {"clip": 1.0, "epsilon": 8.0}}}),
}


LORA = {"name": "vit", "hidden": 16, "layers": 1, "lora": 2, "lora_dropout": 0.0}
OF_LORA = ("fedit", "fedlora", "ffa_lora", "fedsa_lora", "feddpa", "flexlora", "hetlora", "flora")
OPTIONS: dict[str, dict[str, Any]] = {
    "apple": {"downloads": 1},
    **{name: {"ranks": [2, 1]} for name in ("flexlora", "hetlora", "flora")},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in NAMES if not make(n).pooled])
def test_every_method_deployed_is_the_simulation(name: str, tmp_path: Path) -> None:
    """Methods of LoRA on a transformer, with ranks that differ between clients where a method has them."""
    changes: dict[str, Any] = {"data": PUBLIC, "rounds": 3}
    if name in OF_LORA:
        pytest.importorskip("peft", reason="pip install 'tailorfl[text]'")
        changes["model"] = LORA
    options = {**quick_options(name).options, **OPTIONS.get(name, {})}
    result = deployed(experiment({"name": name, **options}, **changes), tmp_path)
    are_recorded(result, result.is_simulated(), ())


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_deployed_is_simulated(case: str, tmp_path: Path) -> None:
    method, changes = {**CASES, **SLOW}[case]
    result = deployed(experiment(method, **changes), tmp_path)
    are_recorded(result, result.is_simulated(), tuple(result.config.eval.metrics))


def are_recorded(result: Deployed, sim: Simulation, metrics: tuple[str, ...]) -> None:
    """Assert that the server's records of the last round have the metrics of a simulation's models.

    A simulation predicts the rows of all clients at once; on some processors a row's last digit depends on how many.
    """
    frame = result.store.clients()
    last = frame[frame["round"] == frame["round"].max()].to_dict("records")
    recorded = {(row["client"], row["set"], row["model"]): row for row in last}
    rows = evaluate(sim, Protocol(("val", "local"), metrics=metrics))
    assert len(rows) >= 4
    for row in rows:
        own = recorded[row["client"], row["set"], row["model"]]
        assert own["accuracy"] == row["accuracy"]
        assert [own[name] for name in metrics] == pytest.approx([row[name] for name in metrics], rel=1e-6)


@pytest.mark.slow
def test_a_client_may_be_a_new_process_for_every_message(tmp_path: Path) -> None:
    """As where it is started for each question: what was agreed on lies on the client's disk."""

    def anew(client: int) -> Callable[[bytes], bytes]:
        def answer(question: bytes) -> bytes:
            with closing(member_of(state=tmp_path / f"state-{client}", name=str(client))) as member:
                return member.answer(question)

        return answer

    with closing(InProcessTransport({client: anew(client) for client in range(4)})) as post:
        result = host_experiment(post, experiment("ditto"), tmp_path / "out")
    Deployed(result, tmp_path).is_simulated()
    assert len(list((tmp_path / "state-0" / "agreements").glob("*.json"))) == 1


def test_a_method_gets_the_rounds_that_its_budget_pays_for(tmp_path: Path) -> None:
    """FedRep sends 520 of 610 numbers: four rounds cost what three of FedAvg do, and clients take part in all."""
    result = deployed(small("fedrep", rounds=3, budget="bytes"), tmp_path, 3)
    assert [one.round for one in result.trace] == [1, 2, 3, 4]
    assert result.fates == {"accepted"}
    same(result.played_again().server_state, result.server_state)


def test_with_the_default_settings_a_replay_is_equal_to_the_bit(tmp_path: Path) -> None:
    """As a user does it: deploy an experiment as it is by default, and play its trace again by `tailorfl run`."""
    result = deployed(experiment("ditto", engine={}), tmp_path)
    again = result.played_again()
    same(again.server_state, result.server_state)
    records_are_equal(result, again)


@pytest.mark.parametrize(
    ("evaluation", "dropped"),
    [
        ({}, []),
        ({"final": ["local", "shifted"]}, ["shifted"]),
        ({"sets": ["val", "local", "global"]}, ["global"]),
    ],
)
def test_sets_that_no_client_has_are_named(
    evaluation: dict[str, list[str]], dropped: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for_deployment(ExperimentConfig.model_validate({"eval": evaluation}))
    assert [record.args for record in caplog.records] == [tuple(dropped)] * bool(dropped)


def test_a_simulation_is_not_continued_by_a_server(tmp_path: Path) -> None:
    """By default both write to the folder of the experiment's name."""
    config = small("fedavg", rounds=1)
    run_experiment(config, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"federation\.json"):
        deployed(config, tmp_path, 3)


def test_secret_cohorts_are_refused() -> None:
    """Who takes part is seen on the network, and recorded; the bound for cohorts that nobody sees would not hold."""
    settings: dict[str, Any] = {"weights": "uniform", "sampling": "bernoulli", "train": DP}
    with pytest.raises(ConfigError, match="sampling=uniform"):
        for_deployment(experiment("fedavg", fraction=0.5, **settings))
    for_deployment(experiment("fedavg", **settings))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        *(({"engine": {"precision": name}}, rf"engine\.precision={name}") for name in ("auto", "tf32")),
        ({"variants": {"slow": {"train": {"lr": 0.01}}}}, "slow.*variants={}"),
        ({"eval": {"select": "val"}}, r"eval\.select"),
        ({"system": {"dropout": 0.1}}, "system"),
        ({"data": {"heldout_clients": 2}}, r"data\.heldout_clients"),
    ],
)
def test_what_no_deployment_can_have_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        for_deployment(ExperimentConfig.model_validate(settings))


@pytest.mark.slow
@pytest.mark.skipif("bfloat16" not in available(HOST), reason="needs a processor that multiplies bfloat16")
def test_deployed_clients_compute_in_bfloat16_as_the_simulation(tmp_path: Path) -> None:
    config = experiment("ditto", engine={"name": "sequential", "precision": "bfloat16"})
    deployed(config, tmp_path).is_simulated()
