"""The functions of `tailorfl`: from Python values to results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from tailorfl import modules
from tailorfl.benchmark.measure import measure
from tailorfl.benchmark.result import Bench
from tailorfl.core.method import Method
from tailorfl.core.method import methods as registered
from tailorfl.data.own import OF_DATASETS, ROLES, as_source, is_data
from tailorfl.data.registry import GIVEN
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError
from tailorfl.interface import check_kind
from tailorfl.report.experiment import run_experiment, run_variants
from tailorfl.report.progress import watching
from tailorfl.report.result import ExperimentResult
from tailorfl.rounds.frozen_front import tensor_digest
from tailorfl.runs import pretrain as pretraining
from tailorfl.runs.build import check, make_federation, make_simulation
from tailorfl.runs.extension import resumed, with_more
from tailorfl.runs.files import digest_of
from tailorfl.runs.folders import experiment_in, new_folder, tuning_beside
from tailorfl.runs.job import Job, Observer, Way
from tailorfl.runs.pretrain import Pretrained, Watcher
from tailorfl.settings.execution import EngineConfig
from tailorfl.settings.experiment import COMPARED, ExperimentConfig, Scale
from tailorfl.settings.loading import expand, load
from tailorfl.tuning.plan import TuningRequest
from tailorfl.tuning.run import Tuning, tune_experiment

if TYPE_CHECKING:
    from tailorfl.data.own import Data

Config: TypeAlias = str | Path | Mapping[str, Any] | ExperimentConfig | None
"""A YAML file, the name of a recipe, settings, or None for the default experiment."""


@dataclass(frozen=True)
class _Target:
    """The folder for results, and the treatment of existing ones; see `run`."""

    out: str | Path | None
    resume: bool
    extend: bool
    overwrite: bool
    force: bool

    @property
    def folder(self) -> Path | None:
        """The result folder, if one is named."""
        check_kind("out", self.out, str, Path, None)
        return None if self.out is None else Path(self.out)


def run(
    config: Config = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    extend: bool = False,
    overwrite: bool = False,
    observer: Observer | None = None,
    source: Data | None = None,
    force: bool = False,
    imports: Sequence[str] = (),
    progress: bool | None = None,
    **settings: Any,
) -> ExperimentResult:
    """Run an experiment and return its result; the same as `tailorfl run`.

    Args:
        config: a YAML file, the name of a recipe, settings, or None for the default experiment.
        out: result folder; by default runs/NAME, or the next free runs/NAME-2, ...
        resume: continue the experiment in `out`, or begin the given one there; finished jobs are kept.
        extend: add seeds, methods and rounds to the experiment in `out`, and keep its results; `config` and settings
            are the additions (`seeds=5`, `methods=["fedrep"]`, `rounds=100`).
        overwrite: replace the experiment in `out`.
        observer: receives the progress, see `tailorfl.Observer`.
        source: your own data instead of `data.name`: a Source (`tailorfl.data.own`), or data in memory as for `data`
            below.
        force: continue although settings, data or versions have changed since the start; the report says so.
        imports: modules, or files `NAME.py`, whose models, methods and data a settings file may name as `module:name`.
            Importing runs them. Those named in `settings` need not be listed here.
        progress: whether to show progress and warnings on stderr; None: in a terminal, an interactive Python or a
            notebook, unless there is an observer.
        settings: override those of `config`: `rounds=20`, `methods=["local", "ditto"]`, `train={"lr": 0.1}`. Groups are
            merged key by key, so `train={"lr": 0.1}` leaves the other training settings. `model` may also be a module,
            which is then the initial model of every seed, or a function (input_shape, outputs) that makes one; methods
            may be objects: `methods=["local", Ditto(lam=0.5), MyMethod]`. `data` may also be data
            in memory: a DataFrame with `label="outcome", client="hospital"` and further options of `from_table`; one
            DataFrame per client by name, with `label`; or a torch Dataset of (x, y) with `clients=[...]`, the client of
            each sample. To combine them with other settings of the data, pass the data as `source` and the settings as
            `data={...}`.

    Raises:
        TailorflError: the settings, data or model cannot be used; the message says why and what to do.
    """
    return _run(
        config,
        settings,
        imports,
        source,
        None,
        _Target(out, resume, extend, overwrite, force),
        observer,
        progress,
    )


def compare(
    config: Config = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    extend: bool = False,
    overwrite: bool = False,
    observer: Observer | None = None,
    source: Data | None = None,
    force: bool = False,
    imports: Sequence[str] = (),
    progress: bool | None = None,
    **settings: Any,
) -> ExperimentResult:
    """Compare several methods and return the result; the same as `tailorfl compare`.

    Arguments and errors are those of `run`; if no methods are named, six different ones are compared.
    """
    target = _Target(out, resume, extend, overwrite, force)
    return _run(config, settings, imports, source, COMPARED, target, observer, progress)


def _run(
    config: Config,
    settings: Mapping[str, Any],
    imports: Sequence[str],
    source: Data | None,
    methods: Sequence[str] | None,
    target: _Target,
    observer: Observer | None,
    progress: bool | None,
) -> ExperimentResult:
    """Load, check and run an experiment, with `methods` if it names none."""
    modules.load(imports)
    folder = target.folder
    check_kind("progress", progress, bool, None)
    settings, source = _with_source(settings, source)
    chosen, way = _chosen(config, settings, target, source, methods)
    _refuse_variants(chosen, "use tailorfl.reproduce")
    if folder is None:
        folder = new_folder(chosen, target.overwrite)
    with watching(chosen, observer, progress) as watch:
        return run_experiment(
            chosen,
            folder,
            way=way,
            overwrite=target.overwrite,
            observer=watch,
            source=source,
            force=target.force,
            tuning=tuning_beside(config if isinstance(config, str | Path) else None, chosen),
        )


def _chosen(
    config: Config,
    settings: Mapping[str, Any],
    target: _Target,
    source: Source | None,
    methods: Sequence[str] | None,
) -> tuple[ExperimentConfig, Way]:
    """Return the checked experiment, and whether it is begun, resumed or extended."""
    folder = target.folder
    way: Way = "new"
    is_named = config is not None or bool(settings)
    if (target.resume or target.extend) and folder is None:
        raise ConfigError("resume=True and extend=True continue the experiment in `out`; give out")
    if target.resume + target.extend + target.overwrite > 1:
        raise ConfigError("resume, extend and overwrite exclude each other; choose one")
    if target.resume and folder is not None:
        experiment = _loaded(config, settings, source, methods) if is_named else None
        chosen, way = resumed(folder, experiment, target.force)
    elif target.extend and folder is not None:
        base, defaults = (experiment_in(folder), None) if config is None else (config, methods)
        chosen, way = with_more(folder, _loaded(base, settings, source, defaults))
    else:
        chosen = _loaded(config, settings, source, methods)
    check(chosen)
    return chosen, way


def reproduce(
    recipe: str | Path,
    *,
    scale: Scale | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    observer: Observer | None = None,
    force: bool = False,
    imports: Sequence[str] = (),
    progress: bool | None = None,
    **settings: Any,
) -> dict[str, ExperimentResult]:
    """Run a recipe and return its results by variant ("" without variants); the same as `tailorfl reproduce`.

    Arguments and errors are those of `run`; `scale` is one of a recipe that has several.
    """
    modules.load(imports)
    check_kind("recipe", recipe, str, Path, Mapping, ExperimentConfig)
    target = _Target(out, resume, False, overwrite, force)
    recipe_config = load(recipe, _named(settings), scale=scale, may_import=True)
    chosen, way = _chosen(recipe_config, {}, target, None, None)
    folder = target.folder or new_folder(chosen, overwrite)
    with watching(chosen, observer, progress) as watch:
        results = run_variants(chosen, folder, way=way, overwrite=overwrite, observer=watch, force=force)
        return dict(zip(expand(chosen), results, strict=True))


def tune(
    config: Config = None,
    *,
    budget: str | int = "20",
    sampler: Literal["random", "tpe", "grid", "halving", "hyperband"] = "random",
    seed: int = 0,
    widen: bool = False,
    workers: int = 1,
    out: str | Path | None = None,
    resume: bool = False,
    imports: Sequence[str] = (),
    **settings: Any,
) -> Tuning:
    """Tune every method fairly and return the results; the same as `tailorfl tune`.

    >>> tuning = tailorfl.tune("demo", budget="16x20x2")  # doctest: +SKIP
    >>> result = tailorfl.compare(tuning.experiment)  # doctest: +SKIP

    Args:
        config: as for `run`; if no methods are named, six different ones are tuned.
        budget: TRIALS, TRIALSxROUNDS or TRIALSxROUNDSxSEEDS; every method gets the same number of samples.
        sampler: the algorithm that proposes values.
        seed: seed of the sampler.
        widen: extend a grid at the side where the best value lies, within the same budget.
        workers: processes that train trials.
        out: folder of the tuning; by default runs/NAME-tuning, or the next free.
        resume: continue the tuning in `out` unchanged.
        imports, settings: as for `run`; `search={...}` has the spaces.

    Raises:
        TailorflError: the settings or the budget do not fit, or Optuna is missing; the message says what to do.
    """
    modules.load(imports)
    check_kind("budget", budget, str, Integral)
    check_kind("out", out, str, Path, None)
    for name, value, least in (("seed", seed, 0), ("workers", workers, 1)):
        check_kind(name, value, Integral)
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, but is {value}")
    request = TuningRequest(str(budget), sampler, seed, widen)
    return tune_experiment(config, _named(settings), request, workers=workers, out=out, resume=resume)


def pretrain(
    config: Config = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    watch: Watcher | None = None,
    source: Data | None = None,
    imports: Sequence[str] = (),
    **settings: Any,
) -> Pretrained:
    """Train a model in one place and write its weights; the same as `tailorfl pretrain`.

    Args:
        config: as for `run`; rounds are epochs, and clients and methods are not used.
        out: the .safetensors file to write, next to a .json file about its training; by default
            runs/DATA-MODEL.safetensors.
        resume: continue the pretraining of `out` from its last finished epoch.
        overwrite: replace `out`.
        watch: receives the progress.
        source: your own data instead of `data.name`, as for `run`.
        imports, settings: as for `run`, with the same errors.
    """
    modules.load(imports)
    check_kind("out", out, str, Path, None)
    settings, source = _with_source(settings, source)
    if resume:
        if out is None or config is not None or settings:
            raise ConfigError(
                "resume=True continues the pretraining of `out` with its original settings; give only out, not config "
                "or settings"
            )
        chosen = pretraining.experiment_of(Path(out))
    else:
        chosen = pretraining.central(_loaded(config, settings, source))
        check(chosen)
    weights = pretraining.default_file(chosen) if out is None else Path(out)
    return pretraining.pretrain(
        chosen, weights, resume=resume, overwrite=overwrite, watch=watch, source=source
    )


def bench(
    config: Config = None,
    *,
    seconds: float = 20.0,
    source: Data | None = None,
    watch: Callable[[str], None] | None = None,
    imports: Sequence[str] = (),
    **settings: Any,
) -> Bench:
    """Time a round as a plain PyTorch loop and with every engine; the same as `tailorfl bench`.

    Args:
        config: as for `run`; its first method and seed are measured.
        seconds: time for measuring, without building data and model.
        source: your own data instead of `data.name`, as for `run`.
        watch: called with each step.
        imports, settings: as for `run`, with the same errors.
    """
    modules.load(imports)
    settings, source = _with_source(settings, source)
    chosen = _loaded(config, settings, source)
    check(chosen)
    _refuse_variants(chosen, "measure one of them: give its settings and variants={}")
    check_kind("seconds", seconds, Real)
    if not seconds > 0:
        raise ConfigError(f"seconds, the time to measure, must be positive, but is {seconds:g}")
    tell = watch or (lambda step: None)
    torch.set_num_threads(chosen.threads)
    tell("building data and model")
    federation = make_federation(chosen, chosen.data.seed_of(chosen.seeds[0]), source)

    # All engines are timed in turn, in this process.
    engine = EngineConfig(features=chosen.engine.features, features_memory=chosen.engine.features_memory)
    in_process = chosen.model_copy(update={"engine": engine})
    sim = make_simulation(Job(in_process, chosen.methods[0], chosen.seeds[0]), federation)
    return measure(sim, chosen, seconds=seconds, watch=tell)


def _refuse_variants(config: ExperimentConfig, remedy: str) -> None:
    """Raise ConfigError for an experiment with variants."""
    if config.variants:
        names = ", ".join(config.variants)
        raise ConfigError(f"'{config.name}' has variants ({names}), each with its own settings; {remedy}")


def _with_source(settings: Mapping[str, Any], source: Data | None) -> tuple[dict[str, Any], Source | None]:
    """Return the settings without data in memory and their options, and these data as a source or None."""
    data = settings.get("data") if source is None else source
    if source is None and not is_data(data):
        return dict(settings), None
    roles = {name: settings[name] for name in settings if name in ROLES | OF_DATASETS}
    plain = {name: value for name, value in settings.items() if name not in roles}
    if source is None:
        del plain["data"]
    return plain, as_source(data, roles)


def _loaded(
    config: Config,
    settings: Mapping[str, Any],
    source: Source | None,
    methods: Sequence[str] | None = None,
) -> ExperimentConfig:
    """Return an experiment, in which a given source replaces the configured data."""
    settings = _named(settings)
    if source is None:
        return load(config, settings, methods=methods, may_import=True)
    named = {"name": source.name} if config is None else {}
    chosen = load(config, {**named, **settings}, methods=methods, may_import=True)
    data = chosen.data.model_copy(update={"name": GIVEN, "path": None, "options": {}})
    return chosen.model_copy(update={"data": data})


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which models and methods that are Python objects are replaced by names."""
    named = dict(settings)
    if "model" in named:
        named["model"] = _with_name(named["model"], _model_name)
    if "method" in named:
        named["method"] = _with_name(named["method"], _method_name)
    if isinstance(named.get("methods"), list | tuple):
        named["methods"] = [_with_name(line, _method_name) for line in named["methods"]]
    return named


def _with_name(line: Any, name_of: Callable[[Any], Any]) -> Any:
    if not isinstance(line, Mapping):
        return name_of(line)
    name = name_of(line.get("name"))
    return {**line, **(name if isinstance(name, Mapping) else {"name": name} if "name" in line else {})}


def _model_name(model: Any) -> Any:
    """Return the name in settings for a module, of which clients get copies, or for a function that makes one."""
    if isinstance(model, torch.nn.Module):
        tensors = [f"{name} {tensor_digest(tensor)}" for name, tensor in sorted(model.state_dict().items())]
        digest = digest_of([repr(model), *tensors])[:12]
        return modules.give(digest, lambda input_shape, outputs: copy.deepcopy(model))
    return modules.path_of(model) if callable(model) else model


def _method_name(method: Any) -> Any:
    """Return the name in settings for a method's class, or for an instance with its non-default options."""
    if isinstance(method, Method):
        return {"name": _method_name(type(method)), **method.model_dump(mode="json", exclude_defaults=True)}
    if not (isinstance(method, type) and issubclass(method, Method)):
        return method
    name = getattr(method, "name", "")
    return name if registered().get(name) is method else modules.path_of(method)
