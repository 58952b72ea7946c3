"""ε of composed releases, against closed forms and opacus' own accountants; the noise that reaches a target."""

from __future__ import annotations

import math
from importlib.util import find_spec

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from tailorfl.errors import ConfigError, TailorflError
from tailorfl.privacy import LARGEST, Entry, epsilon, noise_for
from tailorfl.theory.privacy import releases

pytestmark = pytest.mark.skipif(
    find_spec("opacus") is None,
    reason="the accountants are those of opacus: pip install 'tailorfl[privacy]'",
)

DELTA = 1e-5


def gaussian(mu: float, delta: float) -> float:
    """ε of a Gaussian mechanism with sensitivity over deviation `mu`, exactly (Balle and Wang, ICML 2018)."""

    def excess(e: float) -> float:
        return norm.cdf(mu / 2 - e / mu) - math.exp(e + norm.logcdf(-mu / 2 - e / mu)) - delta

    return 0.0 if excess(0.0) <= 0 else float(brentq(excess, 0.0, 200.0, xtol=1e-12))


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (5.0, 100), (0.5, 10), (50.0, 10), (500.0, 10)])
def test_without_sampling_steps_are_one_gaussian(sigma: float, steps: int) -> None:
    """Above by little more than 1 % of a small ε, 0.01 of a usual one and a thousandth of a large one."""
    exact = gaussian(math.sqrt(steps) / sigma, DELTA)
    above = max(0.0011, min(0.012 * exact, 0.012), 0.0012 * exact)
    assert exact <= epsilon([(1.0, sigma, steps)], DELTA) <= exact + above
    assert exact <= epsilon([(1.0, sigma, steps)], DELTA, "rdp") <= exact * 1.2 + 0.1


def test_noise_of_different_sizes_composes_as_the_sum_of_precisions() -> None:
    mu = math.sqrt(3 / 2.0**2 + 5 / 4.0**2)
    found = epsilon([(1.0, 2.0, 3), (1.0, 4.0, 5)], DELTA)
    assert gaussian(mu, DELTA) <= found <= gaussian(mu, DELTA) + 0.011


@pytest.mark.parametrize("entry", [(0.02, 1.0, 1000), (0.5, 1.5, 20), (0.001, 0.7, 500)])
def test_equals_the_accountants_of_opacus(entry: Entry) -> None:
    from opacus.accountants import PRVAccountant, RDPAccountant

    q, sigma, steps = entry
    prv, rdp = PRVAccountant(), RDPAccountant()
    prv.history = rdp.history = [(sigma, q, steps)]
    assert epsilon([entry], DELTA) == pytest.approx(prv.get_epsilon(DELTA), abs=0.01)
    assert epsilon([entry], DELTA, "rdp") <= rdp.get_epsilon(DELTA) * (1 + 1e-9)
    assert epsilon([entry], DELTA, "rdp") == pytest.approx(rdp.get_epsilon(DELTA), rel=1e-6, abs=0.1)


GRID: list[list[Entry]] = [
    [(0.01, 0.8, 200)],
    [(0.1, 1.0, 100)],
    [(0.5, 2.0, 30)],
    [(1.0, 3.0, 10)],
    [(0.02, 1.0, 300), (0.2, 1.5, 10), (1.0, 6.0, 2)],
    [(0.02, 20.0, 1000)],
]


@pytest.mark.parametrize("entries", GRID, ids=str)
def test_rdp_is_never_below_prv(entries: list[Entry]) -> None:
    assert 0 < epsilon(entries, DELTA) <= epsilon(entries, DELTA, "rdp")


