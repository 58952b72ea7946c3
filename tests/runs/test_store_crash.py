"""RunStore against the real world: killed processes, two writers, full disks, folders one cannot write."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tailorfl.errors import RunError
from tailorfl.runs.store import RunStore


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Another Python process that runs `code` with these sys.argv[1:]."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


# resumes from what it finds, as a run does: after the last round whose checkpoint (here: clients) is complete
APPENDER = """
    import sys
    from tailorfl.runs.store import RunStore
    store = RunStore.open(sys.argv[1])
    counts = store.clients().groupby("round").size()
    done = max(counts[counts == 400].index, default=0)
    store.truncate_after(done)
    for round in range(done + 1, 10**6):
        store.append_round({"round": round, "loss": 1 / round})
        store.append_clients([{"round": round, "client": i, "accuracy": i / round} for i in range(400)])
        print(round, flush=True)
"""


@pytest.mark.slow
def test_killing_a_writer_loses_no_finished_record(tmp_path: Path) -> None:
    RunStore.create(tmp_path, {}).close()
    rng = random.Random(0)
    finished = 0
    for _ in range(8):
        process = start(APPENDER, tmp_path)
        assert process.stdout is not None
        for _ in range(rng.randint(1, 12)):
            finished = int(process.stdout.readline())
        time.sleep(rng.random() * 0.01)
        process.send_signal(signal.SIGKILL)
        # not `communicate`, which passes over lines that were read ahead
        for line in process.stdout:
            finished = int(line) if line.endswith("\n") else finished  # told before it was killed
        process.wait()
        reader = RunStore.open(tmp_path, readonly=True)
        assert str(reader.status) == "interrupted"
        rounds, clients = reader.rounds(), reader.clients()
        assert rounds["round"].tolist() == list(range(1, len(rounds) + 1))
        assert len(rounds) >= finished
        assert (rounds["loss"] == 1 / rounds["round"]).all()
        counts = clients.groupby("round").size()
        assert (counts.loc[:finished] == 400).all()
        assert counts.index.max() <= finished + 1
    assert finished > 8
    with RunStore.open(tmp_path):
        for name in ("rounds.jsonl", "clients.jsonl"):
            assert all(json.loads(line) for line in (tmp_path / name).read_text().splitlines())


SAVER = """
    import sys, torch
    from tailorfl.runs.store import RunStore
    store = RunStore.open(sys.argv[1])
    latest = store.latest_checkpoint()
    start = latest[0] if latest else 0
    for round in range(start + 1, 10**6):
        store.save_checkpoint(round, {"w": torch.full((300_000,), float(round))}, {"round": round})
        print(round, flush=True)
"""


def test_killing_a_saver_leaves_the_newest_checkpoint_sound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    RunStore.create(tmp_path, {}).close()
    rng = random.Random(1)
    for _ in range(3):
        process = start(SAVER, tmp_path)
        assert process.stdout is not None
        finished = 0
        for _ in range(rng.randint(1, 6)):
            finished = int(process.stdout.readline())
        time.sleep(rng.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        # not `communicate`, which passes over lines that were read ahead
        for line in process.stdout:
            finished = int(line) if line.endswith("\n") else finished
        process.wait()
        with RunStore.open(tmp_path) as store:
            latest = store.latest_checkpoint()
            assert latest is not None
            round, tensors, meta = latest
            assert round in (finished, finished + 1)
            assert meta == {"round": round}
            assert (tensors["w"] == round).all()
        assert not list(tmp_path.glob(".*.part"))
    assert not caplog.messages  # a kill leaves no damaged checkpoint either, so nothing to warn about


HOLDER = """
    import sys
    from tailorfl.runs.store import RunStore
    store = RunStore.create(sys.argv[1], {})
    store.append_round({"round": 1})
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_second_writer_is_turned_away_and_readers_are_not(tmp_path: Path) -> None:
    process = start(HOLDER, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    with pytest.raises(RunError, match=f"process {process.pid} is writing to '{tmp_path}'"):
        RunStore.open(tmp_path)
    with pytest.raises(RunError, match=f"process {process.pid} is writing"):
        RunStore.create(tmp_path, {}, overwrite=True)
    reader = RunStore.open(tmp_path, readonly=True)
    assert str(reader.status) == "running"
    assert reader.rounds()["round"].tolist() == [1]
    process.kill()
    process.communicate()
    assert str(reader.status) == "interrupted"
    with RunStore.open(tmp_path) as store:
        assert str(store.status) == "interrupted"
        store.append_round({"round": 2})
        assert str(reader.status) == "running"
    assert reader.rounds()["round"].tolist() == [1, 2]


RACER = """
    import sys, time
    from tailorfl.errors import RunError
    from tailorfl.runs.store import RunStore
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        store = RunStore.create(sys.argv[1], {"winner": sys.argv[2]})
    except RunError as error:
        print(f"refused: {error}", flush=True)
    else:
        print("created", flush=True)
        sys.stdin.readline()
"""


def test_of_processes_that_create_one_run_exactly_one_wins(tmp_path: Path) -> None:
    processes = [start(RACER, tmp_path / "run", number) for number in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.stdout.readline() for process in processes if process.stdout is not None]
    for process in processes:
        process.communicate("end\n")
    assert sum(answer == "created\n" for answer in answers) == 1
    winner = next(number for number, answer in enumerate(answers) if answer == "created\n")
    assert RunStore.open(tmp_path / "run", readonly=True).config == {"winner": str(winner)}


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
    store.append_round({"round": 1})
    store.append_clients([{"round": 1, "client": client} for client in range(100)])
    store.save_checkpoint(1, {"w": torch.ones(10)}, {})
    ballast = fill(small_disk)
    many = [{"round": 2, "client": client, "text": "x" * 100} for client in range(1000)]
    writes: list[Callable[[], None]] = [
        lambda: store.append_clients(many),
        lambda: store.save_checkpoint(2, {"w": torch.ones(50_000)}, {}),
        lambda: store.finish({"text": "x" * 10_000}),
    ]
    for write in writes:
        with pytest.raises(RunError, match=rf"'{small_disk}/run/.*No space left on device.*free some space"):
            write()
    assert len(store.clients()) == 100
    assert (small_disk / "run" / "clients.jsonl").read_bytes().endswith(b"}\n")
    latest = store.latest_checkpoint()
    assert latest is not None
    assert latest[0] == 1
    assert not list((small_disk / "run").glob("*.part"))
    with pytest.raises(RunError, match="free some space"):
        RunStore.create(small_disk / "other", {"text": "x" * 10_000})
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
    with pytest.raises(RunError, match=r"Read-only file system"):
        RunStore.create(readonly_disk / "new", {})
    with pytest.raises(RunError, match="Read-only file system"):
        RunStore.open(readonly_disk / "run")
    assert RunStore.open(readonly_disk / "run", readonly=True).config == {"a": 1}
