"""Fingerprints of what every method computes, to compare the code before and after a change that must not matter.

    python tools/baseline.py --write tools/baseline.json     # before
    python tools/baseline.py 2> /dev/null                    # after: names what differs, and exits with 1
    python tools/baseline.py --only vectorized momentum      # a part: every word stands in the name of a run
    python tools/baseline.py --seconds                       # seconds of a round, of four models and both engines

Runs all lines of the recipe `all_methods` on bundled digits for three rounds, with both engines: plain, with half of
the clients in a round, and with momentum. Of every run it keeps one digest of the server's and the clients' states in
the last checkpoint, and one of all clients' metrics; of five recipes it keeps a digest of the result table after a few
rounds. Only the interface that users have is used, so that the script outlives a move of files. Digests are those of
one kind of processor and one version of torch, which the file names: on another, write the file anew before you begin.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import tailorfl

ENGINES = ("sequential", "vectorized")
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "half participation": {"fraction": 0.5},
    "momentum": {"train": {"momentum": 0.9}},
}
TABLES: Mapping[str, Mapping[str, Any]] = {
    "demo": {"rounds": 5},
    "all_methods": {"rounds": 2},
    "defaults_digits": {"rounds": 3},
    "tuning_digits": {"rounds": 3},
    "system_digits": {"rounds": 3},
}
TIMES = ("seconds", "time", "per_second")
"""Parts of the names of columns that differ from run to run."""
MODELS: Mapping[str, Mapping[str, Any]] = {
    "logistic": {"name": "logistic"},
    "MLP": {"name": "mlp"},
    "CNN2": {"name": "cnn2"},
    "LoRA": {"name": "vit", "patch": 2, "hidden": 32, "layers": 2, "heads": 2, "lora": 4},
}
"""Models whose rounds are timed."""


def main() -> int:
    """Compare with a file, write it, or time rounds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--write", action="store_true", help="write the file in place of comparing with it")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="runs with all these words in their names"
    )
    parser.add_argument("--seconds", action="store_true", help="time rounds and compare nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.seconds:
        for name, seconds in round_seconds():
            print(f"{name}: {seconds * 1e3:.1f} ms a round", flush=True)
        return 0
    before = {} if arguments.write else json.loads(arguments.file.read_text())
    now = {}
    for name, digest in fingerprints(arguments.only):
        now[name] = digest
        if before.get(name, digest) != digest:
            print(f"DIFFERENT: {name}", flush=True)
    if arguments.write:
        machine = {"torch": torch.__version__, "processor": torch.backends.cpu.get_cpu_capability()}
        arguments.file.write_text(json.dumps(machine | now, indent=1) + "\n")
        return 0
    same = sum(before.get(name) == digest for name, digest in now.items())
    print(f"{same} of {len(now)} are as in {arguments.file}, which has {len(before) - 2}")
    return int(same < len(now))


def fingerprints(only: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of every run and of every recipe's table that has all words in its name."""
    for engine in ENGINES:
        for variant, settings in VARIANTS.items():
            if {*only} & {*ENGINES, *VARIANTS, "table"} > {engine, variant} & {*only}:
                continue
            with tempfile.TemporaryDirectory() as folder:
                short = {"rounds": 3, "seeds": [0], "engine": engine}
                tailorfl.run("all_methods", out=folder, overwrite=True, progress=False, **short, **settings)
                for job in sorted(Path(folder).glob("*/seed-0")):
                    name = f"{engine}, {variant}, {job.parent.name}"
                    if all(word in name for word in only):
                        yield f"{name}: states", digest_of_states(job)
                        yield f"{name}: metrics", digest_of((job / "clients.jsonl").read_bytes())
    for recipe, settings in TABLES.items():
        if all(word in f"table of {recipe}" for word in only):
            yield f"table of {recipe}", digest_of_table(recipe, settings)


def digest_of_states(job: Path) -> str:
    """Return a digest of all tensors of a job's last checkpoint, which the server and the clients go on from."""
    digest = hashlib.sha256()
    with safe_open(max(job.glob("checkpoint-*.safetensors")), framework="pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name).contiguous()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def digest_of_table(recipe: str, settings: Mapping[str, Any]) -> str:
    """Return a digest of a recipe's result table without its times."""
    with tempfile.TemporaryDirectory() as folder:
        short = {"seeds": [0], "engine": "sequential", **settings}
        tailorfl.run(recipe, out=folder, overwrite=True, progress=False, **short)
        with (Path(folder) / "comparison.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
    kept = [{k: v for k, v in row.items() if not any(word in k for word in TIMES)} for row in rows]
    return digest_of(json.dumps(kept, sort_keys=True).encode())


def digest_of(data: bytes) -> str:
    """Return the beginning of a SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def round_seconds(rounds: int = 30) -> Iterator[tuple[str, float]]:
    """Yield seconds of processor time a round of FedAvg, for every model and engine, without start and evaluation."""
    for name, model in MODELS.items():
        for engine in ENGINES:
            took = {}
            for length in (1, 1, 1 + rounds):  # the first one warms up
                with tempfile.TemporaryDirectory() as folder:
                    settings = {"rounds": length, "seeds": [0], "engine": engine, "model": dict(model)}
                    begin = time.process_time()
                    tailorfl.run(
                        methods=["fedavg"],
                        out=folder,
                        overwrite=True,
                        progress=False,
                        eval={"every": 0},
                        **settings,
                    )
                    took[length] = time.process_time() - begin
            yield f"{name}, {engine}", (took[1 + rounds] - took[1]) / rounds


if __name__ == "__main__":
    sys.exit(main())
