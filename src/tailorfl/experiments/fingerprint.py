"""What the numbers of a job were made with, so that a resumed experiment cannot mix two.

Every job keeps its experiment, a digest of its data and of how they were dealt, and the versions of the library and of
torch. Settings that change no number (names, texts, engines but for their precision, when to save) may differ; all
others may not.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tailorfl.data.federation import Federation
from tailorfl.data.preparing import PREPARATION, Preparation
from tailorfl.data.scaling import SCALING, Scaling
from tailorfl.data.source import Source
from tailorfl.data.text import TEXTS
from tailorfl.errors import RunError, first_few
from tailorfl.experiments.jobs import Job, other_job
from tailorfl.experiments.label_counts import label_counts
from tailorfl.runs.files import decode, encode, write_text
from tailorfl.runs.store import RunStore
from tailorfl.settings.experiment import DEFAULT

HARMLESS = (
    "name",
    "description",
    "published",
    "search",
    "variants",
    "scales",
    "scale",
    "seeds",
    "methods",
    "engine",
    "checkpoint_every",
    "threads",
    "track",
    "deploy",
)
"""Settings of an experiment that decide no number of one of its jobs, but for the engine's precision; `methods` and
`seeds` are its jobs.
"""
FORCED = "forced.json"
"""Where a result folder says what was different when it was resumed all the same."""
NAMED = ("classes", "features", "tokenizer", "pad", "vocabulary", TEXTS)
"""What of a source's `info` names numbers."""
MOST = 8
"""Differences that a message lists."""


