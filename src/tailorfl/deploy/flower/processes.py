"""Flower's processes beside ours: a SuperLink for the server, a SuperNode for a client; started, watched, ended.

Each has a folder of its own for Flower's files and logs. Telemetry, the check for updates and the installation of
packages while an app runs are off: nothing is asked of the network but what the federation needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tailorfl.errors import MissingExtraError, RunError

ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
}
ENDS_WITHIN = 10.0
"""Seconds that a process may take to end before it is killed."""


@dataclass(frozen=True)
class Tls:
    """What secures the connection.

    Attributes:
        authority: certificate of who has signed the server's.
        certificate, key: the server's own; only it has them.
        node_key: a client's own key; only it has it.
    """

    authority: Path
    certificate: Path | None = None
    key: Path | None = None
    node_key: Path | None = None


_ACTIVATION_FAILED = 2004
_NOT_LET_IN = (
    "the server does not let this client in: it does not know its key, or takes it for still connected, as for a "
    "minute after a crash"
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _ends_with_parent(sign: int) -> None:
    """Has the kernel end this process by a signal when the one that has started it is killed."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, sign)


def check_installed() -> None:
    """Raises MissingExtraError where Flower is not installed."""
    if importlib.util.find_spec("flwr") is None:
        raise MissingExtraError("flwr", "deploy")


def free_port() -> int:
    """Returns a port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """One process of Flower and those that it starts, in a group of their own; its output goes to a file."""

    def __init__(
        self, program: str, arguments: Sequence[str], home: Path, log: Path, orphaned: int = signal.SIGTERM
    ) -> None:
        """Starts it; `orphaned` is the signal by which it ends when this process is killed (on Linux)."""
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.name, self.log = program, log
        here = Path(sys.executable).parent
        found = here / program
        path = os.pathsep.join([str(here), os.environ.get("PATH", "")])
        environment = {**os.environ, **ENVIRONMENT, "FLWR_HOME": str(home), "PATH": path}
        with log.open("ab") as file:
            self._begin = file.tell()
            self._running = subprocess.Popen(
                [str(found) if found.is_file() else program, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
                preexec_fn=functools.partial(_ends_with_parent, orphaned) if _LIBC is not None else None,
            )

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self._running.poll() is not None

    def last_words(self, lines: int = 4) -> str:
        """Returns what went wrong by its output, or else the end of it."""
        with self.log.open("rb") as file:
            file.seek(self._begin)
            text = _COLOURS.sub("", file.read().decode("utf-8", "replace"))
        found = [line.strip() for line in text.splitlines() if line.strip()]
        wrong = next((i for i, line in enumerate(found) if line.startswith("ERROR")), None)
        chosen = found[-lines:] if wrong is None else found[wrong : wrong + lines]
        return " / ".join(chosen)[:600]

    def stop(self) -> None:
        """Ends it and all that it has started."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._running.pid, sign)
            begin = time.monotonic()
            while not self.ended and time.monotonic() - begin < ENDS_WITHIN:
                time.sleep(0.05)
            if self.ended:
                break
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._running.pid, signal.SIGKILL)  # what it has started and left behind


