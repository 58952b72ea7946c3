"""What trackers hold, read by means of their own, and what it should be: {name: [(round, number)]}."""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Series = dict[str, list[tuple[int, float]]]
BLOCK = 32768
"""Bytes of a block of a .wandb file, which is a log as LevelDB's; no record's head is cut in two."""


def recorded(job: Path) -> Series:
    """The numbers of a job's rounds.jsonl, read without the library."""
    found: Series = {}
    for line in (job / "rounds.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name, value in record.items():
            if type(value) in (int, float) and name != "round":
                found.setdefault(name, []).append((record["round"], float(value)))
    return found


def tensorboard(folder: Path) -> Series:
    """Scalars as TensorBoard loads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loaded = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    loaded.Reload()
    return {tag: [(e.step, e.value) for e in loaded.Scalars(tag)] for tag in loaded.Tags()["scalars"]}


def mlflow(address: str, experiment: str) -> dict[str, tuple[str, Series]]:
    """{name of the run: (its status, metrics)} of the runs that MLflow shows."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=address)
    shown = client.get_experiment_by_name(experiment)
    assert shown is not None
    found: dict[str, tuple[str, Series]] = {}
    for run in client.search_runs([shown.experiment_id]):
        assert run.info.run_name not in found, "two runs of one job"
        metrics = {
            name: sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, name))
            for name in run.data.metrics
        }
        found[run.info.run_name] = run.info.status, metrics
    return found


def wandb(folder: Path) -> tuple[Any, Series, int | None]:
    """(the run as it was begun, its history, its exit code) of the one offline run below a folder.

    W&B's service may write the end of the file a little after the run's.
    """
    begin = time.monotonic()
    while (found := _wandb(folder))[2] is None and time.monotonic() < begin + 30:
        time.sleep(0.2)
    return found


def _wandb(folder: Path) -> tuple[Any, Series, int | None]:
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    begun, series, code = None, {}, None
    for block in _blocks(file.read_bytes()):
        record = Record()
        record.ParseFromString(block)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            begun = record.run
        elif kind == "exit":
            code = record.exit.exit_code
        elif kind == "history":
            for item in record.history.item:
                (name,) = item.nested_key
                if not name.startswith("_"):
                    series.setdefault(name, []).append(
                        (record.history.step.num, float(json.loads(item.value_json)))
                    )
    return begun, series, code


def _blocks(data: bytes) -> Iterator[bytes]:
    assert data[:4] in (b":W&B", b"")
    at, part = 7, b""
    while at + 7 <= len(data):
        room = BLOCK - at % BLOCK
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of several parts
            yield part
            part = b""


def assert_same(found: Series, expected: Series, digits: float = 0.0) -> None:
    """The same names and rounds; numbers equal, or but for a share `digits`."""
    assert found.keys() == expected.keys()
    for name, points in expected.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        for (_, a), (_, b) in zip(found[name], points, strict=True):
            assert math.isclose(a, b, rel_tol=digits), (name, a, b)
