"""The simulated system against its formulas, written down once more here in plain numpy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from methods.small import BOTH, SIZES, after, assert_same, everything, model, simulation
from rounds.helpers import digest, two_architectures
from tailorfl.errors import ConfigError, DataError
from tailorfl.rounds.participation import Trace
from tailorfl.rounds.simulation import Simulation
from tailorfl.rounds.system import ByChance, ClientWork, Devices, Listed, System, Wave, make_availability
from tailorfl.settings.system import AvailabilityConfig, SystemConfig
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.sample_privacy import SampleDP

NAMES = tuple(f"client {i}" for i in range(6))


def settings(**given: Any) -> SystemConfig:
    return SystemConfig.model_validate(given)


FAULTS = settings(
    availability={"kind": "wave", "share": 0.7, "period": 20.0},
    speed={"kind": "lognormal", "median": 10.0},
    bandwidth={"kind": "uniform", "median": 5000.0},
    stragglers={"share": 0.4, "factor": 4, "redraw": "round"},
    dropout=0.2,
    deadline=6.0,
)


# -- how long a client takes ------------------------------------------------------------------------------------


def test_the_time_of_a_client_is_the_formula() -> None:
    """FedAvg with logistic regression: n_i gradients, and 260 floats each way; upwards at a quarter of the rate."""
    sim = simulation("fedavg", "logistic", system=settings(speed=20.0, bandwidth=1000.0, upload=0.25))
    done = sim.step()
    assert done.trace is not None
    size = 4 * model("logistic").scalars
    expected = [size / 1000 + n / 20 + size / 250 for n in SIZES]
    assert [a.seconds for a in done.trace.answers] == pytest.approx(expected)
    assert sim.clock == done.trace.seconds == pytest.approx(max(expected))
    sim.step()
    assert sim.clock == pytest.approx(2 * max(expected))


def seconds_of(occasions: list[tuple[int, int]], seed: int = 5, gradients: float = 1, **given: Any) -> Any:
    """Seconds of (client, occasion) with so many gradients."""
    names = tuple(f"client {i}" for i in range(1 + max(i for i, _ in occasions)))
    devices = Devices(settings(**given), seed, names)
    return np.array([devices.seconds(i, k, ClientWork(gradients, 0, 0)) for i, k in occasions])


CLIENTS, ROUNDS = [(i, 0) for i in range(1500)], [(3, k) for k in range(1500)]


@pytest.mark.parametrize(
    ("speed", "law"),
    [
        ({"kind": "lognormal", "median": 8.0, "spread": 0.7}, stats.lognorm(0.7, scale=8.0)),
        ({"kind": "uniform", "median": 8.0, "spread": 0.25}, stats.uniform(6.0, 4.0)),
        ({"kind": "half_normal", "median": 2.0}, stats.halfnorm(scale=0.5 / stats.halfnorm.median())),
    ],
)
@pytest.mark.parametrize("redraw", ["client", "round"])
def test_rates_have_their_distribution(speed: dict[str, Any], law: Any, redraw: str) -> None:
    """That of half_normal is of the seconds."""
    seconds = seconds_of(CLIENTS if redraw == "client" else ROUNDS, speed={**speed, "redraw": redraw})
    drawn = seconds if speed["kind"] == "half_normal" else 1.0 / seconds
    assert stats.kstest(drawn, law.cdf).pvalue > 0.01


def test_a_device_stays_what_it_is() -> None:
    speed = {"kind": "half_normal", "median": 2.0}
    first, later, other = (
        seconds_of([(i, k) for i in range(50)], seed, speed=speed) for k, seed in ((0, 5), (9, 5), (0, 6))
    )
    assert (first == later).all()
    assert (first != other).all()


def test_stragglers_take_longer_by_their_factor() -> None:
    share = {"share": 0.3, "factor": 7}
    pairs = [(i, k) for i in range(2000) for k in range(3)]
    times = seconds_of(pairs, 1, 2, speed=1.0, stragglers=share).reshape(-1, 3)
    assert set(times.ravel().tolist()) == {2.0, 14.0}
    assert (times == times[:, :1]).all()
    assert (times[:, 0] == 14.0).mean() == pytest.approx(0.3, abs=0.04)
    redrawn = seconds_of(
        [(0, k) for k in range(20)], 1, 2, speed=1.0, stragglers={**share, "redraw": "round"}
    )
    assert len(set(redrawn)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,speed\n0,1\n", "no column per_second"),
        ("client,per_second\n0,1\n7,1\n", "line 3 of .* names client '7'"),
        ("client,per_second\n0,1\n", r"no line for client 1 \('client 1'\)"),
        ("client,per_second\n0,quick\n1,1\n", "per_second = 'quick', which is not a number"),
        ("client,per_second\n0,0\n1,1\n", "not positive"),
        (None, "cannot read"),
    ],
)
def test_rates_of_a_file(text: str | None, message: str, tmp_path: Path) -> None:
    file, speed = tmp_path / "speeds.csv", {"kind": "file", "file": str(tmp_path / "speeds.csv")}
    file.write_text("client,per_second,note\nclient 1,4,fast\n0,2,by number\n")
    assert seconds_of([(0, 0), (1, 0)], gradients=8, speed=speed).tolist() == [4.0, 2.0]
    file.write_text(file.read_text(), encoding="utf-8-sig")  # as spreadsheets write it
    assert seconds_of([(0, 0), (1, 0)], gradients=8, speed=speed).tolist() == [4.0, 2.0]
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(DataError, match=message):
        seconds_of([(0, 0), (1, 0)], speed=speed)


# -- when clients are there ---------------------------------------------------------------------------------------


def test_a_wave_has_its_share_of_every_day_and_knows_when_it_turns() -> None:
    wave = Wave(3, 0.4, 10.0, 0.5)
    grid = np.arange(0, 20, 0.025)
    mornings = []
    for client in range(12):
        there = np.array([wave.until(client, t, 0) is not None for t in grid])
        assert there[:400].mean() == pytest.approx(0.4, abs=4e-3)
        assert (there[:400] == there[400:]).all()
        mornings.append(grid[np.flatnonzero(there & ~np.roll(there, 1))[0]] % 10)
        for t in (0.005, 3.335, 17.775):
            gone, comes = wave.until(client, t, 0), wave.next(client, t)
            assert (comes == t) == (gone is not None)
            outside, inside = (comes - 1e-4, comes) if gone is None else (gone + 1e-6, gone - 1e-6)
            assert wave.until(client, outside, 0) is None
            assert wave.until(client, inside, 0) is not None
    assert min(mornings) < 1.0
    assert 4.0 < max(mornings) <= 5.0  # over half of a day


def test_who_is_there_all_day_never_goes() -> None:
    for always in (Wave(3, 1.0, 10.0, 0.5), Listed({i: [(0.0, 10.0)] for i in range(12)}, repeat=10.0)):
        assert {always.until(i, t, 0) for i in range(12) for t in (4.0, 9.0, 25.0)} == {math.inf}


def test_a_share_is_by_chance_and_by_occasion() -> None:
    found = ByChance(1, 0.3)
    there = np.array([[found.until(i, 5.0, k) is not None for k in range(200)] for i in range(50)])
    assert there.mean() == pytest.approx(0.3, abs=0.02)
    assert 0.15 < there.mean(1).min() <= there.mean(1).max() < 0.45


@pytest.mark.parametrize("repeat", [None, 20.0])
def test_listed_intervals_are_those_of_the_file(repeat: float | None, tmp_path: Path) -> None:
    file = tmp_path / "there.csv"
    file.write_text("client,start,end\n0,3,5\n0,0,2\n0,1,2.5\n0,18,20\nclient 1,4,6\nclient 1,6,7\n")
    listed = Listed.read(file, NAMES, repeat)
    raw = {0: [(0, 2.5), (3, 5), (18, 20)], 1: [(4, 7)], 2: []}  # intervals that touch are one
    grid = [k / 4 for k in range(200)]
    for client, intervals in raw.items():
        now = [t if repeat is None else t % repeat for t in grid]
        there = [any(start <= t < end for start, end in intervals) for t in now]
        for k, t in enumerate(grid):
            until, comes = listed.until(client, t, 0), listed.next(client, t)
            assert (until is not None) == there[k]
            if any(there[k:]):
                assert comes == grid[there.index(True, k)]
            elif repeat is None:
                assert comes == math.inf
            if until is not None and until < grid[-1]:
                assert until == grid[there.index(False, k)]


@pytest.mark.parametrize(("start", "repeat"), [(0.3, 1.0), (0.0, 0.1), (0.7, 0.9)])
def test_a_listed_client_comes_although_times_are_rounded(start: float, repeat: float) -> None:
    """Else time would stand still, as a round that reaches nobody lasts until somebody comes."""
    listed, now = Listed({0: [(start, start + 0.05)]}, repeat), start
    for day in range(1, 200):
        now = listed.next(0, now + 0.07)
        while listed.until(0, now, 0) is None:  # one more step at most
            now, before = listed.next(0, now), now
            assert now > before
        assert now == pytest.approx(day * repeat + start, abs=1e-9)


@pytest.mark.parametrize(
    ("lines", "repeat", "message"),
    [("0,5,3\n", None, "interval 5 to 3"), ("0,5,30\n", 20.0, "5 to 30"), ("", None, "no intervals")],
)
def test_a_file_of_intervals_that_cannot_be_used_is_refused(
    lines: str, repeat: float | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "there.csv"
    file.write_text("client,start,end\n" + lines)
    with pytest.raises(DataError, match=message):
        make_availability(AvailabilityConfig(kind="file", file=str(file), repeat=repeat), 0, NAMES)


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
        events.append((min(ends, breaks), i, breaks < ends))
    closed, count = config.deadline or math.inf, 0
    for at, i, lost in sorted(events):
        if lost:
            fates[i] = "lost"
        elif at > closed or (config.over_selection and count == wanted):
            fates[i] = "late"
        else:
            fates[i] = "accepted"
            count += 1
            if config.over_selection and count == wanted:
                closed = at
    return fates, min(closed, max((at for at, _, _ in events), default=math.inf))


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


def test_a_share_of_clients_is_lost_though_nothing_takes_time() -> None:
    system = System.of(settings(dropout=0.3), 0, NAMES)
    fates = [system.answer(k % 6, 0.0, k, ClientWork(1, 1, 1)).fate for k in range(2000)]
    assert fates.count("lost") / 2000 == pytest.approx(0.3, abs=0.04)
    assert set(fates) == {"accepted", "lost"}


def test_more_are_asked_and_the_first_ones_count() -> None:
    sim = simulation("fedavg", system=settings(speed=10.0, over_selection=0.5), fraction=0.4)
    for _ in range(4):
        done = sim.step()
        assert done.trace is not None
        assert len(done.clients) == 3
        quickest = sorted(done.clients, key=lambda i: SIZES[i])[:2]
        assert done.trace.answered == tuple(sorted(quickest))
        assert [a.fate for a in done.trace.answers if a.client not in quickest] == ["late"]
    most = simulation("fedavg", system=settings(speed=10.0, over_selection=0.5), fraction=0.8)
    assert len(most.step().clients) == len(SIZES)  # six would be asked, if they were there


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
    again = after(begin(trace=Trace([r.trace for r in results if r.trace])), 5)
    assert digest(again) == digest(first)
    assert (again.traffic, again.clock, again.gradients) == (first.traffic, first.clock, first.gradients)
    half, rest = after(begin(system=FAULTS), 2), begin(system=FAULTS)
    tensors, facts = half.dump()
    rest.load({p: t.clone() for p, t in tensors.items()}, facts)
    assert digest(after(rest, 3)) == digest(first)
    assert (rest.traffic, rest.clock) == (first.traffic, first.clock)


def test_nothing_that_takes_time_or_fails_is_the_plain_run() -> None:
    """A system in which everybody answers before the deadline changes no number; it costs time alone."""
    plain = simulation("ditto", rounds=3)
    timed = simulation("ditto", rounds=3, system=settings(speed=1.0, bandwidth=1e4, deadline=1e6))
    assert_same(everything(plain), everything(timed))
    assert (plain.traffic, plain.clock) == (timed.traffic, 0.0)
    assert timed.clock > 45


def test_whoever_is_late_pays_for_what_it_sent() -> None:
    """Sample-level privacy: its reply has left it, though the server has not used it; the unreachable pay nothing."""
    train = TrainConfig(epochs=1, batch_size=4, lr=0.05, dp=SampleDP(1.0, 1.0, "poisson"))
    timed = settings(speed=1.0, deadline=8.0)
    whole, late, some = (simulation("fedavg", train=train, system=s) for s in (settings(), timed, timed))
    after(whole, 1)
    after(late, 1)
    assert late.clock == 8.0
    assert sorted(late.ledger.rows()) == sorted(whole.ledger.rows())
    assert some.system is not None
    away = Listed({i: [(0.0, 100.0)] for i in (0, 2)})
    some.system = System(timed, away, some.system.devices)
    some.step()
    assert {client for _, client, _, _ in some.ledger.rows()} == {0, 2}


def test_pooled_training_asks_nobody() -> None:
    sim = simulation("centralized", rounds=1, system=FAULTS)
    assert (sim.system, sim.is_traced, sim.clock) == (None, False, 0.0)


def test_a_secret_cohort_has_no_system() -> None:
    from tailorfl.rounds.client_privacy import ClientDP

    secret = {"sampling": "bernoulli", "weights": "uniform", "fraction": 0.5, "client_dp": ClientDP(1.0, 1.0)}
    with pytest.raises(ConfigError, match="nobody sees who takes part"):
        simulation("fedavg", system=FAULTS, **secret)
    known = simulation("fedavg", rounds=2, system=FAULTS, **{**secret, "sampling": "uniform"})
    assert known.round == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"availability": "weekends"}, "always"),
        ({"availability": {"kind": "share", "period": 5}}, "has period, .*kind=wave"),
        ({"availability": {"kind": "file"}}, "kind=file"),
        (
            {"speed": {"kind": "fixed", "spread": 0.1}},
            "has spread, .*kind=lognormal or uniform",
        ),
        ({"speed": {"kind": "uniform", "spread": 1.0}}, "spread = 1 .*uniform"),
        ({"speed": {"kind": "file"}}, "kind=file"),
        ({"dropout": 1.0}, "less than 1"),
        ({"buffer": 3}, "has buffer, .*mode=buffered"),
        ({"mode": "buffered", "min_replies": 3}, "has min_replies, .*mode=synchronous"),
        ({"malicious": {"kind": "scale", "strength": 10}}, "has kind, strength, .*set share"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**given)
