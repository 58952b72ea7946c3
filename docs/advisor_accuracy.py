"""Makes the tables of docs/advisor.md: what the advisor finds on problems whose truth is known.

python docs/advisor_accuracy.py            prints the tables (a minute)
python docs/advisor_accuracy.py --write    puts them into docs/advisor.md
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np
import torch

from tailorfl.data.build import build as build_federation
from tailorfl.data.source import Source
from tailorfl.data.synthetic import closed_form, synthetic_linear
from tailorfl.models.functional import Model
from tailorfl.models.registry import build as build_module
from tailorfl.theory.advisor import Advice, advise
from tailorfl.theory.spread import SpreadInterval
from tailorfl.training.cohort import TrainConfig

PAGE = Path(__file__).with_name("advisor.md")
BEGIN, END = "<!-- accuracy: made by docs/advisor_accuracy.py -->\n", "<!-- end of accuracy -->\n"
CLIENTS, SAMPLES, DIM = 20, 200, 10
CASES = [(radius, 10.0) for radius in (0.0, 0.1, 0.5, 2.0)]
HEAD = ("R", "R found", "ρ", "ρ found", "L", "L found", "λ*", "λ found", "error, best λ = 1")


def problem(radius: float, condition: float, seed: int = 0) -> Source:
    """Return a federation of least squares with label noise of variance 1."""
    return synthetic_linear(CLIENTS, SAMPLES, 1, DIM, radius, noise=1.0, condition=condition, seed=seed)


def advice(source: Source) -> Advice:
    """Return the advice for a source whose official training part is all that clients have."""
    federation = build_federation(source=source, split={"train": 1.0, "test": "official"})
    model = Model(lambda: build_module("linear", source.input_shape, source.outputs))
    return advise(federation, model, TrainConfig(lr=0.01))


def table() -> str:
    """Return the table of R, rho, L, mu and lam, one line a problem."""
    lines = [HEAD, ("---:",) * len(HEAD), *(row(*case) for case in CASES)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def row(radius: float, condition: float) -> tuple[str, ...]:
    """Return the cells of one problem."""
    source = problem(radius, condition)
    found = advice(source)
    eigenvalues = torch.linalg.eigvalsh(source.info["H"])
    rho = float(np.sqrt(np.geomspace(1, condition, DIM).sum()))
    curved = found.facts.curvature
    best = (1 - 1 / CLIENTS) * DIM / SAMPLES / radius**2 if radius else np.inf
    return (
        f"{radius:g}",
        ranged(found.facts.radius),
        f"{rho:.2f}",
        f"{found.facts.rho.value:.2f}",
        f"{float(eigenvalues[:, -1].max()):.3f}",
        f"{curved.client_smoothness:.3f}",
        f"{best:.3g}".replace("inf", "∞"),
        ranged(found.lam),
        f"{price(radius, condition, found.lam.value):.2f}",
    )


def price(radius: float, condition: float, lam: float) -> float:
    """Return the error with `lam` over that with the best of 41 values, on 10 other federations of the kind."""
    others = [problem(radius, condition, seed=1000 + draw).info for draw in range(10)]

    def error(lam: float) -> float:
        models = [closed_form(i["H"], i["c"], i["p"], lam)[1] - i["weights"] for i in others]
        return float(np.mean([float(gap.square().sum(1).mean()) for gap in models]))

    return error(lam) / min(error(value) for value in np.geomspace(1e-3, 1e4, 41))


def ranged(found: SpreadInterval) -> str:
    """Return an estimate with its range."""
    return f"{found.value:.3g} ({found.low:.3g} to {found.high:.3g})"


def insert(page: str, made: str) -> str:
    """Return the page with its tables replaced by `made`."""
    found = re.sub(f"(?<={re.escape(BEGIN)}).*?(?={re.escape(END)})", lambda _: made, page, flags=re.DOTALL)
    assert BEGIN in found, f"{PAGE.name} has lost the line {BEGIN!r}"
    return found


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put it into docs/advisor.md")
    torch.set_num_threads(1)
    if not parser.parse_args().write:
        print(table(), end="")
        return
    PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), table()), encoding="utf-8")


if __name__ == "__main__":
    main()
