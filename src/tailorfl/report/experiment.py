"""An experiment from its first round to its report: the runner's jobs, trackers, and results.

<out>/comparison.csv, .md, *.png     written by `ExperimentResult` from all jobs
<out>/report.md, report.html         the full report, updated if it exists
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Unpack

from tailorfl.report.document import write_report
from tailorfl.report.result import ExperimentResult
from tailorfl.report.trackers import forget, tracked
from tailorfl.runs.build import make_federation
from tailorfl.runs.extension import check_more
from tailorfl.runs.files import reporting, write_text
from tailorfl.runs.folders import check_folder, check_name, discard_jobs, locked
from tailorfl.runs.job import Observer, Several, Way
from tailorfl.runs.process import as_library_error, ended_in_order
from tailorfl.runs.runner import RunOptions, run_jobs
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.loading import expand
from tailorfl.settings.names import slug


class ResultWriter(Observer):
    """Writes tables, plots and the report when every job of an experiment is done."""

    result: ExperimentResult

    def experiment_started(self, folder: Path, way: Way) -> None:
        """Delete the trackers' files of an experiment that a new one replaces."""
        if way == "new":
            forget(folder)

    def experiment_done(self, folder: Path) -> None:
        """Write the results of the jobs in a folder."""
        self.result = ExperimentResult.load(folder)
        self.result.write()
        # A report written during the run would not match the new plots.
        if (folder / "report.md").is_file():
            write_report(self.result)


@as_library_error()
def run_experiment(
    config: ExperimentConfig,
    out: Path,
    *,
    observer: Observer | None = None,
    **options: Unpack[RunOptions],
) -> ExperimentResult:
    """Run every method with every seed and return the result.

    `observer` observes the run in addition to the experiment's trackers; `options` are those of
    `tailorfl.runs.runner.run_jobs`.

    Raises:
        TailorflError: see the message; finished jobs stay on disk and "resume" continues from there.
    """
    writer = ResultWriter()
    with ended_in_order(), tracked(config, out) as trackers:
        observers = (*([] if observer is None else [observer]), *trackers, writer)
        run_jobs(config, out, observer=Several(observers), **options)
    return writer.result


def run_variants(
    config: ExperimentConfig,
    out: Path,
    *,
    way: Way = "new",
    overwrite: bool = False,
    observer: Observer | None = None,
    force: bool = False,
    tuning: Path | None = None,
) -> Iterator[ExperimentResult]:
    """Run every variant and yield its result when it is done.

    `way`, `force` and `tuning` are those of `run_experiment`.

    Raises:
        TailorflError: see the message; finished jobs stay on disk.
    """
    check_name(out)
    experiments = expand(config)
    if config.variants and way == "new":
        check_folder(out, False, overwrite)
        with reporting(out, "create the result folder"):
            out.mkdir(parents=True, exist_ok=True)
        with ExitStack() as locks:  # all variants first: another process may be running one of them
            for name in experiments:
                locks.enter_context(locked(out / slug(name)))
            for experiment in experiments.values() if (out / "config.yaml").exists() else ():
                # Unusable data must not replace earlier results.
                make_federation(experiment, experiment.data.seed_of(experiment.seeds[0]))
            for name in experiments:
                discard_jobs(out / slug(name))
    if config.variants and way == "extend":
        for name, experiment in experiments.items():
            check_more(experiment, out / slug(name), force)
    if config.variants and way != "resume":
        write_text(out / "config.yaml", config.to_yaml())
    for name, experiment in experiments.items():
        folder = out / slug(name) if name else out
        started = (folder / "config.yaml").is_file()
        yield run_experiment(
            experiment,
            folder,
            way=way if started else "new",
            overwrite=overwrite,
            observer=observer,
            force=force,
            tuning=tuning,
        )
