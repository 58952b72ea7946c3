"""Unlearning: to the bit, a run without a client is that of a federation made by hand which never had it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor

import tailorfl
from cli.commands import invoke
from methods.settings import NAMES, make
from methods.small import simulation
from runs.small import TINY, facts, records
from tailorfl.data.build import build
from tailorfl.data.federation import Federation
from tailorfl.data.own import from_table
from tailorfl.errors import ConfigError
from tailorfl.evaluation.protocols import evaluate
from tailorfl.rounds.client_privacy import ClientDP
from tailorfl.rounds.participation import ClientOutcome, RoundTrace
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.files import renew_manifest
from tailorfl.runs.folders import experiment_in
from tailorfl.runs.job import Job
from tailorfl.runs.privacy import spent
from tailorfl.runs.schedule import protocol_of
from tailorfl.runs.store import RunStore
from tailorfl.runs.trained_models import restore
from tailorfl.runs.unlearning import NAME
from tailorfl.settings.loading import load
from tailorfl.testing import small
from tailorfl.testing.small import assert_same, everything, personal

SMALL = TINY | {"methods": ["fedavg", "ditto"], "data": {"samples": 200, "clients": 5}}
SMALL |= {"fraction": 0.6, "eval": {"every": 1}}
LEFT = 2
"""Number of the client that is unlearned; it takes part in the first of the three rounds."""
QUICK = ("scaffold", "cfl")
LAST = 5
"""Number of the last client of `with_and_without_the_last`."""
BY_PLACES = {
    "apple": "clients weigh the cores of all places",
    "heurfedamp": "its own weight is 1/N by default",
    "pfedhn": "embeddings are drawn for all places at once",
    "plgu_ghn": "embeddings are drawn for all places at once",
}
"""Methods whose first state depends on the number of places: with an empty one they are not those of N − 1."""


def others_alone(full: Federation, client: int) -> Federation:
    """Return the federation of everybody else, made by hand, whose source has no sample of the client."""
    parts = (full.train, full.val, full.test)
    taken = np.concatenate([part[client] for part in parts])
    kept = np.setdiff1d(np.arange(len(full.source)), taken)
    place = np.full(len(full.source), -1)
    place[kept] = np.arange(len(kept))
    x, y = full.source.x[torch.from_numpy(kept)], full.source.y[torch.from_numpy(kept)]
    source = replace(full.source, x=x, y=y, test=None, groups={}, group_names={})
    train, val, test = (
        [place[rows] if i != client else rows[:0] for i, rows in enumerate(part)] for part in parts
    )
    return replace(full, source=source, train=train, val=val, test=test, server=place[full.server])


def remembered(folder: Path, asks_all: bool, clients: int) -> list[RoundTrace]:
    """Return the trace of a job as its records have it, without the client."""
    traces = []
    if (folder / "trace.jsonl").is_file():
        for line in records(folder / "trace.jsonl"):
            answers = tuple(ClientOutcome(**a) for a in line["answers"] if a["client"] != LEFT)
            sampled = tuple(i for i in line["sampled"] if i != LEFT)
            traces.append(RoundTrace(line["round"], sampled, answers, line.get("seconds")))
        return traces
    for record in records(folder / "rounds.jsonl"):
        cohort = tuple(i for i in record["clients"] if i != LEFT)
        asked = [i for i in range(clients) if i != LEFT] if asks_all else cohort
        traces.append(RoundTrace(record["round"], cohort, tuple(map(ClientOutcome, asked))))
    return traces


def by_hand(job: Job, results: Path) -> Simulation:
    """Return the run that never had the client, of the trace in `results`."""
    full = make_federation(job.config, job.seed)
    config = job.config
    if config.system.is_simulated:
        system = config.system.model_copy(update={"trace": str(results)})
        config = config.model_copy(update={"system": system})
    sim = make_simulation(Job(config, job.method, job.seed), others_alone(full, LEFT))
    traces = remembered(results / job.folder, sim.method.participation == "all", full.num_clients)
    for trace in traces:
        sim.step(trace=None if sim.method.pooled else trace)
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
        kept = records(unlearned / job.folder / "clients.jsonl")
        if job.config.eval.select == "last":
            expected = evaluate(sim, protocol_of(config, final=True), ())
            assert plain([r for r in kept if r["round"] == sim.round]) == plain(expected), job.name
        assert not any(r["client"] == LEFT for r in kept)
        summary = facts(unlearned / job.folder / "summary.json")
        assert summary["traffic"] == sim.traffic.as_dict(), job.name
        account = spent(job, sim)
        if account is not None:
            assert (unlearned / job.folder / "privacy.csv").read_text() == account.csv(), job.name
            epsilons = [account.epsilons[i][0] for i in range(sim.participants) if i != LEFT]
            assert summary["privacy"]["epsilon"]["min"] == min(epsilons), job.name
    return len(jobs)


def plain(lines: list[dict[str, Any]]) -> list[str]:
    """Return records as text, so that NaN equals NaN; those of the cohort apart, which depend on the last round."""
    return [json.dumps(r) for r in json.loads(json.dumps(lines)) if r["set"] != "participants"]


def unlearned(tmp_path: Path, settings: dict[str, Any]) -> tuple[Path, Path]:
    """Return the folders of a run, and of the same without the client."""
    tailorfl.run(settings, out=tmp_path / "with", progress=False)
    invoke("unlearn", tmp_path / "with", "--client", LEFT, "--out", tmp_path / "without", "--quiet")
    return tmp_path / "with", tmp_path / "without"


def test_a_run_is_that_which_never_had_the_client_and_the_certificate_says_so(tmp_path: Path) -> None:
    results, without = unlearned(tmp_path, SMALL)
    assert assert_never_had(results, without) == 2
    certificate = facts(without / NAME)
    names = [f"client-{i}" for i in range(5)]
    assert certificate["client"] == {"name": names[LEFT], "number": LEFT}
    for job in certificate["jobs"]:
        rounds = records(results / job["job"] / "rounds.jsonl")
        assert job["rounds_with_client"] == [r["round"] for r in rounds if LEFT in r["clients"]] != []
        for key in ("data", "trace", "state"):
            assert job[key]["with"] != job[key]["without"]
    assert experiment_in(without).data.excluded_clients == (names[LEFT],)
    # An ordinary result folder: read, extended, unlearned again, and its models answer.
    invoke("check", without)
    invoke("report", without)
    invoke("run", "--extend", without, "rounds=4", "--quiet")
    refused = invoke("export", without, "--client", LEFT, "--out", tmp_path / "m", code=2)
    assert "client-2" not in refused.output
    invoke("unlearn", without, "--client", 0, "--out", tmp_path / "two", "--quiet")
    assert experiment_in(tmp_path / "two").data.excluded_clients == (names[LEFT], names[0])


def test_a_replay_is_planned_without_training_and_continued_by_the_same_command(tmp_path: Path) -> None:
    tailorfl.run(SMALL, out=tmp_path / "with", progress=False)
    without = tmp_path / "without"
    words = ("unlearn", tmp_path / "with", "--client", "client-2", "--out", without, "--quiet")
    assert "6 rounds" in invoke(*words, "--dry-run").stdout
    assert not without.exists()
    invoke(*words)
    (without / NAME).unlink()
    with RunStore.open(without / "ditto" / "seed-0") as store:
        store.truncate_after(0)
        store.mark("interrupted")
    invoke(*words)
    assert (without / NAME).is_file()
    assert len(records(without / "ditto" / "seed-0" / "rounds.jsonl")) == 3


def test_results_that_were_moved_still_give_their_models(tmp_path: Path) -> None:
    """Every job has a copy of the trace that it replayed, wherever its folder is."""
    settings = {**SMALL, "methods": ["ditto"], "system": {"speed": SPEED}}
    _, without = unlearned(tmp_path, settings)
    before = restore(without).sim.dump()[0]
    moved = without.rename(tmp_path / "moved")
    after = restore(moved).sim.dump()[0]
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    invoke("unlearn", moved, "--client", 0, "--dry-run")


def test_an_experiment_that_replaces_an_unlearned_one_has_no_certificate(tmp_path: Path) -> None:
    """Nor the list of a server's clients, by which it would count as deployed."""
    settings = {**SMALL, "methods": ["fedavg"]}
    _, without = unlearned(tmp_path, settings)
    (without / "federation.json").write_text("{}")
    assert (without / NAME).is_file()
    tailorfl.run(settings, out=without, overwrite=True, progress=False)
    assert not (without / NAME).exists()
    assert not (without / "federation.json").exists()


