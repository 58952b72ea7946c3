"""Sentences on methods that reduce to others in a run: "PLGU-LF with D = 5 on a model of 2 layers is LocalTrain"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tailorfl.core.method import Method, make_method
from tailorfl.core.reduction import Reduction, RunSetup
from tailorfl.models.layers import layer_groups
from tailorfl.rounds.participation import sampled_clients
from tailorfl.rounds.simulation import Simulation

MODELS = {"personal": "its personal models", "global": "its global model"}


def setup_of(sim: Simulation, rounds: int) -> RunSetup:
    """Return the facts of a run of `rounds` rounds that determine whether its method reduces to another one."""
    trainable = set(sim.split.trainable)
    groups = layer_groups(sim.model.module)
    clients = len(sim.federation.members)
    # In a system clients may be absent, and a buffer has only some of them.
    everyone = (sim.fraction == 1 or sim.participants == 1) and not sim.is_traced
    # With Bernoulli sampling a round may have any number of clients.
    most = clients if sim.sampling == "bernoulli" else sampled_clients(sim.fraction, sim.participants)
    return RunSetup(
        split=sim.split,
        layers=sum(not trainable.isdisjoint(group) for group in groups),
        train=sim.train,
        clients=clients,
        cohort=min(most, clients),
        everyone=everyone,
        rounds=rounds,
        sampling=sim.sampling,
        validation=bool(sim.federation.sizes("val")[: sim.federation.num_clients].any()),
        architectures=len(sim.groups),
    )


def remarks(sim: Simulation, rounds: int) -> list[str]:
    """Return remarks on a run's method with its settings and model, a sentence each."""
    return [*named(sim, rounds), *unsuited(sim)]


def unsuited(sim: Simulation) -> list[str]:
    """Return a sentence if a method for adapters trains a whole model."""
    if not sim.method.of_adapters or sim.model.held_scalars:
        return []
    return [
        f"{sim.method.title} trains and sends all weights of this model, as FedAvg does, because nothing is frozen; it "
        "is made for LoRA or adapters: set model.lora, or model.trainable"
    ]


def named(sim: Simulation, rounds: int) -> list[str]:
    """Return a sentence for every other method to which a run's method reduces."""
    reductions = sim.method.reductions(setup_of(sim, rounds))
    if sim.method.participation == "all":  # then those of the other method have to train in all rounds, too
        reductions = tuple(
            replace(r, options={**r.options, "participation": "all"})
            if r.other and r.other_model == "personal"
            else r
            for r in reductions
        )
    grouped: dict[tuple[str, str, str], list[Reduction]] = {}
    for reduction in reductions:
        grouped.setdefault((reduction.because, reduction.other, reduction.remark), []).append(reduction)
    return [sentence(sim.method, same) for same in grouped.values()]


def sentence(method: Method, same: Sequence[Reduction]) -> str:
    """Return the sentence about reductions that differ at most in their model."""
    first = same[0]
    start = f"{method.title} {first.because}"
    if first.remark:
        return f"{start} {first.remark}"
    if not first.other:
        verb = "is" if first.model == "global" else "are"
        return f"{start.removesuffix(',')}: {MODELS[first.model]} {verb} never trained"
    if first.other == method.name:
        return f"{start.removesuffix(',')}: its personal models equal its global model"
    equal = make_method(first.other, dict(first.options))
    differing = {
        **{
            n: v for n, v in first.options.items() if getattr(equal, n) != type(equal).model_fields[n].default
        },
        **{n: v for n, v in first.train.items() if v is not None},
    }
    both = len(same) > 1 or not (method.has_personal and method.has_global)
    return f"{start} is {equal.title}{_settings(differing)}{'' if both else f' in {MODELS[first.model]}'}"


def _settings(settings: Mapping[str, Any]) -> str:
    flat: list[str] = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat += [f"{name}.{inner} = {v}" for inner, v in value.items()]
        else:
            flat.append(f"{name} = {value}")
    return f" ({', '.join(flat)})" if flat else ""
