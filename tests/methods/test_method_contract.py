"""What every registered method must keep.

Its card, untouched idle clients, repeatability, pure evaluation, odd clients.
"""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from methods.settings import NAMES, ROWS, in_turn, make, none, one_of, row
from methods.small import (
    BOTH,
    FACTORIES,
    NEWCOMER,
    SIZES,
    TRAIN,
    assert_close,
    assert_same,
    everything,
    federation,
    fits,
    model,
    parts,
    personal,
    simulation,
)
from tailorfl.core.messages import PerClient
from tailorfl.core.method import methods
from tailorfl.training import tree

NORMED = "batch_norm"


def test_every_registered_method_has_a_row_and_every_row_a_method() -> None:
    missing = sorted(set(methods()) - set(ROWS))
    assert not missing, f"add a row to ROWS of tests/methods/settings.py for: {', '.join(missing)}"
    assert not sorted(set(ROWS) - set(methods())), "rows of methods that do not exist"


@pytest.mark.parametrize("name", NAMES)
def test_evaluated_models_are_those_of_the_card(name: str) -> None:
    card, method = row(name).card, make(name)
    assert (method.has_personal, method.has_global) == (card.personal, card.shared)
    sim = simulation(name)
    assert (sim.global_model() is not None) == card.shared


@pytest.mark.parametrize("name", one_of(2, NAMES))
def test_the_runs_weights_are_those_of_every_method_that_has_none_of_its_own(name: str) -> None:
    """None brings its own, so that a comparison asks one question; a method's line may say others."""
    settings: dict[str, Any] = {
        "rounds": 4 if name == "l2gd" else 2,
        "fraction": 0.6,
    }  # its coins: 0, 0, 0, 1
    assert make(name).weights is None
    assert_same(
        everything(simulation(name, **settings)), everything(simulation(name, weights="samples", **settings))
    )
    uniform = everything(simulation(name, weights="uniform", **settings))
    assert_same(uniform, everything(simulation(make(name, weights="uniform"), **settings)))
    own = simulation(make(name, weights="samples"), weights="uniform", **settings)
    assert own.weights == "samples"
    # Nothing is averaged in private training, on pooled data, by a head that trains on every class mean that was sent,
    # or where clients weigh by what helps them.
    alike = name in {
        "local",
        "centralized",
        "fedfomo",
        "fedamp",
        "heurfedamp",
        "afl",
        "cyclic",
        "fedas",
        "fedgh",
        "apple",
    }
    assert alike == all(torch.equal(t, uniform[p]) for p, t in everything(own).items())


@pytest.mark.parametrize("name", NAMES)
def test_traffic_is_that_of_the_card(name: str) -> None:
    size, sim = parts(model(NORMED)), simulation(name, NORMED, fraction=0.4)
    by_round = row(name).by_round or (lambda r, s: (row(name).card.down(s), row(name).card.up(s)))
    up = unicast = multicast = 0
    for r in range(4):
        everyone = sim.method.participation == "all"
        training = tuple(range(len(SIZES))) if everyone else sim.sample(r)
        message = sim.method.broadcast(sim.server, training)
        distinct = Fraction(1)
        if isinstance(message, PerClient):  # a client may get several rows
            distinct = Fraction(len(message.rows.unique()) * len(training), max(message.rows.numel(), 1))
        result = sim.step()
        down, back = by_round(r, size)
        up, unicast = up + len(result.clients) * back, unicast + len(training) * down
        multicast += distinct * down
        assert len(result.clients) == (1 if sim.method.pooled or row(name).in_turn else 2)
    found = (sim.traffic.up, sim.traffic.down_unicast, sim.traffic.down_multicast)
    if row(name).sparse:
        assert all(a <= b for a, b in zip(found, (up, unicast, multicast), strict=True))
    else:
        assert found == (up, unicast, multicast)
    sent = (sim.traffic.up + sim.traffic.buffers_up) > 0
    # Buffers are floats of four bytes but for batch norm's int64 counters.
    assert sim.traffic.bytes_up >= 4 * (sim.traffic.up + sim.traffic.buffers_up)
    assert (sim.traffic.bytes_up > 0) == sent


