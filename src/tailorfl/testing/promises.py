"""Checks of a method's promises: the work and traffic of a round, and privacy in every gradient or a refusal."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from tailorfl.core.messages import PerClient
from tailorfl.core.method import Method
from tailorfl.errors import TailorflError
from tailorfl.rounds.client_privacy import ClientDP
from tailorfl.rounds.planning import work_of
from tailorfl.testing.checks import NOISY, NORMED, PLAIN
from tailorfl.testing.contract import Contract, check, is_covered, is_federated
from tailorfl.testing.small import (
    SIZES,
    assert_close,
    assert_same,
    everything,
    model,
    parts,
    simulation,
)
from tailorfl.training import tree
from tailorfl.training.sample_privacy import SampleDP


@check()
def the_work_of_a_round_is_known_before_it(contract: Contract) -> None:
    """Check that the estimated gradients and bytes are those that are counted."""
    sim = simulation(contract.method, rounds=1)
    before = (sim.gradients, sim.traffic.bytes_down, sim.traffic.bytes_up)
    clients = sim.trainees(sim.sample(1))
    work, uses = work_of(sim, sim.method.broadcast(sim.server, clients), clients, 1)
    result = sim.step(sampled=clients)
    assert sum(client.gradients for client in work.values()) == sim.gradients - before[0] == result.gradients
    assert uses == {}
    if not sim.method.pooled and not sim.method.reaches_all:
        for counted, expected in (
            (sim.traffic.bytes_down - before[1], "down"),
            (sim.traffic.bytes_up - before[2], "up"),
        ):
            assert math.isclose(
                sum(getattr(client, expected) for client in work.values()), counted, rel_tol=1e-6
            )


@check(where=lambda contract: contract.by_round is not None or contract.down is not None)
def traffic_is_what_was_promised(contract: Contract) -> None:
    """Check scalars up, down to each client, and down once for all, over four rounds of two clients."""
    size, sim = parts(model(NORMED)), simulation(contract.method, NORMED, fraction=0.4)
    assert contract.by_round or (contract.down and contract.up), "a contract with `down` needs `up`"
    by_round = contract.by_round or (lambda r, s: (contract.down(s), contract.up(s)))  # type: ignore[misc]
    up = unicast = 0
    multicast = Fraction(0)
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
        assert len(result.clients) == (1 if sim.method.pooled or contract.in_turn else 2)
    counted: tuple[float | Fraction, ...] = (
        sim.traffic.up,
        sim.traffic.down_unicast,
        sim.traffic.down_multicast,
    )
    promised: tuple[float | Fraction, ...] = (up, unicast, multicast)
    if contract.at_most:
        assert all(a <= b for a, b in zip(counted, promised, strict=True)), (counted, promised)
    else:
        assert counted == promised, f"(up, down, down once for all) is {counted}, not {promised}"
    # Buffers are floats of four bytes, except for batch norm's int64 counters.
    sent = sim.traffic.up + sim.traffic.buffers_up
    assert sim.traffic.bytes_up >= 4 * sent
    assert (sim.traffic.bytes_up > 0) == (sent > 0)


@check(where=lambda contract: contract.trained is not None)
def trained_scalars_are_those_promised(contract: Contract) -> None:
    """Check the size of a client's trained tensors: those of its new state and reply that did not exist before.

    A model that is kept and sent counts once; two models count twice.
    """
    assert contract.trained is not None
    sim = simulation(contract.method)
    before = [t[0] for _, t in tree.leaves(sim.states.get((0,)))]
    received = sim.method.broadcast(sim.server, (0,))
    payload = received.payloads[0] if isinstance(received, PerClient) else received
    new, reply = sim.run((0,), sim.states.get((0,)), received, lambda c, s, r: sim.method.local(c, s, r))
    old = [*before, *(t for _, t in tree.leaves(payload))]  # type: ignore[arg-type]
    produced: list[Tensor] = []
    for path, stacked in (*tree.leaves(new), *tree.leaves(reply)):
        tensor = stacked[0]
        if path.rpartition("/")[2] in sim.model.parameters and not any(
            torch.equal(tensor, earlier) for earlier in (*old, *produced) if earlier.shape == tensor.shape
        ):
            produced.append(tensor)
    size = parts(sim.model)
    promised, new_scalars = contract.trained(size), sum(t.numel() for t in produced)
    assert sim.trained_scalars == promised, f"{sim.trained_scalars} by models_trained, not {promised}"
    assert new_scalars == promised + contract.beside(size), (
        f"{new_scalars} in new state and reply, not {promised}"
    )


def _without_distillation(contract: Contract) -> Method:
    """Return the method without the server's training, whose first steps turn roundings into visible differences."""
    return contract.having(**{key: value for key, value in contract.still.items() if key == "distil"})


