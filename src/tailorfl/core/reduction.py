"""Declarations of a method: when it equals another method, and which uses of private data privacy does not cover.

Both hold under conditions, which are written as keywords: options or properties of the method, or of the run
(`RunSetup`), with the value each must have, or a function that returns whether a value is accepted:

    special_cases = [to_local("with λ = 0", lam=0), to_fedavg("in its only round", rounds=1)]
    exposures = [exposure("the validation losses by which λ is chosen", "sample", dynamic_lam__not=())]

`server__lr` is `lr` of `server`, `lam__not=0` is any value but 0, and `ft_length` is `ft_epochs` and `ft_steps`
together: 0 if a training of that length does nothing.

The test table of reductions proves each special case by running both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tailorfl.errors import ConfigError
from tailorfl.models.split import Split
from tailorfl.settings.experiment import DEFAULT, Sampling
from tailorfl.settings.train import PrivacyLevel
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.plan import Length

Which = Literal["personal", "global"]


@dataclass(frozen=True)
class RunSetup:
    """The facts of a run that decide, with a method's own settings, whether the method equals another one."""

    split: Split
    layers: int
    """Number of layers with trainable parameters; a norm counts with the layer before it."""
    train: TrainConfig
    clients: int
    """Training clients."""
    cohort: int
    """Largest number of clients in a round."""
    everyone: bool
    """True if the server aggregates every client in every round; that all of them train is not enough."""
    rounds: int
    sampling: Sampling = DEFAULT.sampling
    validation: bool = True
    """Whether any client has validation samples."""
    architectures: int = 1

    @property
    def one_step(self) -> bool:
        """Whether local training is a single step."""
        return self.train.steps == 1 or (self.train.epochs == 1 and self.train.batch_size == 0)

    @property
    def counted_in_steps(self) -> bool:
        """Whether the length of local training is given in steps."""
        return self.train.steps is not None

    @property
    def lora(self) -> bool:
        """Whether LoRA factors are trained."""
        return any("lora_B" in name.split(".") for name in self.split.trainable)

    @property
    def all_personal(self) -> bool:
        """Whether clients share no part of the model."""
        return not self.split.shared

    @property
    def all_shared(self) -> bool:
        """Whether no part of the model is personal."""
        return not self.split.personal


@dataclass(frozen=True)
class Reduction:
    """`model` of a method equals `other_model` of `other`; if `other` is "", the initial model or that of `remark`."""

    because: str
    """The settings that make it so, such as "with λ = 0"."""
    model: Which = "global"
    other: str = ""
    """Name of the other method; "": the model is never trained."""
    other_model: Which = "global"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the other method."""
    train: Mapping[str, Any] = field(default_factory=dict)
    """Training settings of the other method that differ from the run's."""
    remark: str = ""
    """A description of the model, if no method of the library has the same."""

    @staticmethod
    def local(because: str, **train: Any) -> Reduction:
        """Return the reduction of personal models to LocalTrain's with these training settings."""
        return Reduction(because, "personal", "local", "personal", train=train)


Made = Mapping[str, Any] | str | Callable[[Any], Mapping[str, Any]]
"""Settings, or the name of a method's property or a function of the method that returns them."""


@dataclass(frozen=True)
class SpecialCase:
    """A reduction that a class declares, with the conditions under which it holds."""

    reduction: Reduction
    when: Mapping[str, Any]
    models: tuple[Which, ...]
    """The models of the method that it is about; (): all that the method has."""
    same: bool
    """Whether each equals the other method's model of the same kind, instead of the one that the reduction names."""
    options: Made
    train: Made

    def where(self, **more: Any) -> SpecialCase:
        """Return the same case under further conditions."""
        return replace(self, when={**self.when, **more})

    def of(self, method: Any, run: RunSetup) -> tuple[Reduction, ...]:
        """Return the reductions of a method in a run; none if a condition does not hold."""
        if not hold(self.when, method, run):
            return ()
        has: tuple[Which, ...] = ("global",) * method.has_global + ("personal",) * method.has_personal
        return tuple(
            replace(
                self.reduction,
                because=self.reduction.because.format(self=method),
                model=model,
                other_model=model if self.same else self.reduction.other_model,
                options=made(self.options, method),
                train=made(self.train, method),
            )
            for model in self.models or has
        )


def becomes(
    because: str,
    other: str,
    options: Made = {},  # noqa: B006  (is only read)
    *,
    models: tuple[Which, ...] = (),
    other_model: Which | Literal["same"] = "global",
    train: Made = {},  # noqa: B006  (is only read)
    **conditions: Any,
) -> SpecialCase:
    """Declare that models of a method, by default all it has, equal those of another method.

    Args:
        because: the settings that make it so, in words; `{self.option}` stands for the value of an option.
        other: name of the other method.
        options: its options.
        models: which models of this method.
        other_model: which model of the other method each equals, or "same" for the one of the same kind.
        train: training settings of the other method that differ from the run's.
        conditions: the conditions.
    """
    same = other_model == "same"
    reduction = Reduction(
        because, other=other, other_model="global" if other_model == "same" else other_model
    )
    return SpecialCase(reduction, conditions, models, same, options, train)


