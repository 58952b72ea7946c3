"""Committed results and the tables of pages belong to the library as it is."""

from __future__ import annotations

import re

import pytest
import yaml
from blocks import ROOT

from tailorfl.core.method import make_method, methods
from tailorfl.theory.fedclup import fewest_steps, stochastic_eta

TABLES = ("defaults", "defaults_cifar")
README = (ROOT / "results" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("table", TABLES)
def test_tables_of_defaults_were_made_with_the_defaults_of_today(table: str) -> None:
    """Where this fails, a default has changed: run the recipe again, or put the default back.

    A run's settings have the options of its day; one that came later must leave as its default what was so before. A
    method that came later is in the table, or results/README.md says that it is not yet.
    """
    settings = yaml.safe_load((ROOT / "results" / table / "config.yaml").read_text(encoding="utf-8"))
    left_out = ("name", "label", "train", "weights", "participation")
    kept = {m["name"]: {k: v for k, v in m.items() if k not in left_out} for m in settings["methods"]}
    later = re.findall(
        r"`(\w+)`", "".join(re.findall(r"^Not in the tables of defaults yet: .*$", README, re.MULTILINE))
    )
    assert set(kept) <= set(methods()) <= {*kept, *later}
    for name, options in kept.items():
        today = make_method(name).all_options()
        assert {k: today.get(k) for k in options} == options, name


@pytest.mark.parametrize(
    "page", sorted((ROOT / "results").rglob("report.html")), ids=lambda page: page.parent.name
)
def test_committed_pages_are_small_and_name_no_folder_of_a_machine(page) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.encode()) < 3_000_000
    assert not re.search(r"/(home|tmp|root|work)/", text)


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
