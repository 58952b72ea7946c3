"""Seconds of a round and bytes on the wire: a server and two clients as processes, beside a plain app of Flower.

    python benchmarks/deploy.py [--rounds 7]

Both train the same MLP on the same digits, with the same batches a round, through Flower's SuperLink and SuperNodes on
127.0.0.1, all bytes through a TCP proxy that counts them. Flower's app is written as its quickstart for PyTorch: its
strategy FedAvg, and a ClientApp that is a fresh process for every message. Ours has the samples in the memory of a
process that stays; the app only relays.
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
from pathlib import Path
from typing import Any

import numpy as np

from tailorfl.deploy.flower.processes import Link, Node, free_port
from tailorfl.experiments.jobs import Job
from tailorfl.experiments.making import make_federation
from tailorfl.runs.store import RunStore
from tailorfl.settings.experiment import ExperimentConfig

CLIENTS, EPOCHS, BATCH, LR = 2, 1, 16, 0.1
SIZES: dict[str, list[int]] = {"small": [64], "large": [512, 400]}
FLOWER = "plain Flower"
CASES = [
    ("small", "fedavg", "tailorfl"),
    ("small", "fedavg", FLOWER),
    ("large", "fedavg", "tailorfl"),
    ("large", "fedavg", FLOWER),
    ("large", "fedrep", "tailorfl"),
    ("large", "scaffold", "tailorfl"),
]

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
        """Takes no more connections."""
        self._server.close()


@dataclass(frozen=True)
class Measured:
    """One run: seconds of its rounds but the first and the last, and bytes (up, down) of these rounds.

    `counted` are the bytes of tensors in training messages, `wire` what the proxy has seen from the end of the first
    round to that of the last but one.
    """

    seconds: list[float]
    counted: tuple[int, int]
    wire: tuple[int, int]
    lasted: float


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

    def measured(self, begin: float, counted: tuple[int, int], rounds: int) -> Measured:
        """What was seen between the first end and the last but one; `counted` are the bytes of so many rounds.

        The last round's is seen after the final evaluation, which sends the model once more.
        """
        ends = self.seen[-rounds:][:-1]
        up, down = (b - a for a, b in zip(ends[0][1:], ends[-1][1:], strict=True))
        each = (counted[0] * (rounds - 2) // rounds, counted[1] * (rounds - 2) // rounds)
        seconds = [b[0] - a[0] for a, b in itertools.pairwise(ends)]
        return Measured(seconds, each, (up, down), time.monotonic() - begin)


def experiment(size: str, rounds: int, method: str = "fedavg") -> ExperimentConfig:
    """The experiment; Flower's app does the same."""
    return ExperimentConfig.model_validate(
        {
            "name": f"bench-{size}",
            "data": {"name": "digits", "clients": CLIENTS},
            "model": {"name": "mlp", "hidden": SIZES[size]},
            "methods": [method],
            "seeds": [0],
            "rounds": rounds,
            "train": {"epochs": EPOCHS, "batch_size": BATCH, "lr": LR},
            "eval": {"every": 0},
            "deploy": {"round_seconds": 120.0, "wait_seconds": 120.0},
        }
    )


@contextlib.contextmanager
def started(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, which is ended with all that it has started."""
    with log.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def ours(config: ExperimentConfig, folder: Path, within: float) -> Measured:
    """Runs `tailorfl server` and two `tailorfl client`."""
    (folder / "experiment.yaml").write_text(config.to_yaml(), encoding="utf-8")
    port = free_port()
    proxy, begin = Proxy(port), time.monotonic()
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
            "--insecure",
            "--quiet",
        ]
        server = stack.enter_context(
            started([*program, *words, "--out", str(folder / "out")], folder / "server.log")
        )
        for name in map(str, range(CLIENTS)):
            words = ["client", "--server", f"127.0.0.1:{proxy.port}", "--insecure", "--name", name]
            stack.enter_context(
                started([*program, *words, "--state", str(folder / f"state-{name}")], folder / f"{name}.log")
            )
        if server.wait(within):
            raise SystemExit((folder / "server.log").read_text())
    proxy.close()
    rows: Any = RunStore.open(folder / "out" / job.folder, readonly=True).rounds()
    last = rows.iloc[-1]
    assert len(ends.seen) == config.rounds, ends.seen
    return ends.measured(begin, (int(last["bytes_up"]), int(last["bytes_down"])), config.rounds)


def flowers(config: ExperimentConfig, folder: Path, within: float) -> Measured:
    """Runs a plain app of Flower with the same model, data and epochs."""
    federation = make_federation(config, 0)
    flat = federation.source.x.flatten(1).float().numpy()
    sizes = [flat.shape[1], *SIZES[config.name.removeprefix("bench-")], federation.source.outputs]
    app = folder / "app"
    (app / "plain").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PROJECT)
    (app / "plain" / "__init__.py").write_text("")
    (app / "plain" / "task.py").write_text(TASK.format(sizes=sizes))
    (app / "plain" / "server_app.py").write_text(SERVER.format(clients=CLIENTS))
    (app / "plain" / "client_app.py").write_text(CLIENT.format(lr=LR, epochs=EPOCHS, batch=BATCH))
    port, begin, stamps = free_port(), time.monotonic(), folder / "stamps"
    stamps.write_text("")
    proxy = Proxy(port)
    ends = Ends(stamps, proxy)
    ends.start()
    link = Link(folder / "link", "127.0.0.1", port, None)
    nodes: list[Node] = []
    try:
        for client in range(CLIENTS):
            rows = federation.train[client]
            np.savez(folder / f"{client}.npz", x=flat[rows], y=federation.source.y[rows].numpy())
            given = {"data": str(folder / f"{client}.npz")}
            nodes.append(Node(folder / f"node-{client}", f"127.0.0.1:{proxy.port}", None, given))
            nodes[-1].keep_up()
        link.run(app, {"stamps": str(stamps), "rounds": config.rounds})
        while len(stamps.read_text().splitlines()) <= config.rounds:
            if time.monotonic() - begin > within:
                raise SystemExit(
                    f"Flower's app has not ended: {(folder / 'link' / 'link.log').read_text()[-3000:]}"
                )
            time.sleep(0.2)
    finally:
        for node in nodes:
            node.stop()
        link.stop()
        proxy.close()
    numbers = sum(i * o + o for i, o in itertools.pairwise(sizes))
    counted = 4 * numbers * CLIENTS * config.rounds
    return ends.measured(begin, (counted, counted), config.rounds)


def processor() -> str:
    """The name of this machine's processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--within", type=float, default=300.0, help="seconds that a run may last")
    given = parser.parse_args()
    print(f"{processor()}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f} at the start")
    print("| model | who | s a round, median (least, most) | tensors up, down | wire up, down | more |")
    print("| --- | --- | --- | --- | --- | --- |")
    for size, method, who in CASES:
        run = flowers if who == FLOWER else ours
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            found = run(experiment(size, given.rounds, method), Path(folder), given.within)
        tensors, wire = (f"{a / 1e6:.3f}, {b / 1e6:.3f} MB" for a, b in (found.counted, found.wire))
        more = ", ".join(f"{100 * (b / a - 1):.1f} %" for a, b in zip(found.counted, found.wire, strict=True))
        middle, least, most = statistics.median(found.seconds), min(found.seconds), max(found.seconds)
        print(
            f"| {size} | {who}, {method} | {middle:.2f} ({least:.2f}, {most:.2f}) | {tensors} | {wire} | {more} |",
            flush=True,
        )
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
