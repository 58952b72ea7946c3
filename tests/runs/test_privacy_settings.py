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

from tailorfl import run
from tailorfl.errors import ConfigError, TailorflError
from tailorfl.privacy.accounting import epsilon
from tailorfl.privacy.ledger import PrivacyLedger, Use
from tailorfl.report.result import ExperimentResult
from tailorfl.runs.build import check, make_federation, make_simulation
from tailorfl.runs.cost_estimate import estimate
from tailorfl.runs.job import Job, Observer
from tailorfl.runs.privacy import Spent, noise_needed, planned, privacy_of, spent
from tailorfl.settings.loading import load
from tailorfl.settings.privacy import PrivacyConfig

opacus = pytest.mark.skipif(
    find_spec("opacus") is None, reason="accounting needs opacus: pip install 'tailorfl[privacy]'"
)
SMALL: dict[str, Any] = {
    "data": {"name": "digits", "clients": 4, "samples": 200},
    "model": "logistic",
    "train": {"lr": 0.1, "dp": {"clip": 1.0, "noise": 1.0}},
    "rounds": 3,
    "seeds": 1,
    "eval": {"every": 2},
}


def settings(**changes: Any) -> dict[str, Any]:
    return {**SMALL, "methods": ["fedavg_ft"], **changes}


def results(out: Path, **changes: Any) -> ExperimentResult:
    return run(settings(**changes), out=out)


def dp(**given: Any) -> dict[str, Any]:
    return {"lr": 0.1, "dp": {"clip": 1.0, **given}}


def job_of(**changes: Any) -> Job:
    config = load(settings(**changes))
    return Job(config, config.methods[0], 0)


# -- settings ------------------------------------------------------------------------------------------------


def test_settings_go_to_yaml_and_back() -> None:
    config = load(settings(train={"dp": {"level": "client", "clip": math.inf, "noise": 0.0}}))
    again = load(yaml.safe_load(config.to_yaml()))
    assert again == config
    assert again.train.dp == PrivacyConfig(level="client", clip=math.inf, noise=0.0)
    assert "clip: .inf" in config.to_yaml()


def test_a_method_may_have_privacy_of_its_own_or_none() -> None:
    methods = [
        "fedavg",
        {"name": "fedavg", "label": "open", "train": {"dp": None}},
        {"name": "fedavg", "label": "other", "train": {"dp": {"clip": 2.0, "epsilon": 3.0}}},
    ]
    config = load(settings(methods=methods))
    found = [privacy_of(Job(config, method, 0)) for method in config.methods]
    assert found[0] == PrivacyConfig(clip=1.0, noise=1.0)
    assert found[1] is None
    assert found[2] == PrivacyConfig(clip=2.0, epsilon=3.0)


def test_levels_reach_the_simulation() -> None:
    for level, weights in (("sample", "samples"), ("client", "uniform")):
        job = job_of(methods=[{"name": "fedavg", "weights": weights}], train=dp(noise=0.7, level=level))
        sim = make_simulation(job, make_federation(job.config, 0))
        assert sim.level == level
        found = sim.train.dp if level == "sample" else sim.client_dp
        assert found is not None
        assert (found.clip, found.noise) == (1.0, 0.7)
        assert (sim.train.dp is None) == (level == "client")
        assert (sim.client_dp is None) == (level == "sample")


