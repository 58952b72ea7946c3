"""Random data: files that were cut, changed or made of odd cells, and arrays of odd kinds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tailorfl.data.build import build
from tailorfl.data.own import from_tensors
from tailorfl.data.registry import load_source
from tailorfl.data.source import Source
from tailorfl.models.registry import build as build_model
from tailorfl.models.weights import load_weights, save_weights
from tailorfl.printable import harmful

CELLS: list[str] = [
    "0", "1", "1.5", "-3", "1e40", "inf", "nan", "", " ", "yes", "no", "1+2j", "9" * 400, "9" * 30,
    "2001-01-01", "True",
    '"', '"a', "'", "\x1b[31m", "a\\nb", '"a\nb"', "é", "日本", "x" * 300, "\x00", "#", "[/x]", "$", "|",
]  # fmt: skip
SUFFIXES = {".png": "PNG", ".jpg": "JPEG", ".bmp": "BMP", ".tif": "TIFF", ".webp": "WEBP"}


def damaged(content: bytes, random_: random.Random) -> bytes:
    """Returns a file's content cut, with other bytes, without a piece, or with one twice."""
    found = bytearray(content)
    for _ in range(random_.randrange(1, 4)):
        place = random_.randrange(len(found) + 1)
        how = random_.randrange(5)
        if how == 0:
            del found[place:]
        elif how == 1 and place < len(found):
            found[place] = random_.randrange(256)
        elif how == 2:
            del found[place : place + random_.randrange(1, 100)]
        elif how == 3:
            found[place:place] = found[place : place + random_.randrange(1, 100)]
        elif place < len(found):
            found[place] ^= 1 << random_.randrange(8)
    return bytes(found)


def case(random_: random.Random, folder: Path) -> None:
    """Reads a source or weights.

    Raises:
        TailorflError: as it should.
        AssertionError: what came out is not what may come out.
    """
    kind = random_.choice(
        [_table, _table, _table_bytes, _arrays, _arrays, _images, _lines, _weights, _weights]
    )
    source = kind(random_, folder)
    if source is None:
        return
    names = [name for group in source.group_names.values() for name in group]
    assert not any(
        harmful(name) or len(name) > 200 for name in [*names, source.name, *source.info.get("classes", ())]
    )
    assert source.x.dtype in (torch.float32, torch.uint8, torch.int64)
    how = random_.choice(["none", "client", "federated"]) if "table" in source.info else "none"
    split = {"train": 0.6, "test": 0.4}
    federation = build(source=source, clients=None if source.groups else 2, split=split, normalise=how)
    source = federation.source
    assert source.holds_tokens or bool(torch.isfinite(source.x.float()).all())
    rows = np.concatenate([federation.part(part).flat() for part in ("train", "val", "test")])
    assert len(rows) == len(set(rows.tolist())), "a sample in two places"


def _table(random_: random.Random, folder: Path) -> Source:
    rows = [
        [f"h{k % 3}", str(k * 0.5), str(k * 0.25), str(k % 2)]
        for k in range(random_.choice([0, 1, 5, 30, 30, 30, 30, 30, 30]))
    ]
    head = ["h", "a", "b", "y"]
    for _ in range(random_.choice([0, 0, 1, 2])):
        if rows:
            random_.choice(rows)[random_.randrange(4)] = random_.choice(CELLS)
    if random_.random() < 0.2:
        head[random_.randrange(4)] = random_.choice([*CELLS, "a", "y"])
    if rows and random_.random() < 0.1:
        random_.choice(rows).append("1")
    lines = [",".join(line) for line in [head, *rows]]
    file = folder / "t.csv"
    file.write_text("\n".join(lines) + "\n", encoding=random_.choice(["utf-8"] * 8 + ["utf-16", "utf-8-sig"]))
    return load_source("table", path=str(file), **_roles(random_))


def _roles(random_: random.Random) -> dict[str, Any]:
    odd: list[Any] = ["h", "a", "y", "nope", "", 1, None, ["y"], ["a", "y"], [], {}, 1.5]
    found: dict[str, Any] = {"label": "y", "client": "h"}
    for key in ("label", "client", "features", "task", "split", "path"):
        if random_.random() < 0.03:
            found[key] = random_.choice(
                [*odd, "regression", "binary", "survival", "multilabel", "generation"]
            )
    found.pop("path", None)
    return found


def _table_bytes(random_: random.Random, folder: Path) -> Source:
    import pandas as pd

    frame = pd.DataFrame(
        {"h": ["a", "b"] * 10, "a": np.arange(20.0), "b": np.arange(20), "y": np.arange(20) % 2}
    )
    suffix = random_.choice([".csv", ".tsv", ".parquet"])
    file = folder / f"t{suffix}"
    if suffix == ".parquet":
        frame.to_parquet(file)
    else:
        frame.to_csv(file, sep="," if suffix == ".csv" else "\t", index=False)
    file.write_bytes(damaged(file.read_bytes(), random_))
    return load_source("table", path=str(file), label="y", client="h")


