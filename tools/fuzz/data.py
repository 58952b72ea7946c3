"""Random data: files that were cut, changed or made of odd cells, tables as hospitals have them, and odd arrays."""

from __future__ import annotations

import json
import logging
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image

from tailorfl.data.build import build
from tailorfl.data.federation import weaknesses
from tailorfl.data.own import from_table, from_tensors
from tailorfl.data.registry import load_source
from tailorfl.data.source import Source
from tailorfl.errors import TailorflError
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
    """Return a file's content cut, with other bytes, without a piece, or with one twice."""
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
    """Read a source or weights.

    Raises:
        TailorflError: as it should.
        AssertionError: what came out is not what may come out.
    """
    kind = random_.choice(
        [_table, _own_table, _own_table, _table_bytes, _arrays, _arrays, _images, _lines, _weights, _weights]
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


FAULTS = (
    "gaps", "na words", "booleans", "thousands", "header blanks", "trailing separators", "short rows", "lacking column",
    "ids", "dates", "ids excluded", "dates excluded", "index", "blank label", "doubled header", "infinite", "huge",
    "odd word", "copies", "single class", "one class", "misspelt words", "lists", "two spellings", "row names",
)  # fmt: skip


@dataclass
class Written:
    """A table of several sites in files, as a hospital of some country might write it.

    Attributes:
        path: a file, or a folder of files.
        options: of the source `table`.
        truth: what was meant, as a frame with a column `site`.
        faults: what is odd.
        named: what has to be in an error or a warning, as a regular expression; "" where all is well.
    """

    path: Path
    options: dict[str, Any]
    truth: pd.DataFrame
    faults: tuple[str, ...]
    named: str


def written(random_: random.Random, folder: Path) -> Written:
    """Return a table with random faults, in a random form."""
    faults = set(random_.sample(FAULTS, random_.choice([0, 1, 1, 2])))
    several = random_.random() < 0.4 or bool(faults & {"lacking column", "two spellings"})
    suffix = ".parquet" if "lists" in faults else random_.choice([".csv"] * 8 + [".tsv", ".parquet"])
    text = suffix != ".parquet"
    if not text:
        faults -= {
            "header blanks",
            "trailing separators",
            "short rows",
            "row names",
            "doubled header",
            "thousands",
        }
    if "misspelt words" in faults:
        faults -= {"lacking column", "two spellings"}
    if "row names" in faults:
        faults -= {"trailing separators", "short rows"}
    rng = np.random.default_rng(random_.randrange(10**9))
    count = random_.choice([24, 30]) * 3
    truth = pd.DataFrame(
        {
            "site": np.repeat(["ash", "elm", "oak"], count // 3),
            "outcome": rng.choice(["gut", "schlecht"], count),
            "age": rng.integers(20, 90, count),
            "dose": rng.normal(5, 2, count).round(random_.choice([1, 2, 5])),
            "sex": rng.choice(["männlich", "weiblich"], count),
        }
    )
    options: dict[str, Any] = {"label": "outcome"} if several else {"label": "outcome", "client": "site"}
    named = _with_faults(truth, faults, rng, options)
    shown = truth.copy()
    truth = truth.drop(columns=["index", "patient", "visit"], errors="ignore")
    if "index" in faults:
        shown = shown.rename(columns={"index": "" if text else "Unnamed: 0"})
    if "na words" in faults:
        shown["dose"] = shown["dose"].astype(object).where(shown["dose"].notna(), "?")
    form = {
        "sep": random_.choice(",;\t|"), "decimal": random_.choice(".,"), "quoted": random_.random() < 0.3,
        "encoding": random_.choice(["utf-8", "utf-8", "utf-8-sig", "latin-1", "utf-16"]),
    }  # fmt: skip
    path = folder / f"t{suffix}"
    if several:
        path = folder / "sites"
        path.mkdir()
        for site, rows in shown.groupby("site"):
            mine = rows.drop(columns="site")
            if site == "elm" and "lacking column" in faults:
                mine = mine.drop(columns="dose")
            if site == "elm" and "two spellings" in faults:
                mine = mine.rename(columns={"age": "Age"})
            _write(path / f"{site}{suffix}", mine, form, faults)
    else:
        _write(path, shown, form, faults)
    return Written(path, options, truth, tuple(sorted(faults)), "|".join(named))


def _with_faults(
    truth: pd.DataFrame, faults: set[str], rng: np.random.Generator, options: dict[str, Any]
) -> list[str]:
    """Make a table odd, and return what has to be named."""
    count, named = len(truth), []
    if faults & {"gaps", "na words"}:
        truth.loc[rng.random(count) < 0.2, "dose"] = np.nan
        options["na_values"] = ["?"]
    if "lacking column" in faults:
        truth.loc[truth["site"] == "elm", "dose"] = np.nan
        named.append("'dose' .elm.")
    if "booleans" in faults:
        truth["smoker"] = rng.random(count) < 0.5
    if "thousands" in faults:
        truth["cost"] = (rng.random(count) * 90_000 + 1_000).round(2)
    for fault, column, cells in (
        ("ids", "patient", [f"{k:05}a" for k in range(count)]),
        ("dates", "visit", [f"{k % 28 + 1:02}.{k % 12 + 1:02}.2024" for k in range(count)]),
    ):
        if fault in faults or f"{fault} excluded" in faults:
            truth.insert(2, column, cells)
        if f"{fault} excluded" in faults:
            options["exclude"] = [*options.get("exclude", ()), column]
        elif fault in faults:
            named.append(column)
    if "index" in faults:
        truth.insert(0, "index", range(count))
        named.append("Unnamed: 0")
    if "infinite" in faults:
        truth.loc[3, "dose"] = np.inf
    if "huge" in faults:
        truth.loc[4, "dose"] = 1e300
    if "odd word" in faults:
        truth["dose"] = truth["dose"].astype(object)
        truth.loc[::30, "dose"] = "unbekannt"
    if "blank label" in faults:
        truth.loc[7, "outcome"] = "  "
    if "copies" in faults:
        truth.loc[count - 1] = truth.loc[count - 2]
    if "single class" in faults:
        truth.loc[5, "outcome"] = "unklar"
    if "one class" in faults:
        truth.loc[truth["site"] == "oak", "outcome"] = "gut"
    if "misspelt words" in faults:
        options["words"] = ["agee"]
    if "lists" in faults:
        truth["scan"] = pd.Series([[1.0, float(k)] for k in range(count)])
    names = {
        "infinite": "'dose'", "huge": "'dose'", "odd word": "'dose'", "blank label": "'outcome'", "copies": "copies",
        "single class": "unklar", "one class": "one class", "misspelt words": "'agee'", "lists": "'scan'",
        "two spellings": "'Age'", "row names": "cells", "doubled header": "'sex' twice",
    }  # fmt: skip
    return [*named, *(name for fault, name in names.items() if fault in faults)]


def _write(file: Path, frame: pd.DataFrame, form: dict[str, Any], faults: set[str]) -> None:
    if file.suffix == ".parquet":
        odd = [column for column in frame if frame[column].map(type).nunique() > 1]
        frame.astype(dict.fromkeys(odd, str)).to_parquet(file)
        return
    sep, decimal = "\t" if file.suffix == ".tsv" else form["sep"], form["decimal"]
    grouping = "." if decimal == "," else ","

    def cell(column: str, value: Any) -> str:
        if isinstance(value, float):
            long = f"{value:,.2f}".replace(",", " ").replace(".", decimal).replace(" ", grouping)
            value = "" if np.isnan(value) else long if column == "cost" else repr(value).replace(".", decimal)
        return f'"{value}"' if form["quoted"] or sep in str(value) else str(value)

    heads = list(map(str, frame.columns))
    lines = [
        [cell(h, v) for h, v in zip(heads, row, strict=True)]
        for row in frame.itertuples(index=False, name=None)
    ]
    if "doubled header" in faults:
        heads, lines = [*heads, "sex"], [[*line, "x"] for line in lines]
    if "row names" in faults:
        lines = [[f"r{number}", *line] for number, line in enumerate(lines)]
    if "header blanks" in faults:
        heads = [f" {head} " for head in heads]
    if "short rows" in faults:
        lines = [line[:-1] if not line[-1] else line for line in lines]
    end = sep if "trailing separators" in faults else ""
    text = "\r\n".join(sep.join(line) + end for line in [heads, *lines]) + "\r\n"
    file.write_bytes(text.encode(form["encoding"]))


def _own_table(random_: random.Random, folder: Path) -> Source | None:
    """A table in a random form: its numbers are those that were meant, or what is odd about it is named."""
    table, said = written(random_, folder), _Said()
    log = logging.getLogger("tailorfl")
    level = log.level
    log.setLevel(logging.WARNING)
    log.addHandler(said)
    refused = None
    try:
        found = build("table", path=str(table.path), options=table.options, normalise="federated")
        said.texts += weaknesses(found)
    except TailorflError as error:
        refused = error
        said.texts = [str(error)]
    finally:
        log.removeHandler(said)
        log.setLevel(level)
    assert table.named or refused is None, (table.faults, said.texts)
    assert re.search(table.named, "\n".join(said.texts)), (table.faults, table.named, said.texts)
    if refused is not None:
        raise refused
    if not set(table.faults) & {"copies", "doubled header"}:
        options = {k: v for k, v in table.options.items() if k not in ("exclude", "client")}
        meant = build(source=from_table(table.truth, client="site", **options), normalise="federated").source
        assert found.source.info["features"] == meant.info["features"], table.faults
        assert torch.equal(found.source.x, meant.x), table.faults
    return None


class _Said(logging.Handler):
    """Keeps the text of every message."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
