"""`tailorfl.run`, `reproduce`, `pretrain` and `bench`: from Python values to results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tailorfl.arguments import check_kind
from tailorfl.benchmark.measure import Watch, measure
from tailorfl.benchmark.result import Bench
from tailorfl.data.own import OF_DATASETS, ROLES, as_source, is_data
from tailorfl.data.registry import GIVEN
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError
from tailorfl.report.experiment import run_experiment, run_variants
from tailorfl.report.progress import watching
from tailorfl.report.result import ExperimentResult
from tailorfl.runs.build import check, make_federation, make_simulation
from tailorfl.runs.extension import resumed, with_more
from tailorfl.runs.folders import experiment_in, new_folder
from tailorfl.runs.job import Job, Observer, Way
from tailorfl.runs.pretrain import Pretrained, Watcher, central, default_file, experiment_of
from tailorfl.runs.pretrain import pretrain as pretrain_here
from tailorfl.runs.tuned import beside
from tailorfl.settings.engine import EngineConfig
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.loading import expand, load

if TYPE_CHECKING:
    from tailorfl.data.own import Data


def run(
    config: str | Path | Mapping[str, Any] | ExperimentConfig | None,
    settings: Mapping[str, Any],
    *,
    out: str | Path | None,
    resume: bool,
    extend: bool,
    overwrite: bool,
    observer: Observer | None,
    source: Data | None,
    force: bool,
    progress: bool | None,
    methods: Sequence[str] | None = None,
) -> ExperimentResult:
    """Load, checks and run an experiment; see `tailorfl.run`. `methods` are run where none are named."""
    check_kind("out", out, str, Path, None)
    check_kind("progress", progress, bool, None)
    settings, source = _with_source(settings, source)
    folder = None if out is None else Path(out)
    chosen, way = _chosen(config, settings, folder, source, methods, resume, extend, overwrite, force)
    check(chosen)
    if chosen.variants:
        names = ", ".join(chosen.variants)
        raise ConfigError(
            f"'{chosen.name}' has variants ({names}), each with a result of its own; use tailorfl.reproduce"
        )
    if folder is None:
        folder = new_folder(chosen, overwrite)
    with watching(chosen, observer, progress) as watch:
        return run_experiment(
            chosen,
            folder,
            way=way,
            overwrite=overwrite,
            observer=watch,
            source=source,
            force=force,
            tuning=beside(config if isinstance(config, str | Path) else None, chosen),
        )


def _chosen(
    config: str | Path | Mapping[str, Any] | ExperimentConfig | None,
    settings: Mapping[str, Any],
    folder: Path | None,
    source: Source | None,
    methods: Sequence[str] | None,
    resume: bool,
    extend: bool,
    overwrite: bool,
    force: bool,
) -> tuple[ExperimentConfig, Way]:
    """Return the experiment, and whether it is begun or what is in the folder goes on."""
    is_named = config is not None or bool(settings)
    if (resume or extend) and folder is None:
        raise ConfigError("resume=True and extend=True go on with the experiment in `out`; give out")
    if resume + extend + overwrite > 1:
        raise ConfigError("resume, extend and overwrite are three ways to treat what is in `out`; choose one")
    if resume and folder is not None:
        return resumed(folder, _loaded(config, settings, source, methods) if is_named else None, force)
    if extend and folder is not None:
        base, defaults = (experiment_in(folder), None) if config is None else (config, methods)
        return with_more(folder, _loaded(base, settings, source, defaults))
    return _loaded(config, settings, source, methods), "new"


def reproduce(
    config: str | Path,
    settings: Mapping[str, Any],
    *,
    scale: str | None,
    out: str | Path | None,
    resume: bool,
    overwrite: bool,
    observer: Observer | None,
    force: bool,
    progress: bool | None,
) -> dict[str, ExperimentResult]:
    """Run every variant of an experiment; see `tailorfl.reproduce`."""
    check_kind("out", out, str, Path, None)
    place = None if out is None else Path(out)
    given = load(config, settings, scale=scale, may_import=True)
    chosen, way = _chosen(given, {}, place, None, None, resume, False, overwrite, force)
    check(chosen)
    folder = new_folder(chosen, overwrite) if place is None else place
    with watching(chosen, observer, progress) as watch:
        found = run_variants(chosen, folder, way=way, overwrite=overwrite, observer=watch, force=force)
        return dict(zip(expand(chosen), found, strict=True))


def pretrain(
    config: str | Path | Mapping[str, Any] | ExperimentConfig | None,
    settings: Mapping[str, Any],
    *,
    out: str | Path | None,
    resume: bool,
    overwrite: bool,
    watch: Watcher | None,
    source: Data | None,
) -> Pretrained:
    """Load, checks and run a pretraining; see `tailorfl.pretrain`."""
    check_kind("out", out, str, Path, None)
    settings, source = _with_source(settings, source)
    if resume:
        if out is None or config is not None or settings:
            raise ConfigError(
                "resume=True continues the pretraining of `out` with the settings it was started with; give out, and "
                "neither config nor settings"
            )
        chosen = experiment_of(Path(out))
    else:
        chosen = central(_loaded(config, settings, source))
        check(chosen)
    weights = default_file(chosen) if out is None else Path(out)
    return pretrain_here(chosen, weights, resume=resume, overwrite=overwrite, watch=watch, source=source)


def bench(
    config: str | Path | Mapping[str, Any] | ExperimentConfig | None,
    settings: Mapping[str, Any],
    *,
    seconds: float,
    source: Data | None,
    watch: Watch | None,
) -> Bench:
    """Load, checks, builds and measures an experiment; see `tailorfl.bench`."""
    settings, source = _with_source(settings, source)
    chosen = _loaded(config, settings, source)
    check(chosen)
    if chosen.variants:
        raise ConfigError(
            f"'{chosen.name}' has variants ({', '.join(chosen.variants)}), each with a method, data or model of its "
            "own; measure one: give its settings beside variants={}"
        )
    if not seconds > 0:
        raise ConfigError(f"seconds is how long to measure and must be positive, but is {seconds:g}")
    told = (lambda _: None) if watch is None else watch
    torch.set_num_threads(chosen.threads)
    told("building data and model")
    federation = make_federation(chosen, chosen.data.seed_of(chosen.seeds[0]), source)

    # Each engine of the experiment is tried in turn, in this process.
    engine = EngineConfig(features=chosen.engine.features, features_memory=chosen.engine.features_memory)
    alone = chosen.model_copy(update={"engine": engine})
    sim = make_simulation(Job(alone, chosen.methods[0], chosen.seeds[0]), federation)
    return measure(sim, chosen, seconds=seconds, watch=told)


def _with_source(settings: Mapping[str, Any], source: Data | None) -> tuple[Mapping[str, Any], Source | None]:
    """Return the settings without what says something of data in memory, and these as a source; None without any."""
    data = settings.get("data") if source is None else source
    if source is None and not is_data(data):
        return settings, None
    said = {name: settings[name] for name in settings if name in ROLES | OF_DATASETS}
    left = {name: value for name, value in settings.items() if name not in said}
    if source is None:
        del left["data"]
    return left, as_source(data, said)


def _loaded(
    config: str | Path | Mapping[str, Any] | ExperimentConfig | None,
    settings: Mapping[str, Any],
    source: Source | None,
    methods: Sequence[str] | None = None,
) -> ExperimentConfig:
    """Return an experiment, which names a source that was handed over as such and not as another."""
    if source is None:
        return load(config, settings, methods=methods, may_import=True)
    named = {"name": source.name} if config is None else {}
    chosen = load(config, {**named, **settings}, methods=methods, may_import=True)
    data = chosen.data.model_copy(update={"name": GIVEN, "path": None, "options": {}})
    return chosen.model_copy(update={"data": data})
