"""A round's clients, what they get and what it takes, and what is kept between rounds, in memory and on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.nn import functional as F

from methods.settings import NAMES, one_of
from methods.small import SIZES, after, assert_same, everything, federation, personal, simulation
from tailorfl.core.client import Client
from tailorfl.core.messages import PerClient, Replies
from tailorfl.engines.choice import Auto, make_engine
from tailorfl.errors import ConfigError
from tailorfl.methods.bases import OwnModel
from tailorfl.rounds.participation import sample_clients
from tailorfl.rounds.planning import work_of
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import tree
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.plan import batch_sizes, batches_of, make_plan
from tailorfl.training.sample_privacy import SampleDP

# -- who takes part: a function of seed and round, with the stated probabilities -------------------------------------

ROUNDS = 4000
N = len(SIZES)


def inclusion(**settings: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(share of rounds in which each client is sampled, its standard error)."""
    sim = simulation("fedavg", **settings)
    found = np.zeros(N)
    for r in range(ROUNDS):
        found[list(sim.sample(r))] += 1 / ROUNDS
    return found, np.sqrt(np.maximum(found * (1 - found), 1e-4) / ROUNDS)


@pytest.mark.parametrize(("fraction", "size"), [(1.0, 5), (0.5, 3), (0.4, 2), (0.1, 1), (0.01, 1), (0.7, 4)])
def test_uniform_samples_have_a_fixed_size_without_repetition(fraction: float, size: int) -> None:
    """m = max(1, round(fraction·N)), halves upwards; in rising order."""
    sim = simulation("fedavg", fraction=fraction)
    for r in range(50):
        ids = sim.sample(r)
        assert len(ids) == len(set(ids)) == size
        assert list(ids) == sorted(ids)


def test_uniform_sampling_is_uniform_over_clients_and_pairs() -> None:
    found, error = inclusion(fraction=0.4)
    assert (np.abs(found - 0.4) < 4.5 * error).all()
    sim, other = (simulation("fedavg", fraction=0.4, seed=seed) for seed in (0, 1))
    assert [sim.sample(r) for r in range(20)] != [other.sample(r) for r in range(20)]
    pairs: dict[tuple[int, ...], int] = {}
    for r in range(ROUNDS):
        pairs[sim.sample(r)] = pairs.get(sim.sample(r), 0) + 1
    share = np.array(list(pairs.values())) / ROUNDS
    assert len(pairs) == 10
    assert (np.abs(share - 0.1) < 4.5 * np.sqrt(0.09 / ROUNDS)).all()


def test_proportional_sampling_draws_by_size_without_replacement() -> None:
    """P(i in S) = p_i + Σ_{j≠i} p_j p_i / (1 − p_j) for two draws one after the other."""
    p = np.array(SIZES) / sum(SIZES)
    second = np.array([sum(p[j] * p[i] / (1 - p[j]) for j in range(N) if j != i) for i in range(N)])
    found, error = inclusion(fraction=0.4, sampling="proportional")
    assert (np.abs(found - (p + second)) < 4.5 * error).all()
    assert found[0] > 0.7 > found[1] * 5


def test_bernoulli_sampling_tosses_for_each_client_and_repeats_if_none() -> None:
    """P(i in S) = q / (1 − (1−q)^N), and sizes vary."""
    q = 0.2
    found, error = inclusion(fraction=q, sampling="bernoulli")
    assert (np.abs(found - q / (1 - (1 - q) ** N)) < 4.5 * error).all()
    sim = simulation("fedavg", fraction=q, sampling="bernoulli")
    assert {len(sim.sample(r)) for r in range(300)} >= {1, 2, 3}


@pytest.mark.parametrize(("fraction", "size"), [(1.0, 2), (0.7, 2), (0.3, 1)])
def test_proportional_sampling_passes_over_a_client_without_samples(fraction: float, size: int) -> None:
    drawn = [sample_clients(0, r, np.array([3, 0, 5]), fraction, "proportional") for r in range(20)]
    assert all(len(ids) == size and 1 not in ids for ids in drawn)


