"""From settings to the federation and the simulation of a job, before its first round."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from tailorfl.core.method import make_method
from tailorfl.data.build import build as build_federation
from tailorfl.data.federation import Federation
from tailorfl.data.validate import weaknesses
from tailorfl.engines.make import make_engine
from tailorfl.errors import ConfigError, DataError
from tailorfl.privacy.client_privacy import ClientDP
from tailorfl.rounds.buffered import Buffered
from tailorfl.rounds.frozen_front import FeatureSettings
from tailorfl.rounds.groups import assign_by_size
from tailorfl.rounds.participation import Trace
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.job import Job
from tailorfl.runs.model import make_model
from tailorfl.runs.privacy import Simulated, with_privacy
from tailorfl.runs.store import TRACE
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.keys import generator
from tailorfl.training.round_schedule import RoundSchedule
from tailorfl.training.sample_privacy import SampleDP

log = logging.getLogger(__name__)


def make_federation(
    config: ExperimentConfig, seed: int, source: Any = None, said: set[str] | None = None
) -> Federation:
    """Returns the federation of an experiment, checked; what is weak about it is logged as warnings.

    `said` are warnings that were logged before and are not repeated; new ones are added to it.

    Raises:
        DataError: data that cannot be used, or nothing to test on.
    """
    arguments = config.data.model_dump(exclude={"seed"})
    if source is not None:
        arguments |= {"source": source, "path": None, "options": None}
    federation = build_federation(**arguments, seed=seed)
    if not federation.sizes("test")[: federation.num_clients].any():
        raise DataError(
            "no client has test samples, so nothing could be compared; leave a share for them in data.split, "
            "such as {train: 0.7, val: 0.1, test: 0.2}"
        )
    said = set() if said is None else said
    for warning in weaknesses(federation):
        if warning not in said:
            log.warning("data of seed %d: %s", seed, warning)
            said.add(warning)
    return federation


@overload
def make_simulation(job: Job, federation: Federation, folder: Path | None = None) -> Simulation: ...


@overload
def make_simulation(
    job: Job, federation: Federation, folder: Path | None, kind: type[Simulated]
) -> Simulated: ...


def make_simulation(
    job: Job, federation: Federation, folder: Path | None = None, kind: type[Simulation] = Simulation
) -> Simulation:
    """Returns the simulation of a job, before its first round; `folder` is where states on disk would lie.

    `kind` is a class like `Simulation`, whose clients may be elsewhere.
    """
    config = job.config
    wanted = config.model_of(job.method).architectures
    models = {name: make_model(c, federation.source, job.seed) for name, c in wanted.items()}
    several = len(models) > 1
    drawn = config.model_of(job.method).assign == "random"
    chance = generator(job.seed, "architectures") if drawn else None
    owners = assign_by_size(federation.sizes().tolist(), list(models), chance) if several else ()

    method = make_method(job.method.name, job.method.options)
    trace = None if method.pooled else trace_of(job)
    if kind is Simulation and config.system.mode == "buffered" and not method.pooled:
        kind = Buffered

    # Clients elsewhere have their own samples, which nobody else may go through.
    here = kind in (Simulation, Buffered)
    engine = config.engine
    if (
        trace is not None and trace.is_deployed
    ):  # each client trained alone, and passed through frozen layers every time
        alone = {"name": ("auto", "sequential"), "features": ("auto", "off")}
        replayed = {key: then for key, (usual, then) in alone.items() if getattr(engine, key) == usual}
        engine = engine.model_copy(update=replayed)
    features = FeatureSettings(
        engine.features if here else "off",
        engine.features_memory,
        None if folder is None else _root(folder, job),
    )

    def build(sample_dp: SampleDP | None, client_dp: ClientDP | None) -> Simulation:
        return kind(
            method,
            federation,
            models if several else next(iter(models.values())),
            replace(train_config(job), dp=sample_dp),
            assignment=owners,
            engine=make_engine(**engine.arguments),
            seed=job.seed,
            fraction=config.fraction,
            sampling=config.sampling,
            weights=config.weights,
            state_folder=folder if engine.states == "disk" else None,
            client_dp=client_dp,
            robust=config.server.robust,
            system=config.system,
            trace=trace,
            features=features,
        )

    return with_privacy(job, build)


def _root(folder: Path, job: Job) -> Path:
    """The result folder that a job's folder is in, which all of its jobs share; the folder itself where it is alone."""
    depth = len(Path(job.folder).parts)
    return folder.parents[depth - 1] if folder.parts[-depth:] == Path(job.folder).parts else folder


def trace_of(job: Job) -> Trace | None:
    """Returns the recorded run that a job is to play again: that of its file, or the job's own in a result folder.

    Raises:
        RunError: it cannot be read, or is no trace.
        ConfigError: it has fewer rounds than the job.
    """
    if job.config.system.trace is None:
        return None
    place = Path(job.config.system.trace)
    trace = Trace.read(place / job.folder / TRACE if place.is_dir() else place)
    if len(trace) < job.rounds and job.config.budget == "rounds":
        raise ConfigError(
            f"{job.name} has {job.rounds} rounds, but '{trace.name}' has {len(trace)}; set rounds={len(trace)}"
        )
    return trace


def train_config(job: Job) -> TrainConfig:
    """Returns the training settings of a job: the experiment's, and in their place those of its method; no privacy.

    Raises:
        ConfigError: the two do not fit together.
    """
    settings = {**job.config.train.model_dump(), **job.method.train}
    del settings["dp"]
    falls = RoundSchedule(**settings.pop("round_schedule"), rounds=job.rounds)
    return TrainConfig(**settings, round_schedule=falls)
