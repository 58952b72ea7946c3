"""What client code asks of a fit, checked and made ready to travel."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from tensordict import TensorDict
from torch import Tensor

from tailorfl.errors import ConfigError, TailorflError
from tailorfl.training.cohort import Cohort, TrainConfig
from tailorfl.training.custom_gradient import Directions
from tailorfl.training.fitting import Fit, Inputs
from tailorfl.training.local_sgd import FitOptions
from tailorfl.training.objective import class_prior
from tailorfl.training.operations import apply
from tailorfl.training.packing import Packed
from tailorfl.training.plan import Length
from tailorfl.training.sample_privacy import SampleDP, check_separable
from tailorfl.training.terms import Given, Term
from tailorfl.training.update import OF_RUN, Optimizer

Components = Mapping[str, TensorDict]
"""Models that train together, by name; "" is the name of one alone."""


class FitRequest(NamedTuple):
    """The arguments of `Client.fit` beside the start."""

    train: Collection[str] | None
    prox: tuple[float | Tensor, TensorDict | Components] | None
    direction: Directions | None
    given: tuple[Given, ...]
    terms: tuple[Term, ...]
    length: Length
    optimizer: Optimizer
    purpose: str


class FitResult(NamedTuple):
    """What a fit returns."""

    loss: Tensor
    """Mean training loss, 0-d."""
    gradients: Tensor
    """Of single samples that it computed, 0-d."""
    models: dict[str, TensorDict]
    """Every component, trained."""


def run_fit(
    cohort: Cohort, position: Tensor, number: int, components: Components, asked: FitRequest
) -> FitResult | None:
    """Trains the client at `position`; None where that takes no step.

    `number` is which fit of its client this is. Raises as `Client.fit` does.
    """
    _check(cohort, components, asked)
    states: dict[str, dict[str, Any]] = {name: dict(state.items()) for name, state in components.items()}
    names = {name: _trained(cohort, states, asked, name) for name in states}
    config, optimizer, length = cohort.config, asked.optimizer, asked.length
    batch, epochs, steps = resolved(config, length)
    strength = asked.prox[0] if asked.prox is not None else None
    private = tuple([term for term in asked.terms if term.public is None])
    public = tuple([term for term in asked.terms if term.public is not None])
    taken = epochs if steps is None else steps
    if not any(names.values()) or (not isinstance(taken, Tensor) and taken == 0) or cohort.limit == 0:
        return None
    options = FitOptions(
        trained=tuple(names.values()),
        components=tuple(components),
        rule=config.rule if optimizer is OF_RUN else optimizer.rule(config.rule),
        clip=config.clip,
        clip_each=optimizer.clip_each,
        repeat=length.repeat,
        batches=length.batches,
        prox=None if isinstance(strength, Tensor) else strength,
        direction=asked.direction,
        terms=tuple(replace(term, given=()) for term in private),
        public=tuple(replace(term, given=()) for term in public),
        dp=config.dp,
        number=number,
        purpose=asked.purpose,
        sequence=_sequence(config.dp, number, asked.purpose),
        batch=batch,
        epochs=epochs,
        steps=None if isinstance(steps, Tensor) else steps,
        first=length.first,
    )
    learned = tuple(dict.fromkeys(n for own in names.values() for n in own))
    buffers = cohort.model.trained_buffers(learned) if cohort.model.has_batch_statistics else ()
    if config.dp is not None:
        check_separable(cohort.loss, buffers, private)
    every = (*buffers, *(name for term in private for name in term.keeps))
    moving = {c: () if is_beside(cohort, state) else every for c, state in states.items()}
    changing = {c: {*names[c], *moving[c]} for c in states}
    inputs = Inputs(
        steps=steps if isinstance(steps, Tensor) else None,
        trained={c: {n: state[n] for n in names[c]} for c, state in states.items()},
        moving={c: {n: state[n] for n in moving[c]} for c, state in states.items()},
        fixed={c: {n: t for n, t in state.items() if n not in changing[c]} for c, state in states.items()},
        centre=None if asked.prox is None else _centre(asked.prox[1], components, names),
        strength=strength if isinstance(strength, Tensor) else None,
        rate=optimizer.lr if isinstance(optimizer.lr, Tensor) else None,
        given=asked.given,
        terms=(*[term.given for term in private], *_prior(cohort, position)),
        public=tuple([term.given for term in public]),
    )
    packed = Packed.of(inputs)
    loss, work, *changed = apply(Fit(cohort, options, packed.form), position, *packed.leaves)
    models, rest = {}, iter(changed)
    for name, state in states.items():
        state |= zip((*names[name], *moving[name]), rest, strict=False)
        models[name] = TensorDict(state, batch_size=[])
    return FitResult(loss, work, models)


def _prior(cohort: Cohort, position: Tensor) -> tuple[tuple[Tensor, ...], ...]:
    """What the run's own loss is given of a client: γ log n_c of the balanced softmax, else nothing."""
    if not cohort.config.balanced:
        return ()
    prior = class_prior(cohort.label_counts[position], cohort.config.gamma)
    return ((prior.to(cohort.device),),)


def resolved(config: TrainConfig, length: Length) -> tuple[int, float | None, int | Tensor | None]:
    """Returns (samples a batch, epochs, steps) of a fit of this length, one of the last two None."""
    batch = config.batch_size if length.batch_size is None else length.batch_size
    epochs, steps = length.epochs, length.steps
    if epochs is None and steps is None:
        epochs, steps = config.epochs, config.steps
    return (batch, None, steps) if steps is not None else (batch, epochs, None)


