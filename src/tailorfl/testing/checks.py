"""The checks. Each trains a method for a few rounds on five tiny clients, most of them in milliseconds.

They check that engines agree, a resumed run equals the uninterrupted one, clients are interchangeable, those that are
not sampled stay as they are, evaluation changes nothing, traffic is as promised, privacy covers every gradient or is
refused, newcomers get a model, and models can be exported.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tailorfl.data.federation import Federation
from tailorfl.export.source_code import NotWritableError, written
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs import checkpoints
from tailorfl.testing.contract import Contract, check, is_federated, nothing
from tailorfl.testing.small import (
    BOTH,
    EXACT,
    NEWCOMER,
    SIZES,
    TRAIN,
    assert_close,
    assert_same,
    everything,
    federation,
    personal,
    replaced,
    simulation,
)
from tailorfl.training import tree
from tailorfl.training.sample_privacy import SampleDP

NORMED = "batch_norm"
ALL = (*range(len(SIZES)), NEWCOMER)
CLOSE = {"atol": 1e-9, "rtol": 1e-7}
"""Tolerances between runs in float64."""
RESUMED: dict[str, Any] = {"fraction": 0.4, "seed": 2}
PLAIN = replace(TRAIN, momentum=0.0, weight_decay=0.0)
NOISY = replace(PLAIN, dp=SampleDP(0.5, 1.0, "shuffle"))


def _outcome(sim: Simulation) -> dict[str, Tensor]:
    """Return states, deployable models (of the newcomer too) and the newcomer's model after two steps."""
    ((_, adapted),) = sim.newcomer_models((NEWCOMER,), 2)
    return {
        **everything(sim),
        **{f"personal/{n}": t for n, t in personal(sim, ALL).items()},
        **{f"adapted/{n}": t for n, t in tree.tensors(adapted).items()},
    }


def _of_clients(sim: Simulation, ids: tuple[int, ...]) -> dict[str, Tensor]:
    """Return new states and replies of `ids` in this order, without storing them."""
    message = sim.method.broadcast(sim.server, ids)
    new, reply = sim.run(ids, sim.states.get(ids), message, lambda c, s, r: sim.method.local(c, s, r))
    return {
        **{f"state/{p}": t for p, t in tree.leaves(new)},
        **{f"reply/{p}": t for p, t in tree.leaves(reply)},
    }


@check(("logistic",), (NORMED,), ("dropout",))
def engines_agree(contract: Contract, model_name: str) -> None:
    """Check that training all clients at once gives the same numbers as one after the other.

    In float64: rounding in single precision depends on the processor, and the first steps of Adam turn the sign of a
    gradient near zero into a whole step.
    """
    runs = [
        simulation(contract.method, model_name + EXACT, e, rounds=2) for e in ("sequential", "vectorized")
    ]
    assert_close(_outcome(runs[0]), _outcome(runs[1]), **CLOSE)


@check((1,), (3,))
def cohorts_may_be_cut_up(contract: Contract, chunk: int) -> None:
    """Check that the number of clients that run at once changes no result."""
    runs = [
        simulation(contract.method, "mlp" + EXACT, engine, chunk=size, rounds=2)
        for engine, size in (("sequential", None), ("vectorized", chunk))
    ]
    assert_close(_outcome(runs[0]), _outcome(runs[1]), **CLOSE)


@check()
def losses_and_traffic_do_not_depend_on_the_engine(contract: Contract) -> None:
    """Check the losses and the traffic, and also which clients take part and whose replies are rejected."""
    a, b = (
        simulation(contract.method, NORMED, engine, fraction=0.6) for engine in ("sequential", "vectorized")
    )
    for _ in range(2):
        first, second = a.step(), b.step()
        assert first.losses.keys() == second.losses.keys() != set()
        for client, loss in first.losses.items():
            assert math.isclose(loss, second.losses[client], rel_tol=1e-4, abs_tol=1e-12), (client, loss)
        assert (first.clients, first.rejected, first.traffic) == (
            second.clients,
            second.rejected,
            second.traffic,
        )


@check(("dropout", "sequential"), ("dropout", "vectorized"), (NORMED, "vectorized"), where=is_federated)
def order_and_company_of_clients_do_not_matter(contract: Contract, model_name: str, engine: str) -> None:
    """Check that client i's update is the same alone, among all, and in any order."""
    # Bit for bit if clients run one by one; if they run together, in float64, where rounding hardly matters.
    exact = engine == "sequential"
    sim = simulation(contract.method, model_name if exact else model_name + EXACT, engine, rounds=1)
    everyone = _of_clients(sim, (0, 1, 2, 3, 4))
    order = (3, 0, 4, 2, 1)
    tolerance = {"atol": 0.0, "rtol": 0.0} if exact else CLOSE
    assert_close(_of_clients(sim, order), {p: t[list(order)] for p, t in everyone.items()}, **tolerance)
    for i in (0, 1):
        assert_close(_of_clients(sim, (i,)), {p: t[i : i + 1] for p, t in everyone.items()}, **tolerance)


