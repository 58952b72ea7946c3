"""Random damage to result folders, of a finished experiment and of one that was interrupted."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pandas as pd

import tailorfl
from fuzz.data import damaged
from tailorfl.errors import TailorflError
from tailorfl.experiments.folders import experiment_in
from tailorfl.experiments.integrity import job_problems, jobs_of
from tailorfl.experiments.jobs import Job, Observer
from tailorfl.experiments.report import write_report
from tailorfl.experiments.result import ExperimentResult

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


def make(root: Path) -> None:
    """Makes the two folders that all cases begin with."""
    tailorfl.run(SETTINGS, out=root / "finished")
    try:
        tailorfl.run(SETTINGS, out=root / "interrupted", observer=Stop())
    except KeyboardInterrupt:
        return
    raise AssertionError("the run was not interrupted")


def case(random_: random.Random, folder: Path, root: Path) -> None:
    """Damages a copy and reads it, and now and then resumes it.

    Raises:
        TailorflError: as it should.
        AssertionError: a number is wrong, or a row gone without a word.
    """
    kind = random_.choice(["finished", "interrupted"])
    out = Path(shutil.copytree(root / kind, folder / "run"))
    told = harm(out, random_)
    right = numbers(ExperimentResult.load(root / "finished"))
    wanted = right if kind == "finished" else right.drop(index=[("ditto", 1)])
    settings = told == "config.yaml"
    answers = 0
    for step in ("read", "check", "resume"):
        try:
            if step == "read":
                result = ExperimentResult.load(out)
                compare(numbers(result), wanted, result.missing, settings)
                if random_.random() < 0.03:
                    write_report(result)
            elif step == "check":
                for _, place in jobs_of(out, experiment_in(out)):
                    job_problems(place)
            elif random_.random() < 0.3:
                again = tailorfl.run(None, out=out, resume=True)
                compare(numbers(again), right, again.missing, settings)
        except TailorflError:
            answers += 1


def harm(out: Path, random_: random.Random) -> str:
    """Deletes, empties, changes, exchanges or adds something; returns the name of what was hit."""
    files = sorted(
        path for path in out.rglob("*") if path.is_file() and path.name != ".lock" and path.suffix != ".png"
    )
    hit = random_.choice(files)
    how = random_.randrange(9)
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
        one, two = random_.sample(jobs, 2)
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
        shutil.rmtree(hit.parent if hit.parent != out else random_.choice(sorted(out.glob("*/seed-*"))))
        return "job"
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
