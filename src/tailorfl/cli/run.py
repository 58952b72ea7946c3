"""The commands that train: `tailorfl run`, `compare` and `reproduce`, `pretrain` and `unlearn`."""

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
    ResultFolder,
    RunRequest,
    State,
    experiment,
    import_options,
    neighbour,
    typed,
)
from tailorfl.cli.screen import make_table, print_json, remark, say, show_table, status, stderr, stdout
from tailorfl.errors import ConfigError
from tailorfl.printable import quoted
from tailorfl.runs.process import import_tensordict
from tailorfl.settings.names import slug

if TYPE_CHECKING:
    from tailorfl.runs.job import Way
    from tailorfl.runs.unlearning import Unlearning
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
    """Run an experiment; `compare` has several methods if none are named.

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
    """Run a recipe and show a paper's numbers next to ours.

    Args:
        recipe (RECIPE): A packaged recipe (see: tailorfl list recipes), or a file like one.
        settings: Changes to it.
        scale (SCALE): smoke, small or paper, for recipes that have scales; by default the recipe's own settings.
        out (RESULTS): Result folder; by default runs/NAME, or the next free runs/NAME-2, ...
        resume (RESULTS): Continue the recipe in this result folder, or begin it there.
        dry_run: Show sizes, costs and an estimate; train nothing.
    """
    from tailorfl.settings.loading import read

    _check_options(ctx)
    read(recipe)  # refuses everything but a recipe or file, also KEY=VALUE
    words = [recipe, *(settings or ())]
    request = RunRequest(words, None, out, resume, None, overwrite, False, scale, dry_run, quiet, as_json)
    perform(ctx.ensure_object(State), request)


def perform(state: State, request: RunRequest) -> None:
    """Load, check and run an experiment, or estimate it; print tables, or the same as a JSON list."""
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
    from tailorfl.runs.folders import tuning_beside
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
                tuning=tuning_beside(next(iter(request.arguments or ()), None), config),
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
    """Raise ConfigError if options contradict each other."""
    chosen = typed(ctx, "out", "overwrite", "resume", "extend")
    continues = "--resume" in chosen or "--extend" in chosen
    if typed(ctx, "force") and not continues:
        raise ConfigError("--force is only for --resume and --extend; leave it out for a new experiment")
    if continues and len(chosen) > 1:
        raise ConfigError(
            f"{' and '.join(chosen)} are given together, but --resume and --extend already name the folder and what to "
            "do with it; give only one of these options"
        )


def _show_scale(config: ExperimentConfig) -> None:
    """Print the needs and costs of the requested scale before anything is loaded."""
    assert config.scale is not None
    chosen = config.scales[config.scale]
    for mark, text in (("scale:", config.scale), ("needs:", chosen.needs), ("costs:", chosen.costs)):
        if text:
            stderr().print(remark(mark, " ".join(text.split()), "bold"), soft_wrap=True)


def _estimate(variants: dict[str, ExperimentConfig], request: RunRequest) -> None:
    """Print the estimated costs of experiments."""
    from tailorfl.cli.results import show_estimate
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


def pretrain_command(
    ctx: typer.Context,
    arguments: Arguments = None,
    out: Path | None = None,
    resume: Path | None = None,
    overwrite: bool = False,
    quiet: Quiet = False,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Train a backbone on a labelled data set in one place, for model.weights of experiments.

    Args:
        arguments: An experiment as for `tailorfl run`; its rounds are epochs, its clients and methods are not used.
        out (FILE): The .safetensors file to write; by default runs/DATA-MODEL.safetensors.
        resume (FILE): Continue the pretraining of this file.
        overwrite: Replace the file.
    """
    if resume is not None and (arguments or typed(ctx, "out", "overwrite")):
        raise ConfigError(
            "--resume continues a pretraining with the settings it was started with; leave out CONFIG, KEY=VALUE, "
            "--out and --overwrite, or start a new one without --resume"
        )
    config = None if resume else experiment(arguments)

    from tailorfl.cli.progress import watcher  # from here on torch is needed, which takes a second to import
    from tailorfl.runs.build import check
    from tailorfl.runs.pretrain import central, default_file, experiment_of, pretrain, running

    if config is not None:
        config = central(config)
        check(config)
        file = out if out is not None else default_file(config)
    else:
        assert resume is not None
        config, file = experiment_of(resume), resume
    state = ctx.ensure_object(State)
    continuation = f"tailorfl pretrain{import_options()} --resume {quoted(file)}"
    state.under_way(running(file) / "config.yaml", continuation)
    with watcher(stderr(), quiet=quiet) as watch:
        backbone = pretrain(config, file, resume=resume is not None, overwrite=overwrite, watch=watch)
    state.done()
    weights = backbone.weights
    if as_json:
        print_json({"weights": str(weights), "report": str(backbone.report), "scalars": backbone.scalars})
        return
    console = stdout()
    say(console, f"weights: {weights} ({backbone.scalars:,} scalars)")
    say(console, f"report: {backbone.report}")
    say(
        console,
        f"start from them: model.weights={quoted(weights)}, with other classes also model.skip_head=true",
    )