class Link:
    """The SuperLink of a server, listening at `host`:`port`; `app` is started on it as often as asked.

    Raises:
        RunError: it does not come up, as where the port is taken.
    """

    def __init__(self, folder: Path, host: str, port: int, tls: Tls | None, seconds: float = 60.0) -> None:
        check_installed()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder, self._tls = folder, tls
        self.address = f"{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
        refuse_taken(host, port)
        secure = ["--insecure"]
        if tls is not None:
            secure = ["--ssl-ca-certfile", str(tls.authority), "--ssl-certfile", str(tls.certificate)]
            secure += ["--ssl-keyfile", str(tls.key), "--enable-supernode-auth"]
        arguments = [
            *secure,
            "--disable-runtime-dependency-installation",
            "--host",
            host,
            "--port",
            str(port),
        ]
        arguments += ["--database", str(folder / "link.db")]
        # In order it ends when all who are connected have gone, and holds the port until then.
        self._process = Process(
            "flower-superlink", arguments, folder / "link", folder / "link.log", orphaned=signal.SIGKILL
        )
        self._await(seconds)
        self._write_home()

    def _await(self, seconds: float) -> None:
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            if self._process.ended:
                break
            if self._is_up():
                return
            time.sleep(0.1)
        words = self._process.last_words()
        self._process.stop()
        raise RunError(
            f"Flower's SuperLink has not come up at {self.address}: {words}; see '{self._process.log}'"
        )

    def _is_up(self) -> bool:
        host, _, port = self.address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=1.0):
                pass
            if self._tls is not None:
                return True
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=1.0) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _write_home(self) -> None:
        home = self.folder / "user"
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        secure = "insecure = true"
        if self._tls is not None:
            secure = f"root-certificates = {json.dumps(str(self._tls.authority.resolve()))}"
        text = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{self.address}"\n{secure}\n'
        (home / "config.toml").write_text(text, encoding="utf-8")

    @property
    def ended(self) -> bool:
        """Whether the SuperLink is gone."""
        return self._process.ended

    def run(self, app: Path, config: Mapping[str, str | int]) -> None:
        """Starts the app with settings. Raises RunError where Flower refuses."""
        given = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        self._flwr("run", str(app), "here", "-c", given)

    def register(self, key: Path, name: str) -> None:
        """Lets the node with a public key in. Raises RunError where Flower refuses."""
        try:
            self._flwr("supernode", "register", str(key), "here", "--name", name)
        except RunError as error:
            if "already" not in str(error).lower():
                raise

    def _flwr(self, *words: str) -> str:
        here = Path(sys.executable).parent
        environment = {**os.environ, **ENVIRONMENT, "FLWR_HOME": str(self.folder / "user")}
        environment["PATH"] = os.pathsep.join([str(here), os.environ.get("PATH", "")])
        found = here / "flwr"
        done = subprocess.run(
            [str(found) if found.is_file() else "flwr", *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        said = f"{done.stdout}\n{done.stderr}".strip()
        with (self.folder / "flwr.log").open("a", encoding="utf-8") as file:
            file.write(f"$ flwr {' '.join(words)}\n{said}\n")
        if done.returncode:
            raise RunError(f"flwr {words[0]} has failed: {said[-500:]}")
        return said

    def stop(self) -> None:
        """Ends the SuperLink and what it has started."""
        self._process.stop()


class Node:
    """The SuperNode of a client; started again when it ends, as it does where the server cannot be reached."""

    def __init__(self, folder: Path, server: str, tls: Tls | None, config: Mapping[str, str]) -> None:
        check_installed()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        secure = ["--insecure"]
        if tls is not None:
            secure = ["--root-certificates", str(tls.authority)]
            if tls.node_key is not None:
                secure += ["--auth-supernode-private-key", str(tls.node_key)]
        given = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        self._arguments = [*secure, "--superlink", server, "--node-config", given]
        self._folder = folder
        self._process: Process | None = None
        self._next = 0.0
        self.starts = 0

    def keep_up(self, wait: float = 5.0) -> str:
        """Starts the node where it does not run, not more often than every `wait` seconds; returns why it had ended."""
        if self._process is not None and not self._process.ended:
            return ""
        words = "" if self._process is None else self._process.last_words()
        words = _NOT_LET_IN if f"[code: {_ACTIVATION_FAILED}]" in words else words
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + wait
            self.starts += 1
            arguments = [*self._arguments, "--port", str(free_port())]
            self._process = Process(
                "flower-supernode", arguments, self._folder / "node", self._folder / "node.log"
            )
        return words

    def stop(self) -> None:
        """Ends the node and what it has started."""
        if self._process is not None:
            self._process.stop()


def refuse_taken(host: str, port: int, patience: float = ENDS_WITHIN) -> None:
    """Raises RunError where somebody listens on a port already, or nobody may.

    What listened for a server that was killed takes some seconds to end: a port is looked at for as long.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    end = time.monotonic() + patience
    while True:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                    raise RunError(
                        f"cannot listen at {host}:{port}: {error.strerror}; choose another port (--listen HOST:PORT)"
                    ) from error
        time.sleep(0.2)
