"""The other end of a client's app: its own process, which listens on a socket of the machine and answers."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from tailorfl.deploy.flower.frames import get, put


class Waiter:
    """Answers one message after another, as they come through the socket `path`."""

    def __init__(self, path: Path, answer: Callable[[bytes], bytes]) -> None:
        self._answer = answer
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen(8)

    def wait(self, seconds: float) -> bool:
        """Answers the next message; False where none came for so long."""
        self._server.settimeout(seconds)
        try:
            connection, _ = self._server.accept()
        except TimeoutError:
            return False
        connection.settimeout(60.0)  # an app that was killed while it spoke must not hold up the next one
        try:
            _, asked = get(connection)
            put(connection, {}, self._answer(asked))
        except OSError:
            pass  # the app is gone: the server asks again, and gets the answer that is kept
        finally:
            connection.close()
        return True

    def close(self) -> None:
        """Stops listening."""
        self._server.close()
