"""A page in the browser that follows a result folder: one page and one JSON file, by default for this machine only.

The server answers two addresses, `/` and `/state.json`, and serves no files. It listens on the loopback address by
default, and answers only requests whose Host header names this machine; this refuses foreign pages whose name was made
to point here (DNS rebinding). The page loads nothing from elsewhere, and its policy forbids it.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
import socket
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

from tailorfl.errors import ConfigError, RunError, TailorflError
from tailorfl.report.live import Watched
from tailorfl.runs.files import encode

PATIENCE = 10.0
"""Seconds after which a silent connection is closed."""


class Board(ThreadingHTTPServer):
    """The server of one folder's page."""

    daemon_threads = True

    def __init__(self, folder: Path, host: str = "127.0.0.1", port: int = 0, share: bool = False) -> None:
        """Start to listen; `serve_forever` answers. `port` 0 takes a free one.

        Raises:
            ConfigError: the folder holds no experiment, or `host` is not a loopback address and `share` is not set.
            RunError: the port cannot be used.
        """
        if not share and not _is_loopback(host):
            raise ConfigError(
                f"'{host}' lets anybody who reaches the port see this experiment; add --share to allow that, or leave "
                "out --host and connect through ssh -L"
            )
        self.watched = Watched(folder)
        self.looking = threading.Lock()
        self.host, self.share = host, share
        self.page = files("tailorfl.report").joinpath("board.html").read_bytes()
        self.policy = policy(self.page.decode())
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise RunError(
                f"cannot listen on {host}, port {port}: {error}; choose another with --port"
            ) from error

    @property
    def address(self) -> str:
        """Address of the page."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    def admits(self, host: str | None) -> bool:
        """Return whether a Host header names this machine; other names might have been made to point here."""
        if host is None:
            return False
        found = re.fullmatch(r"\[([0-9A-Fa-f:.]+)\](?::\d+)?|([^:\[\]]+)(?::\d+)?", host.strip())
        if found is None:
            return False
        name = (found[1] or found[2]).lower()
        if name in ("localhost", self.host.lower()) or _is_loopback(name):
            return True
        return self.share and (_is_address(name) or name == socket.gethostname().lower())

    def state(self) -> dict[str, Any]:
        """Return the experiment's state, or {"error": why it cannot be read}."""
        with self.looking:
            try:
                return self.watched.look()
            except TailorflError as error:
                return {"error": str(error)}


class _Handler(BaseHTTPRequestHandler):
    server: Board
    timeout = PATIENCE
    server_version, sys_version = "tailorfl", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self.server.admits(self.headers.get("Host")):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"this name is not served here\n")
        elif path == "/":
            self._answer(HTTPStatus.OK, "text/html", self.server.page)
        elif path == "/state.json":
            self._answer(HTTPStatus.OK, "application/json", encode(self.server.state()).encode())
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is / and /state.json\n")

    do_HEAD = do_GET

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        headers: Mapping[str, str] = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": self.server.policy,
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: a line per second would hide other output."""


def policy(page: str) -> str:
    """Return a policy that allows a page only its own script, style and requests to its own server."""
    allowed = {
        kind: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        )
        for kind, tag in (("script-src", "script"), ("style-src", "style"))
    }
    rules = [f"{kind} {hashes}" for kind, hashes in allowed.items()]
    return "; ".join(
        ["default-src 'none'", *rules, "connect-src 'self'", "img-src data:", "base-uri 'none'",
         "form-action 'none'", "frame-ancestors 'none'"]
    )  # fmt: skip


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)