@pytest.mark.parametrize(
    ("method", "level", "says"),
    [
        ({"name": "hypcluster"}, "sample", "training losses of all cluster models"),
        ({"name": "ditto", "dynamic_lam": [0.1, 1.0]}, "sample", "dynamic_lam"),
        ({"name": "fedavg"}, "client", "set weights=uniform"),
        ({"name": "centralized"}, "client", "pooled data"),
    ],
)
def test_what_is_not_covered_is_said_before_data_are_read(
    method: dict[str, Any], level: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check(load(settings(methods=[method], train=dp(noise=1.0, level=level))))


# -- the noise of a wanted ε ---------------------------------------------------------------------------------


@pytest.mark.slow
@opacus
@pytest.mark.parametrize("level", ["sample", "client"])
@pytest.mark.parametrize("name", ["fedavg_ft", "ditto"])
def test_the_client_that_spends_most_ends_just_below_the_target(name: str, level: str) -> None:
    method = {"name": name, "weights": "uniform"}
    data = {"name": "digits", "clients": 4, "samples": 200, "heldout_clients": 1}
    job = job_of(methods=[method], train=dp(epsilon=5.0, delta=1e-3, level=level), fraction=0.5, data=data)
    sim = make_simulation(job, make_federation(job.config, 0))
    for _ in range(job.rounds):
        sim.step()
    assert sim.level == level
    before = spent(job, sim, planned(job, sim))
    assert before is not None
    assert 4.9 < before.largest <= 5.0
    after = spent(job, sim)
    assert after is not None
    assert after.largest <= before.largest


@pytest.mark.slow
@opacus
def test_noise_is_that_of_the_costliest_client() -> None:
    ledger = PrivacyLedger()
    ledger.book(
        "training", {i: Counter({Use(0.1 * (i + 1), 1.0): 10, Use(0.2, 1.0, 2): i}) for i in range(4)}
    )
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
    federation = make_federation(job.config, 0)
    sim = make_simulation(job, federation)
    assert sim.train.dp is not None
    told = []
    for client in range(3):
        n = len(federation.train[client])
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


@pytest.mark.parametrize("level", ["sample", "client"])
def test_samples_scaled_by_statistics_of_private_ones_are_refused(level: str) -> None:
    """One sample then changes all others; at client level they stay within the client."""
    from tailorfl.data.source import Source

    rng = torch.Generator().manual_seed(0)
    source = Source("own", 3 + torch.randn(60, 4, generator=rng), torch.arange(60) % 2, "classification", 2)
    train = {"lr": 0.1, "dp": {"clip": 1.0, "noise": 1.0, "level": level}}
    data = {"clients": 2, "normalise": "client"}
    given = {**settings(methods=[{"name": "fedavg", "weights": "uniform"}], train=train), "data": data}
    job = Job(config := load({**given, "data": {**data, "name": "digits"}}), config.methods[0], 0)
    federation = make_federation(job.config, 0, source=source)
    if level == "client":
        make_simulation(job, federation)
        return
    with pytest.raises(ConfigError, match=r"one sample changes all others.*leave out data.normalise=client"):
        make_simulation(job, federation)


@pytest.mark.parametrize("level", ["sample", "client"])
@pytest.mark.parametrize("by", ["federated", "client"])
def test_constants_that_clients_make_together_are_no_secret_of_one(
    level: str, by: str, tmp_path: Path
) -> None:
    """A table's words are encoded alike for all, so a client tells its own to others; public constants tell nothing."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"site": ["a", "b"] * 30, "age": rng.normal(size=60), "ward": ["x", "y", "z"] * 20})
    frame.assign(ill=rng.choice(["yes", "no"], 60)).to_csv(tmp_path / "table.csv", index=False)
    columns = {"age": {"kind": "number", "mean": 0.5}, "ward": {"kind": "word", "levels": ["x", "y"]}}
    (tmp_path / "public.json").write_text(json.dumps({"roles": {"label": ["ill"]}, "columns": columns}))
    train = {"lr": 0.1, "dp": {"clip": 1.0, "noise": 1.0, "level": level}}
    data = {
        "name": "table",
        "path": str(tmp_path / "table.csv"),
        "options": {"label": "ill", "client": "site"},
    }
    given = settings(methods=[{"name": "fedavg", "weights": "uniform"}], train=train, model="logistic")
    for more in (
        {"normalise": by},
        {"options": {**data["options"], "constants": str(tmp_path / "public.json")}},
    ):
        config = load({**given, "data": {**data, **more}})
        job = Job(config, config.methods[0], 0)
        if "normalise" not in more:
            make_simulation(job, make_federation(config, 0))
            continue
        with pytest.raises(ConfigError, match=rf"so one {level} changes all others.*data.options.constants"):
            make_simulation(job, make_federation(config, 0))


def test_heart_is_private_with_public_constants_only(need_data: Any) -> None:
    need_data("flamby/processed.va.data")
    for options in ({}, {"scaling": "public"}):
        job = job_of(methods=["local"], data={"name": "heart", "options": options})
        federation = make_federation(job.config, 0)
        if options:
            make_simulation(job, federation)
        else:
            with pytest.raises(ConfigError, match=r"FLamby's protocol.*data\.options\.scaling=public"):
                make_simulation(job, federation)


@opacus
def test_more_than_was_planned_is_said(caplog: pytest.LogCaptureFixture) -> None:
    job = job_of(train=dp(epsilon=5.0, delta=1e-3), rounds=1)
    sim = make_simulation(job, make_federation(job.config, 0))
    for _ in range(3):
        sim.step()
    with caplog.at_level(logging.WARNING, logger="tailorfl"):
        found = spent(job, sim)
    assert found is not None
    assert found.largest > 5.0
    assert "above the wanted 5" in caplog.text


@opacus
def test_an_epsilon_beyond_prv_is_reported_by_rdp_and_said(caplog: pytest.LogCaptureFixture) -> None:
    job = job_of(train=dp(noise=0.05), rounds=1)
    sim = make_simulation(job, make_federation(job.config, 0))
    sim.step()
    with caplog.at_level(logging.WARNING, logger="tailorfl"):
        found = spent(job, sim)
    assert found is not None
    assert {by for _, by in found.epsilons.values()} == {"rdp"}
    assert "too large for the accountant prv" in caplog.text


@opacus
def test_a_target_out_of_reach_stops_before_the_first_round() -> None:
    with pytest.raises(TailorflError, match="epsilon must be positive and below"):
        make_simulation(job_of(train=dp(epsilon=1e4)), make_federation(load(settings()), 0))


# -- what is reported ----------------------------------------------------------------------------------------


@opacus
def test_summary_and_table_of_a_run(tmp_path: Path) -> None:
    methods = ["fedavg_ft", {"name": "fedavg", "label": "open", "train": {"dp": None}}]
    data = {"name": "digits", "clients": 4, "samples": 200, "heldout_clients": 1}
    result = results(tmp_path / "out", methods=methods, data=data)
    summary = json.loads((tmp_path / "out/fedavg_ft/seed-0/summary.json").read_text())["privacy"]
    assert (summary["level"], summary["clip"], summary["noise"], summary["target"]) == (
        "sample",
        1.0,
        1.0,
        None,
    )
    assert (summary["delta"], summary["accountant"]) == (1e-5, "prv")
    assert summary["batches"] == "poisson"
    assert "zero-out" in summary["neighbours"]
    assert set(summary["composed"]) == {"training", "deployment", "newcomer"}
    with (tmp_path / "out/fedavg_ft/seed-0/privacy.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["client"], r["purpose"]) for r in rows] == [
        *((str(i), "training") for i in range(4)),
        *((str(i), "deployment") for i in range(4)),
        ("4", "newcomer"),
    ]
    federation = make_federation(load(tmp_path / "out/config.yaml"), 0)
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
    assert result.table.loc["fedavg_ft", "epsilon"] == pytest.approx(summary["epsilon"]["max"])
    assert result.table.loc["open", "epsilon"] == math.inf
    assert column.title in (tmp_path / "out/comparison.md").read_text()
    assert not (tmp_path / "out/open/seed-0/privacy.csv").exists()
    assert "privacy" not in json.loads((tmp_path / "out/open/seed-0/summary.json").read_text())


@opacus
def test_client_level_is_one_row_for_all(tmp_path: Path) -> None:
    method = {"name": "fedavg", "weights": "uniform"}
    drawn = {"fraction": 0.5, "sampling": "bernoulli"}
    results(tmp_path / "out", methods=[method], train=dp(noise=1.0, level="client"), **drawn)
    summary = json.loads((tmp_path / "out/fedavg/seed-0/summary.json").read_text())["privacy"]
    expected = epsilon([(0.5, 1.0, 3)], 1e-5)
    assert summary["level"] == "client"
    assert summary["batches"] is None
    assert [summary["epsilon"][k] for k in ("mean", "min", "max")] == pytest.approx([expected] * 3)
    assert summary["epsilon"]["std"] == 0
    with (tmp_path / "out/fedavg/seed-0/privacy.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["client"], row["purpose"], row["rate"], row["steps"]) == ("all", "updates", "0.5", "3")


@opacus
def test_without_noise_epsilon_is_infinite(tmp_path: Path) -> None:
    results(tmp_path / "out", methods=["fedavg"], train={"dp": {"clip": math.inf, "noise": 0.0}}, rounds=1)
    result = ExperimentResult.load(tmp_path / "out")
    (summary,) = [summary for summary, _ in result.jobs]
    assert summary["privacy"]["epsilon"]["max"] == math.inf
    assert summary["privacy"]["clip"] == math.inf
    assert result.table.loc["fedavg", "epsilon"] == math.inf


def test_experiments_without_privacy_have_no_column_of_it(tmp_path: Path) -> None:
    result = results(tmp_path / "out", methods=["local"], train={"lr": 0.1}, rounds=1)
    assert all(column.key != "epsilon" for column in result.columns)
    assert "ε" not in (tmp_path / "out/comparison.md").read_text()
    assert not list((tmp_path / "out").rglob("privacy.csv"))


@opacus
def test_an_interrupted_private_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    class Stop(Observer):
        def round_done(self, job: Job, done: Any) -> None:
            if done.round == 1:
                raise KeyboardInterrupt

    given = settings(train=dp(epsilon=8.0), checkpoint_every=1)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(given, out=whole)
    with pytest.raises(KeyboardInterrupt):
        run(given, out=cut, observer=Stop())
    run(out=cut, resume=True)
    names = ("privacy.csv", "summary.json")
    first, second = ([(out / "fedavg_ft/seed-0" / n).read_text() for n in names] for out in (whole, cut))
    assert first[0] == second[0]
    assert json.loads(first[1])["privacy"] == json.loads(second[1])["privacy"]
    assert json.loads(first[1])["metrics"] == json.loads(second[1])["metrics"]


@pytest.mark.slow
@opacus
def test_the_dry_run_tells_noise_and_epsilon() -> None:
    methods = [
        "fedavg_ft",
        {"name": "fedavg_ft", "label": "target", "train": {"dp": {"clip": 1.0, "epsilon": 4.0}}},
        {"name": "fedavg_ft", "label": "open", "train": {"dp": None}},
    ]
    rows = estimate(load(settings(methods=methods))).methods
    assert rows["fedavg_ft"]["noise"] == 1.0
    job = job_of()
    sim = make_simulation(job, make_federation(job.config, 0))
    found = spent(job, sim, planned(job, sim))
    assert isinstance(found, Spent)
    assert rows["fedavg_ft"]["epsilon"] == found.largest
    assert 3.9 < rows["target"]["epsilon"] <= 4.0
    assert rows["target"]["noise"] > rows["fedavg_ft"]["noise"] * 0.1
    assert "noise" not in rows["open"]
