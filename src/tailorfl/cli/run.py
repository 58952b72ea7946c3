"""The commands `tailorfl run`, `compare` and `reproduce`: load, check, run or estimate, and print."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailorfl.cli.arguments import (
    Arguments,
    AsJson,
    Imports,
    Overwrite,
    Quiet,
    RunRequest,
    State,
    experiment,
    import_options,
    typed,
)
from tailorfl.cli.screen import print_json, remark, status, stderr, stdout
from tailorfl.errors import ConfigError
from tailorfl.light_imports import import_tensordict
from tailorfl.printable import quoted

if TYPE_CHECKING:
    from tailorfl.runs.job import Way
    from tailorfl.settings.experiment import ExperimentConfig


def command(
    ctx: typer.Context,
    arguments: Arguments = None,
    out: Path | None = None,
    resume: Path | None = None,
    extend: Path | None = None,
    force: bool = False,
    overwrite: Overwrite = False,
    dry_run: bool = False,
    imports: Imports = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    budget: str | None = None,
) -> None:
    """Run an experiment; `compare` has several methods where none are named.

    Args:
        arguments: A YAML file or the name of a recipe; then settings, such as method=ditto train.lr=0.1.
        out (RESULTS): Result folder; by default runs/NAME, or the next free runs/NAME-2, ...
        resume (RESULTS): Continue the experiment in this result folder; with CONFIG or KEY=VALUE, begin it there if
            need be.
        extend (RESULTS): Add to the experiment in this result folder: seeds=5, methods=fedrep,apfl or rounds=100.
        force: Continue although settings, data or versions differ; the report says so.
        dry_run: Show sizes, costs and an estimate; train nothing.
        budget (--tune, TRIALS[xROUNDS[xSEEDS]]): Tune every method with this budget first, in RESULTS-tuning;
            see tailorfl tune.
    """
    from tailorfl.settings.experiment import COMPARED

    _check_options(ctx)
    methods = COMPARED if ctx.info_name == "compare" else None
    request = RunRequest(
        arguments, methods, out, resume, extend, overwrite, force, None, dry_run, quiet, as_json
    )
    if budget is not None:
        from tailorfl.cli.tune import tune_first

        request = tune_first(ctx.ensure_object(State), request, budget)
    perform(ctx.ensure_object(State), request)


def reproduce(
    ctx: typer.Context,
    recipe: str,
    settings: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    scale: str | None = None,
    out: Path | None = None,
    resume: Path | None = None,
    overwrite: Overwrite = False,
    dry_run: bool = False,
    imports: Imports = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run a recipe and show a paper's numbers beside ours.

    Args:
        recipe (RECIPE): A packaged recipe (see: tailorfl list recipes), or a file like one.
        settings: Changes to it.
        scale (SCALE): smoke, small or paper, of recipes that have them; by default as they stand.
        out (RESULTS): Result folder; by default runs/NAME, or the next free runs/NAME-2, ...
        resume (RESULTS): Continue the recipe in this result folder, or begin it there.
        dry_run: Show sizes, costs and an estimate; train nothing.
    """
    from tailorfl.settings.loading import read

    _check_options(ctx)
    read(recipe)  # refuses what is neither a recipe nor a file, KEY=VALUE too
    words = [recipe, *(settings or ())]
    request = RunRequest(words, None, out, resume, None, overwrite, False, scale, dry_run, quiet, as_json)
    perform(ctx.ensure_object(State), request)


def perform(state: State, request: RunRequest) -> None:
    """Load, check and run an experiment, or estimate it; print tables, or as JSON a list of the same."""
    from tailorfl.report.progress import messages, observer
    from tailorfl.runs.folders import experiment_in, experiment_to_resume, new_folder

    base = None if request.extend is None else experiment_in(request.extend)
    way: Way = "new" if request.resume is None or request.arguments else "resume"
    with messages(stderr()):
        if request.resume is not None and way == "resume":
            config = experiment_to_resume(request.resume)
        else:
            config = experiment(request.arguments, request.methods, base, request.scale)
    if request.scale is not None:
        _show_scale(config)

    import_tensordict()  # from here on torch is needed, which takes a second to import
    from tailorfl.cli.results import result_lines, show_result
    from tailorfl.report.experiment import run_variants
    from tailorfl.runs.build import check
    from tailorfl.runs.extension import resumed, with_more
    from tailorfl.runs.tuned import beside
    from tailorfl.settings.loading import expand

    if request.extend is not None:
        config, way = with_more(request.extend, config)
    elif request.resume is not None and way == "new":
        config, way = resumed(request.resume, config, request.force)
    check(config)
    if request.dry_run:
        _estimate(expand(config), request)
        return
    folder = request.resume or request.extend or request.out or new_folder(config, request.overwrite)
    state.under_way(folder / "config.yaml", f"tailorfl run{import_options()} --resume {quoted(folder)}")
    with observer(stderr(), config, quiet=request.quiet) as watch:
        results = list(
            run_variants(
                config,
                folder,
                way=way,
                overwrite=request.overwrite,
                observer=watch,
                force=request.force,
                tuning=beside(next(iter(request.arguments or ()), None), config),
            )
        )
    state.done()
    if request.as_json:
        named = zip(expand(config), results, strict=True)
        print_json([line for name, result in named for line in result_lines(name, result)])
        return
    for result in results:
        show_result(result)


def _check_options(ctx: typer.Context) -> None:
    """Raise ConfigError where options contradict each other."""
    chosen = typed(ctx, "out", "overwrite", "resume", "extend")
    continues = "--resume" in chosen or "--extend" in chosen
    if typed(ctx, "force") and not continues:
        raise ConfigError(
            "--force is for --resume and --extend; a new experiment has nothing that could differ"
        )
    if continues and len(chosen) > 1:
        raise ConfigError(
            f"{' and '.join(chosen)} are given together, but --resume and --extend alone name the folder and what "
            "is done with what is in it; leave out the others"
        )


def _show_scale(config: ExperimentConfig) -> None:
    """Print, before anything is loaded, what the scale that was asked for needs and costs."""
    assert config.scale is not None
    chosen = config.scales[config.scale]
    for mark, text in (("scale:", config.scale), ("needs:", chosen.needs), ("costs:", chosen.costs)):
        if text:
            stderr().print(remark(mark, " ".join(text.split()), "bold"), soft_wrap=True)


def _estimate(variants: dict[str, ExperimentConfig], request: RunRequest) -> None:
    """Print what experiments would cost."""
    from tailorfl.cli.estimates import show_estimate
    from tailorfl.runs.cost_estimate import estimate

    costs = []
    for name, config in variants.items():
        with status(request.quiet, "") as watch:
            cost = estimate(config, None if request.quiet else watch)
        if request.as_json:
            costs.append({"variant": name, "name": config.name, **asdict(cost)})
        else:
            show_estimate(stdout(), config, cost)
    if request.as_json:
        print_json(costs)
