"""How far published numbers lie from ours, cell by cell: z-scores in the distribution over seeds.

    python studies/published_cells.py fedclup_logit --metric shared.official
    python studies/published_cells.py fedclup_logit --metric shared.official -o results/fedclup_logit/cells.md

Reads what `python -m studies.claims --keep results/evidence` has kept of a recipe, and the numbers that the recipe says
were published. z = (published − mean) / s, with s the standard deviation over seeds: a paper's cell is one draw of
clients, so |z| below 2 is what the same experiment would give 19 times out of 20. A reading of the paper (a variant) is
as far from it as the root of the mean of its z².
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from tailorfl.settings.loading import load

KEPT = Path("results") / "evidence"


def published(recipe: str, metric: str) -> dict[tuple[str, str], float]:
    """Return (variant, label) -> what was published of a metric."""
    config = load(recipe, {"scale": "small"})
    found: dict[tuple[str, str], float] = {}
    for name, variant in config.variants.items():
        for label, numbers in variant.get("published", {}).items():
            if isinstance(numbers, Mapping) and metric in numbers:
                found[name, label] = float(numbers[metric])
    return found


def cells(kept: pd.DataFrame, wanted: Mapping[tuple[str, str], float], metric: str) -> pd.DataFrame:
    """Return a row for each published cell: variant, label, published, mean, s, seeds, z.

    Args:
        kept: one row a job, with the columns variant, label, seed and `metric`.
        wanted: see `published`.
        metric: its name.
    """
    rows: list[dict[str, Any]] = []
    for (variant, label), number in wanted.items():
        mine = kept[(kept["variant"] == variant) & (kept["label"] == label)][metric].dropna()
        if len(mine) > 1:
            mean, s = float(mine.mean()), float(mine.std(ddof=1))
            row = {"variant": variant, "label": label, "published": number, "mean": mean, "s": s}
            rows.append({**row, "seeds": len(mine), "z": (number - mean) / s if s else math.nan})
    return pd.DataFrame(rows, columns=["variant", "label", "published", "mean", "s", "seeds", "z"])


def distances(found: pd.DataFrame) -> pd.Series[float]:
    """Return variant -> root mean square of its z, the nearest first."""
    squares = found.assign(square=found["z"] ** 2).groupby("variant", sort=False)["square"].mean()
    return squares.pow(0.5).sort_values()


def text(found: pd.DataFrame, recipe: str, metric: str) -> str:
    """Return both tables as Markdown, in percent."""
    labels = list(dict.fromkeys(found["label"]))
    lines = [
        f"# {recipe}: published cells in our distribution of `{metric}`",
        "",
        f"Made by `python studies/published_cells.py {recipe} --metric {metric}`. A cell: published / our mean ±",
        "standard deviation over seeds (z of the published one). Readings in the order of the root mean square of z.",
        "",
        f"| Reading | {' | '.join(labels)} | Seeds | Distance |",
        f"| --- | {'--- | ' * len(labels)}---: | ---: |",
    ]
    for variant, distance in distances(found).items():
        mine = found[found["variant"] == variant]
        shown = {
            row[
                "label"
            ]: f"{100 * row['published']:.1f} / {100 * row['mean']:.1f} ± {100 * row['s']:.1f} ({row['z']:+.1f})"
            for row in mine.to_dict("records")
        }
        line = " | ".join(shown.get(label, "") for label in labels)
        lines.append(f"| {variant} | {line} | {int(mine['seeds'].min())} | {distance:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the tables, or writes them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--metric", required=True, help="such as mean or shared.official")
    parser.add_argument("--kept", type=Path, default=KEPT, help=f"folder of kept numbers, by default {KEPT}")
    parser.add_argument("-o", "--out", type=Path, help="a file")
    given = parser.parse_args()
    file = given.kept / f"{given.recipe}-small" / "numbers.csv"
    if not file.is_file():
        raise SystemExit(
            f"there is no '{file}': run the recipe, then python -m studies.claims --runs ... --keep {given.kept}"
        )
    found = cells(pd.read_csv(file), published(given.recipe, given.metric), given.metric)
    if found.empty:
        raise SystemExit(f"the recipe '{given.recipe}' has no published numbers of '{given.metric}'")
    made = text(found, given.recipe, given.metric)
    if given.out is None:
        print(made, end="")
        return
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
