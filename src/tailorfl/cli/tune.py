"""`tailorfl tune`: the same budget for every method of an experiment, and the experiment with the chosen settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailorfl.cli.arguments import (
    Arguments,
    AsJson,
    Imports,
    Quiet,
    RunRequest,
    State,
    experiment,
    import_options,
    neighbour,
    typed,
)
from tailorfl.cli.screen import print_json, say, stderr, stdout
from tailorfl.errors import ConfigError
from tailorfl.printable import quoted
from tailorfl.runs.process import import_tensordict

if TYPE_CHECKING:
    from tailorfl.settings.experiment import ExperimentConfig
    from tailorfl.tuning.plan import Plan
    from tailorfl.tuning.run import Tuning


def command(
    ctx: typer.Context,
    arguments: Arguments = None,
    budget: str = "20",
    sampler: str = "random",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    widen: bool = False,
    workers: Annotated[int, typer.Option(min=1)] = 1,
    out: Path | None = None,
    resume: Path | None = None,
    dry_run: bool = False,
    as_json: AsJson = False,
    imports: Imports = None,
    quiet: Quiet = False,
) -> None:
    """Tune every method fairly: the same budget for each, over its own search space, only by validation data.

    Args:
        arguments: The experiment to tune: a YAML file or the name of a recipe; then settings.
        budget (TRIALS[xROUNDS[xSEEDS]]): Budget of each method, such as 20, 20x10 or 20x10x2; by default the
            experiment's rounds and one seed.
        sampler (SAMPLER): random, tpe, grid, halving or hyperband.
        seed: Seed of the sampler.
        widen: Extend a grid at the side where the best value lies, within the same budget.
        workers: Processes that train trials.
        out (RESULTS): Folder of the tuning; by default runs/NAME-tuning, or the next free.
        resume (RESULTS): Continue the tuning in this folder.
        dry_run: Show search spaces and costs; train nothing.
    """
    if resume is None:
        from tailorfl.settings.experiment import COMPARED

        config = experiment(arguments, COMPARED)
    else:
        chosen = typed(ctx, "budget", "sampler", "seed", "widen", "out")
        if named := ["an experiment", *chosen] if arguments else chosen:
            raise ConfigError(
                f"--resume continues with the settings the tuning was started with, but {' and '.join(named)} is given "
                "too; leave it out, or start a tuning in another folder"
            )
    import_tensordict()
    from tailorfl.report.progress import messages
    from tailorfl.tuning.plan import begin, default_folder, plan_in

    with messages(stderr()):
        if resume is not None:
            plan, folder = plan_in(resume), resume
        else:
            plan = _plan(config, budget, sampler, seed, widen)
            folder = out or default_folder(config)
    if dry_run:
        from tailorfl.cli.results import show_plan

        show_plan(stdout(), plan, workers, quiet)
        return
    if resume is None:
        begin(folder, plan)
    tuning = _perform(ctx.ensure_object(State), folder, plan, workers, quiet)
    if as_json:
        print_json(tuning.as_json())
    else:
        _show(tuning)


def tune_first(state: State, request: RunRequest, budget: str) -> RunRequest:
    """Tune the methods of a comparison, next to its folder; return the request to compare the chosen settings.

    An existing tuning is continued if the comparison is to be resumed. The chosen settings are printed unless the
    comparison is to be printed as JSON.

    Raises:
        TailorflError: the request cannot be tuned, or the tuning fails.
    """
    if request.extend is not None:
        raise ConfigError(
            "--tune is for a new comparison, but --extend adds to one whose settings are already chosen; leave out "
            "one of the two"
        )
    from tailorfl.report.progress import messages
    from tailorfl.runs.folders import check_folder, new_folder
    from tailorfl.tuning.plan import REQUEST, TUNED, begin, discard

    with messages(stderr()):
        if request.resume is not None and (beside(request.resume) / REQUEST).is_file():
            plan = _continued(beside(request.resume), request, budget)
        elif request.resume is not None and (
            (request.resume / "config.yaml").is_file() or not request.arguments
        ):
            raise ConfigError(
                f"there is no tuning to continue in '{beside(request.resume)}'; leave out --tune to resume "
                f"'{request.resume}' as it is, or choose another --out for a tuned comparison"
            )
        else:
            plan = _plan(experiment(request.arguments, request.methods), budget)
    if request.dry_run:
        from tailorfl.cli.results import show_plan

        show_plan(stderr() if request.as_json else stdout(), plan, 1, request.quiet)
        return request
    named = plan.asked.model_copy(update={"name": f"{plan.asked.name}-tuned"})
    folder = request.resume or request.out or new_folder(named, request.overwrite)
    if request.resume is None:
        check_folder(folder, False, request.overwrite)  # before the tuning, which may take hours
    if request.overwrite:
        discard(beside(folder))
    if not (beside(folder) / REQUEST).is_file() or request.resume is None:
        begin(beside(folder), plan)
    continuation = f"tailorfl compare{import_options()} --tune {budget} --resume {quoted(folder)}"
    tuning = _perform(state, beside(folder), plan, 1, request.quiet, continuation)
    if not request.as_json:
        _show(tuning)
    tuned = [str(beside(folder) / TUNED)]
    return replace(request, arguments=tuned, methods=None, out=None if request.resume else folder)


def _continued(folder: Path, request: RunRequest, budget: str) -> Plan:
    """Return the plan of the tuning in a folder, to continue it.

    Raises:
        TailorflError: the request is for another tuning.
    """
    from tailorfl.runs.extension import other_experiment
    from tailorfl.tuning.plan import plan_in

    plan = plan_in(folder)
    before = plan.request.budget
    differences = [] if budget == before else [f"the budget was {before} and is {budget}"]
    if request.arguments:
        asked = experiment(request.arguments, request.methods)
        differences += other_experiment(plan.asked, asked, folder)
        differences += [] if asked.search == plan.asked.search else ["search was different"]
    if differences:
        raise ConfigError(
            f"'{folder}' is another tuning: {'; '.join(differences)}; leave out what differs to continue it, or choose "
            "another folder"
        )
    return plan


def beside(folder: Path) -> Path:
    """Return the folder of the tuning that belongs to a comparison's folder."""
    return neighbour(folder, "-tuning")


