"""Models by name: the registered ones, and any factory of the user by its dotted path."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from torch import nn

from tailorfl import modules
from tailorfl.errors import ModelError, TailorflError, unknown
from tailorfl.models import foundation, resnet, small, vgg
from tailorfl.models.adapters import PeftConfig
from tailorfl.models.dropout import replace_dropout

Factory = Callable[..., nn.Module]

FACTORIES: dict[str, Factory] = {
    "logistic": small.logistic,
    "linear": small.linear,
    "cox": small.cox,
    "mlp": small.mlp,
    "cnn2": small.cnn2,
    "cnn3": small.cnn3,
    "cnn5": small.cnn5,
    "lenet": small.lenet,
    "ckt_cnn": small.ckt_cnn,
    "vgg11": vgg.vgg11,
    "vgg13": vgg.vgg13,
    "resnet10": resnet.resnet10,
    "resnet18": resnet.resnet18,
    "resnet34": resnet.resnet34,
    "resnet20": resnet.resnet20,
    "resnet32": resnet.resnet32,
    "resnet56": resnet.resnet56,
    "bert": foundation.bert,
    "llama": foundation.llama,
    "vit": foundation.vit,
    "minilm": foundation.minilm,
    "huggingface": foundation.huggingface,
}


def available() -> dict[str, str]:
    """Return name -> one line of description, for every registered model."""
    return {name: (inspect.getdoc(factory) or "").splitlines()[0] for name, factory in FACTORIES.items()}


def options_of(name: str) -> dict[str, Any]:
    """Return option -> default value, for a registered model; raises ConfigError for an unknown name."""
    if name not in FACTORIES:
        raise unknown("model", name, FACTORIES)
    defaults: dict[str, Any] = {}
    for p in inspect.signature(FACTORIES[name]).parameters.values():
        if isinstance(p.default, PeftConfig):
            defaults |= {field.name: getattr(p.default, field.name) for field in fields(PeftConfig)}
        elif p.kind is inspect.Parameter.KEYWORD_ONLY:
            defaults[p.name] = p.default
    return defaults


def build(name: str, input_shape: Sequence[int], outputs: int, **options: Any) -> nn.Module:
    """Return a freshly initialised model (from torch's global random state) for samples of `input_shape`.

    `name` is a registered model or "package.module:function", a factory that is called as
    function(input_shape, outputs, **options) and returns an nn.Module; its dropout layers are replaced by
    keyed ones. The user must have named its module, see `tailorfl.modules`.

    >>> build("mlp", (1, 8, 8), 10, hidden=[32]).head
    Linear(in_features=32, out_features=10, bias=True)

    Raises ConfigError for an unknown model, option or choice, and ModelError if the model does not fit the
    samples.
    """
    shape = tuple(input_shape)
    if outputs < 1:
        raise ModelError(f"a model needs at least one output, got {outputs}.")
    if ":" in name:
        return replace_dropout(_from_path(name, shape, outputs, options))
    valid = options_of(name)
    for option in options:
        if option not in valid:
            raise unknown(f"option of model '{name}'", option, valid)
    try:
        return FACTORIES[name](shape, outputs, **_arguments(name, options))
    except TailorflError:
        raise
    except Exception as error:  # options of a wrong type or size fail anywhere in torch or transformers
        raise ModelError(
            f"model '{name}' cannot be made with the options {options}: {_reason(error)}."
        ) from error


def _arguments(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options as a factory takes them: those of a `PeftConfig` combined in one."""
    accepted = inspect.signature(FACTORIES[name]).parameters
    of_peft = {key: value for key, value in options.items() if key not in accepted}
    direct = {key: value for key, value in options.items() if key in accepted}
    return {**direct, "peft": PeftConfig(**of_peft)} if of_peft else direct


def _reason(error: Exception) -> str:
    """Return the reason for an error; torch reports a lack of memory as a RuntimeError."""
    allocation = re.search(r"allocate (\d+) bytes", str(error))
    if allocation:
        return (
            f"one of its tensors needs {int(allocation[1]) / 1e9:,.1f} GB of memory, which is not available"
        )
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "out of memory"


def _from_path(path: str, shape: tuple[int, ...], outputs: int, options: dict[str, Any]) -> nn.Module:
    function_name = path.partition(":")[2]
    factory = modules.find(path)
    try:
        inspect.signature(factory).bind(shape, outputs, **options)
    except TypeError as error:
        raise ModelError(
            f"model factory '{path}' cannot be called as {function_name}(input_shape, outputs, **options) "
            f"with options {options}: {error}."
        ) from error
    module = factory(shape, outputs, **options)
    if not isinstance(module, nn.Module):
        raise ModelError(f"model factory '{path}' returned a {type(module).__name__}, not an nn.Module.")
    return module