@pytest.mark.parametrize(
    ("entries", "accountant"),
    [
        *((e, "rdp") for e in GRID[:5]),
        (GRID[3], "prv"),
        pytest.param(GRID[4], "prv", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_more_of_anything_but_noise_costs_more(entries: list[Entry], accountant: str) -> None:
    def of(factor: float = 1.0, more: int = 1, rate: float = 1.0, delta: float = DELTA) -> float:
        changed = [(min(1.0, q * rate), s * factor, n * more) for q, s, n in entries]
        return epsilon(changed, delta, accountant)  # type: ignore[arg-type]

    here = of()
    assert of(factor=2.0) < here < of(factor=0.8)
    assert here < of(more=2)
    assert of(rate=0.5) < here
    assert of(delta=1e-7) > here


def test_order_and_cutting_of_entries_do_not_matter() -> None:
    whole = epsilon([(0.1, 1.0, 30), (0.2, 2.0, 5)], DELTA)
    assert whole == epsilon([(0.2, 2.0, 5), (0.1, 1.0, 10), (0.1, 1.0, 20)], DELTA)
    assert whole == epsilon([(0.1, 1.0, 30), (0.2, 2.0, 5), (0.3, 1.0, 0), (0.0, 1.0, 9)], DELTA)


def test_several_gradients_of_one_batch_cost_more_than_of_several_batches() -> None:
    """Two releases of σ of the same samples are one of σ/√2; with batches of their own they are two of σ."""
    q, _, steps = releases(500, 10, 1, 10)
    assert epsilon([(q, 1 / math.sqrt(2), steps)], DELTA) > epsilon([(q, 1.0, 2 * steps)], DELTA)
    assert releases(500, 10, 1, 10, gradients=2) == (q, 1 / math.sqrt(2), steps)


def test_nothing_released_costs_nothing_and_no_noise_everything() -> None:
    assert epsilon([], DELTA) == 0
    assert epsilon([(0.1, 1.0, 0)], DELTA) == 0
    assert epsilon([(0.1, 1.0, 5), (0.1, 0.0, 1)], DELTA) == math.inf
    assert epsilon([(1.0, 0.0, 1)], DELTA, "rdp") == math.inf


def test_perada_s_numbers() -> None:
    """CVPR 2024, 10 rounds of two trainings, δ = 1e-5: σ = 0.8, 1, 1.5 give ε = 5.99, 3.7, 1.81, means over clients.

    Neither samples nor batch size are printed. 1875 samples (three quarters of CIFAR-10's 50,000 over 20 clients) in
    batches of 32 give them all; clients of other sizes spread around that, by 3.03, 2.12 and 1.12 there.
    """
    found = [
        epsilon([releases(1875, 32, 1, 10, trainings=2, noise=sigma)], DELTA) for sigma in (0.8, 1.0, 1.5)
    ]
    assert found == pytest.approx([5.99, 3.7, 1.81], rel=0.05)


@pytest.mark.parametrize(
    ("q", "steps", "target", "accountant"),
    [(0.02, 1000, 3.0, "rdp"), (0.1, 100, 1.0, "prv"), (1.0, 10, 2.0, "rdp")],
)
def test_noise_for_one_kind_of_release_is_that_of_opacus(
    q: float, steps: int, target: float, accountant: str
) -> None:
    from opacus.accountants.utils import get_noise_multiplier

    found = noise_for(target, DELTA, [(q, 1.0, steps)], accountant)  # type: ignore[arg-type]
    theirs = get_noise_multiplier(
        target_epsilon=target, target_delta=DELTA, sample_rate=q, steps=steps, accountant=accountant
    )
    assert found == pytest.approx(theirs, rel=0.01)
    assert epsilon([(q, found, steps)], DELTA, accountant) <= target  # type: ignore[arg-type]


@pytest.mark.parametrize("target", [0.3, pytest.param(30.0, marks=pytest.mark.slow)])
def test_noise_is_the_smallest_that_is_enough_for_a_mixture(target: float) -> None:
    entries: list[Entry] = [(0.05, 1.0, 60), (0.05, 1 / math.sqrt(3), 10), (1.0, 2.0, 4)]

    def spent(factor: float) -> float:
        return epsilon([(q, factor * s, n) for q, s, n in entries], DELTA)

    found = noise_for(target, DELTA, entries)
    assert spent(found) <= target < spent(found * 0.999)
    doubled: list[Entry] = [(q, 2 * s, n) for q, s, n in entries]
    assert noise_for(target, DELTA, doubled) == pytest.approx(found / 2, rel=1e-3)


def test_no_noise_where_nothing_is_released() -> None:
    assert noise_for(1.0, DELTA, []) == 0.0


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf, LARGEST])
def test_targets_that_mean_nothing_are_refused(target: float) -> None:
    with pytest.raises(ConfigError, match="epsilon must be positive"):
        noise_for(target, DELTA, [(0.1, 1.0, 1)])


def test_targets_out_of_reach_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be reached"):
        noise_for(1e-5, 1e-5, [(1.0, 1.0, 1_000_000)], "rdp")


def test_prv_says_so_where_it_cannot_tell_and_rdp_can() -> None:
    entries = [(0.5, 0.05, 3)]
    with pytest.raises(TailorflError, match=r"prv cannot compute .* accountant rdp"):
        epsilon(entries, DELTA)
    assert LARGEST < epsilon(entries, DELTA, "rdp") < math.inf


@pytest.mark.parametrize(
    ("entries", "delta", "accountant", "says"),
    [
        ([(0.1, 1.0, 1)], 0.0, "prv", "delta must be between 0 and 1"),
        ([(0.1, 1.0, 1)], 1.0, "prv", "delta must be between 0 and 1"),
        ([(1.1, 1.0, 1)], DELTA, "prv", "rate q in 0..1"),
        ([(0.1, -1.0, 1)], DELTA, "prv", "noise of at least 0"),
        ([(0.1, math.nan, 1)], DELTA, "prv", "noise of at least 0"),
        ([(0.1, 1.0, -1)], DELTA, "prv", "number of steps"),
        ([(0.1, 1.0, 1)], DELTA, "prw", "Did you mean 'prv'"),
    ],
)
def test_what_is_no_release_is_refused(
    entries: list[Entry], delta: float, accountant: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        epsilon(entries, delta, accountant)  # type: ignore[arg-type]


def test_without_opacus_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from tailorfl.errors import MissingExtraError

    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'opacus.*the extra 'privacy' of tailorfl"):
        epsilon([(0.123, 1.0, 7)], DELTA)