def test_rounds_within_a_budget_are_those_of_the_remaining_clients(tmp_path: Path) -> None:
    """Cohorts of the common rounds are the same, however many rounds the work of the others allows."""
    data = {"samples": 200, "clients": 5, "partition": "dirichlet"}
    settings = {**SMALL, "methods": ["ditto"], "data": data, "rounds": 20, "budget": "gradients"}
    results, without = unlearned(tmp_path, settings)
    job = facts(without / NAME)["jobs"][0]
    before, after = (records(folder / job["job"] / "rounds.jsonl") for folder in (results, without))
    assert job["rounds"] == len(after) != len(before)
    for old, new in zip(before, after, strict=False):
        assert new["clients"] == [i for i in old["clients"] if i != LEFT]
    assert job["is_same_trace"]


def with_and_without_the_last() -> list[Federation]:
    """Return a federation whose last client of six is left out, and that of the five others."""
    base = small.federation((15, 4, 7, 9, 3, 6))
    kept = np.array([0, 1, 2, 3, 4, 6])
    parts = [[part[i] for i in kept] for part in (base.train, base.val, base.test)]
    names = tuple(base.names[i] for i in kept)
    return [
        base.without([base.names[LAST]]),
        Federation(base.source, *parts, names, LAST, public=base.public),
    ]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in NAMES]
)
def test_an_empty_last_place_is_no_place(name: str) -> None:
    """N − 1 clients, and N of which the last one is left out, have the same states and models, to the bit."""
    method = make(name)
    cohorts = [(0, 2), (1, 2, 3, 4), (0, 1, 2, 3, 4), (3, 4)]
    states = []
    for federation in with_and_without_the_last():
        sim = simulation(method, data=federation)
        for number, cohort in enumerate(cohorts, start=1):
            asked = range(LAST) if method.participation == "all" else cohort
            trace = RoundTrace(number, cohort, tuple(map(ClientOutcome, asked)))
            sim.step(trace=None if method.pooled else trace)
        everyone = range(1 if method.pooled else LAST)
        states.append({**everything(sim, everyone), **personal(sim, range(LAST))})
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


