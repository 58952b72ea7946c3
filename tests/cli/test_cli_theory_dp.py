"""`tailorfl theory dp`: what DP-SGD costs, on the terminal."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

from tailorfl.cli.main import app

pytestmark = pytest.mark.skipif(
    find_spec("opacus") is None, reason="accounting needs opacus: pip install 'tailorfl[privacy]'"
)


def shown(arguments: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["theory", "dp", *arguments.split()])
    assert result.exit_code == 0, result.output
    return re.sub(r"[ │]+", " ", result.output)


def test_epsilon_and_noise_by_both_accountants(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown("--samples 500 --batch 10 --rounds 10 --trainings 2 --target-epsilon 3", monkeypatch)
    for row in (
        "rate q 0.02", "steps 1,000", "epsilon by prv 3.9", "epsilon by rdp 4.3", "noise for epsilon 3 by prv 1.15",
        "noise for epsilon 3 by rdp 1.21", "Poisson samples", "zero-out",
    ):  # fmt: skip
        assert row in text


def test_several_gradients_of_a_batch_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        float(re.search(r"epsilon by rdp ([\d.]+)", shown(f"--gradients {g}", monkeypatch))[1])  # type: ignore[index]
        for g in (1, 2)
    ]
    assert found[1] > 2 * found[0]


def test_passes_of_shuffled_batches_count_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown("--samples 500 --batch 10 --rounds 10 --trainings 2 --sampling shuffle", monkeypatch)
    for row in ("rate q 1", "steps 20", "epsilon by prv 28.4", "passes of shuffled batches"):
        assert row in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--sampling poison", "Did you mean 'poisson'"),
        ("--samples 0", "samples must be at least 1"),
        ("--target-epsilon -1", "epsilon must be positive"),
    ],
)
def test_mistakes_are_said(arguments: str, says: str) -> None:
    result = CliRunner().invoke(app, ["theory", "dp", *arguments.split()])
    assert result.exit_code == 2
    assert says in re.sub(r"\s+", " ", result.output)