@pytest.mark.parametrize("sampling", ["uniform", "proportional", "bernoulli"])
@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5, float("nan")])
def test_fractions_outside_0_1_are_refused(sampling: str, fraction: float) -> None:
    """Bernoulli sampling of nobody would otherwise repeat for ever."""
    with pytest.raises(ConfigError, match="fraction"):
        simulation("fedavg", fraction=fraction, sampling=sampling)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: simulation("fedavg", sampling="Bernoulli"), "unknown sampling 'Bernoulli'"),
        (lambda: simulation("fedavg", weights="Uniform"), "unknown weights 'Uniform'"),
        (lambda: TrainConfig(objective="balanced"), "unknown objective 'balanced'"),  # type: ignore[arg-type]
        (lambda: TrainConfig(class_weights="balanced"), "unknown class_weights"),  # type: ignore[arg-type]
        (lambda: TrainConfig(epochs=None), "needs either epochs or steps"),
        (lambda: TrainConfig(epochs=0), "epochs"),
        (lambda: TrainConfig(steps=-1), "steps"),
        (lambda: TrainConfig(batch_size=-1), "batch_size"),
        (lambda: TrainConfig(lr=-0.1), "lr"),
        (lambda: TrainConfig(lr=float("nan")), "lr"),
        (lambda: TrainConfig(momentum=1.0), "momentum"),
        (lambda: TrainConfig(weight_decay=float("inf")), "weight_decay"),
        (lambda: TrainConfig(clip=0.0), "clip"),
        (lambda: make_engine(chunk=0), "chunk"),
        (lambda: make_engine(workers=-1), "workers"),
        (lambda: SampleDP(1.0, 1.0, "Poisson"), "Did you mean 'poisson'"),  # type: ignore[arg-type]
        (lambda: simulation("fedavg").step(sampled=(0, N)), f"no client {N} to train"),
        (lambda: simulation("fedavg").step(training=(-1,)), "no client -1 to train"),
    ],
)
def test_a_wrong_argument_is_named_instead_of_ignored(wrong: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        wrong()


def test_a_fraction_of_nearly_nothing_ends_with_one_client_drawn_at_random(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tailorfl.rounds.participation.REDRAWS", 100)
    sizes = np.full(5, 3)
    drawn = [sample_clients(0, r, sizes, 1e-12, "bernoulli") for r in range(40)]
    assert all(len(ids) == 1 for ids in drawn)
    assert {ids[0] for ids in drawn} == set(range(5))


# -- messages and work -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_each_client_gets_its_own_payload(engine: str) -> None:
    sim, ids = simulation("local", engine=engine), (3, 0, 4)
    payloads = TensorDict({"w": torch.arange(6.0).reshape(3, 2), "n": torch.tensor(ids)}, batch_size=[3])
    (seen,) = sim.run(ids, sim.states.get(ids), PerClient(payloads), lambda c, s, r: (r,))
    assert all(torch.equal(tensor, payloads[name]) for name, tensor in seen.items())


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("part", ["train", "val"])
def test_losses_are_means_over_the_part_in_evaluation_mode(engine: str, part: str) -> None:
    sim, ids = simulation("local", "batch_norm", engine, rounds=1), (0, 1, 3)
    data, states = federation(), sim.states.get(ids)

    def measure(client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, ...]:
        return (TensorDict({"loss": client.loss(state, part)}, batch_size=[]),)

    (measured,) = sim.run(ids, states, tree.empty(), measure)
    module = sim.model.module.eval()
    for k, i in enumerate(ids):
        rows = torch.from_numpy((data.train if part == "train" else data.val)[i])
        state = {n: t[k] for n, t in states.items()}
        outputs = torch.func.functional_call(module, state, (data.source.x[rows],))
        expected = F.cross_entropy(outputs, data.source.y[rows])
        torch.testing.assert_close(measured["loss"][k], expected, atol=1e-6, rtol=1e-5)


def test_each_client_has_the_gradients_of_its_own_samples() -> None:
    sim = simulation("fedavg")
    work, _ = work_of(sim, sim.method.broadcast(sim.server, (0, 2, 4)), (0, 2, 4), 0)
    assert {i: client.gradients for i, client in work.items()} == {0: 15, 2: 7, 4: 3}


@pytest.mark.parametrize("min_batch", [1, 2])
@pytest.mark.parametrize(
    ("batch", "epochs", "steps"), [(4, 2, None), (4, None, 7), (0, 3, None), (5, 0.5, None)]
)
@pytest.mark.parametrize("first", [0, 3])
def test_sizes_of_batches_are_those_of_the_plan(
    batch: int, epochs: float | None, steps: int | None, first: int, min_batch: int
) -> None:
    sizes = np.array([15, 1, 8, 0, 9, 5])
    members, keys = [np.arange(n) for n in sizes], np.arange(6, dtype=np.uint64)
    plan = make_plan(members, keys, batch, epochs=epochs, steps=steps, first=first, min_batch=min_batch)
    batches = batches_of(sizes, batch, epochs, steps, min_batch)
    assert np.array_equal(batch_sizes(sizes, batch, batches, first, min_batch), plan.count)


# -- what is kept ----------------------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {"fraction": 0.4, "seed": 2}
IN_TURN = [(name, ("sequential", "vectorized")[k % 2]) for k, name in enumerate(NAMES)]
"""One engine a method: neither knows what is kept between rounds, and where it lies."""


def assert_equal_runs(a: Simulation, b: Simulation) -> None:
    assert_same(everything(a), everything(b))
    assert_same(personal(a), personal(b))
    assert (a.round, a.traffic, a.states.clients) == (b.round, b.traffic, b.states.clients)
    assert (a.gradients, a.turns) == (b.gradients, b.turns)


def test_a_resumed_run_keeps_the_engine_that_was_chosen() -> None:
    for choice in ("sequential", "vectorized"):
        first = simulation("ditto", engine=Auto(choice=choice), rounds=1)
        second = simulation("ditto", engine=Auto())
        second.load(*first.dump())
        assert second.engine.name == choice


class Grown(OwnModel):
    """Its server has no state before the first reply."""

    name = "grown"
    title = "Grown"
    paper = "none"
    has_global = False

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        return server

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        pull = (1.0, received["mean"]) if "mean" in received.keys() else None  # noqa: SIM118
        new = client.fit(state, prox=pull)
        return new, TensorDict({"mean": client.parameters(new)})

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        return replies.mean()


def test_a_resumed_run_keeps_what_the_servers_state_did_not_begin_with() -> None:
    first, second = simulation(Grown(), rounds=2), simulation(Grown())
    second.load(*first.dump())
    assert_equal_runs(after(first, 1), after(second, 1))
    second.load(*simulation(Grown()).dump())
    assert_equal_runs(simulation(Grown(), rounds=1), after(second, 1))


@pytest.mark.parametrize("name", ["fedamp", "fedpac", "pfedgraph"])
def test_a_round_whose_only_client_was_left_out_changes_nothing(name: str) -> None:
    data = federation().without(["client 1"])
    sim = simulation(name, data=data, sampling="cyclic_fixed", rounds=1)
    before = {path: t.clone() for path, t in everything(sim).items()}
    assert sim.step().clients == ()
    assert_same(before, everything(sim))
    assert sim.step().clients == (2,)


@pytest.mark.parametrize("name", one_of(6, NAMES, 2))
def test_states_on_disk_are_states_in_memory(name: str, tmp_path: Path) -> None:
    engine = dict(IN_TURN)[name]
    memory = simulation(name, "batch_norm", engine, rounds=2, **SETTINGS)
    disk = simulation(name, "batch_norm", engine, rounds=2, state_folder=tmp_path / "states", **SETTINGS)
    assert_equal_runs(memory, disk)
    if memory.states.dump()["clients"].numel():
        assert str(tmp_path / "states") in Path("/proc/self/maps").read_text()
    resumed = simulation(name, "batch_norm", engine, state_folder=tmp_path / "others", **SETTINGS)
    resumed.load(*disk.dump())
    assert_equal_runs(after(memory, 1), after(resumed, 1))


def test_a_resumed_run_may_use_the_same_folder(tmp_path: Path) -> None:
    """As after a crash: the files are there, and perhaps a round ahead of the checkpoint."""
    whole = simulation("ditto", rounds=4, **SETTINGS)
    crashed = simulation("ditto", rounds=2, state_folder=tmp_path, **SETTINGS)
    tensors, facts = crashed.dump()
    saved = {p: t.clone() for p, t in tensors.items()}
    crashed.step()
    del crashed
    resumed = simulation("ditto", state_folder=tmp_path, **SETTINGS)
    resumed.load(saved, facts)
    assert_equal_runs(whole, after(resumed, 2))
