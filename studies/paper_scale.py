"""What a GPU would be given first: recipes at the scale of their papers, in order of value, within a number of minutes.

    python studies/paper_scale.py --dry-run                    the items, what each decides, needs and costs
    python studies/paper_scale.py --minutes 40 --device cuda   begins, or goes on where the last call stopped
    python studies/paper_scale.py --minutes 1 --scale smoke    the same with seconds of work, on a CPU

Every item is a process of its own that is told to end when the time is over; it keeps its last checkpoint, and the next
call goes on from there. `python -m studies.claims --runs OUT/ITEM/run` judges what is finished.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.loading import load

GRACE = 30.0
"""Seconds that a process gets to write its last checkpoint."""
LEAST = 5.0
"""With fewer seconds left nothing is begun."""
DONE = "done.json"


@dataclass(frozen=True)
class Item:
    """Some methods, seeds and variants of a recipe; none named: all."""

    name: str
    recipe: str
    decides: str
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    variants: tuple[str, ...] = ()


ITEMS = (
    Item("distil", "perada_distil", "PerAda 5, 6, 13", ("FedAvg", "PerAda w/o KD", "PerAda"), (0, 1, 2)),
    Item(
        "pull", "perada_distil", "PerAda 2, 3, 4, 7", ("LocalTrain", "FedAvg+FT", "Ditto", "FedRep", "PerAda")
    ),
    Item("tails", "plgu_cifar", "PLGU 1 to 4", (), (0, 1, 2)),
    Item("domains", "fedoa_domains", "FedOA 11", (), (0, 1, 2)),
    Item("images", "fedclup_cnn3", "FedCLUP 2", (), (0, 1, 2)),
    Item(
        "knowledge",
        "ckt_cnn",
        "PerFed-CKT 1, 2",
        ("LocalTrain", "CKT c=1", "CKT c=3"),
        (0,),
        ("Dir 0.01, uniform",),
    ),
)
"""In order of value: what small networks cannot tell comes first."""


def experiment(item: Item, scale: str, device: str) -> ExperimentConfig:
    """Return the experiment of an item at a scale; a smoke keeps the methods, seeds and variants of its own."""
    config = load(item.recipe, [f"engine.device={device}"], scale=scale)
    if scale == "smoke":
        return config
    changes: dict[str, object] = {"seeds": item.seeds}
    if item.methods:
        changes["methods"] = tuple(method for method in config.methods if method.label in item.methods)
    if item.variants:
        changes["variants"] = {name: config.variants[name] for name in item.variants}
    return config.model_copy(update=changes)


def run(item: Item, folder: Path, seconds: float) -> bool:
    """Begins or continues an item for at most so many seconds; returns whether it came to its end."""
    command = [sys.executable, "-m", "tailorfl", "reproduce", str(folder / "experiment.yaml"), "--quiet"]
    with (folder / "log.txt").open("a") as log:
        process = subprocess.Popen([*command, "--resume", str(folder / "run")], stdout=log, stderr=log)
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return False


def work(
    items: Sequence[Item],
    out: Path,
    minutes: float,
    scale: str,
    device: str,
    runner: Callable[[Item, Path, float], bool] = run,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Do the items that are not done, in order, while there is time; returns those that are done now.

    An item that ends with an error is left for the next call, as one that ran out of time.
    """
    end, kept = clock() + 60 * minutes, out / DONE
    done: list[str] = json.loads(kept.read_text()) if kept.is_file() else []
    for item in items:
        left = end - clock()
        if item.name in done or left < LEAST:
            continue
        folder = out / item.name
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "experiment.yaml").is_file():
            (folder / "experiment.yaml").write_text(
                experiment(item, scale, device).to_yaml(), encoding="utf-8"
            )
        if runner(item, folder, left):
            done.append(item.name)
            kept.write_text(json.dumps(done))
    return done


def described(items: Sequence[Item], scale: str, done: Sequence[str]) -> str:
    """Return what each item decides, needs and costs, and whether it is done."""
    lines = []
    for number, item in enumerate(items, start=1):
        chosen = load(item.recipe, scale=scale).scales[scale]  # type: ignore[index]
        methods = ", ".join(item.methods) or "all methods"
        lines += [
            f"{number}. {item.name}: {item.recipe} ({methods}; seeds {', '.join(map(str, item.seeds))})"
            f"{', done' if item.name in done else ''}",
            f"   decides: {item.decides}",
            f"   needs:   {' '.join(chosen.needs.split()) or 'nothing'}",
            f"   costs:   {' '.join(chosen.costs.split())}",
        ]
    return "\n".join(lines)


def main() -> None:
    """Print the items, or works on them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--scale", choices=("smoke", "small", "paper"), default="paper")
    parser.add_argument("--device", default="cpu", help="cuda, or cpu")
    parser.add_argument("--only", nargs="+", choices=[item.name for item in ITEMS], default=None)
    parser.add_argument("--out", type=Path, default=Path("runs/paper_scale"))
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    items = [item for item in ITEMS if given.only is None or item.name in given.only]
    kept = given.out / DONE
    if given.dry_run:
        print(described(items, given.scale, json.loads(kept.read_text()) if kept.is_file() else []))
        return
    done = work(items, given.out, given.minutes, given.scale, given.device)
    for item in items:
        print(
            f"{item.name}: {'done' if item.name in done else f'not done, see {given.out / item.name}/log.txt'}"
        )


if __name__ == "__main__":
    main()
