"""Files and arrays that are damaged, lie about their size or hold what is no number: told, and never half taken."""

from __future__ import annotations

import contextlib
import json
import struct
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from tailorfl import archives
from tailorfl.archives import load_arrays
from tailorfl.data.federation import Federation
from tailorfl.data.folder import MOST_PIXELS
from tailorfl.data.own import from_folder, from_tensors
from tailorfl.data.registry import load_source
from tailorfl.data.source import LONGEST_NAME, clean_names
from tailorfl.errors import DataError, ModelError
from tailorfl.models.registry import build
from tailorfl.models.weights import load_weights, save_weights
from tailorfl.printable import harmful
from tailorfl.runs.files import decode, decode_lines

X, Y = torch.arange(60.0).reshape(20, 3), torch.arange(20) % 2
SOON = 5.0


def parts(file: Path, how_many: int) -> Iterator[bytes]:
    """The beginnings of a file, from none of it to nearly all."""
    content = file.read_bytes()
    for k in range(how_many):
        yield content[: k * len(content) // how_many]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_weights_that_were_cut_anywhere_are_refused_and_change_nothing(tmp_path: Path, suffix: str) -> None:
    module = build("mlp", (1, 4, 4), 3, hidden=[5])
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    file, cut = tmp_path / f"whole{suffix}", tmp_path / f"cut{suffix}"
    if suffix == ".npz":
        np.savez_compressed(file, **{name: tensor.numpy() for name, tensor in before.items()})
    else:
        save_weights(before, file)
    assert load_weights(module, file).missing == ()
    for content in parts(file, 40):
        cut.write_bytes(content)
        with pytest.raises(ModelError, match="cannot be read"):
            load_weights(module, cut)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_weights_that_are_no_real_numbers_are_refused(tmp_path: Path) -> None:
    module = build("logistic", (4,), 2)
    *arrays, (last, array) = [(name, tensor.numpy()) for name, tensor in module.state_dict().items()]
    for odd in (array * 1j, array * np.nan, array.astype(str), array.astype("M8[s]")):
        np.savez(tmp_path / "w.npz", **dict(arrays), **{last: odd})
        with pytest.raises(ModelError):
            load_weights(module, tmp_path / "w.npz")


def npy_header(shape: tuple[int, ...]) -> bytes:
    text = str({"descr": "<f4", "fortran_order": False, "shape": shape}).ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def test_archives_that_unpack_to_more_than_there_is_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "SMALL", 2**25)
    bomb, lie = tmp_path / "bomb.npz", tmp_path / "lie.npz"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("w.npy", "w") as file:
        file.write(npy_header((15_000_000,)))
        for _ in range(6):
            file.write(bytes(10_000_000))
    with zipfile.ZipFile(lie, "w") as archive:
        archive.writestr("w.npy", npy_header((10**15,)))
    begin = time.process_time()
    for hostile, words in ((bomb, r"0\.1 MB unpack to 0\.1 GB"), (lie, "larger than the memory|damaged")):
        with pytest.raises(ValueError, match=words):
            load_arrays(hostile)
        with pytest.raises(ModelError, match="cannot be read as arrays"):
            load_weights(build("logistic", (4,), 2), hostile)
    assert time.process_time() - begin < SOON


def test_a_data_file_that_was_cut_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tmp_path / "whole.npz"
    np.savez_compressed(whole, x_train=np.zeros((3, 28, 28), np.uint8), y_train=np.arange(3))
    monkeypatch.setenv("TAILORFL_DATA", str(tmp_path))
    for content in parts(whole, 12):
        (tmp_path / "mnist.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"cannot be read: .* fetch it again"):
            load_source("mnist")


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def picture(width: int, height: int, extra: bytes = b"") -> bytes:
    """A grey PNG that claims a size, and holds next to nothing."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    rows = zlib.compress(bytes((width + 1) * height if width * height < 1000 else 100))
    return b"\x89PNG\r\n\x1a\n" + head + extra + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The folder of the pictures of client a of class c."""
    (tmp_path / "a" / "c").mkdir(parents=True)
    return tmp_path / "a" / "c"


@pytest.mark.parametrize("size", [None, (4, 4)])
def test_pictures_that_claim_too_many_pixels_are_not_unpacked(tmp_path: Path, place: Path, size: Any) -> None:
    text = chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(10**7)))
    begin = time.process_time()
    for content, words in (
        *((picture(n, n), rf"at most {MOST_PIXELS:,}|exceeds limit") for n in (8000, 20_000, 2**31 - 1)),
        (picture(4, 4, text), r"x\.png' cannot be read"),
    ):
        (place / "x.png").write_bytes(content)
        with pytest.raises(DataError, match=words):
            from_folder(tmp_path, size=size)
    assert time.process_time() - begin < SOON


