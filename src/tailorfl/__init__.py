"""Personalized federated learning: many clients learn together, and each gets its own model.

>>> import tailorfl
>>> result = tailorfl.run(data={"clients": 20}, methods=["local", "ditto"], rounds=20)  # doctest: +SKIP
>>> print(result.table)  # doctest: +SKIP
>>> result.plot()  # doctest: +SKIP

Importing this package is fast; its contents are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailorfl.api import bench, compare, pretrain, reproduce, run, tune
    from tailorfl.benchmark.result import Bench
    from tailorfl.core.client import Client
    from tailorfl.core.context import Context
    from tailorfl.core.messages import Replies
    from tailorfl.core.method import Method, register
    from tailorfl.data.build import build as build_federation
    from tailorfl.data.federation import Federation
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
    from tailorfl.settings.experiment import ExperimentConfig
    from tailorfl.settings.loading import load as load_config
    from tailorfl.training.cohort import TrainConfig
    from tailorfl.training.objective import Seen, Term
    from tailorfl.training.plan import Length
    from tailorfl.training.update import Optimizer
    from tailorfl.tuning.run import Tuning

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
    "Seen": "tailorfl.training.objective:Seen",
    "Simulation": "tailorfl.rounds.simulation:Simulation",
    "Source": "tailorfl.data.source:Source",
    "Split": "tailorfl.models.split:Split",
    "Term": "tailorfl.training.objective:Term",
    "TrainConfig": "tailorfl.training.cohort:TrainConfig",
    "build_federation": "tailorfl.data.build:build",
    "predict": "tailorfl.export.predict:predict",
    "export_models": "tailorfl.export.folder:export",
    "load_config": "tailorfl.settings.loading:load",
    "merge": "tailorfl.report.merging:merge",
    "register": "tailorfl.core.method:register",
    **{name: f"tailorfl.api:{name}" for name in ("bench", "compare", "pretrain", "reproduce", "run", "tune")},
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tailorfl' has no attribute '{name}'")
    home, _, attribute = _HOMES[name].partition(":")
    value = getattr(import_module(home), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
