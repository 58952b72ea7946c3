"""The same comparison before and after `tailorfl tune`, side by side.

    tailorfl compare tuning_digits --out BEFORE
    tailorfl tune tuning_digits --budget 16x30x2 --out TUNING
    tailorfl compare TUNING/tuned.yaml --out AFTER
    python studies/tuning_table.py BEFORE AFTER

prints a row a method, by its place after: the leading metric of deployable models on the clients' own test parts (mean
over clients and seeds, 95 % interval over seeds) before and after, both places, the validation score that its settings
were chosen by, from how many trials, and what was chosen. Folders need their comparison.csv, not their jobs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from tailorfl.runs.folders import TUNING, as_words, best_score, read_tuning

HEAD = (
    "| Method | Before (%) | After (%) | Place | Validation (%) | Trials | Chosen |",
    "|---|---:|---:|---|---:|---:|---|",
)


def table(before: Path, after: Path) -> str:
    """Return the table in Markdown."""
    first, last = (
        pd.read_csv(folder / "comparison.csv").set_index("label")[["mean", "mean_ci"]]
        for folder in (before, after)
    )
    places = [frame["mean"].rank(ascending=False, method="min").astype(int) for frame in (first, last)]
    tuned = read_tuning(after / TUNING)["methods"]
    lines = [*HEAD]
    for label in last["mean"].sort_values(ascending=False).index:
        row, states = tuned[label], [trial["state"] for trial in tuned[label]["trials"]]
        beside = [f"{count} {state}" for state in ("pruned", "failed") if (count := states.count(state))]
        cells = (
            label,
            *(f"{100 * f['mean'][label]:.2f} ± {100 * f['mean_ci'][label]:.2f}" for f in (first, last)),
            f"{places[0][label]} → {places[1][label]}",
            f"{100 * (best_score(row) or float('nan')):.2f}",
            f"{len(states)}" + (f" ({', '.join(beside)})" if beside else ""),
            f"`{as_words(row['chosen'])}`",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    given = parser.parse_args()
    print(table(given.before, given.after))