def _plan(
    config: ExperimentConfig, budget: str, sampler: str = "random", seed: int = 0, widen: bool = False
) -> Plan:
    """Return the plan of a tuning. Raises ConfigError if it does not fit the experiment."""
    from tailorfl.runs.build import check
    from tailorfl.tuning.plan import TuningRequest, plan

    check(config)
    return plan(config, TuningRequest(budget, sampler, seed, widen))  # type: ignore[arg-type]  # it looks at the name


def _perform(
    state: State, folder: Path, plan: Plan, workers: int, quiet: bool, continuation: str = ""
) -> Tuning:
    """Tune in a prepared folder; `continuation` is the command that continues, by default tune's."""
    from tailorfl.cli.progress import Bar, TuningLines
    from tailorfl.report.progress import display
    from tailorfl.tuning.plan import REQUEST
    from tailorfl.tuning.run import Watch, tune

    command = continuation or f"tailorfl tune{import_options()} --resume {quoted(folder)}"
    state.under_way(folder / REQUEST, command)
    with display(stderr(), quiet, Watch, Bar, TuningLines) as watch:
        tuning = tune(folder, plan, workers=workers, watch=watch)
    state.done()
    return tuning


def _show(tuning: Tuning) -> None:
    """Print the results of a tuning."""
    from tailorfl.cli.results import show_tuning

    show_tuning(stdout(), tuning)
    say(stdout(), f"tuning: {tuning.folder}")
    say(stdout(), f"to compare: tailorfl compare{import_options()} {quoted(tuning.experiment)}")
