"""`tailorfl tune`: the same budget for every method of an experiment, and the experiment with what was chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailorfl.cli.arguments import Imports, again, experiment
from tailorfl.cli.running import RunRequest
from tailorfl.cli.screen import say, stderr, stdout
from tailorfl.cli.state import State
from tailorfl.errors import ConfigError
from tailorfl.light_imports import import_tensordict
from tailorfl.printable import quoted

if TYPE_CHECKING:
    from tailorfl.settings.experiment import ExperimentConfig
    from tailorfl.tuning.outcome import Tuning
    from tailorfl.tuning.plan import Plan
    from tailorfl.tuning.run import Watch
    from tailorfl.tuning.samplers import Sampler

Budget = Annotated[
    str | None,
    typer.Option(
        metavar="TRIALS[xROUNDS[xSEEDS]]",
        help="What each method gets: 20, 20x10 or 20x10x2; rounds are the experiment's and seeds 1 if not told.",
    ),
]
Before = Annotated[
    str | None,
    typer.Option(
        "--tune",
        metavar="TRIALS[xROUNDS[xSEEDS]]",
        help="Tune every method with this budget first, in the folder OUT-tuning; see tailorfl tune.",
    ),
]
SamplerName = Annotated[
    str | None,
    typer.Option(help="random (the default), tpe, grid, halving or hyperband.", show_default=False),
]
Workers = Annotated[int, typer.Option(min=1, help="Processes that train trials.")]
Widen = Annotated[
    bool,
    typer.Option(
        "--widen", help="Extend a grid at the side where the best value lies, within the same budget."
    ),
]
DEFAULT = "20"


@dataclass(frozen=True)
class Tune:
    """What a command was told about tuning."""

    budget: str | None = None
    sampler: str | None = None
    seed: int | None = None
    widen: bool = False
    workers: int = 1

    def plan(self, config: ExperimentConfig) -> Plan:
        """Return what that comes to for an experiment. Raises ConfigError where it does not fit."""
        from tailorfl.runs.build import check
        from tailorfl.tuning.plan import TuningRequest, plan

        check(config)
        wanted: Sampler = self.sampler or "random"  # type: ignore[assignment]  # TuningRequest looks at it
        return plan(config, TuningRequest(self.budget or DEFAULT, wanted, self.seed or 0, self.widen))


def command(
    ctx: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...",
            help="The experiment to tune: a YAML file or the name of a recipe; then settings.",
            show_default=False,
        ),
    ] = None,
    budget: Budget = None,
    sampler: SamplerName = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of what is drawn; 0 if not told.")] = None,
    widen: Widen = False,
    workers: Workers = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the tuning; by default runs/NAME-tuning, or the next free.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Go on with the tuning in this folder.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show search spaces and costs; train nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print tuning.json in place of tables.")] = False,
    imports: Imports = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress display.")] = False,
) -> None:
    """Tune every method fairly: the same budget for each, over its own search space, by validation data alone."""
    told = Tune(budget, sampler, seed, widen, workers)
    if resume is not None:
        _refuse_beside_resume(arguments, told, out)
    else:
        from tailorfl.settings.experiment import COMPARED

        config = experiment(arguments, COMPARED)
    import_tensordict()
    from tailorfl.report.progress import messages
    from tailorfl.tuning.plan import default_folder, plan_in

    with messages(stderr()):
        if resume is not None:
            plan, folder = plan_in(resume), resume
        else:
            plan = told.plan(config)
            folder = out or default_folder(config)
    if dry_run:
        from tailorfl.cli.tuned import show_plan

        show_plan(stdout(), plan, workers, quiet)
        return
    if resume is None:
        from tailorfl.tuning.plan import begin

        begin(folder, plan)
    found = perform(ctx.ensure_object(State), folder, plan, workers, quiet)
    show(found, as_json)


def before(
    state: State, request: RunRequest, budget: str, dry_run: bool, quiet: bool, as_json: bool
) -> RunRequest:
    """Tune what a comparison was asked for, beside its folder; return the request to compare what was chosen.

    A tuning that is there goes on where the comparison is to be resumed. What was chosen is printed, except where the
    comparison is asked for `as_json`.

    Raises:
        TailorflError: the request cannot be tuned, or the tuning fails.
    """
    from tailorfl.report.progress import messages
    from tailorfl.runs.folders import new_folder
    from tailorfl.tuning.plan import REQUEST, TUNED, begin, discard, plan_in

    request.check()
    if request.extend is not None:
        raise ConfigError("--tune is for a new comparison; --extend adds to one whose settings are chosen")
    begun = None if request.resume is None else beside(request.resume)
    with messages(stderr()):
        if begun is not None and (begun / REQUEST).is_file():
            plan = plan_in(begun)
        else:
            plan = Tune(budget).plan(experiment(request.arguments, request.methods))
    if dry_run:
        from tailorfl.cli.tuned import show_plan

        show_plan(stderr() if as_json else stdout(), plan, 1, quiet)
        return request
    asked = plan.asked
    named = asked.model_copy(update={"name": f"{asked.name}-tuned"})
    folder = request.resume or request.out or new_folder(named, request.overwrite)
    if request.overwrite:
        discard(beside(folder))
    if not (beside(folder) / REQUEST).is_file() or request.resume is None:
        begin(beside(folder), plan)
    go_on = f"tailorfl compare{again()} --tune {budget} --resume {quoted(folder)}"
    found = perform(state, beside(folder), plan, 1, quiet, go_on)
    if not as_json:
        show(found)
    tuned = [str(beside(folder) / TUNED)]
    return replace(request, arguments=tuned, methods=None, out=None if request.resume else folder)


def beside(folder: Path) -> Path:
    """Return the folder of the tuning that a comparison's folder comes from."""
    return folder.with_name(f"{folder.name}-tuning")


