"""Lowest and top 5 % of the clients of a finished experiment, with differences on the same seeds.

    tailorfl reproduce plgu_mnist --out runs/plgu_mnist
    python studies/plgu_tails.py runs/plgu_mnist

writes tails.md and tails.csv into the folder, or into that of `--out`. Several folders are put together.

Of two methods the worst clients need not be the same ones, and the worst of many noisy numbers are partly bad luck. So
clients are compared one by one, too: how many gain, and what the tenth gains that the second method serves worst,
chosen by validation samples and measured on test samples.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from tailorfl.evaluation.comparisons import interval, paired
from tailorfl.report.merging import merge
from tailorfl.report.result import ExperimentResult

TITLES = {"global": "Global model", "personal": "Personal models"}
COLUMNS = {"mean": "mean", "lowest5": "lowest 5 %", "top5": "top 5 %", "gap": "gap", "std": "std"}
PAIRS = (
    ("global", "PLGU-LF", "FedSAM"),
    ("global", "PLGU-LF", "FedAvg"),
    ("global", "FedSAM", "FedAvg"),
    ("global", "PLGU-LF", "pFedMe"),
    ("personal", "PLGU-LF", "Ditto"),
    ("personal", "PLGU-LF", "pFedMe"),
    ("global", "PLGU-LF, lr 0.05", "FedSAM, lr 0.05"),
    ("global", "PLGU-LF, lr 0.05", "FedSAM, lr 0.05, rho 0.05"),
    ("global", "PLGU-LF, lr 0.05", "FedAvg, lr 0.05"),
    ("global", "FedSAM, lr 0.05, rho 0.05", "FedAvg, lr 0.05"),
    ("personal", "PLGU-LF, lr 0.05", "Ditto, lr 0.05"),
    ("personal", "PLGU-GRep", "FedRep"),
    ("personal", "PLGU-GHN", "pFedHN"),
    ("personal", "PLGU-GRep", "PLGU-LF"),
    ("global", "FedAvg, 10 epochs", "FedAvg"),
    ("global", "FedSAM", "FedAvg, 10 epochs"),
    ("global", "PLGU-LF", "FedAvg, 10 epochs"),
    ("personal", "FedRep, 2 body epochs", "FedRep"),
    ("personal", "PLGU-GRep", "FedRep, 2 body epochs"),
)
"""What the paper claims something about, and the same with as many gradients on both sides."""
Values = dict[tuple[str, str], dict[int, dict[str, float]]]
"""(model, label) -> seed -> column -> share."""


def collected(result: ExperimentResult) -> Values:
    """Return the statistics over clients of every job, on their own test parts."""
    values: Values = {}
    for summary, _ in result.jobs:
        for model in TITLES:
            if model not in summary["metrics"]:
                continue
            found = summary["metrics"][model]["local"][result.metric]
            low, top = found["worst5"], found["best5"]
            row = {"mean": found["mean"], "lowest5": low, "top5": top, "gap": top - low, "std": found["std"]}
            values.setdefault((model, summary["label"]), {})[summary["seed"]] = row
    return values


def frame_of(values: Values) -> pd.DataFrame:
    """Return a row a model and method: means over seeds, and half widths of their 95 % intervals."""
    rows = []
    for (model, label), seeds in values.items():
        row: dict[str, object] = {"model": model, "label": label, "seeds": len(seeds)}
        for key in COLUMNS:
            row[key], row[f"{key}_ci"] = interval([found[key] for found in seeds.values()])
        rows.append(row)
    return pd.DataFrame(rows)


def one_by_one(clients: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return a row a pair of methods and a seed: the share of clients that gain, and the gain of the lowest tenth.

    Args:
        clients: records of every client, of the last round.
        metric: a share, larger is better.
    """
    wide = clients.pivot_table(index=["model", "seed", "client"], columns=["label", "set"], values=metric)
    rows = []
    for model, first, second in PAIRS:
        if model not in wide.index or not {(first, "local"), (second, "local")} <= set(wide.columns):
            continue
        for seed, found in wide.loc[model].groupby("seed"):
            gain = found[first, "local"] - found[second, "local"]
            row = {
                "model": model,
                "first": first,
                "second": second,
                "seed": seed,
                "gain": float((gain > 0).mean()),
            }
            if (second, "val") in wide.columns:
                lowest = found[second, "val"].nsmallest(math.ceil(0.1 * len(found))).index
                row["tenth"] = float(gain.loc[lowest].mean())
            rows.append(row)
    return pd.DataFrame(rows)


