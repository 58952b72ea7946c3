"""The first look at an experiment's names, without importing torch: a typo is answered at once.

`tailorfl.runs.check` looks again, with the registries themselves; what only they know is left to it.
"""

from __future__ import annotations

from tailorfl.errors import ConfigError, unknown
from tailorfl.hub import no_such_folder
from tailorfl.settings.catalogue import Kind, known, others_add_methods
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.model import OneModelConfig


def first_look(config: ExperimentConfig) -> None:
    """Raises ConfigError for a method, model, data source or partition, or an option of one, that does not exist.

    Nothing is refused that another package or a module of the user's may have added.
    """
    if not others_add_methods():
        for method in config.methods:
            _look("methods", method.name, method.options, "method", f"option of {method.name}")
    for method in config.methods:
        for model in config.model_of(method).architectures.values():
            _look("models", model.name, model.options, "model", f"option of model '{model.name}'")
            check_checkpoint(model)
    data = config.data
    _look("data", data.name, data.options, "data source", f"option of data source '{data.name}'")
    if data.public is not None:
        _look("data", data.public, {}, "data source", "")
    if data.partition is not None:
        what = f"option of partition '{data.partition}'"
        _look("partitions", data.partition, data.partition_options, "partition", what)


def check_checkpoint(model: OneModelConfig) -> None:
    """Raises ConfigError for a checkpoint that can only be a folder and is none."""
    checkpoint = model.options.get("checkpoint")
    problem = no_such_folder(checkpoint) if isinstance(checkpoint, str) and ":" not in model.name else ""
    if problem:
        raise ConfigError(f"model.checkpoint: {problem}; give a folder that save_pretrained wrote")


def _look(kind: Kind, name: str, options: dict[str, object], what: str, what_option: str) -> None:
    names = known(kind)
    if ":" in name:  # of a module of the user's
        return
    if name not in names:
        raise unknown(what, name, names)
    for option in options:
        if option not in names[name]:
            raise unknown(what_option, option, names[name])
