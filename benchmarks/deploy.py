"""Seconds of a round, bytes on the wire and memory: a server and clients as processes, beside a plain app of Flower.

    python benchmarks/deploy.py [--rounds 7] [--clients 2,4,8,16] [--sizes small,medium,large] [--quickstart 2]

It ends within ten minutes (`--minutes`): Flower's app runs first, and what has no time left is named in the table.

All train the same MLP on the same digits, with the same batches a round, as processes of one machine on 127.0.0.1, all
bytes through a TCP proxy that counts them. Ours are over TLS, one process a side. Flower's app (for the numbers of
clients of `--quickstart`) is written as its quickstart for PyTorch: a SuperLink and SuperNodes without TLS, its
strategy FedAvg, and a ClientApp that is a fresh process for every message.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tailorfl.deploy.keys import make_keys
from tailorfl.runs.build import make_federation
from tailorfl.runs.job import Job
from tailorfl.runs.store import RunStore
from tailorfl.settings.experiment import ExperimentConfig

EPOCHS, BATCH, LR = 1, 16, 0.1
SIZES: dict[str, list[int]] = {"small": [64], "medium": [512, 400], "large": [1024, 900]}
"""Hidden layers; with digits these are 4,810, 242,490 and 998,070 parameters."""
QUICKSTART_ROUNDS = 4
"""Rounds of Flower's app at most: each takes some seconds, as new processes import torch."""
IDLE = 0.5
"""With a larger load at the start other programs run, and seconds are worth nothing."""
ENDING = 25.0
"""Seconds that it takes to end the processes of a measurement whose time is over."""
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "plain"
version = "1.0.0"
description = "FedAvg"
license = "Apache-2.0"
dependencies = ["flwr>=1.40,<2"]
[tool.hatch.build.targets.wheel]
packages = ["plain"]
[tool.flwr.app]
publisher = "plain"
[tool.flwr.app.components]
serverapp = "plain.server_app:app"
clientapp = "plain.client_app:app"
[tool.flwr.app.config]
rounds = 3
stamps = ""
"""
TASK = """\
import torch
def net():
    layers = []
    for i, o in zip({sizes}[:-1], {sizes}[1:]):
        layers += [torch.nn.Linear(i, o), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])
"""
SERVER = """\
import time
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from plain.task import net
app = ServerApp()
@app.main()
def main(grid, context):
    path = str(context.run_config["stamps"])
    def stamp(server_round, arrays):
        with open(path, "a") as file:
            file.write(f"{{time.time()}}\\n")
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes={clients}, min_available_nodes={clients})
    strategy.start(grid=grid, initial_arrays=ArrayRecord(net().state_dict()),
                   num_rounds=int(context.run_config["rounds"]), evaluate_fn=stamp)
