"""What clients would do in a round, found out without doing it: gradients, bytes, and uses of private data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from tailorfl.core.messages import Broadcast, count_down, count_up
from tailorfl.rounds.client_code import WORK, counted
from tailorfl.rounds.federated_run import FederatedRun
from tailorfl.rounds.groups import by_group, message_for
from tailorfl.rounds.participation import RoundTrace
from tailorfl.rounds.sampling import sampled_clients
from tailorfl.rounds.system import ClientWork, System
from tailorfl.training.ledger import Uses


def work_of(
    run: FederatedRun, message: Broadcast, clients: Sequence[int], round: int
) -> tuple[dict[int, ClientWork], dict[int, Uses]]:
    """Returns by client what the work of a round would be, and what private training would use; nothing is trained.

    `message` goes to `clients`; `round` is the one that batches and learning rates are of.
    """
    found: dict[int, ClientWork] = {}
    uses: dict[int, Uses] = {}
    for group, where in by_group(run.groups, clients):
        ids = tuple(clients[k] for k in where)
        mine = message_for(message, group, where)
        cohort = run.population.cohort(ids, round, run.train)
        record, (_, replies, metrics) = counted(group, cohort, mine, run.local)
        buffers = set(group.model.buffers)
        # Messages and replies of one architecture are of equal size.
        down = count_down(mine, len(ids), buffers).bytes_down / len(ids)
        up = count_up(replies, buffers).bytes_up / len(ids)
        for i, gradients in zip(ids, metrics[WORK].tolist(), strict=True):
            found[i] = ClientWork(gradients, down, up)
        uses |= record.uses
    return found, uses


def simulated_trace(
    run: FederatedRun, system: System, message: Broadcast, sampled: tuple[int, ...], training: tuple[int, ...]
) -> RoundTrace:
    """Returns what becomes of the clients that the next round asks, in a simulated system."""
    work = dict.fromkeys(training, ClientWork(0, 0, 0))
    if system.devices.takes_time:
        work, _ = work_of(run, message, training, run.round)
    wanted = sampled_clients(run.fraction, run.participants)
    return system.round(run.round + 1, run.clock, sampled, training, work, wanted)


def uses_unheard(
    run: FederatedRun, message: Broadcast, trace: RoundTrace, heard: Collection[int]
) -> dict[int, Uses]:
    """Returns the private training of clients that were reached and not `heard`: they may have sent what it gave."""
    trained = (a for a in trace.answers if a.fate != "unavailable")
    unheard = Counter(a.client for a in trained if not (a.answered and a.client in heard))
    if run.train.dp is None or not unheard:
        return {}
    _, uses = work_of(run, message, trace.asked, run.round)
    return {i: Counter({use: n * unheard[i] for use, n in uses[i].items()}) for i in unheard if i in uses}
