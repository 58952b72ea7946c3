"""Builds the parts of a job from settings: checked names and options, federation, model, method, engine, simulation.

`check` checks everything that the registries know before a run begins; problems that depend on the data are found when
the parts are built, before the first round.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import torch

from tailorfl.core.method import check_aggregates, make_method, needs_one_architecture, needs_public
from tailorfl.data.build import build as build_federation
from tailorfl.data.federation import Federation, weaknesses
from tailorfl.data.registry import loader_of
from tailorfl.data.registry import options_of as source_options
from tailorfl.data.source import Source
from tailorfl.data.storage import named_file
from tailorfl.engines.choice import make_engine
from tailorfl.errors import ConfigError, DataError, ModelError, first_few, unknown
from tailorfl.evaluation.selection import refuse_private
from tailorfl.models.functional import Model
from tailorfl.models.registry import build, options_of
from tailorfl.models.weights import WeightReport, load_weights
from tailorfl.modules import find
from tailorfl.partition import recipe_named
from tailorfl.partition.splits import read_split
from tailorfl.rounds.buffered import Buffered, check_buffered
from tailorfl.rounds.client_privacy import ClientDP
from tailorfl.rounds.frozen_front import FeatureSettings
from tailorfl.rounds.groups import assign_by_size
from tailorfl.rounds.malicious import check_malicious
from tailorfl.rounds.participation import Trace
from tailorfl.rounds.requirements import check_private
from tailorfl.rounds.robust import check_robust
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.catalogue import partition_options
from tailorfl.runs.job import Job
from tailorfl.runs.privacy import Simulated, privacy_of, with_privacy
from tailorfl.runs.store import TRACE
from tailorfl.settings.data import DataConfig
from tailorfl.settings.errors import check_checkpoint
from tailorfl.settings.experiment import ExperimentConfig, MethodConfig, OneModelConfig
from tailorfl.settings.loading import expand
from tailorfl.settings.names import check_distinct
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.keys import generator
from tailorfl.training.sample_privacy import SampleDP
from tailorfl.training.update import RoundSchedule

log = logging.getLogger(__name__)
OF_TOKENIZER = ("pad", "end", "vocabulary")
"""Options of models that a token source determines."""


def make_federation(
    config: ExperimentConfig, seed: int, source: Any = None, logged: set[str] | None = None
) -> Federation:
    """Return the federation of an experiment, checked; its weaknesses are logged as warnings.

    `logged` has the warnings that were logged before and are not repeated; new ones are added to it.

    Raises:
        ConfigError: a method cannot use such samples.
        DataError: the data cannot be used, or there is nothing to test on.
    """
    arguments = config.data.model_dump(exclude={"seed"})
    if source is not None:
        arguments |= {"source": source, "path": None, "options": None}
    federation = build_federation(**arguments, joined=_joined(config, seed), seed=seed)
    if not federation.sizes("test")[: federation.num_clients].any():
        raise DataError(
            "no client has test samples, so nothing can be compared; give the test part a share in data.split, such as "
            "{train: 0.7, val: 0.1, test: 0.2}"
        )
    for line in config.methods:
        make_method(line.name, line.options).check_source(federation.source)
    logged = set() if logged is None else logged
    for warning in weaknesses(federation):
        if warning not in logged:
            log.warning("data of seed %d: %s", seed, warning)
            logged.add(warning)
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
    """Return the simulation of a job, before its first round; `folder` is the place for states on disk.

    `kind` is `Simulation` or a subclass, whose clients may be remote.
    """
    config = job.config
    settings = config.model_of(job.method)
    models = {name: make_model(c, federation.source, job.seed) for name, c in settings.architectures.items()}
    several = len(models) > 1
    chance = generator(job.seed, "architectures") if settings.assign == "random" else None
    owners = assign_by_size(federation.sizes().tolist(), list(models), chance) if several else ()

    method = make_method(job.method.name, job.method.options)
    trace = None if method.pooled else trace_of(job)
    if kind is Simulation and config.system.mode == "buffered" and not method.pooled:
        kind = Buffered

    engine = config.engine
    if trace is not None and trace.is_deployed:
        # In a deployment each client trained alone, and passed samples through frozen layers every time.
        replayed = {"name": "sequential", "features": "off"}
        engine = engine.model_copy(
            update={key: value for key, value in replayed.items() if getattr(engine, key) == "auto"}
        )
    # Only remote clients themselves may read their samples.
    is_local = kind in (Simulation, Buffered)
    features = FeatureSettings(
        engine.features if is_local else "off",
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


def _joined(config: ExperimentConfig, seed: int) -> tuple[tuple[str, ...], ...]:
    """Return the clients of a replayed deployment, in groups that joined together, from this seed's longest trace."""
    if config.system.trace is None:
        return ()
    lines = [line for line in config.methods if not make_method(line.name, line.options).pooled]
    seeds = [run for run in config.seeds if config.data.seed_of(run) == seed]
    traces = [trace_of(Job(config, line, run)) for run in seeds for line in lines]
    return max((trace.joined for trace in traces if trace is not None), key=len, default=())


