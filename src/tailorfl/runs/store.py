"""RunStore: the folder of one run, written so that a crash at any moment loses nothing that was recorded.

| file | content |
|---|---|
| config.json | the configuration, as given |
| status.json | running, finished, failed or interrupted, with process id, times and message |
| rounds.jsonl | one record per round, appended |
| clients.jsonl | one record {round, client, set, model, metric values} per client and evaluation, appended |
| trace.jsonl | the outcome of each asked client, one line per round, unless all of them always answer |
| checkpoint-NNNNNN.safetensors, .json | the state after round NNNNNN, last two kept |
| summary.json, rounds.parquet, clients.parquet | written when the run finishes |
| manifest.json | sizes and digests of these files, written when the run finishes |
| privacy.csv | uses of clients' data and their ε, if a run is private; written by the caller |
| selection.csv, calibration.csv | each client's chosen round and temperature, if there are any; likewise |
| predictions.safetensors | deployed models' outputs on their clients' test samples, if kept; likewise |

`amend` and `reconfigure` change the records and settings of a run that is to be continued differently; the store must
be open for writing.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from tailorfl.errors import RunError
from tailorfl.runs import checkpoints
from tailorfl.runs.files import (
    MANIFEST,
    PART,
    FolderLock,
    append_lines,
    decode,
    decode_lines,
    encode,
    encode_lines,
    is_locked,
    keep_lines,
    manifest_problems,
    numbers,
    parsed,
    read_lines,
    replacing,
    reporting,
    sync,
    table,
    write_manifest,
    write_text,
)

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

Status = Literal["running", "finished", "failed", "interrupted"]

SECONDS = "simulated_seconds"
"""Key of a simulated system's time so far in a round's record and in the summary."""
SYNC_SECONDS = 1.0
"""Faster rounds wait for the disk together."""
_RESULTS = (
    "summary.json",
    "rounds.parquet",
    "clients.parquet",
    "privacy.csv",
    "selection.csv",
    "calibration.csv",
    "predictions.safetensors",
    MANIFEST,
)
TRACE = "trace.jsonl"
_RECORDS = ("rounds.jsonl", "clients.jsonl", TRACE)


class RunStore:
    """The folder of one run. One process writes it at a time; any number may read it, also while it grows.

    Use it as a context manager, which releases the lock and, if the block ends with an error, marks the run as failed
    or (Ctrl-C) interrupted::

        with RunStore.create("runs/ditto", {"method": "ditto"}) as store:
            for round in range(1, 101):
                store.append_round({"round": round, "loss": 0.3})
                store.save_checkpoint(round, {"w": w}, {"lr": 0.1})
            store.finish({"accuracy": 0.9})

    In a round, append the records first and save the checkpoint last: `truncate_after` then removes the records that a
    resumed run will write again.
    """

    def __init__(self, path: Path, lock: FolderLock | None) -> None:
        """Use `create` or `open` instead."""
        self.path = path
        self._lock = lock
        self._is_marked_running = False
        self._unsynced: set[str] = set()
        self._synced_at = -math.inf

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any], *, overwrite: bool = False) -> Self:
        """Return a store in a new or empty folder; with `overwrite` an earlier run in the folder is deleted.

        Raises RunError if the folder has content (a folder that is no run is never emptied), is being written
        by another process, or cannot be written.
        """
        folder = Path(path)
        with reporting(folder, "create the run folder"):
            folder.mkdir(parents=True, exist_ok=True)
        _check_free(folder, overwrite)
        lock = FolderLock(folder)
        try:
            _check_free(folder, overwrite)  # again: another process may have taken the lock first
            store = cls(folder, lock)
            store._clear()
            store.mark("running")
            write_text(folder / "config.json", encode(config, indent=1))
        except BaseException:
            lock.release()
            raise
        return store

    @classmethod
    def open(cls, path: str | Path, *, readonly: bool = False) -> Self:
        """Return the store of an existing run, locked for writing unless `readonly`.

        Opening for writing removes half-written content after a crash (temporary files, the last line of a record
        file). Raises RunError if there is no run, or another process is writing it.
        """
        folder = Path(path)
        if not (folder / "config.json").is_file():
            raise RunError(f"'{folder}' is not a run folder: it has no config.json; check the name")
        if readonly:
            return cls(folder, None)
        lock = FolderLock(folder)
        try:
            store = cls(folder, lock)
            store._delete(path for path in folder.glob(f".*{PART}"))
            for name in _RECORDS:
                keep_lines(folder / name, read_lines(folder / name))
        except BaseException:
            lock.release()
            raise
        return store

    @classmethod
    def discard(cls, path: str | Path) -> None:
        """Delete a run, and its folder if nothing else is in it.

        Raises RunError if there is no run, or another process is writing it.
        """
        with cls.open(path) as store:
            store._clear()
            store._delete(iter([store.path / ".lock"]))
        with contextlib.suppress(OSError):  # other files keep the folder
            store.path.rmdir()

    @property
    def config(self) -> dict[str, Any]:
        """The configuration with which the run was created. Raises RunError if it cannot be read."""
        return self._read_json("config.json")

    @property
    def summary(self) -> dict[str, Any] | None:
        """The summary given to `finish`, or None before that."""
        return self._read_json("summary.json") if (self.path / "summary.json").exists() else None

    @property
    def status(self) -> Status:
        """The status of the run. A killed run cannot set it, so "running" without a process is "interrupted"."""
        status: Status = self._read_json("status.json").get("status", "")
        if status not in get_args(Status):
            raise RunError(
                f"'{self.path / 'status.json'}' is damaged (it says {status!r}); restore it from a copy"
            )
        is_alive = self._is_marked_running if self._lock else is_locked(self.path)
        return "interrupted" if status == "running" and not is_alive else status

    def mark(self, status: Status, message: str = "") -> None:
        """Write the status of the run, with a message for people (for instance the error)."""
        self._check_writable()
        if status not in get_args(Status):
            raise ValueError(f"unknown status '{status}'; use one of {', '.join(get_args(Status))}")
        updated = datetime.now(UTC).isoformat(timespec="seconds")
        facts = {"status": status, "process": os.getpid(), "updated": updated, "message": message}
        write_text(self.path / "status.json", encode(facts, indent=1))
        self._is_marked_running = status == "running"

    def append_round(self, record: Mapping[str, Any]) -> None:
        """Append one record with an integer "round".

        Once this returns, all appended records survive any end of this process. They survive a power cut too, except
        the records of rounds that follow each other within `SYNC_SECONDS`: these wait for the disk together, and always
        before a checkpoint, so that a resumed run has the records of its past.
        """
        self._append("rounds.jsonl", [record])
        if time.monotonic() - self._synced_at >= SYNC_SECONDS:
            self._sync()

    def append_trace(self, record: Mapping[str, Any]) -> None:
        """Append the outcomes of the clients that were asked in a round, before the record of that round."""
        self._append(TRACE, [record])

    def append_clients(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append long records {round, client, set, model, metric values}, before that of their round."""
        self._append("clients.jsonl", records)

    def save_checkpoint(self, round: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Save the state after a round (see `checkpoints.save`): named tensors, and `meta` as JSON."""
        self._check_writable()
        self._mark_running()
        self._sync()
        checkpoints.save(self.path, round, tensors, meta)

    def latest_checkpoint(self) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
        """Return round, tensors, meta of the newest intact checkpoint or None (see `checkpoints.load_latest`)."""
        return checkpoints.load_latest(self.path)

    def newest_checkpoint(self) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
        """Return round, tensors, meta of the newest checkpoint or None; never those of an older one.

        Raises RunError if it is damaged, or if it is not of the last round of a finished run.
        """
        rounds = checkpoints.rounds(self.path)
        if not rounds:
            return None
        if self._lost_checkpoint:
            raise RunError(self._lost_checkpoint)
        return rounds[-1], *checkpoints.load(self.path, rounds[-1])

    def checkpoint_problems(self) -> list[str]:
        """Return a sentence for each problem of the checkpoints; a finished run may have none."""
        lost = self._lost_checkpoint
        return [*checkpoints.problems(self.path).values(), *([lost] if lost else [])]

    def drop_damaged_checkpoints(self) -> None:
        """Delete the checkpoints that are damaged."""
        self._check_writable()
        checkpoints.remove(self.path, list(checkpoints.problems(self.path)))

    @property
    def _lost_checkpoint(self) -> str:
        """Return the problem of a finished run whose checkpoints end before its last round, "" for other runs."""
        rounds = checkpoints.rounds(self.path)
        if not rounds or self.status != "finished":
            return ""
        last = max(numbers(self.path / "rounds.jsonl"), default=0)
        return "" if rounds[-1] >= last else f"the checkpoint of the last round, {last}, is missing"

    def truncate_after(self, round: int) -> None:
        """Delete all records, checkpoints and results of rounds later than `round`, to resume a run there.

        Of duplicate lines, which no run writes, one is kept.
        """
        self._check_writable()
        for name in _RECORDS:
            lines = list(dict.fromkeys(read_lines(self.path / name)))
            records = zip(lines, parsed(self.path / name, lines), strict=True)
            keep_lines(self.path / name, [line for line, record in records if record["round"] <= round])
        checkpoints.remove_after(self.path, round)
        self._delete(self.path / name for name in _RESULTS)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json and the records as parquet files, and mark the run as finished."""
        from pyarrow import ArrowException

        self._check_writable()
        self._sync()
        write_text(self.path / "summary.json", encode(summary, indent=1))
        for name, frame in (("rounds.parquet", self.rounds()), ("clients.parquet", self.clients())):
            try:
                with replacing(self.path / name) as part:
                    frame.to_parquet(part, engine="pyarrow", index=False)
            except ArrowException as error:
                raise RunError(
                    f"cannot write '{self.path / name}': {error}; a column mixes types, see the .jsonl file"
                ) from error
        write_manifest(self.path, ("config.json", *_RESULTS[:-1], *_RECORDS))
        self.mark("finished")

    def problems(self) -> list[str]:
        """Return a sentence for each problem of a finished run's files; see `manifest_problems`."""
        problems = manifest_problems(self.path)
        if problems or self.status != "finished":
            return problems
        # Older runs without a manifest did not store their versions either.
        needed = ["summary.json", *([MANIFEST] if "environment" in self.config else [])]
        lost = [name for name in needed if not (self.path / name).is_file()]
        return [f"{name} is missing, though the run is finished" for name in lost]

    def rounds(self) -> pd.DataFrame:
        """Return the records of `append_round` so far, one row each."""
        return table(self.path / "rounds.jsonl")

    def clients(self) -> pd.DataFrame:
        """Return the records of `append_clients` so far, one row each."""
        return table(self.path / "clients.jsonl")

    def close(self) -> None:
        """Release the lock once all records are on the disk; the store can still be read."""
        if self._lock is not None:
            try:
                self._sync()
            finally:
                self._lock.release()
                self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and self._is_marked_running:
                is_stopped = isinstance(error, KeyboardInterrupt | SystemExit)
                self.mark("interrupted" if is_stopped else "failed", f"{type(error).__name__}: {error}")
        except RunError as second:
            # the cause (a full disk) may prevent the mark too; report the first error
            if error is not None:
                error.add_note(f"the run could not be marked: {second}")
        finally:
            self.close()

    def _append(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        self._check_writable()
        for record in records:
            if not isinstance(record.get("round"), Integral):
                raise ValueError(f"a record needs an integer 'round', got {dict(record)!r}")
        lines = encode_lines(records)
        self._mark_running()
        if lines:
            append_lines(self.path / name, lines, wait=False)
            self._unsynced.add(name)

    def _sync(self) -> None:
        """Wait until all records are on the disk."""
        while self._unsynced:
            sync(self.path / self._unsynced.pop())
        self._synced_at = time.monotonic()

    def _mark_running(self) -> None:
        """Mark the run as running, whatever it was before (interrupted, failed, finished)."""
        if not self._is_marked_running:
            self.mark("running")

    def _check_writable(self) -> None:
        if self._lock is None:
            raise RunError(f"the run '{self.path}' is open only for reading; open it for writing")

    def _clear(self) -> None:
        """Delete the files of an earlier run, config.json last: a crash in between leaves a run folder."""
        names = (*_RESULTS, *_RECORDS, "status.json")
        self._delete(self.path.glob(f".*{PART}"))
        self._delete(self.path.glob("checkpoint-*"))
        self._delete(self.path / name for name in (*names, "config.json"))

    def _delete(self, paths: Iterator[Path]) -> None:
        with reporting(self.path, "delete old files in"):
            for path in list(paths):
                path.unlink(missing_ok=True)

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            with reporting(path, "read"):
                content = decode(path.read_bytes())
            if not isinstance(content, dict):
                raise ValueError(f"it holds {type(content).__name__} instead of named values")
        except ValueError as error:
            raise RunError(f"'{path}' is damaged ({error}); restore it from a copy") from error
        return content


def _check_free(folder: Path, overwrite: bool) -> None:
    """Raise RunError if a folder has content that `create` must not touch."""
    with reporting(folder, "list"):
        names = {path.name for path in folder.iterdir() if not path.name.endswith(PART)}
    if not names - {".lock", "status.json"}:  # all that a killed `create` leaves
        return
    if "config.json" not in names:
        raise RunError(f"'{folder}' holds files that are not a run ({min(names)}, ...); choose another name")
    if not overwrite:
        raise RunError(
            f"'{folder}' already holds a run; continue it with --resume, choose another name, "
            "or allow overwriting it"
        )


def record_of(store: RunStore, round: int) -> dict[str, Any]:
    """Return the record of a round, as it was written. Raises RunError if there is none."""
    for record in decode_lines(read_lines(store.path / "rounds.jsonl")):
        if record["round"] == round:
            return dict(record)
    raise RunError(f"'{store.path}' has no record of round {round}; restore rounds.jsonl from a copy")


def amend(
    store: RunStore, round: int, record: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]
) -> None:
    """Replace the record of the last round, and all records of clients in it, each file atomically."""
    for name, records in (("clients.jsonl", clients), ("rounds.jsonl", [record])):
        lines = read_lines(store.path / name)
        before = [line for line, old in zip(lines, decode_lines(lines), strict=True) if old["round"] != round]
        with replacing(store.path / name) as part:
            part.write_bytes(b"".join(line + b"\n" for line in before))
            with part.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in encode_lines(records))


def reconfigure(store: RunStore, config: Mapping[str, Any]) -> None:
    """Replace the configuration of a run."""
    write_text(store.path / "config.json", encode(config, indent=1))
