"""A deployment gives the states, models and metrics of the simulation, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.federation import (
    TRAIN,
    deployed,
    experiment,
    is_simulated,
    played_again,
    records_are_equal,
    same,
    server_state,
    store_of,
)
from methods.settings import NAMES, make
from methods.settings import row as quick_options
from tailorfl.deploy.client_session import member_of
from tailorfl.deploy.experiment import for_deployment
from tailorfl.deploy.serving import host_experiment
from tailorfl.deploy.transport import InProcessTransport
from tailorfl.engines.devices import HOST, available
from tailorfl.errors import ConfigError
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.report.result import ExperimentResult
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.experiment import ExperimentConfig

DYNAMIC = {"kind": "dynamic", "patience": 1, "tol": 0.5, "values": [0.5, 2.0]}
PUBLIC = {"name": "digits", "clients": 4, "samples": 400, "public": "digits", "public_samples": 40}
TWO = {"name": "mlp", "hidden": [8], "larger": [{"name": "mlp", "hidden": [12]}]}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "fedavg": ("fedavg", {}),
    "fedavg, half of the clients": ("fedavg", {"fraction": 0.5, "rounds": 3}),
    "ditto": ("ditto", {}),
    "fedrep": ("fedrep", {}),
    "perada": ({"name": "perada", "distil": {"steps": 3}}, {"data": PUBLIC}),
    "fedclup": (
        {"name": "fedclup", "lr_rule": "deterministic", "smoothness": 5, "schedule": DYNAMIC},
        {"rounds": 4},
    ),
    "perfed_ckt": ("perfed_ckt", {"model": TWO, "rounds": 3, "data": PUBLIC}),
    "plgu_lf": ("plgu_lf", {}),
    "scaffold": ("scaffold", {"fraction": 0.5, "rounds": 3}),
    "fedfomo": ("fedfomo", {"rounds": 3}),
    "l2gd": ({"name": "l2gd", "lam": 0.3, "p": 0.5}, {"rounds": 4}),
    "pfedhn": ("pfedhn", {}),
    "federated_trees": ("federated_trees", {"rounds": 3}),
    "local_trees": ({"name": "local_trees", "max_iter": 3}, {}),
    "robust": ("fedavg", {"server": {"robust": "median"}}),
    "fedbn": ("fedbn", {"model": {"name": "mlp", "hidden": [8], "norm": "batch"}}),
    "sample-level privacy": ("ditto", {"train": {**TRAIN, "dp": {"clip": 1.0, "epsilon": 8.0}}}),
    "client-level privacy": (
        "fedavg",
        {"weights": "uniform", "train": {**TRAIN, "dp": {"level": "client", "clip": 1.0, "noise": 0.5}}},
    ),
}


FIRST = ("fedavg, half of the clients", "ditto", "fedclup", "perfed_ckt", "scaffold", "client-level privacy")
"""Cases that together have all kinds of messages and states; the others are slow tests."""


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
    is_simulated(deployed(experiment({"name": name, **options}, **changes), tmp_path), tmp_path)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in FIRST else [pytest.mark.slow]) for c in CASES]
)
def test_deployed_is_simulated(case: str, tmp_path: Path) -> None:
    method, changes = CASES[case]
    result = deployed(experiment(method, **changes), tmp_path)
    are_recorded(result, is_simulated(result, tmp_path), ("accuracy",))


def are_recorded(result: ExperimentResult, sim: Simulation, metrics: tuple[str, ...]) -> None:
    """Assert that the server's records of the last round have the metrics of a simulation's models, to the bit."""
    frame = store_of(result).clients()
    last = frame[frame["round"] == frame["round"].max()].to_dict("records")
    recorded = {(row["client"], row["set"], row["model"]): row for row in last}
    rows = evaluate(sim, Protocol(("val", "local"), metrics=tuple({*metrics} - {"accuracy"})))
    assert len(rows) >= 4
    for row in rows:
        own = recorded[row["client"], row["set"], row["model"]]
        assert [own[name] for name in metrics] == [row[name] for name in metrics], row


def test_further_metrics_of_classes_are_those_of_the_simulation(tmp_path: Path) -> None:
    result = deployed(experiment("ditto", eval={"every": 0, "metrics": ["ece", "brier"]}), tmp_path)
    are_recorded(result, is_simulated(result, tmp_path), ("ece", "brier"))


@pytest.mark.slow
def test_a_client_may_be_a_new_process_for_every_message(tmp_path: Path) -> None:
    """As where it is started for each question: what was agreed on lies on the client's disk."""

    def anew(client: int) -> Callable[[bytes], bytes]:
        def answer(question: bytes) -> bytes:
            member = member_of(state=tmp_path / f"state-{client}", name=str(client))
            try:
                return member.answer(question)
            finally:
                member.close()

        return answer

    post = InProcessTransport({client: anew(client) for client in range(4)})
    try:
        is_simulated(host_experiment(post, experiment("ditto"), tmp_path / "out"), tmp_path)
    finally:
        post.close()
    assert len(list((tmp_path / "state-0" / "agreements").glob("*.json"))) == 1


@pytest.mark.parametrize("method", ["ditto", pytest.param("fedavg", marks=pytest.mark.slow)])
def test_with_the_default_settings_a_replay_is_equal_to_the_bit(method: str, tmp_path: Path) -> None:
    """As a user does it: deploy an experiment as it is by default, and play its trace again by `tailorfl run`."""
    config = experiment(method, engine={})
    result = deployed(config, tmp_path)
    again = played_again(config, tmp_path)
    same(server_state(again), server_state(result))
    records_are_equal(result, again)


@pytest.mark.parametrize(
    ("evaluation", "dropped"),
    [
        ({}, []),
        ({"final": ["local", "shifted"]}, ["shifted"]),
        ({"sets": ["val", "local", "global"]}, ["global"]),
    ],
)
def test_sets_that_no_client_has_are_named_where_somebody_chose_them(
    evaluation: dict[str, list[str]], dropped: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for_deployment(ExperimentConfig.model_validate({"eval": evaluation}))
    assert [record.args for record in caplog.records] == [tuple(dropped)] * bool(dropped)


def test_secret_cohorts_are_refused() -> None:
    """Who takes part is seen on the network, and recorded; the bound for cohorts that nobody sees would not hold."""
    private = {**TRAIN, "dp": {"level": "client", "clip": 1.0, "noise": 0.5}}
    settings: dict[str, Any] = {"weights": "uniform", "sampling": "bernoulli", "train": private}
    with pytest.raises(ConfigError, match="sampling=uniform"):
        for_deployment(experiment("fedavg", fraction=0.5, **settings))
    for_deployment(experiment("fedavg", **settings))


@pytest.mark.parametrize("name", ["auto", "tf32"])
def test_a_precision_in_which_clients_could_not_compute_alike_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.precision={name}"):
        for_deployment(ExperimentConfig.model_validate({"engine": {"precision": name}}))


@pytest.mark.slow
@pytest.mark.skipif("bfloat16" not in available(HOST), reason="needs a processor that multiplies bfloat16")
def test_deployed_clients_compute_in_bfloat16_as_the_simulation(tmp_path: Path) -> None:
    config = experiment("ditto", engine={"name": "sequential", "precision": "bfloat16"})
    is_simulated(deployed(config, tmp_path), tmp_path)
