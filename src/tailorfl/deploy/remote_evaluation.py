"""The server's half of an evaluation: each client evaluates its models on its own samples, and sends the records."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tailorfl.deploy.checks import check_uses, records_of, unlike_the_others
from tailorfl.deploy.connected_clients import QuestionOutcome
from tailorfl.deploy.messages import Packet
from tailorfl.deploy.remote_rounds import RemoteRounds
from tailorfl.errors import MessageError
from tailorfl.evaluation.predictions import Kept
from tailorfl.evaluation.protocols import Protocol
from tailorfl.evaluation.selection import Selection
from tailorfl.evaluation.summary import Record
from tailorfl.printable import visible
from tailorfl.privacy import Uses
from tailorfl.rounds.planning import deployment_uses
from tailorfl.rounds.simulation import Simulation

log = logging.getLogger(__name__)


def evaluate_remotely(
    sim: Simulation,
    protocol: Protocol,
    participants: Sequence[int] = (),
    selection: Selection | None = None,
    kept: Kept | None = None,
) -> list[Record]:
    """Return the records of all clients that answer; each client evaluates its own parts itself.

    `selection` and `kept` are not used: they would need the clients' samples.
    """
    assert isinstance(sim, RemoteRounds)
    records: dict[int, list[Record]] = {}

    def ask(clients: Sequence[int]) -> dict[int, QuestionOutcome]:
        answers = sim.asked(sim.questions_about_models("evaluate", clients, sets=list(protocol.sets)))
        for client, answer in answers.items():
            problem = answer.reason
            try:
                if answer.packet is not None:
                    records[client] = _evaluated(sim, client, answer.packet, protocol.sets)
            except MessageError as error:
                problem = visible(str(error))
            if client not in records:
                name = sim.federation.names[client]
                log.warning("round %d: '%s' was not evaluated: %s", sim.round, name, problem)
        return answers

    members = sim.members
    sim.until_enough(ask, members, members, f"the evaluation after round {sim.round}")
    for client in unlike_the_others(records):
        name = sim.federation.names[client]
        log.warning(
            "round %d: '%s' was not evaluated: its metrics, sets or models differ from those of most clients",
            sim.round,
            name,
        )
        del records[client]
    rows = [row for client in sorted(records) for row in records[client]]
    if "participants" in protocol.sets:
        rows += [
            {**row, "set": "participants"}
            for row in rows
            if row["set"] == "local" and row["client"] in set(participants)
        ]
    return sorted(rows, key=lambda row: (row["model"], row["set"], row["client"]))


def _evaluated(sim: RemoteRounds, client: int, packet: Packet, sets: Sequence[str]) -> list[Record]:
    """Return the records of a client's evaluation, and book its uses of private samples for it.

    Raises:
        MessageError: the records or uses are invalid.
    """
    parts = {"val": sim.federation.val, "local": sim.federation.test}
    samples = {name: len(parts[name][client]) for name in parts if name in sets}
    records = records_of(packet, client, sim.round, samples)
    is_private = sim.train.dp is not None and sim.method.has_personal
    needed = deployment_uses(sim, (client,), sim.round) if is_private else {}
    if uses := check_uses(packet, needed.get(client, Uses())):
        sim.ledger.settle("deployment", {client: uses})
    return records
