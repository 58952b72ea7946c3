"""The server's half of the rounds, where clients are elsewhere: `rounds.Simulation` that asks instead of computing."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.messages import Broadcast, PerClient
from tailorfl.deploy.agreement import Agreement
from tailorfl.deploy.packet import Packet, all_finite, flat, same_shape
from tailorfl.deploy.roster import Answer, Roster
from tailorfl.deploy.slots import NEVER, uses_from_facts
from tailorfl.engines.results import Updates
from tailorfl.errors import MessageError
from tailorfl.evaluation.predictions import Kept
from tailorfl.evaluation.protocols import Protocol
from tailorfl.evaluation.selection import Selection
from tailorfl.evaluation.summary import Record
from tailorfl.rounds.acceptance import NOT_FINITE, Acceptance, Fate
from tailorfl.rounds.acceptance import Answer as Became
from tailorfl.rounds.client_code import WORK, counted
from tailorfl.rounds.groups import Group, by_group, message_for
from tailorfl.rounds.one_round import Collected, RoundResult, Trained
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.deploy import DeployConfig
from tailorfl.training import tree

log = logging.getLogger(__name__)


@dataclass
class Line:
    """How the server reaches the clients of one job, and what it knows of them."""

    roster: Roster
    agreement: Agreement
    settings: DeployConfig
    acked: dict[int, int] = field(default_factory=dict)
    """Client -> the last round (from 1) in which its reply was accepted."""
    digest: str = ""
    evaluation_bytes: int = 0
    """Of all messages about evaluations, which simulations do not count."""


class Remote(Simulation):
    """A simulation whose clients are asked through a roster. `line` is set right after it is made."""

    line: Line

    def attach(self, line: Line) -> None:
        """Says how clients are reached."""
        line.digest = line.agreement.digest(self)
        self.line = line

    # -- asking ---------------------------------------------------------------------------------------------

    def asked(self, packets: Mapping[int, Packet], seconds: float) -> dict[int, Answer]:
        """Asks clients; those that do not know the job (any more) are told of it and asked once more."""
        names = self.line.agreement.names
        roster = self.line.roster
        roster.refresh()
        found = roster.ask({names[i]: packet for i, packet in packets.items()}, seconds)
        new = [i for i in packets if found[names[i]].code == "unknown-job"]
        if new:
            self.set_up(new, seconds)
            found |= roster.ask({names[i]: packets[i] for i in new}, seconds)
        return {i: found[names[i]] for i in packets}

    def set_up(self, clients: Sequence[int], seconds: float) -> dict[int, Answer]:
        """Tells clients of the job, and returns what they say to it."""
        names = self.line.agreement.names
        question = Packet("setup", self.line.agreement.facts())
        answers = self.line.roster.ask({names[i]: question for i in clients}, seconds)
        for i in clients:
            answer = answers[names[i]]
            if answer.packet is not None and answer.packet.facts.get("digest") != self.line.digest:
                answers[names[i]] = Answer(
                    None,
                    "refused",
                    "it makes another model or other settings of the experiment",
                    "fingerprint",
                )
            if answers[names[i]].packet is None:
                log.warning("client '%s' has not agreed: %s", names[i], answers[names[i]].reason)
        return {i: answers[names[i]] for i in clients}

    def _question(self, client: int, round: int, **more: Any) -> dict[str, Any]:
        acked = self.line.acked.get(client, NEVER)
        restart = self.line.settings.lost_state == "restart"
        return {"digest": self.line.digest, "round": round, "acked": acked, "restart": restart, **more}

    # -- a round --------------------------------------------------------------------------------------------

    @property
    def is_traced(self) -> bool:
        """Always: what became of every client is a file."""
        return True

    def step(
        self,
        sampled: tuple[int, ...] | None = None,
        training: tuple[int, ...] | None = None,
        acceptance: Acceptance | None = None,
    ) -> RoundResult:
        """Runs the next round with the clients that are there; notes whose replies were accepted."""
        result = super().step(sampled, training, acceptance)
        assert result.acceptance is not None
        taken = [a.client for a in result.acceptance.answers if a.fate == "accepted"]
        self.line.acked |= dict.fromkeys(taken, self.round)
        return result

    def _collect(
        self,
        message: Broadcast,
        sampled: tuple[int, ...],
        training: tuple[int, ...],
        acceptance: Acceptance | None,
    ) -> Collected:
        """Asks those that train for their replies; who gives none, or a bad one, took no part."""
        begin, number = time.monotonic(), self.round + 1
        packets: dict[int, Packet] = {}
        payloads: dict[int, TensorDict] = {}
        for group, where in by_group(self.groups, training):
            for k in where:
                client = training[k]
                payloads[client] = one_payload(message_for(message, group, (k,)))
                facts = self._question(client, number, attempt=secrets.token_hex(8))
                packets[client] = Packet("train", facts, flat("received", payloads[client]))
        answers = self.asked(packets, self.line.settings.round_seconds)
        parts: list[Trained] = []
        for group, where in by_group(self.groups, training):
            ids = [training[k] for k in where]
            like, named = self._reply_like(group, ids[0], payloads[ids[0]])
            good: list[tuple[int, Packet]] = []
            for client in ids:
                answers[client] = self._judged(
                    client, answers[client], packets[client], like, named, payloads[client]
                )
                packet = answers[client].packet
                if packet is not None:
                    good.append((client, packet))
            if good:
                there = [where[ids.index(client)] for client, _ in good]
                parts.append(self._part(group, good, message_for(message, group, there)))
        told = tuple(self._told(client, answers[client]) for client in sorted(answers))
        return Collected(parts, Acceptance(number, sampled, told, time.monotonic() - begin, simulated=False))

    def _told(self, client: int, answer: Answer) -> Became:
        """What the trace says of a client."""
        fate: Fate = "accepted" if answer.fate == "answered" else answer.fate
        reason = NOT_FINITE if answer.code == "not-finite" else answer.reason
        return Became(client, fate, answer.seconds, "" if fate == "accepted" else reason)

    def _reply_like(
        self, group: Group, client: int, payload: TensorDict
    ) -> tuple[dict[str, Tensor], set[str]]:
        """What a reply of a group looks like, and the names of the numbers beside it; no sample is looked at."""
        _, (_, replies, metrics) = counted(group, self.cohort((client,)), payload, self.local)
        return dict(tree.leaves(replies[0])), {name for name, _ in tree.leaves(metrics)} - {WORK}

    def _judged(
        self,
        client: int,
        answer: Answer,
        asked: Packet,
        like: Mapping[str, Tensor],
        named: set[str],
        payload: TensorDict,
    ) -> Answer:
        """Returns an answer, or in its place a refusal that says what is wrong with it."""
        name, number, packet = self.federation.names[client], self.round + 1, answer.packet
        if packet is None:
            log.warning("round %d: '%s' takes no part: %s", number, name, answer.reason)
            return answer
        try:
            if packet.fact("digest", str) != self.line.digest:
                raise MessageError("its reply is of another job, model or method")
            if packet.fact("round", int) != number or packet.fact("attempt", str) != asked.facts["attempt"]:
                raise MessageError(
                    f"its reply is of round {packet.facts['round']}, or of an earlier question"
                )
            reply = {n.removeprefix("reply/"): t for n, t in packet.tensors.items()}
            same_shape(reply, like, "its reply")
            bad = all_finite(reply)
            if bad:
                raise MessageError(f"its reply holds NaN or infinity in '{bad}'")
            check_norm(reply, payload, self.line.settings.max_norm)
            if metrics_of(packet).keys() != named:
                raise MessageError(f"it reports other numbers than {', '.join(sorted(named)) or 'none'}")
            if not 0 <= packet.fact("gradients", int) < 2**53:
                raise MessageError("a message 'train' has no usable 'gradients': no number of samples")
            uses_from_facts(packet.fact("uses", list))
        except MessageError as error:
            log.warning("round %d: the reply of '%s' is refused: %s", number, name, error)
            return replace(answer, packet=None, fate="refused", reason=str(error), code="reply")
        return answer

    def _part(
        self, group: Group, good: Sequence[tuple[int, Packet]], message: TensorDict | PerClient
    ) -> Trained:
        """The part of a round that clients of a group are, from their replies."""
        replies = stacked([dict(tree.leaves(packet.part("reply"))) for _, packet in good])
        work = [torch.tensor(packet.fact("gradients", int)) for _, packet in good]
        metrics = stacked([{**metrics_of(p), WORK: w} for (_, p), w in zip(good, work, strict=True)])
        record = self._record()
        if record is not None:
            record.uses = {client: uses_from_facts(packet.facts["uses"]) for client, packet in good}
        found = Updates(replies, metrics, torch.ones(len(good), dtype=torch.bool))
        return self.trained(group, tuple(client for client, _ in good), found, message, record)

    # -- evaluation -----------------------------------------------------------------------------------------

    def questions_about_models(self, kind: Any, clients: Sequence[int], **more: Any) -> dict[int, Packet]:
        """Returns for every client what it needs to make the model that it deploys, as a packet of a kind."""
        found: dict[int, Packet] = {}
        for group, where in by_group(self.groups, clients):
            shared = self.global_model(group.name)
            for k in where:
                client = clients[k]
                facts = self._question(client, self.round, has_global=shared is not None, **more)
                received = one_payload(self._deployment_message(group, (client,), None))
                parts = flat("received", received) | ({} if shared is None else flat("global", shared))
                found[client] = Packet(kind, facts, parts)
        return found

    def dump(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Adds whose replies were accepted last, and when."""
        tensors, facts = super().dump()
        return tensors, {**facts, "acked": {str(c): r for c, r in self.line.acked.items()}}

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restores what `dump` returned."""
        super().load(tensors, facts)
        self.line.acked = {int(c): int(r) for c, r in facts["acked"].items()}


def evaluate_remotely(
    sim: Simulation,
    protocol: Protocol,
    participants: Sequence[int] = (),
    selection: Selection | None = None,
    kept: Kept | None = None,
) -> list[Record]:
    """Returns the records of all clients that answer, each measured by itself on its own parts.

    `selection` and `kept` would be of samples that are elsewhere: there are none.
    """
    assert isinstance(sim, Remote)
    clients = range(sim.federation.num_clients)
    packets = sim.questions_about_models("evaluate", clients, sets=list(protocol.sets))
    answers = sim.asked(packets, sim.line.settings.round_seconds)
    sim.line.evaluation_bytes += sum(a.bytes_down + a.bytes_up for a in answers.values())
    records: list[Record] = []
    for client, answer in answers.items():
        name = sim.federation.names[client]
        if answer.packet is None:
            log.warning("round %d: '%s' was not evaluated: %s", sim.round, name, answer.reason)
            continue
        try:
            records += records_of(answer.packet, client, sim.round)
            uses = uses_from_facts(answer.packet.fact("uses", list))
            if uses:
                sim.ledger.settle("deployment", {client: uses})
        except MessageError as error:
            log.warning("round %d: the evaluation of '%s' is refused: %s", sim.round, name, error)
    if "participants" in protocol.sets:
        took = set(participants)
        records += [
            {**row, "set": "participants"}
            for row in records
            if row["set"] == "local" and row["client"] in took
        ]
    return sorted(records, key=lambda row: (row["model"], row["set"], row["client"]))


def records_of(packet: Packet, client: int, round: int) -> list[Record]:
    """Returns the records that a client sent. Raises MessageError where they are none of its own."""
    found: list[Record] = []
    for row in packet.fact("records", list):
        if not isinstance(row, dict) or row.get("client") != client or row.get("round") != round:
            raise MessageError(f"a record is not of client {client} after round {round}: {str(row)[:80]}")
        if row.get("set") not in ("val", "local") or row.get("model") not in ("personal", "global"):
            raise MessageError(f"a record is of no set or model that was asked for: {str(row)[:80]}")
        numbers = {k: math.nan if v is None else v for k, v in row.items()}
        if any(not isinstance(v, str) and not is_number(v) for v in numbers.values()):
            raise MessageError(f"a record holds something else than numbers: {str(row)[:80]}")
        found.append(numbers)
    return found


def metrics_of(packet: Packet) -> dict[str, Tensor]:
    """Returns the numbers that a client reports, 0-d. Raises MessageError where they are none."""
    found = packet.fact("metrics", dict)
    if any(not is_number(v) and v is not None for v in found.values()):
        raise MessageError(f"what it reports is no number: {str(found)[:80]}")
    return {str(k): torch.tensor(math.nan if v is None else float(v)) for k, v in found.items()}


def is_number(value: Any) -> bool:
    """Whether a value that came as JSON is a number that fits into a float."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**53)


