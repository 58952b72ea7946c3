"""The numbers that claims are judged by: one row a job, out of result folders or of what was kept of them.

What is kept of a result folder is `numbers.csv` (variant, label, seed, the metrics that claims ask for, and
facts that gates look at), `evidence.json` (recipe, scale, a digest of the settings, the settings that `faithful` looks
at), `clients.csv.gz` (a row for each client and test set), `noise.csv` (see `studies.claims.noise`) and `tuning.json`
where settings were tuned. Jobs of several folders of one recipe and scale are put together; a seed that two of them
have is taken from the first.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from studies.claims.facts import facts_of, is_shifted
from tailorfl.report.result import ExperimentResult
from tailorfl.runs.files import encode, write_text
from tailorfl.runs.fingerprint import HARMLESS
from tailorfl.settings.experiment import DEFAULT, ExperimentConfig

NUMBERS, ABOUT = "numbers.csv", "evidence.json"
JOB = ("variant", "label", "seed")
NAMED = 10
"""Clients at most whose own numbers are numbers of a job: `client.0`."""
SPLIT_BY = ("alpha", "classes", "groups")
"""Options of partitions that say how clients differ."""
OTHER_UNITS = ("feature_distance", "sharpness")
"""What is measured of a model beside its metric, in units of its own."""


@dataclass(frozen=True)
class Evidence:
    """What was found with one recipe at one scale ("" as it stands).

    Attributes:
        recipe, scale: of what.
        places: the folders that it came from.
        digest: of the settings that decide numbers, so that results of changed recipes are told apart.
        rows: one dictionary a job: variant, label, seed, and numbers by name.
        settings: variant -> what the gate `faithful` looks at, see `setting_of`.
        noise: (metric, variants, first, second) -> variance of their mean difference that seeds do not average away,
            see `studies.claims.noise`.
    """

    recipe: str
    scale: str
    places: tuple[str, ...]
    digest: str
    rows: tuple[Mapping[str, Any], ...]
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    noise: Mapping[tuple[str, str, str, str], float] = field(default_factory=dict)

    def of(self, label: str, variant: str, name: str) -> dict[int, float]:
        """Seed -> number of a label's jobs; without those that do not have it."""
        found = {
            row["seed"]: float(row.get(name, math.nan))
            for row in self.rows
            if (row["label"], row["variant"]) == (label, variant)
        }
        return {seed: value for seed, value in found.items() if not math.isnan(value)}

    def moved_on(self, times: float = 1.0) -> Evidence:
        """Return the same with every number moved on by what its metric moved in the last fifth of the rounds.

        That is the mean over seeds; `times` -1 is what it was before. What is measured in other units (OTHER_UNITS)
        stays, and so do numbers of methods whose curves were not recorded.
        """
        change = functools.cache(self.change)
        rows = tuple(
            {
                name: value + times * change(row["label"], row["variant"], name.split(".")[0])
                if _is_metric(name, value)
                else value
                for name, value in row.items()
            }
            for row in self.rows
        )
        return replace(self, rows=rows)

    def change(self, label: str, variant: str, metric: str) -> float:
        """Return what a metric's curve moved in the last fifth of the rounds.

        The deployed model's if it does not say which; the mean over seeds, 0 if there is no curve.
        """
        kind = metric.split(".")[0].replace("shared", "global")
        for name in (f"fact.change.{kind}", "fact.change"):
            if changes := list(self.of(label, variant, name).values()):
                return sum(changes) / len(changes)
        return 0.0

    @property
    def tuned(self) -> bool:
        """Whether the settings of a method were tuned."""
        return any(not math.isnan(float(row.get("fact.inside_grid", math.nan))) for row in self.rows)

    def has(self, label: str, variant: str) -> bool:
        """Whether there is a job of a label."""
        return any((row["label"], row["variant"]) == (label, variant) for row in self.rows)


def digest_of(config: ExperimentConfig) -> str:
    """Return a digest of the settings that decide the numbers of a recipe, methods and variants among them."""
    settings = config.to_dict()
    kept = {k: v for k, v in settings.items() if k not in HARMLESS or k in ("methods", "variants")}
    if (
        config.engine.precision != DEFAULT.engine.precision
    ):  # else the digests are those of evidence that is kept
        kept["engine"] = {"precision": config.engine.precision}
    return hashlib.blake2b(encode(kept).encode(), digest_size=8).hexdigest()


