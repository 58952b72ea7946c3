"""Public sets of the hub: tiny copies, laid out as the hub's cache has them or served as the hub serves them."""

from __future__ import annotations

import functools
import hashlib
import io
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from docs.blocks import blocks, commands
from tailorfl.cli.main import app
from tailorfl.data import hub_sets, storage
from tailorfl.data.build import build
from tailorfl.data.hub_sets import HUB_SETS, WINDOW
from tailorfl.data.registry import load_source
from tailorfl.data.tokenizers import load_tokenizer
from tailorfl.errors import ConfigError, DataError, MissingExtraError

datasets = pytest.importorskip("datasets")
constants = pytest.importorskip("huggingface_hub.constants")
STRING = datasets.Value("string")

RNG = np.random.default_rng(0)
PAGE = Path(__file__).parents[2] / "docs" / "data-sets.md"
LETTERS = [*"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"]
ROLES = {"HAMLET_KING": 700, "HAMLET_GHOST": 90, "MACBETH_WITCH": 520}
TEXT = "To be, or not to be: that is the question; whether 'tis nobler in the mind to suffer\n" * 10


def pictures(classes: list[str], count: int, side: int, label="label", image="image", **more: Any) -> Any:
    """A part of a set of images with all classes in turn, stored as the hub's parquet files store them."""
    shape = (count, side, side, 3) if side == 32 else (count, side, side)
    rows = {image: list(map(Image.fromarray, RNG.integers(0, 256, shape, dtype=np.uint8)))}
    rows[label] = [k % len(classes) for k in range(count)]
    features = {image: datasets.Image(), label: datasets.ClassLabel(names=classes)}
    for name, (values, kind) in more.items():
        rows[name], features[name] = values, kind
    return datasets.Dataset.from_dict(rows, datasets.Features(features))


