"""The file layer: exact JSON, atomic replacement, appends that are whole or absent."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailorfl.errors import RunError
from tailorfl.runs import files

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def strict(text: str) -> Any:
    """Parse as the standard says: NaN and Infinity are no JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"not JSON: {constant}")

    return json.loads(text, parse_constant=refuse)


@given(json_values.filter(lambda value: "Infinity" not in repr(value)))
def test_json_round_trip_is_exact(value: Any) -> None:
    text = files.encode(value)
    strict(text)
    assert "\n" not in text
    assert repr(files.decode(text)) == repr(value)  # repr: tells -0.0 from 0.0 and 1 from True


def test_arrays_tensors_and_paths() -> None:
    value = {
        "f": np.float64(0.1),
        "s": np.float32(0.1),
        "i": np.int64(3),
        "b": np.True_,
        "a": np.array([1.5, np.nan, -np.inf]),
        "t": torch.tensor([[1, 2]]),
        "p": Path("a/b"),
        4: (1,),
    }
    expected = {"f": 0.1, "s": float(np.float32(0.1)), "i": 3, "b": True, "a": [1.5, None, "-Infinity"]}
    assert strict(files.encode(value)) == {**expected, "t": [[1, 2]], "p": "a/b", "4": [1]}


def test_what_json_cannot_hold_is_an_error() -> None:
    with pytest.raises(TypeError, match="cannot store a set"):
        files.encode({"a": {1}})


def test_replacing_keeps_the_old_file_when_the_block_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_text(path, "old")
    with pytest.raises(ZeroDivisionError), files.replacing(path) as part:  # noqa: PT012
        part.write_text("ne")
        assert path.read_text() == "old"  # a reader in the meantime sees the old file
        raise ZeroDivisionError
    assert path.read_text() == "old"
    files.write_text(path, "new")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("a-file/run/x.json", "a file where"),
        ("absent/x.json", "check the name"),
        (".", "a folder where"),
    ],
)
def test_refused_writes_name_path_and_remedy(tmp_path: Path, path: str, remedy: str) -> None:
    (tmp_path / "a-file").write_text("")
    with pytest.raises(RunError, match=remedy) as caught:
        files.append_lines(tmp_path / path, ["{}"])
    assert str(tmp_path / path) in str(caught.value)


@given(st.binary(max_size=30), st.integers(0, 3))
def test_a_half_written_line_is_not_read(tail: bytes, lines: int) -> None:
    whole = [b'{"round": %d}' % number for number in range(lines)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        path.write_bytes(b"".join(line + b"\n" for line in whole) + tail.replace(b"\n", b""))
        assert files.read_lines(path) == whole
        files.keep_lines(path, files.read_lines(path))
        files.append_lines(path, ["next"])
        assert path.read_bytes().split(b"\n") == [*whole, b"next", b""]


def test_lock_is_exclusive_and_reusable_and_names_its_owner_alone(tmp_path: Path) -> None:
    assert not files.is_locked(tmp_path)
    (tmp_path / ".lock").write_text("1234567890123")  # of an owner before
    lock = files.FolderLock(tmp_path)
    assert files.is_locked(tmp_path)
    assert (tmp_path / ".lock").read_text() == str(os.getpid())
    with pytest.raises(RunError, match=f"process {os.getpid()} is writing"):
        files.FolderLock(tmp_path)
    lock.release()
    assert not files.is_locked(tmp_path)
    with files.FolderLock(tmp_path):
        pass


@given(st.lists(st.dictionaries(st.text(max_size=5), json_values | st.floats(), max_size=5), max_size=6))
def test_lines_are_those_of_one_record_after_another(records: list[dict[str, Any]]) -> None:
    lines = files.encode_lines(records)
    assert lines == [files.encode(record) for record in records]
    found = files.decode_lines([line.encode() for line in lines])
    assert repr(found) == repr([files.decode(line) for line in lines])


def test_lines_that_only_together_are_json_are_damaged() -> None:
    with pytest.raises(ValueError, match="2 lines hold 1 values"):
        files.decode_lines([b'{"a": 1', b'"b": 2}'])
    with pytest.raises(ValueError, match="Expecting"):
        files.decode_lines([b'{"a": 1}', b""])


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the disk was waited for: each file with what it then held, and folders."""
    seen: list[Any] = []

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        seen.append((path.name, "folder" if path.is_dir() else path.read_bytes()))

    monkeypatch.setattr(os, "fsync", fsync)
    return seen


def test_appended_lines_are_in_the_file_when_the_disk_is_waited_for(
    tmp_path: Path, waited: list[Any]
) -> None:
    """Without waiting they are in the file all the same, and a new name on the disk."""
    path, other = tmp_path / "rounds.jsonl", tmp_path / "clients.jsonl"
    files.append_lines(path, ["a", "b"])
    assert waited == [("rounds.jsonl", b"a\nb\n"), (tmp_path.name, "folder")]
    files.append_lines(path, ["c"])
    assert waited[2:] == [("rounds.jsonl", b"a\nb\nc\n")]  # its name is on the disk already
    files.append_lines(other, ["a"], wait=False)
    assert waited[3:] == [(tmp_path.name, "folder")]
    assert other.read_bytes() == b"a\n"
    files.sync(other)
    assert waited[4:] == [("clients.jsonl", b"a\n")]


def test_a_replacement_is_whole_before_it_takes_its_name(tmp_path: Path, waited: list[Any]) -> None:
    path = tmp_path / "summary.json"
    with files.replacing(path) as part:
        part.write_text("new")
        assert part.name == f".summary.json.{os.getpid()}.part"
    assert waited == [(part.name, b"new"), (tmp_path.name, "folder")]
    assert path.read_text() == "new"


def test_lines_that_cannot_be_written_leave_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rounds.jsonl"
    files.append_lines(path, ["a"])

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"cannot append to.*free some space.*the same command again"):
        files.append_lines(path, ["b"])
    assert path.read_bytes() == b"a\n"


@pytest.mark.parametrize(
    ("kept", "content"),
    [([b"a", b"b"], None), ([b"a"], b"a\n"), ([], b""), ([b"a", b"b", b"c"], b"a\nb\nc\n")],
)
def test_lines_are_kept_byte_for_byte_and_a_file_that_has_just_them_is_left_alone(
    kept: list[bytes], content: bytes | None, tmp_path: Path
) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(b"a\nb\n")
    before = path.stat().st_ino
    files.keep_lines(path, kept)
    assert path.read_bytes() == (b"a\nb\n" if content is None else content)
    assert (path.stat().st_ino == before) == (content is None)
    files.keep_lines(tmp_path / "absent", [b"a"])
    assert not (tmp_path / "absent").exists()
