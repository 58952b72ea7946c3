"""What an experiment found: tables, per-client numbers and plots, from its result folder alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tailorfl.errors import RunError, first_few
from tailorfl.evaluation.metrics import LOWER_IS_BETTER
from tailorfl.evaluation.seeds import paired
from tailorfl.evaluation.summary import summarize
from tailorfl.printable import quoted
from tailorfl.report import plots
from tailorfl.report.tables import MARK, WHERE_SAID, Column, SeedResult, comparison, render
from tailorfl.runs.files import remove_left_over, write_text
from tailorfl.runs.job import trouble
from tailorfl.runs.store import RunStore
from tailorfl.settings.loading import load
from tailorfl.settings.names import slug

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from tailorfl.settings.experiment import ExperimentConfig

FEW_CLIENTS = 10
"""Of so many or fewer clients a tenth is one client."""
REFERENCES = ("local", "local_average")
"""Methods whose personal models the others must beat to be worth their communication."""


class ExperimentResult:
    """The jobs of one experiment.

    Attributes:
        path: the result folder.
        jobs: (summary, RunStore) of every finished job, in the order of methods and seeds.
        missing: why the other jobs of the experiment are not among them, a sentence each.
        folders: the result folders that the jobs are of, more than one where several were put together.
        unlike: (folder, how its experiment differs from that of the first), of those that do.
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
            ConfigError: the folder has lost it.
        """
        from tailorfl.runs.folders import experiment_in

        return experiment_in(self.path)

    def again(self) -> Self:
        """Return the result as it is now: jobs may have been finished since this one was loaded."""
        return type(self).load(self.path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the result in a folder; unfinished and damaged jobs are left out, and `missing` says so.

        Raises:
            RunError: there is no finished job that is as it was written.
        """
        folder = Path(path)
        if not (folder / "config.yaml").is_file():
            raise RunError(f"'{folder}' is not a result folder: it has no config.yaml; check the name")
        config = load(folder / "config.yaml", [])
        jobs, missing = [], []
        for method in config.methods:
            for seed in config.seeds:
                place = folder / slug(method.label) / f"seed-{seed}"
                problem = trouble(place)
                if problem:
                    missing.append(f"{method.label}, seed {seed}: {problem}")
                    continue
                store = RunStore.open(place, readonly=True)
                jobs.append((dict(store.summary or {}), store))
        if not jobs:
            raise RunError(
                f"'{folder}' has no finished job yet; continue it with --resume {quoted(folder)}. "
                f"{first_few(missing, 5, '; ')}"
            )
        return cls(folder, jobs, missing)

    @property
    def metric(self) -> str:
        """The task's primary metric."""
        return str(self.jobs[0][0]["metric"])

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the comparison table."""
        lower = self.metric in LOWER_IS_BETTER
        unit: Any = "percent" if self.metric in plots.SHARES | {"auc", "c_index"} else "number"
        better: Any = "lower" if lower else "higher"
        columns = [
            Column("mean", f"{self.metric.replace('_', ' ')} (mean)", unit, better),
            *self._beside(),
            Column("weighted_mean", "weighted", unit, better),
            Column("std", "std", unit),
            Column("worst10", "worst client" if self._few else "worst 10 %", unit, better),
            Column("best10", "best client" if self._few else "best 10 %", unit, better),
            Column("share_beating_local", "beat Local", "percent", "higher"),
        ]
        for key, title in self._extra():
            columns.append(Column(key, title, unit, better))
        if any({"personal", "global"} <= set(summary["metrics"]) for summary, _ in self.jobs):
            columns += [Column(key, title, unit, better) for key, title in self._extra("global", "shared")]
        columns += [Column(key, title, better="lower") for key, title in self._sharpness()]
        said = {key for summary, _ in self.jobs for key in summary}
        columns += [column for key, column in WHERE_SAID.items() if key in said]
        if len({summary["rounds"] for summary, _ in self.jobs}) > 1:
            columns.append(Column("rounds", "rounds"))
        # Of single samples; none where the result was made before they were counted.
        if any("gradients_each" in summary for summary, _ in self.jobs):
            columns.append(Column("gradients_each", "gradients per client and round"))
        return (*columns, Column("bytes", "sent", "bytes"), Column("seconds", "time", "seconds"))

    def _beside(self) -> list[Column]:
        """Accuracy, where classes are predicted and another metric comes first."""
        own = [s["metrics"].get(s.get("model", ""), {}).get("local", {}) for s, _ in self.jobs]
        if self.metric == "accuracy" or not any("balanced_accuracy" in found for found in own):
            return []
        return [Column("accuracy", "accuracy (mean)", "percent", "higher")]

    @property
    def _few(self) -> bool:
        """Whether a tenth of the clients is a single one, which then has a name."""
        return all(summary.get("clients", math.inf) <= FEW_CLIENTS for summary, _ in self.jobs)

    @property
    def worst_clients(self) -> list[str]:
        """Returns who the worst client is by its name, a line a method, where a tenth of the clients is one."""
        found: dict[str, dict[str, int]] = {}
        for summary, store in self.jobs if self._few else ():
            own, names = self.own(summary, store), store.config.get("clients")
            scores = own[self.metric].dropna()
            if not names or scores.empty:
                continue
            worst = int(scores.argmax() if self.metric in LOWER_IS_BETTER else scores.argmin())
            counts = found.setdefault(summary["label"], {})
            name = str(names[int(own.loc[scores.index[worst], "client"])])
            counts[name] = counts.get(name, 0) + 1
        lines = []
        for label, counts in found.items():
            seeds = sum(counts.values())
            several = [f"{n} (in {c} of {seeds} seeds)" if len(counts) > 1 else n for n, c in counts.items()]
            lines.append(f"worst client of {label}: {', '.join(several)}")
        return lines

    def _extra(self, model: str | None = None, prefix: str = "deployed") -> list[tuple[str, str]]:
        """Further test sets that at least one job has, for its deployable (or another) model."""
        names: dict[str, None] = {}
        for summary, _ in self.jobs:
            found = summary["metrics"].get(model or summary["model"], {})
            names.update(dict.fromkeys(n for n in found if n not in ("val", "local")))
        return [(f"{prefix}.{name}", name if model is None else f"{model} model, {name}") for name in names]

    def _sharpness(self) -> list[tuple[str, str]]:
        """Columns of the sharpness on clients' own test parts, of deployable and of global models that have it."""
        titles = {"deployed": "sharpness", "shared": "global model, sharpness"}
        has = {
            prefix
            for summary, _ in self.jobs
            for prefix, model in (("deployed", summary["model"]), ("shared", "global"))
            if "sharpness" in summary["metrics"].get(model, {}).get("local", {})
            and (prefix == "deployed" or summary["model"] != "global")
        }
        return [(f"{prefix}_sharpness", title) for prefix, title in titles.items() if prefix in has]

    def seed_results(self) -> list[SeedResult]:
        """Return the numbers of every job, with the share of clients that beat LocalTrain of the same seed."""
        reference = {company(s): self.own(s, store) for s, store in self.jobs if s["method"] in REFERENCES}
        out = []
        for summary, store in self.jobs:
            found = SeedResult.from_summary(summary)
            values = dict(found.values)
            # A row without privacy guarantees nothing.
            values["epsilon"] = summary["privacy"]["epsilon"]["max"] if "privacy" in summary else math.inf
            values["accuracy"] = values.get(f"{summary['model']}.local.accuracy.mean", math.nan)
            values["selected_round"] = summary.get("selection", {}).get("round", math.nan)
            local = reference.get(company(summary))
            if local is not None and summary["method"] not in REFERENCES:
                own = self.own(summary, store)
                beaten = summarize(
                    own[self.metric],
                    own["samples"],
                    local[self.metric],
                    higher_is_better=self.metric not in LOWER_IS_BETTER,
                )
                values["share_beating_local"] = beaten["share_beating_local"]
            for prefix, model in (("deployed", summary["model"]), ("shared", "global")):
                for name in summary["metrics"].get(model, {}):
                    values[f"{prefix}.{name}"] = values[f"{model}.{name}.{self.metric}.mean"]
                if f"{model}.local.sharpness.mean" in values:
                    values[f"{prefix}_sharpness"] = values[f"{model}.local.sharpness.mean"]
            out.append(SeedResult(found.label, found.method, found.seed, values))
        return out

    @property
    def table(self) -> pd.DataFrame:
        """The comparison: a row a method, mean and half width of the 95 % interval over seeds of each column."""
        return comparison(self.seed_results(), self.columns)

    @property
    def reductions(self) -> dict[str, list[str]]:
        """Label -> which other methods its settings make of it, where they do."""
        found: dict[str, list[str]] = {}
        for summary, _ in self.jobs:
            for sentence in summary.get("reductions", ()):  # runs of before have none
                known = found.setdefault(summary["label"], [])
                if sentence not in known:
                    known.append(sentence)
        return found

    def marked(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return the table with a mark behind the labels of lines that are other methods with their settings."""
        return table.rename(index={label: f"{label} {MARK}" for label in self.reductions})

    @property
    def without_effect(self) -> list[str]:
        """Return a sentence for every job some of whose rounds changed nothing, since too few clients replied."""
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
        """The comparison as Markdown, above it rounds without effect, below it a note for every marked line."""
        table = render(self.marked(self.table), self.columns, "markdown")
        return (
            "".join(f"{line}\n\n" for line in self.without_effect)
            + table
            + "".join(f"\n{line}\n" for line in (*self.remarks, *self.worst_clients))
        )

    @property
    def remarks(self) -> list[str]:
        """What stands below the table for every marked line."""
        return [f"{MARK} {label}: {line}." for label, found in self.reductions.items() for line in found]

    @property
    def clients(self) -> pd.DataFrame:
        """All per-client records of all jobs, with their label and seed."""
        return self._stacked("clients")

    @property
    def rounds(self) -> pd.DataFrame:
        """All per-round records of all jobs, with their label and seed."""
        return self._stacked("rounds")

    def means_by_job(self) -> dict[str, dict[tuple[int, str], float]]:
        """Return label -> {what a job shares with those it is paired with -> mean over clients}."""
        found: dict[str, dict[tuple[int, str], float]] = {}
        for (summary, _), result in zip(self.jobs, self.seed_results(), strict=True):
            found.setdefault(result.label, {})[company(summary)] = result.values["mean"]
        return found

    def differences(self, reference: str = REFERENCES[0]) -> pd.DataFrame:
        """Return every method's paired difference to `reference` over seeds: mean, half width of 95 %, p-value."""
        import pandas as pd

        by_label, rows = self.means_by_job(), []
        measures = [summary for summary, _ in self.jobs if summary["method"] == reference]
        base = {company(summary): by_label[summary["label"]][company(summary)] for summary in measures}
        for label, values in by_label.items():
            seeds = sorted(set(values) & set(base))
            if seeds:
                found = paired([values[s] for s in seeds], [base[s] for s in seeds])
                rows.append(
                    {"label": label, "difference": found.mean, "ci": found.half_width, "p": found.p_value}
                )
        return (
            pd.DataFrame(rows).set_index("label") if rows else pd.DataFrame(columns=["difference", "ci", "p"])
        )

    @property
    def curves(self) -> pd.DataFrame:
        """`rounds` with a column of the metric: its mean over clients' own test parts, of the deployed model."""
        rounds = self.rounds
        model = {s["label"]: s["model"] for s, _ in self.jobs}
        columns = [f"{m}/local/{self.metric}" for m in dict.fromkeys(model.values())]
        rounds[self.metric] = (
            rounds[columns].bfill(axis=1).iloc[:, 0] if len(columns) > 1 else rounds[columns[0]]
        )
        for label, which in model.items():
            rounds.loc[rounds["label"] == label, self.metric] = rounds[f"{which}/local/{self.metric}"]
        return rounds

    def plot(self) -> list[Path]:
        """Write the plots into the result folder and return their paths."""
        rounds, model = self.curves, {s["label"]: s["model"] for s, _ in self.jobs}
        clients = self.clients
        last = clients["round"] == clients.groupby(["label", "seed"])["round"].transform("max")
        own = clients[last & (clients["set"] == "local") & (clients["model"] == clients["label"].map(model))]
        paths = [self.path / f"{name}.png" for name in ("per_round", "per_client", "per_byte")]
        plots.metric_per_round(rounds, paths[0], metric=self.metric)
        plots.client_distribution(own, paths[1], metric=self.metric)
        plots.metric_by_bytes(rounds, paths[2], metric=self.metric)
        return paths

    def model(
        self,
        client: str = "global",
        *,
        method: str | None = None,
        seed: int | None = None,
        source: Any = None,
    ) -> nn.Module:
        """Return the model that a client deploys (a name or number), or the global one, in evaluation mode.

        `method` is the label of the line, by default the first, as with `seed`; `source` the data of a run on your own.
        """
        from tailorfl.runs.trained_models import restore

        run = restore(self.path, method, seed, source)
        return next(run.global_models() if client == "global" else run.models([run.number(client)])).module

    def write(self) -> list[Path]:
        """Write comparison.csv, comparison.md and the plots into the result folder; returns the plots' paths."""
        remove_left_over(self.path)
        table = self.table
        write_text(self.path / "comparison.csv", render(table, self.columns, "csv"))
        write_text(self.path / "comparison.md", self.markdown)
        return self.plot()

    def own(self, summary: dict[str, Any], store: RunStore) -> pd.DataFrame:
        """Return the last records of a job's deployed model on clients' own test parts, by client."""
        frame = store.clients()
        final = frame[(frame["round"] == summary["rounds"]) & (frame["set"] == "local")]
        own: pd.DataFrame = final[final["model"] == summary["model"]]
        return own.sort_values("client").reset_index(drop=True)

    def _stacked(self, kind: str) -> pd.DataFrame:
        import pandas as pd

        frames = []
        for summary, store in self.jobs:
            frame = store.clients() if kind == "clients" else store.rounds()
            frame.insert(0, "label", summary["label"])
            frame.insert(1, "seed", summary["seed"])
            frames.append(frame)
        stacked: pd.DataFrame = pd.concat(frames, ignore_index=True)
        return stacked


def company(summary: dict[str, Any]) -> tuple[int, str]:
    """Return what a job must share with another to be compared client by client.

    The seed, and in merged results the rest.
    """
    return int(summary["seed"]), str(summary.get("company", ""))


def results(folder: Path) -> dict[str, ExperimentResult]:
    """Return the results in a folder: of its variants by name, or its own as "". Raises RunError if there are none."""
    config = load(folder / "config.yaml") if (folder / "config.yaml").is_file() else None
    if config is None or not config.variants:
        return {"": ExperimentResult.load(folder)}
    found = {name: folder / slug(name) for name in config.variants}
    done = {
        n: ExperimentResult.load(place) for n, place in found.items() if (place / "config.yaml").is_file()
    }
    if not done:
        raise RunError(f"'{folder}' has no finished job yet; continue it with --resume {quoted(folder)}")
    return done
