"""How packets get from the server to clients and back; a post knows nothing of what is in them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["query", "train", "evaluate"]
"""What a post calls a letter."""


@dataclass(frozen=True)
class Letter:
    """Bytes for one node."""

    node: int
    kind: Kind
    body: bytes


@dataclass(frozen=True)
class Arrival:
    """What came back for a letter.

    Attributes:
        ticket: of the letter.
        body: the answer; None where there will be none.
        problem: why there is none.
    """

    ticket: str
    body: bytes | None
    problem: str = ""


class Transport(Protocol):
    """Sends letters to nodes and brings their answers."""

    def nodes(self) -> dict[int, str]:
        """Return the nodes that can be reached now, each with the name in its certificate, or "".

        One that comes back may have another number.
        """

    def send(self, letters: Sequence[Letter], seconds: float) -> list[str]:
        """Send letters that nobody waits for longer than `seconds`; returns a ticket for each, "" where it fails."""

    def receive(self, tickets: Sequence[str]) -> list[Arrival]:
        """Return what has come back for any of these letters, without waiting. Each is brought once."""

    def close(self) -> None:
        """End it, within seconds; letters under way are lost."""


class InProcessTransport:
    """A post within this process: every node is a function from question to answer, called in a thread of its own."""

    def __init__(self, nodes: Mapping[int, Callable[[bytes], bytes]]) -> None:
        self.members = dict(nodes)
        self._one = threading.Lock()  # members share torch's random numbers and threads
        self._workers = ThreadPoolExecutor(max_workers=max(1, len(self.members)))
        self._pending: dict[str, Future[bytes]] = {}
        self._sent = 0

    def nodes(self) -> dict[int, str]:
        """Return all nodes."""
        return dict.fromkeys(sorted(self.members), "")

    def send(self, letters: Sequence[Letter], seconds: float) -> list[str]:
        """Ask every node in a thread."""
        tickets = []
        for letter in letters:
            self._sent += 1
            ticket = str(self._sent)
            self._pending[ticket] = self._workers.submit(self._asked, letter)
            tickets.append(ticket)
        return tickets

    def receive(self, tickets: Sequence[str]) -> list[Arrival]:
        """Return what is there."""
        ready = [t for t in tickets if t in self._pending and self._pending[t].done()]
        return [self._arrival(ticket) for ticket in ready]

    def close(self) -> None:
        """End the threads."""
        self._workers.shutdown(wait=True)

    def _asked(self, letter: Letter) -> bytes:
        with self._one:
            return self.members[letter.node](letter.body)

    def _arrival(self, ticket: str) -> Arrival:
        done = self._pending.pop(ticket)
        error = done.exception()
        return (
            Arrival(ticket, done.result()) if error is None else Arrival(ticket, None, type(error).__name__)
        )
