"""A paper's numbers beside ours.

A recipe holds them under `published`, by label of the method:

    published:
      source: FedCLUP, Table 2                 # text is printed as a note
      ditto: {mean: 0.912, worst10: 0.71}      # columns of the comparison table; shares, not percent
      fedavg: {clients: [0.72, 0.76]}          # the metric of each client, in the federation's order
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tailorfl.errors import unknown
from tailorfl.evaluation.seeds import interval
from tailorfl.settings.experiment import CLIENTS

if TYPE_CHECKING:
    import pandas as pd

    from tailorfl.report.result import ExperimentResult


def notes(published: Mapping[str, Any]) -> list[str]:
    """Return the remarks among published numbers, such as their source."""
    return [f"{key}: {value}" for key, value in published.items() if not isinstance(value, Mapping)]


def beside(result: ExperimentResult, published: Mapping[str, Any]) -> pd.DataFrame:
    """One row a published number: label, quantity, published, ours, ours_ci (half width of 95 %), difference.

    Where we have no number, ours is NaN. Raises ConfigError for a quantity that is no column of the table.
    """
    import pandas as pd

    table, rows = result.table, []
    for label, numbers in published.items():
        if not isinstance(numbers, Mapping):
            continue
        clients = _per_client(result, label) if CLIENTS in numbers else {}
        for quantity, number, where in _flat(numbers):
            if isinstance(where, int):
                ours, ci = interval(clients.get(where, []))
            elif where not in table.columns:
                raise unknown(
                    f"number in published.{label}", where, [CLIENTS, *(c.key for c in result.columns)]
                )
            else:
                found = table[table.index == label]  # empty where the method has no finished job yet
                ours, ci = float(found[where].mean()), float(found[f"{where}_ci"].mean())
            rows.append(
                {
                    "label": label,
                    "quantity": quantity,
                    "published": number,
                    "ours": ours,
                    "ours_ci": ci,
                    "difference": ours - number,
                }
            )
    return pd.DataFrame(rows)


def _flat(numbers: Mapping[str, Any]) -> Iterator[tuple[str, float, str | int]]:
    """(quantity, published number, column or client) of one label."""
    for key, value in numbers.items():
        if key == CLIENTS:
            for client, number in enumerate(value):
                yield f"client {client}", float(number), client
        else:
            yield key, float(value), key


def _per_client(result: ExperimentResult, label: str) -> dict[int, list[float]]:
    """Return the final local metric of every client, one number a seed."""
    found: dict[int, list[float]] = {}
    for summary, store in result.jobs:
        if summary["label"] != label:
            continue
        frame = store.clients()
        final = frame[(frame["round"] == summary["rounds"]) & (frame["set"] == "local")]
        for row in final[final["model"] == summary["model"]].to_dict("records"):
            found.setdefault(int(row["client"]), []).append(float(row[result.metric]))
    return found