def _sequence(dp: SampleDP | None, number: int, purpose: str) -> str:
    """Which random sequence of batches the fit with that number has.

    With privacy noise every fit of a round draws batches of its own: two gradients of one batch cost more privacy than
    those of two batches. Without noise the fits of a purpose share theirs.
    """
    return f"{purpose}/fit {number}" if dp is not None and dp.noise != 0 and number else purpose


def _check(cohort: Cohort, components: Components, asked: FitRequest) -> None:
    """Raises TailorflError for arguments that do not go together."""
    direction, batches = asked.direction, asked.length.batches
    if batches != 1 and (batches < 1 or direction is None):
        raise TailorflError(
            f"fit() got batches={batches}; it is at least 1, and a step with more than one needs a `direction` that "
            "asks for them with grad(parameters, batch=...)"
        )
    if asked.terms and len(components) > 1:
        raise TailorflError("fit(term=...) trains one model at a time, but got several")
    if cohort.public is None and any(term.public is not None for term in asked.terms):
        raise TailorflError(
            "a term on public samples needs a public set, but the federation has none; name one, such as "
            "data.public=digits, or set `needs_public` of the method so that a run says so at its start"
        )
    if isinstance(direction, Mapping) and set(direction) != set(components):
        raise TailorflError(
            f"fit() got directions for {', '.join(direction) or 'nothing'}, but trains "
            f"{', '.join(components) if any(components) else 'one model'}; give one direction for each model, "
            "or a single one"
        )
    beside = [c for c, state in components.items() if is_beside(cohort, dict(state.items()))]
    if beside and (direction is None or len(beside) == len(components)):
        raise TailorflError(
            f"fit() got {', '.join(map(repr, beside))}, which has no tensor of the model; such numbers train beside a "
            "model, along what a `direction` says of them"
        )
    own = direction.values() if isinstance(direction, Mapping) else [direction]
    for what, function in (("direction", one) for one in own if one is not None):
        _check_closure(what, function)
    for term in asked.terms:
        _check_closure("term", term.function)
    if cohort.class_weights is not None and any(term.replaces for term in asked.terms):
        raise ConfigError(
            f"train.class_weights={cohort.config.class_weights} weighs samples in the run's loss, but this method puts "
            "a loss of its own in its place; leave class_weights out of its line (train: {class_weights: none})"
        )
    kept = [name for term in asked.terms for name in term.keeps]
    strange = [n for n in kept if n in cohort.model.sizes or any(n not in s for s in components.values())]
    if strange:
        raise TailorflError(
            f"a term keeps {', '.join(strange[:5])}, which should be tensors of the start that the model does not have"
        )
    if asked.optimizer.clip_each and direction is None:
        raise TailorflError("Optimizer(clip_each=True) clips what a `direction` asks for, but none was given")


def _check_closure(what: str, function: Any) -> None:
    """Raises TailorflError where a function has tensors from around it: those of one client would serve for all."""
    inside = getattr(function, "__wrapped__", function)
    for name, cell in zip(
        getattr(getattr(inside, "__code__", None), "co_freevars", ()),
        getattr(inside, "__closure__", None) or (),
        strict=False,
    ):
        if isinstance(cell.cell_contents, Tensor | TensorDict):
            raise TailorflError(
                f"the {what} '{inside.__name__}' takes the tensor '{name}' from the code around it, where clients that "
                "train together cannot be told apart; hand it over: fit(..., given=(...)) of a direction, "
                "Term(..., given=(...)) of a term, as a further argument of the function"
            )


def is_beside(cohort: Cohort, state: Mapping[str, Any]) -> bool:
    """Whether a component is no model, but numbers beside one: it has no tensor of the model's names."""
    return bool(state) and cohort.model.sizes.keys().isdisjoint(state)


def _trained(
    cohort: Cohort, states: Mapping[str, Mapping[str, Any]], asked: FitRequest, component: str
) -> tuple[str, ...]:
    """Names of the tensors of a component that are trained: parameters of the model, then what only terms use.

    Of a component beside the model, all of them.
    """
    model, train, state = cohort.model, asked.train, states[component]
    if is_beside(cohort, state):
        return tuple([n for n in state if train is None or n in train])
    wanted = set(cohort.split.trainable if train is None else train)
    names = tuple([n for n in model.parameters if n in wanted])
    if not asked.terms:
        return names
    kept = {n for term in asked.terms for n in term.keeps}
    own = [n for n in state if n not in model.sizes and n not in kept]
    return names + tuple([n for n in own if train is None or n in wanted])


def _centre(
    given: TensorDict | Components, components: Components, names: Mapping[str, tuple[str, ...]]
) -> dict[str, dict[str, Tensor]]:
    """What the proximal pull goes to, by component, of the trained tensors."""
    centre: Mapping[str, Any] = {"": given} if tuple(components) == ("",) else given
    found = {c: dict(centre[c].items()) for c in components}
    absent = [n for c, own in found.items() for n in names[c] if n not in own]
    if absent:
        raise TailorflError(
            f"the centre of prox lacks {', '.join(absent[:5])}, which is trained; give the whole model "
            "as its centre, or name with `train` what the centre has"
        )
    return {c: {n: own[n] for n in names[c]} for c, own in found.items()}