@check(("sequential",), ("vectorized",), where=is_federated)
def the_data_of_others_does_not_matter_within_a_round(contract: Contract, engine: str) -> None:
    """Check that a client's result depends on its id, its data and what it receives, and on no other client."""
    changed = replaced(federation(), 0, lambda x: 50.0 * x.flip(0) + 3.0)
    a, b = (simulation(contract.method, NORMED, engine, data=data) for data in (federation(), changed))
    before, after = _of_clients(a, (0, 2, 3, 4)), _of_clients(b, (0, 2, 3, 4))
    assert_close({p: t[1:] for p, t in before.items()}, {p: t[1:] for p, t in after.items()}, atol=0, rtol=0)
    assert any(not torch.equal(t[0], after[p][0]) for p, t in before.items()), (
        "a client's own data do not matter"
    )


@check(where=lambda contract: not contract.by_id)
def relabelling_clients_permutes_the_results(contract: Contract) -> None:
    """Check that new ids change nothing else with full batches, where nothing random depends on the id."""
    base = federation()
    order = [4, 2, 0, 1, 3]
    moved = [*order, NEWCOMER]
    relabelled = Federation(
        base.source,
        tuple(base.train[i] for i in moved),
        tuple(base.val[i] for i in moved),
        tuple(base.test[i] for i in moved),
        tuple(base.names[i] for i in moved),
        base.num_clients,
        public=base.public,
    )
    full = replace(TRAIN, batch_size=0, epochs=2)
    method = contract.having(**contract.alike)
    a, b = (simulation(method, NORMED, data=data, rounds=2, train=full) for data in (base, relabelled))
    assert_close({n: t[order] for n, t in personal(a).items()}, personal(b), atol=2e-5, rtol=1e-3)
    if method.has_global:
        # Batch counters are the first client's, and clients of one sample count no batch.
        w, u = a.global_model(), b.global_model()
        assert w is not None
        assert u is not None
        keep = list(a.model.parameters)
        assert_close({n: w[n] for n in keep}, {n: u[n] for n in keep}, atol=2e-5, rtol=1e-3)


@check(("sequential",), ("vectorized",))
def resumed_equals_uninterrupted(contract: Contract, engine: str) -> None:
    """Check that a run continues exactly from its dump, in memory and through files."""
    first = simulation(contract.method, BOTH, engine, rounds=2, **RESUMED)
    tensors, facts = first.dump()
    memory, disk = (simulation(contract.method, BOTH, engine, **RESUMED) for _ in range(2))
    memory.load(tensors, facts)
    _assert_equal_runs(memory, first)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints.save(Path(folder), first.round, tensors, facts)
        loaded = checkpoints.load_latest(Path(folder))
        assert loaded is not None
        disk.load(loaded[1], loaded[2])
        for sim in (first, memory, disk):
            sim.step()
    for resumed in (memory, disk):
        _assert_equal_runs(first, resumed)


@check()
def loading_forgets_what_was_before_and_copies(contract: Contract) -> None:
    """Check that `load` discards all that a simulation did before, and that runs do not write into loaded tensors."""
    fresh, used = (simulation(contract.method, NORMED, rounds=r, **RESUMED) for r in (0, 2))
    dumped, facts = used.dump()
    copies = {p: t.clone() for p, t in dumped.items()}
    used.load(*fresh.dump())
    _assert_equal_runs(fresh, used)
    for sim in (fresh, used):
        sim.step()
    _assert_equal_runs(fresh, used)
    used.load(dumped, facts)
    addresses = {t.data_ptr() for t in dumped.values() if t.numel()}
    assert not any(t.data_ptr() in addresses for _, t in tree.leaves(used.server) if t.numel())
    used.step()
    assert_same(copies, dumped)


def _assert_equal_runs(a: Simulation, b: Simulation) -> None:
    assert_same(everything(a), everything(b))
    assert_same(personal(a), personal(b))
    assert (a.round, a.traffic, a.states.clients) == (b.round, b.traffic, b.states.clients)
    assert (a.gradients, a.turns) == (b.gradients, b.turns)


