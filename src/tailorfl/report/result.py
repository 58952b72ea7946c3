"""The results of an experiment: tables, per-client numbers and plots, read only from its result folder."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tailorfl.errors import ConfigError, RunError, first_few, unknown
from tailorfl.evaluation.comparisons import paired
from tailorfl.evaluation.metrics import LOWER_IS_BETTER
from tailorfl.evaluation.summary import summarize
from tailorfl.printable import quoted
from tailorfl.report import plots
from tailorfl.report.columns import are_few, columns_of, numbers
from tailorfl.report.tables import MARK, Column, SeedResult, as_table, comparison, csv
from tailorfl.runs.files import remove_left_over, reporting, write_text
from tailorfl.runs.job import trouble
from tailorfl.runs.store import RunStore
from tailorfl.settings.loading import load
from tailorfl.settings.names import display_name, slug

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from tailorfl.settings.experiment import ExperimentConfig

log = logging.getLogger(__name__)

REFERENCES = ("local", "local_average")
"""Methods whose personal models others must beat to be worth their communication."""
MOST_WORST = 3
"""Largest number of clients named as a method's worst, the most frequent over seeds first."""


class ExperimentResult:
    """The jobs of one experiment.

    Attributes:
        path: the result folder.
        jobs: (summary, RunStore) of every finished job, in the order of methods and seeds.
        missing: a sentence for each other job of the experiment: why it is missing.
        folders: the jobs' result folders; several in merged results.
        unlike: (folder, how its experiment differs from that of the first folder), for folders that differ.
    """

    def __init__(
        self, path: Path, jobs: Sequence[tuple[dict[str, Any], RunStore]], missing: Sequence[str] = ()
    ) -> None:
        self.path, self.jobs, self.missing = path, list(jobs), list(missing)
        self.folders: tuple[Path, ...] = (path,)
        self.unlike: list[tuple[str, str]] = []

    @property
    def config(self) -> ExperimentConfig:
        """The experiment.

        Raises:
            ConfigError: the folder does not contain it any more.
        """
        from tailorfl.runs.folders import experiment_in

        return experiment_in(self.path)

    def again(self) -> Self:
        """Return the updated result: jobs may have finished since this one was loaded."""
        return type(self).load(self.path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the result in a folder; unfinished and damaged jobs are left out and listed in `missing`.

        Raises:
            ConfigError: the folder has variants, which are results each.
            RunError: there is no finished and undamaged job.
        """
        folder = Path(path)
        if not (folder / "config.yaml").is_file():
            raise RunError(f"'{folder}' is not a result folder: it has no config.yaml; check the name")
        config = load(folder / "config.yaml", [])
        if config.variants:
            raise ConfigError(
                f"'{folder}' has variants ({', '.join(config.variants)}), each in a folder of its own; give one of "
                "these"
            )
        jobs, missing = [], []
        for method in config.methods:
            for seed in config.seeds:
                job_folder = folder / slug(method.label) / f"seed-{seed}"
                problem = trouble(job_folder)
                if problem:
                    missing.append(f"{method.label}, seed {seed}: {problem}")
                    continue
                store = RunStore.open(job_folder, readonly=True)
                jobs.append((dict(store.summary or {}), store))
        if not jobs:
            raise RunError(
                f"'{folder}' has no finished job yet; continue it with --resume {quoted(folder)}. "
                f"{first_few(missing, 5, '; ')}"
            )
        return cls(folder, jobs, missing)

    @property
    def summaries(self) -> list[dict[str, Any]]:
        """The summary of every job."""
        return [summary for summary, _ in self.jobs]

    @property
    def labels(self) -> list[str]:
        """The labels of the methods, in the order of the table."""
        return list(dict.fromkeys(str(summary["label"]) for summary in self.summaries))

    @property
    def display_names(self) -> dict[str, str]:
        """Label -> the method's name in tables and pictures; the labels themselves if two names would be equal."""
        names = {
            str(summary["label"]): display_name(
                str(summary["label"]), str(summary["method"]), summary.get("title", "")
            )
            for summary in self.summaries
        }
        return names if len(set(names.values())) == len(names) else {label: label for label in names}

    @property
    def displayed(self) -> Self:
        """The result with display names as labels, for tables and pictures; files for programs keep the labels."""
        result, names = copy(self), self.display_names
        result.jobs = [({**summary, "label": names[summary["label"]]}, store) for summary, store in self.jobs]
        return result

    @property
    def reference(self) -> str | None:
        """The label of LocalTrain, or of the average of its models; None if neither was run."""
        return next((str(s["label"]) for s in self.summaries if s["method"] in REFERENCES), None)

    @property
    def metric(self) -> str:
        """The task's primary metric."""
        return str(self.jobs[0][0]["metric"])

    @property
    def lower_is_better(self) -> bool:
        """Whether the metric is an error."""
        return self.metric in LOWER_IS_BETTER

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the comparison table."""
        return columns_of(self.summaries, self.metric)

    @property
    def worst_clients(self) -> list[str]:
        """A line for every method that names its worst client; empty unless a tenth of the clients is a single one."""
        worst: dict[str, Counter[str]] = {}
        for summary, store in self.jobs if are_few(self.summaries) else ():
            records, names = self.own(summary, store), store.config.get("clients")
            scores = records[self.metric].dropna()
            if names and not scores.empty:
                row = scores.argmax() if self.lower_is_better else scores.argmin()
                name = str(names[int(records["client"].iloc[scores.index[int(row)]])])
                worst.setdefault(summary["label"], Counter())[name] += 1
        lines = []
        for label, counts in worst.items():
            seeds = f"of {counts.total()} seeds"
            several = [f"{n} (in {c} {seeds})" if len(counts) > 1 else n for n, c in counts.most_common()]
            lines.append(f"worst client of {label}: {first_few(several, MOST_WORST)}")
        return lines

    def seed_results(self) -> list[SeedResult]:
        """Return the numbers of every job, with the share of clients that beat LocalTrain with the same seed."""
        columns = self.columns
        reference = {
            company(s): self.own(s, store).set_index("client")[self.metric]
            for s, store in reversed(self.jobs)
            if s["method"] in REFERENCES
        }
        results = []
        for summary, store in self.jobs:
            local, more = reference.get(company(summary)), {}
            if local is not None and summary["method"] not in REFERENCES:
                records = self.own(summary, store)
                # A deployed client may have missed the evaluation of one of the two.
                scores = (records[self.metric], records["samples"], local.reindex(records["client"]))
                share = summarize(*scores, higher_is_better=not self.lower_is_better)["share_beating_local"]
                more["share_beating_local"] = share
            values = numbers({**summary, **more}, self.metric, columns)
            seed, others = company(summary)
            results.append(SeedResult(summary["label"], summary["method"], seed, values, others))
        return results

    @property
    def table(self) -> pd.DataFrame:
        """The comparison: a row for each method, with means and half widths of 95 % intervals over seeds."""
        return comparison(self.seed_results(), self.columns)

    @property
    def reductions(self) -> dict[str, list[str]]:
        """Label -> sentences on the other methods that it equals with its settings; only labels that have some."""
        sentences: dict[str, dict[str, None]] = {}
        for summary in self.summaries:
            if summary.get("reductions"):  # older runs have none
                sentences.setdefault(summary["label"], {}).update(dict.fromkeys(summary["reductions"]))
        return {label: list(lines) for label, lines in sentences.items()}

    def marked(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return the table with a mark after the labels of methods that equal others with their settings."""
        return table.rename(index={label: f"{label} {MARK}" for label in self.reductions})

    @property
    def without_effect(self) -> list[str]:
        """A sentence for every job with rounds that had no effect, since too few clients replied."""
        sentences = []
        for summary, store in self.jobs:
            rounds = store.rounds()
            if {"absent", "clients"} <= set(rounds):
                idle = sum(set(r["clients"]) <= set(r["absent"]) for r in rounds.to_dict("records"))
                if idle:
                    job = f"{summary['label']}, seed {summary['seed']}"
                    sentences.append(
                        f"{idle} of {len(rounds)} rounds of {job} had no effect: too few clients replied"
                    )
        return sentences

    @property
    def markdown(self) -> str:
        """The comparison as Markdown, preceded by rounds without effect and followed by notes and worst clients."""
        result = self.displayed
        table = as_table(result.marked(result.table), result.columns).markdown()
        above = "".join(f"{line}\n\n" for line in result.without_effect)
        return above + table + "".join(f"\n{line}\n" for line in (*result.remarks, *result.worst_clients))

    @property
    def remarks(self) -> list[str]:
        """Notes on the marked lines of the table."""
        return [f"{MARK} {label}: {line}." for label, lines in self.reductions.items() for line in lines]

    @property
    def clients(self) -> pd.DataFrame:
        """All per-client records of all jobs, with their label and seed."""
        return self._stacked([store.clients() for _, store in self.jobs])

    @property
    def rounds(self) -> pd.DataFrame:
        """All per-round records of all jobs, with their label and seed."""
        return self._stacked([store.rounds() for _, store in self.jobs])

    def _stacked(self, frames: list[pd.DataFrame]) -> pd.DataFrame:
        import pandas as pd

        for summary, frame in zip(self.summaries, frames, strict=True):
            frame.insert(0, "label", summary["label"])
            frame.insert(1, "seed", summary["seed"])
        return pd.concat(frames, ignore_index=True).copy()  # the copy is not fragmented, despite many columns

    def means_by_job(self) -> dict[str, dict[tuple[int, str], float]]:
        """Return label -> {key that paired jobs share -> mean over clients}."""
        means: dict[str, dict[tuple[int, str], float]] = {}
        for summary in self.summaries:
            mean = summary["metrics"]["mean"]
            means.setdefault(summary["label"], {})[company(summary)] = (
                math.nan if mean is None else float(mean)
            )
        return means

    def differences(self, reference: str = REFERENCES[0]) -> pd.DataFrame:
        """Return every method's paired difference to `reference` over seeds: mean, half width (95 %) and p-value.

        `reference` is a label or the name of a method, of whose lines the first counts. Raises ConfigError if the
        result has neither; without LocalTrain, the default, there are no rows.
        """
        import pandas as pd

        by_label, rows = self.means_by_job(), {}
        key = "label" if reference in by_label else "method"
        measures = [summary for summary in self.summaries if summary[key] == reference]
        if not measures and reference not in REFERENCES:
            raise unknown("method of the result", reference, list(by_label))
        base = {company(s): by_label[s["label"]][company(s)] for s in reversed(measures)}
        for label, values in by_label.items():
            seeds = sorted(set(values) & set(base))
            if seeds:
                pair = paired([values[s] for s in seeds], [base[s] for s in seeds])
                rows[label] = (pair.mean, pair.half_width, pair.p_value)
        frame = pd.DataFrame.from_dict(rows, orient="index", columns=["difference", "ci", "p"])
        return frame.rename_axis("label")

    @property
    def curves(self) -> pd.DataFrame:
        """`rounds` with a column for the metric: the deployed model's mean over clients' own test parts."""
        rounds = self.rounds
        models = rounds["label"].map({s["label"]: s["model"] for s in self.summaries})
        values = {model: rounds[f"{model}/local/{self.metric}"] for model in models.unique()}
        return rounds.assign(
            **{self.metric: sum(v.where(models == model, 0.0) for model, v in values.items())}
        )

    def plot(self, folder: str | Path | None = None, suffix: str = ".png") -> list[Path]:
        """Write the plots as ".png", ".pdf" or ".svg", by default into the result folder; return their paths.

        There are none if no client has the metric, such as an AUC where each has one class.
        """
        import pandas as pd

        result = self.displayed
        own = pd.concat([self.own(s, store).assign(label=s["label"]) for s, store in result.jobs])
        if own[self.metric].isna().all():
            return []
        target = self.path if folder is None else Path(folder)
        with reporting(target, "create the folder"):
            target.mkdir(parents=True, exist_ok=True)
        rounds = result.curves
        paths = [target / f"{name}{suffix}" for name in ("per_round", "per_client", "per_byte")]
        plots.metric_per_round(rounds, paths[0], metric=self.metric)
        plots.client_distribution(own, paths[1], metric=self.metric)
        plots.metric_by_bytes(rounds, paths[2], metric=self.metric)
        return paths

    def model(
        self,
        client: str | int = "global",
        *,
        method: str | None = None,
        seed: int | None = None,
        source: Any = None,
    ) -> nn.Module:
        """Return the model that a client (a name or number) deploys, or the global one, in evaluation mode.

        `method` is a label and `seed` a number, by default the first ones; `source` is the data of a run on your own
        data.
        """
        from tailorfl.runs.trained_models import restore

        run = restore(self.path, method, seed, source)
        return next(run.global_models() if client == "global" else run.models([run.number(client)])).module

    def write(self) -> list[Path]:
        """Write comparison.csv, comparison.md and the plots into the result folder; return the plots' paths."""
        remove_left_over(self.path)
        write_text(self.path / "comparison.csv", csv(self.table, self.columns))
        write_text(self.path / "comparison.md", self.markdown)
        return self.plot()

    def own(self, summary: dict[str, Any], store: RunStore) -> pd.DataFrame:
        """Return the last records of a job's deployed model on clients' own test parts, by client."""
        frame = store.clients()
        final = frame[(frame["round"] == summary["rounds"]) & (frame["set"] == "local")]
        records: pd.DataFrame = final[final["model"] == summary["model"]]
        return records.sort_values("client").reset_index(drop=True)


def company(summary: dict[str, Any]) -> tuple[int, str]:
    """Return the key that two jobs must share to be compared client by client.

    It is the seed, and in merged results also a digest of settings and data.
    """
    return int(summary["seed"]), str(summary.get("company", ""))


def results(folder: Path) -> dict[str, ExperimentResult]:
    """Return the results in a folder: its own as "", or those of its variants by name.

    Variants without a finished and undamaged job are left out with a warning. Raises RunError if none has one.
    """
    config = load(folder / "config.yaml") if (folder / "config.yaml").is_file() else None
    if config is None or not config.variants:
        return {"": ExperimentResult.load(folder)}
    folders = {name: folder / slug(name) for name in config.variants}
    done = {}
    for name, path in folders.items():
        try:
            done[name] = ExperimentResult.load(path)
        except RunError as error:
            log.warning("variant %s is left out: %s", name, error, extra={"once": path})
    if not done:
        raise RunError(f"'{folder}' has no finished job yet; continue it with --resume {quoted(folder)}")
    return done
