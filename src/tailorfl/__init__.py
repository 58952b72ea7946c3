"""Personalized federated learning: many clients learn together, and each ends with a model of its own.

>>> import tailorfl
>>> result = tailorfl.run(data={"clients": 20}, methods=["local", "ditto"], rounds=20)  # doctest: +SKIP
>>> print(result.table)  # doctest: +SKIP
>>> result.plot()  # doctest: +SKIP

Importing this package is light; what it offers is imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tailorfl import modules

if TYPE_CHECKING:
    from tailorfl.benchmark.result import Bench
    from tailorfl.core.client import Client
    from tailorfl.core.context import Context
    from tailorfl.core.messages import Replies
    from tailorfl.core.method import Method, register
    from tailorfl.data.build import build as build_federation
    from tailorfl.data.federation import Federation
    from tailorfl.data.own import Data
    from tailorfl.data.source import Source
    from tailorfl.export.folder import export as export_models
    from tailorfl.export.predict import predict
    from tailorfl.models.functional import Model
    from tailorfl.models.split import Split
    from tailorfl.report.merging import merge
    from tailorfl.report.result import ExperimentResult
    from tailorfl.rounds.one_round import RoundResult
    from tailorfl.rounds.simulation import Simulation
    from tailorfl.runs.job import Job, Observer
    from tailorfl.runs.pretrain import Pretrained, Watcher
    from tailorfl.settings.experiment import ExperimentConfig
    from tailorfl.settings.loading import load as load_config
    from tailorfl.training.cohort import TrainConfig
    from tailorfl.training.plan import Length
    from tailorfl.training.terms import Seen, Term
    from tailorfl.training.update import Optimizer
    from tailorfl.tuning.outcome import Tuning

__version__ = "0.1.0"

__all__ = [
    "Bench",
    "Client",
    "Context",
    "ExperimentConfig",
    "ExperimentResult",
    "Federation",
    "Job",
    "Length",
    "Method",
    "Model",
    "Observer",
    "Optimizer",
    "Replies",
    "RoundResult",
    "Seen",
    "Simulation",
    "Source",
    "Split",
    "Term",
    "TrainConfig",
    "Tuning",
    "__version__",
    "bench",
    "build_federation",
    "compare",
    "export_models",
    "load_config",
    "merge",
    "predict",
    "pretrain",
    "register",
    "reproduce",
    "run",
    "tune",
]

_HOMES = {
    "Bench": "tailorfl.benchmark.result:Bench",
    "Client": "tailorfl.core.client:Client",
    "Context": "tailorfl.core.context:Context",
    "ExperimentConfig": "tailorfl.settings.experiment:ExperimentConfig",
    "ExperimentResult": "tailorfl.report.result:ExperimentResult",
    "Federation": "tailorfl.data.federation:Federation",
    "Job": "tailorfl.runs.job:Job",
    "Length": "tailorfl.training.plan:Length",
    "Method": "tailorfl.core.method:Method",
    "Model": "tailorfl.models.functional:Model",
    "Observer": "tailorfl.runs.job:Observer",
    "Optimizer": "tailorfl.training.update:Optimizer",
    "Tuning": "tailorfl.tuning.run:Tuning",
    "Replies": "tailorfl.core.messages:Replies",
    "RoundResult": "tailorfl.rounds.one_round:RoundResult",
    "Seen": "tailorfl.training.terms:Seen",
    "Simulation": "tailorfl.rounds.simulation:Simulation",
    "Source": "tailorfl.data.source:Source",
    "Split": "tailorfl.models.split:Split",
    "Term": "tailorfl.training.terms:Term",
    "TrainConfig": "tailorfl.training.cohort:TrainConfig",
    "build_federation": "tailorfl.data.build:build",
    "predict": "tailorfl.export.predict:predict",
    "export_models": "tailorfl.export.folder:export",
    "load_config": "tailorfl.settings.loading:load",
    "merge": "tailorfl.report.merging:merge",
    "register": "tailorfl.core.method:register",
}


def run(
    config: str | Path | Mapping[str, Any] | ExperimentConfig | None = None,
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
        resume: continue the experiment in `out`, or begin there the one that is given; finished jobs are kept.
        extend: add seeds, methods and rounds to the experiment in `out`, and keep what it has; `config` and settings
            are what to add (`seeds=5`, `methods=["fedrep"]`, `rounds=100`).
        overwrite: replace the experiment in `out`.
        observer: told of the progress, see `tailorfl.Observer`.
        source: your own data in place of `data.name`: a Source (`tailorfl.data.own`), or what `data` may be below.
        force: go on though settings, data or versions are not those that it was started with; the report says so.
        imports: modules, or files `NAME.py`, whose models, methods and data a file of settings may name as
            `module:name`. Importing runs them. Those that stand in `settings` need not be named again.
        progress: whether to show progress and warnings on stderr; None: in a terminal, an interactive Python or a
            notebook, unless there is an observer.
        settings: in place of the config's: `rounds=20`, `methods=["local", "ditto"]`, `train={"lr": 0.1}`.
            Groups are merged key by key, so `train={"lr": 0.1}` leaves the other training settings. `data` may also be
            data in memory: a DataFrame with `label="outcome", client="hospital"` and further options of `from_table`;
            a DataFrame of each client by name, with `label`; or a torch Dataset of (x, y) with `clients=[...]`, whose
            each sample is. Other settings of the data then stand in `data={...}` and the data in `source`.

    Raises:
        TailorflError: the settings, data or model cannot be used; the message says why and what to do.
    """
    from tailorfl.api import run as run_here

    modules.load(imports)
    return run_here(
        config,
        settings,
        out=out,
        resume=resume,
        extend=extend,
        overwrite=overwrite,
        observer=observer,
        source=source,
        force=force,
        progress=progress,
    )


