"""What a method declares of itself: when it is another method, and what of private data privacy does not cover.

Both hold under conditions, which are written as keywords: options or properties of the method, or of the run
(`RunSetup`), with the value each must have, or a function that says whether a value will do:

    special_cases = [to_local("with λ = 0", lam=0), to_fedavg("in its only round", rounds=1)]
    exposures = [exposure("the validation losses by which λ is chosen", "sample", dynamic_lam__not=())]

`server__lr` is `lr` of `server`, `lam__not=0` is any other value, and `ft_length` is `ft_epochs` and `ft_steps`
together: 0 where a training of that length does nothing.

The test table of reductions runs both sides of each special case, so that what is said is proved.
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
    """What of a run, beside a method's own settings, decides whether the method is another one in it."""

    split: Split
    layers: int
    """Layers with trainable parameters, a norm counted with the one before it."""
    train: TrainConfig
    clients: int
    """Training clients."""
    cohort: int
    """Most clients that a round may have."""
    everyone: bool
    """Whether every client takes part in every round."""
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
        """Whether factors of LoRA are trained."""
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
    """`model` of a method equals `other_model` of `other`, or if that is "" the initial one, or what `remark` says."""

    because: str
    """The settings that make it so, such as "with λ = 0"."""
    model: Which = "global"
    other: str = ""
    """Name of the other method; "": the model is never trained."""
    other_model: Which = "global"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the other method."""
    train: Mapping[str, Any] = field(default_factory=dict)
    """Training settings of the other method, where they differ from the run's."""
    remark: str = ""
    """What the method is then, where no method of the library is the same."""

    @staticmethod
    def local(because: str, **train: Any) -> Reduction:
        """Return that personal models are LocalTrain's, trained so."""
        return Reduction(because, "personal", "local", "personal", train=train)


Made = Mapping[str, Any] | str | Callable[[Any], Mapping[str, Any]]
"""Settings, or the property or function of a method that makes them."""


@dataclass(frozen=True)
class SpecialCase:
    """A reduction that a class declares, with the conditions under which it holds."""

    reduction: Reduction
    when: Mapping[str, Any]
    models: tuple[Which, ...]
    """Which models of the method it is about; (): all that the method has."""
    same: bool
    """Whether each equals the other method's model of its kind, in place of the one that the reduction names."""
    options: Made
    train: Made

    def where(self, **more: Any) -> SpecialCase:
        """Return the same under further conditions."""
        return replace(self, when={**self.when, **more})

    def of(self, method: Any, run: RunSetup) -> tuple[Reduction, ...]:
        """Return the reductions of a method in a run, none where a condition does not hold."""
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
    """Declare that models of a method, all that it has if none are named, are those of another one.

    Args:
        because: what the user has set that makes it so; `{self.option}` stands for the value of an option.
        other: name of the other method.
        options: its options.
        models: which models of this method.
        other_model: which model of the other one each equals, or "same" for that of its kind.
        train: training settings of the other one, where they differ from the run's.
        conditions: the conditions.
    """
    same = other_model == "same"
    reduction = Reduction(
        because, other=other, other_model="global" if other_model == "same" else other_model
    )
    return SpecialCase(reduction, conditions, models, same, options, train)


def to_local(because: str, **conditions: Any) -> SpecialCase:
    """Declare that personal models are LocalTrain's, trained as the method's `personal_training` says."""
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
    """Declare that models are the global one of FedAvg, or of one of its kind with the same options `keep`.

    The other one averages as this method does: with its `weights`, and its `server` optimizer where it has one.
    What else is given is as for `becomes`.
    """

    def options(method: Any) -> dict[str, Any]:
        server = ("server",) if "server" in type(method).model_fields else ()
        return {n: v for n, v in method.model_dump().items() if n in ("weights", *server, *keep)}

    return becomes(because, other, options, **settings)


def untrained(because: str, model: Which, **conditions: Any) -> SpecialCase:
    """Declare that the parameters of a model stay as they were drawn."""
    return becomes(because, "", models=(model,), **conditions)


def comparable(because: str, model: Which, remark: str, **conditions: Any) -> SpecialCase:
    """Declare what a model is, where no method of the library is the same."""
    case = becomes(because, "", models=(model,), **conditions)
    return replace(case, reduction=replace(case.reduction, remark=remark))


def options_but(*left_out: str) -> Callable[[Any], dict[str, Any]]:
    """Return a function that returns all options of a method but some."""
    return lambda method: method.model_dump(exclude=set(left_out))


@dataclass(frozen=True)
class Exposure:
    """What a method makes of private data that privacy does not cover, and under which conditions."""

    what: str
    level: PrivacyLevel | None
    """Of which privacy; None: of both."""
    when: Mapping[str, Any]

    def of(self, method: Any, level: PrivacyLevel) -> str:
        """Return what privacy of this level does not cover, "" if nothing."""
        return self.what if self.level in (None, level) and hold(self.when, method) else ""


def exposure(exposed: str, level: PrivacyLevel | None = None, **conditions: Any) -> Exposure:
    """Declare what of private data privacy of a level, or of both, does not cover."""
    return Exposure(exposed, level, conditions)


def hold(conditions: Mapping[str, Any], *owners: Any) -> bool:
    """Return whether every condition holds; a name is that of an attribute of the first thing that has it."""
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
    """Check that a class has what its conditions name. Raises ConfigError for one that neither it nor a run has."""
    for declaration in declared:
        of_run = () if isinstance(declaration, Exposure) else (*RunSetup.__dataclass_fields__, *dir(RunSetup))
        attributes = {*cls.model_fields, *dir(cls), *of_run}
        for name in declaration.when:
            if name.split("__")[0].replace("_length", "_epochs") not in attributes:
                raise ConfigError(
                    f"{cls.__qualname__} declares a condition on '{name}', which it does not have"
                )


def made(settings: Made, method: Any) -> Mapping[str, Any]:
    """Return the settings that a property or function of the method makes."""
    value: Any = getattr(method, settings) if isinstance(settings, str) else settings
    plain: Mapping[str, Any] = value(method) if callable(value) else value
    return plain


def several(values: Sequence[Any]) -> bool:
    """Condition: more than one."""
    return len(values) > 1


def nothing(length: Length) -> bool:
    """Return whether a training of that length does nothing."""
    return bool(length.steps == 0) if length.steps is not None else length.epochs == 0


def as_settings(length: Length) -> dict[str, Any]:
    """Return the training settings of a length; {} where it is the run's own."""
    if length.steps is None and length.epochs is None:
        return {}
    return {"epochs": None if length.steps is not None else length.epochs, "steps": length.steps}
