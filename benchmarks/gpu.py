"""What a GPU does: the tests that need one, then rounds of FedAvg by hand and in this library's engines.

    python benchmarks/gpu.py --minutes 10

runs `pytest -m cuda`, then for six networks (`gpu_way.WORKS`: 100 clients with few images for the small ones) every way
to do a round, each in a process of its own that may fail or run out of time without harm to the others. After each the
JSON file and the table beside it are written anew, so that whatever was done when the time is over is there. Speeds are
against the fastest plain loop in float32; weights after one step of every client are compared with that loop's.

With `--python-pfl` and `--python-flwr` (environments of benchmarks/peers) pfl-research and Flower do the rounds of
logistic regression and CNN2, too. Without a GPU it says so and measures nothing; `--device cpu --tiny` tries it out.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_way import WORKS

from tailorfl.benchmark.clock import processor

HERE = Path(__file__).resolve().parent
TESTS_SHARE = 0.4
"""Of the minutes, at most, for the tests."""
WAY_SECONDS, TIMED_SECONDS, LEAST_LEFT = 60.0, 3.0, 12.0
"""A way with its start, at most (not in a trial with `--tiny`, on a processor of any speed); its timed rounds, about;
with less time left none is begun."""
LOOPS = ("loop", "loop, channels last", "loop, CUDA graph")
"""In float32; the fastest is what all are measured against."""
FIRST = (*LOOPS, "vectorized")
"""Of all networks, before anything else of any."""
THEN = (
    "vectorized, grouped",
    "vectorized, bfloat16",
    "loop, bfloat16",
    "vectorized, tf32",
    "loop, tf32",
    "sequential",
    "auto",
)
GPU_ONLY = ("CUDA graph", "tf32", "bfloat16")
IMAGES, CONVOLUTIONS = ("cnn2", "resnet18", "vit_s"), ("cnn2", "resnet18")
PEERS = ("pfl", "flower")


def ways(model: str, stage: Sequence[str], device: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the ways of a stage that a model has; at last smaller chunks than fit at once."""
    for way in stage:
        here = device.startswith("cuda") or not any(word in way for word in GPU_ONLY)
        of_it = ("channels last" not in way or model in IMAGES) and (
            "grouped" not in way or model in CONVOLUTIONS
        )
        if here and of_it:
            yield way
    if stage == THEN:
        fit = min(found.get("vectorized", {}).get("at_once", 0), WORKS[model].clients)
        yield from (f"vectorized, chunk {n}" for n in (fit // 2, fit // 4) if n > 1)


def run_tests(seconds: float) -> dict[str, Any]:
    """Run the tests that need a GPU; return how many passed, and what was said last."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "cuda",
        "-q",
        "--tb=line",
        "-p",
        "no:cacheprovider",
        "-rf",
    ]
    begin = time.monotonic()
    try:
        done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, timeout=seconds)
        said, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
        said, code = out.decode("utf-8", "replace") if isinstance(out, bytes) else out, None
    dots = "".join(
        line.split(" [")[0] for line in said.splitlines() if set(line.split(" [")[0]) <= set(".FEsx")
    )
    return {
        "passed": dots.count("."),
        "failed": dots.count("F") + dots.count("E"),
        "skipped": dots.count("s"),
        "ended": code is not None,
        "seconds": time.monotonic() - begin,
        "last_words": said.splitlines()[-30:],
    }


def run_way(model: str, way: str, given: argparse.Namespace, left: float, kept: Path) -> dict[str, Any]:
    """Do a way in a process of its own; return its record, or what went wrong."""
    out = kept / f"{model}-{way.replace(', ', '-').replace(' ', '_')}.json"
    command = [
        sys.executable,
        str(HERE / "gpu_way.py"),
        model,
        way,
        "--device",
        given.device,
        "--out",
        str(out),
    ]
    command += ["--seconds", str(given.seconds), *(["--tiny"] if given.tiny else [])]
    record = recorded(command, out, left if given.tiny else min(left, WAY_SECONDS))
    return record if "error" in record else {**record, "weights": str(out.with_suffix(".pt"))}


def recorded(command: Sequence[str], out: Path, seconds: float) -> dict[str, Any]:
    """Run a command that writes a record to `out`; return that, or what went wrong."""
    environment = os.environ | {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {seconds:.0f} s"}
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or ["it ended without a word"])[-1][:300]}
    record: dict[str, Any] = json.loads(out.read_text())
    return record


def distance(weights: str, reference: str) -> float:
    """Return ‖w − r‖ / ‖r − start‖ of the weights w and r after the compared round, over all that are trained."""
    own, other = (torch.load(file, weights_only=True) for file in (weights, reference))
    start = torch.load(Path(reference).with_suffix(".start.pt"), weights_only=True)
    if own.keys() != other.keys():
        return math.nan
    apart = sum(float((own[n].double() - other[n].double()).square().sum()) for n in other)
    way = sum(float((other[n].double() - start[n].double()).square().sum()) for n in other)
    return math.sqrt(apart / way)


def run_peer(peer: str, python: str, model: str, left: float) -> dict[str, Any]:
    """Has another program do the same rounds, on the device that it takes by itself."""
    sys.path.insert(0, str(HERE / "peers"))
    make_work = importlib.import_module("peer_work").make_work
    with tempfile.TemporaryDirectory() as place:
        work, out = Path(place) / "work.pt", Path(place) / "record.json"
        make_work(model).save(work)
        command = [python, str(HERE / "peers" / f"run_{peer}.py"), "--work", str(work), "--out", str(out)]
        record = recorded([*command, "--warmup", "1", "--rounds", "3"], out, min(left, 2 * WAY_SECONDS))
    return record if "error" in record else {"seconds": record.pop("wall"), "record": record}


def summed_up(found: dict[str, dict[str, Any]]) -> None:
    """Put medians, speeds and distances into the records of a model's ways."""
    for record in found.values():
        if record.get("seconds"):
            record["median"] = statistics.median(record["seconds"])
    loops = {w: r["median"] for w, r in found.items() if w in LOOPS and "median" in r}
    best = min(loops, key=lambda way: loops[way], default=None)
    for record in found.values():
        if best is not None and "median" in record:
            record["times_faster"] = loops[best] / record["median"]
        if "distance" not in record and "weights" in record and "weights" in found.get("loop", {}):
            record["distance"] = distance(record["weights"], found["loop"]["weights"])


def page(out: Mapping[str, Any]) -> str:
    """Return the table as Markdown."""
    tests = out.get("tests")
    lines = [
        f"# Rounds of FedAvg on {out['device_name']}",
        "",
        f"{out['processor']}, torch {out['torch']}, CUDA {out['cuda']}, cuDNN {out['cudnn']}. Wall seconds of a round: "
        "median (least to most); speed against the fastest plain loop in float32; memory that torch holds in the end; "
        "clients that fit at once; distance of the weights after a step from the plain loop's, as a share of the step.",
        "",
    ]
    if tests:
        over = "" if tests["ended"] else ", not at its end when its time was over"
        lines += [
            f"Tests: {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped{over}.",
            "",
        ]
    lines += [
        "| Network | Way | Seconds | Speed | MB | At once | Distance |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for model, found in out["models"].items():
        for way, r in found.items():
            if "error" in r:
                lines.append(f"| {model} | {way} | {r['error']} | | | | |")
                continue
            s = r["seconds"]
            cells = [
                f"{r['median']:.4g} ({min(s):.4g} to {max(s):.4g})" if s else "",
                f"{r['times_faster']:.2f} ×" if "times_faster" in r else "",
                f"{r['held_mb']:.0f}" if "held_mb" in r else "",
                str(r.get("at_once", "")),
                f"{r['distance']:.1e}" if "distance" in r else "",
            ]
            lines.append(f"| {model} | {way}{_engine(way, r)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _engine(way: str, record: Mapping[str, Any]) -> str:
    return f" ({record['engine']})" if way == "auto" else ""


def facts(device: str) -> dict[str, Any]:
    """Where it ran."""
    cuda = device.startswith("cuda")
    return {
        "device_name": torch.cuda.get_device_name(device) if cuda else "a processor",
        "capability": torch.cuda.get_device_capability(device) if cuda else None,
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,  # type: ignore[no-untyped-call]
    }


def main() -> None:
    """Test, measure, and write after every way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--seconds", type=float, default=TIMED_SECONDS, help="of the timed rounds of a way, about"
    )
    parser.add_argument("--models", nargs="*", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu")
    parser.add_argument("--tiny", action="store_true", help="small networks, to try the script out")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--python-pfl", help="the python of an environment with pfl-research")
    parser.add_argument("--python-flwr", help="the python of an environment with Flower")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "gpu.json")
    given = parser.parse_args()
    if given.device != "cpu" and not torch.cuda.is_available():
        sys.exit(f"no GPU was found (torch {torch.__version__}); nothing was measured")
    end = time.monotonic() + 60 * given.minutes
    out: dict[str, Any] = {**facts(given.device), "minutes": given.minutes, "tests": None, "models": {}}

    def write() -> None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(out, indent=1) + "\n")
        given.json.with_suffix(".md").write_text(page(out), encoding="utf-8")

    if not given.no_tests:
        out["tests"] = run_tests(TESTS_SHARE * 60 * given.minutes)
        print(f"tests: {out['tests']['passed']} passed, {out['tests']['failed']} failed", flush=True)
        write()
    pythons = {"pfl": given.python_pfl, "flower": given.python_flwr}
    with tempfile.TemporaryDirectory() as kept:
        for stage, model in itertools.product((FIRST, THEN), given.models):
            found = out["models"].setdefault(model, {})
            for way in ways(model, stage, given.device, found):
                left = end - time.monotonic()
                if left < LEAST_LEFT:
                    break
                found[way] = run_way(model, way, given, left, Path(kept))
                summed_up(found)
                write()
                told = found[way].get("error") or f"{found[way]['median']:.4g} s"
                print(f"{model:9s} {way:28s} {told}", flush=True)
        for model, peer in itertools.product(("logistic", "cnn2"), PEERS):
            python, left = pythons[peer], end - time.monotonic()
            if python and left > LEAST_LEFT and model in given.models:
                found = out["models"][model]
                found[peer] = run_peer(peer, python, model, left)
                summed_up(found)
                write()
    for found in out["models"].values():
        for record in found.values():
            record.pop("weights", None)
    write()


if __name__ == "__main__":
    main()
