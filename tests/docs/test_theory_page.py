"""The table of docs/theory.md holds what the calculators and the method find."""

from __future__ import annotations

import re

from blocks import ROOT

from tailorfl.theory.fedclup import fewest_steps, stochastic_eta

MU, L = 1.0, 10.0
ROW = re.compile(
    r"^\| ([\d.]+) \| (.+) = ([\d.]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| none \|$", re.MULTILINE
)


def test_local_steps_of_the_grid() -> None:
    rows = ROW.findall((ROOT / "docs" / "theory.md").read_text(encoding="utf-8"))
    assert len(rows) == 10
    for text, rule, printed, *steps in rows:
        lam = float(text)
        eta = stochastic_eta(MU, L, lam) if "stochastic" in rule else 1 / (lam + L)
        assert f"{eta:.4g}" == printed
        bound = 1 / lam + 1 / L
        gammas = (bound / 2, 1 / lam, 0.1 * bound, 0.9 * bound)
        assert [fewest_steps(MU, L, lam, gamma, eta) for gamma in gammas] == [int(k) for k in steps]
