"""Privacy in an experiment: settings, the noise of a wanted ε, what is reported, and what the dry run says."""

from __future__ import annotations

import csv
import json
import logging
import math
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from runs.small import StopAt, facts, first_job, simulation_of
from tailorfl import run
from tailorfl.data.own import from_tensors
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError, TailorflError
from tailorfl.privacy import EVERYONE, PrivacyLedger, Use, epsilon
from tailorfl.report.result import ExperimentResult
from tailorfl.runs.build import check, make_federation
from tailorfl.runs.cost_estimate import estimate
from tailorfl.runs.job import Job
from tailorfl.runs.privacy import Spent, noise_needed, planned, privacy_of, spent
from tailorfl.settings.loading import load
from tailorfl.settings.train import PrivacyConfig

opacus = pytest.mark.skipif(
    find_spec("opacus") is None, reason="accounting needs opacus: pip install 'tailorfl[privacy]'"
)
DATA: dict[str, Any] = {"name": "digits", "clients": 4, "samples": 200}
SMALL: dict[str, Any] = {
    "data": DATA,
    "model": "logistic",
    "methods": ["fedavg_ft"],
    "train": {"lr": 0.1, "dp": {"clip": 1.0, "noise": 1.0}},
    "rounds": 3,
    "seeds": 1,
    "eval": {"every": 2},
}
UNIFORM = {"name": "fedavg", "weights": "uniform"}
OPEN = {"name": "fedavg", "label": "open", "train": {"dp": None}}


def dp(**given: Any) -> dict[str, Any]:
    return {"lr": 0.1, "dp": {"clip": 1.0, **given}}


def job_of(**changes: Any) -> Job:
    return first_job(SMALL, **changes)


def stated(job: Job, rounds: int | None = None) -> Spent:
    """What a job has spent after some rounds, or is planned to."""
    sim = simulation_of(job)
    for _ in range(rounds or 0):
        sim.step()
    result = spent(job, sim, planned(job, sim) if rounds is None else None)
    assert result is not None
    return result


# -- settings ------------------------------------------------------------------------------------------------


def test_settings_go_to_yaml_and_back() -> None:
    config = load({**SMALL, "train": {"dp": {"level": "client", "clip": math.inf, "noise": 0.0}}})
    again = load(yaml.safe_load(config.to_yaml()))
    assert again == config
    assert again.train.dp == PrivacyConfig(level="client", clip=math.inf, noise=0.0)


def test_a_method_may_have_privacy_of_its_own_or_none() -> None:
    other = {"name": "fedavg", "label": "other", "train": {"dp": {"clip": 2.0, "epsilon": 3.0}}}
    config = load({**SMALL, "methods": ["fedavg", OPEN, other]})
    wanted = [PrivacyConfig(clip=1.0, noise=1.0), None, PrivacyConfig(clip=2.0, epsilon=3.0)]
    assert [privacy_of(Job(config, method, 0)) for method in config.methods] == wanted


@pytest.mark.parametrize("level", ["sample", "client"])
def test_levels_reach_the_simulation(level: str) -> None:
    sim = simulation_of(job_of(methods=[UNIFORM], train=dp(noise=0.7, level=level)))
    used, unused = (sim.train.dp, sim.client_dp) if level == "sample" else (sim.client_dp, sim.train.dp)
    assert used is not None
    assert (sim.level, used.clip, used.noise, unused) == (level, 1.0, 0.7, None)


