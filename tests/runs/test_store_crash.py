"""RunStore against the real world: killed processes, two writers, full disks, folders one cannot write."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from processes import fork
from tailorfl.errors import RunError
from tailorfl.runs.store import RunStore


def killed(program: Callable[[], None], lines: int, pause: float) -> int:
    """The last round that a process told, which is killed some time after so many lines."""
    process, said = fork(program)
    for _ in range(lines):
        finished = int(said.readline())
    time.sleep(pause)
    os.kill(process, signal.SIGKILL)
    for line in said:
        finished = int(line) if line.endswith("\n") else finished  # told before it was killed
    os.waitpid(process, 0)
    return finished


def save(folder: Path) -> None:
    store = RunStore.open(folder)
    latest = store.latest_checkpoint()
    for round in range((latest[0] if latest else 0) + 1, 10**6):
        store.save_checkpoint(round, {"w": torch.full((300_000,), float(round))}, {"round": round})
        print(round, flush=True)


def test_killing_a_saver_leaves_the_newest_checkpoint_sound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    RunStore.create(tmp_path, {}).close()
    rng = random.Random(1)
    for _ in range(3):
        finished = killed(lambda: save(tmp_path), rng.randint(1, 6), rng.random() * 0.02)
        with RunStore.open(tmp_path) as store:
            latest = store.latest_checkpoint()
            assert latest is not None
            round, tensors, meta = latest
            assert round in (finished, finished + 1)
            assert meta == {"round": round}
            assert (tensors["w"] == round).all()
        assert not list(tmp_path.glob(".*.part"))
    assert not caplog.messages  # a kill leaves no damaged checkpoint either, so nothing to warn about


def test_of_processes_that_create_one_run_exactly_one_wins(tmp_path: Path) -> None:
    """Later writers are turned away as long as it lives, and readers are not."""
    out = tmp_path / "run"

    def race() -> None:
        while not (tmp_path / "go").exists():
            pass
        try:
            store = RunStore.create(out, {"winner": os.getpid()})
        except RunError as error:
            print(f"refused: {error}", flush=True)
        else:
            store.append_round({"round": 1})
            print("created", flush=True)
            time.sleep(60)

    processes = dict(fork(race) for _ in range(3))
    (tmp_path / "go").touch()
    (winner,) = [process for process, said in processes.items() if said.readline() == "created\n"]
    for refused in (
        lambda: RunStore.open(out),
        lambda: RunStore.create(out, {}, overwrite=True),
    ):
        with pytest.raises(RunError, match=f"process {winner} is writing to '{out}'"):
            refused()
    reader = RunStore.open(out, readonly=True)
    assert (reader.config, str(reader.status)) == ({"winner": winner}, "running")
    assert reader.rounds()["round"].tolist() == [1]
    os.kill(winner, signal.SIGKILL)
    for process in processes:
        os.waitpid(process, 0)
    assert str(reader.status) == "interrupted"
    with RunStore.open(out) as store:
        assert str(store.status) == "interrupted"
        store.append_round({"round": 2})
        assert str(reader.status) == "running"
    assert reader.rounds()["round"].tolist() == [1, 2]


def mounted(target: Path, *arguments: str) -> Iterator[Path]:
    """The folder with something mounted on it, skipping the test where this is not allowed."""
    target.mkdir()
    try:
        done = subprocess.run(["mount", *arguments, str(target)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    try:
        yield target
    finally:
        # lazily: a failing test may still have files open here
        subprocess.run(["umount", "-l", str(target)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=256k", "tmpfs")


@pytest.fixture
def readonly_disk(tmp_path: Path) -> Iterator[Path]:
    RunStore.create(tmp_path / "source" / "run", {"a": 1}).close()
    yield from mounted(tmp_path / "disk", "--bind", "-o", "ro", str(tmp_path / "source"))


def fill(disk: Path) -> Path:
    """A file that takes all the room that is left."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    return ballast


def test_full_disk(small_disk: Path) -> None:
    store = RunStore.create(small_disk / "run", {"a": 1})
    store.append_clients([{"round": 1, "client": client} for client in range(100)])
    store.save_checkpoint(1, {"w": torch.ones(10)}, {})
    ballast = fill(small_disk)
    many = [{"round": 2, "client": client, "text": "x" * 100} for client in range(1000)]
    writes: list[Callable[[], object]] = [
        lambda: store.append_clients(many),
        lambda: store.save_checkpoint(2, {"w": torch.ones(50_000)}, {}),
        lambda: store.finish({"text": "x" * 10_000}),
        lambda: RunStore.create(small_disk / "other", {"text": "x" * 10_000}),
    ]
    for write in writes:
        with pytest.raises(RunError, match=rf"'{small_disk}/.*No space left on device.*free some space"):
            write()
    assert len(store.clients()) == 100
    assert (small_disk / "run" / "clients.jsonl").read_bytes().endswith(b"}\n")
    latest = store.latest_checkpoint()
    assert latest is not None
    assert latest[0] == 1
    assert not list((small_disk / "run").glob("*.part"))
    ballast.unlink()
    store.append_clients(many[:10])
    store.save_checkpoint(2, {"w": torch.ones(20)}, {})
    store.finish({})
    assert len(store.clients()) == 110
    store.close()


def test_error_of_a_full_disk_is_not_hidden_by_the_failing_mark(small_disk: Path) -> None:
    def run() -> None:
        with RunStore.create(small_disk / "run", {}) as store:
            fill(small_disk)
            store.append_clients([{"round": 1, "text": "x" * 5000}])

    with pytest.raises(RunError, match=r"clients\.jsonl") as caught:
        run()
    assert "could not be marked" in caught.value.__notes__[0]
    assert RunStore.open(small_disk / "run", readonly=True).status == "interrupted"


def test_read_only_disk(readonly_disk: Path) -> None:
    with pytest.raises(RunError, match="Read-only file system"):
        RunStore.create(readonly_disk / "new", {})
    with pytest.raises(RunError, match="Read-only file system"):
        RunStore.open(readonly_disk / "run")
    assert RunStore.open(readonly_disk / "run", readonly=True).config == {"a": 1}