def page(frame: pd.DataFrame, values: Values, single: pd.DataFrame) -> str:
    """Return the tables as Markdown."""
    lines = [
        "# Lowest and top 5 % of the clients",
        "",
        "Accuracy on each client's own test part (%), mean over seeds ± half width of the 95 % interval. Lowest and "
        "top 5 % are the means of the ⌈0.05 N⌉ worst and best clients; gap = top − lowest; std is over clients.",
    ]
    for model, title in TITLES.items():
        head = " | ".join(COLUMNS.values())
        lines += ["", f"## {title}", "", f"| Method | {head} |", "| --- |" + " ---: |" * len(COLUMNS)]
        for row in frame[frame["model"] == model].to_dict("records"):
            lines.append(f"| {row['label']} | {' | '.join(_percent(row, key) for key in COLUMNS)} |")
    lines += ["", "## Differences on the same seeds", "", "In points, first minus second, ± 95 %.", ""]
    lines += [
        "| Model | First | Second | mean | lowest 5 % | gap |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for model, first, second in PAIRS:
        if (model, first) in values and (model, second) in values:
            cells = _difference(values[model, first], values[model, second])
            lines.append(f"| {model} | {first} | {second} | {cells} |")
    if "tenth" in single:
        lines += ["", "## Client by client", ""]
        lines += [
            "Share of clients that gain (%), and what the tenth gains (points) that the second method serves worst: "
            "chosen by validation samples, measured on test samples, ± 95 % over seeds.",
            "",
            "| Model | First | Second | clients that gain | gain of the lowest tenth |",
            "| --- | --- | --- | ---: | ---: |",
        ]
        for model, first, second in PAIRS:
            found = single.query("model == @model and first == @first and second == @second")
            if found.empty:
                continue
            share, tenth = (interval([float(v) for v in found[key]]) for key in ("gain", "tenth"))
            lines.append(
                f"| {model} | {first} | {second} | {100 * share[0]:.0f} ± {100 * share[1]:.0f} "
                f"| {100 * tenth[0]:+.2f} ± {100 * tenth[1]:.2f} |"
            )
    return "\n".join(lines) + "\n"


def _percent(row: Mapping[Any, Any], key: str) -> str:
    return f"{100 * row[key]:.2f} ± {100 * row[f'{key}_ci']:.2f}"


def _difference(one: Mapping[int, Mapping[str, float]], two: Mapping[int, Mapping[str, float]]) -> str:
    both = sorted(set(one) & set(two))
    found = [
        paired([one[s][key] for s in both], [two[s][key] for s in both]) for key in ("mean", "lowest5", "gap")
    ]
    return " | ".join(f"{100 * d.mean:+.2f} ± {100 * d.half_width:.2f}" for d in found)


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", help="of the finished experiment")
    parser.add_argument(
        "--out", type=Path, help="where tails.md and tails.csv go; the folder itself if not told"
    )
    given = parser.parse_args()
    out = given.out or given.folders[0]
    out.mkdir(parents=True, exist_ok=True)
    result = merge(given.folders, None)[""]
    values, clients = collected(result), result.clients
    frame = frame_of(values)
    single = one_by_one(clients[clients["round"] == clients["round"].max()], result.metric)
    frame.to_csv(out / "tails.csv", index=False, lineterminator="\n")
    (out / "tails.md").write_text(page(frame, values, single), encoding="utf-8")


if __name__ == "__main__":
    main()