@pytest.mark.parametrize("name", NAMES)
def test_trained_scalars_are_those_of_the_card(name: str) -> None:
    """What one client's training produced.

    The distinct parameter tensors of its new state and its reply that were not there before. A model
    that is kept and sent counts once; two models count twice.
    """
    sim = simulation(name)
    before = {p: t[0] for p, t in tree.leaves(sim.states.get((0,)))}
    received = sim.method.broadcast(sim.server, (0,))
    payload = received.payloads[0] if isinstance(received, PerClient) else received
    new, reply = sim.run((0,), sim.states.get((0,)), received, lambda c, s, r: sim.method.local(c, s, r))
    old = [*before.values(), *(t for _, t in tree.leaves(payload))]
    made: list[torch.Tensor] = []
    for path, stacked in (*tree.leaves(new), *tree.leaves(reply)):
        tensor = stacked[0]
        if path.rpartition("/")[2] in sim.model.parameters and not any(
            torch.equal(tensor, other) for other in (*old, *made) if other.shape == tensor.shape
        ):
            made.append(tensor)
    card, size = row(name).card, parts(sim.model)
    assert sim.trained_scalars == card.trained(size)
    assert sum(t.numel() for t in made) == card.trained(size) + card.beside(size)


@pytest.mark.parametrize("name", NAMES)
def test_clients_that_are_not_sampled_stay_bit_identical(name: str) -> None:
    sim = simulation(name, NORMED, fraction=0.4)
    if sim.method.pooled:
        pytest.skip("all data in one place")
    if sim.method.participation == "all":
        pytest.skip("all clients train in every round")
    trained = set()
    for _ in range(3):
        ids = tuple(i for i in range(len(SIZES)) if i not in sim.sample(sim.round))
        before = dict(tree.leaves(sim.states.get(ids)))
        trained |= set(sim.step().clients)
        assert_same(before, dict(tree.leaves(sim.states.get(ids))))
    # A client that never trained takes no memory either.
    assert set(sim.states.clients) == (trained if before else set())


@pytest.mark.parametrize("name", one_of(3, NAMES, 1))
def test_participation_all_trains_everyone_and_aggregates_the_sampled(name: str) -> None:
    """Idle clients now train too, but the server moves as if they had not, as long as their states did not
    meet it before.
    """
    everyone = simulation(make(name, participation="all"), rounds=1, fraction=0.4)
    sampled = simulation(name, rounds=1, fraction=0.4)
    assert_same(dict(tree.leaves(everyone.server)), dict(tree.leaves(sampled.server)))
    if sampled.method.pooled:
        return
    ids = sampled.sample(0)
    assert_same(dict(tree.leaves(everyone.states.get(ids))), dict(tree.leaves(sampled.states.get(ids))))
    if dict(tree.leaves(everyone.start)):
        assert everyone.states.clients == tuple(range(len(SIZES)))


@pytest.mark.parametrize("name", NAMES)
def test_reruns_are_bit_identical_and_seeds_matter(name: str) -> None:
    first = simulation(name, "dropout", rounds=2, fraction=0.6, seed=5)
    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002  (the library must not read this stream)
    again = simulation(name, "dropout", rounds=2, fraction=0.6, seed=5)
    assert_same(everything(first), everything(again))
    other = simulation(name, "dropout", rounds=2, fraction=0.6, seed=6)
    a, b = everything(first), everything(other)
    assert any(not torch.equal(a[p], b[p]) for p in a)


def random_streams() -> tuple[Any, ...]:
    """States of the global generators of torch, numpy and Python."""
    legacy = np.random.get_state(legacy=False)  # noqa: NPY002  (the stream that must not be touched)
    return torch.get_rng_state().tolist(), str(legacy), random.getstate()


@pytest.mark.parametrize("name", one_of(2, NAMES, 1))
def test_evaluation_leaves_states_buffers_and_random_streams_unchanged(name: str) -> None:
    evaluated, left_alone = (simulation(name, BOTH, rounds=2, fraction=0.6) for _ in range(2))
    modes = [m.training for m in evaluated.model.module.modules()]
    streams = random_streams()
    before = {p: t.clone() for p, t in evaluated.dump()[0].items()}
    facts = evaluated.dump()[1]
    personal(evaluated, (*range(len(SIZES)), NEWCOMER))
    for steps in (0, 2):
        list(evaluated.newcomer_models((NEWCOMER,), steps))
    evaluated.global_model()
    assert_same(before, evaluated.dump()[0])
    assert facts == evaluated.dump()[1]
    assert streams == random_streams()
    assert modes == [m.training for m in evaluated.model.module.modules()]
    # Nor does the next round notice that models were looked at.
    evaluated.step()
    left_alone.step()
    assert_same(everything(evaluated), everything(left_alone))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_models_that_come_out_are_complete_and_own_their_memory(name: str, engine: str) -> None:
    """Writing into a deployed model must not reach the run."""
    sim = simulation(name, NORMED, engine, rounds=1)
    before = {p: t.clone() for p, t in everything(sim).items()}
    names = set(sim.model.parameters) | set(sim.model.buffers)
    models = personal(sim)
    assert set(models) == names
    for tensor in models.values():
        tensor.zero_()
    assert_same(before, everything(sim))
    assert all(torch.isfinite(t.float()).all() for m in (personal(sim),) for t in m.values())