@pytest.mark.filterwarnings("ignore::UserWarning")  # of TIFF
@pytest.mark.parametrize("suffix", [".png", ".jpg", ".bmp", ".tif", ".webp"])
def test_pictures_that_were_cut_are_told_or_whole(tmp_path: Path, place: Path, suffix: str) -> None:
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(place / f"x{suffix}")
    whole = from_folder(tmp_path).x
    for content in list(parts(place / f"x{suffix}", 25)):
        (place / f"x{suffix}").write_bytes(content)
        with contextlib.suppress(DataError):
            assert torch.equal(from_folder(tmp_path).x, whole)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_of_32_bits_are_not_cut_off(tmp_path: Path, place: Path, mode: str) -> None:
    Image.new(mode, (4, 4), 1000).save(place / "x.tif")
    with pytest.raises(DataError, match=f"32 bits .*mode {mode}"):
        from_folder(tmp_path)


def test_a_folder_that_is_none_of_pictures_is_left_at_once(tmp_path: Path) -> None:
    deep = tmp_path
    for level in range(40):
        deep = deep / f"d{level}"
    deep.mkdir(parents=True)
    (deep / "x.png").write_bytes(b"")
    (tmp_path / "loop").symlink_to(tmp_path)
    with pytest.raises(DataError, match="holds no images"):
        from_folder(tmp_path)
    (tmp_path / "x.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"expected client/class/image, .* but found '.*x\.png'"):
        from_folder(tmp_path)


@pytest.mark.parametrize(
    "line",
    ['{"instruction": "a", "output": "b", "client": ' + "9" * 5000 + "}", "[" * 100_000 + "]" * 100_000],
    ids=["digits", "brackets"],
)
def test_json_that_breaks_its_reader(tmp_path: Path, line: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"instruction": "a", "output": "b"}) + f"\n{line}\n")
    with pytest.raises(DataError, match=r"a\.jsonl', line 2: is not JSON"):
        load_source("instructions", path=str(file), form="generation", tokenizer="byte")
    for read in (decode, lambda text: decode_lines([text.encode()])):
        with pytest.raises(ValueError, match=r"digits|nest too deeply"):
            read("9" * 5000 if "client" in line else line)


def test_names_are_cleaned_where_they_come_in(tmp_path: Path) -> None:
    odd = ["a\x1b[31m", "b\n", "b\\n", "x" * 300]
    names = odd * 5
    source = from_tensors(X, Y, clients=names, name="my\rset")
    found = source.group_names["client"]
    assert len(set(found)) == 4
    assert harmful("".join([*found, source.name])) is None
    assert max(map(len, found)) <= LONGEST_NAME
    assert "a\\x1b[31m" in found
    pd.DataFrame({"h": names, "a": X[:, 0], "y": ["sick\x07", "well"] * 10}).to_csv(tmp_path / "t.csv")
    table = load_source("table", path=str(tmp_path / "t.csv"), label="y", client="h", features=["a"])
    assert table.info["classes"] == ("sick\\x07", "well")
    rows = [np.arange(10), np.arange(10, 20)]
    assert Federation(source, rows, [rows[0][:0]] * 2, rows, ("a\x00", "b"), 2).names == ("a\\x00", "b")


def test_clean_names_stay_what_they_are_and_different_ones_differ() -> None:
    plain = ("a", "日本", "x" * LONGEST_NAME)
    assert clean_names(plain) == plain
    for names in (("a\n", "a\\n"), ("a\\n", "a\n"), ("y" * 201, "y" * 202, "y" * 201)):
        found = clean_names(names)
        assert [a == b for a in found for b in found] == [a == b for a in names for b in names]
