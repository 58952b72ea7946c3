"""The second look at an experiment, with the registries at hand: do the names and options exist?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tailorfl.errors import ConfigError, unknown
from tailorfl.modules import find
from tailorfl.settings.data import DataConfig
from tailorfl.settings.errors import check_checkpoint
from tailorfl.settings.experiment import ExperimentConfig, MethodConfig
from tailorfl.settings.model import OneModelConfig
from tailorfl.settings.names import check_distinct


def check(config: ExperimentConfig) -> None:
    """Raises ConfigError if a method, model, engine, data source, partition, or option of one does not exist.

    What needs the data themselves (does the model fit the samples, can they be dealt like that) is found when
    a run starts, before its first round.
    """
    from tailorfl.engines.make import make_engine

    if config.variants:
        from tailorfl.runs.variants import expand

        check_distinct(config.variants, "variants")
        for name, changes in config.variants.items():
            if not name.strip() or "variants" in changes:
                raise ConfigError(
                    f"variants: '{name}' needs a name and has no variants of its own; write them flat"
                )
        for experiment in expand(config).values():
            check(experiment)
        return
    for method in config.methods:
        _check_method(method, config)
    check_distinct((method.label for method in config.methods), "methods")
    for method in config.methods:
        for model in config.model_of(method).architectures.values():
            _check_model(model)
    make_engine(**config.engine.arguments)
    _check_data(config.data)
    _check_published(config)


def _check_method(method: MethodConfig, config: ExperimentConfig) -> None:
    from tailorfl.core.method import check_aggregates, make_method, needs_one_architecture, needs_public
    from tailorfl.evaluation.selection import refuse_private
    from tailorfl.rounds.buffered import check_buffered
    from tailorfl.rounds.malicious import check_malicious
    from tailorfl.rounds.requirements import check_private
    from tailorfl.rounds.robust import check_robust
    from tailorfl.runs.build import train_config
    from tailorfl.runs.job import Job
    from tailorfl.runs.privacy import privacy_of

    made = make_method(method.name, method.options)
    check_aggregates(made)
    if made.needs_public and config.data.public is None:
        raise needs_public(made)
    architectures = config.model_of(method).architectures
    if len(architectures) > 1 and not made.heterogeneous:
        raise needs_one_architecture(made, list(architectures))
    job = Job(config, method, config.seeds[0])
    train_config(job)
    privacy = privacy_of(job)
    check_robust(made, config.server.robust, None if privacy is None else privacy.level)
    check_malicious(made, config.system.malicious)
    if config.system.mode == "buffered" and not made.pooled:
        check_buffered(made, config.fraction, made.sampled(config.sampling), privacy)
    if privacy is not None and config.budget != "rounds":
        raise ConfigError(
            f"budget={config.budget} lets the training find out how many rounds a method gets, but train.dp finds its "
            "noise and ε for a number that is known before; leave out one of the two"
        )
    if privacy is not None:
        check_private(made, privacy.level, made.weighting(config.weights))
        if config.eval.select == "val" and made.has_personal:
            refuse_private(privacy.level)
        if config.eval.calibrate != "none" and privacy.level == "sample":
            raise ConfigError(
                f"eval.calibrate={config.eval.calibrate} fits a number of each client to its validation samples "
                "without noise, which sample-level privacy does not cover; leave one of the two out"
            )


def _check_model(model: OneModelConfig) -> None:
    from tailorfl.models.registry import options_of

    check_checkpoint(model)
    if ":" in model.name:  # a factory of the user's; its options are looked at when the model is built
        find(model.name)
        return
    _check_options(f"option of model '{model.name}'", model.options, options_of(model.name))


def _check_data(data: DataConfig) -> None:
    from tailorfl.data.partition import recipe_named
    from tailorfl.data.registry import loader_of, options_of
    from tailorfl.data.splits import read_split
    from tailorfl.runs.catalogue import partition_options

    if data.public is not None:
        loader_of(data.public)
    options = options_of(data.name)
    if ":" not in data.name:  # a function of the user's may take any
        _check_options(f"option of data source '{data.name}'", data.options, options)
    if data.partition is not None:
        recipe_named(data.partition)  # raises where there is none
        valid = partition_options(data.partition)
        _check_options(f"option of partition '{data.partition}'", data.partition_options, valid)
    if data.split is not None:
        split = data.model_dump()["split"]
        has_official = isinstance(split, str) or not isinstance(split.get("test"), float)
        read_split(split, has_official)


def _check_options(kind: str, given: Mapping[str, object], valid: Iterable[str]) -> None:
    known = list(valid)
    for option in given:
        if option not in known:
            raise unknown(kind, option, known)


def _check_published(config: ExperimentConfig) -> None:
    labels = [method.label for method in config.methods]
    for label, numbers in config.published.items():
        if isinstance(numbers, dict) and label not in labels:
            raise unknown("label in published", label, labels)