@check(where=lambda contract: is_federated(contract) and contract.method.participation != "all")
def clients_that_are_not_sampled_stay_bit_identical(contract: Contract) -> None:
    """Check that a round changes only states of clients that train in it; one that never trained takes no memory."""
    sim, trained = simulation(contract.method, NORMED, fraction=0.4), set()
    for _ in range(3):
        ids = tuple(i for i in range(len(SIZES)) if i not in sim.sample(sim.round))
        before = dict(tree.leaves(sim.states.get(ids)))
        trained |= set(sim.step().clients)
        assert_same(before, dict(tree.leaves(sim.states.get(ids))))
    assert set(sim.states.clients) == (trained if before else set())


@check()
def participation_all_trains_everyone_and_aggregates_the_sampled(contract: Contract) -> None:
    """Check that idle clients train too, and that after the first round the server is as if they had not."""
    everyone = simulation(contract.having(participation="all"), rounds=1, fraction=0.4)
    sampled = simulation(contract.method, rounds=1, fraction=0.4)
    assert_same(dict(tree.leaves(everyone.server)), dict(tree.leaves(sampled.server)))
    if sampled.method.pooled:
        return
    ids = sampled.sample(0)
    assert_same(dict(tree.leaves(everyone.states.get(ids))), dict(tree.leaves(sampled.states.get(ids))))
    if dict(tree.leaves(everyone.start)):
        assert everyone.states.clients == tuple(range(len(SIZES)))


@check()
def the_runs_weights_are_those_of_a_method_that_has_none_of_its_own(contract: Contract) -> None:
    """Check that a method takes the run's weights, as a fair comparison needs, unless its own options set others."""
    settings: dict[str, Any] = {"rounds": 4, "fraction": 0.6}
    assert contract.method.weights is None, "the class has its own weights"
    plain = everything(simulation(contract.method, **settings))
    assert_same(plain, everything(simulation(contract.method, weights="samples", **settings)))
    uniform = everything(simulation(contract.method, weights="uniform", **settings))
    assert_same(uniform, everything(simulation(contract.having(weights="uniform"), **settings)))
    weighted = simulation(contract.having(weights="samples"), weights="uniform", **settings)
    assert weighted.weights == "samples"
    same = all(torch.equal(t, uniform[p]) for p, t in everything(weighted).items())
    assert same == contract.unweighted, "results depend on the weights if and only if the contract says so"


@check()
def one_sampled_client_is_the_whole_average(contract: Contract) -> None:
    """Check that weights then do not matter. Sums over ALL clients have its share, so sizes are equal there."""
    data = federation((6,) * 5) if contract.over_all else federation()
    uniform, samples = (
        simulation(contract.having(weights=w), data=data, rounds=3, fraction=0.2)
        for w in ("uniform", "samples")
    )
    assert_same(everything(uniform), everything(samples))
    assert len(uniform.sample(0)) == 1


