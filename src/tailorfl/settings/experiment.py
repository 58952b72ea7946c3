"""The settings of an experiment: models, methods, and all other groups, with their defaults.

The name, type and range of every setting are checked here, without importing torch; `tailorfl.runs.build` checks that
the names of methods, models and data exist, and those of their options.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    Field,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from tailorfl.printable import shown
from tailorfl.settings.base import DECIMAL, Named, Number, Settings, Whole
from tailorfl.settings.data import DataConfig
from tailorfl.settings.eval import EvalConfig
from tailorfl.settings.execution import DeployConfig, EngineConfig, TrackConfig
from tailorfl.settings.names import display_name
from tailorfl.settings.system import ServerConfig, SystemConfig
from tailorfl.settings.train import TrainOverrides, TrainSettings

COMPARED = ("local", "fedavg", "fedavg_ft", "ditto", "fedrep", "pfedme")
"""Methods that `tailorfl compare` compares by default: the baselines of every table, and three different methods."""
MOST_SEEDS = 10_000
CLIENTS = "clients"
"""Key of published numbers with one for each client."""
RUNS = "runs"
"""Key of the number of runs that published numbers are means of."""
Budget = Literal["rounds", "gradients", "bytes"]
Sampling = Literal["uniform", "proportional", "bernoulli", "cyclic", "cyclic_fixed"]
"""How the clients of a round are drawn; the last two: one a round, in a new random order each cycle or by number."""
CYCLIC: tuple[Sampling, ...] = ("cyclic", "cyclic_fixed")
Weights = Literal["samples", "uniform"]
"""Weights of clients in an average: a_i = n_i / Σ n over the averaged clients, or equal."""
Scale = Literal["smoke", "small", "paper"]
"""smoke: seconds, no evidence about a method; small: tests a claim on a CPU; paper: the published setting."""


class _Dumper(yaml.SafeDumper):
    """YAML writer that quotes texts such as 1e-3, which `tailorfl.settings.loading` would read as numbers."""


_Dumper.add_implicit_resolver(*DECIMAL)


class OneModelConfig(Named):
    """A model: a registered name or `package.module:function`, and its initial weights."""

    name: str = Field(default="mlp", description="see `tailorfl list models`, or your own module:function")
    weights: str | None = Field(
        default=None,
        description="weights to start from: .npz, .safetensors, data:FILE, torchvision:NAME, timm:NAME",
    )
    skip_head: Whole | bool = Field(
        default=False, description="leave out the last linear layer(s) of `weights`"
    )
    trainable: str | tuple[str, ...] | None = Field(
        default=None,
        description="part that may change, such as adapter+head or name patterns; the rest is frozen, held "
        "once and never sent; by default the LoRA or adapters of a transformer that has them, else all",
    )


class ModelConfig(OneModelConfig):
    """The clients' model, or models of several sizes."""

    larger: tuple[OneModelConfig, ...] = Field(
        default=(),
        description=(
            "further models in increasing size, each for an equal share of the clients; by default larger ones for "
            "clients with more data"
        ),
    )
    assign: Literal["size", "random"] = Field(
        default="size",
        description="size: larger models go to the clients with most data; random: drawn with chances by data",
    )

    @property
    def architectures(self) -> dict[str, OneModelConfig]:
        """All models by name, the smallest first; repeated names are numbered."""
        models: dict[str, OneModelConfig] = {}
        for model in (self, *self.larger):
            count = sum(earlier.name == model.name for earlier in models.values())
            models[f"{model.name}-{count + 1}" if count else model.name] = model
        return models


class MethodConfig(Named):
    """One row of the table: a method, its hyper-parameters (next to the name), its own rounds and training."""

    label: str = Field(default="", description="name of its row and folder; by default the method's name")
    rounds: Whole | None = Field(default=None, ge=1, description="replaces the experiment's rounds")
    train: TrainOverrides = Field(default=TrainOverrides(), description="replaces the experiment's")
    model: dict[str, Any] = Field(
        default={}, description="changes of the experiment's model, such as {trainable: adapter+head}"
    )

    @property
    def display_name(self) -> str:
        """The name in tables and messages: the method's title if the label is its name."""
        return display_name(self.label, self.name)

    @field_serializer("train")
    def _only_given(self, train: TrainOverrides) -> dict[str, Any]:
        return dict(**train)


