"""Where PerFed-CKT gains over local training: a map over skew and samples a client, of the recipe ckt_phases.

    tailorfl reproduce ckt_phases --scale small --out runs/ckt_phases-small
    python studies/ckt_map.py runs/ckt_phases-small results/ckt_phases

writes map.md, map.csv and map.png into the last folder; lines and seeds of several result folders are put together. On
each field λ and the number of clusters are those of the line with the best mean validation accuracy over seeds; λ = 0,
which is local training, is among them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import pandas as pd

from tailorfl.evaluation.comparisons import Paired, interval, paired
from tailorfl.report.merging import merge
from tailorfl.report.result import ExperimentResult

matplotlib.use("Agg")
from matplotlib import pyplot as plt

LOCAL = "LocalTrain"
TEST, VALIDATION = "mean", "personal.val.accuracy.mean"
APART = {
    "own start": ("LocalTrain own init", LOCAL),
    "λ = 0.1, all start alike": ("CKT c=1 λ=0.1 one init", LOCAL),
    "λ = 0.1, own start, over LocalTrain with own start": ("CKT c=1 λ=0.1", "LocalTrain own init"),
    "λ = 0.5 from round 20 on, over λ = 0.5 at once": ("CKT c=1 λ=0.5 after 20", "CKT c=1 λ=0.5"),
}
"""What else the lines tell: a name -> first minus second."""
Numbers = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Label -> seed -> number by name."""


def numbers(result: ExperimentResult) -> Numbers:
    """Return the numbers of the jobs of one field."""
    found: dict[str, dict[int, Mapping[str, float]]] = {}
    for (summary, _), seed in zip(result.jobs, result.seed_results(), strict=True):
        found.setdefault(summary["label"], {})[seed.seed] = seed.values
    return found


def gain(found: Numbers, first: str, second: str) -> Paired:
    """Return first minus second on the test parts of the seeds that both have."""
    seeds = sorted(set(found[first]) & set(found[second]))
    one, two = ([found[label][s][TEST] for s in seeds] for label in (first, second))
    return paired(one, two)


def chosen(found: Numbers) -> str:
    """Return the label with the best mean validation accuracy, of the lines that differ in λ and clusters only."""
    lines = [label for label in found if label == LOCAL or (label.startswith("CKT") and label[-1].isdigit())]
    lines = [label for label in lines if "after" not in label]
    return max(lines, key=lambda label: interval([n[VALIDATION] for n in found[label].values()])[0])


def frame_of(fields: Mapping[str, ExperimentResult]) -> pd.DataFrame:
    """Return a row a field: what LocalTrain reaches, what was chosen, and the gains of it and of every line."""
    rows = []
    for field, result in fields.items():
        found = numbers(result)
        skew, _, samples = field.partition(", n ")
        row: dict[str, object] = {"skew": skew, "samples": int(samples), "seeds": len(found[LOCAL])}
        row["local"], row["local_ci"] = interval([n[TEST] for n in found[LOCAL].values()])
        row["fedavg"], row["fedavg_ci"] = interval([n[TEST] for n in found["FedAvg"].values()])
        row["chosen"] = chosen(found)
        pairs = {"gain": (chosen(found), LOCAL), **APART}
        pairs |= {label: (label, LOCAL) for label in found if label not in (LOCAL, "FedAvg")}
        for name, (first, second) in pairs.items():
            difference = gain(found, first, second)
            row[name], row[f"{name}_ci"] = difference.mean, difference.half_width
        rows.append(row)
    return pd.DataFrame(rows)


def page(frame: pd.DataFrame) -> str:
    """Return the tables as Markdown."""
    sizes = sorted(frame["samples"].unique())
    lines = [
        "# Where PerFed-CKT gains over local training",
        "",
        "Accuracy (%) and gains in points, means over clients and seeds ± half width of the 95 % interval over seeds "
        "(paired). On each field λ and the number of clusters were chosen by validation accuracy, λ = 0 (LocalTrain) "
        f"among them; {int(frame['seeds'].min())} seeds. "
        "Every client is judged on the official test images of its classes.",
        "",
        "![gains](map.png)",
        "",
        "| Skew | Samples a client | LocalTrain | FedAvg | Chosen | Gain |",
        "| --- | ---: | ---: | ---: | --- | ---: |",
    ]
    for row in frame.to_dict("records"):
        cells = [
            _cell(row, "local", ".1f"),
            _cell(row, "fedavg", ".1f"),
            str(row["chosen"]),
            _cell(row, "gain", "+.1f"),
        ]
        lines.append(f"| {row['skew']} | {row['samples']} | {' | '.join(cells)} |")
    labels = [c for c in frame.columns if c.startswith("CKT") and not c.endswith("_ci")]
    for title, names in (("Every line over LocalTrain", labels), ("What else it could be", list(APART))):
        lines += [
            "",
            f"## {title}",
            "",
            f"| Skew | Samples | {' | '.join(names)} |",
            "| --- " * 2 + "| ---: " * len(names) + "|",
        ]
        for row in frame.to_dict("records"):
            cells = [_cell(row, name, "+.1f") for name in names]
            lines.append(f"| {row['skew']} | {row['samples']} | {' | '.join(cells)} |")
    few, many = frame[frame["samples"] == sizes[0]], frame[frame["samples"] == sizes[-1]]
    lines += [
        "",
        f"Mean gain with {sizes[0]} samples a client {100 * few['gain'].mean():+.1f}, "
        f"with {sizes[-1]} {100 * many['gain'].mean():+.1f} points.",
    ]
    return "\n".join(lines) + "\n"


def _cell(row: Mapping[object, object], name: str, form: str) -> str:
    value, half = float(str(row[name])), float(str(row[f"{name}_ci"]))
    return "not run" if math.isnan(value) else f"{100 * value:{form}} ± {100 * half:.1f}"


def draw(frame: pd.DataFrame, file: Path) -> None:
    """Draw the gains over skew and samples a client, those beyond their interval in bold."""
    skews, sizes = list(dict.fromkeys(frame["skew"])), sorted(frame["samples"].unique())
    table = frame.pivot(index="skew", columns="samples", values="gain").loc[skews, sizes] * 100
    half = frame.pivot(index="skew", columns="samples", values="gain_ci").loc[skews, sizes] * 100
    figure, axis = plt.subplots(figsize=(5.2, 3.6), layout="constrained")
    most = float(table.abs().max().max())
    image = axis.imshow(table, cmap="RdBu", vmin=-most, vmax=most, aspect="auto")
    for i, j in ((i, j) for i in range(len(skews)) for j in range(len(sizes))):
        value = float(table.to_numpy()[i, j])
        sure = abs(value) > float(half.to_numpy()[i, j])
        colour = "white" if abs(value) > 0.6 * most else "black"
        axis.text(
            j,
            i,
            f"{value:+.1f}",
            ha="center",
            va="center",
            weight="bold" if sure else "normal",
            color=colour,
        )
    axis.set_xticks(range(len(sizes)), [str(n) for n in sizes])
    axis.set_yticks(range(len(skews)), skews)
    axis.set_xlabel("training samples a client")
    figure.colorbar(image, label="PerFed-CKT over local training (points)")
    figure.savefig(file, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", help="of the finished experiment")
    parser.add_argument("out", type=Path, help="where map.md, map.csv and map.png go")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    fields = merge(given.folders, None)
    frame = frame_of(fields)
    frame.to_csv(given.out / "map.csv", index=False, float_format="%.5f", lineterminator="\n")
    (given.out / "map.md").write_text(page(frame), encoding="utf-8")
    draw(frame, given.out / "map.png")


if __name__ == "__main__":
    main()
