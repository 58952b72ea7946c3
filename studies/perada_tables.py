"""PerAda's tables out of finished experiments: accuracy, cost, and which published orders of methods hold.

    tailorfl reproduce perada_cifar --out runs/perada_cifar
    python studies/perada_tables.py runs/perada_cifar

writes perada.md into the folder: for every method the scalars it trains and sends, the accuracy of personal models on
their own test part, on everybody's and on corrupted images (means over clients, seeds with 95 % intervals), and of the
global model where there is one; then every pair of methods whose published order differs by more than a point.
"""

from __future__ import annotations

import argparse
from itertools import combinations
from pathlib import Path
from typing import Any

from tailorfl.evaluation.comparisons import interval, paired
from tailorfl.report.result import ExperimentResult
from tailorfl.settings.loading import load

PUBLISHED: dict[str, dict[str, tuple[float, float, float | None]]] = {
    "perada_cifar": {
        "LocalTrain": (85.94, 29.77, 26.67),
        "FedAvg+FT": (88.91, 43.99, 36.51),
        "Ditto": (90.21, 53.82, 44.32),
        "pFedMe": (90.73, 45.06, 37.65),
        "APFL": (90.74, 43.92, 36.51),
        "FedBN": (90.37, 43.18, 36.29),
        "FedAlt (output)": (89.68, 40.68, 34.30),
        "FedSim (output)": (89.75, 41.98, 35.31),
        "FedAlt (adapter)": (87.26, 31.51, 27.77),
        "FedSim (adapter)": (87.76, 31.97, 28.10),
        "LG-FedAvg": (86.70, 29.96, 26.83),
        "FedRep": (87.76, 35.19, 30.68),
        "PerAda w/o KD": (91.27, 53.81, 44.45),
        "PerAda": (91.82, 59.05, 48.53),
    },
    "perada_pacs": {
        "LocalTrain": (81.64, 59.15, None),
        "FedAvg+FT": (79.42, 77.19, None),
        "Ditto": (81.77, 75.66, None),
        "pFedMe": (80.21, 75.69, None),
        "FedBN": (81.86, 74.26, None),
        "FedSim (output)": (82.91, 72.34, None),
        "FedSim (adapter)": (82.14, 58.62, None),
        "PerAda w/o KD": (83.31, 76.55, None),
        "PerAda": (83.58, 77.20, None),
    },
}
"""Local test, global test, corrupted test: CIFAR-10 and CIFAR-10-C, and Office-Home beside PACS; percent."""
COLUMNS = ("own test", "everybody's test", "corrupted")
POINT = 1.0
"""Published differences below this many points are not read as an order."""
Seeds = dict[int, float]


def collected(result: ExperimentResult) -> dict[str, dict[str, Any]]:
    """Return by label: trained and sent scalars, and every column's accuracy by seed, in percent."""
    rows: dict[str, dict[str, Any]] = {}
    for summary, store in result.jobs:
        row = rows.setdefault(summary["label"], {"columns": {c: {} for c in COLUMNS}, "shared": {}})
        row["trained"] = summary["trained_scalars"]
        uploads = int(store.rounds()["clients"].map(len).sum())
        row["sent"] = summary["traffic"]["up"] / uploads
        personal = summary["metrics"]["personal"]
        for column, found in zip(COLUMNS, _accuracies(personal), strict=True):
            if found is not None:
                row["columns"][column][summary["seed"]] = found
        if "global" in summary["metrics"]:
            row["shared"][summary["seed"]] = 100 * summary["metrics"]["global"]["global"]["accuracy"]["mean"]
    return rows


def _accuracies(sets: dict[str, Any]) -> list[float | None]:
    shifted = [s["accuracy"]["mean"] for name, s in sets.items() if name not in ("val", "local", "global")]
    found = [sets["local"]["accuracy"]["mean"], sets["global"]["accuracy"]["mean"]]
    return [*(100 * v for v in found), 100 * sum(shifted) / len(shifted) if shifted else None]


def page(name: str, rows: dict[str, dict[str, Any]]) -> str:
    """Return the tables as Markdown."""
    published = PUBLISHED[name]
    used = [c for c in COLUMNS if any(row["columns"][c] for row in rows.values())]
    lines = [
        f"# {name}",
        "",
        "Accuracy in percent, mean over clients and seeds ± half width of the 95 % interval over seeds; published "
        "numbers in brackets, of another data set, backbone or scale (see the recipe), so that only orders compare.",
        "",
        f"| Method | trained (M) | sent (M) | {' | '.join(used)} | global model, everybody's test |",
        "| --- | ---: | ---: |" + " ---: |" * (len(used) + 1),
    ]
    for label, row in rows.items():
        cells = [_cell(row["columns"][c]) for c in used]
        if label in published:
            cells = [
                f"{cell} ({published[label][COLUMNS.index(c)]})" for cell, c in zip(cells, used, strict=True)
            ]
        shared = _cell(row["shared"]) if row["shared"] else "–"
        cost = f"{row['trained'] / 1e6:.3f} | {row['sent'] / 1e6:.3f}"
        lines.append(f"| {label} | {cost} | {' | '.join(cells)} | {shared} |")
    for column in used:
        lines += ["", f"## Orders of methods: {column}", "", *_orders(column, rows, published)]
    return "\n".join(lines) + "\n"


def _cell(seeds: Seeds) -> str:
    mean, half = interval(list(seeds.values()))
    return f"{mean:.2f} ± {half:.2f}"


def _orders(column: str, rows: dict[str, dict[str, Any]], published: dict[str, Any]) -> list[str]:
    """Pairs whose published order is clear: how many hold, and those that are reversed beyond the interval."""
    at = COLUMNS.index(column)
    total = held = within = 0
    reversed_ = []
    for one, two in combinations([label for label in rows if label in published], 2):
        gap = published[one][at] - published[two][at]
        if abs(gap) < POINT:
            continue
        total += 1
        better, worse = (one, two) if gap > 0 else (two, one)
        a, b = rows[better]["columns"][column], rows[worse]["columns"][column]
        seeds = sorted(set(a) & set(b))
        found = paired([a[s] for s in seeds], [b[s] for s in seeds])
        held += found.mean > 0
        within += abs(found.mean) <= found.half_width
        if found.mean < -found.half_width:
            reversed_.append((abs(gap), better, worse, found))
    lines = [
        f"Of {total} pairs that lie a point or more apart in the paper, {held} are in the same order here; {within} "
        f"differ by less than their interval here; {len(reversed_)} are reversed beyond it.",
    ]
    if reversed_:
        lines += [
            "",
            "| better in the paper | worse in the paper | by | here |",
            "| --- | --- | ---: | ---: |",
        ]
        for gap, better, worse, found in sorted(reversed_, key=lambda r: -r[0]):
            lines.append(f"| {better} | {worse} | {gap:.2f} | {found.mean:+.2f} ± {found.half_width:.2f} |")
    return lines


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the finished experiment perada_cifar or perada_pacs")
    folder = parser.parse_args().folder
    result = ExperimentResult.load(folder)
    name = load(folder / "config.yaml", []).name
    (folder / "perada.md").write_text(page(name, collected(result)), encoding="utf-8")


if __name__ == "__main__":
    main()
