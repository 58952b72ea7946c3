"""What `tailorfl server` and `tailorfl client` do: Flower's processes beside ours, and what is said meanwhile."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tailorfl.deploy.flower.app_folder import write_app
from tailorfl.deploy.flower.processes import Link, Node, Tls
from tailorfl.deploy.flower.reaching import Reach, address
from tailorfl.deploy.flower.relayed import Relayed
from tailorfl.deploy.flower.waiter import Waiter
from tailorfl.deploy.hosting import host_experiment
from tailorfl.deploy.keys import client_keys, server_keys
from tailorfl.deploy.member import Member
from tailorfl.errors import RunError
from tailorfl.experiments.jobs import Observer
from tailorfl.experiments.result import ExperimentResult
from tailorfl.runs.signals import raise_if_told
from tailorfl.settings.experiment import ExperimentConfig

Told = Callable[[str], None]
LOOK = 0.5
"""Seconds between two looks at Flower's process."""


@contextmanager
def _socket_folder() -> Iterator[Path]:
    """A folder that only this user may enter; the path of a socket may have a hundred letters."""
    with tempfile.TemporaryDirectory(prefix="tailorfl-") as folder:
        yield Path(folder)


def run_server(
    config: ExperimentConfig,
    out: Path,
    listen: str,
    keys: Path | None,
    *,
    told: Told,
    observer: Observer | None = None,
) -> ExperimentResult:
    """Runs an experiment with clients that connect to `listen`, and returns its result.

    Flower's files and logs lie in `out`/flower. `keys` is the server's folder as `tailorfl deploy keys` writes it; None
    leaves the connection open to everybody who reaches it.

    Raises:
        TailorflError: see the message; the same call goes on.
    """
    host, port = address(listen)
    flower = out / "flower"
    tls, known = (None, {}) if keys is None else server_keys(keys)
    flower.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_app(flower / "app", {"socket": "", "experiment": "", "out": ""})
    link: Link | None = None
    with _socket_folder() as folder:
        link = Link(flower, host, port, tls)
        try:
            told(
                f"listening at {host}:{port} ({'open to everybody' if tls is None else 'TLS, clients by key'})"
            )
            for name, key in known.items():
                link.register(key, name)
            path = folder / "server"

            def start() -> None:
                assert link is not None
                if link.ended:
                    raise RunError(f"Flower's SuperLink has ended; '{flower / 'link.log'}' says why")
                link.run(flower / "app", {"socket": str(path)})

            post = Relayed(path, start)
            try:
                return host_experiment(post, config, out, told=told, observer=observer)
            finally:
                post.close()
        finally:
            link.stop()


def run_client(
    member: Member, server: str, keys: Path | None, folder: Path, *, told: Told, stay: bool = False
) -> None:
    """Answers a server until it says that there is nothing more; with `stay` until it is told to end.

    `folder` is for Flower's files and logs; `keys` the client's folder as `tailorfl deploy keys` writes it.

    Raises:
        RunError: the server turns this client away, or what secures the connection differs on both sides.
    """
    tls: Tls | None = None if keys is None else client_keys(keys)
    reach = Reach(server, tls, told)
    with _socket_folder() as sockets:
        waiter = Waiter(sockets / "client", member.answer)
        node = Node(folder / "flower", server, tls, {"socket": str(sockets / "client")})
        said = ""
        try:
            while not member.turned_away and (stay or not member.ended):
                words = node.keep_up() if reach.look() else ""
                if words and words != said:
                    told(f"the connection to {server} has ended and is tried again: {words}")
                said = words or said
                waiter.wait(LOOK)
                raise_if_told()
            time.sleep(LOOK)  # the last answer is on its way
            end = time.monotonic() + 10.0
            while time.monotonic() < end and waiter.wait(LOOK):
                pass
            if member.turned_away:
                raise RunError(f"the server at {server} turns this client away: {member.turned_away}")
        finally:
            node.stop()
            waiter.close()
            member.close()
