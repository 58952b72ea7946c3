"""ε of settings whose drawing matters, beside an outside accountant and what an attack can reach.

    pip install dp-accounting
    python studies/privacy_accounting.py results/privacy_accounting

writes accounting.csv and accounting.md into the folder. "Poisson" is what counting every draw as a Poisson sample of
rate q would say; "stated" is what tailorfl says for what is really done; "dp-accounting" is Google's accountant for the
same (privacy loss distributions, pessimistic); "possible" is what some pair of neighbouring data reaches at the least,
by numerical integration.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from scipy.stats import norm

from tailorfl.privacy import Entry, epsilon

GRID = np.linspace(-30.0, 60.0, 900_001)


@dataclass(frozen=True)
class Row:
    """One setting; entries are (q, σ, releases)."""

    what: str
    delta: float
    poisson: Entry
    done: Entry
    possible: float | None = None


def reached(law: Callable[[float], np.ndarray], here: float, gone: float, delta: float) -> float:
    """Return ε at δ between two densities on `GRID`, the larger of both directions."""
    step, p, q = GRID[1] - GRID[0], law(here), law(gone)

    def one_way(a: np.ndarray, b: np.ndarray) -> float:
        def over(e: float) -> float:
            return float(np.maximum(a - math.exp(e) * b, 0).sum() * step) - delta

        return float(brentq(over, 0, 60)) if over(0) > 0 else 0.0

    return max(one_way(p, q), one_way(q, p))


def one_of(clients: int, sigma: float) -> Callable[[float], np.ndarray]:
    """One of `clients` is drawn, all others send +C: the density of the noisy sum where ours sends `mean`·C."""
    return lambda mean: norm.pdf(GRID, mean, sigma) / clients + norm.pdf(GRID, 1, sigma) * (1 - 1 / clients)


def largest_of(batches: int, sigma: float) -> Callable[[float], np.ndarray]:
    """Return a pass of shuffled batches, one of which holds the sample: the density of the largest of their sums."""

    def law(mean: float) -> np.ndarray:
        one, others = norm(mean, sigma), norm(-1, sigma)
        below = others.cdf(GRID) ** (batches - 2)
        density = one.pdf(GRID) * others.cdf(GRID) + (batches - 1) * others.pdf(GRID) * one.cdf(GRID)
        return np.asarray(below * density)

    return law


def rows() -> list[Row]:
    """Return the settings."""
    redrawn = [q / (1 - (1 - q) ** n) for q, n in ((0.05, 10), (0.1, 5))]
    fixed = reached(one_of(10, 1.0), -1.0, 0.0, 1e-5)
    ten, hundred = (reached(largest_of(b, 1.0), 1.0, 0.0, 1e-6) for b in (10, 100))
    drawn, passes = [(0.05, 10, 100), (0.1, 5, 50)], 1e-6
    clients = []
    for (q, n, rounds), true in zip(drawn, redrawn, strict=True):
        what = f"clients, {q:.0%} of {n} by Bernoulli, {rounds} rounds; "
        clients += [
            Row(what + "empty rounds redrawn", 1e-5, (q, 1, rounds), (true, 1, rounds)),
            Row(what + "empty rounds kept (as it is)", 1e-5, (q, 1, rounds), (q, 1, rounds)),
        ]
    all_of, poisson = "samples, 500, batches of 10, 10 epochs, ", (0.02, 1, 500)
    twice = (0.02, 0.5**0.5, 500)
    return [
        *clients,
        Row("clients, 1 of 10, fixed size, 1 round", 1e-5, (0.1, 1, 1), (1.0, 1, 1), fixed),
        Row("clients, 10 of 100, fixed size, in 8 of 50 rounds", 1e-5, (0.1, 1, 50), (1.0, 1, 8)),
        Row("samples, a pass of 10 shuffled batches", passes, (0.1, 1, 10), (1.0, 1, 1), ten),
        Row("samples, a pass of 100 shuffled batches", passes, (0.01, 1, 100), (1.0, 1, 1), hundred),
        Row(all_of + "shuffled", 1e-5, poisson, (1.0, 1, 10)),
        Row(all_of + "Poisson (the default)", 1e-5, poisson, poisson),
        Row("the same with two trainings a round (Ditto)", 1e-5, (0.02, 1, 1000), (0.02, 1, 1000)),
        Row("the same with two gradients of a batch (SAM)", 1e-5, twice, twice),
    ]


def outside(entry: Entry, delta: float) -> float:
    """Return ε by dp-accounting's privacy loss distributions, neighbours by adding or removing one."""
    import dp_accounting
    from dp_accounting import pld

    rate, sigma, steps = entry
    event: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(sigma)
    if rate < 1:
        event = dp_accounting.PoissonSampledDpEvent(rate, event)
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, steps))
    return float(accountant.get_epsilon(delta))


def frame_of(found: list[Row]) -> pd.DataFrame:
    """Return the table."""
    return pd.DataFrame(
        {
            "setting": row.what,
            "sigma": row.done[1],
            "delta": row.delta,
            "poisson": epsilon([row.poisson], row.delta),
            "stated": epsilon([row.done], row.delta),
            "dp_accounting": outside(row.done, row.delta),
            "possible": row.possible,
        }
        for row in found
    )


def page(frame: pd.DataFrame) -> str:
    """Return the table as Markdown."""
    lines = [
        "# Privacy accounting",
        "",
        'ε; neighbours are zero-out, which is add or remove for Poisson samples. "Poisson": every draw counted as a '
        'Poisson sample of its rate. "Stated": what tailorfl counts for what is done. "dp-accounting": an outside '
        'accountant for the same (privacy loss distributions). "Possible": what an attack reaches at the least, by '
        "numerical integration. σ = 1 but for SAM, where r gradients of a batch are one of σ/√r.",
        "",
        "| Setting | δ | Poisson | Stated | dp-accounting | Possible |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in frame.to_dict("records"):
        possible = "–" if math.isnan(row["possible"]) else f"{row['possible']:.3f}"
        numbers = f"{row['poisson']:.3f} | {row['stated']:.3f} | {row['dp_accounting']:.3f} | {possible}"
        lines.append(f"| {row['setting']} | {row['delta']:g} | {numbers} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where accounting.csv and accounting.md are written")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    frame = frame_of(rows())
    frame.to_csv(folder / "accounting.csv", index=False, lineterminator="\n")
    (folder / "accounting.md").write_text(page(frame), encoding="utf-8")


if __name__ == "__main__":
    main()