@pytest.mark.parametrize(
    ("method", "level", "says"),
    [
        ({"name": "hypcluster"}, "sample", "training losses of all cluster models"),
        ({"name": "fedavg"}, "client", "set weights=uniform"),
    ],
)
def test_what_is_not_covered_is_said_before_data_are_read(
    method: dict[str, Any], level: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check(load({**SMALL, "methods": [method], "train": dp(noise=1.0, level=level)}))


# -- the noise of a wanted ε ---------------------------------------------------------------------------------


@pytest.mark.slow
@opacus
@pytest.mark.parametrize(("name", "level"), [("fedavg_ft", "client"), ("ditto", "sample")])
def test_the_client_that_spends_most_ends_just_below_the_target(name: str, level: str) -> None:
    job = job_of(
        methods=[{"name": name, "weights": "uniform"}],
        train=dp(epsilon=5.0, delta=1e-3, level=level),
        fraction=0.5,
        data={**DATA, "heldout_clients": 1},
    )
    before = stated(job)
    assert 4.9 < before.largest <= 5.0
    assert stated(job, job.rounds).largest <= before.largest


@pytest.mark.slow
@opacus
def test_noise_is_that_of_the_costliest_client() -> None:
    ledger = PrivacyLedger()
    uses = {i: Counter({Use(0.1 * (i + 1), 1.0): 10, Use(0.2, 1.0, 2): i}) for i in range(4)}
    ledger.book("training", uses)
    noise = noise_needed(ledger, 3.0, 1e-5, "rdp")
    found = [epsilon([(q, noise * s, n) for q, s, n in ledger.entries(i)], 1e-5, "rdp") for i in range(4)]
    assert max(found) == found[3] <= 3.0
    assert found[3] > 2.99
    assert noise_needed(PrivacyLedger(), 3.0, 1e-5, "rdp") == 0.0


@opacus
@pytest.mark.parametrize(
    ("sampling", "calibrate"), [("poisson", None), ("shuffle", "client"), ("poisson", "run")]
)
def test_noise_of_each_client_brings_it_to_the_target_by_opacus(sampling: str, calibrate: str | None) -> None:
    """The rate, σ and steps of each client, by Opacus' own accountant."""
    from opacus.accountants import PRVAccountant

    data = {"name": "digits", "clients": 3, "samples": 150, "partition": "dirichlet", "heldout_clients": 1}
    given = dp(epsilon=3.0, delta=1e-3, sampling=sampling, calibrate=calibrate)
    job = job_of(methods=["fedavg"], train=given, data=data)
    sim = simulation_of(job)
    assert sim.train.dp is not None
    told = []
    for client in range(3):
        n = len(sim.federation.train[client])
        theirs = PRVAccountant()
        steps = 3 * math.ceil(n / 10) if sampling == "poisson" else 3
        rate = min(1.0, 10 / n) if sampling == "poisson" else 1.0
        theirs.history = [(sim.train.dp.noise_of(client), rate, steps)]
        told.append(theirs.get_epsilon(1e-3))
    assert max(told) == pytest.approx(3.0, abs=0.06)
    assert (min(told) > 2.94) == (calibrate != "run" or sampling == "shuffle")
    found = spent(job, sim, planned(job, sim))
    assert found is not None
    assert found.largest <= 3.0
    summary = found.summary()
    assert ("noise_of_clients" in summary) == (calibrate != "run")
    if calibrate != "run":
        own = [sim.train.dp.noise_of(i) for i in range(3)]
        of_clients = summary["noise_of_clients"]
        assert (of_clients["min"], of_clients["max"]) == (min(own), max(own)) == (min(own), summary["noise"])


def private_table(folder: Path) -> dict[str, Any]:
    """Settings of a table of two sites; beside it lie constants that anybody may know."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"site": ["a", "b"] * 30, "age": rng.normal(size=60), "ward": ["x", "y", "z"] * 20})
    frame.assign(ill=rng.choice(["yes", "no"], 60)).to_csv(folder / "table.csv", index=False)
    columns = {"age": {"kind": "number", "mean": 0.5}, "ward": {"kind": "word", "levels": ["x", "y"]}}
    (folder / "public.json").write_text(json.dumps({"roles": {"label": ["ill"]}, "columns": columns}))
    options = {"label": "ill", "client": "site"}
    return {"name": "table", "path": str(folder / "table.csv"), "options": options}


@pytest.mark.parametrize("level", ["sample", "client"])
def test_samples_scaled_by_statistics_of_private_ones_are_refused(level: str, tmp_path: Path) -> None:
    """One sample then changes all others; a client's own constants stay within it, words of a table do not."""
    x = 3 + torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    own = Source("own", x, torch.arange(60) % 2, "classification", 2)
    table = private_table(tmp_path)
    public = {**table["options"], "constants": str(tmp_path / "public.json")}
    by_client = {**DATA, "clients": 2, "samples": None, "normalise": "client"}
    cases: list[tuple[dict[str, Any], Source | None, str]] = [
        (by_client, own, "leave out data.normalise=client" if level == "sample" else ""),
        ({**table, "normalise": "federated"}, None, "data.options.constants"),
        ({**table, "normalise": "client"}, None, "data.options.constants"),
        ({**table, "options": public}, None, ""),
    ]
    for data, source, advice in cases:
        job = job_of(methods=[UNIFORM], train=dp(noise=1.0, level=level), data=data)
        if not advice:
            simulation_of(job, source)
            continue
        with pytest.raises(ConfigError, match=rf"one {level} changes all others.*{advice}"):
            simulation_of(job, source)


def test_heart_is_private_with_public_constants_only(need_data: Any) -> None:
    need_data("flamby/processed.va.data")
    simulation_of(job_of(methods=["local"], data={"name": "heart", "options": {"scaling": "public"}}))
    with pytest.raises(ConfigError, match=r"FLamby's protocol.*data\.options\.scaling=public"):
        simulation_of(job_of(methods=["local"], data={"name": "heart"}))


def test_privacy_refuses_images_scaled_by_each_other() -> None:
    """Their channels' mean and deviation depend on every private image, and so does every input."""
    x = torch.randint(0, 256, (40, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(40) % 2
    job = job_of(methods=["local"], data={"clients": 2})
    with pytest.raises(ConfigError, match="scaling='public'"):
        simulation_of(job, from_tensors(x, y))
    public = from_tensors(x, y, scaling="public")
    torch.testing.assert_close(public.take(torch.arange(40)), x.to(torch.float32) / 127.5 - 1)
    simulation_of(job, public).step()


@opacus
@pytest.mark.parametrize(
    ("given", "rounds", "by", "said"),
    [
        ({"epsilon": 5.0, "delta": 1e-3}, 3, "prv", "above the target 5"),
        ({"noise": 0.05}, 1, "rdp", "too large for the accountant prv"),
    ],
    ids=["more than was planned", "beyond prv"],
)
def test_an_epsilon_that_nobody_wanted_is_said(
    given: dict[str, Any], rounds: int, by: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="tailorfl"):
        found = stated(job_of(train=dp(**given), rounds=1), rounds)
    assert found.largest > 5.0
    assert {accountant for _, accountant in found.epsilons.values()} == {by}
    assert said in caplog.text


@opacus
def test_a_target_out_of_reach_stops_before_the_first_round() -> None:
    with pytest.raises(TailorflError, match="epsilon must be positive and below"):
        simulation_of(job_of(train=dp(epsilon=1e4)))


# -- what is reported ----------------------------------------------------------------------------------------


@opacus
def test_summary_and_table_of_a_run(tmp_path: Path) -> None:
    private = {"name": "fedavg_ft", "train": {"dp": {"clip": 1.0, "noise": 1.0}}}
    methods = [private, OPEN, {"name": "fedavg", "label": "unbounded"}]
    train = {"lr": 0.1, "dp": {"clip": math.inf, "noise": 0.0}}
    data = {**DATA, "heldout_clients": 1}
    out = tmp_path / "out"
    result = run({**SMALL, "methods": methods, "train": train, "data": data}, out=out)
    summary = facts(out / "fedavg_ft/seed-0/summary.json")["privacy"]
    wanted = {"level": "sample", "clip": 1.0, "noise": 1.0, "target": None, "delta": 1e-5}
    wanted |= {"accountant": "prv", "batches": "poisson"}
    assert {key: summary[key] for key in wanted} == wanted
    assert "zero-out" in summary["neighbours"]
    assert set(summary["composed"]) == {"training", "deployment", "newcomer"}
    with (out / "fedavg_ft/seed-0/privacy.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["client"], r["purpose"]) for r in rows] == [
        *((str(i), "training") for i in range(4)),
        *((str(i), "deployment") for i in range(4)),
        ("4", "newcomer"),
    ]
    federation = make_federation(load(out / "config.yaml"), 0)
    for client in range(4):
        n = len(federation.train[client])
        mine = [r for r in rows if r["client"] == str(client)]
        assert [int(r["steps"]) for r in mine] == [3 * math.ceil(n / 10), math.ceil(n / 10)]
        entries = [(min(1.0, 10 / n), 1.0, 4 * math.ceil(n / 10))]
        assert [float(r["epsilon"]) for r in mine] == pytest.approx([epsilon(entries, 1e-5)] * 2)
        assert {r["gradients"] for r in mine} == {"1"}
    of_training = {float(r["epsilon"]) for r in rows[:4]}
    assert summary["epsilon"]["max"] == pytest.approx(max(of_training))
    assert summary["epsilon"]["min"] == pytest.approx(min(of_training))
    assert summary["epsilon_heldout"]["mean"] == pytest.approx(float(rows[-1]["epsilon"]))
    column = next(c for c in result.columns if c.key == "epsilon")
    loaded = ExperimentResult.load(out)
    assert loaded.table["epsilon"].tolist() == [pytest.approx(summary["epsilon"]["max"]), math.inf, math.inf]
    assert column.title in (out / "comparison.md").read_text()
    assert not (out / "open/seed-0/privacy.csv").exists()
    assert "privacy" not in facts(out / "open/seed-0/summary.json")
    counted = {
        label: "labels" in facts(out / label / "seed-0/config.json") for label in ("open", "unbounded")
    }
    assert counted == {"open": True, "unbounded": False}, "label counts, which no ε covers"
    without_noise = loaded.jobs[2][0]["privacy"]
    assert (without_noise["epsilon"]["max"], without_noise["clip"]) == (math.inf, math.inf)


@opacus
def test_client_level_is_one_row_for_all(tmp_path: Path) -> None:
    settings = {**SMALL, "methods": [UNIFORM], "train": dp(noise=1.0, level="client")}
    run({**settings, "fraction": 0.5, "sampling": "bernoulli"}, out=tmp_path / "out")
    summary = facts(tmp_path / "out/fedavg/seed-0/summary.json")["privacy"]
    assert (summary["level"], summary["batches"]) == ("client", None)
    expected = epsilon([(0.5, 1.0, 3)], 1e-5)
    assert [summary["epsilon"][k] for k in ("mean", "min", "max")] == pytest.approx([expected] * 3)
    assert summary["epsilon"]["std"] == 0
    with (tmp_path / "out/fedavg/seed-0/privacy.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["client"], row["purpose"], row["rate"], row["steps"]) == ("all", "updates", "0.5", "3")


def test_a_row_for_all_has_the_largest_epsilon() -> None:
    """Clients have rows of their own for rounds in which not all took part."""
    ledger, use = PrivacyLedger(), Use(1.0, 1.0)
    ledger.book("updates", {EVERYONE: Counter({use: 2}), 1: Counter({use: 3})})
    settings = PrivacyConfig(level="client", clip=1.0, noise=1.0)
    privacy = Spent(settings, 1.0, ledger, {0: (6.0, "prv"), 1: (10.0, "prv")}, 2, False)
    rows = csv.DictReader(privacy.csv().splitlines())
    assert [(row["client"], row["epsilon"]) for row in rows] == [("all", "10.0"), ("1", "10.0")]


def test_experiments_without_privacy_have_no_column_of_it(tmp_path: Path) -> None:
    result = run({**SMALL, "methods": ["local"], "train": {"lr": 0.1}, "rounds": 1}, out=tmp_path / "out")
    assert all(column.key != "epsilon" for column in result.columns)
    assert "ε" not in (tmp_path / "out/comparison.md").read_text()
    assert not list((tmp_path / "out").rglob("privacy.csv"))


@opacus
def test_an_interrupted_private_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    given = {**SMALL, "train": dp(epsilon=8.0, accountant="rdp"), "checkpoint_every": 1}
    run(given, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(given, out=tmp_path / "cut", observer=StopAt("fedavg_ft, seed 0", 1))
    run(out=tmp_path / "cut", resume=True)
    whole, cut = (tmp_path / out / "fedavg_ft/seed-0" for out in ("whole", "cut"))
    assert (cut / "privacy.csv").read_text() == (whole / "privacy.csv").read_text()
    for key in ("privacy", "metrics"):
        assert facts(cut / "summary.json")[key] == facts(whole / "summary.json")[key]


@pytest.mark.slow
@opacus
def test_the_dry_run_tells_noise_and_epsilon() -> None:
    target = {"name": "fedavg_ft", "label": "target", "train": {"dp": {"clip": 1.0, "epsilon": 4.0}}}
    rows = estimate(load({**SMALL, "methods": ["fedavg_ft", target, OPEN]})).methods
    assert (rows["fedavg_ft"]["noise"], rows["fedavg_ft"]["epsilon"]) == (1.0, stated(job_of()).largest)
    assert 3.9 < rows["target"]["epsilon"] <= 4.0
    assert rows["target"]["noise"] > 0.1
    assert "noise" not in rows["open"]