def to_local(because: str, **conditions: Any) -> SpecialCase:
    """Declare that personal models equal LocalTrain's, trained with the method's `personal_training`."""
    return becomes(
        because,
        "local",
        models=("personal",),
        other_model="personal",
        train="personal_training",
        **conditions,
    )


def to_fedavg(
    because: str, other: str = "fedavg", *, keep: Sequence[str] = (), **settings: Any
) -> SpecialCase:
    """Declare that models equal the global model of FedAvg, or of a method like it with the same options `keep`.

    The other method averages as this one does: with its `weights` and, if it has one, its `server` optimizer.
    All other arguments are those of `becomes`.
    """

    def options(method: Any) -> dict[str, Any]:
        server = ("server",) if "server" in type(method).model_fields else ()
        return {n: v for n, v in method.model_dump().items() if n in ("weights", *server, *keep)}

    return becomes(because, other, options, **settings)


def untrained(because: str, model: Which, **conditions: Any) -> SpecialCase:
    """Declare that a model keeps its initial parameters."""
    return becomes(because, "", models=(model,), **conditions)


def comparable(because: str, model: Which, remark: str, **conditions: Any) -> SpecialCase:
    """Declare, in the words of `remark`, what a model is if no method of the library has the same."""
    case = becomes(because, "", models=(model,), **conditions)
    return replace(case, reduction=replace(case.reduction, remark=remark))


def options_but(*left_out: str) -> Callable[[Any], dict[str, Any]]:
    """Return a function that returns all options of a method but those named."""
    return lambda method: method.model_dump(exclude=set(left_out))


@dataclass(frozen=True)
class Exposure:
    """A use of private data that privacy does not cover, and the conditions under which it happens."""

    what: str
    level: PrivacyLevel | None
    """The level of privacy that does not cover it; None: neither does."""
    when: Mapping[str, Any]

    def of(self, method: Any, level: PrivacyLevel) -> str:
        """Return the use that privacy of this level does not cover; "" if there is none."""
        return self.what if self.level in (None, level) and hold(self.when, method) else ""


def exposure(exposed: str, level: PrivacyLevel | None = None, **conditions: Any) -> Exposure:
    """Declare a use of private data that privacy of one level, or of both, does not cover."""
    return Exposure(exposed, level, conditions)


def hold(conditions: Mapping[str, Any], *owners: Any) -> bool:
    """Return whether every condition holds; a name refers to the first of the owners that has such an attribute."""
    for condition, expected in conditions.items():
        name, *inner = condition.split("__")
        if name.endswith("_length"):
            length = owners[0].length(name.removesuffix("_length"))
            value = 0 if nothing(length) else length
        else:
            value = next(getattr(owner, name) for owner in owners if hasattr(owner, name))
        for attribute in inner:
            value = value if attribute == "not" else getattr(value, attribute)
        if (expected(value) if callable(expected) else value == expected) == ("not" in inner):
            return False
    return True


def check_conditions(cls: Any, declared: Iterable[SpecialCase | Exposure]) -> None:
    """Raise ConfigError if a condition names an attribute that neither the class nor a run has."""
    for declaration in declared:
        of_run = () if isinstance(declaration, Exposure) else (*RunSetup.__dataclass_fields__, *dir(RunSetup))
        attributes = {*cls.model_fields, *dir(cls), *of_run}
        for name in declaration.when:
            if name.split("__")[0].replace("_length", "_epochs") not in attributes:
                raise ConfigError(
                    f"{cls.__qualname__} has a condition on '{name}', but neither it nor a run has that attribute"
                )


def made(settings: Made, method: Any) -> Mapping[str, Any]:
    """Return settings as a mapping, evaluating a property or function of the method."""
    value: Any = getattr(method, settings) if isinstance(settings, str) else settings
    plain: Mapping[str, Any] = value(method) if callable(value) else value
    return plain


def several(values: Sequence[Any]) -> bool:
    """Condition: there is more than one value."""
    return len(values) > 1


def nothing(length: Length) -> bool:
    """Return whether a training of that length does nothing."""
    return bool(length.steps == 0) if length.steps is not None else length.epochs == 0


def as_settings(length: Length) -> dict[str, Any]:
    """Return the training settings of a length; {} if it is the run's own."""
    if length.steps is None and length.epochs is None:
        return {}
    return {"epochs": None if length.steps is not None else length.epochs, "steps": length.steps}
