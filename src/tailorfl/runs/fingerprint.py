"""The settings, data and versions behind a job's results, so that a resumed experiment cannot mix different ones.

Every job stores its experiment, digests of its data, their partition and the files that its settings name, and the
versions of the library and of torch. Settings that do not change results (names, texts, engines except for their
precision, when to save) may differ; all others may not.
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

from tailorfl.data.federation import Federation
from tailorfl.data.preparation import GIVEN, PREPARATION, Preparation, given_digest
from tailorfl.data.remote_federation import REMOTE
from tailorfl.data.scaling import SCALING, Scaling
from tailorfl.data.source import Source
from tailorfl.data.storage import is_file, named_file
from tailorfl.data.table_files import READING
from tailorfl.data.text import TEXTS
from tailorfl.errors import RunError, first_few
from tailorfl.runs.files import decode, encode, renew_manifest, sha256, write_text
from tailorfl.runs.job import Job, other_job
from tailorfl.runs.privacy import privacy_of
from tailorfl.runs.store import TRACE, RunStore
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
"""Settings of an experiment that do not change a job's results (the engine's precision does); `methods` and `seeds`
define the jobs.
"""
REPLAYED = "system.trace"
"""Setting of the trace that a job replays."""
FORCED = "forced.json"
"""File of a result folder that lists the differences when it was resumed by force."""
NAMED = ("classes", "features", "tokenizer", "pad", "vocabulary", TEXTS, READING)
"""Entries of a source's `info` that name numbers or determine how they are read."""
PREPARED = "samples"
"""Entry of older folders instead of `GIVEN`: a digest of prepared samples."""
MOST = 8
"""Largest number of differences that a message lists."""
MOST_COUNTS = 50_000
"""Largest number of clients times classes for which label counts are stored."""
COUNTED_TASKS = ("classification", "binary")