def _root(folder: Path, job: Job) -> Path:
    """Return the result folder of a job's folder, which all jobs of the experiment share.

    It is the folder itself if that is in no result folder.
    """
    depth = len(Path(job.folder).parts)
    return folder.parents[depth - 1] if folder.parts[-depth:] == Path(job.folder).parts else folder


def was_deployed(job: Job, folder: Path) -> bool:
    """Return whether a server and clients did a job of a result folder, not a run or replay on one machine."""
    file = folder / job.folder / TRACE
    return job.config.system.trace is None and file.is_file() and Trace.read(file).is_deployed


def trace_of(job: Job) -> Trace | None:
    """Return the trace that a job replays: the given file, or the job's trace in a given result folder.

    Raises:
        RunError: the file cannot be read, or is not a trace.
        ConfigError: the trace has fewer rounds than the job.
    """
    if job.config.system.trace is None:
        return None
    path = Path(job.config.system.trace)
    trace = Trace.read(path / job.folder / TRACE if path.is_dir() else path)
    if len(trace) < job.rounds and job.config.budget == "rounds":
        raise ConfigError(
            f"{job.name} has {job.rounds} rounds, but '{trace.name}' has {len(trace)}; set rounds={len(trace)}"
        )
    return trace


def train_config(job: Job) -> TrainConfig:
    """Return the training settings of a job, without privacy: the experiment's, overridden by its method's.

    Raises:
        ConfigError: the two do not fit together.
    """
    settings = job.config.train_of(job.method)
    del settings["dp"]
    falls = RoundSchedule(**settings.pop("round_schedule"), rounds=job.rounds)
    return TrainConfig(**settings, round_schedule=falls)


def with_all_options(config: ExperimentConfig) -> ExperimentConfig:
    """Return the experiment with every option of its methods written out, for a complete record in its folder."""
    return config.model_copy(
        update={
            "methods": tuple(
                m.model_copy(update={"options": make_method(m.name, m.options).all_options()})
                for m in config.methods
            )
        }
    )


def make_model(config: OneModelConfig, source: Source, seed: int) -> Model:
    """Return a model for the samples of `source`; `seed` draws frozen tensors that no file contains.

    The source's facts about its tokens (padding, end, vocabulary, length of an option) are defaults of the model's
    options.

    Raises:
        ModelError: only one of model and samples is for tokens, or the model knows too few tokens.
        DataError: the weights are a file of the data folder (`data:NAME`) that does not exist.
    """
    options = {**_token_options(config.name, source), **config.options}
    _check_head(config.name, options, source)

    def factory() -> torch.nn.Module:
        return build(config.name, source.input_shape, source.outputs, **options)

    fits: list[WeightReport] = []

    def prepare(module: torch.nn.Module) -> None:
        if config.weights is not None:
            fits[:] = [load_weights(module, named_file(config.weights), skip_head=config.skip_head)]

    model = Model(factory, prepare, trainable=config.trainable, seed=seed)
    if fits and (lacking := fits[0].lacking(model.module, model.frozen)):
        _warn_of(lacking, config, model)
    if ":" not in config.name:  # authors of models know their inputs
        _check_tokens(config.name, model, source)
    return model


def _warn_of(lacking: Sequence[str], config: OneModelConfig, model: Model) -> None:
    for_good = " for good, since they are frozen" if model.frozen else ""
    text = (
        f"'{config.weights}' lacks {len(lacking)} tensor(s) of model '{config.name}' before its head, which keep their "
        f"initial values{for_good}: {first_few(lacking, 5)}; use a file of this model, or rename the tensors in it"
    )
    log.warning("%s", text, extra={"once": text})


def _token_options(name: str, source: Source) -> dict[str, Any]:
    if ":" in name or not source.holds_tokens:
        return {}
    options = {key: source.info[key] for key in OF_TOKENIZER if key in source.info}
    options |= {k: v for k, v in source.info.get("choice", {}).items() if k == "option_length"}
    valid = options_of(name)
    return {key: value for key, value in options.items() if key in valid}


def _check_head(name: str, options: Mapping[str, Any], source: Source) -> None:
    """Raise ModelError if the requested head of a model does not fit the task."""
    if ":" in name or not source.holds_tokens or "head" not in options_of(name):
        return
    head = options.get("head", options_of(name)["head"])
    if (source.task == "generation") != (head == "language"):
        expected, alternatives = (
            ("a text, which needs model.head=language of a causal model such as llama", "classes or choices")
            if source.task == "generation"
            else ("classes, which needs model.head=classification or choice", "texts")
        )
        raise ModelError(
            f"source '{source.name}' asks for {expected}, but the head of model '{name}' is '{head}'; change the head, "
            f"or use data that ask for {alternatives} (data.options.form of instructions: choice or generation)"
        )


