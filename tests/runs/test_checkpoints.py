"""Checkpoints: exact, two kept, and damage of any kind noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tailorfl.errors import RunError
from tailorfl.runs import checkpoints


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


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool],
)
def test_tensors_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = {"a.weight": (torch.randn(3, 4) * 5).to(dtype), "scalar": torch.ones((), dtype=dtype)}
    tensors["empty"] = torch.zeros(0, 3, dtype=dtype)
    checkpoints.save(tmp_path, 1, tensors, {})
    found = checkpoints.load_latest(tmp_path)
    assert found is not None
    assert set(found[1]) == set(tensors)
    for name, tensor in tensors.items():
        assert found[1][name].dtype == dtype
        assert found[1][name].shape == tensor.shape
        assert torch.equal(found[1][name], tensor)


def test_nan_payload_and_negative_zero_survive(tmp_path: Path) -> None:
    values = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    checkpoints.save(tmp_path, 1, {"w": values}, {})
    found = checkpoints.load_latest(tmp_path)
    assert found is not None
    assert torch.equal(found[1]["w"].view(torch.int32), values.view(torch.int32))


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
    checkpoints.save(tmp_path, 1, tensors, {})
    found = checkpoints.load_latest(tmp_path)
    assert found is not None
    for name, tensor in expected.items():
        assert torch.equal(found[1][name], tensor), name


def test_last_two_are_kept(tmp_path: Path) -> None:
    save_rounds(tmp_path, 1, 2, 10)
    assert names(tmp_path) == [
        f"checkpoint-{round:06d}.{ending}" for round in (2, 10) for ending in ("json", "safetensors")
    ]
    assert_loads(tmp_path, 10)


def test_rounds_of_seven_digits_are_newest(tmp_path: Path) -> None:
    save_rounds(tmp_path, 999_999, 1_000_000)
    assert_loads(tmp_path, 1_000_000)


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoints.load_latest(tmp_path) is None


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
    with pytest.raises(RunError, match=r"no usable .*start anew"):
        checkpoints.load_latest(tmp_path)


def test_damaged_checkpoint_is_healed_by_saving_its_round_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_rounds(tmp_path, 1, 2)
    truncate(tmp_path / "checkpoint-000002.safetensors")
    save_rounds(tmp_path, 2)
    assert_loads(tmp_path, 2)
    assert not caplog.messages


def test_tensors_without_json_are_no_checkpoint(tmp_path: Path) -> None:
    """What a crash between the two files leaves."""
    save_rounds(tmp_path, 1, 2)
    (tmp_path / "checkpoint-000002.json").unlink()
    assert_loads(tmp_path, 1)
    save_rounds(tmp_path, 3)
    assert "checkpoint-000002.safetensors" not in names(tmp_path)


def test_remove_after(tmp_path: Path) -> None:
    save_rounds(tmp_path, 4, 8)
    checkpoints.remove_after(tmp_path, 4)
    assert_loads(tmp_path, 4)
    assert len(names(tmp_path)) == 2
