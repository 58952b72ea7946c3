"""Comparison of our results with a paper's numbers.

A recipe has these under `published`, by label of the method:

    published:
      source: FedCLUP, Table 2                 # text is printed as a note
      runs: 3                                  # number of runs that each number is a mean of; by default 1
      ditto: {mean: 0.912, worst10: 0.71}      # columns of the comparison table; shares, not percent
      fedprox: {mean: {value: 0.9, std: 0.01}} # with the standard deviation over runs
      fedavg: {clients: [0.72, 0.76]}          # the metric of each client, in the federation's order
      local: {best_on_test: 0.91}              # at the best round on test data; or best_of_each: the mean over
                                               # clients of each client's best round
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tailorfl.errors import unknown
from tailorfl.evaluation.comparisons import noise
from tailorfl.report.curves import BEST_ON_TEST, best_of_each, by_round
from tailorfl.report.tables import MISSING, Table, spread
from tailorfl.settings.experiment import CLIENTS, RUNS

if TYPE_CHECKING:
    import pandas as pd

    from tailorfl.report.result import ExperimentResult

BEST_OF_EACH = "best_of_each"
CLOSE = 0.01
"""Largest difference from a published number that counts as reproduced, as a share of that number."""


def notes(published: Mapping[str, Any]) -> list[str]:
    """Return the notes among published numbers, such as their source."""
    return [f"{key}: {value}" for key, value in published.items() if not isinstance(value, Mapping)]


def beside(result: ExperimentResult, published: Mapping[str, Any]) -> pd.DataFrame:
    """Return a row for each published number.

    Columns: label, quantity, published, std (over published runs, NaN if not published), ours, ours_ci (half width of
    the 95 % interval over seeds), difference, noise (see `tailorfl.evaluation.comparisons.noise`) and verdict (see
    `verdict`). If we have no number, ours is NaN.

    Raises:
        ConfigError: a quantity is not a column of the table.
    """
    import pandas as pd

    rows = []
    for label, quantities in published.items():
        for name, value in quantities.items() if isinstance(quantities, Mapping) else ():
            for quantity, cell, values in cells(result, label, name, value):
                row = compared(cell, values, published.get(RUNS, 1))
                rows.append({"label": label, "quantity": quantity, **row})
    columns = ["label", "quantity", "published", "std", "ours", "ours_ci", "difference", "noise", "verdict"]
    return pd.DataFrame(rows, columns=columns)


def compared(cell: Any, values: Sequence[float], runs: int) -> dict[str, Any]:
    """Return the columns of `beside` from `published` on, of one cell of a paper.

    Args:
        cell: a number, {value: ..., std: ...}, or None if the paper does not report it.
        values: our numbers, one for each seed.
        runs: number of runs of the published mean.
    """
    number, std = (cell["value"], cell.get("std")) if isinstance(cell, Mapping) else (cell, None)
    published = math.nan if number is None else float(number)
    ours, half_width = spread(values)
    allowed = noise(values, std, runs)
    return {
        "published": published,
        "std": math.nan if std is None else float(std),
        "ours": ours,
        "ours_ci": half_width,
        "difference": ours - published,
        "noise": allowed,
        "verdict": verdict(published, ours, allowed),
    }


def verdict(published: float, ours: float, allowed: float) -> str:
    """Return whether a number is reproduced.

    Args:
        published: the number of the paper.
        ours: our mean over seeds.
        allowed: the noise of their difference.

    Returns:
        "reproduced" if they differ by no more than the noise and no more than the share `CLOSE`; "undecided" if the
        difference is within the noise only; else by how much ours is off. "" if a number is missing or the noise is
        unknown.
    """
    difference = ours - published
    if math.isnan(difference + allowed):
        return ""
    if abs(difference) > allowed:
        return f"off by {difference:+.4f}"
    return "reproduced" if abs(difference) <= CLOSE * abs(published) else "undecided"


def published_table(result: ExperimentResult) -> Table:
    """Return a table of a paper's numbers and ours, with half widths of our 95 % intervals over seeds, and verdicts."""
    rows, names = [], result.display_names
    for row in beside(result, result.config.published).to_dict("records"):
        noise_text = MISSING if math.isnan(row["noise"]) else f"{row['noise']:.4f}"
        difference = MISSING if math.isnan(row["difference"]) else f"{row['difference']:+.4f}"
        numbers = (with_spread(row["published"], row["std"]), with_spread(row["ours"], row["ours_ci"]))
        label = names.get(row["label"], row["label"])
        rows.append((label, row["quantity"], *numbers, difference, noise_text, row["verdict"] or MISSING))
    head = ("Method", "Number", "Published", "Ours", "Difference", "Noise", "Verdict")
    return Table.of("Published and ours", head, rows, left=2)


def with_spread(number: float, half_width: float) -> str:
    """Return a number with its half width or deviation, if there is one."""
    if math.isnan(number):
        return MISSING
    return f"{number:.4f}" if math.isnan(half_width) else f"{number:.4f} ± {half_width:.4f}"


def cells(
    result: ExperimentResult, label: str, name: str, value: Any
) -> Iterator[tuple[str, Any, list[float]]]:
    """Yield (quantity, published cell, our number of each seed); without finished jobs there are no numbers of ours."""
    columns = [column.key for column in result.columns]
    if name == CLIENTS:
        ours = _per_client(result, label)
        yield from ((f"client {k}", cell, ours.get(k, [])) for k, cell in enumerate(value))
    elif name == BEST_OF_EACH:
        yield name, value, best_of_each(result, label)
    elif name == BEST_ON_TEST:
        yield name, value, by_round(result).get(label, {}).get(name, [])
    elif name in columns:
        seeds = [seed.values for seed in result.seed_results() if seed.label == label]
        yield name, value, [values.get(name, math.nan) for values in seeds]
    else:
        raise unknown(f"number in published.{label}", name, [CLIENTS, BEST_ON_TEST, BEST_OF_EACH, *columns])


def _per_client(result: ExperimentResult, label: str) -> dict[int, list[float]]:
    """Return the final local metric of every client, one number for each seed."""
    values: dict[int, list[float]] = {}
    for summary, store in result.jobs:
        if summary["label"] == label:
            for row in result.own(summary, store).to_dict("records"):
                values.setdefault(int(row["client"]), []).append(float(row[result.metric]))
    return values
