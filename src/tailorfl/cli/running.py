"""What `tailorfl run`, `compare` and `reproduce` do: load, check, run or estimate, and print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tailorfl.cli.arguments import again, experiment
from tailorfl.cli.screen import print_json, remark, say, show_table, stderr, stdout
from tailorfl.cli.state import State
from tailorfl.errors import ConfigError
from tailorfl.light_imports import import_tensordict
from tailorfl.printable import quoted

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult
    from tailorfl.runs.job import Way
    from tailorfl.settings.experiment import ExperimentConfig


@dataclass(frozen=True)
class RunRequest:
    """What a command was told: an experiment by its arguments, and a folder with what to do there."""

    arguments: list[str] | None
    methods: Sequence[str] | None = None
    """What is compared where the arguments name nothing."""
    out: Path | None = None
    resume: Path | None = None
    extend: Path | None = None
    overwrite: bool = False
    force: bool = False
    scale: str | None = None
    """Of a recipe, what of its scales is run."""

    def check(self) -> None:
        """Raise ConfigError where options contradict each other."""
        if self.force and self.resume is None and self.extend is None:
            raise ConfigError(
                "--force is for --resume and --extend; a new experiment has nothing that could differ"
            )
        given = {"--out": self.out is not None, "--overwrite": self.overwrite}
        given |= {"--resume": self.resume is not None, "--extend": self.extend is not None}
        chosen = [name for name, is_given in given.items() if is_given]
        if (given["--resume"] or given["--extend"]) and len(chosen) > 1:
            raise ConfigError(
                f"{' and '.join(chosen)} are given together, but --resume and --extend alone name the folder and what "
                "is done with what is in it; leave out the others"
            )


def perform(state: State, request: RunRequest, dry_run: bool, quiet: bool, as_json: bool = False) -> None:
    """Load, checks and run an experiment, or estimates it; prints tables, or as JSON a list of what they say."""
    request.check()
    config, way = _asked(request)
    if request.scale is not None:
        _say_what_it_takes(config)

    import_tensordict()  # from here on torch is needed, which takes a second to import
    from tailorfl.runs.build import check

    check(config)
    from tailorfl.report.experiment import run_variants
    from tailorfl.report.progress import messages, observer
    from tailorfl.settings.loading import expand

    if dry_run:
        from tailorfl.cli.estimates import show_estimate
        from tailorfl.runs.cost_estimate import estimate

        errors, costs = stderr(), []
        with messages(errors):
            for name, one in expand(config).items():
                with errors.status("") as status:
                    found = estimate(one, None if quiet else status.update)
                if as_json:
                    costs.append({"variant": name, "name": one.name, **asdict(found)})
                else:
                    show_estimate(stdout(), one, found)
        if as_json:
            print_json(costs)
        return
    from tailorfl.runs.folders import new_folder
    from tailorfl.runs.tuned import beside

    folder = request.resume or request.extend or request.out or new_folder(config, request.overwrite)
    state.under_way(folder / "config.yaml", f"tailorfl run{again()} --resume {quoted(folder)}")
    with observer(stderr(), config, quiet=quiet) as watch:
        done = list(
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
    if as_json:
        from tailorfl.cli.results import result_lines

        print_json(
            [
                line
                for name, result in zip(expand(config), done, strict=True)
                for line in result_lines(name, result)
            ]
        )
        return
    for result in done:
        show_result(result)


def _say_what_it_takes(config: ExperimentConfig) -> None:
    """Print, before anything is loaded, what the scale that was asked for needs and costs."""
    assert config.scale is not None
    chosen = config.scales[config.scale]
    said = {"scale:": config.scale, "needs:": chosen.needs, "costs:": chosen.costs}
    for mark, text in said.items():
        if text:
            stderr().print(remark(mark, " ".join(text.split()), "bold"), soft_wrap=True)


def _asked(request: RunRequest) -> tuple[ExperimentConfig, Way]:
    """Return the experiment, and whether it is new, resumed or extended."""
    from tailorfl.report.progress import messages
    from tailorfl.runs.folders import experiment_in, experiment_to_resume

    if request.resume is not None and not request.arguments:
        return experiment_to_resume(request.resume), "resume"
    base = None if request.extend is None else experiment_in(request.extend)
    with messages(stderr()):
        given = experiment(request.arguments, request.methods, base, request.scale)
    if request.resume is None and request.extend is None:
        return given, "new"
    from tailorfl.runs.extension import resumed, with_more

    if request.extend is not None:
        return with_more(request.extend, given)
    assert request.resume is not None
    return resumed(request.resume, given, request.force)


def show_result(result: ExperimentResult, target: float | None = None) -> None:
    """Print the comparison table, what there is beside it, and where the results lie."""
    from tailorfl.cli.results import published_table, section_table, show_comparison
    from tailorfl.report.curves import sections
    from tailorfl.report.published import notes

    config = result.config
    out = stdout()
    show_comparison(out, result, config.name)
    for folder, difference in result.unlike:
        said = remark("not the same experiment:", f"{folder}: {difference}", "bold yellow")
        stderr().print(said, soft_wrap=True)
    for reason in result.missing:
        stderr().print(remark("not in the table:", reason, "bold yellow"), soft_wrap=True)
    wanted = config.eval.target if target is None else target
    if wanted is not None:
        section = sections(result, wanted)[0]
        show_table(out, section_table(section))
        say(out, section.note, style="dim")
    if config.published:
        show_table(out, published_table(result, config.published))
        for note in notes(config.published):
            say(out, note, style="dim")
    say(out, f"results: {result.path}")
