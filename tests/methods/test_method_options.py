"""Options that only some methods have: they do what they say, and nothing where they are off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from methods import small
from methods.settings import row
from tailorfl.core.method import make_method, methods
from tailorfl.data.federation import Federation
from tailorfl.data.registry import load_source
from tailorfl.engines.make import make_engine
from tailorfl.errors import ConfigError
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig


def federation(seed: int = 0) -> Federation:
    source = load_source("synthetic_digits", clients=6, samples=12, test_samples=4, seed=seed)
    owner = source.groups["client"].numpy()
    test = source.test.numpy() if source.test is not None else np.zeros(len(owner), dtype=bool)
    own = [np.flatnonzero((owner == i) & ~test) for i in range(6)]
    return Federation(
        source, tuple(r[:8] for r in own), tuple(r[8:] for r in own),
        tuple(np.flatnonzero((owner == i) & test) for i in range(6)), tuple("abcdef"), 6,
    )  # fmt: skip


def simulation(
    name: str, options: dict[str, Any] | None = None, engine: str = "sequential", **more: Any
) -> Simulation:
    data = federation()
    model = Model(lambda: build("mlp", data.source.input_shape, data.source.outputs, hidden=(8,)))
    config = TrainConfig(epochs=2, batch_size=4, lr=0.1)
    return Simulation(make_method(name, options), data, model, config, engine=make_engine(engine), **more)


def rounds(sim: Simulation, count: int = 3) -> Simulation:
    for _ in range(count):
        sim.step()
    return sim


def personal(sim: Simulation) -> dict[str, torch.Tensor]:
    [(_, models)] = sim.personal_models(range(6))
    return dict(models.items())


LENGTHS = [
    (name, field.removesuffix("_epochs"))
    for name, cls in methods().items()
    for field in cls.model_fields
    if field.endswith("_epochs")
    and (name, field) not in {("plgu_grep", "body_epochs"), ("feddpa", "ft_epochs")}
]
"""Every length that a method counts in epochs; PLGU-GRep's body takes single batches, FedDPA's LoRA has its tests."""


@pytest.mark.parametrize(("name", "what"), LENGTHS)
def test_lengths_may_be_given_in_steps(name: str, what: str) -> None:
    """Clients of 8 samples in batches of 4: two epochs are four steps, and three steps are something else."""
    data, found, model = small.federation((8, 8, 8)), [], "batch_norm" if name == "fedbn" else "mlp"
    others = {key: value for key, value in row(name).options.items() if key != f"{what}_epochs"}
    for length in ({f"{what}_epochs": 2}, {f"{what}_steps": 4}, {f"{what}_steps": 3}):
        sim = small.simulation(make_method(name, {**others, **length}), model, data=data, rounds=2)
        found.append({**small.everything(sim), **small.personal(sim)})
    small.assert_same(found[0], found[1])
    assert any(not torch.equal(t, found[2][n]) for n, t in found[0].items())


def test_a_length_is_given_once() -> None:
    with pytest.raises(ConfigError, match="has both ft_epochs and ft_steps; give one of them"):
        make_method("fedavg_ft", {"ft_epochs": 2, "ft_steps": 3})


def test_broadcast_all_reaches_every_client_and_changes_nothing_else() -> None:
    few = rounds(simulation("lg_fedavg", fraction=0.5))
    every = rounds(simulation("lg_fedavg", {"broadcast_all": True}, fraction=0.5))
    assert every.traffic.down_unicast == 2 * few.traffic.down_unicast
    assert every.traffic.up == few.traffic.up
    a, b = personal(few), personal(every)
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_all_options_written_out_make_an_equal_method() -> None:
    """As result folders hold them; also where a length is given in steps."""
    for name, method in methods().items():
        fields = method.model_fields
        lengths = {n: 3 for n in fields if n.endswith("_steps") and n.replace("_steps", "_epochs") in fields}
        for options in ({}, lengths):
            made = make_method(name, options)
            again = make_method(name, made.all_options())
            assert again.all_options() == made.all_options(), name
