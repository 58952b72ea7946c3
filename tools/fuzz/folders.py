"""Random damage to result folders (finished, interrupted), to a tuning that was stopped, and to an exported model."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import tailorfl
from fuzz.data import damaged
from tailorfl.data.own import from_table
from tailorfl.errors import TailorflError
from tailorfl.export.folder import export
from tailorfl.export.predict import predict
from tailorfl.report.document import write_report
from tailorfl.report.result import ExperimentResult
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.folders import experiment_in
from tailorfl.runs.job import Job, Observer, job_problems, jobs_of
from tailorfl.runs.process import as_library_error
from tailorfl.runs.trained_models import restore
from tailorfl.settings.loading import load
from tailorfl.tuning import plan as tuning
from tailorfl.tuning.plan import TUNED
from tailorfl.tuning.run import tune

SETTINGS: dict[str, Any] = {
    "methods": ["local", "ditto"],
    "rounds": 3,
    "seeds": 2,
    "model": "logistic",
    "data": {"clients": 3, "samples": 90},
    "train": {"steps": 1},
    "eval": {"every": 1, "sets": ["local"], "final": ["local"]},
    "checkpoint_every": 1,
}


class Stop(Observer):
    """Ctrl-C in the last job."""

    def round_done(self, job: Job, done: Any) -> None:
        """Stops after two rounds of it."""
        if job.seed == 1 and job.method.name == "ditto" and done.round == 1:
            raise KeyboardInterrupt


SEARCHED: dict[str, Any] = {
    **{key: value for key, value in SETTINGS.items() if key not in ("eval", "seeds")},
    "methods": ["fedprox"],
    "search": {"train.lr": [0.05, 0.5, 2.0]},
    "engine": "sequential",
}
TOWNS = pd.DataFrame(
    {
        "town": ["ash", "elm"] * 30,
        "age": np.random.default_rng(0).normal(60, 9, 60).round(1),
        "pain": ["dull", "sharp", "none"] * 20,
    }
).assign(sick=lambda table: np.where(table["age"] > 60, "yes", "no"))
KINDS = ("finished", "interrupted", "tuning", "exported")


def make(root: Path) -> None:
    """Make the folders that all cases begin with."""
    tailorfl.run(SETTINGS, out=root / "finished")
    try:
        tailorfl.run(SETTINGS, out=root / "interrupted", observer=Stop())
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("the run was not interrupted")
    plan = tuning.plan(load(SEARCHED), tuning.TuningRequest("3x3"))
    for name in ("tuned", "tuning"):
        tuning.begin(root / name, plan)
    tune(root / "tuned", plan)
    if not (process := os.fork()):
        step, calls = Simulation.step, []

        def dies(sim: Simulation) -> Any:
            calls.append(1)
            if len(calls) == 6:
                os._exit(0)
            return step(sim)

        Simulation.step = dies  # type: ignore[method-assign]
        tune(root / "tuning", plan)
        os._exit(1)
    assert os.waitpid(process, 0)[1] == 0, "the tuning was not stopped"
    source = from_table(TOWNS, label="sick", client="town")
    settings = {**SETTINGS, "data": {"normalise": "federated"}, "methods": ["local"], "seeds": 1}
    tailorfl.run(settings, out=root / "towns", source=source)
    export(root / "towns", root, clients=["ash"], source=source)
    (root / "ash").rename(root / "exported")


def case(random_: random.Random, folder: Path, root: Path) -> None:
    """Damage a copy and do with it whatever people do.

    Raises:
        TailorflError: as it should.
        AssertionError: a number is wrong, a row gone without a word, or what was advised is of no use.
    """
    kind = random_.choice(KINDS)
    out = Path(shutil.copytree(root / kind, folder / "run"))
    told = harm(out, random_)
    with as_library_error():
        if kind == "exported":
            pd.testing.assert_frame_equal(predict(out, TOWNS), predict(root / kind, TOWNS))
        elif kind == "tuning":
            tune(out, tuning.plan_in(out))
            assert trials(out) == trials(root / "tuned"), "other trials"
            assert (out / TUNED).read_bytes() == (root / "tuned" / TUNED).read_bytes(), (
                "other settings chosen"
            )
        else:
            _use(out, kind, told, random_, root)


def trials(folder: Path) -> dict[str, Any]:
    """What a tuning.json says, without times."""
    said: dict[str, Any] = json.loads((folder / "tuning.json").read_text(encoding="utf-8"))
    for method in said["methods"].values():
        for trial in method["trials"]:
            del trial["seconds"]
    return said


def _use(out: Path, kind: str, told: str, random_: random.Random, root: Path) -> None:
    """Read a damaged result folder, look at it, take a model out, and now and then resume it."""
    right = numbers(ExperimentResult.load(root / "finished"))
    wanted = right if kind == "finished" else right.drop(index=[("ditto", 1)])
    settings = told == "config.yaml"
    finished = outputs(root / "finished")
    for step in ("read", "check", "model", "resume"):
        try:
            if step == "read":
                result = ExperimentResult.load(out)
                compare(numbers(result), wanted, result.missing, settings)
                if random_.random() < 0.03:
                    write_report(result)
            elif step == "check":
                checked(out)
            elif step == "model":
                assert kind == "interrupted" or torch.equal(outputs(out), finished), "another model"
            elif random_.random() < 0.3:
                again = tailorfl.run(None, out=out, resume=True)
                compare(numbers(again), right, again.missing, settings)
                assert settings or not (damage := checked(out)), f"still damaged: {damage}"
                torch.testing.assert_close(outputs(out), finished, atol=1e-5, rtol=1e-4)
        except TailorflError:
            pass


def checked(out: Path) -> list[str]:
    """What `tailorfl check` finds damaged."""
    jobs = jobs_of(out, experiment_in(out))
    return [text for _, place in jobs for is_damage, text in job_problems(place) if is_damage]


def outputs(out: Path) -> torch.Tensor:
    """What the model of a client says, as an export of it would."""
    run = restore(out, "ditto", 0)
    with torch.no_grad():
        found: torch.Tensor = next(run.models([0])).module(run.sim.given.source.take(torch.arange(5)))
    return found


def harm(out: Path, random_: random.Random) -> str:
    """Delete, empty, change, exchange or add something; return the name of what was hit."""
    files = sorted(
        path for path in out.rglob("*") if path.is_file() and path.name != ".lock" and path.suffix != ".png"
    )
    hit = random_.choice(files)
    how = random_.randrange(11)
    if how == 0:
        hit.unlink()
    elif how == 1:
        hit.write_bytes(b"")
    elif how == 2:
        other = random_.choice(files)
        content = hit.read_bytes()
        hit.write_bytes(other.read_bytes())
        other.write_bytes(content)
        return "config.yaml" if "config.yaml" in (hit.name, other.name) else hit.name
    elif how == 3:
        jobs = sorted(path.parent for path in out.glob("*/seed-*/config.json"))
        one, two = random_.sample(jobs, 2) if len(jobs) > 1 else (hit, random_.choice(files))
        if one.is_file():
            two.write_bytes(one.read_bytes())
            return two.name
        if random_.random() < 0.5:
            one.rename(out / "aside")
            two.rename(one)
            (out / "aside").rename(two)
        else:
            shutil.rmtree(two)
            shutil.copytree(one, two)
        return "job"
    elif how == 4:
        hit.unlink()
        hit.mkdir()
    elif how == 5:
        hit.write_bytes(
            random_.choice(
                [b"null", b"[]", b"{}", b"1", b'"x"', b"[" * 5000, b"9" * 5000, b"\xff\xfe", b"{\n"]
            )
        )
    elif how == 6:
        below = sorted(path for path in out.rglob("*") if path.is_dir()) or [out]
        shutil.rmtree(hit.parent if hit.parent != out else random_.choice(below))
        return "job"
    elif how == 7:
        lines = hit.read_bytes().splitlines(keepends=True) or [b"\n"]
        place = random_.randrange(len(lines))
        hit.write_bytes(b"".join([*lines[:place], lines[place], *lines[place:]]))
    elif how == 8:
        content = bytearray(hit.read_bytes() or b"\n")
        content[random_.randrange(len(content))] ^= 1 << random_.randrange(8)
        hit.write_bytes(bytes(content))
    else:
        hit.write_bytes(damaged(hit.read_bytes(), random_) if hit.stat().st_size else b"\n")
    return hit.name


def numbers(result: ExperimentResult) -> pd.DataFrame:
    """The mean of every job, by (label, seed)."""
    rows = {(r.label, r.seed): r.values["mean"] for r in result.seed_results()}
    table = result.table
    assert table["seeds"].sum() == len(rows), "jobs are counted twice"
    index = pd.MultiIndex.from_tuples(list(rows), names=["label", "seed"])
    return pd.DataFrame({"mean": list(rows.values())}, index=index)


def compare(found: pd.DataFrame, wanted: pd.DataFrame, missing: list[str], settings: bool) -> None:
    """Every number is right, and every job that is not there is named; edited settings may name other jobs."""
    for key, row in found.iterrows():
        if settings and key not in wanted.index:
            continue
        assert key in wanted.index, f"{key} was never run"
        assert row["mean"] == wanted.loc[key, "mean"], f"{key} has another number"
    for label, seed in wanted.index.difference(found.index):
        assert settings or any(text.startswith(f"{label}, seed {seed}: ") for text in missing), (
            f"{label} {seed} is gone"
        )
