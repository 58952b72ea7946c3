"""What the terminal shows: progress and tables."""

from __future__ import annotations

import dataclasses
import io
import logging
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest
from rich.console import Console
from rich.progress import ProgressSample

from tailorfl.cli.results import show_comparison, show_estimate
from tailorfl.core.messages import Traffic
from tailorfl.report.progress import JobFacts, Live, ProgressLines, bars, headline, observer
from tailorfl.report.tables import Column
from tailorfl.rounds.one_round import RoundResult
from tailorfl.runs.job import Job, Observer
from tailorfl.settings.loading import load

CONFIG = load(None, ["method=ditto", "seeds=2", "rounds=4"])
JOB = Job(CONFIG, CONFIG.methods[0], 1)
DONE = RoundResult(1, tuple(range(128)), (3,), {"train": 0.3}, 0.25, Traffic())


def terminal(width: int = 120) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def shown(console: Console) -> str:
    return cast(io.StringIO, console.file).getvalue()


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"global/local/auc": 0.7, "personal/global/auc": 0.5, "personal/local/auc": 0.9}, ("auc", 0.9)),
        ({"global/local/mse": 0.7, "global/local/r2": 0.1}, ("mse", 0.7)),
        ({"global/global/accuracy": 0.7}, ("global/global/accuracy", 0.7)),
        ({}, None),
    ],
)
def test_headline_is_the_personal_model_on_local_data(
    metrics: dict[str, float], expected: tuple[str, float] | None
) -> None:
    assert headline(metrics) == expected


def test_bars_show_round_speed_metric_and_rejected_clients() -> None:
    console = terminal()
    progress = bars(console)
    watch = Live(progress, 2)
    watch.job_started(JOB, 2, 2, 4, 1)
    everything, job = progress.tasks
    assert everything.completed == pytest.approx(1 + 1 / 4)
    assert (job.description, job.completed, job.total) == ("Ditto seed 1", 1, 4)
    watch.evaluated(JOB, 2, {"personal/local/accuracy": 0.8125})
    watch.round_done(JOB, DONE)
    assert job.fields["facts"] == "round 2/4 · 512 clients/s · accuracy 0.812 · 1 rejected"
    assert everything.completed == pytest.approx(1 + 2 / 4)
    watch.job_done(JOB, {"seconds": 1.5})
    assert everything.completed == 2
    assert "Ditto seed 1 · accuracy 0.812 in 1.5 s" in shown(console)


def test_lines_tell_the_same() -> None:
    console = Console(file=io.StringIO())
    watch = ProgressLines(console)
    watch.job_started(JOB, 2, 2, 4, 1)
    watch.evaluated(JOB, 2, {"global/local/accuracy": 0.1, "personal/local/accuracy": 0.8125})
    watch.round_done(JOB, DONE)
    watch.job_done(JOB, {"seconds": 1.5})
    assert shown(console).splitlines() == [
        "[2/2] Ditto seed 1: 4 rounds, resumed after round 1",
        "[2/2] Ditto seed 1: round 2/4, accuracy 0.8125",
        "[2/2] Ditto seed 1: done in 1.5 s",
    ]


def test_with_a_budget_rounds_beyond_the_nominal_ones_are_no_finished_jobs() -> None:
    """A method that sends less than FedAvg takes more rounds than FedAvg."""
    config = load(None, ["method=ditto", "seeds=2", "rounds=1", "budget=bytes"])
    job, console = Job(config, config.methods[0], 0), Console(file=io.StringIO())
    watch = Live(progress := bars(terminal()), 2)
    everything, bar = progress.tasks
    lines = ProgressLines(console)
    for each in (watch, lines):
        each.job_started(job, 1, 2, 1, 0)
        each.evaluated(job, 2, {})
        each.round_done(job, DONE)
    assert everything.completed < 1
    assert everything.fields["facts"] == "0/2 jobs"
    assert "2/1" not in bar.fields["facts"] + shown(console)
    watch.job_done(job, {"seconds": 1.0})
    assert everything.completed == 1


def test_observer_suits_its_console() -> None:
    with observer(terminal(), CONFIG) as watch:
        assert isinstance(watch, Live)
    with observer(Console(file=io.StringIO()), CONFIG) as watch:
        assert isinstance(watch, ProgressLines)
    with observer(terminal(), CONFIG, quiet=True) as watch:
        assert type(watch) is Observer


@pytest.mark.parametrize("quiet", [False, True])
def test_warnings_stand_on_lines_of_their_own_above_the_bars(quiet: bool) -> None:
    """A long one is not cut, square brackets are no markup, and afterwards the log is as before."""
    log, console = logging.getLogger("tailorfl"), terminal(80)
    before = list(log.handlers)
    with observer(console, CONFIG, quiet=quiet):
        logging.getLogger("tailorfl.runs.runner").warning("3 of %d clients [bold]: %s", 20, "x" * 90)
        logging.getLogger("tailorfl.engines.choice").info("not for everybody")
    assert log.handlers == before
    assert f"warning: 3 of 20 clients [bold]: {'x' * 90}" in shown(console).replace("\n", "")
    assert "not for everybody" not in shown(console)