def of_results(found: Mapping[str, ExperimentResult], config: ExperimentConfig, folder: Path) -> Evidence:
    """Return the evidence of results by variant, of an experiment."""
    rows = [row for variant, result in found.items() for row in _rows(variant, result)]
    settings = {variant: setting_of(result.config) for variant, result in found.items()}
    return Evidence(config.name, config.scale or "", (str(folder),), digest_of(config), tuple(rows), settings)


def setting_of(config: ExperimentConfig) -> dict[str, str]:
    """Return the network, the split, and whether heads are trained, of an experiment without variants."""
    data, model = config.data, config.model
    options = [f"{key}={value}" for key, value in sorted(data.partition_options.items()) if key in SPLIT_BY]
    frozen = isinstance(model.trainable, str) and "head" not in model.trainable
    return {
        "network": model.name,
        "split": " ".join([str(data.partition), *options]),
        "head": "frozen" if frozen else "trained",
    }


def joined(found: Iterable[Evidence]) -> list[Evidence]:
    """Return one evidence a recipe, scale and digest, of the jobs of all."""
    groups: dict[tuple[str, str, str], list[Evidence]] = {}
    for one in found:
        groups.setdefault((one.recipe, one.scale, one.digest), []).append(one)
    out = []
    for (recipe, scale, digest), some in groups.items():
        jobs: dict[tuple[Any, ...], Mapping[str, Any]] = {}
        for row in (row for one in some for row in one.rows):
            jobs.setdefault(tuple(row[key] for key in JOB), row)
        places = tuple(place for one in some for place in one.places)
        settings, noise = (
            dict(ChainMap(*(dict(getattr(one, name)) for one in some))) for name in ("settings", "noise")
        )
        out.append(Evidence(recipe, scale, places, digest, tuple(jobs.values()), settings, noise))
    return out


def keep(evidence: Evidence, folder: Path, metrics: Iterable[str]) -> Path:
    """Write the numbers that `metrics` name, and all facts, into a folder of its own; returns it."""
    import pandas as pd

    place = folder / (f"{evidence.recipe}-{evidence.scale}" if evidence.scale else evidence.recipe)
    place.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys([*JOB, *sorted(set(metrics)), *_facts(evidence)])
    frame = pd.DataFrame(list(evidence.rows))
    frame = frame[[name for name in names if name in frame and not frame[name].isna().all()]]
    write_text(place / NUMBERS, frame.to_csv(index=False, float_format="%.8g", lineterminator="\n"))
    about = {name: getattr(evidence, name) for name in ("recipe", "scale", "digest", "settings")}
    write_text(place / ABOUT, encode(about, indent=1) + "\n")
    return place


def _is_metric(name: str, value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and name not in JOB
        and not name.startswith("fact.")
        and not set(OTHER_UNITS) & set(name.split("."))
    )


def _facts(evidence: Evidence) -> list[str]:
    return sorted({name for row in evidence.rows for name in row if name.startswith("fact.")})


def _rows(variant: str, result: ExperimentResult) -> Iterator[dict[str, Any]]:
    facts = facts_of(result)
    for (summary, store), found, more in zip(result.jobs, result.seed_results(), facts, strict=True):
        row = {"variant": variant, "label": summary["label"], "seed": found.seed, **found.values, **more}
        if int(summary["clients"]) <= NAMED:
            own = store.clients().query(
                "round == @summary['rounds'] and model == @summary['model'] and set == 'local'"
            )
            row |= {
                f"client.{client}": v for client, v in zip(own["client"], own[result.metric], strict=True)
            }
        for model in ("deployed", "shared"):
            shifted = [
                v
                for k, v in found.values.items()
                if k.startswith(f"{model}.") and is_shifted(k[len(model) + 1 :])
            ]
            if shifted:
                row[f"{model}.shifted"] = sum(shifted) / len(shifted)
        yield row