def environment() -> dict[str, str]:
    """Return the versions and the processor, on which the last digits of results may depend."""
    return {
        "tailorfl": version("tailorfl"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
    }


def processor() -> str:
    """Return the name of this machine's processor and its widest floating-point instructions."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def digests(federation: Federation) -> dict[str, str]:
    """Return digests of the given data, and of their partition into clients and parts.

    The first is the same for every seed; the second covers public and shifted samples too.
    """
    dealt = hashlib.blake2b(digest_size=16)
    for part in (federation.part("train"), federation.part("val"), federation.part("test")):
        for array in (part.values, part.starts, part.stops):
            dealt.update(np.ascontiguousarray(array).tobytes())
    dealt.update(np.ascontiguousarray(federation.server).tobytes())
    dealt.update(repr((federation.num_clients, federation.names)).encode())
    if federation.public is not None:
        federation.public.feed(dealt)
    for name, source in federation.shifted.items():
        dealt.update(name.encode())
        source.feed(dealt)
    return {GIVEN: given_digest(federation.source), "dealt": dealt.hexdigest()}


def files_of(job: Job) -> dict[str, str]:
    """Return the sha256 of each file that a job's settings name besides its data, by setting; of those that exist."""
    models, system = job.config.model_of(job.method).architectures, job.config.system
    trace = system.trace
    if trace is not None and Path(trace).is_dir():
        trace = str(Path(trace) / job.folder / TRACE)
    named = {
        **{f"weights of model {name}": model.weights for name, model in models.items()},
        "system.availability.file": system.availability.file,
        "system.speed.file": system.speed.file,
        "system.bandwidth.file": system.bandwidth.file,
        REPLAYED: trace,
    }
    found = {key: named_file(name) for key, name in named.items() if name is not None and is_file(name)}
    return {key: sha256(path) for key, path in found.items()}


def samples_of(stored: Mapping[str, Any]) -> str | None:
    """Return the digest of the samples in a job's folder; older folders have another name for it."""
    data = stored.get("data") or {}
    digest: str | None = data.get(GIVEN, data.get(PREPARED))
    return digest


def data_change(
    stored: Mapping[str, Any], today: Mapping[str, str], source: Source, same_seed: bool = True
) -> str:
    """Return how the data of a job's folder differ from today's, "" if they do not or no digests are stored.

    Args:
        stored: the content of the folder's config.json, see `made_with`.
        today: the `digests` of today's federation.
        source: of today's federation.
        same_seed: whether both were made with the same seed, and so with the same partition.
    """
    stored_data, today = stored.get("data"), dict(today)
    if not isinstance(stored_data, dict):
        return ""
    if GIVEN not in stored_data and GIVEN in source.info:
        if not same_seed:
            version = stored.get("environment", environment())["tailorfl"]
            return (
                f"tailorfl {version} wrote it without a digest of the data before data.normalise, so other seeds "
                "cannot be compared with it"
            )
        prepared = hashlib.blake2b(digest_size=16)
        source.feed(prepared)
        today[GIVEN] = prepared.hexdigest()
    if samples_of(stored) != today[GIVEN]:
        return "the samples were different"
    if same_seed and stored_data.get("dealt") != today["dealt"]:
        return "the samples were distributed to clients differently"
    return ""


def made_with(job: Job, federation: Federation, data: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings, versions and digests that a job's folder stores; `data` are those of its federation."""
    return {
        "experiment": job.config.to_dict(),
        "data": dict(data),
        "environment": environment(),
        "files": files_of(job),
        "clients": list(federation.names),
        "source": federation.source.name,
        "inputs": meaning(federation.source),
        **label_counts(job, federation),
    }


def other_settings(
    jobs: Sequence[Job], out: Path, *, longer: bool = False, restoring: bool = False
) -> Iterator[str]:
    """Yield how the settings of the jobs in a folder, the files that they name, and versions differ from today's.

    Args:
        jobs: the jobs as they would run today.
        out: the folder.
        longer: whether the stored jobs may have fewer rounds.
        restoring: whether only trained models are asked for, which depend on neither versions nor the simulated system.
    """
    installed = {key: value for key, value in environment().items() if key in ("tailorfl", "torch")}
    for job, stored in _stored(jobs, out):
        before, after = (
            decisive(e, job.method.label, longer)
            for e in (stored.get("experiment", {}), job.config.to_dict())
        )
        stored_versions = {k: v for k, v in stored.get("environment", {}).items() if k in installed}
        if "environment" not in stored or restoring:
            stored_versions = installed  # older folders have no versions
        for change in (
            *changes(before, after),
            *changes({"version": stored_versions}, {"version": installed}),
        ):
            yield f"{job.name}: {change}"
        contents = stored.get("files", {})  # older folders have none
        for setting, content in files_of(job).items():
            if contents.get(setting, content) != content and not (
                restoring and setting.startswith("system.")
            ):
                yield f"{job.name}: the file of {setting} has another content"


def other_data(
    jobs: Sequence[Job], out: Path, job: Job, federation: Federation, today: Mapping[str, str]
) -> Iterator[str]:
    """Yield a sentence for each job in a folder whose data differ from the federation of `job`.

    `today` are the digests of the federation.
    """
    for stored_job, stored in _stored(jobs, out):
        same_seed = stored_job.config.data.seed_of(stored_job.seed) == job.config.data.seed_of(job.seed)
        change = data_change(stored, today, federation.source, same_seed)
        if change:
            yield f"{stored_job.name}: {change}"


def note_data(jobs: Sequence[Job], out: Path, job: Job, federation: Federation) -> None:
    """Store the federation of `job`, which a client has joined, in the folders of all jobs with the same data."""
    data = digests(federation)
    for stored_job, stored in list(_stored(jobs, out)):
        if stored_job.config.data.seed_of(stored_job.seed) == job.config.data.seed_of(job.seed):
            folder, facts = out / stored_job.folder, made_with(stored_job, federation, data)
            write_text(folder / "config.json", encode({**stored, **facts}, indent=1))
            renew_manifest(folder)


def refuse(out: Path, differences: Sequence[str], force: bool) -> None:
    """Refuse differences; with `force` note them in the folder, for the report.

    Raises:
        RunError: there are differences, without `force`.
    """
    if not differences:
        return
    if force:
        noted = [*forced(out), *(d for d in differences if d not in forced(out))]
        write_text(out / FORCED, encode(noted, indent=1))
        return
    listed = first_few(differences, MOST, "; ")
    raise RunError(
        f"'{out}' was started with something else, and one table must not mix the two. {listed}. Restore the original, "
        "start in another folder (--out), or let tailorfl run continue with --force, which the report then mentions"
    )


def forced(out: Path) -> list[str]:
    """Return the differences with which the experiment in a folder was resumed by force."""
    file = out / FORCED
    if not file.is_file():
        return []
    try:
        return [str(line) for line in decode(file.read_bytes())]
    except (ValueError, TypeError) as error:
        raise RunError(
            f"'{file}', which lists the differences when the experiment was resumed by force, is damaged ({error}); "
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
        is_whole = all(isinstance(group, dict) for group in groups) and isinstance(methods, list)
        if wrong or not is_whole or not all(isinstance(method, dict) for method in methods or ()):
            raise RunError(
                f"'{folder / 'config.json'}' was changed after it was written for "
                f"{job.name}{''.join(f' ({problem})' for problem in wrong)}; restore the job's folder from a copy, or "
                "move it away to run the job again"
            )
        yield job, stored


def deciding(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that determine the results of an experiment's jobs, without those of methods."""
    engine = experiment.get("engine", {})
    precision = engine.get("precision", DEFAULT.engine.precision) if isinstance(engine, Mapping) else None
    settings = {key: value for key, value in experiment.items() if key not in HARMLESS}
    return {**settings, "engine": {"precision": precision}}


def decisive(experiment: Mapping[str, Any], label: str, longer: bool = False) -> dict[str, Any]:
    """Return the settings that determine a job's results, including its method's; rounds only without `longer`."""
    but = ("rounds",) if longer else ()
    lines = [m for m in experiment.get("methods", ()) if m.get("label") == label]
    shared = {key: value for key, value in deciding(experiment).items() if key not in but}
    return {**shared, "method": {k: v for k, v in lines[0].items() if k not in but} if lines else {}}


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield how settings of two groups differ; a setting that is new and has its default does not count."""
    old, new = dict(_flat(before)), dict(_flat(after))
    for key in sorted(old.keys() | new.keys()):
        if key in old and key in new and old[key] == new[key]:
            continue
        if key not in old and _is_default(key, new[key]):
            continue  # a new setting with its default
        yield f"{key} was {old.get(key, 'not there')!r} and is {new.get(key, 'not there')!r}"


def _is_default(key: str, value: Any) -> bool:
    defaults = dict(_flat(DEFAULT.to_dict()))
    return key in defaults and bool(defaults[key] == value)


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, list(value) if isinstance(value, list | tuple) else value


def meaning(source: Source) -> dict[str, Any]:
    """Return how raw samples become inputs, and the meaning of outputs, as JSON can hold it.

    `shape` and `type` are those of an input; `task`, `outputs` and `classes` describe the outputs. `image`: a byte b of
    a channel becomes (b / 255 - mean) / deviation. `scaling`: a raw number r of a feature becomes (r - mean) /
    deviation, with the constants of its client or else the common ones, and is clipped to ± clip if that is given;
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


def label_counts(job: Job, federation: Federation) -> dict[str, Any]:
    """Return {"labels": {"classes": names, "counts": [clients][classes] training samples}}.

    Empty if samples have no class, if the table is too large, if training is private (its ε does not cover counts of a
    client's samples), or if clients keep their labels to themselves.
    """
    source = federation.source
    if source.task not in COUNTED_TASKS or privacy_of(job) is not None or source.info.get(REMOTE):
        return {}
    counts = federation.describe("train")
    if counts.size > MOST_COUNTS:
        return {}
    classes = source.info.get("classes")
    names = (
        [str(name) for name in classes] if classes is not None and len(classes) == counts.shape[1] else None
    )
    return {"labels": {"classes": names or list(map(str, range(counts.shape[1]))), "counts": counts.tolist()}}
