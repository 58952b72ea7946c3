"""Merging of result folders: for instance of seeds from separate jobs of a queue, or of methods from different people.

Lines with the same label, settings, data and versions are one method, and their seeds are merged. Lines with the same
label but other differences stay separate, each with the name of its first folder, and the report shows the differences.
Clients are compared with LocalTrain only if it had exactly the same data and settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tailorfl.errors import ConfigError, RunError
from tailorfl.report.result import ExperimentResult, results
from tailorfl.runs.extension import methods_of
from tailorfl.runs.files import digest_of, reporting
from tailorfl.runs.fingerprint import REPLAYED, changes, decisive, samples_of
from tailorfl.runs.store import RunStore
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.names import slug

Jobs = list[tuple[dict[str, Any], RunStore]]


def merge(folders: Sequence[str | Path], out: str | Path | None) -> dict[str, MergedResult]:
    """Return the merged results of several folders, by name of the variant ("" if there are none).

    Tables, plots and reports go to `out` if it is given; the folders are not changed.

    Raises:
        ConfigError: no folders are given, or one twice, or `out` holds another experiment.
        RunError: they cannot be merged: other metrics, or the same seed of the same method twice.
    """
    if isinstance(folders, str | Path):
        raise ConfigError(f"give a list of folders, not '{folders}' alone")
    paths = [Path(folder) for folder in folders]
    target = None if out is None else Path(out)
    repeated = [str(path) for path in paths if [p.resolve() for p in paths].count(path.resolve()) > 1]
    if repeated or not paths:
        raise ConfigError(
            f"give every folder once: {repeated[0]}" if repeated else "give at least one folder"
        )
    if target is not None and (target / "config.yaml").exists():
        raise ConfigError(
            f"'{target}' already holds an experiment, and the merged table would replace its table; choose another "
            "--out"
        )
    by_folder = {path: results(path) for path in paths}
    merged = {}
    for name in dict.fromkeys(name for parts in by_folder.values() for name in parts):
        path = paths[0] if target is None else target / slug(name) if name else target
        with reporting(path, "create the result folder"):
            path.mkdir(parents=True, exist_ok=True)
        merged[name] = MergedResult.of(
            path, {p: parts[name] for p, parts in by_folder.items() if name in parts}
        )
    return merged


class MergedResult(ExperimentResult):
    """The merged results of several experiments; see the module."""

    parts: Mapping[Path, ExperimentResult]

    @classmethod
    def of(cls, path: Path, parts: Mapping[Path, ExperimentResult]) -> Self:
        """Return `parts`, results by their folder, as one result whose files go to `path`."""
        metrics = {part.metric: folder for folder, part in parts.items()}
        if len(metrics) > 1:
            listed = ", ".join(f"{metric} in '{folder}'" for metric, folder in metrics.items())
            raise RunError(f"these folders have different metrics, which one table cannot compare: {listed}")
        jobs = _together(parts)
        missing = [f"{folder}: {reason}" for folder, part in parts.items() for reason in part.missing]
        result = cls(path, jobs, missing)
        result.parts = parts
        result.folders = tuple(part.path for part in parts.values())
        result.unlike = list(_unlike(parts))
        return result

    def again(self) -> Self:
        """Return the updated result, see `ExperimentResult`."""
        return type(self).of(self.path, {folder: part.again() for folder, part in self.parts.items()})

    @property
    def config(self) -> ExperimentConfig:
        """The experiment of the first folder, with the methods and seeds of all."""
        configs = [part.config for part in self.parts.values()]
        methods = {**methods_of(configs[0])}
        for config in configs:
            methods = {**methods_of(config), **methods}
        seeds = sorted({seed for config in configs for seed in config.seeds})
        return configs[0].model_copy(update={"methods": tuple(methods.values()), "seeds": tuple(seeds)})


def _together(parts: Mapping[Path, ExperimentResult]) -> Jobs:
    """Return all jobs, in the order of first appearance of their method.

    Ambiguous labels get the name of the first folder with the same settings, data and versions.
    """
    kinds: dict[str, set[str]] = {}
    first: dict[tuple[str, frozenset[str]], Path] = {}
    place: dict[tuple[str, Path], Path] = {}
    for folder, part in parts.items():
        of_folder: dict[str, set[str]] = {}
        for summary, store in part.jobs:
            of_folder.setdefault(summary["label"], set()).add(digest_of(_facts(summary["label"], store)))
        for label, digests in of_folder.items():
            kinds.setdefault(label, set()).update(digests)
            place[label, folder] = first.setdefault((label, frozenset(digests)), folder)
    rows: dict[str, dict[int, tuple[dict[str, Any], RunStore]]] = {}
    for folder, part in parts.items():
        for summary, store in part.jobs:
            label, seed = summary["label"], int(summary["seed"])
            label = label if len(kinds[label]) == 1 else f"{label} ({_short(place[label, folder], parts)})"
            row = rows.setdefault(label, {})
            if seed in row:
                raise RunError(
                    f"{label}, seed {seed}, is in '{row[seed][1].path}' and in '{store.path}', which would count the "
                    "job twice; leave one of the folders out"
                )
            row[seed] = ({**summary, "label": label, "company": _company(store)}, store)
    return [row[seed] for row in rows.values() for seed in sorted(row)]


def _short(folder: Path, parts: Mapping[Path, ExperimentResult]) -> str:
    """Return the name of a folder, with its path if another one has the same name."""
    return folder.name if [path.name for path in parts].count(folder.name) == 1 else str(folder)


def _facts(label: str | None, store: RunStore) -> dict[str, Any]:
    """Return all that decides a job's numbers except its seed, and without a label also except its method."""
    stored = store.config
    settings = decisive(stored.get("experiment", {}), label or "", longer=label is None)
    versions = {k: v for k, v in stored.get("environment", {}).items() if k in ("tailorfl", "torch")}
    contents: dict[str, str] = stored.get("files", {})
    files = {  # a method may have weights of its own, and a folder of traces has one for each seed
        name: content
        for name, content in contents.items()
        if name.startswith("system.") or label is not None
        if name != REPLAYED
    }
    return {**settings, "version": versions, "samples": samples_of(stored), "files": files}


def _company(store: RunStore) -> str:
    """Return a digest that LocalTrain must share with a method to be its reference.

    It covers everything but the method, and each client's samples.
    """
    return digest_of({**_facts(None, store), "dealt": (store.config.get("data") or {}).get("dealt")})


def _unlike(parts: Mapping[Path, ExperimentResult]) -> Iterator[tuple[str, str]]:
    """Yield (folder, how it differs from the first one), for folders that differ."""
    first, *later = parts
    labels = {label: _facts(label, store) for label, store in _first_jobs(parts[first])}
    for folder in later:
        differences: dict[str, None] = {}
        for label, store in _first_jobs(parts[folder]):
            if label in labels:
                old, new = labels[label], _facts(label, store)
            else:  # another method: only what methods share is compared
                old, new = _facts(None, parts[first].jobs[0][1]), _facts(None, store)
            differences |= dict.fromkeys(changes(old, new))
        if differences:
            yield str(folder), "; ".join(differences)


def _first_jobs(part: ExperimentResult) -> list[tuple[str, RunStore]]:
    return list({summary["label"]: store for summary, store in reversed(part.jobs)}.items())[::-1]