def unlearn_command(
    ctx: typer.Context,
    folder: ResultFolder,
    client: Annotated[str, typer.Option()],
    out: Path | None = None,
    dry_run: bool = False,
    imports: Imports = None,
    quiet: Quiet = False,
) -> None:
    """Replay finished results without a client, exactly, and certify it.

    For a federation of real machines it writes the experiment that the remaining clients train again; once they have
    done so, the same command certifies it.

    Args:
        client (NAME): The client's name or number.
        out (RESULTS): New result folder; by default RESULTS-without-NAME. The same command continues it.
        dry_run: Show the number of rounds to replay, and the time they took; train nothing.
    """
    from tailorfl.cli.results import show_result
    from tailorfl.deploy.experiment import is_deployed, plan_unlearning
    from tailorfl.report.experiment import run_experiment
    from tailorfl.report.progress import messages, observer
    from tailorfl.runs.extension import resumed
    from tailorfl.runs.folders import TUNING
    from tailorfl.runs.job import Several
    from tailorfl.runs.unlearning import NAME, CertificateWriter, plan

    with messages(stderr()):
        unlearning = (plan_unlearning if is_deployed(folder) else plan)(folder, client)
    if dry_run:
        _show_replays(unlearning)
        return
    out = neighbour(folder, f"-without-{slug(unlearning.name)}") if out is None else out
    if unlearning.is_deployed:
        _by_remaining_clients(unlearning, out)
        return
    config, way = resumed(out, unlearning.without(out))
    unlearning.write_traces(out)
    state, tuning = ctx.ensure_object(State), folder / TUNING
    again = (
        f"tailorfl unlearn{import_options()} {quoted(folder)} --client {quoted(client)} --out {quoted(out)}"
    )
    state.under_way(out / "config.yaml", again)
    with observer(stderr(), config, quiet=quiet) as watch:
        result = run_experiment(
            config,
            out,
            way=way,
            observer=Several((watch, CertificateWriter(unlearning))),
            tuning=tuning if tuning.is_file() else None,
            backend=unlearning.backend,
        )
    state.done()
    show_result(result)
    say(
        stdout(),
        f"'{unlearning.name}' is unlearned: {unlearning.rounds:,} rounds were replayed without it, and {out / NAME} "
        f"certifies it. Delete {quoted(folder)}, which still holds its share.",
    )


def _by_remaining_clients(unlearning: Unlearning, out: Path) -> None:
    """Write the experiment that the clients of a deployment train again, or certify its results."""
    from tailorfl.deploy.experiment import certify, experiment_without
    from tailorfl.runs.files import write_text
    from tailorfl.runs.unlearning import NAME

    if (out / "config.yaml").is_file():
        certify(unlearning, out)
        say(
            stdout(),
            f"'{unlearning.name}' is unlearned: the remaining clients trained again without it, and {out / NAME} "
            f"certifies it. Its share is still in {quoted(unlearning.folder)}, and at every client in "
            f"STATE/{slug(unlearning.config.name)}; delete these, but keep STATE/left.jsonl.",
        )
        return
    file = neighbour(out, ".yaml")
    write_text(file, experiment_without(unlearning).to_yaml(brief=True))
    say(
        stdout(),
        f"The clients hold the samples, so they train again without '{unlearning.name}'. Give them {quoted(file)}, "
        "which they accept like the first experiment, and start the server with its --listen and --keys:\n"
        f"tailorfl server {quoted(file)} --out {quoted(out)}\n"
        "Once it has finished, the same tailorfl unlearn command writes the certificate.",
    )


def _show_replays(unlearning: Unlearning) -> None:
    """Print the costs of a replay."""
    from tailorfl.report.tables import human_seconds

    rows = [
        (
            replay.job.name,
            replay.rounds,
            len(replay.asked),
            replay.asked[0] if replay.asked else "none",
            human_seconds(replay.seconds),
        )
        for replay in unlearning.replays
    ]
    heads = ("job", "rounds to replay", "rounds with the client", "first of them", "took")
    table = make_table(None, heads, rows)
    show_table(stdout(), table)
    seconds = human_seconds(sum(replay.seconds for replay in unlearning.replays))
    say(
        stdout(),
        f"To unlearn '{unlearning.name}', {unlearning.rounds:,} rounds must be replayed; the run took {seconds}.",
    )
