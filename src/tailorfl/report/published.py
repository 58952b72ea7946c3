"""A paper's numbers beside ours.

A recipe holds them under `published`, by label of the method:

    published:
      source: FedCLUP, Table 2                 # text is printed as a note
      ditto: {mean: 0.912, worst10: 0.71}      # columns of the comparison table; shares, not percent
      fedavg: {clients: [0.72, 0.76]}          # the metric of each client, in the federation's order
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tailorfl.errors import unknown
from tailorfl.report.tables import MISSING, Table, spread
from tailorfl.settings.experiment import CLIENTS

if TYPE_CHECKING:
    import pandas as pd

    from tailorfl.report.result import ExperimentResult


def notes(published: Mapping[str, Any]) -> list[str]:
    """Return the remarks among published numbers, such as their source."""
    return [f"{key}: {value}" for key, value in published.items() if not isinstance(value, Mapping)]


def beside(result: ExperimentResult, published: Mapping[str, Any]) -> pd.DataFrame:
    """Return a row for each published number: label, quantity, published, ours, ours_ci, difference.

    `ours_ci` is the half width of the 95 % interval; where we have no number, ours is NaN.

    Raises:
        ConfigError: a quantity is no column of the table.
    """
    import pandas as pd

    lines, rows = result.table.to_dict("index"), []
    keys = [column.key for column in result.columns]
    for label, quantities in published.items():
        for name, value in quantities.items() if isinstance(quantities, Mapping) else ():
            if name == CLIENTS:
                ours = _per_client(result, label)
                values = [(f"client {k}", v, *spread(ours.get(k, []))) for k, v in enumerate(value)]
            elif name not in keys:
                raise unknown(f"number in published.{label}", name, [CLIENTS, *keys])
            else:  # a method may have no finished job yet
                line = lines.get(label, {})
                values = [(name, value, line.get(name, math.nan), line.get(f"{name}_ci", math.nan))]
            rows += [(label, *row) for row in values]
    frame = pd.DataFrame(rows, columns=["label", "quantity", "published", "ours", "ours_ci"])
    frame["published"] = frame["published"].astype(float)
    return frame.assign(difference=frame["ours"] - frame["published"])


def published_table(result: ExperimentResult) -> Table:
    """Return a paper's numbers beside ours, with the half width of our 95 % interval over seeds."""
    rows, names = [], result.display_names
    for row in beside(result, result.config.published).to_dict("records"):
        half_width = "" if math.isnan(row["ours_ci"]) else f" ± {row['ours_ci']:.4f}"
        ours = MISSING if math.isnan(row["ours"]) else f"{row['ours']:.4f}{half_width}"
        difference = MISSING if math.isnan(row["difference"]) else f"{row['difference']:+.4f}"
        rows.append(
            (
                names.get(row["label"], row["label"]),
                row["quantity"],
                f"{row['published']:.4f}",
                ours,
                difference,
            )
        )
    return Table.of(
        "Published and ours", ("Method", "Number", "Published", "Ours", "Difference"), rows, left=2
    )


def _per_client(result: ExperimentResult, label: str) -> dict[int, list[float]]:
    """Return the final local metric of every client, one number a seed."""
    values: dict[int, list[float]] = {}
    for summary, store in result.jobs:
        if summary["label"] == label:
            for row in result.own(summary, store).to_dict("records"):
                values.setdefault(int(row["client"]), []).append(float(row[result.metric]))
    return values