class ScaleConfig(Settings):
    """One scale of a recipe: its changed settings, and the notes shown before it runs."""

    needs: str = Field(default="", description="required data, weights and machines")
    costs: str = Field(default="", description="duration, and on which machine")
    settings: dict[str, Any] = Field(
        default={}, description="changed settings of the recipe; those of variants come after these"
    )


class ExperimentConfig(Settings):
    """Methods, compared over seeds on one federation."""

    name: str = Field(
        default="digits", min_length=1, description="name, also of the result folder; by default the data's"
    )
    description: str = Field(default="", description="subject of the experiment, for the report")
    seeds: tuple[Annotated[Whole, Field(ge=0)], ...] = Field(
        default=(0, 1, 2),
        min_length=1,
        max_length=MOST_SEEDS,
        description="seeds of the repetitions, or their number: 3 is [0, 1, 2]",
    )
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig(name="mlp", options={"hidden": [64]})
    methods: tuple[MethodConfig, ...] = Field(
        default=(MethodConfig(name="ditto", label="ditto"),),
        min_length=1,
        description="lines of the table: names, or {name: ditto, lam: 0.5, ...}, see `tailorfl list methods`",
    )
    train: TrainSettings = TrainSettings()
    rounds: Whole = Field(default=30, ge=1, description="rounds of training")
    budget: Budget = Field(
        default="rounds",
        description="equal for all methods: rounds, or the gradients or bytes that FedAvg uses in that many rounds",
    )
    fraction: Number = Field(default=1.0, gt=0, le=1, description="share of the clients sampled each round")
    sampling: Sampling = Field(
        default="uniform",
        description=(
            "choice of a round's clients: with equal chances, with chances by training samples, each independently, or "
            "one in turn, in a new order each cycle or by number"
        ),
    )
    weights: Weights = Field(
        default="samples",
        description="weights of clients in averages: n_i / Σn, or equal; a method may set its own",
    )
    server: ServerConfig = ServerConfig()
    system: SystemConfig = SystemConfig()
    engine: EngineConfig = EngineConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint_every: Whole | None = Field(
        default=None, ge=1, description="rounds between checkpoints; null: as often as is cheap"
    )
    track: TrackConfig = TrackConfig()
    deploy: DeployConfig = DeployConfig()
    threads: Whole = Field(default=1, ge=1, le=1024, description="threads of torch")
    variants: dict[str, dict[str, Any]] = Field(
        default={}, description="name -> changed settings, each a separate experiment"
    )
    scales: dict[Scale, ScaleConfig] = Field(
        default={}, description="smoke, small, paper -> {settings, needs, costs}, for `reproduce --scale`"
    )
    scale: Scale | None = Field(default=None, description="scale of these settings, set by --scale")
    search: dict[str, Any] = Field(
        default={},
        description="for `tailorfl tune`: setting -> [values] or {low, high, log}, or null to keep it; "
        "train.lr, method.lam, methods.LABEL.lam",
    )
    published: dict[str, Any] = Field(
        default={}, description="label -> published numbers, shown beside the results"
    )

    @model_validator(mode="before")
    @classmethod
    def _named_after_its_data(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "name" in values:
            return values
        data = values.get("data")
        name = data.get("name") if isinstance(data, dict) else getattr(data, "name", data)
        return {**values, "name": name} if isinstance(name, str) else values

    @field_validator("seeds", mode="before")
    @classmethod
    def _count_of_seeds(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        if not 1 <= value <= MOST_SEEDS or value != int(value):
            raise ValueError(f"should be the number of seeds, from 1 to {MOST_SEEDS:,}, or a list of seeds")
        return list(range(int(value)))

    @field_validator("seeds")
    @classmethod
    def _distinct_seeds(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("has a seed twice, which would count the same run twice; remove one")
        return seeds

    @field_validator("published")
    @classmethod
    def _notes_and_numbers(cls, published: dict[str, Any]) -> dict[str, Any]:
        for key, value in published.items():
            check_published(key, value)
        return published

    @field_validator("methods", mode="before")
    @classmethod
    def _method_alone(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | dict | MethodConfig) else value

    @field_validator("methods")
    @classmethod
    def _labelled(cls, methods: tuple[MethodConfig, ...]) -> tuple[MethodConfig, ...]:
        pairs = zip(methods, labels(methods), strict=True)
        named = tuple(method.model_copy(update={"label": label}) for method, label in pairs)
        taken: set[str] = set()
        for method in named:
            if method.label in taken:
                raise ValueError(f"has '{method.label}' twice; give one of them another label")
            taken.add(method.label)
        return named

    @model_validator(mode="after")
    def _models_of_methods(self) -> Self:
        for method in self.methods:
            try:
                self.model_of(method)
            except ValidationError as error:
                problem = error.errors()[0]
                key = ".".join(map(str, ("methods", method.label, "model", *problem["loc"])))
                raise ValueError(f"has {key} = {problem['input']!r}: {problem['msg']}") from error
        return self

    @model_validator(mode="after")
    def _gamma_of_lines_is_of_the_balanced(self) -> Self:
        for method in self.methods:
            if "gamma" in method.train.keys() and self.train_of(method)["objective"] != "balanced_softmax":  # noqa: SIM118
                raise ValueError(
                    f"has methods.{method.label}.train.gamma, which needs objective=balanced_softmax"
                )
        return self

    def model_of(self, method: MethodConfig) -> ModelConfig:
        """Return the model that a method trains.

        It is the experiment's model with the method's changes, or another one if these have a name.
        """
        if "name" in method.model:
            return ModelConfig.model_validate(method.model)
        base, changes = self.model.model_dump(), method.model
        if isinstance(options := changes.get("options"), Mapping):
            # The dump has options next to the name; those given inside `options` replace them there.
            base = {key: base[key] for key in base if key in ModelConfig.model_fields or key not in options}
            changes = {**changes, "options": {**base.get("options", {}), **options}}
        return ModelConfig.model_validate({**base, **changes})

    def train_of(self, method: MethodConfig) -> dict[str, Any]:
        """Return the training settings of a method: the experiment's, replaced by those of its line."""
        return {**self.train.model_dump(), **method.train}

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as plain values for JSON and YAML."""
        return self.model_dump(mode="json")

    def to_yaml(self, brief: bool = False) -> str:
        """Return all settings as YAML, or with `brief` only changed ones; loading it gives an equal experiment."""
        settings = self.model_dump(mode="json", exclude_defaults=True) if brief else self.to_dict()
        return str(yaml.dump(settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))


DEFAULT = ExperimentConfig()
"""The defaults."""


def check_published(key: str, value: Any) -> None:
    """Check that `value` is a note, or numbers by column, with those of `clients` in a list.

    Raises:
        ValueError: it is neither; names the entry.
    """
    if not isinstance(value, Mapping):
        if value is None or isinstance(value, list | tuple):
            raise ValueError(
                f"has {key} = {shown(value)}, which is neither a note (a text) nor numbers such as {{mean: 0.9}}"
            )
        if key == RUNS and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(
                f"has {key} = {shown(value)}, but should be the number of runs that the means are taken over"
            )
        return
    for column, number in value.items():
        several = column == CLIENTS and isinstance(number, list | tuple)
        for entry in number if several else [number]:
            parts = entry if isinstance(entry, Mapping) else {"value": entry}
            numbers = set(parts) - {"std"} == {"value"} and all(map(_is_finite, parts.values()))
            if not numbers or parts.get("std", 0) < 0:
                expected = "a list of numbers" if column == CLIENTS else "a number or {value: 0.9, std: 0.01}"
                raise ValueError(f"has {key}.{column} = {shown(number)}, which should be {expected}")
        if column == CLIENTS and not several:
            raise ValueError(f"has {key}.{column} = {shown(number)}, which should be a list of numbers")


def _is_finite(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)


def labels(methods: Iterable[MethodConfig]) -> list[str]:
    """Return a label for every method: its own, else its name, with its options if the name occurs twice."""
    methods = list(methods)
    names = [method.label or method.name.rpartition(":")[2] for method in methods]
    return [
        " ".join([name, *_written(method.options)]) if not method.label and names.count(name) > 1 else name
        for method, name in zip(methods, names, strict=True)
    ]


def _written(options: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield options as text: `lam=0.5`, `server.kind=adam`, ..."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _written(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={value}"
