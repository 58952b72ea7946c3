"""Options that only some methods have: they do what they say, and nothing where they are off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from methods import plain, small
from methods.settings import row
from methods.small import TRAIN
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


def test_one_candidate_is_ditto_with_that_strength() -> None:
    fixed, chosen = (
        personal(rounds(simulation("ditto", {"lam": 0.5}))),
        personal(rounds(simulation("ditto", {"lam": 7.0, "dynamic_lam": (0.5,)}))),
    )
    assert all(torch.equal(fixed[n], chosen[n]) for n in fixed)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_every_client_keeps_its_best_candidate(engine: str) -> None:
    lams = (0.0, 1.0, 20.0)
    alone = {lam: personal(rounds(simulation("ditto", {"lam": lam}, engine), 1)) for lam in lams}
    sim = rounds(simulation("ditto", {"dynamic_lam": lams}, engine), 1)
    found, data = personal(sim), sim.federation
    picked = []
    for client in range(6):
        rows = torch.from_numpy(data.val[client])
        losses = []
        for lam in lams:
            state = {n: t[client] for n, t in alone[lam].items()}
            outputs = sim.model(state, data.source.take(rows))
            losses.append(float(torch.nn.functional.cross_entropy(outputs, data.source.y[rows])))
        best = lams[int(np.argmin(losses))]
        picked.append(best)
        assert all(torch.allclose(found[n][client], alone[best][n][client], atol=1e-6) for n in found)
    assert len(set(picked)) > 1, "the test says nothing if every client prefers the same strength"


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_lambda_is_chosen_at_every_step_by_validation_loss(engine: str) -> None:
    """In plain torch: a step with each λ from where the best of the step before led; clients of 15 to 1 samples."""
    lams, train = (0.0, 2.0, 9.0), replace(TRAIN, epochs=2, momentum=0.0, weight_decay=0.0, lr=0.1)
    method = make_method("ditto", {"dynamic_lam": lams, "dynamic_every": "step"})
    sim = small.simulation(method, engine=engine, train=train, rounds=1)
    data, clients = sim.federation, range(sim.federation.num_clients)

    def validation_loss(client: int, state: plain.State) -> float:
        rows = torch.from_numpy(data.val[client])
        outputs = torch.func.functional_call(sim.model.module.eval(), dict(state), (data.source.take(rows),))
        return float(torch.nn.functional.cross_entropy(outputs, data.source.y[rows]))

    w, picked = dict(sim.global_model().items()), []  # type: ignore[union-attr]
    before = {n: t.clone() for n, t in small.personal(sim).items()}
    expected = []
    for i in clients:
        v: plain.State = {n: t[i] for n, t in before.items()}
        for rows in plain.batches(sim, i, 2):
            moved = [plain.train(sim, v, [rows], prox=(lam, w)) for lam in lams]
            losses = [validation_loss(i, state) for state in moved]
            picked.append(int(np.argmin(losses)))
            v = moved[picked[-1]]
        expected.append(v)
    sim.step()
    small.assert_close(small.personal(sim), {n: torch.stack([v[n] for v in expected]) for n in before})
    assert len(set(picked)) > 1, "the test says nothing if one strength is always best"


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_one_candidate_at_every_step_is_ditto_with_that_strength(engine: str) -> None:
    train = replace(TRAIN, epochs=2, momentum=0.0, weight_decay=0.0)
    fixed, chosen = (
        small.simulation(make_method("ditto", options), engine=engine, train=train, rounds=2)
        for options in ({"lam": 0.5}, {"dynamic_lam": (0.5,), "dynamic_every": "step"})
    )
    small.assert_close(small.personal(fixed), small.personal(chosen))
    small.assert_same(small.shared(fixed), small.shared(chosen))
    with pytest.raises(ConfigError, match="dynamic_lam, which is empty"):
        make_method("ditto", {"dynamic_every": "step"})


@pytest.mark.parametrize("method", ["fedper", "fedrep", "lg_fedavg", "fedalt", "fedsim"])
def test_final_epochs_tune_only_the_personal_part_and_store_nothing(method: str) -> None:
    plain, tuned = rounds(simulation(method)), rounds(simulation(method, {"final_personal_epochs": 5}))
    before = tuned.states.dump()
    a, b = personal(plain), personal(tuned)
    kept = set(tuned.split.personal)
    assert all(torch.equal(a[n], b[n]) == (n not in kept) for n in a)
    after = tuned.states.dump()
    assert all(torch.equal(before[n], after[n]) for n in before)


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


def test_no_steps_of_tuning_are_no_tuning() -> None:
    sim = small.simulation(make_method("fedavg_ft", {"ft_steps": 0}), "mlp", rounds=1)
    w = small.shared(sim)
    assert all(torch.equal(t, w[n].expand_as(t)) for n, t in small.personal(sim).items())


def test_broadcast_all_reaches_every_client_and_changes_nothing_else() -> None:
    few = rounds(simulation("lg_fedavg", fraction=0.5))
    every = rounds(simulation("lg_fedavg", {"broadcast_all": True}, fraction=0.5))
    assert every.traffic.down_unicast == 2 * few.traffic.down_unicast
    assert every.traffic.up == few.traffic.up
    a, b = personal(few), personal(every)
    assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("name", sorted(methods()))
def test_all_options_written_out_make_an_equal_method(name: str) -> None:
    """As result folders hold them; also where a length is given in steps."""
    fields = methods()[name].model_fields
    lengths = {n: 3 for n in fields if n.endswith("_steps") and n.replace("_steps", "_epochs") in fields}
    for options in ({}, lengths):
        made = make_method(name, options)
        again = make_method(name, made.all_options())
        assert again.all_options() == made.all_options()