def perform(state: State, folder: Path, plan: Plan, workers: int, quiet: bool, resume: str = "") -> Tuning:
    """Tune in a folder that is prepared; `resume` is the command that goes on, by default that of tune."""
    from tailorfl.tuning.plan import REQUEST
    from tailorfl.tuning.run import tune

    state.under_way(folder / REQUEST, resume or f"tailorfl tune{again()} --resume {quoted(folder)}")
    with _watching(quiet) as watch:
        found = tune(folder, plan, workers=workers, watch=watch)
    state.done()
    return found


def show(found: Tuning, as_json: bool = False) -> None:
    """Print what a tuning came to."""
    from tailorfl.cli.tuned import show_tuning
    from tailorfl.runs.files import encode

    if as_json:
        typer.echo(encode(found.as_json(), indent=1))
        return
    show_tuning(stdout(), found)
    say(stdout(), f"tuning: {found.folder}")
    say(stdout(), f"to compare: tailorfl compare{again()} {quoted(found.experiment)}")


@contextmanager
def _watching(quiet: bool) -> Iterator[Watch]:
    from tailorfl.cli.tuned import Bar, TuningLines
    from tailorfl.report.progress import bars, messages
    from tailorfl.tuning.run import Watch

    console = stderr()
    with messages(console):
        if quiet:
            yield Watch()
        elif console.is_terminal:
            with bars(console) as progress:
                yield Bar(progress)
        else:
            yield TuningLines(console)


def _refuse_beside_resume(arguments: list[str] | None, told: Tune, out: Path | None) -> None:
    """Raise ConfigError for what a tuning that goes on has already."""
    given = {
        "an experiment": bool(arguments),
        "--budget": told.budget is not None,
        "--sampler": told.sampler is not None,
        "--seed": told.seed is not None,
        "--widen": told.widen,
        "--out": out is not None,
    }
    named = [name for name, is_given in given.items() if is_given]
    if named:
        raise ConfigError(
            f"--resume goes on with what the folder was begun with, but {' and '.join(named)} is given too; leave it "
            "out, or tune anew in another folder"
        )
