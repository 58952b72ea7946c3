"""How a server or a client is doing, for the programs that watch over services: /healthz and /metrics at 127.0.0.1."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tailorfl.errors import RunError

State = Callable[[], tuple[str, Mapping[str, float]]]
"""Returns what is wrong ("" where nothing is), and numbers by name; a name that ends in _total only grows."""


@contextmanager
def served(port: int | None, state: State) -> Iterator[None]:
    """Answers at a port of this machine meanwhile; None: nowhere.

    GET /healthz has status 200, or 503 and what is wrong; GET /metrics the numbers as Prometheus reads them.

    Raises:
        RunError: the port is taken.
    """
    if port is None:
        yield
        return

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            trouble, numbers = state()
            if self.path == "/healthz":
                text = json.dumps({"status": trouble or "ok"})
                self._answer(503 if trouble else 200, "application/json", text)
            elif self.path == "/metrics":
                self._answer(
                    200, "text/plain; version=0.0.4", exposition({"up": float(not trouble), **numbers})
                )
            else:
                self._answer(404, "text/plain", "there are /healthz and /metrics\n")

        def _answer(self, status: int, kind: str, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: who watches asks every few seconds."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise RunError(f"cannot listen at 127.0.0.1:{port} (--health): {error.strerror}") from error
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def exposition(numbers: Mapping[str, float]) -> str:
    """Return numbers as Prometheus reads them."""
    lines: list[str] = []
    for name, value in numbers.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# TYPE tailorfl_{name} {kind}", f"tailorfl_{name} {value:.17g}"]
    return "\n".join(lines) + "\n"
