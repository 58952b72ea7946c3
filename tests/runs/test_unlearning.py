"""Unlearning: to the bit, a run without a client is that of a federation made by hand which never had it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import tailorfl
from cli.commands import invoke
from methods.settings import NAMES, make
from methods.small import simulation
from tailorfl.data.build import build
from tailorfl.data.federation import Federation
from tailorfl.data.own import from_table
from tailorfl.errors import ConfigError
from tailorfl.evaluation.protocols import evaluate
from tailorfl.partition.rows import Ints
from tailorfl.rounds.client_privacy import ClientDP
from tailorfl.rounds.participation import ClientOutcome, RoundTrace
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs import manifest
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.eval_schedule import protocol_of
from tailorfl.runs.files import read_lines
from tailorfl.runs.folders import experiment_in
from tailorfl.runs.job import Job
from tailorfl.runs.privacy import spent
from tailorfl.runs.store import RunStore
from tailorfl.runs.unlearning import NAME
from tailorfl.settings.loading import load
from tailorfl.testing import small
from tailorfl.testing.small import assert_same, everything, personal

SMALL: dict[str, Any] = {
    "seeds": [0],
    "methods": ["fedavg", "ditto"],
    "data": {"samples": 200, "clients": 5},
    "model": "logistic",
    "rounds": 3,
    "fraction": 0.6,
    "engine": "sequential",
    "eval": {"every": 1},
}
LEFT = 2
"""Number of the client that is unlearned; it takes part in the first of the three rounds."""
BY_PLACES = {
    "apple": "clients weigh the cores of all places",
    "heurfedamp": "its own weight is 1/N by default",
    "pfedhn": "embeddings are drawn for all places at once",
    "plgu_ghn": "embeddings are drawn for all places at once",
}
"""Methods whose first state depends on the number of places: with an empty one they are not those of N − 1."""


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read_lines(file)]


def others_alone(full: Federation, client: int) -> Federation:
    """Return the federation of everybody else, made by hand, whose source has no sample of the client."""
    taken = np.concatenate([part[client] for part in (full.train, full.val, full.test)])
    kept = np.setdiff1d(np.arange(len(full.source)), taken)
    place = np.full(len(full.source), -1)
    place[kept] = np.arange(len(kept))
    source = replace(
        full.source,
        x=full.source.x[torch.from_numpy(kept)],
        y=full.source.y[torch.from_numpy(kept)],
        test=None,
        groups={},
        group_names={},
    )

    def renumbered(part: Any) -> list[Ints]:
        return [place[rows] if i != client else np.empty(0, dtype=np.int64) for i, rows in enumerate(part)]

    return Federation(
        source,
        renumbered(full.train),
        renumbered(full.val),
        renumbered(full.test),
        full.names,
        full.num_clients,
        server=place[full.server],
        public=full.public,
        shifted=full.shifted,
    )


def remembered(folder: Path, asks_all: bool, clients: int) -> list[RoundTrace]:
    """Return the trace of a job as its records have it, without the client."""
    if (folder / "trace.jsonl").is_file():
        traces = []
        for line in lines(folder / "trace.jsonl"):
            answers = tuple(ClientOutcome(**a) for a in line["answers"] if a["client"] != LEFT)
            sampled = tuple(i for i in line["sampled"] if i != LEFT)
            traces.append(RoundTrace(line["round"], sampled, answers, line.get("seconds")))
        return traces
    rounds = []
    for record in lines(folder / "rounds.jsonl"):
        cohort = range(clients) if asks_all else record["clients"]
        asked = tuple(ClientOutcome(i) for i in cohort if i != LEFT)
        rounds.append(RoundTrace(record["round"], tuple(i for i in record["clients"] if i != LEFT), asked))
    return rounds


def by_hand(job: Job, results: Path) -> Simulation:
    """Return the run that never had the client, of the trace in `results`."""
    full = make_federation(job.config, job.seed)
    system = (
        job.config.system.model_copy(update={"trace": str(results)})
        if job.config.system.is_simulated
        else None
    )
    config = job.config if system is None else job.config.model_copy(update={"system": system})
    sim = make_simulation(Job(config, job.method, job.seed), others_alone(full, LEFT))
    if sim.method.pooled:
        for _ in range(job.rounds):
            sim.step()
        return sim
    for trace in remembered(results / job.folder, sim.method.participation == "all", full.num_clients):
        sim.step(trace=trace)
    return sim


def assert_never_had(results: Path, unlearned: Path) -> int:
    """Compare all tensors, records and ledgers of jobs with those of runs by hand; returns how many jobs."""
    config = experiment_in(results)
    jobs = [Job(config, method, seed) for seed in config.seeds for method in config.methods]
    for job in jobs:
        sim = by_hand(job, results)
        store = RunStore.open(unlearned / job.folder, readonly=True)
        checkpoint = store.latest_checkpoint()
        assert checkpoint is not None, job.name
        stored, tensors = checkpoint[1], sim.dump()[0]
        assert stored.keys() >= tensors.keys(), job.name
        for name, tensor in tensors.items():
            assert torch.equal(stored[name], tensor), f"{job.name}: {name}"
        if job.config.eval.select == "last":
            records = evaluate(sim, protocol_of(config, final=True), ())
            kept = [r for r in lines(unlearned / job.folder / "clients.jsonl") if r["round"] == sim.round]
            assert plain(kept) == plain(records), job.name
        assert not any(r["client"] == LEFT for r in lines(unlearned / job.folder / "clients.jsonl"))
        summary = json.loads((unlearned / job.folder / "summary.json").read_text())
        assert summary["traffic"] == sim.traffic.as_dict(), job.name
        account = spent(job, sim)
        if account is not None:
            assert (unlearned / job.folder / "privacy.csv").read_text() == account.csv(), job.name
            epsilons = [account.epsilons[i][0] for i in range(sim.participants) if i != LEFT]
            assert summary["privacy"]["epsilon"]["min"] == min(epsilons), job.name
    return len(jobs)


def plain(records: list[dict[str, Any]]) -> list[str]:
    """Return records as text, so that NaN equals NaN; those of the cohort apart, which depend on the last round."""
    return [json.dumps(r) for r in json.loads(json.dumps(records)) if r["set"] != "participants"]


def unlearned(tmp_path: Path, settings: dict[str, Any]) -> tuple[Path, Path]:
    """Return the folders of a run, and of the same without the client."""
    tailorfl.run(settings, out=tmp_path / "with", progress=False)
    invoke("unlearn", tmp_path / "with", "--client", LEFT, "--out", tmp_path / "without", "--quiet")
    return tmp_path / "with", tmp_path / "without"


def test_a_run_is_that_which_never_had_the_client_and_the_certificate_says_so(tmp_path: Path) -> None:
    results, without = unlearned(tmp_path, SMALL)
    assert assert_never_had(results, without) == 2
    facts = json.loads((without / NAME).read_text())
    names = [f"client-{i}" for i in range(5)]
    assert facts["client"] == {"name": names[LEFT], "number": LEFT}
    for job in facts["jobs"]:
        rounds = lines(results / job["job"] / "rounds.jsonl")
        assert job["rounds_with_client"] == [r["round"] for r in rounds if LEFT in r["clients"]] != []
        for key in ("data", "trace", "state"):
            assert job[key]["with"] != job[key]["without"]
    assert experiment_in(without).data.excluded_clients == (names[LEFT],)
    # An ordinary result folder: read, extended, unlearned again, and its models answer.
    invoke("check", without)
    invoke("report", without)
    invoke("run", "--extend", without, "rounds=4", "--quiet")
    assert (
        "client-2" not in invoke("export", without, "--client", LEFT, "--out", tmp_path / "m", code=2).output
    )
    invoke("unlearn", without, "--client", 0, "--out", tmp_path / "two", "--quiet")
    assert experiment_in(tmp_path / "two").data.excluded_clients == (names[LEFT], names[0])


def test_a_replay_is_planned_without_training_and_continued_by_the_same_command(tmp_path: Path) -> None:
    tailorfl.run(SMALL, out=tmp_path / "with", progress=False)
    words = ("unlearn", tmp_path / "with", "--client", "client-2", "--out", tmp_path / "without", "--quiet")
    assert "6 rounds" in invoke(*words, "--dry-run").stdout
    assert not (tmp_path / "without").exists()
    invoke(*words)
    whole = (tmp_path / "without" / "ditto" / "seed-0" / "rounds.jsonl").read_bytes()
    (tmp_path / "without" / NAME).unlink()
    with RunStore.open(tmp_path / "without" / "ditto" / "seed-0") as store:
        store.truncate_after(0)
        store.mark("interrupted")
    invoke(*words)
    assert (tmp_path / "without" / NAME).is_file()
    again = (tmp_path / "without" / "ditto" / "seed-0" / "rounds.jsonl").read_bytes()
    assert len(again.splitlines()) == len(whole.splitlines()) == 3


@pytest.mark.parametrize(
    "name",
    [name if name in ("scaffold", "cfl") else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def test_an_empty_last_place_is_no_place(name: str) -> None:
    """N − 1 clients, and N of which the last one is left out, have the same states and models, to the bit."""
    base = small.federation((15, 4, 7, 9, 3, 6))
    last, kept = 5, np.array([0, 1, 2, 3, 4, 6])
    parts = [[part[i] for i in kept] for part in (base.train, base.val, base.test)]
    fewer = Federation(base.source, *parts, tuple(base.names[i] for i in kept), last, public=base.public)
    method = make(name)
    cohorts = [(0, 2), (1, 2, 3, 4), (0, 1, 2, 3, 4), (3, 4)]
    states = []
    for federation in (base.without([base.names[last]]), fewer):
        sim = simulation(method, data=federation)
        for number, cohort in enumerate(cohorts, start=1):
            asked = range(last) if method.participation == "all" else cohort
            trace = RoundTrace(number, cohort, tuple(map(ClientOutcome, asked)))
            sim.step(trace=None if method.pooled else trace)
        everyone = range(1 if method.pooled else last)
        states.append({**everything(sim, everyone), **personal(sim, range(last))})
    with_place, without_place = states
    differing = {
        path
        for path, tensor in without_place.items()
        if not torch.equal(of_members(with_place[path], tensor), tensor)
    }
    assert bool(differing) == (name in BY_PLACES), sorted(differing)[:5]


def of_members(tensor: Tensor, like: Tensor) -> Tensor:
    """Return what the server keeps of each place, of those that are in `like`."""
    if tensor.ndim != like.ndim or any(a < b for a, b in zip(tensor.shape, like.shape, strict=True)):
        return tensor
    return tensor[tuple(slice(length) for length in like.shape)]


CASES: dict[str, dict[str, Any]] = {
    "cohorts drawn by samples": {"sampling": "proportional", "weights": "samples"},
    "class weights of all": {"train": {"class_weights": "federated"}},
    "private samples": {"train": {"dp": {"clip": 1.0, "epsilon": 20.0}}},
    "private clients": {
        "train": {"dp": {"level": "client", "clip": 1.0, "noise": 0.5}},
        "weights": "uniform",
    },
    "stragglers": {
        "system": {
            "speed": 20.0,
            "stragglers": {"share": 0.5, "factor": 5, "redraw": "round"},
            "deadline": 6.0,
        }
    },
    "a buffer": {
        "fraction": 1.0,
        "system": {"speed": {"kind": "lognormal", "median": 30.0}, "mode": "buffered", "buffer": 2},
    },
    "best rounds": {"eval": {"every": 1, "select": "val"}, "methods": ["ditto"]},
    "a malicious client": {"system": {"malicious": {"clients": [LEFT], "kind": "scale"}}},
    "vectorized": {"engine": "vectorized", "methods": ["centralized", "fedavg", "scaffold"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_whatever_the_client_touched_is_as_without_it(case: str, tmp_path: Path) -> None:
    assert assert_never_had(*unlearned(tmp_path, {**SMALL, "rounds": 5, **CASES[case]}))


def test_a_secret_cohort_is_that_of_one_client_fewer() -> None:
    """Every client is drawn by itself, so without the last one the sums, the noise and the mean are of the others."""
    base = small.federation((15, 4, 7, 9, 3, 6))
    last, kept = 5, np.array([0, 1, 2, 3, 4, 6])
    parts = [[part[i] for i in kept] for part in (base.train, base.val, base.test)]
    fewer = Federation(base.source, *parts, tuple(base.names[i] for i in kept), last)
    settings: dict[str, Any] = {"sampling": "bernoulli", "fraction": 0.5, "weights": "uniform"}
    private = {**settings, "client_dp": ClientDP(1.0, 0.5)}
    states = [
        everything(simulation("fedavg", data=data, rounds=4, **private), range(last))
        for data in (base.without([base.names[last]]), fewer)
    ]
    assert_same(*states)


def test_the_engine_of_the_run_is_kept(tmp_path: Path) -> None:
    """An automatic engine does not measure again, and might choose the other one."""
    results = tmp_path / "with"
    tailorfl.run({**SMALL, "methods": ["fedavg"], "engine": "auto"}, out=results, progress=False)
    chosen = lines(results / "fedavg" / "seed-0" / "rounds.jsonl")[-1]["engine"]
    other = {"sequential": "vectorized", "vectorized": "sequential"}[chosen]
    file = results / "fedavg" / "seed-0" / "rounds.jsonl"
    file.write_text(
        file.read_text().replace(f'"{chosen}"', f'"{other}"')
    )  # as if it had chosen the other one
    manifest.renew(results / "fedavg" / "seed-0")
    invoke("unlearn", results, "--client", LEFT, "--out", tmp_path / "without", "--quiet")
    rounds = lines(tmp_path / "without" / "fedavg" / "seed-0" / "rounds.jsonl")
    assert {record["engine"] for record in rounds} == {other}


@pytest.mark.slow
def test_every_method_is_unlearned(tmp_path: Path) -> None:
    used = [{**m, "rounds": None} for m in load("all_methods").to_dict()["methods"]]
    settings = {
        **SMALL,
        "methods": used,
        "model": {"name": "mlp", "hidden": [8], "norm": "group"},
        "data": {
            "samples": 400,
            "clients": 5,
            "public": "digits",
            "public_samples": 20,
            "partition_options": {"alpha": 1.0},
        },
    }
    assert {m["name"] for m in used} == set(NAMES)
    assert assert_never_had(*unlearned(tmp_path, settings)) == len(used)


@pytest.mark.slow
def test_trees_and_adapters_are_unlearned(tmp_path: Path) -> None:
    trees: list[Any] = [{"name": name, "max_iter": 3} for name in ("local_trees", "pooled_trees")]
    settings = {**SMALL, "methods": [*trees, {"name": "federated_trees", "max_iter": 1}]}
    assert assert_never_had(*unlearned(tmp_path / "trees", settings)) == 3
    pytest.importorskip("peft", reason="pip install 'tailorfl[text]'")
    ranks = [{"name": name, "ranks": [2, 1]} for name in ("flexlora", "hetlora", "flora")]
    plain = ["fedit", "fedlora", "ffa_lora", "fedsa_lora", "feddpa"]
    model = {"name": "vit", "hidden": 16, "layers": 1, "lora": 2, "lora_dropout": 0.0}
    settings = {**SMALL, "methods": [*plain, *ranks], "model": model}
    assert assert_never_had(*unlearned(tmp_path / "adapters", settings)) == 8


def test_constants_of_a_table_are_fitted_without_the_client() -> None:
    """As of the table that has no row of it, also where it alone has a word or the largest numbers."""
    rng = np.random.default_rng(0)
    sites = np.repeat(["ash", "elm", "oak"], 20)
    frame = pd.DataFrame({"site": sites, "age": rng.normal(50, 9, 60), "pain": rng.choice(["a", "b"], 60)})
    frame.loc[frame["site"] == "elm", "age"] += 1000
    frame.loc[frame["site"] == "elm", "pain"] = "c"
    frame["ill"] = rng.integers(0, 2, 60)
    for normalise in ("federated", "client"):
        settings: dict[str, Any] = {
            "normalise": normalise,
            "partition": "natural",
            "split": {"train": 0.8, "test": 0.2},
        }
        source = from_table(frame, label="ill", client="site")
        excluded = build(source=source, excluded_clients=["elm"], **settings)
        fewer = from_table(frame[frame["site"] != "elm"].reset_index(drop=True), label="ill", client="site")
        expected = build(source=fewer, **settings)
        kept = torch.from_numpy(np.flatnonzero(sites != "elm"))
        x = expected.source.x
        assert excluded.members == (0, 2)
        if normalise == "federated":
            trained = np.concatenate([excluded.train[i] for i in excluded.members])
            ages = frame["age"].to_numpy()[trained]
            scaled = (frame["age"].to_numpy() - ages.mean()) / ages.std(ddof=1)
            assert torch.allclose(
                excluded.source.x[kept, 0], torch.from_numpy(scaled).float()[kept], atol=1e-5
            )
        assert excluded.source.x.shape[1] == x.shape[1]  # no column of the word that it alone has


def test_what_cannot_be_unlearned_is_refused(tmp_path: Path) -> None:
    tailorfl.run({**SMALL, "methods": ["fedavg"], "rounds": 1}, out=tmp_path / "a", progress=False)
    assert "client-3" in invoke("unlearn", tmp_path / "a", "--client", "client-9", code=2).output
    with RunStore.open(tmp_path / "a" / "fedavg" / "seed-0") as store:
        store.mark("interrupted")
    assert "--resume" in invoke("unlearn", tmp_path / "a", "--client", 1, code=1).output
    held_out = {**SMALL, "methods": ["fedavg"], "rounds": 1, "data": {**SMALL["data"], "heldout_clients": 1}}
    tailorfl.run(held_out, out=tmp_path / "b", progress=False)
    assert "held out" in invoke("unlearn", tmp_path / "b", "--client", 5, code=2).output
    with pytest.raises(ConfigError, match="no client is left"):
        tailorfl.run(
            {**SMALL, "data": {**SMALL["data"], "excluded_clients": [f"client-{i}" for i in range(5)]}}
        )
