"""The simulated system against its formulas, written down once more here in plain numpy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from methods.small import BOTH, SIZES, assert_same, everything, model, simulation
from rounds.helpers import digest, stepped, two_architectures
from tailorfl.errors import ConfigError, DataError
from tailorfl.rounds.availability import ByChance, Listed, Wave, make_availability
from tailorfl.rounds.participation import Trace
from tailorfl.rounds.simulation import Simulation
from tailorfl.rounds.system import ClientWork, Devices, System
from tailorfl.settings.system import AvailabilityConfig, SystemConfig
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.sample_privacy import SampleDP

NAMES = tuple(f"client {i}" for i in range(6))
FAULTS = SystemConfig.model_validate(
    {
        "availability": {"kind": "wave", "share": 0.7, "period": 20.0},
        "speed": {"kind": "lognormal", "median": 10.0},
        "bandwidth": {"kind": "uniform", "median": 5000.0},
        "stragglers": {"share": 0.4, "factor": 4, "redraw": "round"},
        "dropout": 0.2,
        "deadline": 6.0,
    }
)


def settings(**given: Any) -> SystemConfig:
    return SystemConfig.model_validate(given)


# -- how long a client takes ------------------------------------------------------------------------------------


def test_the_time_of_a_client_is_the_formula() -> None:
    """FedAvg with logistic regression: n_i gradients, and 260 floats each way; upwards at a quarter of the rate."""
    system = settings(speed=20.0, bandwidth=1000.0, upload=0.25)
    sim = simulation("fedavg", "logistic", system=system)
    done = sim.step()
    assert done.trace is not None
    size = 4 * model("logistic").scalars
    wanted = [size / 1000 + n / 20 + size / 250 for n in SIZES]
    assert [a.seconds for a in done.trace.answers] == pytest.approx(wanted)
    assert sim.clock == done.trace.seconds == pytest.approx(max(wanted))
    assert sim.step().trace is not None
    assert sim.clock == pytest.approx(2 * max(wanted))


@pytest.mark.parametrize(
    ("given", "law"),
    [
        ({"kind": "lognormal", "median": 8.0, "spread": 0.7}, stats.lognorm(0.7, scale=8.0)),
        ({"kind": "uniform", "median": 8.0, "spread": 0.25}, stats.uniform(6.0, 4.0)),
    ],
)
@pytest.mark.parametrize("redraw", ["client", "round"])
def test_rates_have_their_distribution(given: dict[str, Any], law: Any, redraw: str) -> None:
    devices = Devices(settings(speed={**given, "redraw": redraw}), 5, NAMES)
    pairs = [(i, 0) for i in range(4000)] if redraw == "client" else [(3, k) for k in range(4000)]
    rates = [1.0 / devices.seconds(i, k, ClientWork(1, 0, 0)) for i, k in pairs]
    assert stats.kstest(rates, law.cdf).pvalue > 0.01


def test_half_normal_is_of_the_seconds_and_a_device_stays_what_it_is() -> None:
    devices = Devices(settings(speed={"kind": "half_normal", "median": 2.0}), 5, NAMES)
    seconds = [devices.seconds(i, 0, ClientWork(1, 0, 0)) for i in range(4000)]
    assert stats.kstest(seconds, stats.halfnorm(scale=0.5 / stats.halfnorm.median()).cdf).pvalue > 0.01
    assert [devices.seconds(i, 9, ClientWork(1, 0, 0)) for i in range(4000)] == seconds
    other = Devices(settings(speed={"kind": "half_normal", "median": 2.0}), 6, NAMES)
    assert other.seconds(0, 0, ClientWork(1, 0, 0)) != seconds[0]


def test_stragglers_take_longer_by_their_factor() -> None:
    always = Devices(settings(speed=1.0, stragglers={"share": 0.3, "factor": 7}), 1, NAMES)
    times = np.array([[always.seconds(i, k, ClientWork(2, 0, 0)) for k in range(3)] for i in range(2000)])
    assert set(times.ravel().tolist()) == {2.0, 14.0}
    assert (times == times[:, :1]).all()
    assert (times[:, 0] == 14.0).mean() == pytest.approx(0.3, abs=0.04)
    redrawn = Devices(
        settings(speed=1.0, stragglers={"share": 0.3, "factor": 7, "redraw": "round"}), 1, NAMES
    )
    assert len({redrawn.seconds(0, k, ClientWork(2, 0, 0)) for k in range(20)}) == 2


def test_rates_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "speeds.csv"
    file.write_text("client,per_second,note\nclient 1,4,fast\n0,2,by number\n")
    devices = Devices(settings(speed={"kind": "file", "file": str(file)}), 0, NAMES[:2])
    assert [devices.seconds(i, 0, ClientWork(8, 0, 0)) for i in (0, 1)] == [4.0, 2.0]
    for text, said in (
        ("client,speed\n0,1\n", "no column per_second"),
        ("client,per_second\n0,1\n7,1\n", "line 3 of .* is of client '7'"),
        ("client,per_second\n0,1\n", r"no line for client 1 \('client 1'\)"),
        ("client,per_second\n0,quick\n1,1\n", "per_second = 'quick', which is no number"),
        ("client,per_second\n0,0\n1,1\n", "not positive"),
    ):
        file.write_text(text)
        with pytest.raises(DataError, match=said):
            Devices(settings(speed={"kind": "file", "file": str(file)}), 0, NAMES[:2])
    with pytest.raises(DataError, match="cannot read"):
        Devices(settings(speed={"kind": "file", "file": str(tmp_path / "none.csv")}), 0, NAMES[:2])


# -- when clients are there ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_wave_has_its_share_of_every_day_and_knows_when_it_turns() -> None:
    wave = Wave(3, 0.4, 10.0, 0.5)
    grid = np.arange(0, 20, 0.02)
    mornings = []
    for client in range(30):
        there = np.array([wave.until(client, t, 0) is not None for t in grid])
        assert there[:500].mean() == pytest.approx(0.4, abs=4e-3)
        assert (there[:500] == there[500:]).all()
        mornings.append(grid[np.flatnonzero(there & ~np.roll(there, 1))[0]] % 10)
        for t in (0.005, 3.335, 17.775):
            gone, comes = wave.until(client, t, 0), wave.next(client, t)
            if gone is None:
                assert wave.until(client, comes, 0) is not None
                assert wave.until(client, comes - 1e-4, 0) is None
            else:
                assert comes == t
                assert wave.until(client, gone - 1e-6, 0) is not None
                assert wave.until(client, gone + 1e-6, 0) is None
    assert min(mornings) < 1.0
    assert 4.0 < max(mornings) <= 5.0  # over half of a day


def test_a_share_is_by_chance_and_by_occasion() -> None:
    found = ByChance(1, 0.3)
    there = np.array([[found.until(i, 5.0, k) is not None for k in range(200)] for i in range(50)])
    assert there.mean() == pytest.approx(0.3, abs=0.02)
    assert 0.15 < there.mean(1).min() <= there.mean(1).max() < 0.45


@pytest.mark.parametrize("repeat", [None, 20.0])
def test_listed_intervals_are_those_of_the_file(repeat: float | None, tmp_path: Path) -> None:
    file = tmp_path / "there.csv"
    file.write_text("client,start,end\n0,3,5\n0,0,2\n0,1,2.5\n0,18,20\nclient 1,4,6\n")
    listed = Listed.read(file, NAMES, repeat)
    raw = {0: [(0, 2.5), (3, 5), (18, 20)], 1: [(4, 6)], 2: []}

    def there(client: int, t: float) -> bool:
        now = t if repeat is None else t % repeat
        return any(start <= now < end for start, end in raw[client])

    grid = [k / 4 for k in range(200)]
    for client in raw:
        for t in grid:
            until, comes = listed.until(client, t, 0), listed.next(client, t)
            assert (until is not None) == there(client, t)
            later = [u for u in grid if u >= t and there(client, u)]
            if later:
                assert comes == later[0]
            elif repeat is None:
                assert comes == math.inf
            if until is not None and until < grid[-1]:
                assert not there(client, until)
                assert all(there(client, u) for u in grid if t <= u < until)


def test_a_file_of_intervals_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "there.csv"
    for text, repeat, said in (
        ("client,start,end\n0,5,3\n", None, "interval 5 to 3"),
        ("client,start,end\n0,5,30\n", 20.0, "5 to 30"),
        ("client,start,end\n", None, "no intervals"),
    ):
        file.write_text(text)
        config = AvailabilityConfig(kind="file", file=str(file), repeat=repeat)
        with pytest.raises(DataError, match=said):
            make_availability(config, 0, NAMES)


# -- what becomes of a round --------------------------------------------------------------------------------------


def brute_force(system: System, number: int, clock: float, asked: tuple[int, ...], wanted: int) -> Any:
    """Every client by itself along a line of time: (client -> fate, how long the round lasted)."""
    config, devices = system.settings, system.devices
    fates, events = {}, []
    for i in asked:
        until = system.availability.until(i, clock, number)
        if until is None:
            fates[i] = "unavailable"
            continue
        ends = devices.seconds(i, number, ClientWork(float(SIZES[i % 5]), 100, 100))
        vanishes = devices.vanishes(i, number)
        breaks = min(until - clock, math.inf if vanishes is None else vanishes * ends)
        events.append((min(ends, breaks), i, "lost" if breaks < ends else "accepted"))
    closed, count = math.inf, 0
    for at, i, what in sorted(events):
        if what == "lost":
            fates[i] = "lost"
        elif at > min(closed, config.deadline or math.inf) or (config.over_selection and count == wanted):
            fates[i] = "late"
        else:
            fates[i] = "accepted"
            count += 1
            if config.over_selection and count == wanted:
                closed = at
    return fates, min(closed, config.deadline or math.inf, max((at for at, _, _ in events), default=math.inf))


@pytest.mark.parametrize("deadline", [None, 4.0])
@pytest.mark.parametrize("over_selection", [0.0, 0.5])
def test_fates_are_those_of_a_line_of_time(deadline: float | None, over_selection: float) -> None:
    config = FAULTS.model_copy(update={"deadline": deadline, "over_selection": over_selection})
    seen = set()
    for seed in range(12):
        system = System.of(config, seed, NAMES)
        for number in range(1, 8):
            clock = 3.0 * number
            asked = tuple(range(6))
            work = {i: ClientWork(float(SIZES[i % 5]), 100, 100) for i in asked}
            found = system.round(number, clock, asked, asked, work, 4)
            fates, seconds = brute_force(system, number, clock, asked, 4)
            assert {a.client: a.fate for a in found.answers} == fates
            seen |= set(fates.values())
            if math.isfinite(seconds):
                assert found.seconds == pytest.approx(seconds)
    assert seen >= {"accepted", "lost", "unavailable"}
    assert ("late" in seen) == (deadline is not None or over_selection > 0)


def test_a_round_that_reaches_nobody_waits_for_the_first() -> None:
    intervals = Listed({0: [(30.0, 50.0)], 1: [(40.0, 50.0)]})
    system = System(settings(), intervals, Devices(settings(), 0, NAMES))
    found = system.round(1, 10.0, (0, 1), (0, 1), dict.fromkeys((0, 1), ClientWork(0, 0, 0)), 2)
    assert (found.answered, found.seconds) == ((), 20.0)
    never = system.round(1, 60.0, (0, 1), (0, 1), dict.fromkeys((0, 1), ClientWork(0, 0, 0)), 2)
    assert (never.answered, never.seconds) == ((), 0.0)


def test_of_those_that_answer_at_once_as_many_count_as_are_wanted() -> None:
    """Four answer in the very second in which the second one is enough: the first two by number."""
    chosen, clients = settings(speed=10.0, over_selection=1.0), (1, 2, 4, 5)
    system = System.of(chosen, 0, NAMES)
    for wanted in (1, 2, 3, 4):
        found = system.round(1, 0.0, clients, clients, dict.fromkeys(clients, ClientWork(30.0, 0, 0)), wanted)
        assert {a.seconds for a in found.answers} == {found.seconds}
        assert found.answered == clients[:wanted]
        assert [a.fate for a in found.answers] == ["accepted"] * wanted + ["late"] * (4 - wanted)


def test_intervals_that_touch_are_one() -> None:
    """A client that is there until 5 and from 5 on is not away at 5."""
    touching = Listed({0: [(5.0, 8.0), (0.0, 5.0), (9.0, 10.0)]})
    assert [touching.until(0, t, 0) for t in (0.0, 4.0, 5.0, 7.0)] == [8.0] * 4
    assert touching.until(0, 8.0, 0) is None
    assert touching.next(0, 8.0) == 9.0


def test_more_are_asked_and_the_first_ones_count() -> None:
    sim = simulation("fedavg", system=settings(speed=10.0, over_selection=0.5), fraction=0.4)
    for _ in range(4):
        done = sim.step()
        assert done.trace is not None
        assert len(done.clients) == 3
        quickest = sorted(done.clients, key=lambda i: SIZES[i])[:2]
        assert done.trace.answered == tuple(sorted(quickest))
        assert [a.fate for a in done.trace.answers if a.client not in quickest] == ["late"]


# -- whole runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ditto", "fedfomo", "perfed_ckt"])
def test_a_simulated_run_resumes_and_is_played_again_to_the_bit(name: str) -> None:
    def begin(**given: Any) -> Simulation:
        many = {"seed": 4, **given}
        return two_architectures(**many) if name == "perfed_ckt" else simulation(name, BOTH, **many)

    first = begin(system=FAULTS)
    results = [first.step() for _ in range(5)]
    fates = {a.fate for r in results if r.trace for a in r.trace.answers}
    assert {"accepted", "unavailable"} <= fates
    assert fates & {"late", "lost"}
    again = stepped(begin(trace=Trace([r.trace for r in results if r.trace])), 5)
    assert digest(again) == digest(first)
    assert (again.traffic, again.clock, again.gradients) == (first.traffic, first.clock, first.gradients)
    half, rest = stepped(begin(system=FAULTS), 2), begin(system=FAULTS)
    tensors, facts = half.dump()
    rest.load({p: t.clone() for p, t in tensors.items()}, facts)
    assert digest(stepped(rest, 3)) == digest(first)
    assert (rest.traffic, rest.clock) == (first.traffic, first.clock)


def test_nothing_that_takes_time_or_fails_is_the_plain_run() -> None:
    """A system in which everybody answers before the deadline changes no number; it costs time alone."""
    plain = simulation("ditto", rounds=3)
    timed = simulation("ditto", rounds=3, system=settings(speed=1.0, bandwidth=1e4, deadline=1e6))
    assert_same(everything(plain), everything(timed))
    assert (plain.traffic, plain.clock) == (timed.traffic, 0.0)
    assert timed.clock > 45


def private(**given: Any) -> Simulation:
    train: TrainConfig = TrainConfig(epochs=1, batch_size=4, lr=0.05, dp=SampleDP(1.0, 1.0, "poisson"))
    return simulation("fedavg", "mlp", train=train, **given)


def test_whoever_is_late_pays_for_what_it_sent() -> None:
    """Sample-level privacy: its reply has left it, though the server has not used it; the unreachable pay nothing."""
    whole = stepped(private(), 1)
    late = stepped(private(system=settings(speed=1.0, deadline=8.0)), 1)
    assert late.clock == 8.0
    assert sorted(late.ledger.rows()) == sorted(whole.ledger.rows())
    away = Listed({i: [(0.0, 100.0)] for i in (0, 2)})
    some = private(system=settings(speed=1.0, deadline=8.0))
    assert some.system is not None
    some.system = System(some.system.settings, away, some.system.devices)
    some.step()
    assert {client for _, client, _, _ in some.ledger.rows()} == {0, 2}


def test_pooled_training_asks_nobody() -> None:
    sim = simulation("centralized", rounds=1, system=FAULTS)
    assert (sim.system, sim.is_traced, sim.clock) == (None, False, 0.0)


def test_a_secret_cohort_has_no_system() -> None:
    from tailorfl.rounds.client_privacy import ClientDP

    secret = {"sampling": "bernoulli", "weights": "uniform", "fraction": 0.5, "client_dp": ClientDP(1.0, 1.0)}
    with pytest.raises(ConfigError, match="nobody seeing who takes part"):
        simulation("fedavg", system=FAULTS, **secret)
    known = simulation("fedavg", rounds=2, system=FAULTS, **{**secret, "sampling": "uniform"})
    assert known.round == 2


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"availability": "weekends"}, "always"),
    ({"availability": {"kind": "share", "period": 5}}, "has period, which belongs to kind=wave"),
    ({"availability": {"kind": "file"}}, "needs file"),
    ({"speed": {"kind": "fixed", "spread": 0.1}}, "has spread, which belongs to kind=lognormal or uniform"),
    ({"speed": {"kind": "uniform", "spread": 1.0}}, "it is below 1"),
    ({"speed": {"kind": "file"}}, "needs file"),
    ({"dropout": 1.0}, "less than 1"),
    ({"buffer": 3}, "has buffer, which belongs to mode=buffered"),
    ({"mode": "buffered", "min_replies": 3}, "has min_replies, which belongs to mode=synchronous"),
]


@pytest.mark.parametrize(("given", "said"), MISTAKES)
def test_settings_that_do_not_fit_together_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings(**given)
