"""An attack on private training stays below the stated ε, and rises above it where the mechanism is broken."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binomtest, norm
from typer.testing import CliRunner

from studies.audit import Attack, app, at_least, at_most, attack, audit_samples
from tailorfl.errors import ConfigError
from tailorfl.privacy import PrivacyRecord
from tailorfl.training import custom_gradient
from tailorfl.training import sample_privacy as privacy
from tailorfl.training.sample_privacy import SampleDP

opacus = pytest.mark.skipif(
    find_spec("opacus") is None, reason="accounting needs opacus: pip install 'tailorfl[privacy]'"
)


@pytest.mark.parametrize(("successes", "trials"), [(0, 50), (7, 50), (50, 50), (480, 1000)])
def test_bounds_of_probabilities_are_exact_binomial_ones(successes: int, trials: int) -> None:
    found = binomtest(successes, trials).proportion_ci(0.95, method="exact")
    assert at_least(successes, trials, 0.025) == pytest.approx(found.low, abs=1e-9)
    assert at_most(successes, trials, 0.025) == pytest.approx(found.high, abs=1e-9)


def test_the_bound_of_an_attack_is_that_of_its_rates() -> None:
    one = Attack(hits=400, false_alarms=20, trials=1000)
    low = binomtest(400, 1000).proportion_ci(0.975, method="exact").low
    high = binomtest(20, 1000).proportion_ci(0.975, method="exact").high
    assert one.epsilon(1e-2, 0.95) == pytest.approx(math.log((low - 1e-2) / high))
    other = Attack(hits=980, false_alarms=600, trials=1000)
    assert other.epsilon(1e-2, 0.95) == pytest.approx(one.epsilon(1e-2, 0.95))
    assert Attack(500, 500, 1000).epsilon(1e-5) == 0.0


def test_an_attack_on_a_known_mechanism_finds_most_of_its_epsilon_and_no_more() -> None:
    """One Gaussian mechanism, σ = 1: δ(ε) = Φ(½ − ε) − e^ε Φ(−½ − ε) (Balle and Wang, ICML 2018)."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(2, 20_000))
    shown = attack(scores[0] + 1.0, scores[1], 1e-2).epsilon(1e-2)
    exact = brentq(lambda e: norm.cdf(0.5 - e) - math.exp(e) * norm.cdf(-0.5 - e) - 1e-2, 0, 9)
    assert 0.6 * exact < shown < exact


# -- private training ----------------------------------------------------------------------------------------

QUICK: dict[str, Any] = {"trials": 1000, "steps": 4}


@opacus
@pytest.mark.parametrize(
    ("dp", "batch"), [(SampleDP(0.5, 1.0, "poisson"), 10), (SampleDP(2.0, 2.0, "shuffle"), 20)]
)
def test_an_attack_stays_below_the_stated_epsilon(dp: SampleDP, batch: int) -> None:
    found = audit_samples(dp, batch_size=batch, **QUICK)
    assert 0.8 < found.shown < found.stated
    assert not found.broken


Breaking = Callable[[pytest.MonkeyPatch], None]


def weak_noise(patch: pytest.MonkeyPatch) -> None:
    original = privacy.normal
    patch.setattr(privacy, "normal", lambda *given: 0.1 * original(*given))


def loose_clip(patch: pytest.MonkeyPatch) -> None:
    """Ten times the stated sensitivity, with noise for one."""
    original = custom_gradient.private_gradient

    def loose(*given: Any) -> Any:
        *first, dp, noise, key, release = given
        wider = release._replace(noise=release.noise / 10)
        return original(*first, replace(dp, clip=10 * dp.clip), noise, key, wider)

    patch.setattr(custom_gradient, "private_gradient", loose)


def wrong_ledger(patch: pytest.MonkeyPatch) -> None:
    """Batches are written down with ten times the noise that they had."""
    original = PrivacyRecord.add

    def add(self: Any, client: int, rate: float, noise: float, gradients: Any) -> None:
        original(self, client, rate, 10 * noise, gradients)

    patch.setattr(PrivacyRecord, "add", add)


@opacus
@pytest.mark.parametrize("breaking", [weak_noise, loose_clip, wrong_ledger])
def test_an_attack_finds_what_is_broken(breaking: Breaking) -> None:
    sigma = 0.2 if breaking is wrong_ledger else 2.0
    with pytest.MonkeyPatch.context() as patch:
        breaking(patch)
        found = audit_samples(SampleDP(1.0, sigma, "poisson"), trials=400, steps=4)
    assert found.broken
    assert found.shown > found.stated + 0.3


@pytest.mark.parametrize(
    ("noise", "changes", "named"),
    [
        (1.0, {"samples": 1}, "an audit needs at least 2 samples"),
        (1.0, {"steps": 0}, "an audit needs at least 2 samples"),
        (1.0, {"batch_size": 0}, "an audit needs at least 2 samples"),
        (0.0, {}, "noise above 0"),
        (1.0, {"trials": 3}, "as many runs with the canary"),
    ],
)
def test_audits_that_say_nothing_are_refused(noise: float, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        audit_samples(SampleDP(1.0, noise, "shuffle"), **changes)


@pytest.mark.slow
@opacus
def test_the_command_shows_both_and_fails_where_the_promise_is_broken() -> None:
    arguments = ["--trials", "600", "--steps", "2", "--noise", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "stated epsilon" in result.output
    assert "zero-out" in result.output
    with pytest.MonkeyPatch.context() as patch:
        weak_noise(patch)
        result = CliRunner().invoke(app, [*arguments, "--steps", "4", "--trials", "1000"])
    assert result.exit_code == 1
    assert "broken" in result.output
