"""A deployment gives the states, models and metrics of the simulation, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.federating import TRAIN, deployed, experiment, private_state, same, server_state, simulated
from methods.settings import NAMES, make
from methods.settings import row as quick_options
from tailorfl.deploy.client_session import member_of
from tailorfl.deploy.transport import InProcessTransport
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.report.result import ExperimentResult
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.store import RunStore
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.training import tree

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


def states_are_the_same(config: ExperimentConfig, folder: Path) -> tuple[ExperimentResult, Simulation]:
    """Run both ways and compare the server's and every client's states to the bit."""
    result, sim = deployed(config, folder), simulated(config)
    same(server_state(result), dict(tree.leaves(sim.server)))
    for client in range(4):
        store = next(group.states for group in sim.groups if client in group.clients)
        if client in store.clients:
            own = {p: t[0] for p, t in tree.leaves(store.get((client,)))}
            same(private_state(folder, config, client), own)
    return result, sim


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
    states_are_the_same(experiment({"name": name, **options}, **changes), tmp_path)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in FIRST else [pytest.mark.slow]) for c in CASES]
)
def test_deployed_is_simulated(case: str, tmp_path: Path) -> None:
    method, changes = CASES[case]
    config = experiment(method, **changes)
    result, sim = states_are_the_same(config, tmp_path)
    store = RunStore.open(next(result.path.glob("*/seed-5")), readonly=True)
    frame = store.clients()
    for row in evaluate(sim, Protocol(("val", "local"))):
        mine = frame[
            (frame["round"] == config.rounds)
            & (frame["client"] == row["client"])
            & (frame["set"] == row["set"])
        ]
        found = mine[mine["model"] == row["model"]].iloc[0]
        assert found["accuracy"] == row["accuracy"], row


def test_further_metrics_of_classes_are_those_of_the_simulation(tmp_path: Path) -> None:
    config = experiment("ditto", eval={"every": 0, "metrics": ["ece", "brier"]})
    result, sim = deployed(config, tmp_path), simulated(config)
    frame = RunStore.open(next(result.path.glob("*/seed-5")), readonly=True).clients()
    told = {(row["client"], row["set"], row["model"]): row for row in frame.to_dict("records")}
    rows = evaluate(sim, Protocol(("local",), metrics=("ece", "brier")))
    assert len(rows) >= 4
    for row in rows:
        mine = told[row["client"], row["set"], row["model"]]
        assert [mine["ece"], mine["brier"]] == [row["ece"], row["brier"]]


def test_a_client_may_be_a_new_process_for_every_message(tmp_path: Path) -> None:
    """As in a Flower app of `tailorfl deploy init`: what was agreed on lies on the client's disk."""

    def anew(client: int) -> Callable[[bytes], bytes]:
        def answer(asked: bytes) -> bytes:
            member = member_of(state=tmp_path / f"state-{client}", name=str(client))
            try:
                return member.answer(asked)
            finally:
                member.close()

        return answer

    config = experiment("ditto")
    post = InProcessTransport({client: anew(client) for client in range(4)})
    try:
        result = deployed(config, tmp_path, post=post)
    finally:
        post.close()
    sim = simulated(config)
    same(server_state(result), dict(tree.leaves(sim.server)))
    for client in range(4):
        own = {p: t[0] for p, t in tree.leaves(sim.states.get((client,)))}
        same(private_state(tmp_path, config, client), own)
    assert len(list((tmp_path / "state-0" / "agreements").glob("*.json"))) == 1
