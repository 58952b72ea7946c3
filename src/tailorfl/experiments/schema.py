"""What an experiment is: the settings of data, model, methods, training and evaluation, with their defaults.

Every setting is checked for its name, type and range here, without importing torch; that the names of
methods, models, data and their own options exist is checked by `tailorfl.experiments.check`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from tailorfl.experiments.settings import Named, Names, Number, Settings, Whole, listed

EvaluationSet = Literal["val", "local", "global", "heldout", "shifted"]
COMPARED = ("local", "fedavg", "fedavg_ft", "ditto", "fedrep", "pfedme")
"""What `tailorfl compare` compares if not told: the baselines of every table, and three unlike methods."""


class OneModelConfig(Named):
    """A model: a registered name or `package.module:function`, and the weights it starts from."""

    name: str = "mlp"
    weights: str | None = Field(default=None, description=".npz, .safetensors, torchvision:NAME, timm:NAME")
    skip_head: Whole | bool = Field(
        default=False, description="without the last linear layer(s) of `weights`"
    )


class ModelConfig(OneModelConfig):
    """The clients' model, or their models."""

    larger: tuple[OneModelConfig, ...] = Field(
        default=(),
        description="models of the clients with more data, from the second smallest to the largest; equal shares",
    )

    @property
    def architectures(self) -> dict[str, OneModelConfig]:
        """All models by name, the smallest first; a name that comes twice is numbered."""
        found: dict[str, OneModelConfig] = {}
        for model in (self, *self.larger):
            again = sum(other.name == model.name for other in found.values())
            found[f"{model.name}-{again + 1}" if again else model.name] = model
        return found


class SampleDPConfig(Settings):
    """Sample-level differential privacy of local training."""

    clip: Number = Field(gt=0, description="largest norm of one sample's gradient")
    noise: Number = Field(ge=0, description="standard deviation of the noise, in units of clip")