def _arrays(random_: random.Random, folder: Path) -> Source:
    n = random_.choice([0, 1, 2, 20, 20, 20])
    x, y = torch.randn(n, 3), torch.arange(n) % 2
    odd_x: list[Any] = [
        x + 1j, x.numpy() * 1j, x * float("nan"), x / 0, x.double() * 1e300, x[:, 0], x > 0, x.half(), x.to("meta"),
        x.to(torch.int64), x.tolist(), np.full((n, 3), "a"), np.full((n, 3), None), None, {}, 5, "x", [[1], [1, 2]],
        x[:0], x.reshape(n, 3, 1, 1), torch.zeros(n, 5, 5, 3), (x * 9).to(torch.uint8), [[10**30] * 3] * n,
        x.to_sparse(),
        np.full((n, 3), np.datetime64("2001-01-01")),
    ]  # fmt: skip
    odd_y: list[Any] = [
        y + 0j, -y, y + 1, y * 10**12, y.float(), y + 0.5, y > 0, y[:, None], torch.stack([y, y], 1),
        torch.randn(n, 2),
        y.tolist(), ["a", "b"] * (n // 2), None, y * float("nan"), np.full(n, 2**63, dtype=np.uint64), y[:0], 3, "ab",
    ]  # fmt: skip
    odd_clients: list[Any] = [
        ["a\x1b[31m", "b\n"] * (n // 2), list(range(n)), [None] * n, [1.5, float("nan")] * (n // 2), ["x" * 300] * n,
        [("a", 1)] * n, y, [[1]] * n, "a" * n, 5, {}, ["a"] * (n + 1), [1j] * n, [b"a"] * n, ["a", 1] * (n // 2),
        ["a\n", "a\\n"] * (n // 2), ["", " "] * (n // 2), [True] * n,
    ]  # fmt: skip
    odd_test: list[Any] = [[True] * n, [0, 1] * (n // 2), [0.5] * n, ["a"] * n, [None] * n, y > 0, 5]
    return from_tensors(
        random_.choice(odd_x) if random_.random() < 0.25 else x,
        random_.choice(odd_y) if random_.random() < 0.25 else y,
        clients=random_.choice([None] * 5 + [["a", "b"] * (n // 2)] * 5 + odd_clients),
        task=random_.choice(
            ["classification"] * 14
            + ["binary", "multilabel", "regression", "survival", "generation", "x", None]
        ),
        test=random_.choice(odd_test) if random_.random() < 0.2 else None,
        name=random_.choice(["mine", "a\x1b[2J", "x" * 300, ""]),
    )


def _images(random_: random.Random, folder: Path) -> Source:
    suffix = random_.choice(list(SUFFIXES))
    shape = random_.choice([(6, 6), (6, 6, 3)])
    values = np.random.default_rng(random_.randrange(1000))
    for client in ("a", "b"):
        for number in range(4):
            place = folder / client / f"c{number % 2}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(values.integers(0, 255, shape, dtype=np.uint8)).save(
                place / f"{number}{suffix}", SUFFIXES[suffix]
            )
    hit = folder / "b" / "c1" / f"1{suffix}"
    how = random_.randrange(5)
    if how == 0:
        Image.new(random_.choice(["1", "L", "LA", "RGBA", "P"]), random_.choice([(6, 6), (5, 6)])).save(
            hit.with_suffix(".png")
        )
    elif how == 1:
        hit.rename(folder / hit.name)
    else:
        hit.write_bytes(damaged(hit.read_bytes(), random_))
    return load_source("folder", path=str(folder), size=random_.choice([None, None, (4, 4)]))


def _lines(random_: random.Random, folder: Path) -> Source:
    good = {"instruction": "OPTIONS:\n- yes\n- no\n\ndo it", "output": "yes", "client": "c"}
    odd = [
        "9" * 5000, "[" * 5000 + "]" * 5000, "NaN", '"\\ud800"', "null", "1", "true", "[]", "{}",
        '"\\u001b[31m"', '""', "1e999",
    ]  # fmt: skip
    lines = [json.dumps({**good, "client": f"c{k % 2}"}) for k in range(8)]
    for _ in range(random_.randrange(3)):
        key = random_.choice([*good, "category", "x"])
        rest = ", ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in good.items() if k != key)
        lines[random_.randrange(8)] = f'{{{rest}, "{key}": {random_.choice(odd)}}}'
    content = "\n".join(lines).encode()
    (folder / "a.jsonl").write_bytes(damaged(content, random_) if random_.random() < 0.4 else content)
    form = random_.choice(["choice", "generation"])
    return load_source("instructions", path=str(folder / "a.jsonl"), form=form, tokenizer="byte", length=64)


def _weights(random_: random.Random, folder: Path) -> None:
    module = build_model("logistic", (1, 4, 4), 2)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    arrays: dict[str, Any] = {name: tensor.numpy() + 1 for name, tensor in before.items()}
    if random_.random() < 0.3:
        name = random_.choice(list(arrays))
        odd = [
            arrays[name] * 1j, arrays[name].astype(str), arrays[name][:0], arrays[name] * np.nan,
            arrays[name].astype("M8[s]"), np.float64(arrays[name]), np.array([None]),
        ]  # fmt: skip
        arrays[name] = random_.choice(odd)
    suffix = random_.choice([".npz", ".npz", ".safetensors"])
    file = folder / f"w{suffix}"
    if suffix == ".npz":
        random_.choice([np.savez, np.savez_compressed])(file, **arrays)
    else:
        save_weights({name: tensor + 1 for name, tensor in before.items()}, file)
    file.write_bytes(damaged(file.read_bytes(), random_) if random_.random() < 0.6 else file.read_bytes())
    try:
        load_weights(module, file)
    except Exception:
        now = module.state_dict()
        assert all(torch.equal(now[name], tensor) for name, tensor in before.items()), "half of the weights"
        raise