STRAGGLERS = {"share": 0.5, "factor": 5, "redraw": "round"}
SPEED = {"kind": "lognormal", "median": 30.0}
CASES: dict[str, dict[str, Any]] = {
    "cohorts drawn by samples": {"sampling": "proportional", "weights": "samples"},
    "class weights of all": {"train": {"class_weights": "federated"}},
    "private samples": {"train": {"dp": {"clip": 1.0, "epsilon": 20.0}}},
    "private clients": {
        "train": {"dp": {"level": "client", "clip": 1.0, "noise": 0.5}},
        "weights": "uniform",
    },
    "stragglers": {"system": {"speed": 20.0, "stragglers": STRAGGLERS, "deadline": 6.0}},
    "a buffer": {"fraction": 1.0, "system": {"speed": SPEED, "mode": "buffered", "buffer": 2}},
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
    drawn: dict[str, Any] = {"sampling": "bernoulli", "fraction": 0.5, "weights": "uniform"}
    sims = [
        simulation("fedavg", data=data, rounds=4, client_dp=ClientDP(1.0, 0.5), **drawn)
        for data in with_and_without_the_last()
    ]
    states = [everything(sim, range(LAST)) for sim in sims]
    assert_same(*states)


def test_the_engine_of_the_run_is_kept(tmp_path: Path) -> None:
    """An automatic engine does not measure again, and might choose the other one."""
    results = tmp_path / "with"
    tailorfl.run({**SMALL, "methods": ["fedavg"], "engine": "auto"}, out=results, progress=False)
    job = results / "fedavg" / "seed-0"
    chosen = records(job / "rounds.jsonl")[-1]["engine"]
    other = {"sequential": "vectorized", "vectorized": "sequential"}[chosen]
    text = (job / "rounds.jsonl").read_text()
    (job / "rounds.jsonl").write_text(text.replace(f'"{chosen}"', f'"{other}"'))  # as if it had chosen that
    renew_manifest(job)
    invoke("unlearn", results, "--client", LEFT, "--out", tmp_path / "without", "--quiet")
    rounds = records(tmp_path / "without" / "fedavg" / "seed-0" / "rounds.jsonl")
    assert {record["engine"] for record in rounds} == {other}


@pytest.mark.slow
def test_every_method_is_unlearned(tmp_path: Path) -> None:
    used = [{**m, "rounds": None} for m in load("all_methods").to_dict()["methods"]]
    data = {"samples": 400, "clients": 5, "public": "digits", "public_samples": 20}
    data["partition_options"] = {"alpha": 1.0}
    model = {"name": "mlp", "hidden": [8], "norm": "group"}
    assert {m["name"] for m in used} == set(NAMES)
    settings = {**SMALL, "methods": used, "model": model, "data": data}
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


@pytest.mark.parametrize("normalise", ["federated", "client"])
def test_constants_of_a_table_are_fitted_without_the_client(normalise: str) -> None:
    """As of the table that has no row of it, also where it alone has a word or the largest numbers."""
    rng = np.random.default_rng(0)
    sites = np.repeat(["ash", "elm", "oak"], 20)
    frame = pd.DataFrame({"site": sites, "age": rng.normal(50, 9, 60), "pain": rng.choice(["a", "b"], 60)})
    frame.loc[frame["site"] == "elm", "age"] += 1000
    frame.loc[frame["site"] == "elm", "pain"] = "c"
    frame["ill"] = rng.integers(0, 2, 60)
    split = {"train": 0.8, "test": 0.2}
    settings: dict[str, Any] = {"normalise": normalise, "partition": "natural", "split": split}
    source = from_table(frame, label="ill", client="site")
    excluded = build(source=source, excluded_clients=["elm"], **settings)
    fewer = from_table(frame[frame["site"] != "elm"].reset_index(drop=True), label="ill", client="site")
    expected = build(source=fewer, **settings)
    assert excluded.members == (0, 2)
    if normalise == "federated":
        ages = frame["age"].to_numpy()
        trained = ages[np.concatenate([excluded.train[i] for i in excluded.members])]
        kept = torch.from_numpy(np.flatnonzero(sites != "elm"))
        scaled = torch.from_numpy((ages - trained.mean()) / trained.std(ddof=1)).float()[kept]
        assert torch.allclose(excluded.source.x[kept, 0], scaled, atol=1e-5)
    assert excluded.source.x.shape[1] == expected.source.x.shape[1]  # no column of the word that it alone has


def test_statistics_of_images_are_those_of_the_remaining_clients(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for place in ("north", "south", "west"):
        for number in range(8):
            file = tmp_path / place / ("cat" if number % 2 else "dog") / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(200 if place == "south" else 0, 256, (6, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(file)
    settings: dict[str, Any] = {"name": "folder", "path": str(tmp_path), "split": {"train": 0.5, "test": 0.5}}
    everybody, fewer = build(**settings), build(**settings, excluded_clients=["south"])
    shutil.rmtree(tmp_path / "south")
    alone = build(**settings).source
    assert fewer.source.mean is not None
    assert fewer.source.mean == pytest.approx(alone.mean)
    assert fewer.source.std == pytest.approx(alone.std)
    assert everybody.source.mean is not None
    assert np.subtract(everybody.source.mean, fewer.source.mean).min() > 0.1


def test_what_cannot_be_unlearned_is_refused(tmp_path: Path) -> None:
    short = {**SMALL, "methods": ["fedavg"], "rounds": 1}
    tailorfl.run(short, out=tmp_path / "a", progress=False)
    assert "client-3" in invoke("unlearn", tmp_path / "a", "--client", "client-9", code=2).output
    with RunStore.open(tmp_path / "a" / "fedavg" / "seed-0") as store:
        store.mark("interrupted")
    assert "--resume" in invoke("unlearn", tmp_path / "a", "--client", 1, code=1).output
    held_out = {**short, "data": {**SMALL["data"], "heldout_clients": 1}}
    tailorfl.run(held_out, out=tmp_path / "b", progress=False)
    assert "held out" in invoke("unlearn", tmp_path / "b", "--client", 5, code=2).output
    everybody = [f"client-{i}" for i in range(5)]
    with pytest.raises(ConfigError, match="no client is left"):
        tailorfl.run({**SMALL, "data": {**SMALL["data"], "excluded_clients": everybody}})


def test_other_data_than_those_of_the_run_are_not_unlearned(tmp_path: Path) -> None:
    for name in ("north", "south", "east"):
        rows = [f"{k % 7},{k % 5},{k % 2}" for k in range(40)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,dose,ill", *rows]))
    table = {"name": "table", "path": str(tmp_path), "options": {"label": "ill", "task": "binary"}}
    tailorfl.run({**SMALL, "methods": ["fedavg"], "data": table}, out=tmp_path / "run", progress=False)
    (tmp_path / "south.csv").write_text((tmp_path / "south.csv").read_text().replace("3,1,1", "9,1,1"))
    invoke("unlearn", tmp_path / "run", "--client", "east", "--out", tmp_path / "fewer", code=1)
    assert not (tmp_path / "fewer").exists()
