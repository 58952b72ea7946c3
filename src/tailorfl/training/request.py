"""The checked request of a fit by client code, and its result."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from tensordict import TensorDict
from torch import Tensor

from tailorfl.errors import ConfigError, TailorflError
from tailorfl.training.cohort import Cohort
from tailorfl.training.gradients import Directions
from tailorfl.training.objective import Term
from tailorfl.training.operations import NOTHING, Packed
from tailorfl.training.plan import Length
from tailorfl.training.sample_privacy import check_separable
from tailorfl.training.update import OF_RUN, Optimizer

States = Mapping[str, Mapping[str, Any]]
"""Tensors by name of each component, that is, of each model that trains; a single model has the name ""."""


class FitResult(NamedTuple):
    """The result of a fit, of one client or of a cohort, [clients, ...]."""

    loss: Tensor
    """Mean training loss, 0-d."""
    gradients: Tensor
    """Number of single-sample gradients, 0-d."""
    models: dict[str, dict[str, Tensor]]
    """The tensors that training changed, by component and name."""


@dataclass(eq=False)
class FitRequest:
    """One call of `Client.fit`; clients of a cohort differ only in its tensors.

    Raises:
        TailorflError: incompatible arguments.
        ConfigError: the run has class weights in a loss that a term replaces.
        ModelError: sample-level privacy does not support the loss, a term or batch norm.
    """

    cohort: Cohort
    start: States
    train: Collection[str] | None = None
    """Names of the parameters to train; None: all that the split does not freeze."""
    strength: float | Tensor | None = None
    """λ of the proximal pull; None without one."""
    centre: States | None = None
    """Centre of the proximal pull."""
    direction: Directions | None = None
    given: Packed = NOTHING
    """Inputs of the direction."""
    terms: tuple[Term, ...] = ()
    length: Length = Length()  # noqa: RUF009
    optimizer: Optimizer = OF_RUN
    purpose: str = "train"
    number: int = 0
    """Number of the fit within the client's round: fits may share batches and dropout masks, never privacy noise."""

    def __post_init__(self) -> None:
        cohort, config, length, optimizer = self.cohort, self.cohort.config, self.length, self.optimizer
        self.dp = config.dp
        """Sample-level privacy; None without."""
        self.beside = frozenset([name for name, state in self.start.items() if is_beside(cohort, state)])
        """The components that are not models, but further tensors."""
        self.private = tuple([term for term in self.terms if term.public is None])
        """The terms of the loss on private batches."""
        self.public = tuple([term for term in self.terms if term.public is not None])
        """The terms on public samples."""
        self.given_terms = (
            Packed.of(tuple([term.given for term in self.private])) if self.private else NOTHING
        )
        """The inputs of each term on private batches."""
        self.given_public = [Packed.of(term.given) for term in self.public]
        """The inputs of each term on public samples."""
        self.trained = {name: self._trained(name, state) for name, state in self.start.items()}
        """Names of the tensors of each component that gradients update."""
        learned = [n for names in self.trained.values() for n in names]
        self.buffers = cohort.model.trained_buffers(learned) if cohort.model.has_batch_statistics else ()
        """Names of the running statistics that a step updates."""
        kept = tuple([name for term in self.private for name in term.keeps])
        self.moving = self.buffers + cohort.model.further_buffers + kept
        """Names of a model's tensors that a fit changes without gradients: buffers, and what terms keep."""
        self.rule = config.rule if optimizer is OF_RUN else optimizer.rule(config.rule)
        """The rule by which a gradient moves the parameters."""
        self.clip = None if optimizer.clip_each else config.clip
        """Largest norm of a step's descent direction; None: no limit."""
        self.batch, self.epochs, self.steps = config.resolved(length)
        """Samples a batch, and the fit's length; one of epochs and steps is None."""
        taken = self.epochs if self.steps is None else self.steps
        long = isinstance(taken, Tensor) or taken != 0
        self.takes_a_step = long and bool(learned) and cohort.limit != 0
        """Whether anything is trained, for at least one step."""
        self.poisson = config.dp is not None and config.dp.sampling == "poisson"
        """Whether batches are Poisson samples."""
        # With privacy noise every fit of a round draws its own batches: two gradients of one batch cost more privacy
        # than gradients of two batches. Without noise the fits of a purpose share their batches.
        is_private = config.dp is not None and config.dp.noise != 0 and self.number
        self.sequence = f"{self.purpose}/fit {self.number}" if is_private else self.purpose
        """The name of the fit's random sequence of batches."""
        self._check()

    def _trained(self, component: str, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Return names of the model's parameters, then of tensors that only terms use; all if it is not a model."""
        train, model = self.train, self.cohort.model
        if component in self.beside:
            return tuple([n for n in state if train is None or n in train])
        chosen = set(self.cohort.split.trainable if train is None else train)
        names = tuple([n for n in model.parameters if n in chosen])
        if not self.terms:
            return names
        moved = {n for term in self.terms for n in term.keeps}
        of_terms = [n for n in state if n not in model.sizes and n not in moved]
        return names + tuple([n for n in of_terms if train is None or n in chosen])

    def inputs(self) -> dict[str, Any]:
        """Return all inputs in which clients may differ: a tree of tensors.

        Raises:
            TailorflError: the centre of the proximal pull lacks a trained tensor.
        """
        tree: dict[str, Any] = {
            "start": self.start,
            "given": self.given.leaves,
            "terms": self.given_terms.leaves,
            "public": [packed.leaves for packed in self.given_public],
        }
        numbers = {"steps": self.steps, "rate": self.optimizer.lr, "strength": self.strength}
        tree |= {name: number for name, number in numbers.items() if isinstance(number, Tensor)}
        if self.centre is None:
            return tree
        absent = [n for c, names in self.trained.items() for n in names if n not in self.centre[c]]
        if absent:
            raise TailorflError(
                f"the centre of prox lacks {', '.join(absent[:5])}, which is trained; pass the whole model as centre, "
                "or train only the centre's tensors with `train`"
            )
        tree["centre"] = {c: {n: self.centre[c][n] for n in names} for c, names in self.trained.items()}
        return tree

    def _check(self) -> None:
        """Check that the arguments are compatible. Raises as the class does."""
        direction, batches, cohort = self.direction, self.length.batches, self.cohort
        if batches != 1 and (batches < 1 or direction is None):
            raise TailorflError(
                f"fit() got batches={batches}; it must be at least 1, and more than one needs a `direction` that uses "
                "them with grad(parameters, batch=...)"
            )
        if isinstance(direction, Mapping) and set(direction) != set(self.start):
            raise TailorflError(
                f"fit() got directions for {', '.join(direction) or 'nothing'}, but trains "
                f"{', '.join(self.start) if any(self.start) else 'one model'}; give one direction for each model, "
                "or a single one"
            )
        if self.beside and (direction is None or len(self.beside) == len(self.start)):
            raise TailorflError(
                f"fit() got {', '.join(map(repr, sorted(self.beside)))}, which has no tensor of the model; such "
                "numbers need a model in the same fit and a `direction` with their gradients"
            )
        for function in direction.values() if isinstance(direction, Mapping) else [direction]:
            if function is not None:
                _check_closure("direction", function)
        if self.optimizer.clip_each and direction is None:
            raise TailorflError(
                "Optimizer(clip_each=True) clips the gradients of a `direction`, but fit() got none"
            )
        if self.terms:
            self._check_terms()
        if self.dp is not None and self.takes_a_step:
            check_separable(cohort.loss, self.buffers, self.private)

    def _check_terms(self) -> None:
        """Check that the terms are compatible with the other arguments. Raises as the class does."""
        cohort = self.cohort
        if len(self.start) > 1:
            raise TailorflError("fit(term=...) trains one model at a time, but got several")
        if cohort.public is None and self.public:
            raise TailorflError(
                "a term on public samples needs a public set, but the federation has none; set data.public, such as "
                "data.public=digits, and needs_public = True in the method, so that a run without it is refused at its "
                "start"
            )
        for term in self.terms:
            _check_closure("term", term.function)
        if cohort.class_weights is not None and any(term.replaces for term in self.terms):
            raise ConfigError(
                f"train.class_weights={cohort.config.class_weights} weighs samples in the run's loss, but this method "
                "replaces that loss; turn class_weights off for this method (train: {class_weights: none})"
            )
        moved = [name for term in self.terms for name in term.keeps]
        strange = [
            n for n in moved if n in cohort.model.sizes or any(n not in s for s in self.start.values())
        ]
        if strange:
            raise TailorflError(
                f"a term keeps {', '.join(strange[:5])}, which should be tensors of the start that the model does not "
                "have"
            )


def by_component(states: TensorDict | Mapping[str, TensorDict]) -> States:
    """Return the tensors of one model, or of several models by name."""
    several = cast(Mapping[str, TensorDict], {"": states} if isinstance(states, TensorDict) else states)
    return {name: dict(state.items()) for name, state in several.items()}


def is_beside(cohort: Cohort, state: Mapping[str, Any]) -> bool:
    """Return whether a component is not a model: none of its tensors has a name of the model's."""
    return bool(state) and cohort.model.sizes.keys().isdisjoint(state)


def _check_closure(kind: str, function: Any) -> None:
    """Raise TailorflError if a function's closure holds tensors: those of one client would be used for all."""
    inside = getattr(function, "__wrapped__", function)
    for name, cell in zip(
        getattr(getattr(inside, "__code__", None), "co_freevars", ()),
        getattr(inside, "__closure__", None) or (),
        strict=False,
    ):
        if isinstance(cell.cell_contents, Tensor | TensorDict):
            raise TailorflError(
                f"the {kind} '{inside.__name__}' uses the tensor '{name}' from the code around it, which would be the "
                "same for all clients that train together; pass it as a further argument of the function: fit(..., "
                "given=(...)) for a direction, Term(..., given=(...)) for a term"
            )