def test_lines_that_are_other_methods_are_marked_and_explained() -> None:
    column = Column("mean", "accuracy", "percent", "higher")
    frame = pd.DataFrame([{"method": "ditto", "seeds": 3, "mean": 0.81234, "mean_ci": 0.1}], index=["ditto"])
    result = SimpleNamespace(
        table=frame,
        columns=(column,),
        reductions={"ditto": ["Ditto with λ = 0 is LocalTrain in its personal models"]},
        without_effect=["2 of 5 rounds of ditto, seed 0 had no effect: too few clients replied"],
        worst_clients=["worst client of ditto: north"],
        marked=lambda table: table.rename(index={"ditto": "ditto †"}),
    )
    console = terminal()
    show_comparison(console, cast(Any, result), "digits")
    for text in (
        *("ditto †", "81.23 ± 10.00", "worst client of ditto: north", "2 of 5 rounds of ditto"),
        "† ditto: Ditto with λ = 0 is LocalTrain in its personal models",
    ):
        assert text in shown(console)


@dataclasses.dataclass
class Costs:
    """What a dry run finds."""

    methods: dict[str, dict[str, Any]]
    seconds: float = 75.0
    memory_bytes: int = 1_500_000
    malicious_clients: str = "0"
    reductions: dict[str, list[str]] = dataclasses.field(
        default_factory=lambda: {"ditto": ["Ditto with λ = 0 is LocalTrain"]}
    )


def test_an_estimate_is_one_table_of_methods_without_columns_of_zeros() -> None:
    further = {f"further_scalars_of_kind_{kind}": 10**12 + kind for kind in range(6)}
    ditto = {
        "frozen_scalars": 0,
        "seconds_per_round": 0.004,
        "bytes_per_round": 0,
        "trained": 4810,
        **further,
    }
    local = {"frozen_scalars": 0, "seconds_per_round": 0.0, "bytes_per_round": 38480}
    narrow, wide = terminal(80), terminal(300)
    for console in (narrow, wide):
        show_estimate(console, CONFIG, cast(Any, Costs({"ditto": ditto, "local": local})))
        text = shown(console)
        assert text.count("┡") == 1, "one table"
        assert text.count("│ Ditto ") == 2, "display names, among the facts and in the table"
        assert text.count("38.5 kB") == 1
        assert text.count("Ditto with λ = 0 is LocalTrain") == 1
        assert not {"malicious", "frozen"} & set(text.split())
        assert all(part in text for part in ("nothing was trained", "1 min 15 s", "1.5 MB", "4,810", "4 ms"))
    assert "further columns are in --json: " in shown(narrow)
    assert "further columns" not in shown(wide)
    assert all(f"1,000,000,000,00{kind}" in shown(wide) for kind in range(6))
    assert max(map(len, shown(narrow).splitlines())) <= 80


def test_time_left_stands_with_the_experiment() -> None:
    progress = bars(terminal())
    Live(progress, 2)
    everything, job = progress.tasks
    column = progress.columns[-1]
    assert isinstance(column, JobFacts)
    assert column.render(everything).plain == JobFacts(1).render(everything).plain == "0/2 jobs"
    everything.finished_time = None
    everything.start_time = 0.0
    everything._progress.extend([ProgressSample(0.0, 0.0), ProgressSample(10.0, 0.5)])
    assert column.render(everything).plain == "0/2 jobs · 40.0 s left"
    assert "left" not in column.render(job).plain


def test_a_warning_is_printed_once_where_packages_log_to_the_root_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Packages of transformers give the root logger a handler of its own."""
    root, console, other = logging.getLogger(), terminal(), logging.StreamHandler()
    root.addHandler(other)
    try:
        with observer(console, CONFIG, quiet=True):
            logging.getLogger("tailorfl.engines").warning("look out")
        logging.getLogger("tailorfl.engines").warning("afterwards")
    finally:
        root.removeHandler(other)
    assert shown(console) == "warning: look out\n"
    assert capsys.readouterr().err == "afterwards\n"


def test_what_every_seed_would_say_is_said_once() -> None:
    console = terminal()
    with observer(console, CONFIG, quiet=True):
        for seed in range(3):
            logging.getLogger("tailorfl.any").warning("seed %d: dear", seed, extra={"once": "dear"})
            logging.getLogger("tailorfl.any").warning("round 2: rejected")
    assert shown(console).splitlines() == ["warning: seed 0: dear"] + 3 * ["warning: round 2: rejected"]
