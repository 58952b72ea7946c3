"""The connected nodes and the clients behind them, and questions to many of them at once, with a time limit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from tailorfl.data.source import LONGEST_NAME, clean_name
from tailorfl.deploy.messages import (
    LARGEST,
    NO_METRICS,
    PROTOCOL,
    SAME_MINOR,
    VERSION,
    Arrival,
    Letter,
    LetterKind,
    Packet,
    Transport,
    compatible,
)
from tailorfl.errors import MessageError, first_few
from tailorfl.printable import visible

log = logging.getLogger(__name__)

PATIENCE = 0.02
"""Seconds between two checks for answers."""
HELLO_SECONDS = 60.0
"""Seconds in which a new node must say who it is."""
DOUBT_SECONDS = 15.0
"""Seconds in which a client must answer if another one has come under its name."""
KINDS: dict[str, LetterKind] = {"train": "train", "evaluate": "evaluate", "finish": "evaluate"}

Fate = Literal["answered", "refused", "late", "lost", "unavailable"]
"""The outcome of a question: an answer; a refusal, by either side; no answer in time; the node or the transport failed;
the client could not be asked."""


@dataclass(frozen=True)
class QuestionOutcome:
    """The outcome of a question to one client.

    Attributes:
        packet: the answer, if there is one.
        fate: the outcome in a word.
        reason: a sentence that says why there is no answer.
        code: the reason of a refusal as a word for programs.
        seconds: seconds until the answer came.
    """

    packet: Packet | None
    fate: Fate
    reason: str = ""
    code: str = ""
    seconds: float = 0.0

    @property
    def replied(self) -> bool:
        """Whether the client did its part, even if its training diverged or its policy withholds its metrics."""
        return self.packet is not None or self.code in ("not-finite", NO_METRICS)


class ConnectedClients:
    """The clients that can be reached through a transport.

    Args:
        post: the transport of packets.
        largest: largest number of bytes of an answer.
        notify: called with a sentence when a client comes, goes, or is turned away.
    """

    def __init__(
        self, post: Transport, largest: int = LARGEST, notify: Callable[[str], None] = lambda sentence: None
    ) -> None:
        self.post, self.largest, self.notify = post, largest, notify
        self._names: dict[int, str] = {}
        self._refused: set[int] = set()
        self._late: dict[str, int] = {}  # ticket of a letter that was not answered in time -> its node
        self._silent: set[int] = set()  # the nodes of such letters that have not answered since
        self._probes: dict[
            str, tuple[int, float]
        ] = {}  # ticket of a hello to such a node -> node, time limit
        self._present: frozenset[str] = frozenset()
        self._members: tuple[str, ...] | None = None
        self._allowed: Callable[[], Collection[str]] = tuple

    def close_to(self, names: Sequence[str], allowed: Callable[[], Collection[str]] = tuple) -> None:
        """Fix the federation's clients: from now on others are turned away, except those that `allowed` returns."""
        self._members, self._allowed = tuple(names), allowed

    def refresh(self, seconds: float = HELLO_SECONDS) -> frozenset[str]:
        """Return the names of the connected clients; new nodes have `seconds` to say who they are."""
        nodes = self.post.nodes()
        self._probe()
        self._names = {node: name for node, name in self._names.items() if node in nodes}
        self._refused &= set(nodes)
        self._silent &= set(nodes)
        new = [n for n in nodes if n not in self._names and n not in self._refused and not self._waits(n)]
        # One of each certificate at a time: to tell namesakes apart takes up to DOUBT_SECONDS for each.
        new = list({nodes[node] or node: node for node in new}.values())
        for node, answer in self._exchange(dict.fromkeys(new, _HELLO), seconds).items():
            self._meet(node, answer, nodes[node])
        present = frozenset(self._names.values())
        for name in sorted(present - self._present):
            self.notify(f"client '{name}' is connected ({len(present)} in all)")
        for name in sorted(self._present - present):
            self.notify(f"client '{name}' is gone")
        self._present = present
        return present

    def _meet(self, node: int, answer: QuestionOutcome, registered: str) -> None:
        if answer.packet is None:
            if answer.fate == "refused":
                self._turn_away(node, answer.reason)
            return
        try:
            name = answer.packet.fact("name", str)
            version, torch_version = (visible(answer.packet.fact(key, str)) for key in ("version", "torch"))
            if clean_name(name) != name:
                raise MessageError(
                    f"its name '{visible(name[:80])}' has control characters, or more than {LONGEST_NAME} of any"
                )
            if not compatible(version):
                raise MessageError(f"it has tailorfl {version[:40]}, the server {VERSION}: {SAME_MINOR}")
            if (version, torch_version) != (VERSION, torch.__version__):
                self.notify(
                    f"client '{name[:80]}' has tailorfl {version[:40]} and torch {torch_version[:40]}, the server "
                    f"{VERSION} and {torch.__version__}: a replay of the trace is equal to rounding, not to the bit"
                )
            if registered and name != registered:
                raise MessageError(f"it calls itself '{name[:80]}', but its key is that of '{registered}'")
            if self._members is not None and name not in (*self._members, *self._allowed()):
                raise MessageError(
                    f"the federation began without '{name[:80]}': it has {len(self._members)} clients, "
                    f"{', '.join(self._members)[:200]}"
                )
        except MessageError as error:
            self._turn_away(node, str(error))
            return
        for namesake in self._nodes_of(name):
            if self._waits(namesake):
                return  # unclear which of them is alive: asked again when the old one is done or given up
            if self._exchange({namesake: _HELLO}, DOUBT_SECONDS)[namesake].packet is not None:
                self._turn_away(node, f"a client '{name}' is connected already")
                return
            del self._names[namesake]
        self._names[node] = name

    def _nodes_of(self, name: str) -> list[int]:
        return [node for node, taken in self._names.items() if taken == name]

    def leave_out(self, name: str, reason: str) -> None:
        """Turn away the client of this name."""
        for node in self._nodes_of(name):
            del self._names[node]
            self._turn_away(node, f"'{name}': {reason}")
        self._present -= {name}

    def _turn_away(self, node: int, reason: str) -> None:
        """Tell a node why it is turned away, without waiting for its answer."""
        self._refused.add(node)
        self.notify(f"a node is turned away: {reason}")
        self.post.send([Letter(node, "query", goodbye(reason).encoded())], HELLO_SECONDS)

    def ask(self, questions: Mapping[str, Packet], seconds: float) -> dict[str, QuestionOutcome]:
        """Ask each client its own question, for at most `seconds`, and return the outcome of each."""
        nodes = {name: node for node, name in self._names.items()}
        reached = {name: nodes[name] for name in questions if name in nodes and not self._waits(nodes[name])}
        outcomes = self._exchange({node: questions[name] for name, node in reached.items()}, seconds)
        answers: dict[str, QuestionOutcome] = {}
        for name in questions:
            if name in reached:
                answers[name] = outcomes[reached[name]]
            else:
                reason = "still answering an earlier question" if name in nodes else "not connected"
                answers[name] = QuestionOutcome(None, "unavailable", reason)
        return answers

    def _received(self, tickets: Collection[str]) -> list[Arrival]:
        """Return the answers to these letters, each once, whatever else the transport delivers."""
        arrivals: dict[str, Arrival] = {}
        for arrival in self.post.receive(list(tickets)):
            if arrival.ticket in tickets:
                arrivals.setdefault(arrival.ticket, arrival)
        return list(arrivals.values())

    def _waits(self, node: int) -> bool:
        """Return whether a node may still be working on a letter that it has not answered in time."""
        for arrival in self._received(self._late):
            late = self._late.pop(arrival.ticket)
            if arrival.body is not None:
                self._silent.discard(late)
                log.info(
                    "an answer from '%s' came too late and is not used",
                    self._names.get(late, "a former client"),
                )
        return node in self._silent

    def _probe(self) -> None:
        """Ask the nodes that have not answered in time who they are: one that answers is free again.

        Its late answer may never come: Flower drops an answer for which nobody waits any more, and forgets the letters
        of a restarted node.
        """
        begin = time.monotonic()
        for arrival in self._received(self._probes):
            free, _ = self._probes.pop(arrival.ticket)
            if arrival.body is not None:
                self._silent.discard(free)
        self._probes = {t: (n, until) for t, (n, until) in self._probes.items() if until > begin}
        probed = {node for node, _ in self._probes.values()}
        letters = [Letter(node, "query", _HELLO.encoded()) for node in sorted(self._silent - probed)]
        tickets = self.post.send(letters, HELLO_SECONDS) if letters else []
        for ticket, letter in zip(tickets, letters, strict=True):
            if ticket:
                self._probes[ticket] = (letter.node, begin + HELLO_SECONDS)

    def _exchange(self, packets: Mapping[int, Packet], seconds: float) -> dict[int, QuestionOutcome]:
        begin = time.monotonic()
        letters = [Letter(n, KINDS.get(p.kind, "query"), p.encoded()) for n, p in packets.items()]
        tickets = self.post.send(letters, seconds) if letters else []
        pending: dict[str, Letter] = {}
        outcomes: dict[int, QuestionOutcome] = {}
        for ticket, letter in zip(tickets, letters, strict=True):
            if ticket:
                pending[ticket] = letter
            else:
                outcomes[letter.node] = QuestionOutcome(None, "lost", "the message could not be sent")
        is_over = False
        while pending and not is_over:
            # Answers that came while this machine slept are still accepted. If the transport gave a letter up when its
            # time ended, that only means that there was no answer in time.
            is_over = time.monotonic() - begin >= seconds
            for arrival in self._received(pending):
                if is_over and arrival.body is None:
                    continue
                letter = pending.pop(arrival.ticket)
                waited = time.monotonic() - begin
                outcomes[letter.node] = self._read(arrival, packets[letter.node].kind, waited)
            if pending and not is_over:
                time.sleep(PATIENCE)
        for ticket, letter in pending.items():
            # It may still be working on it: it is not asked again before it answers that, or a hello.
            self._late[ticket] = letter.node
            self._silent.add(letter.node)
            waited = time.monotonic() - begin
            reason = f"no answer in {waited:.0f} s"
            outcomes[letter.node] = QuestionOutcome(None, "late", reason, seconds=waited)
        return outcomes

    def _read(self, arrival: Arrival, kind: str, seconds: float) -> QuestionOutcome:
        if arrival.body is None:
            return QuestionOutcome(None, "lost", arrival.problem or "the node is gone", seconds=seconds)
        try:
            packet = Packet.decoded(arrival.body, self.largest)
            if packet.kind == "failure":
                # A client's words go into the server's log and trace, whose lines it must not forge.
                reason, code = (
                    visible(packet.fact("reason", str)[:500]),
                    str(packet.facts.get("code", ""))[:40],
                )
                return QuestionOutcome(None, "refused", reason, code, seconds)
            if packet.kind != kind:
                raise MessageError(f"a question '{kind}' was answered by '{packet.kind}'")
        except MessageError as error:
            return QuestionOutcome(None, "refused", visible(str(error)), "message", seconds)
        return QuestionOutcome(packet, "answered", seconds=seconds)


_HELLO = Packet("hello", {"version": VERSION, "protocol": PROTOCOL})


def goodbye(turned_away: str = "") -> Packet:
    """Return the last message to a client: the federation has ended, or why the client is turned away."""
    return Packet("goodbye", {"turned_away": turned_away[:500]})


def named(names: Collection[str]) -> str:
    """Return clients' names as text for a message."""
    return first_few([f"'{name}'" for name in sorted(names)], 10)