@check()
def reruns_are_bit_identical_and_seeds_matter(contract: Contract) -> None:
    """Check this whatever the global random generators do in between."""
    first = simulation(contract.method, "dropout", rounds=2, fraction=0.6, seed=5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        rerun = simulation(contract.method, "dropout", rounds=2, fraction=0.6, seed=5)
    assert_same(everything(first), everything(rerun))
    a, b = (
        everything(first),
        everything(simulation(contract.method, "dropout", rounds=2, fraction=0.6, seed=6)),
    )
    assert any(not torch.equal(a[p], b[p]) for p in a), "another seed gives the same run"


@check()
def evaluation_leaves_states_buffers_and_random_streams_unchanged(contract: Contract) -> None:
    """Check also that the next round is the same as without an evaluation."""
    evaluated, left_alone = (simulation(contract.method, BOTH, rounds=2, fraction=0.6) for _ in range(2))
    modes = [m.training for m in evaluated.model.module.modules()]
    streams = _random_streams()
    before = {p: t.clone() for p, t in evaluated.dump()[0].items()}
    facts = evaluated.dump()[1]
    personal(evaluated, ALL)
    for steps in (0, 2):
        list(evaluated.newcomer_models((NEWCOMER,), steps))
    evaluated.global_model()
    assert_same(before, evaluated.dump()[0])
    assert facts == evaluated.dump()[1]
    assert streams == _random_streams(), "a global random generator was used"
    assert modes == [m.training for m in evaluated.model.module.modules()]
    evaluated.step()
    left_alone.step()
    assert_same(everything(evaluated), everything(left_alone))


def _random_streams() -> tuple[Any, ...]:
    """Return the states of the global generators of torch, numpy and Python."""
    legacy = np.random.get_state(legacy=False)  # noqa: NPY002  (the stream that must not be touched)
    return torch.get_rng_state().tolist(), str(legacy), random.getstate()


@check(("sequential",), ("vectorized",))
def models_that_come_out_are_complete_and_own_their_memory(contract: Contract, engine: str) -> None:
    """Check that writing into a deployed model does not reach the run."""
    sim = simulation(contract.method, NORMED, engine, rounds=1)
    before = {p: t.clone() for p, t in everything(sim).items()}
    models = personal(sim)
    assert set(models) == set(sim.model.parameters) | set(sim.model.buffers)
    for tensor in models.values():
        tensor.zero_()
    assert_same(before, everything(sim))
    assert all(torch.isfinite(t.float()).all() for t in personal(sim).values())


@check()
def the_federation_and_the_initial_model_are_not_written_to(contract: Contract) -> None:
    """Check that two rounds and an evaluation leave them as they are."""
    data = federation()
    x, y = data.source.x.clone(), data.source.y.clone()
    sim = simulation(contract.method, NORMED)
    init: dict[str, Any] = {n: t.clone() for n, t in sim.init.items()}
    for _ in range(2):
        sim.step()
    personal(sim)
    assert torch.equal(x, data.source.x)
    assert torch.equal(y, data.source.y)
    assert_same(init, tree.tensors(sim.init))


@check(("sequential",), ("vectorized",))
def one_client_and_one_sample_run(contract: Contract, engine: str) -> None:
    """Check it with and without batch norm, which leaves a single sample out; other models train on it."""
    for sizes, models in (((7,), (NORMED,)), ((1,), ("mlp",)), ((1, 1, 1), ("mlp", NORMED))):
        for model_name in models:
            sim = simulation(contract.method, model_name, engine, rounds=2, data=federation(sizes))
            tensors = (everything(sim) | personal(sim)).values()
            assert all(torch.isfinite(t.float()).all() for t in tensors), (sizes, model_name)


@check(where=lambda contract: not (contract.chooses or contract.own_rate))
def no_training_changes_no_model(contract: Contract) -> None:
    """Check that a method without local steps changes no model (a rate of 0 is refused, so it is 1e-30)."""
    train = replace(TRAIN, lr=1e-30, momentum=0.0, weight_decay=0.0)
    sim = simulation(contract.having(**contract.still), train=train, rounds=2)
    for name, tensor in personal(sim).items():
        torch.testing.assert_close(tensor, sim.init[name].expand_as(tensor), atol=1e-6, rtol=1e-6)


@check(where=lambda contract: not contract.chooses)
def newcomers_without_steps_deploy_what_they_receive(contract: Contract) -> None:
    """Check that a newcomer's data have no effect with 0 steps, and with steps only if models are personal."""
    sim = simulation(contract.method, NORMED, rounds=2)
    ((_, at_once),) = sim.newcomer_models((NEWCOMER,), 0)
    ((_, of_another),) = sim.newcomer_models((0,), 0)
    assert_same(tree.tensors(at_once), tree.tensors(of_another))
    shared = sim.global_model()
    receives = bool(sim.traffic.down_unicast) if contract.down is None else contract.down is not nothing
    if shared is not None and receives:
        # A mixture of w with itself is w up to rounding.
        assert_close({n: t[0] for n, t in tree.tensors(at_once).items()}, tree.tensors(shared), atol=1e-7)
    ((_, adapted),) = sim.newcomer_models((NEWCOMER,), 2)
    same = all(torch.equal(t, at_once.get(n)) for n, t in tree.tensors(adapted).items())
    assert same == (not sim.method.has_personal), "a newcomer adapts if and only if models are personal"


@check()
def evaluated_models_are_those_promised(contract: Contract) -> None:
    """Check that there is a personal model, a global one, or both."""
    method, sim = contract.method, simulation(contract.method)
    assert contract.personal in (None, method.has_personal)
    assert contract.shared in (None, method.has_global)
    assert (sim.global_model() is not None) == method.has_global


@check()
def exported_networks_answer_as_personal_models_do(contract: Contract) -> None:
    """Check that exported networks give the outputs of a client and of a newcomer in the run."""
    sim = simulation(contract.method, BOTH, rounds=1)
    x = sim.federation.source.x[:4]
    ((_, adapted),) = sim.newcomer_models((NEWCOMER,), 1)
    for state in (personal(sim, (0,)), tree.tensors(adapted)):
        state = {n: t[0] for n, t in state.items()}
        exported = _exported(sim.model.alone(state), x)
        assert_close({"outputs": exported(x)}, {"outputs": sim.model(state, x)}, atol=1e-6)


def _exported(network: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a network in its exported form: code that needs only torch, or a program if that is not possible."""
    namespace: dict[str, Any] = {}
    try:
        exec(written(network), namespace)
    except NotWritableError:
        return torch.export.export(network, (x,)).module()
    copy: nn.Module = namespace["network"]()
    copy.load_state_dict(network.state_dict())
    return copy.eval()
