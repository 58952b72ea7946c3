"""Federations of real processes: started by the commands of the documentation, bounded in time, and gone afterwards.

Every process inherits a word of its environment that no other test has (`MARK`), and so do those that it starts: by it
they are found again wherever they have gone, and killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import yaml

from deploy.federation import are_equal, server_tensors, simulated
from tailorfl.rounds.participation import RoundTrace, Trace
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.job import Job
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.system import SystemConfig

MARK = "TAILORFL_TEST_PROCESSES"
LOOK = 0.05


class Program:
    """One command and its output."""

    def __init__(
        self, name: str, words: Sequence[str], folder: Path, mark: str, env: Mapping[str, str]
    ) -> None:
        self.name, self.mark, self.log = name, f"{mark}.{name};", folder / f"{name}.out"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "400", **env}
        environment[MARK] = self.mark
        self.begin = time.monotonic()
        with self.log.open("ab") as file:
            self._running = subprocess.Popen(
                list(words),
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        """All that it has printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def code(self) -> int | None:
        """Its exit code; None where it runs."""
        return self._running.poll()

    def wait(self, seconds: float) -> int:
        """Wait for its end and return the exit code."""
        until(lambda: self.code is not None, seconds, f"the end of {self.name}")
        assert self.code is not None
        return self.code

    def hears(self, words: str, seconds: float, times: int = 1) -> None:
        """Wait until it has printed something."""
        until(
            lambda: self.said.count(words) >= times or self.code is not None,
            seconds,
            f"'{words}' from {self.name}",
        )
        assert self.said.count(words) >= times, f"{self.name} ended with {self.code} without '{words}'"

    def signal(self, number: int) -> None:
        """Send a signal to it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._running.pid, number)
        if number == signal.SIGKILL:
            self._running.wait(10)


class Field:
    """A folder with a server and clients as processes; leaving it ends them, and prints what they said if it fails."""

    def __init__(self, folder: Path, config: ExperimentConfig) -> None:
        self.folder, self.config, self.port, self.host = folder, config, free_port(), "127.0.0.1"
        self.before: dict[str, Sequence[str]] = {}
        self.mark, self.programs = uuid.uuid4().hex, list[Program]()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "experiment.yaml").write_text(yaml.safe_dump(config.to_dict()), encoding="utf-8")

    def __enter__(self) -> Field:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        begin = time.monotonic()
        while (left := marked(self.mark)) and time.monotonic() - begin < 20.0:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGCONT)
                    os.kill(process, signal.SIGKILL)
            time.sleep(LOOK)
        for program in self.programs:
            if program.code is None:
                program.wait(10)
        if kind is not None:
            for path in sorted(self.folder.rglob("*")):
                if path.suffix == ".out" or path.name == "trace.jsonl":
                    print(
                        f"===== {path.relative_to(self.folder)}\n{path.read_text(errors='replace')[-6000:]}"
                    )
        assert not left, f"processes are left: {left}"

    # -- commands -------------------------------------------------------------------------------------------

    def start(self, name: str, *words: str, env: Mapping[str, str] | None = None) -> Program:
        """Start a command of tailorfl, by the words of another program where `before` has some for it."""
        before = self.before.get(words[0], ())
        command = [*before, sys.executable, "-m", "tailorfl", *words]
        program = Program(name, command, self.folder, self.mark, env or {})
        self.programs.append(program)
        return program

    def server(self, *more: str, name: str = "server", secure: Sequence[str] = ("--insecure",)) -> Program:
        """Start the server."""
        listen = f"{self.host}:{self.port}"
        words = ("server", "experiment.yaml", "--listen", listen, "--out", "out", *secure, *more)
        return self.start(name, *words)

    def client(
        self,
        client: str | int,
        *more: str,
        secure: Sequence[str] = ("--insecure",),
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        label: str = "",
    ) -> Program:
        """Start a client; its folder is `state-NAME`."""
        where = ("--server", f"{self.host}:{port or self.port}", "--state", f"state-{client}")
        words = ("client", *where, "--name", str(client), *secure, *more)
        return self.start(label or f"client-{client}", *words, env=env)

    def clients(self, count: int, *more: str) -> list[Program]:
        """Starts clients 0, 1, ..."""
        return [self.client(i, *more) for i in range(count)]

    # -- what came out --------------------------------------------------------------------------------------

    def jobs(self) -> list[Job]:
        """The jobs of the experiment."""
        return [Job(self.config, method, self.config.seeds[0]) for method in self.config.methods]

    def job_folder(self, label: str | None = None) -> Path:
        """The server's folder of a job; by default of the first."""
        job = next(j for j in self.jobs() if label in (None, j.method.label))
        return self.folder / "out" / job.folder

    def trace(self, label: str | None = None) -> list[RoundTrace]:
        """What became of whom, so far."""
        path = self.job_folder(label) / "trace.jsonl"
        return list(Trace.read(path)) if path.is_file() else []

    def fates(self, client: int) -> list[str]:
        """What became of a client, round by round."""
        return [next(a.fate for a in one.answers if a.client == client) for one in self.trace()]

    def round_done(self, number: int, seconds: float, label: str | None = None) -> None:
        """Wait until the server has finished a round."""
        until(lambda: len(self.trace(label)) >= number or self.server_ended, seconds, f"round {number}")
        assert len(self.trace(label)) >= number, f"the server ended before round {number}"

    @property
    def server_ended(self) -> bool:
        """Whether all servers are over."""
        return all(p.code is not None for p in self.programs if p.name.startswith("server"))

    def is_replayed(self, label: str | None = None) -> Simulation:
        """Assert that server and clients have the states of the simulation of the same trace, to the bit."""
        job = next(j for j in self.jobs() if label in (None, j.method.label))
        trace = Trace.read(path := self.job_folder(label) / "trace.jsonl")
        config = self.config.model_copy(
            update={"methods": [job.method], "system": SystemConfig(trace=str(path))}
        )
        sim, names = simulated(config, job.rounds, trace), sum(trace.joined, ())
        server = server_tensors(self.job_folder(label))
        # the newest state may be of an answer that was not accepted
        are_equal(sim, server, [self.folder / f"state-{n}" / config.name / job.folder for n in names], trace)
        return sim


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(there: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for something. Raises TimeoutError where it does not come."""
    begin = time.monotonic()
    while not there():
        if time.monotonic() - begin > seconds:
            raise TimeoutError(f"{what} did not come within {seconds:.0f} s")
        time.sleep(LOOK)


def marked(mark: str) -> list[int]:
    """The processes with a mark (or one that begins with it) that are not over."""
    word, processes = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if word in (folder / "environ").read_bytes():
                    processes.append(int(folder.name))
    return processes