def tiny(name: str, part: str) -> Any:
    """A part of a data set with the columns of its repository."""
    count = 60 if part == "train" else 20
    ten, hundred = [*"0123456789"], [f"class {k}" for k in range(100)]
    if name in ("mnist", "fashion_mnist"):
        return pictures(ten, count, 28)
    if name == "cifar10":
        return pictures(ten, count, 32, image="img")
    if name == "cifar100":
        coarse = [k % 100 // 5 for k in range(5 * count)], datasets.ClassLabel(names=hundred[::5])
        return pictures(hundred, 5 * count, 32, label="fine_label", image="img", coarse_label=coarse)
    if name == "femnist":
        writers = [f"f{k // 60:04}_00" for k in range(3 * count)], STRING
        return pictures(LETTERS, 3 * count, 28, label="character", writer_id=writers)
    if name == "ag_news":
        subjects = datasets.ClassLabel(names=["World", "Sports", "Business", "Sci/Tech"])
        rows = {"text": [f"news {part} {k}" for k in range(count)], "label": [k % 4 for k in range(count)]}
        return datasets.Dataset.from_dict(rows, datasets.Features(text=STRING, label=subjects))
    text = TEXT.replace("\n", " ")
    windows = [(role, text[k : k + WINDOW], text[k + WINDOW]) for role, n in ROLES.items() for k in range(n)]
    return datasets.Dataset.from_pandas(pd.DataFrame(windows, columns=["character_id", "x", "y"]))


@functools.cache
def contents(name: str) -> dict[str, bytes]:
    """The bytes of each file of a tiny copy, by its path in the repository."""
    files = {}
    for part, path in HUB_SETS[name].files.items():
        file, copy = io.BytesIO(), tiny(name, part)
        (copy.to_csv if path.endswith("csv") else copy.to_parquet)(file)
        files[path] = file.getvalue()
    return files


def declare(monkeypatch: pytest.MonkeyPatch, name: str, files: dict[str, bytes]) -> None:
    """Declare the digests of a tiny copy, where digests of the real files are declared."""
    hub_set = HUB_SETS[name]
    digests = {part: hashlib.sha256(files[hub_set.files[part]]).hexdigest() for part in hub_set.digests}
    monkeypatch.setitem(HUB_SETS, name, replace(hub_set, digests=digests))


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No data folder, cache and hub but the test's own."""
    monkeypatch.setenv("TAILORFL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv(storage.CACHE_VARIABLE, str(tmp_path / "converted"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], list[Path]]:
    """`at_hand("mnist")` lays a tiny copy out as `hf download --cache-dir` does; returns the stored files."""

    def lay_out(name: str) -> list[Path]:
        files, hub_set = contents(name), HUB_SETS[name]
        declare(monkeypatch, name, files)
        folder = tmp_path / "data" / f"datasets--{hub_set.repository.replace('/', '--')}"
        blobs = []
        for path, content in files.items():
            blobs.append(folder / "blobs" / hashlib.sha256(content).hexdigest())
            link = folder / "snapshots" / hub_set.revision / path
            for file in (blobs[-1], link):
                file.parent.mkdir(parents=True, exist_ok=True)
            blobs[-1].write_bytes(content)
            link.symlink_to(blobs[-1])
        return blobs

    return lay_out


@pytest.mark.parametrize(
    ("name", "shape", "classes", "train", "test"),
    [
        ("mnist", (1, 28, 28), 10, 60, 20),
        ("fashion_mnist", (1, 28, 28), 10, 60, 20),
        ("cifar10", (3, 32, 32), 10, 60, 20),
        pytest.param("cifar100", (3, 32, 32), 100, 300, 100, marks=pytest.mark.slow),
    ],
)
def test_images_in_parts(at_hand: Any, name: str, shape: Any, classes: int, train: int, test: int) -> None:
    blobs, source = at_hand(name), load_source(name)
    assert (source.name, source.input_shape, source.outputs) == (name, shape, classes)
    assert source.test.tolist() == [False] * train + [True] * test
    assert source.y.tolist() == [k % classes for part in (train, test) for k in range(part)]
    for blob, row in zip(blobs, (0, train), strict=True):
        with Image.open(io.BytesIO(pd.read_parquet(blob).iloc[0, 0]["bytes"])) as picture:
            pixels = torch.from_numpy(np.asarray(picture).copy())
        assert torch.equal(source.x[row], pixels.permute(2, 0, 1) if pixels.dim() == 3 else pixels[None])
    assert all(0.1 < number < 0.6 for number in (*source.mean, *source.std))


def test_a_file_of_the_data_folder_comes_first_and_has_the_same_images(at_hand: Any, tmp_path: Path) -> None:
    at_hand("mnist")
    source, unit = load_source("mnist"), load_source("mnist", scaling="unit")
    assert (source.mean, source.std, unit.mean, unit.std) == ((0.1307,), (0.3081,), (0.0,), (1.0,))
    with pytest.raises(ConfigError, match="unit"):
        load_source("mnist", scaling="units")
    arrays = {}
    for part, rows in {"train": ~source.test, "test": source.test}.items():
        arrays |= {f"x_{part}": source.x[rows, 0].numpy(), f"y_{part}": source.y[rows].numpy()}
    digests = [hashlib.sha256(), hashlib.sha256()]
    for digest in digests:
        load_source("mnist").feed(digest)
        np.savez(tmp_path / "data" / "mnist.npz", **arrays)
    assert digests[0].digest() == digests[1].digest()
    np.savez(tmp_path / "data" / "mnist.npz", **{**arrays, "y_test": 9 - arrays["y_test"]})
    assert load_source("mnist").y[source.test].tolist() == (9 - source.y[source.test]).tolist()


def test_few_images_of_cifar10_are_the_first_of_both_parts(at_hand: Any) -> None:
    at_hand("cifar10")
    whole, few = load_source("cifar10"), load_source("cifar10", samples=8)
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 60, 61])
    assert torch.equal(few.x, whole.x[rows])
    assert (few.y.tolist(), few.test.tolist()) == (whole.y[rows].tolist(), [False] * 6 + [True] * 2)
    assert len(load_source("cifar10", samples=500)) == len(whole)


