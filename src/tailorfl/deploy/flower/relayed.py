"""The post of the server's own process: it asks Flower's app, which runs beside it, through a socket of the machine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tailorfl.deploy.flower.frames import get, put
from tailorfl.deploy.post import Arrival, Letter
from tailorfl.errors import RunError


class Relayed:
    """A post through an app of Flower that connects to `path`.

    `start` is called where no app is connected (any more), to have one started; letters under way are then lost.
    """

    def __init__(self, path: Path, start: Callable[[], None], seconds: float = 120.0) -> None:
        self._start, self._seconds = start, seconds
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen(1)
        self._connection: socket.socket | None = None
        self._lost: set[str] = set()
        self._open: set[str] = set()
        self._lock = threading.Lock()

    def nodes(self) -> dict[int, str]:
        """Returns the nodes that are online, with the names of their keys."""
        found, _ = self._done({"do": "nodes"})
        return {int(node): str(name) for node, name in found or ()}

    def send(self, letters: Sequence[Letter], seconds: float) -> list[str]:
        """Sends letters."""
        about = [[one.node, one.kind, len(one.body)] for one in letters]
        sent, _ = self._done(
            {"do": "send", "letters": about, "seconds": seconds}, b"".join(one.body for one in letters)
        )
        tickets = [str(ticket) for ticket in sent or [""] * len(letters)]
        self._open |= {ticket for ticket in tickets if ticket}
        return tickets

    def receive(self, tickets: Sequence[str]) -> list[Arrival]:
        """Returns what has come back."""
        if not tickets:
            return []
        gone = [ticket for ticket in tickets if ticket in self._lost]
        found = [Arrival(ticket, None, "the connection to Flower was lost") for ticket in gone]
        self._lost -= set(gone)
        waiting = [ticket for ticket in tickets if ticket not in gone]
        about, body = self._done({"do": "receive", "tickets": waiting}) if waiting else ([], b"")
        start = 0
        for ticket, size, problem in about or ():
            taken = None if size < 0 else body[start : start + size]
            start += max(size, 0)
            found.append(Arrival(ticket, taken, problem))
            self._open.discard(ticket)
        return found

    def close(self) -> None:
        """Ends the app."""
        for one in (self._connection, self._server):
            if one is not None:
                one.close()
        self._connection = None

    def _done(self, about: Any, body: bytes = b"") -> tuple[Any, bytes]:
        """What the app answers; None where the connection was lost over it."""
        with self._lock:
            connection = self._connected()
            try:
                put(connection, about, body)
                return get(connection)
            except OSError:
                connection.close()
                self._connection = None
                self._lost |= self._open
                self._open.clear()
                return None, b""

    def _connected(self) -> socket.socket:
        if self._connection is None:
            self._start()
            self._server.settimeout(self._seconds)
            try:
                self._connection, _ = self._server.accept()
            except TimeoutError as error:
                raise RunError(
                    f"Flower's server app has not come up within {self._seconds:.0f} s; its log says why"
                ) from error
            self._connection.settimeout(None)
        return self._connection
