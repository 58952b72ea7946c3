"""Checkpoints: exact, two kept, damage of any kind noticed, and saved in their share of the time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tailorfl.errors import RunError
from tailorfl.runs import checkpoints, job_loop
from tailorfl.runs.job_loop import BYTES_A_SECOND, SHARE, WAIT, Saver


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save_rounds(folder: Path, *rounds: int) -> None:
    for round in rounds:
        checkpoints.save(folder, round, {"w": torch.full((100,), float(round))}, {"lr": 0.1 * round})


def assert_loads(folder: Path, round: int) -> None:
    found = checkpoints.load_latest(folder)
    assert found is not None
    number, tensors, meta = found
    assert (number, meta) == (round, {"lr": 0.1 * round})
    assert torch.equal(tensors["w"], torch.full((100,), float(round)))


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    checkpoints.save(folder, 1, tensors, {})
    latest = checkpoints.load_latest(folder)
    assert latest is not None
    return latest[1]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool],
)
def test_tensors_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = {"a.weight": (torch.randn(3, 4) * 5).to(dtype), "scalar": torch.ones((), dtype=dtype)}
    tensors["empty"] = torch.zeros(0, 3, dtype=dtype)
    found = saved(tmp_path, tensors)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


def test_nan_payload_and_negative_zero_survive(tmp_path: Path) -> None:
    values = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    found = saved(tmp_path, {"w": values})
    assert torch.equal(found["w"].view(torch.int32), values.view(torch.int32))


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    """Slices of a stack of clients, tied weights, transposed and expanded views, a parameter with grad."""
    stack = torch.arange(12.0).view(3, 4)
    tensors = {
        "row": stack[1],
        "stack": stack,
        "tied": stack,
        "column": stack.T,
        "wide": torch.ones(1).expand(5),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    expected = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    found = saved(tmp_path, tensors)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_last_two_are_kept(tmp_path: Path) -> None:
    assert checkpoints.load_latest(tmp_path) is None
    save_rounds(tmp_path, 1, 2, 10)
    endings = ("json", "safetensors")
    assert names(tmp_path) == [f"checkpoint-{round:06d}.{e}" for round in (2, 10) for e in endings]
    assert_loads(tmp_path, 10)
    save_rounds(tmp_path, 999_999, 1_000_000)
    assert_loads(tmp_path, 1_000_000)  # of seven digits


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1  # same size, one bit of one weight
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = [
    (truncate, "safetensors"),
    (flip, "safetensors"),
    (empty, "safetensors"),
    (Path.unlink, "safetensors"),
    (truncate, "json"),
    (empty, "json"),
]


@pytest.mark.parametrize(("damage", "ending"), DAMAGES)
def test_damaged_checkpoint_is_passed_over(
    tmp_path: Path, damage: object, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_rounds(tmp_path, 1, 2)
    damage(tmp_path / f"checkpoint-000002.{ending}")  # type: ignore[operator]
    assert_loads(tmp_path, 1)
    (warning,) = caplog.messages
    assert "damaged" in warning
    assert "checkpoint-000002" in warning
    damage(tmp_path / f"checkpoint-000001.{ending}")  # type: ignore[operator]
    with pytest.raises(RunError, match=r"no usable .*checkpoint-000001"):
        checkpoints.load_latest(tmp_path)


def test_damaged_checkpoint_is_healed_by_saving_its_round_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a crash between the two files leaves, tensors alone, is no checkpoint and goes with the next."""
    save_rounds(tmp_path, 1, 2)
    truncate(tmp_path / "checkpoint-000002.safetensors")
    save_rounds(tmp_path, 2)
    assert_loads(tmp_path, 2)
    (tmp_path / "checkpoint-000002.json").unlink()
    assert_loads(tmp_path, 1)
    save_rounds(tmp_path, 3)
    assert "checkpoint-000002.safetensors" not in names(tmp_path)
    assert not caplog.messages


def test_remove_after(tmp_path: Path) -> None:
    save_rounds(tmp_path, 4, 8)
    checkpoints.remove_after(tmp_path, 4)
    assert_loads(tmp_path, 4)
    assert len(names(tmp_path)) == 2


# -- when they are saved ----------------------------------------------------------------------------------------

SCALARS = 1_000_000


class Clock:
    """A simulation and a store in one, with a time of its own; saving takes `cost` seconds."""

    def __init__(self, cost: float) -> None:
        self.now, self.cost, self.round = 0.0, cost, 0
        self.saved: list[tuple[int, float]] = []

    def dump(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return {"w": torch.zeros(SCALARS)}, {}

    def save_checkpoint(self, round: int, tensors: Any, facts: Any) -> None:
        self.saved.append((round, self.now))
        self.now += self.cost


def ran(cost: float, rounds: int, seconds: float, interval: int | None, patch: pytest.MonkeyPatch) -> Clock:
    """A run of rounds that take `seconds` each."""
    clock = Clock(cost)
    patch.setattr(job_loop.time, "perf_counter", lambda: clock.now)
    saver = Saver(clock, clock, interval)  # type: ignore[arg-type]
    for _ in range(rounds):
        clock.round += 1
        clock.now += seconds
        if saver.due():
            saver.save(clock.now)
    return clock


@pytest.mark.parametrize("cost", [0.001, 0.03, 0.2])
def test_checkpoints_take_their_share_of_the_time(cost: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ran(cost, 2000, 0.02, None, monkeypatch)
    assert 0 < len(clock.saved) * cost <= SHARE * clock.now + 2 * cost


def test_the_first_one_waits_until_it_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = (WAIT + 4 * SCALARS / BYTES_A_SECOND) / SHARE
    short = ran(0.03, int(0.9 * expected / 0.02), 0.02, None, monkeypatch)
    assert not short.saved
    assert ran(0.03, 2, expected, None, monkeypatch).saved[0][0] == 1  # after a long round at once


def test_a_given_interval_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [round for round, _ in ran(9.0, 10, 0.02, 3, monkeypatch).saved] == [3, 6, 9]