def one_payload(message: TensorDict | PerClient) -> TensorDict:
    """Returns what one client gets of a message that is meant for it alone."""
    if isinstance(message, PerClient):
        (row,) = message.rows
        payload: TensorDict = message.payloads[row]
        return payload
    return message


def check_norm(reply: Mapping[str, Tensor], payload: TensorDict, bound: float | None) -> None:
    """Raises MessageError where a reply changes what was sent by more than `bound` (L2 norm of all numbers)."""
    if bound is None:
        return
    sent, square = dict(tree.leaves(payload)), 0.0
    for name, tensor in reply.items():
        if tensor.is_floating_point():
            like = sent.get(name)
            change = tensor if like is None or like.shape != tensor.shape else tensor - like
            square += float(change.double().square().sum())
    if math.sqrt(square) > bound:
        raise MessageError(
            f"its reply changes what was sent by {math.sqrt(square):.3g} (L2 norm), more than deploy.max_norm = "
            f"{bound:g}"
        )


def stacked(parts: Sequence[Mapping[str, Tensor]]) -> TensorDict:
    """Returns tensors of several clients, [clients, ...]; only those that all have."""
    names = [n for n in parts[0] if all(n in part for part in parts)]
    return tree.nest(((n, torch.stack([part[n] for part in parts])) for n in names), [len(parts)])