def test_coarse_labels_of_cifar100(at_hand: Any) -> None:
    at_hand("cifar100")
    source = load_source("cifar100", label="coarse")
    assert source.outputs == 20
    assert torch.equal(source.y, load_source("cifar100").y // 5)
    with pytest.raises(ConfigError, match="label"):
        load_source("cifar100", label="medium")


def test_writers_are_the_clients_of_femnist(at_hand: Any) -> None:
    at_hand("femnist")
    source = load_source("femnist")
    assert (source.input_shape, source.outputs, source.test) == ((1, 28, 28), 62, None)
    assert source.info["classes"] == tuple(LETTERS)
    assert build("femnist").names == ("f0000_00", "f0001_00", "f0002_00")
    assert torch.equal(source.take(torch.tensor([0])), source.x[:1] / 255 * 2 - 1)


def test_news_with_their_subjects(at_hand: Any) -> None:
    at_hand("ag_news")
    source, words = load_source("ag_news", length=30), load_tokenizer("byte")
    assert source.info["classes"] == ("World", "Sports", "Business", "Sci/Tech")
    assert source.test.tolist() == [False] * 60 + [True] * 20
    assert source.y.tolist() == [k % 4 for k in (*range(60), *range(20))]
    assert [words.decode(source.x[row].tolist()) for row in (3, 62)] == ["news train 3", "news test 2"]


def test_no_training_row_of_a_role_shares_a_character_with_a_test_row(at_hand: Any, monkeypatch: Any) -> None:
    at_hand("shakespeare")
    monkeypatch.setattr(hub_sets, "_BLOCK", 100)
    source, words, text = load_source("shakespeare"), load_tokenizer("byte"), TEXT.replace("\n", " ")
    assert source.group_names["client"] == ("HAMLET_KING", "MACBETH_WITCH")  # the other one says too little
    for client, rows in enumerate((700, 520)):
        train, test = (
            torch.nonzero((source.groups["client"] == client) & (source.test == t)) for t in (0, 1)
        )
        cut = rows * 4 // 5
        assert (len(train), len(test)) == (cut, rows - cut - WINDOW)
        assert words.decode(source.x[test[0, 0]].tolist()) == text[cut + WINDOW :][:WINDOW]
        following = [source.info["classes"][y] for y in source.y[train[:, 0]]]
        assert following == [repr(c) if c.isspace() else c for c in text[WINDOW : WINDOW + cut]]
    few = load_source("shakespeare", samples=30)
    assert (len(few), few.info["classes"]) == (30, source.info["classes"])
    assert len(load_source("shakespeare", min_samples=521).group_names["client"]) == 1
    with pytest.raises(ConfigError, match="min_samples=701"):
        load_source("shakespeare", min_samples=701)


@pytest.mark.parametrize("name", ["cifar10", "shakespeare"])
def test_a_file_that_is_not_the_declared_one_is_refused(at_hand: Any, name: str) -> None:
    """Of Shakespeare nobody published a digest: there the name that the cache gives a file is its sha256."""
    blob = at_hand(name)[-1]
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    with pytest.raises(DataError, match=rf"{HUB_SETS[name].revision} --force-download"):
        load_source(name)


@pytest.mark.parametrize("name", HUB_SETS)
def test_without_a_hub_the_one_command_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as missing:
        load_source(name)
    hub_set = HUB_SETS[name]
    command = f"hf download {hub_set.repository} --repo-type dataset --revision {hub_set.revision}"
    assert all(words in str(missing.value) for words in (command, str(tmp_path / "data"), "HF_HUB_OFFLINE"))


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError) as missing:
        load_source("ag_news")
    assert missing.value.extra == "data"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """A hub on this machine, which serves the files in this dictionary by their path."""
    served: dict[str, bytes] = {}

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            content = served.get(self.path)
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"")))
            self.send_header("ETag", f'"{hashlib.sha256(content or b"").hexdigest()}"')
            self.send_header("X-Repo-Commit", self.path.split("/")[5])
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(served.get(self.path, b""))

        def log_message(self, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    address = f"http://127.0.0.1:{server.server_port}"
    pages = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + pages)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    yield served
    server.shutdown()
    server.server_close()


def test_a_set_is_fetched_from_the_hub_once(hub: dict[str, bytes], monkeypatch: Any, tmp_path: Path) -> None:
    files, hub_set = contents("ag_news"), HUB_SETS["ag_news"]
    declare(monkeypatch, "ag_news", files)
    address = f"/datasets/{hub_set.repository}/resolve/{hub_set.revision}"
    with pytest.raises(DataError, match="cannot be fetched"):
        load_source("ag_news")
    hub.update({f"{address}/{path}": content for path, content in files.items()})
    assert len(load_source("ag_news")) == 80
    hub.clear()
    assert len(load_source("ag_news")) == 80
    assert (tmp_path / "hub" / "datasets--fancyzhx--ag_news" / "snapshots" / hub_set.revision).is_dir()


def examples() -> Iterator[Any]:
    """The experiments of the page, each under the name of its data set."""
    for block in blocks(PAGE):
        for words in commands(block):
            if words[:2] == ["tailorfl", "compare"]:
                yield pytest.param(words, id=words[2].removeprefix("data="))


def test_the_page_has_an_example_of_each_set() -> None:
    assert sorted(example.id for example in examples()) == sorted(HUB_SETS)


QUICK = ("mnist", "ag_news")
"""Examples of images and of texts that are run in the quick suite."""


@pytest.mark.parametrize(
    "words",
    [pytest.param(*e.values, id=e.id, marks=[] if e.id in QUICK else pytest.mark.slow) for e in examples()],
)
def test_an_example_of_the_page_runs_on_a_copy(at_hand: Any, a_quick_estimate: None, words: Any) -> None:
    at_hand(words[2].removeprefix("data="))
    words = [word for word in words if not word.startswith("data.clients=")]
    result = CliRunner().invoke(app, [*words[1:], "data.clients=2", "--dry-run"])
    assert result.exit_code == 0, result.output
