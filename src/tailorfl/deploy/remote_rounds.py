"""The server's half of the rounds with remote clients: a `rounds.Simulation` that asks instead of computing."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, count
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.messages import PerClient
from tailorfl.data.federation import Federation
from tailorfl.deploy.checks import (
    change_of,
    check_change,
    check_uses,
    largest_changes,
    metrics_of,
    stacked,
)
from tailorfl.deploy.client_state import NEVER
from tailorfl.deploy.connected_clients import ConnectedClients, QuestionOutcome, named
from tailorfl.deploy.membership import DescribedClients, Membership, agreement_of
from tailorfl.deploy.messages import LEFT, Packet, all_finite, flat, same_shape, uses_from_facts
from tailorfl.engines.base import CohortUpdates
from tailorfl.errors import DivergenceError, MessageError, RunError, TailorflError
from tailorfl.printable import visible
from tailorfl.privacy import Uses
from tailorfl.rounds.groups import Group, by_group, gather, message_for
from tailorfl.rounds.one_round import WORK, RoundResult, RoundState, Trained, counted
from tailorfl.rounds.participation import NOT_FINITE, TOO_FEW, ClientOutcome, RoundTrace, sample_clients
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.job import Job
from tailorfl.training import tree

log = logging.getLogger(__name__)

LOOK = 0.2
"""Seconds between two checks whether clients have come (back)."""
OTHER_SETTINGS = "its model or settings differ from the server's for the same experiment"
"""The reason for refusing a client that returns another digest of the agreement."""


class RemoteRounds(Simulation):
    """A simulation that asks remote clients; `attach` must be called right after it is made.

    Attributes:
        job: the job.
        connected: the clients that can be reached.
        clients: the clients' descriptions, in the order in which they joined.
        membership: the clients that have left or may join.
        admit: lets the connected clients join that may.
        acked: client -> the last round (from 1) in which its reply was accepted.
        changes: client -> the largest change of its accepted replies.
        announced: number of clients that the trace has announced.
        gone: names of the clients that have left for good.
        empty_places: number of clients that were excluded from the start but keep their numbers.
    """

    job: Job
    connected: ConnectedClients
    clients: DescribedClients
    membership: Membership
    admit: Callable[[], None]
    acked: dict[int, int]
    changes: dict[int, float]
    announced: int = 0
    gone: AbstractSet[str] = frozenset()
    empty_places: int = 0

    def attach(
        self,
        job: Job,
        connected: ConnectedClients,
        clients: DescribedClients,
        membership: Membership,
        admit: Callable[[], None],
    ) -> None:
        """Set the attributes that connect the simulation with its clients."""
        self.job, self.connected, self.membership, self.admit = job, connected, membership, admit
        self.gone, self.acked, self.changes = membership.gone, {}, {}
        self.empty_places = len(job.config.data.excluded_clients)
        self._agree_with(clients)

    def _agree_with(self, clients: DescribedClients) -> None:
        self.clients = clients
        self._agreements = {i: agreement_of(self.job, clients, i) for i in accumulate(clients.groups)}
        self._digests = {first: agreement.digest(self) for first, agreement in self._agreements.items()}

    def take_in(self, federation: Federation, clients: DescribedClients) -> None:
        """Let a client take part from the next round on. Raises ConfigError if the method does not allow it."""
        self.extend(federation)
        self._agree_with(clients)

    @property
    def members(self) -> list[int]:
        """The clients that have not left."""
        return [i for i in range(self.participants) if self.federation.names[i] not in self.gone]

    def needed(self, clients: Collection[int]) -> int:
        """Return how many of these clients must answer: `deploy.min_replies`, by default a majority."""
        return self.job.config.deploy.min_replies or (len(clients) // 2 + 1 if clients else 0)

    def digest(self, client: int) -> str:
        """Return the digest of the job in a client's messages."""
        return self._digests[self.clients.known_to(client)]

    # -- questions ------------------------------------------------------------------------------------------

    def asked(self, packets: Mapping[int, Packet]) -> dict[int, QuestionOutcome]:
        """Ask clients; send the job to those that do not know it (any more) and ask them again."""
        self.connected.refresh()
        answers = self._exchange(packets)
        new = [i for i, answer in answers.items() if answer.code == "unknown-job"]
        if new:
            agreed = self.set_up(new)
            again = {i: packets[i] for i in new if agreed[i].packet is not None}
            answers |= agreed | self._exchange(again)
        return answers

    def _exchange(self, packets: Mapping[int, Packet]) -> dict[int, QuestionOutcome]:
        names, seconds = self.federation.names, self.job.config.deploy.round_seconds
        answers = self.connected.ask({names[i]: packet for i, packet in packets.items()}, seconds)
        leavers = [name for name, answer in answers.items() if answer.code == LEFT]
        self.membership.leave(leavers, self.connected.notify)
        return {i: answers[names[i]] for i in packets}

    def set_up(self, clients: Sequence[int]) -> dict[int, QuestionOutcome]:
        """Send clients the job, and return their answers."""
        agreements = {i: self._agreements[self.clients.known_to(i)] for i in clients}
        answers = self._exchange(
            {i: Packet("setup", agreement.facts()) for i, agreement in agreements.items()}
        )
        for i, answer in answers.items():
            if answer.packet is not None and answer.packet.facts.get("digest") != self.digest(i):
                answers[i] = QuestionOutcome(None, "refused", OTHER_SETTINGS, "fingerprint")
            if answers[i].packet is None:
                log.warning("client '%s' has not agreed: %s", self.federation.names[i], answers[i].reason)
        return answers

    def _question(self, client: int, round: int, **more: Any) -> dict[str, Any]:
        return {
            "digest": self.digest(client),
            "round": round,
            "acked": self.acked.get(client, NEVER),
            "restart": self.job.config.deploy.lost_state == "restart",
            **more,
        }

    def until_enough(
        self,
        ask: Callable[[Sequence[int]], Mapping[int, QuestionOutcome]],
        clients: Sequence[int],
        counting: Collection[int],
        what: str,
    ) -> dict[int, QuestionOutcome]:
        """Ask clients until enough of those that count have answered; until then the run is paused.

        Args:
            ask: asks clients and returns the outcome for each.
            clients: the clients to ask.
            counting: the clients whose answers count.
            what: the paused step, for messages.

        Raises:
            RunError: too few have answered within `deploy.wait_seconds`.
        """
        answers, names, limit = dict(ask(clients)), self.federation.names, self.job.config.deploy.wait_seconds
        begin = time.monotonic()
        for attempt in count():
            staying = [i for i in counting if names[i] not in self.gone]
            needed, replies = self.needed(staying), sum(answers[i].replied for i in staying)
            if replies >= needed:
                break
            missing = [i for i in clients if not answers[i].replied and names[i] not in self.gone]
            waited = time.monotonic() - begin
            if waited > limit or len(staying) < needed:
                reasons = "; ".join(f"'{names[i]}' ({answers[i].reason})" for i in missing[:10])
                raise RunError(
                    f"{what} needs {needed} answers and has {replies}, after a pause of {waited:.0f} s; without an "
                    f"answer: {reasons}. The same command continues from here; deploy.min_replies sets how many "
                    "answers are needed, deploy.wait_seconds how long to wait for them"
                )
            if not attempt:
                self.connected.notify(
                    f"{what} is paused: {needed} answers are needed; waiting for {named([names[i] for i in missing])}, "
                    f"at most {limit:.0f} s"
                )
            time.sleep(LOOK)
            # The cause of a refusal may take long to fix: such clients are asked again after 1, 2, 4, 8, ... checks.
            asks_all = attempt & (attempt + 1) == 0
            answers |= ask([i for i in missing if asks_all or answers[i].fate != "refused"])
        if attempt:
            self.connected.notify(f"{what} continues")
        return answers

    # -- a round --------------------------------------------------------------------------------------------

    @property
    def is_traced(self) -> bool:
        """Always true: the outcome of every client is stored."""
        return True

    def step(
        self,
        sampled: tuple[int, ...] | None = None,
        training: tuple[int, ...] | None = None,
        trace: RoundTrace | None = None,
    ) -> RoundResult:
        """Run the next round with the connected clients; note whose replies were accepted."""
        self._changes: dict[int, float] = {}
        self._expected: dict[str, tuple[Mapping[str, Tensor], set[str]]] = {}
        self.membership.leave((), self.connected.notify)
        self.admit()
        result = super().step(sampled, training, trace)
        assert result.trace is not None
        for client in (a.client for a in result.trace.answers if a.fate == "accepted"):
            self.acked[client] = self.round
            self.changes[client] = max(self.changes.get(client, 0.0), self._changes[client])
        self.announced = len(self.clients.names)
        return result

    def sample(self, round: int) -> tuple[int, ...]:
        """Return the clients of a round, sampled from those that have not left."""
        members = self.members
        if len(members) == self.participants - self.empty_places:
            return super().sample(round)
        sizes = self.population.sizes[members]
        drawn = sample_clients(self.seed, round, sizes, self.fraction, self.sampling) if members else ()
        return tuple(members[k] for k in drawn)

    def trainees(self, sampled: tuple[int, ...]) -> tuple[int, ...]:
        """Return the clients that train and have not left."""
        members = set(self.members)
        return tuple(i for i in super().trainees(sampled) if i in members)

    def collect(self, current: RoundState) -> list[Trained]:
        """Ask the clients that train for their replies; a client without a valid reply takes no part."""
        message, training = current.message, current.training
        begin, number = time.monotonic(), self.round + 1
        packets: dict[int, Packet] = {}
        payloads: dict[int, TensorDict] = {}
        for group, positions in by_group(self.groups, training):
            for k in positions:
                client = training[k]
                payloads[client] = one_payload(message_for(message, group, (k,)))
                facts = self._question(client, number, attempt=secrets.token_hex(8))
                packets[client] = Packet("train", facts, flat("received", payloads[client]))

        def ask(clients: Sequence[int]) -> dict[int, QuestionOutcome]:
            answers = self.asked({i: packets[i] for i in clients})
            for group, positions in by_group(self.groups, clients):
                ids = tuple(clients[k] for k in positions)
                received = message_for(message, group, [training.index(client) for client in ids])
                answers |= self._judged(group, {i: answers[i] for i in ids}, packets, payloads, received)
            return answers

        answers = self.until_enough(ask, training, current.sampled, f"round {number}")
        parts: list[Trained] = []
        for group, positions in by_group(self.groups, training):
            replies = {training[k]: answers[training[k]].packet for k in positions}
            if self.client_dp is not None:
                hidden = [client for client in replies if answers[client].code == "not-finite"]
                replies |= {client: self._not_finite(group, payloads[client]) for client in hidden}
            replying = [k for k in positions if replies[training[k]] is not None]
            if replying:
                parts.append(self._part(group, replies, message_for(message, group, replying)))
        if training and not parts and any(a.code == "not-finite" for a in answers.values()):
            raise DivergenceError(
                f"round {number}: all clients that answered diverged (updates are NaN or infinite); lower train.lr"
            )
        outcomes = tuple(_outcome(client, answers[client]) for client in sorted(answers))
        joined = self.clients.joined_after(self.announced)
        seconds = time.monotonic() - begin
        current.trace = RoundTrace(number, current.sampled, outcomes, seconds, simulated=False, joined=joined)
        return parts

    def _judged(
        self,
        group: Group,
        answers: Mapping[int, QuestionOutcome],
        packets: Mapping[int, Packet],
        payloads: Mapping[int, TensorDict],
        message: TensorDict | PerClient,
    ) -> dict[int, QuestionOutcome]:
        """Return the answers of a group's clients, with each bad one replaced by a refusal that names its problem."""
        judged, changes = dict(answers), dict[int, float]()
        # The structure of a reply, and the uses of private samples, from a dry run that reads no sample.
        ids = tuple(answers) if self.train.dp is not None else tuple(answers)[:1]
        dry = message_for(message, group, range(len(ids)))
        record, (_, replies, metrics) = counted(group, self.cohort(ids), dry, self.local)
        like, names = dict(tree.leaves(replies[0])), {name for name, _ in tree.leaves(metrics)} - {WORK}
        self._expected[group.name] = like, names

        @contextmanager
        def refusing(client: int) -> Iterator[None]:
            try:
                yield
            except MessageError as error:
                judged[client] = replace(
                    answers[client], packet=None, fate="refused", reason=visible(str(error)), code="reply"
                )

        for client, answer in answers.items():
            if answer.packet is not None:
                with refusing(client):
                    attempt, payload = packets[client].facts["attempt"], payloads[client]
                    changes[client] = self._checked(client, answer.packet, attempt, like, names, payload)
                    check_uses(answer.packet, record.uses.get(client, Uses()))
        numbered = any(not t.is_floating_point() for t in like.values())
        for client, largest in self._largest(group, changes).items():
            with refusing(client):
                check_change(changes[client], largest)
                if numbered:
                    self._try(group, client, answers[client].packet, payloads[client])
                self._changes[client] = changes[client]
        for client, answer in judged.items():
            if answer.packet is None:
                name = self.federation.names[client]
                log.warning("round %d: '%s' takes no part: %s", self.round + 1, name, answer.reason)
        return judged

    def _checked(
        self,
        client: int,
        packet: Packet,
        attempt: str,
        like: Mapping[str, Tensor],
        names: set[str],
        payload: TensorDict,
    ) -> float:
        """Return the size of a reply's change. Raises MessageError if it is not a valid reply to this question."""
        if packet.fact("digest", str) != self.digest(client):
            raise MessageError("its reply is for another job, model or method")
        if packet.fact("round", int) != self.round + 1 or packet.fact("attempt", str) != attempt:
            raise MessageError(f"its reply is for round {packet.facts['round']}, or for an earlier question")
        reply = {n.removeprefix("reply/"): t for n, t in packet.tensors.items() if n.startswith("reply/")}
        if others := packet.tensors.keys() - {f"reply/{n}" for n in reply}:
            raise MessageError(f"its reply has '{min(others)[:80]}', which was not requested")
        same_shape(reply, like, "its reply")
        if path := all_finite(reply):
            raise MessageError(f"its reply contains NaN or infinity in '{path}'")
        metrics_of(packet, names, self._may_lack(client))
        if not 0 <= packet.fact("gradients", int) < 2**53:
            raise MessageError("a message 'train' has no usable 'gradients': it is not a number of samples")
        return change_of(reply, payload)

    def _not_finite(self, group: Group, payload: TensorDict) -> Packet:
        """Return a reply that is not finite, in place of the one that a client keeps to itself.

        Under client-level privacy it counts as zero, as in a simulation: leaving the client out would reveal it.
        """
        (like, names), sent = self._expected[group.name], dict(tree.leaves(payload))
        reply = {
            name: torch.full_like(t, math.nan) if t.is_floating_point() else sent.get(name, t)
            for name, t in like.items()
        }
        facts = {"metrics": dict.fromkeys(names), "gradients": 0, "uses": []}
        return Packet("train", facts, {f"reply/{name}": t for name, t in reply.items()})

    def _try(self, group: Group, client: int, packet: Packet | None, payload: TensorDict) -> None:
        """Raise MessageError if a reply cannot be aggregated because its integers are invalid indices."""
        try:
            part = self._part(group, {client: packet}, payload)
            self.method.aggregate(self.server, gather({group.name: self.replies(part)}))
        except (TailorflError, RuntimeError, LookupError, ValueError, TypeError, OverflowError) as error:
            raise MessageError(
                f"its reply cannot be aggregated: {type(error).__name__}: {error}"[:300]
            ) from error

    def _may_lack(self, client: int) -> bool:
        """Return whether a client has no training or validation samples, so that a loss may be NaN."""
        return not all(len(part[client]) for part in (self.federation.train, self.federation.val))

    def _largest(self, group: Group, changes: Mapping[int, float]) -> dict[int, float]:
        """Return the largest allowed changes of a group's clients, from all accepted changes and the present ones.

        Client-level privacy clips every update, and requires that no reply decides whether another one counts.
        """
        bound = self.job.config.deploy.max_norm
        if bound == "auto" and self.client_dp is None:
            latest = {**changes, **self._changes, **self.changes}
            latest = {i: change for i, change in latest.items() if i in group.clients}
            largest = largest_changes(latest, {i: int(self.population.sizes[i]) for i in latest})
            return {i: largest[i] for i in changes}
        return dict.fromkeys(changes, bound if isinstance(bound, float) else math.inf)

    def _part(
        self, group: Group, answers: Mapping[int, Packet | None], message: TensorDict | PerClient
    ) -> Trained:
        """Return a group's part of a round, from its clients' replies."""
        packets = {client: packet for client, packet in answers.items() if packet is not None}
        replies = stacked([dict(tree.leaves(packet.part("reply"))) for packet in packets.values()])
        metrics = [
            {**metrics_of(p, p.facts["metrics"], True), WORK: torch.tensor(p.fact("gradients", int))}
            for p in packets.values()
        ]
        record = self.new_record()
        if record is not None:
            record.uses = {i: uses_from_facts(packet.facts["uses"]) for i, packet in packets.items()}
        finite = torch.tensor([not all_finite(packet.tensors) for packet in packets.values()])
        updates = CohortUpdates(replies, stacked(metrics), finite)
        return self.trained(group, tuple(packets), updates, message, record)

    # -- models ---------------------------------------------------------------------------------------------

    def questions_about_models(self, kind: Any, clients: Sequence[int], **more: Any) -> dict[int, Packet]:
        """Return for each client a packet of a kind with all that it needs to make the model that it deploys."""
        questions: dict[int, Packet] = {}
        for group, positions in by_group(self.groups, clients):
            shared = self.global_model(group.name)
            for k in positions:
                client = clients[k]
                facts = self._question(client, self.round, has_global=shared is not None, **more)
                received = one_payload(self.deployment_message(group, (client,), None))
                parts = flat("received", received) | ({} if shared is None else flat("global", shared))
                questions[client] = Packet(kind, facts, parts)
        return questions

    # -- checkpoints ----------------------------------------------------------------------------------------

    def dump(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Add each client's last accepted round, its largest accepted change, and the announced clients."""
        tensors, facts = super().dump()
        acked, changes = ({str(i): v for i, v in of.items()} for of in (self.acked, self.changes))
        return tensors, {**facts, "acked": acked, "changes": changes, "announced": self.announced}

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restore what `dump` returned."""
        super().load(tensors, facts)
        self.acked = {int(i): int(r) for i, r in facts["acked"].items()}
        self.changes = {int(i): float(v) for i, v in facts.get("changes", {}).items()}
        self.announced = int(facts.get("announced", self.participants))


def _outcome(client: int, answer: QuestionOutcome) -> ClientOutcome:
    """Return a client's entry in the trace."""
    if answer.fate == "answered":
        return ClientOutcome(client, "accepted", answer.seconds, "")
    reason = answer.reason
    if answer.code == "not-finite":
        reason = NOT_FINITE
    elif reason in (NOT_FINITE, TOO_FEW):  # a client's own words must not decide about the round
        reason = f"it says: {reason}"
    return ClientOutcome(client, answer.fate, answer.seconds, reason)


def one_payload(message: TensorDict | PerClient) -> TensorDict:
    """Return the payload of a message for a single client."""
    if isinstance(message, PerClient):
        (row,) = message.rows
        payload: TensorDict = message.payloads[row]
        return payload
    return message
