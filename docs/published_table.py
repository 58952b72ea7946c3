"""Makes the table of results/published_numbers/README.md out of kept numbers, and keeps those of result folders.

    python docs/published_table.py                       prints the table
    python docs/published_table.py --write               puts it into results/published_numbers/README.md
    python docs/published_table.py --keep FOLDER ...     first keeps our numbers of these results of recipes

Kept is one row a seed of every number that a recipe's `published` has, and the mean of lines that have none. Seeds of
several folders are put together.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tailorfl.report.published import cells, compared, with_spread
from tailorfl.report.result import ExperimentResult, results
from tailorfl.report.tables import MISSING
from tailorfl.settings.loading import expand, load

ROOT = Path(__file__).resolve().parents[1]
NUMBERS = ROOT / "results" / "published_numbers" / "numbers.csv"
PAGE = NUMBERS.with_name("README.md")
BEGIN, END = "<!-- numbers: made by docs/published_table.py -->\n", "<!-- end of numbers -->\n"
RECIPES = ("fedavg_mnist", "niid_bench", "lg_fedavg_mnist", "heart", "tcga", "school", "pfedme_mnist")
HEAD = ("Recipe", "Method", "Number", "Published", "Ours", "Seeds", "Difference", "Noise", "Verdict")
COLUMNS = ("recipe", "variant", "label", "quantity", "seed", "value")

Key = tuple[str, str, str, str]


def numbers_of(result: ExperimentResult) -> dict[Key, dict[int, float]]:
    """Return what a result says: (recipe, variant, label, quantity) -> our number of each seed."""
    recipe, _, variant = result.config.name.partition(", ")
    seeds: dict[str, list[int]] = {}
    for summary in result.summaries:
        seeds.setdefault(str(summary["label"]), []).append(int(summary["seed"]))
    numbers = {}
    for label, quantities in _cells_of(result.config.published, list(seeds)):
        for name, value in quantities.items():
            for quantity, _, values in cells(result, label, name, value):
                numbers[recipe, variant, label, quantity] = dict(zip(seeds[label], values, strict=True))
    return numbers


def _cells_of(published: Mapping[str, Any], labels: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (label, what is published of it) of the lines with published numbers; of all lines where none has."""
    lines = {label: value for label, value in published.items() if isinstance(value, Mapping)}
    yield from (lines or {label: {"mean": None} for label in labels}).items()


def kept() -> dict[Key, dict[int, float]]:
    """Return the numbers that are kept."""
    numbers: dict[Key, dict[int, float]] = {}
    with NUMBERS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = row["recipe"], row["variant"], row["label"], row["quantity"]
            numbers.setdefault(key, {})[int(row["seed"])] = float(row["value"])
    return numbers


def keep(numbers: Mapping[Key, Mapping[int, float]]) -> None:
    """Write the numbers that are kept."""
    NUMBERS.parent.mkdir(parents=True, exist_ok=True)
    with NUMBERS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for key, values in sorted(numbers.items()):
            writer.writerows((*key, seed, f"{value:.8g}") for seed, value in sorted(values.items()))


def rows(numbers: Mapping[Key, Mapping[int, float]]) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table for each published number, and for each line of a recipe that has none.

    Numbers that were not kept of a line that was run have no row.
    """
    for recipe in RECIPES:
        for name, experiment in expand(load(recipe)).items():
            published, runs = experiment.published, experiment.published.get("runs", 1)
            labels = [str(method.label) for method in experiment.methods]
            for label, quantities in _cells_of(published, labels):
                for quantity, cell in _single(quantities):
                    ours = numbers.get((recipe, name, label, quantity), {})
                    if ours or not any(key[:3] == (recipe, name, label) for key in numbers):
                        cells_of_row = _row(cell, runs, list(ours.values()))
                        yield (f"`{recipe}` {name}".strip(), label, quantity, *cells_of_row)


def _single(quantities: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (quantity, what is published), clients one by one."""
    for name, value in quantities.items():
        several = isinstance(value, list | tuple)
        yield from ((f"client {k}", cell) for k, cell in enumerate(value)) if several else [(name, value)]


def _row(cell: Any, runs: int, values: list[float]) -> tuple[str, ...]:
    row = compared(cell, values, runs)
    published, ours = with_spread(row["published"], row["std"]), with_spread(row["ours"], row["ours_ci"])
    if not values:
        return published, ours, "0", MISSING, MISSING, "not run"
    if math.isnan(row["published"]):
        return published, ours, str(len(values)), MISSING, MISSING, "not published here"
    noise = MISSING if math.isnan(row["noise"]) else f"{row['noise']:.4f}"
    return published, ours, str(len(values)), f"{row['difference']:+.4f}", noise, row["verdict"] or MISSING


def table() -> str:
    """Return the table as Markdown."""
    rule = ["---" if column < 3 else "---:" for column in range(len(HEAD))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (HEAD, rule, *rows(kept()))) + "\n"


def insert(page: str, text: str) -> str:
    """Return the page with the table in its place."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{text}{END}{rest.split(END)[1]}"


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="put the table into results/published_numbers/README.md"
    )
    parser.add_argument(
        "--keep", nargs="*", type=Path, default=[], metavar="FOLDER", help="results of recipes"
    )
    options = parser.parse_args()
    if options.keep:
        fresh = [numbers_of(result) for folder in options.keep for result in results(folder).values()]
        old = kept() if NUMBERS.is_file() else {}
        for numbers in fresh:
            old |= {key: old.get(key, {}) | values for key, values in numbers.items()}
        keep(old)
    if options.write:
        PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), table()), encoding="utf-8")
    else:
        print(table())


if __name__ == "__main__":
    main()