@check(where=is_covered)
def sample_privacy_without_clip_and_noise_changes_nothing(contract: Contract) -> None:
    """Check it for a cohort trained at once; the next check compares it with the loop."""
    private = replace(PLAIN, dp=SampleDP(math.inf, 0.0, "shuffle"))
    a, b = (
        everything(simulation(_without_distillation(contract), "mlp", "vectorized", train=t, rounds=2))
        for t in (PLAIN, private)
    )
    assert_close(a, b, atol=5e-5)


@check(("logistic",), where=is_covered)
def private_training_is_the_same_in_every_engine_and_again(contract: Contract, model_name: str) -> None:
    """Check that noise depends only on the seed, the client and the round."""
    run = [
        everything(
            simulation(
                _without_distillation(contract), model_name, engine, train=NOISY, rounds=2, fraction=0.6
            )
        )
        for engine in ("sequential", "vectorized", "sequential")
    ]
    assert_close(run[0], run[1])
    assert_same(run[0], run[2])
    assert all(torch.isfinite(t.float()).all() for t in run[0].values())


@check(where=is_covered)
def clipped_training_moves_by_no_more_than_the_clip(contract: Contract) -> None:
    """Check a crude bound, which a gradient that escapes the clip breaks by orders of magnitude."""
    clipped = replace(PLAIN, dp=SampleDP(1e-4, 0.0, "shuffle"), lr=0.01)
    sim = simulation(contract.method, "mlp", train=clipped, rounds=1)
    moved = everything(sim)
    start = everything(simulation(contract.method, "mlp", train=replace(clipped, lr=1e-30), rounds=1))
    steps = 60  # more than any method takes here in a round, with its own rates up to 0.1
    for path, tensor in moved.items():
        if path.startswith("client/") and path.rpartition("/")[2] in sim.model.parameters:
            assert float((tensor - start[path]).abs().max()) <= steps * 0.1 * 1e-4 * 10, path


@check((NORMED,), where=is_covered)
def batch_norm_is_refused_where_its_batches_would_leak(contract: Contract, model_name: str) -> None:
    """Check it: sample-level privacy needs the gradient of each sample alone."""
    _assert_refused(contract, model_name)


@check(where=lambda contract: not is_covered(contract))
def sample_privacy_that_does_not_cover_the_method_is_refused(contract: Contract) -> None:
    """Check that it is refused at the start of the run or in its first round."""
    _assert_refused(contract, "mlp")


def _assert_refused(contract: Contract, model_name: str) -> None:
    try:
        simulation(contract.method, model_name, train=NOISY).step()
    except TailorflError:
        return
    raise AssertionError("sample-level privacy was not refused")


@check(where=is_federated)
def client_privacy_without_clip_and_noise_changes_nothing_or_is_refused(contract: Contract) -> None:
    """Check it for any aggregation: a method that declares that it needs only the mean must not need more."""
    method = type(contract.method)(**{**_without_distillation(contract).all_options(), "weights": "uniform"})
    settings: dict[str, Any] = {"rounds": 3, "fraction": 0.6, "train": PLAIN}
    private = ClientDP(math.inf, 0.0)
    if method.unprotected("client"):
        try:
            simulation(method, "mlp", "vectorized", client_dp=private, **settings)
        except TailorflError:
            return
        raise AssertionError("client-level privacy was not refused")
    a, b = (
        everything(simulation(method, "mlp", "vectorized", client_dp=dp, **settings))
        for dp in (private, None)
    )
    assert_close(a, b, atol=5e-5)