def compare(
    config: str | Path | Mapping[str, Any] | ExperimentConfig | None = None,
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

    Arguments and errors are those of `run`; where no methods are named, six that are unlike each other are compared.
    """
    from tailorfl.api import run as run_here
    from tailorfl.settings.experiment import COMPARED

    modules.load(imports)
    return run_here(
        config,
        settings,
        out=out,
        resume=resume,
        extend=extend,
        overwrite=overwrite,
        observer=observer,
        source=source,
        force=force,
        progress=progress,
        methods=COMPARED,
    )


def reproduce(
    recipe: str | Path,
    *,
    scale: Literal["smoke", "small", "paper"] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    observer: Observer | None = None,
    force: bool = False,
    imports: Sequence[str] = (),
    progress: bool | None = None,
    **settings: Any,
) -> dict[str, ExperimentResult]:
    """Run a recipe and return its results by variant ("" where it has none); the same as `tailorfl reproduce`.

    Arguments and errors are those of `run`; `scale` is one of a recipe that has several.
    """
    from tailorfl.api import reproduce as reproduce_here

    modules.load(imports)
    return reproduce_here(
        recipe,
        settings,
        scale=scale,
        out=out,
        resume=resume,
        overwrite=overwrite,
        observer=observer,
        force=force,
        progress=progress,
    )


def tune(
    config: str | Path | Mapping[str, Any] | ExperimentConfig | None = None,
    *,
    budget: str = "20",
    sampler: Literal["random", "tpe", "grid", "halving", "hyperband"] = "random",
    seed: int = 0,
    widen: bool = False,
    workers: int = 1,
    out: str | Path | None = None,
    resume: bool = False,
    imports: Sequence[str] = (),
    **settings: Any,
) -> Tuning:
    """Tune every method fairly and return what was found; the same as `tailorfl tune`.

    >>> tuning = tailorfl.tune("demo", budget="16x20x2")  # doctest: +SKIP
    >>> result = tailorfl.compare(tuning.experiment)  # doctest: +SKIP

    Args:
        config: as for `run`; where no methods are named, six that are unlike each other are tuned.
        budget: TRIALS, TRIALSxROUNDS or TRIALSxROUNDSxSEEDS, which every method gets in samples.
        sampler: how values are proposed.
        seed: of what is drawn.
        widen: extend a grid at the side where the best value lies, within the same budget.
        workers: processes that train trials.
        out: folder of the tuning; by default runs/NAME-tuning, or the next free.
        resume: go on with the tuning in `out`, as it was begun.
        imports, settings: as for `run`; `search={...}` has the spaces.

    Raises:
        TailorflError: the settings or the budget do not fit, or Optuna is missing; the message says what to do.
    """
    from tailorfl.tuning.plan import TuningRequest
    from tailorfl.tuning.run import tune_experiment

    modules.load(imports)
    request = TuningRequest(budget, sampler, seed, widen)
    return tune_experiment(config, settings, request, workers=workers, out=out, resume=resume)


def pretrain(
    config: str | Path | Mapping[str, Any] | ExperimentConfig | None = None,
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
        out: the .safetensors file to write, beside which a .json file will tell how it came about; by default
            runs/DATA-MODEL.safetensors.
        resume: continue the pretraining of `out` from its last finished epoch.
        overwrite: replace `out`.
        watch: told of the progress.
        source: your own data in place of `data.name`, as for `run`.
        imports, settings: as for `run`, as errors are.
    """
    from tailorfl.api import pretrain as pretrain_here

    modules.load(imports)
    return pretrain_here(
        config, settings, out=out, resume=resume, overwrite=overwrite, watch=watch, source=source
    )


def bench(
    config: str | Path | Mapping[str, Any] | ExperimentConfig | None = None,
    *,
    seconds: float = 20.0,
    source: Data | None = None,
    watch: Callable[[str], None] | None = None,
    imports: Sequence[str] = (),
    **settings: Any,
) -> Bench:
    """Return times a round as a plain PyTorch loop and with every engine; the same as `tailorfl bench`.

    Args:
        config: as for `run`; its first method and seed are measured.
        seconds: how long to measure, beside building data and model.
        source: your own data in place of `data.name`, as for `run`.
        watch: told what is being done.
        imports, settings: as for `run`, as errors are.
    """
    from tailorfl.api import bench as bench_here

    modules.load(imports)
    return bench_here(config, settings, seconds=seconds, source=source, watch=watch)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tailorfl' has no attribute '{name}'")
    home, _, attribute = _HOMES[name].partition(":")
    value = getattr(import_module(home), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
