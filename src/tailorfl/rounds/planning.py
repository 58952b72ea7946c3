"""The ledger that a run will have, known before its first round: cohorts depend on (seed, round) only.

Client code runs as in a round, on all clients of it together, but on cohorts that count: no sample is looked at, no
model moves, and the server's state stays what it is at the start. That gives the true numbers for every method whose
fits depend on the round and on hyper-parameters alone, as those of this library do.
"""

from __future__ import annotations

from tailorfl.rounds.client_code import DeploymentFunction, counted, deployment_message, in_parts
from tailorfl.rounds.groups import by_group, message_for
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.ledger import PrivacyLedger


def planned_ledger(sim: Simulation, rounds: int, adapt_steps: int | None = None) -> PrivacyLedger:
    """Returns the ledger of a simulation after `rounds` rounds and the evaluation of the models that come out.

    `adapt_steps` is the longest adaptation of held-out clients that will be evaluated; None where they are not.
    """
    ledger, updates = PrivacyLedger(), sim.updates
    for number in range(rounds):
        sampled = sim.sample(number)
        training = sim.trainees(sampled)
        message = sim.method.broadcast(sim.server, training)
        if updates is not None and updates.secret:  # everybody pays alike, whoever takes part
            for group in sim.groups:
                ledger.book("updates", updates.used((), sim.nobody(group, number).replies))
        for group, where in by_group(sim.groups, training):
            ids = tuple(training[k] for k in where)
            cohort = sim.population.cohort(ids, number, sim.train)
            uses, (_, replies, _) = counted(group, cohort, message_for(message, group, where), sim.local)
            ledger.book("training", uses.uses)
            if updates is not None and not updates.secret:
                asked = [k for k, i in enumerate(ids) if i in set(sampled)]
                ledger.book("updates", updates.used([ids[k] for k in asked], replies[asked]))
    if sim.method.has_personal:
        _deployments(sim, rounds, adapt_steps, ledger)
    return ledger


def _deployments(sim: Simulation, rounds: int, adapt_steps: int | None, ledger: PrivacyLedger) -> None:
    clients = sim.federation.num_clients
    wanted: list[tuple[range, int | None]] = [(range(clients), None)]
    if adapt_steps is not None:
        wanted.append((range(clients, len(sim.federation.train)), adapt_steps))
    for ids, steps in wanted:
        for group, part in in_parts(sim.groups, ids, len(ids)):
            message = deployment_message(sim.method, sim.server, group, part, steps)
            cohort = sim.population.cohort(part, rounds, sim.train, steps, own=True)
            uses, _ = counted(group, cohort, message, DeploymentFunction(sim.method, steps))
            ledger.settle("deployment" if steps is None else "newcomer", uses.uses)