class TrainSettings(Settings):
    """Local training on every client; a method may override any of it."""

    epochs: Whole | None = Field(
        default=1, ge=1, description="passes over the client's training data a round"
    )
    steps: Whole | None = Field(default=None, ge=1, description="SGD steps a round, in place of epochs")
    batch_size: Whole = Field(default=10, ge=0, description="samples a step; 0 is the client's whole data")
    lr: Number = Field(default=0.05, gt=0, description="learning rate")
    momentum: Number = Field(default=0.0, ge=0, lt=1)
    weight_decay: Number = Field(default=0.0, ge=0)
    clip: Number | None = Field(
        default=None, gt=0, description="largest norm of a gradient; null: no clipping"
    )
    dp: SampleDPConfig | None = Field(default=None, description="sample-level privacy: {clip, noise}")

    @model_validator(mode="before")
    @classmethod
    def _steps_replace_epochs(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("steps") is not None and "epochs" not in given:
            return {**given, "epochs": None}
        return given

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("needs either epochs or steps; give one of them")
        return self


class TrainOverrides(TrainSettings):
    """Training settings of one method; `**overrides` gives those that were set."""

    @model_validator(mode="before")
    @classmethod
    def _epochs_replace_steps(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("epochs") is not None and "steps" not in given:
            return {**given, "steps": None}
        return given

    def keys(self) -> list[str]:
        """The settings that were given."""
        return [key for key in type(self).model_fields if key in self.model_fields_set]

    def __getitem__(self, key: str) -> Any:
        if key not in self.model_fields_set:
            raise KeyError(key)
        return self.model_dump(mode="json", include={key})[key]


class MethodConfig(Named):
    """One row of the table: a method, its hyper-parameters (beside the name), its own rounds and training."""

    label: str = Field(default="", description="row of the table and folder; by default the method's name")
    rounds: Whole | None = Field(default=None, ge=1, description="in place of the experiment's rounds")
    train: TrainOverrides = Field(default=TrainOverrides(), description="in place of the experiment's")

    @field_serializer("train")
    def _only_given(self, train: TrainOverrides) -> dict[str, Any]:
        return dict(**train)


class SplitShares(Settings):
    """Shares of a client's samples; `test` may be "official" or "global" where the source has a test part."""

    train: Number | None = Field(default=None, gt=0, le=1)
    val: Number | None = Field(default=None, ge=0, lt=1)
    test: Annotated[float, Field(ge=0, lt=1)] | Literal["official", "global"] | None = None


class CorruptionConfig(Settings):
    """Corrupted copies of test images as shifted test sets."""

    kinds: Literal["all"] | Names = Field(default="all", union_mode="left_to_right")
    severities: tuple[Annotated[Whole, Field(ge=1, le=5)], ...] = (1, 2, 3, 4, 5)
    samples: Whole = Field(default=200, ge=1, description="at most so many images in each set")


class DataConfig(Settings):
    """Where data come from and how clients get them; `model_dump()` fits `data.build.build`."""

    name: str = Field(default="digits", description="data source, see `tailorfl list data`")
    path: str | None = Field(default=None, description="where the source lies, for sources of your own")
    options: dict[str, Any] = Field(default={}, description="further options of the source")
    samples: Whole | None = Field(default=None, ge=1, description="use only so many samples")
    partition: str | None = Field(default=None, description="by default natural, else dirichlet")
    partition_options: dict[str, Any] = Field(default={}, description="such as {alpha: 0.1}")
    clients: Whole | None = Field(default=None, ge=1, description="that train; by default all natural, or 20")
    split: SplitShares | Literal["perfed_ckt"] | None = None
    heldout_clients: Whole | Names = Field(
        default=0, description="how many clients never train, or their names"
    )
    heldout_domain: Names | None = Field(default=None, description="domain(s) that never train")
    public: str | None = Field(default=None, description="source of the unlabelled public set")
    public_samples: Whole | None = Field(default=None, ge=1)
    corruptions: CorruptionConfig | None = None
    official_set: bool = Field(
        default=False, description="add the whole official test part as the shifted set 'official'"
    )
    normalise: Literal["none", "client"] = "none"
    seed: Whole | None = Field(default=None, ge=0, description="of the partition; by default the run's seed")

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    @field_validator("heldout_clients")
    @classmethod
    def _not_negative(cls, given: int | tuple[str, ...]) -> int | tuple[str, ...]:
        if isinstance(given, int) and given < 0:
            raise ValueError("should be a number of at least 0, or names of clients")
        return given

    @field_serializer("split")
    def _only_given_shares(self, split: SplitShares | str | None) -> Any:
        return split.model_dump(exclude_none=True) if isinstance(split, SplitShares) else split


class EngineConfig(Settings):
    """What runs the clients; `engine: auto` is short for `{name: auto}`."""

    name: str = "auto"
    chunk: Whole | None = Field(default=None, ge=1, description="clients together; by default what fits")
    states: Literal["memory", "disk"] = Field(
        default="memory", description="where private models are kept; disk maps files of the result folder"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given


class EvalConfig(Settings):
    """When and on what to evaluate."""

    every: Whole = Field(
        default=5, ge=0, description="rounds between evaluations; 0 evaluates only at the end"
    )
    sets: Annotated[tuple[EvaluationSet, ...], BeforeValidator(listed)] = Field(
        default=("val", "local"), description="during the run"
    )
    final: Annotated[tuple[EvaluationSet, ...], BeforeValidator(listed)] = Field(
        default=("local", "global", "heldout", "shifted"),
        description="at the end, as far as the data have them",
    )
    adapt_steps: tuple[Annotated[Whole, Field(ge=0)], ...] = Field(
        default=(0, 10), description="steps of adaptation of held-out clients before they are evaluated"
    )
    max_samples: Whole | None = Field(
        default=None, ge=1, description="at most so many samples of the global and of each shifted test set"
    )

    @field_validator("final")
    @classmethod
    def _what_is_compared(
        cls, final: tuple[EvaluationSet, ...], info: ValidationInfo
    ) -> tuple[EvaluationSet, ...]:
        if "local" not in (*final, *info.data.get("sets", ("local",))):
            raise ValueError("should contain 'local', which methods are compared by")
        return final


class ExperimentConfig(Settings):
    """Methods, compared over seeds on one federation."""

    name: str = Field(
        default="digits", min_length=1, description="also of the result folder; by default the data's"
    )
    description: str = ""
    seeds: tuple[Annotated[Whole, Field(ge=0)], ...] = Field(
        default=(0, 1, 2), min_length=1, description="or how many"
    )
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig(name="mlp", options={"hidden": [64]})
    methods: tuple[MethodConfig, ...] = Field(
        default=(MethodConfig(name="ditto", label="ditto"),), min_length=1
    )
    train: TrainSettings = TrainSettings()
    rounds: Whole = Field(default=30, ge=1)
    fraction: Number = Field(default=1.0, gt=0, le=1, description="share of the clients sampled each round")
    sampling: Literal["uniform", "proportional", "bernoulli"] = "uniform"
    engine: EngineConfig = EngineConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint_every: Whole | None = Field(
        default=None, ge=1, description="rounds; null: as often as is cheap"
    )
    threads: Whole = Field(default=1, ge=1, description="threads of torch")
    variants: dict[str, dict[str, Any]] = Field(
        default={}, description="changes by name, each an experiment of its own, see experiments.variants"
    )
    published: dict[str, Any] = Field(default={}, description="a paper's numbers, see experiments.published")

    @model_validator(mode="before")
    @classmethod
    def _named_after_its_data(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "name" in given:
            return given
        data = given.get("data")
        name = data.get("name") if isinstance(data, dict) else getattr(data, "name", data)
        return {**given, "name": name} if isinstance(name, str) else given

    @model_validator(mode="before")
    @classmethod
    def _one_method(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "method" not in given:
            return given
        if "methods" in given:
            raise ValueError("has both 'method' and 'methods'; give one of them")
        return {**{k: v for k, v in given.items() if k != "method"}, "methods": _as_list(given["method"])}

    @field_validator("seeds", mode="before")
    @classmethod
    def _count_of_seeds(cls, given: Any) -> Any:
        if isinstance(given, int) and not isinstance(given, bool):
            return list(range(given))
        return given

    @field_validator("seeds")
    @classmethod
    def _distinct_seeds(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("has a seed twice, which would count one experiment twice")
        return seeds

    @field_validator("methods", mode="before")
    @classmethod
    def _method_alone(cls, given: Any) -> Any:
        return _as_list(given)

    @field_validator("methods")
    @classmethod
    def _labelled(cls, methods: tuple[MethodConfig, ...]) -> tuple[MethodConfig, ...]:
        pairs = zip(methods, labels(methods), strict=True)
        named = tuple(method.model_copy(update={"label": label}) for method, label in pairs)
        seen: set[str] = set()
        for method in named:
            if method.label in seen:
                raise ValueError(f"has '{method.label}' twice; give one of them another label")
            seen.add(method.label)
        return named

    def to_dict(self) -> dict[str, Any]:
        """Every setting as plain values, as JSON and YAML can hold them."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """Every setting written out as YAML; loading it gives an equal experiment."""
        return str(yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=100))


def labels(methods: Iterable[MethodConfig]) -> list[str]:
    """A label for every method: its own, else its name, with its options where the name comes twice."""
    methods = list(methods)
    names = [method.label or method.name for method in methods]
    return [
        " ".join([name, *_written(method.options)]) if not method.label and names.count(name) > 1 else name
        for method, name in zip(methods, names, strict=True)
    ]


def _written(options: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """`lam=0.5`, `server.kind=adam`, ..."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _written(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={value}"


def _as_list(given: Any) -> Any:
    return [given] if isinstance(given, str | dict | MethodConfig) else given