def _check_tokens(name: str, model: Model, source: Source) -> None:
    tables = [part for part in model.module.modules() if isinstance(part, torch.nn.Embedding)]
    if bool(tables) != source.holds_tokens:
        inputs, fitting = ("tokens", "bert or minilm") if source.holds_tokens else ("numbers", "mlp or cnn2")
        raise ModelError(
            f"model '{name}' cannot read source '{source.name}', whose samples are {inputs}; use a model such as "
            f"{fitting}"
        )
    tokens = int(source.info.get("vocabulary", 0))
    largest = max((table.num_embeddings for table in tables), default=0)
    if tokens > largest:
        raise ModelError(
            f"model '{name}' knows {largest} tokens, but the tokenizer '{source.info.get('tokenizer')}' of source "
            f"'{source.name}' has {tokens}; use the model's tokenizer for the data (data.options.tokenizer)"
        )


def check(config: ExperimentConfig) -> None:
    """Raise ConfigError if a method, model, engine, data source, partition, or option of one does not exist.

    Problems that depend on the data (whether the model fits the samples, whether these can be partitioned so) are found
    when a run starts, before its first round.
    """
    if config.variants:
        check_distinct(config.variants, "variants")
        for name, changes in config.variants.items():
            if not name.strip() or "variants" in changes:
                raise ConfigError(
                    f"variants: '{name}' needs a name and cannot contain variants; write all variants at one level"
                )
        for experiment in expand(config).values():
            check(experiment)
        return
    if config.budget != "rounds" and config.system.is_simulated:
        raise ConfigError(
            f"budget={config.budget} gives all methods what FedAvg uses if every client answers, but system simulates "
            "clients that may not; leave out one of the two"
        )
    for method in config.methods:
        _check_method(method, config)
    check_distinct((method.label for method in config.methods), "methods")
    for method in config.methods:
        for model in config.model_of(method).architectures.values():
            _check_model(model)
    make_engine(**config.engine.arguments)
    _check_data(config.data)
    _check_published(config)


def _check_method(line: MethodConfig, config: ExperimentConfig) -> None:
    method = make_method(line.name, line.options)
    check_aggregates(method)
    if method.needs_public and config.data.public is None:
        raise needs_public(method)
    architectures = config.model_of(line).architectures
    if len(architectures) > 1 and not method.heterogeneous:
        raise needs_one_architecture(method, list(architectures))
    job = Job(config, line, config.seeds[0])
    schedule = train_config(job).round_schedule
    if job.has_budget and schedule.is_relative:
        raise ConfigError(
            f"budget={config.budget} determines the number of rounds during training, but train.round_schedule of kind "
            f"{schedule.kind} needs it in advance; set budget=rounds, or train.round_schedule.kind=inverse"
        )
    privacy = privacy_of(job)
    check_robust(method, config.server.robust, None if privacy is None else privacy.level)
    check_malicious(method, config.system.malicious)
    if config.system.mode == "buffered" and not method.pooled:
        check_buffered(method, config.fraction, method.sampled(config.sampling), privacy)
    if privacy is not None and config.budget != "rounds":
        raise ConfigError(
            f"budget={config.budget} determines the number of rounds during training, but train.dp needs it in advance "
            "for its noise and ε; leave out one of the two"
        )
    if privacy is not None:
        check_private(method, privacy.level, method.weighting(config.weights))
        if config.eval.select == "val" and method.has_personal:
            refuse_private(privacy.level)
        if config.eval.calibrate != "none" and privacy.level == "sample":
            raise ConfigError(
                f"eval.calibrate={config.eval.calibrate} fits a temperature for each client to its validation samples "
                "without noise, which sample-level privacy does not cover; leave one of the two out"
            )


def _check_model(model: OneModelConfig) -> None:
    check_checkpoint(model)
    if ":" in model.name:  # a user's factory; its options are checked when the model is built
        find(model.name)
        return
    _check_options(f"option of model '{model.name}'", model.options, options_of(model.name))


def _check_data(data: DataConfig) -> None:
    if data.public is not None:
        loader_of(data.public)
    options = source_options(data.name)
    if ":" not in data.name:  # a user's function may take any options
        _check_options(f"option of data source '{data.name}'", data.options, options)
    if data.partition is not None:
        recipe_named(data.partition)  # raises if there is none
        valid = partition_options(data.partition)
        _check_options(f"option of partition '{data.partition}'", data.partition_options, valid)
    if data.split is not None:
        has_official = isinstance(data.split, str) or not isinstance(data.split.test, float)
        read_split(data.split, has_official)


def _check_options(kind: str, options: Mapping[str, object], valid: Collection[str]) -> None:
    for option in options:
        if option not in valid:
            raise unknown(kind, option, valid)


def _check_published(config: ExperimentConfig) -> None:
    labels = [method.label for method in config.methods]
    for label, numbers in config.published.items():
        if isinstance(numbers, dict) and label not in labels:
            raise unknown("label in published", label, labels)
