"""Accuracy under attack out of a finished experiment whose variants are called "RULE, N hostile".

    tailorfl reproduce hostile_digits --out runs/hostile_digits
    python studies/hostile_tables.py runs/hostile_digits

writes hostile.csv into the folder, a row a job and model, and hostile.md: a table for every number of hostile clients,
a row for every method and model and a column for every rule, with the accuracy on own test parts of the clients that
are not hostile (mean over clients and seeds, 95 % interval over seeds).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from tailorfl.evaluation.comparisons import interval
from tailorfl.report.result import results

MODELS = ("personal", "global")


def frame_of(folder: Path) -> pd.DataFrame:
    """Return a row for every job and model: rule, hostile, label, model, seed, accuracy, worst (client)."""
    rows = []
    for variant, result in results(folder).items():
        rule, _, hostile = variant.partition(", ")
        for summary, _ in result.jobs:
            for model in MODELS:
                own = summary["metrics"].get(model, {}).get("local")
                if own is not None:
                    found = {"label": summary["label"], "model": model, "seed": summary["seed"]}
                    numbers = {"accuracy": own["accuracy"]["mean"], "worst": own["accuracy"]["min"]}
                    rows.append({"rule": rule, "hostile": int(hostile.split()[0]), **found, **numbers})
    return pd.DataFrame(rows)


def page(name: str, frame: pd.DataFrame) -> str:
    """Return the tables as Markdown."""
    rules = list(dict.fromkeys(frame["rule"]))
    lines = [
        f"# {name}",
        "",
        "Accuracy (%) on own test parts of the clients that are not hostile: mean over clients and seeds ± half width "
        "of the 95 % interval over seeds.",
    ]
    for hostile, part in frame.groupby("hostile"):
        head = f"| {hostile} of 10 hostile | model | {' | '.join(rules)} |"
        lines += ["", head, "| --- | --- |" + " ---: |" * len(rules)]
        for (label, model), rows in part.groupby(["label", "model"], sort=False):
            cells = [_cell(rows[rows["rule"] == rule]["accuracy"]) for rule in rules]
            lines.append(f"| {label} | {model} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(values: pd.Series) -> str:
    if values.empty:
        return "–"
    mean, half = interval(values.tolist())
    return f"{100 * mean:.1f} ± {100 * half:.1f}"


def main() -> None:
    """Print the tables of a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    frame = frame_of(folder)
    frame.to_csv(folder / "hostile.csv", index=False, lineterminator="\n")
    (folder / "hostile.md").write_text(page(folder.name, frame), encoding="utf-8")


if __name__ == "__main__":
    main()
