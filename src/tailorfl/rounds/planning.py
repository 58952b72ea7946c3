"""Work and privacy cost of rounds, counted without training: gradients, bytes, and uses of private data.

Client code runs as in a round, but on cohorts that only count: no sample is read, no model changes, and the server
keeps its state. The counts are exact for every method whose fits depend only on the round and on hyper-parameters, as
those of this library do. Cohorts depend only on (seed, round), or are recorded, so they are known before the first
round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import torch
from tensordict import TensorDict

from tailorfl.core.messages import Broadcast, PerClient, count_down, count_up
from tailorfl.engines.base import Parts
from tailorfl.privacy import PrivacyLedger, PrivacyRecord, Uses
from tailorfl.rounds.federated_run import FederatedRun
from tailorfl.rounds.groups import Group, by_group, in_parts, message_for
from tailorfl.rounds.one_round import WORK, DeploymentFunction, Trained, counted
from tailorfl.rounds.participation import RoundTrace
from tailorfl.rounds.system import ClientWork
from tailorfl.training import tree


def _counted_groups(
    run: FederatedRun, message: Broadcast, clients: Sequence[int], round: int
) -> Iterator[tuple[Group, tuple[int, ...], TensorDict | PerClient, PrivacyRecord, Parts]]:
    """Yield (group, its clients, their message, their privacy record, (state, reply, metrics)) of a counted round."""
    for group, positions in by_group(run.groups, clients):
        ids = tuple(clients[k] for k in positions)
        received = message_for(message, group, positions)
        cohort = run.population.cohort(ids, round, run.train)
        yield group, ids, received, *counted(group, cohort, received, run.local)


def work_of(
    run: FederatedRun, message: Broadcast, clients: Sequence[int], round: int
) -> tuple[dict[int, ClientWork], dict[int, Uses]]:
    """Return by client the work of a round, and the uses of private data; nothing is trained.

    `message` goes to `clients`; `round` determines batches and learning rates.
    """
    work: dict[int, ClientWork] = {}
    uses: dict[int, Uses] = {}
    for group, ids, received, record, (_, replies, metrics) in _counted_groups(run, message, clients, round):
        buffers = set(group.model.buffers)
        # Messages and replies of one architecture have equal size.
        down = count_down(received, len(ids), buffers).bytes_down / len(ids)
        up = count_up(replies, buffers).bytes_up / len(ids)
        for i, gradients in zip(ids, metrics[WORK].tolist(), strict=True):
            work[i] = ClientWork(gradients, down, up)
        uses |= record.uses
    return work, uses


def nobody(run: FederatedRun, group: Group, round: int) -> Trained:
    """Return the part of a group without participants: no rows, in the shape of a client's reply."""
    client = (run.population.members(group)[0],)
    message = run.method.broadcast(run.server, client)
    ((_, _, received, _, (_, replies, metrics)),) = _counted_groups(run, message, client, round)
    none = torch.ones(0, dtype=torch.bool)
    return Trained(group, (), replies[:0], metrics[:0], none, received, run.method, run.server, {})


def uses_unheard(
    run: FederatedRun, message: Broadcast, trace: RoundTrace, heard: Collection[int]
) -> dict[int, Uses]:
    """Return the uses of private data by clients that were reached but not `heard`: they may have sent a reply."""
    trained = (a for a in trace.answers if a.fate != "unavailable")
    unheard = Counter(a.client for a in trained if not (a.answered and a.client in heard))
    if run.train.dp is None or not unheard:
        return {}
    _, uses = work_of(run, message, trace.asked, run.round)
    return {i: Counter({use: n * unheard[i] for use, n in uses[i].items()}) for i in unheard if i in uses}


def planned_ledger(run: FederatedRun, rounds: int, adapt_steps: int | None = None) -> PrivacyLedger:
    """Return the ledger of a run after `rounds` rounds, drawn or recorded, and the evaluation of the resulting models.

    `adapt_steps` is the longest evaluated adaptation of held-out clients; None if they are not evaluated.
    """
    ledger, updates = PrivacyLedger(), run.updates
    for number in range(rounds):
        if run.trace is None:
            sampled = run.sample(number)
            training = reached = run.trainees(sampled)
        else:
            trace = run.trace.of(number + 1)
            sampled = () if trace.too_few else tuple(set(trace.sampled).intersection(trace.answered))
            training, reached = trace.asked, trace.reached
        aggregated, using = set(sampled), set(reached)
        message = run.method.broadcast(run.server, training) if training else tree.empty()
        if updates is not None and updates.secret:  # all clients pay the same, whoever takes part
            for group in run.groups:
                ledger.book("updates", updates.used((), nobody(run, group, number).replies))
        for _, ids, _, record, (_, replies, _) in _counted_groups(run, message, training, number):
            ledger.book("training", {i: uses for i, uses in record.uses.items() if i in using})
            if updates is not None and not updates.secret:
                positions = [k for k, i in enumerate(ids) if i in aggregated]
                ledger.book("updates", updates.used([ids[k] for k in positions], replies[positions]))
    if run.method.has_personal:
        ledger.settle("deployment", deployment_uses(run, run.federation.members, rounds))
        newcomers = range(run.federation.num_clients, len(run.federation.train))
        if adapt_steps is not None and newcomers:
            ledger.settle("newcomer", deployment_uses(run, newcomers, rounds, adapt_steps))
    return ledger


def deployment_uses(
    run: FederatedRun, ids: Sequence[int], rounds: int, steps: int | None = None
) -> dict[int, Uses]:
    """Return the uses of private data for the models that clients deploy after `rounds` rounds.

    `steps` is as in `DeploymentFunction`. Nothing is trained.
    """
    uses: dict[int, Uses] = {}
    for group, part in in_parts(run.groups, ids, len(ids)):
        message = run.deployment_message(group, part, steps)
        cohort = run.population.cohort(part, rounds, run.train, steps, own=True)
        uses |= counted(group, cohort, message, DeploymentFunction(run.method, steps))[0].uses
    return uses