@pytest.mark.parametrize(("name", "engine"), in_turn(("sequential",), ("vectorized",)))
@pytest.mark.parametrize(
    ("sizes", "models"), [((7,), [NORMED]), ((1,), ["mlp"]), ((1, 1, 1), ["mlp", NORMED])], ids=str
)
def test_one_client_and_one_sample_run(
    name: str, sizes: tuple[int, ...], models: list[str], engine: str
) -> None:
    """Batch norm leaves a single sample out, where another model trains on it."""
    for model_name in models:
        sim = simulation(name, model_name, engine, rounds=2, data=federation(sizes))
        assert all(torch.isfinite(t.float()).all() for t in (everything(sim) | personal(sim)).values())


@pytest.mark.parametrize("name", NAMES)
def test_one_sampled_client_runs_and_is_the_whole_average(name: str) -> None:
    """m = 1: the weighting cannot matter. Sums over ALL clients have the sampled one's share: there sizes are equal."""
    data = federation((6,) * 5) if name in ("scaffold", "feddyn", "mr_mtl", "fedem") else federation()
    uniform, samples = (
        simulation(make(name, weights=w), data=data, rounds=3, fraction=0.2) for w in ("uniform", "samples")
    )
    assert_same(everything(uniform), everything(samples))
    assert len(uniform.sample(0)) == 1


@pytest.mark.parametrize("name", NAMES)
def test_newcomers_without_steps_deploy_what_they_receive(name: str) -> None:
    """0 steps: no data of the newcomer's own enters.

    And no step of a newcomer ever reaches the server or another client.
    """
    if row(name).chooses:
        pytest.skip("a newcomer chooses among global models by its own data")
    sim = simulation(name, NORMED, rounds=2)
    ((_, at_once),) = sim.newcomer_models((NEWCOMER,), 0)
    ((_, other),) = sim.newcomer_models((0,), 0)
    assert_same(dict(at_once.items()), dict(other.items()))
    shared = sim.global_model()
    if shared is not None and row(name).card.down is not none:
        # A mixture of w with itself is w up to rounding.
        assert_close({n: t[0] for n, t in at_once.items()}, dict(shared.items()), atol=1e-7)
    ((_, adapted),) = sim.newcomer_models((NEWCOMER,), 2)
    same = all(torch.equal(t, at_once.get(n)) for n, t in adapted.items())
    assert same == (not sim.method.has_personal)


@pytest.mark.parametrize("name", one_of(3, NAMES))
def test_the_federation_and_the_initial_model_are_not_written_to(name: str) -> None:
    data = federation()
    x, y = data.source.x.clone(), data.source.y.clone()
    sim = simulation(name, NORMED)
    init: dict[str, Any] = {n: t.clone() for n, t in sim.init.items()}
    for _ in range(2):
        sim.step()
    personal(sim)
    assert torch.equal(x, data.source.x)
    assert torch.equal(y, data.source.y)
    assert_same(init, dict(sim.init.items()))


@pytest.mark.parametrize("name", NAMES)
def test_no_training_changes_no_model(name: str) -> None:
    """Without local steps every method is the identity on its models (epochs of its own included.

    Lr 0 is refused, so 1e-30).
    """
    from dataclasses import replace

    still = make(name, **row(name).still)
    sim = simulation(still, train=replace(TRAIN, lr=1e-30, momentum=0.0, weight_decay=0.0), rounds=2)
    if name == "pfedme":
        pytest.skip("steps on the local copy of w have a rate of their own")
    if row(name).chooses:
        pytest.skip("there are several initial models")
    for tensor_name, tensor in personal(sim).items():
        torch.testing.assert_close(tensor, sim.init[tensor_name].expand_as(tensor), atol=1e-6, rtol=1e-6)


def test_models_of_the_matrix_cover_what_engines_treat_apart() -> None:
    assert model("batch_norm").has_batch_statistics
    assert not model("group_norm").has_batch_statistics
    assert {"logistic", "mlp", "cnn2", "batch_norm", "group_norm", "dropout"} <= set(FACTORIES)
    assert not fits("lg_fedavg", "logistic")