"""
CLIENT = """\
import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from plain.task import net
app = ClientApp()
@app.train()
def train(message, context):
    torch.set_num_threads(1)
    held = np.load(str(context.node_config["data"]))
    x, y = torch.from_numpy(held["x"]), torch.from_numpy(held["y"])
    model = net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr={lr})
    for _ in range({epochs}):
        for rows in torch.randperm(len(x)).split({batch}):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
    metrics = MetricRecord({{"train_loss": float(loss), "num-examples": len(x)}})
    content = RecordDict({{"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}})
    return Message(content=content, reply_to=message)
"""


def free_port() -> int:
    """Return a port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Proxy:
    """Passes TCP connections on to a port of this machine and counts bytes."""

    target: int
    port: int = field(default_factory=free_port)
    up: int = 0
    down: int = 0

    def __post_init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:  # closed
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:  # not there yet: who has called tries again
                near.close()
                continue
            for end in (
                near,
                far,
            ):  # as both programs set it: else a request waits 40 ms for an acknowledgement
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for name, source, sink in (("up", near, far), ("down", far, near)):
                threading.Thread(target=self._pass, args=(name, source, sink), daemon=True).start()

    def _pass(self, name: str, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                setattr(self, name, getattr(self, name) + len(data))
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Take no more connections."""
        self._server.close()


@dataclass(frozen=True)
class Measured:
    """One run: seconds of its rounds but the first and the last, and bytes (up, down) of these rounds.

    `counted` are the bytes of tensors in training messages, `wire` what the proxy has seen from the end of the first
    round to that of the last but one, and `memory` the most that a client's process has held, in MB.
    """

    seconds: list[float]
    counted: tuple[int, int]
    wire: tuple[int, int]
    memory: int


class Ends(threading.Thread):
    """Notes when a file has got another line, and what had gone through a proxy by then."""

    def __init__(self, path: Path, proxy: Proxy) -> None:
        super().__init__(daemon=True)
        self._path, self._proxy = path, proxy
        self.seen: list[tuple[float, int, int]] = []

    def run(self) -> None:
        """Looks fifty times a second, for as long as the program runs."""
        while True:
            there = self._path.read_bytes().count(b"\n") if self._path.is_file() else 0
            self.seen += [(time.monotonic(), self._proxy.up, self._proxy.down)] * (there - len(self.seen))
            time.sleep(0.02)

    def measured(self, counted: tuple[int, int], rounds: int, memory: int) -> Measured:
        """What was seen between the first end and the last but one; `counted` are the bytes of so many rounds.

        The last round's is seen after the final evaluation, which sends the model once more.
        """
        ends = self.seen[-rounds:][:-1]
        up, down = (b - a for a, b in zip(ends[0][1:], ends[-1][1:], strict=True))
        each = (counted[0] * (rounds - 2) // rounds, counted[1] * (rounds - 2) // rounds)
        seconds = [b[0] - a[0] for a, b in itertools.pairwise(ends)]
        return Measured(seconds, each, (up, down), memory)


def experiment(size: str, clients: int, rounds: int) -> ExperimentConfig:
    """The experiment; Flower's app does the same."""
    return ExperimentConfig.model_validate(
        {
            "name": f"bench-{size}",
            "data": {"name": "digits", "clients": clients},
            "model": {"name": "mlp", "hidden": SIZES[size]},
            "methods": ["fedavg"],
            "seeds": [0],
            "rounds": rounds,
            "train": {"epochs": EPOCHS, "batch_size": BATCH, "lr": LR},
            "eval": {"every": 0},
            "deploy": {"round_seconds": 120.0, "wait_seconds": 120.0},
        }
    )


@contextlib.contextmanager
def started(words: list[str], log: Path, home: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, which is ended with all that it has started; `home` is Flower's folder."""
    environment = {**os.environ, **QUIET, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if home is not None:
        environment["FLWR_HOME"] = str(home)
    with log.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def peak(process: int) -> int:
    """The most memory that a process has held so far, in MB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM")), 0)


def ours(config: ExperimentConfig, folder: Path, within: float) -> Measured:
    """Run `tailorfl server` and a `tailorfl client` for each client."""
    (folder / "experiment.yaml").write_text(config.to_yaml(), encoding="utf-8")
    names = [str(i) for i in range(config.data.clients or 0)]
    make_keys(folder / "keys", ["127.0.0.1"], names)
    port = free_port()
    proxy = Proxy(port)
    job = Job(config, config.methods[0], config.seeds[0])
    ends = Ends(folder / "out" / job.folder / "trace.jsonl", proxy)
    ends.start()
    program = [sys.executable, "-m", "tailorfl"]
    with contextlib.ExitStack() as stack:
        words = [
            "server",
            str(folder / "experiment.yaml"),
            "--listen",
            f"127.0.0.1:{port}",
            "--out",
            str(folder / "out"),
        ]
        words += ["--keys", str(folder / "keys"), "--quiet"]
        server = stack.enter_context(started([*program, *words], folder / "server.log"))
        running = []
        for name in names:
            words = ["client", "--server", f"127.0.0.1:{proxy.port}", "--name", name]
            words += [
                "--keys",
                str(folder / "keys" / "clients" / name),
                "--state",
                str(folder / f"state-{name}"),
            ]
            running.append(stack.enter_context(started([*program, *words], folder / f"{name}.log")))
        begin, memory = time.monotonic(), 0
        while server.poll() is None:
            if time.monotonic() - begin > within:
                raise TimeoutError
            with contextlib.suppress(OSError):
                memory = max(memory, *(peak(client.pid) for client in running))
            time.sleep(0.5)
        if server.returncode:
            raise SystemExit((folder / "server.log").read_text())
    proxy.close()
    rows: Any = RunStore.open(folder / "out" / job.folder, readonly=True).rounds()
    last = rows.iloc[-1]
    assert len(ends.seen) == config.rounds, ends.seen
    return ends.measured((int(last["bytes_up"]), int(last["bytes_down"])), config.rounds, memory)


def flowers(config: ExperimentConfig, folder: Path, within: float) -> Measured:
    """Run a plain app of Flower with the same model, data and epochs."""
    federation, clients = make_federation(config, 0), config.data.clients or 0
    flat = federation.source.x.flatten(1).float().numpy()
    sizes = [flat.shape[1], *SIZES[config.name.removeprefix("bench-")], federation.source.outputs]
    app = folder / "app"
    (app / "plain").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PROJECT)
    (app / "plain" / "__init__.py").write_text("")
    (app / "plain" / "task.py").write_text(TASK.format(sizes=sizes))
    (app / "plain" / "server_app.py").write_text(SERVER.format(clients=clients))
    (app / "plain" / "client_app.py").write_text(CLIENT.format(lr=LR, epochs=EPOCHS, batch=BATCH))
    port, stamps, home = free_port(), folder / "stamps", folder / "home"
    stamps.write_text("")
    home.mkdir()
    text = (
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    (home / "config.toml").write_text(text)
    proxy = Proxy(port)
    ends = Ends(stamps, proxy)
    ends.start()
    begin, insecure = time.monotonic(), ["--insecure", "--disable-runtime-dependency-installation"]
    with contextlib.ExitStack() as stack:
        words = ["flower-superlink", *insecure, "--host", "127.0.0.1", "--port", str(port)]
        stack.enter_context(started(words, folder / "link.log", folder / "link"))
        time.sleep(5.0)
        for client in range(clients):
            rows = federation.train[client]
            np.savez(folder / f"{client}.npz", x=flat[rows], y=federation.source.y[rows].numpy())
            words = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{proxy.port}"]
            words += ["--port", str(free_port()), "--node-config", f'data="{folder / f"{client}.npz"}"']
            stack.enter_context(started(words, folder / f"node-{client}.log", folder / f"node-{client}"))
        given = f'stamps="{stamps}" rounds={config.rounds}'
        with started(["flwr", "run", str(app), "here", "-c", given], folder / "run.log", home):
            while len(stamps.read_text().splitlines()) <= config.rounds:
                if time.monotonic() - begin > within:
                    raise TimeoutError
                time.sleep(0.2)
    proxy.close()
    numbers = sum(i * o + o for i, o in itertools.pairwise(sizes))
    counted = 4 * numbers * clients * config.rounds
    return ends.measured((counted, counted), config.rounds, 0)


def processor() -> str:
    """The name of this machine's processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def numbers(text: str) -> list[int]:
    """The whole numbers in a text, with commas between them."""
    return [int(word) for word in text.split(",") if word]


def heading() -> None:
    """Print where and with what is measured, and the table's head."""
    load, versions = os.getloadavg()[0], ("python", platform.python_version())
    names = [versions, *((name, version(name)) for name in ("tailorfl", "torch", "flwr"))]
    print(f"{processor()}, {os.cpu_count()} processors, {', '.join(' '.join(pair) for pair in names)}")
    print(f"{'busy' if load > IDLE else 'idle'}: load {load:.1f} at the start")
    columns = [
        "model",
        "clients",
        "who",
        "s a round, median (least, most)",
        "tensors up, down",
        "wire up, down",
    ]
    columns.append("client MB")
    print(f"| {' | '.join(columns)} |")
    print("|" + " --- |" * len(columns))


def row(found: Measured) -> str:
    """The cells of a measurement."""
    tensors, wire = (f"{a / 1e6:.3f}, {b / 1e6:.3f} MB" for a, b in (found.counted, found.wire))
    middle, least, most = statistics.median(found.seconds), min(found.seconds), max(found.seconds)
    return f"{middle:.2f} ({least:.2f}, {most:.2f}) | {tensors} | {wire} | {found.memory or '–'} |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clients", type=numbers, default="2,4,8,16", help="numbers of clients of tailorfl")
    parser.add_argument("--sizes", type=lambda text: text.split(","), default=list(SIZES))
    parser.add_argument("--quickstart", type=numbers, default="2", help="those of Flower's app; '' for none")
    parser.add_argument("--minutes", type=float, default=10.0, help="after which no more is measured")
    chosen = parser.parse_args()
    cells = [(count, size, "plain Flower") for count in chosen.quickstart for size in chosen.sizes]
    cells += [(count, size, "tailorfl") for count in chosen.clients for size in chosen.sizes]
    end = time.monotonic() + 60 * chosen.minutes - ENDING
    heading()
    for count, size, who in cells:
        run = ours if who == "tailorfl" else flowers
        print(f"| {size} | {count} | {who} |", end=" ", flush=True)
        try:
            if time.monotonic() > end:
                raise TimeoutError
            rounds = chosen.rounds if who == "tailorfl" else min(chosen.rounds, QUICKSTART_ROUNDS)
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                print(row(run(experiment(size, count, rounds), Path(folder), end - time.monotonic())))
        except TimeoutError:
            print(f"not within {chosen.minutes:g} minutes | | | |")
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