def environment() -> dict[str, str]:
    """Returns the versions that numbers may depend on in their last digits, and the processor."""
    return {
        "tailorfl": version("tailorfl"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
    }


def processor() -> str:
    """Returns the name of this machine's processor and its widest instructions for floats."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def digests(federation: Federation) -> dict[str, str]:
    """Returns digests of the samples, and of which client has which for what (with public and shifted samples)."""
    samples = hashlib.blake2b(digest_size=16)
    _add_source(samples, federation.source)
    dealt = hashlib.blake2b(digest_size=16)
    for part in (federation.part("train"), federation.part("val"), federation.part("test")):
        for array in (part.values, part.starts, part.stops):
            dealt.update(np.ascontiguousarray(array).tobytes())
    dealt.update(np.ascontiguousarray(federation.server).tobytes())
    dealt.update(repr((federation.num_clients, federation.names)).encode())
    if federation.public is not None:
        _add_source(dealt, federation.public)
    for name, source in federation.shifted.items():
        dealt.update(name.encode())
        _add_source(dealt, source)
    return {"samples": samples.hexdigest(), "dealt": dealt.hexdigest()}


def _add_source(digest: Any, source: Source) -> None:
    facts = (source.name, source.task, source.outputs, source.mean, source.std, source.augment)
    digest.update(repr(facts).encode())
    for tensor in (source.x, source.y, source.test, source.credit):
        if tensor is not None:
            _add_tensor(digest, tensor)


def _add_tensor(digest: Any, tensor: Tensor) -> None:
    digest.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def made_with(job: Job, federation: Federation) -> dict[str, Any]:
    """Returns what a job's folder keeps of all this."""
    return {
        "experiment": job.config.to_dict(),
        "data": digests(federation),
        "environment": environment(),
        "clients": list(federation.names),
        "source": federation.source.name,
        "inputs": meaning(federation.source),
        **label_counts(job, federation),
    }


def other_settings(jobs: Sequence[Job], out: Path, *, longer: bool = False) -> Iterator[str]:
    """Yields how the settings and versions of the jobs that lie in a folder differ from today's.

    `longer`: they may have fewer rounds.
    """
    here = {key: value for key, value in environment().items() if key in ("tailorfl", "torch")}
    for job, stored in _stored(jobs, out):
        then, now = (
            decisive(e, job.method.label, longer)
            for e in (stored.get("experiment", {}), job.config.to_dict())
        )
        had = {k: v for k, v in stored.get("environment", {}).items() if k in here}
        if "environment" not in stored:
            had = here  # written before versions were kept
        for change in (*changes(then, now), *changes({"version": had}, {"version": here})):
            yield f"{job.name}: {change}"


def other_data(jobs: Sequence[Job], out: Path, job: Job, found: Mapping[str, str]) -> Iterator[str]:
    """Yields which of the jobs that lie in a folder were made of other data than those `found` for a `job`."""
    for other, stored in _stored(jobs, out):
        had = stored.get("data")
        if not isinstance(had, dict):
            continue
        same_seed = other.config.data.seed_of(other.seed) == job.config.data.seed_of(job.seed)
        if had.get("samples") != found["samples"]:
            yield f"{other.name}: the samples were others"
        elif same_seed and had.get("dealt") != found["dealt"]:
            yield f"{other.name}: the samples were dealt to clients in another way"


def refuse(out: Path, differences: Sequence[str], force: bool) -> None:
    """Nothing if there are none; with `force` they are noted in the folder, for the report.

    Raises:
        RunError: there are some.
    """
    if not differences:
        return
    if force:
        noted = [*forced(out), *(d for d in differences if d not in forced(out))]
        write_text(out / FORCED, encode(noted, indent=1))
        return
    listed = first_few(differences, MOST, "; ")
    raise RunError(
        f"'{out}' was started with something else, and one table must not mix the two. {listed}. Go back to what it "
        "was, start anew in another folder (--out), or go on all the same with --force, which the report then says"
    )


def forced(out: Path) -> list[str]:
    """Returns what was different when the experiment in a folder was resumed by force."""
    file = out / FORCED
    if not file.is_file():
        return []
    try:
        return [str(line) for line in decode(file.read_bytes())]
    except (ValueError, TypeError) as error:
        raise RunError(
            f"'{file}', which says what was different when the experiment was resumed by force, is damaged ({error}); "
            "restore it from a copy"
        ) from error


def _stored(jobs: Sequence[Job], out: Path) -> Iterator[tuple[Job, dict[str, Any]]]:
    for job in jobs:
        folder = out / job.folder
        if not (folder / "config.json").is_file():
            continue
        store = RunStore.open(folder, readonly=True)
        stored, wrong = store.config, other_job(store)
        groups = [stored.get(key, {}) for key in ("experiment", "environment")]
        methods = groups[0].get("methods", []) if isinstance(groups[0], dict) else None
        whole = all(isinstance(group, dict) for group in groups) and isinstance(methods, list)
        if wrong or not whole or not all(isinstance(method, dict) for method in methods or ()):
            raise RunError(
                f"'{folder / 'config.json'}' is not what was written for {job.name}"
                f"{''.join(f' ({what})' for what in wrong)}; restore the job's folder from a copy, or move it away to "
                "do it anew"
            )
        yield job, stored


def deciding(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that decide the numbers of an experiment's jobs, beside those of their methods."""
    engine = experiment.get("engine", {})
    precision = engine.get("precision", DEFAULT.engine.precision) if isinstance(engine, Mapping) else None
    kept = {key: value for key, value in experiment.items() if key not in HARMLESS}
    return {**kept, "engine": {"precision": precision}}


def decisive(experiment: Mapping[str, Any], label: str, longer: bool = False) -> dict[str, Any]:
    """Returns the settings that decide a job's numbers, those of its method among them; rounds unless `longer`."""
    but = ("rounds",) if longer else ()
    own = [m for m in experiment.get("methods", ()) if m.get("label") == label]
    shared = {key: value for key, value in deciding(experiment).items() if key not in but}
    return {**shared, "method": {k: v for k, v in own[0].items() if k not in but} if own else {}}


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yields which settings of two groups differ, and how; what did not exist then and has its default does not."""
    old, new = dict(_flat(then)), dict(_flat(now))
    for key in sorted(old.keys() | new.keys()):
        if key in old and key in new and old[key] == new[key]:
            continue
        if key not in old and _is_default(key, new[key]):
            continue  # a setting that did not exist then, left as it is
        yield f"{key} was {old.get(key, 'not there')!r} and is {new.get(key, 'not there')!r}"


def _is_default(key: str, value: Any) -> bool:
    from tailorfl.settings.experiment import ExperimentConfig

    defaults = dict(_flat(ExperimentConfig().to_dict()))
    return key in defaults and bool(defaults[key] == value)


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, list(value) if isinstance(value, list | tuple) else value


def meaning(source: Source) -> dict[str, Any]:
    """Returns how raw samples become inputs, and what the outputs stand for, as JSON can hold it.

    `shape` and `type` are of an input; `task`, `outputs` and `classes` say what comes out. `image`: a byte b of a
    channel becomes (b / 255 - mean) / deviation. `scaling`: a raw number r of a feature becomes (r - mean) / deviation,
    with the constants of the client whose it is or else those above them, and is cut off at ± clip where that is given;
    `before` is a scaling that comes first. `preparation`: of raw tables, see `tailorfl.data.constants.Constants`.
    """
    kinds = {torch.uint8: "image", torch.int64: "tokens"}
    facts: dict[str, Any] = {
        "shape": list(source.input_shape),
        "type": kinds.get(source.x.dtype, "numbers"),
        "task": source.task,
        "outputs": source.outputs,
    }
    for key in NAMED:
        if key in source.info:
            value = source.info[key]
            facts[key] = list(value) if isinstance(value, tuple) else value
    if source.mean is not None and source.std is not None:
        facts["image"] = {"mean": list(source.mean), "deviation": list(source.std)}
    scaling: Scaling | None = source.info.get(SCALING)
    if scaling is not None:
        facts["scaling"] = scaling.facts()
    preparation: Preparation | None = source.info.get(PREPARATION)
    if preparation is not None:
        facts["preparation"] = preparation.facts()
    return facts
