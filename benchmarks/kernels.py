"""What one core of this machine can do, what the kernels of local training reach of it, and what else was tried.

    limits      a large matrix product in float32 and in bfloat16, a large copy
    conv        CNN2's convolutions for 8 clients with weights of their own: five ways to compute them
    linear      a 784 x 200 layer of 4, 16 and 64 clients: the order of its products, and the step inside the gradient
    compile     torch.compile of a whole training step against the same step without it, and by hand without autograd
    engine      a round of the plain loop and of the vectorized engine against the limits, and the products and
                convolutions of its steps alone
    lora        the same for LoRA on a transformer
    precision   float32 against bfloat16: operations by themselves, and rounds of both engines

One thread, process time, the ways in turn, the minimum over repetitions. Run on an otherwise idle machine; it takes two
to three minutes. `--parts limits engine` measures some parts and leaves the others of the file as they are.

    python benchmarks/kernels.py --json benchmarks/results/kernels.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernel_parts import operations, precision, rounds, steps
from kernel_parts.timing import BATCH, Table, show

from tailorfl.benchmark.clock import processor
from tailorfl.engines.memory import keep_freed_memory

PARTS = ("limits", "conv", "linear", "compile", "engine", "lora", "precision")


def tables(part: str) -> dict[str, Callable[[], Table]]:
    """Return what makes the tables of a part, by title."""
    if part == "conv":
        each = operations.CONVOLUTIONS.items()
        made = {f"conv {title}": partial(operations.convolution, *sizes) for title, sizes in each}
        made["convolution, pooling, ReLU of 8 clients"] = operations.taken_along
        return {**made, "between convolutions, 32 channels of 28×28": operations.between}
    if part == "limits":
        return {f"limits of one core, {torch.backends.cpu.get_cpu_capability()}": operations.limits}
    every: dict[str, dict[str, Callable[[], Table]]] = {
        "linear": {"linear 784×200, batch 10": operations.linear},
        "compile": {"torch.compile": steps.compiled},
        "engine": {"rounds of 100 clients × 60 samples": rounds.networks},
        "lora": {"rounds of LoRA": rounds.lora},
        "precision": {
            "bfloat16 by operation": precision.operations,
            "bfloat16 by round": precision.rounds,
        },
    }
    return every[part]


def measure(parts: Sequence[str], known: dict[str, Any]) -> None:
    """Put the tables of `parts` into `known`, and print each when it is there."""
    for part in parts:
        for title, make in tables(part).items():
            known[title] = make()
            known.setdefault("measured on", {})[title] = machine()
            show(title, known[title])


def machine() -> dict[str, Any]:
    """Return what a table was measured on: other parts of the file may be of another machine."""
    return {
        "machine": processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory()  # as every simulation does
    known: dict[str, Any] = {}
    if given.json and given.json.exists():
        known = json.loads(given.json.read_text(encoding="utf-8"))
    known["batch"] = BATCH
    with tempfile.TemporaryDirectory() as cache:
        # Compiling is timed from nothing, in this process.
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        measure(given.parts, known)
    if given.json:
        given.json.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
