"""Buffered rounds against a FedBuff of thirty lines, the reductions of the method, and themselves after a stop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from methods.settings import make
from methods.small import (
    BOTH,
    SIZES,
    TRAIN,
    assert_same,
    everything,
    federation,
    model,
    shared,
    simulation,
)
from rounds.helpers import digest, stepped
from tailorfl.engines.make import make_engine
from tailorfl.errors import ConfigError, RunError
from tailorfl.rounds.availability import Listed
from tailorfl.rounds.buffered import Buffered
from tailorfl.rounds.participation import Trace
from tailorfl.rounds.system import System
from tailorfl.runs.build import check
from tailorfl.settings.loading import load
from tailorfl.settings.system import SystemConfig
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.sample_privacy import SampleDP

RATES = (7.0, 0.31, 2.9, 1.3, 4.7)
"""Gradients a second of the five clients."""
FULL = TrainConfig(epochs=3, batch_size=0, lr=0.1)


@pytest.fixture
def speeds(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "speeds.csv"
    file.write_text("client,per_second\n" + "".join(f"{i},{rate}\n" for i, rate in enumerate((*RATES, 1.0))))
    return {"kind": "file", "file": str(file)}


def buffered(name: str, model_name: str = "mlp", engine: str = "sequential", **given: Any) -> Buffered:
    train, data = given.pop("train", TRAIN), given.pop("data", None)
    settings = {key: given.pop(key) for key in ("weights", "seed", "trace") if key in given}
    system = SystemConfig.model_validate({"mode": "buffered", **given})
    return Buffered(
        make(name),
        federation() if data is None else data,
        model(model_name),
        train,
        engine=make_engine(engine),
        system=system,
        **settings,
    )


# -- a reference ------------------------------------------------------------------------------------------------


def fedbuff(
    start: dict[str, Tensor], rounds: int, k: int, power: float, uniform: bool
) -> tuple[dict[str, Tensor], float]:
    """FedBuff of logistic regression with full batches and all five clients always at work: (w, seconds)."""
    data, w = federation(), {n: t.double().clone() for n, t in start.items()}
    x, y = data.source.x.double().flatten(1), data.source.y
    weight, bias = sorted(w, key=lambda n: -w[n].ndim)

    def train(w: dict[str, Tensor], i: int) -> dict[str, Tensor]:
        rows = torch.from_numpy(data.train[i])
        w = {n: t.clone().requires_grad_() for n, t in w.items()}
        for _ in range(FULL.epochs or 0):
            loss = torch.nn.functional.cross_entropy(x[rows] @ w[weight].T + w[bias], y[rows])
            grads = torch.autograd.grad(loss, list(w.values()))
            w = {
                n: (t - FULL.lr * g).detach().requires_grad_()
                for (n, t), g in zip(w.items(), grads, strict=True)
            }
        return {n: t.detach() for n, t in w.items()}

    def takes(i: int) -> float:
        return 3 * SIZES[i] / RATES[i]

    work = {i: (takes(i), w, 0) for i in range(5)}
    version, now, buffer = 0, 0.0, []
    while version < rounds:
        i = min(work, key=lambda i: (work[i][0], i))
        now, old, k_i = work.pop(i)
        theta = train(old, i)
        scale = (1.0 + version - k_i) ** -power
        buffer.append((i, {n: scale * (theta[n] - old[n]) for n in w}))
        if len(buffer) == k:
            total = sum(1 if uniform else SIZES[i] for i, _ in buffer)
            shares = {i: (1 if uniform else SIZES[i]) / total for i, _ in buffer}
            w = {n: t + sum(shares[i] * change[n] for i, change in buffer) for n, t in w.items()}
            version += 1
            work |= {i: (now + takes(i), w, version) for i, _ in buffer}
            buffer = []
    return w, now


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("k", "staleness", "weights"),
    [(2, "polynomial", "uniform"), (3, "constant", "samples"), (1, "polynomial", "uniform")],
)
def test_fedavg_is_fedbuff(k: int, staleness: str, weights: str, engine: str, speeds: dict[str, Any]) -> None:
    sim = buffered(
        "fedavg", "logistic", engine, train=FULL, weights=weights, speed=speeds, buffer=k, staleness=staleness
    )
    start = {n: t.clone() for n, t in shared(sim).items()}
    ages = [sim.round - (a.version or 0) for _ in range(9) for a in _answers(sim)]
    wanted, seconds = fedbuff(start, 9, k, 0.5 if staleness == "polynomial" else 0.0, weights == "uniform")
    assert max(ages) > 3  # the slowest client is far behind
    for name, tensor in shared(sim).items():
        torch.testing.assert_close(tensor.double(), wanted[name], atol=2e-6, rtol=1e-5)
    assert sim.clock == pytest.approx(seconds)


def _answers(sim: Buffered) -> Any:
    done = sim.step().trace
    assert done is not None
    return done.answers


# -- reductions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ditto", "scaffold"])
@pytest.mark.parametrize("size", [3, 1])
def test_equal_durations_are_synchronous_rounds(name: str, size: int) -> None:
    """K clients at once that all take one second: rounds of K clients; with K = 1 one client after another."""
    sim = buffered(name, buffer=size, concurrency=size, seed=5)
    plain = simulation(name, seed=5)
    for _ in range(6):
        done = sim.step()
        assert len(done.clients) == size
        assert done.trace is not None
        assert {a.version for a in done.trace.answers} == {done.round}
        plain.step(sampled=done.clients, training=done.clients)
    assert_same(everything(sim), everything(plain))
    assert sim.traffic == plain.traffic


def test_every_aggregation_has_a_full_buffer(speeds: dict[str, Any]) -> None:
    sim, arrivals = buffered("fedavg", speed=speeds, buffer=3, dropout=0.3), 0
    for _ in range(8):
        answers = _answers(sim)
        arrivals += sum(a.fate == "accepted" for a in answers)
        assert sim.round == arrivals // 3
        accepted = [a.client for a in answers if a.fate == "accepted"]
        assert len(set(accepted)) == 3
    assert sim.timeline.occasion > arrivals + len(
        sim.timeline.flights
    )  # some were lost, and others took their place


# -- what clients keep ------------------------------------------------------------------------------------------


FAULTS: dict[str, Any] = {
    "speed": {"kind": "half_normal", "median": 5.0, "redraw": "round"},
    "bandwidth": {"kind": "lognormal", "median": 40000.0},
    "availability": {"kind": "wave", "share": 0.8, "period": 25.0},
    "dropout": 0.15,
    "deadline": 12.0,
    "buffer": 2,
    "concurrency": 4,
}


@pytest.mark.parametrize("name", ["ditto", "scaffold"])
def test_a_stop_in_mid_flight_and_a_trace_change_no_bit(name: str) -> None:
    first = buffered(name, BOTH, **FAULTS)
    results = [first.step() for _ in range(7)]
    fates = {a.fate for r in results if r.trace for a in r.trace.answers}
    assert fates >= {"accepted", "lost"}
    half, rest = stepped(buffered(name, BOTH, **FAULTS), 3), buffered(name, BOTH, **FAULTS)
    tensors, facts = half.dump()
    assert half.versions
    assert any(f.answer.fate == "accepted" for f in half.timeline.flights)
    rest.load({p: t.clone() for p, t in tensors.items()}, facts)
    assert digest(stepped(rest, 4)) == digest(first)
    assert (rest.traffic, rest.clock, rest.timeline) == (first.traffic, first.clock, first.timeline)
    trace = Trace([r.trace for r in results if r.trace])
    again = buffered(name, BOTH, trace=trace, **FAULTS)
    played = [again.step() for _ in range(7)]
    assert [r.trace for r in played] == [r.trace for r in results]
    assert [r.losses for r in played] == [r.losses for r in results]
    assert_same(everything(again), everything(first))
    assert (again.traffic, again.clock, again.versions) == (first.traffic, first.clock, {})
    middle, resumed = (
        stepped(buffered(name, BOTH, trace=trace, **FAULTS), 3),
        buffered(name, BOTH, trace=trace, **FAULTS),
    )
    resumed.load(*middle.dump())
    assert_same(everything(stepped(resumed, 4)), everything(first))


def test_a_round_that_fails_is_done_again_alike(
    speeds: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, sim = (buffered("ditto", speed=speeds, buffer=2) for _ in range(2))
    stepped(whole, 4)
    stepped(sim, 2)
    with monkeypatch.context() as patch:
        patch.setattr(type(sim.method), "aggregate", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sim.step()
    assert_same(everything(stepped(sim, 2)), everything(whole))


# -- what cannot be ---------------------------------------------------------------------------------------------


def test_samples_may_be_private(speeds: dict[str, Any]) -> None:
    """Each training that ended is in the ledger, and its noise in the model."""
    private = TrainConfig(epochs=1, batch_size=4, lr=0.05, dp=SampleDP(1.0, 1.0, "poisson"))
    sim, ended = buffered("fedavg", train=private, speed=speeds, buffer=2, deadline=5.0), 0
    late = 0
    for _ in range(6):
        answers = _answers(sim)
        ended += len(answers)
        late += sum(a.fate == "late" for a in answers)
    assert late >= 1
    batches = [math.ceil(n / 4) for n in SIZES]
    steps = sum(count for *_, count in sim.ledger.rows())
    assert ended * min(batches) <= steps <= ended * max(batches)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"methods": ["fedfomo"]}, "makes more of its clients' replies than their mean"),
    ({"methods": [{"name": "ditto", "participation": "all"}]}, "involves all clients in every round"),
    ({"fraction": 0.5}, "drawn one by one"),
    ({"sampling": "proportional"}, "drawn one by one"),
    (
        {"weights": "uniform", "train": {"dp": {"level": "client", "clip": 1.0, "noise": 1.0}}},
        "cohorts of one version of the model",
    ),
    ({"train": {"dp": {"clip": 1.0, "epsilon": 5.0}}}, "give train.dp.noise"),
]


@pytest.mark.parametrize(("given", "said"), MISTAKES)
def test_what_has_no_buffered_rounds_is_refused_before_anything_starts(
    given: dict[str, Any], said: str
) -> None:
    settings = {"methods": ["fedavg"], "system": {"mode": "buffered"}, **given}
    with pytest.raises(ConfigError, match=said):
        check(load(settings))


def test_numbers_of_clients_that_are_not_there() -> None:
    for name in ("buffer", "concurrency"):
        with pytest.raises(ConfigError, match=f"system.{name}=6 is more than the 5 clients"):
            buffered("fedavg", **{name: 6})
    assert buffered("fedavg").buffer.replies == 2


def test_a_trace_of_other_rounds_is_refused() -> None:
    done = buffered("fedavg").step().trace
    assert done is not None
    with pytest.raises(ConfigError, match=r"of buffered rounds; set system\.mode=buffered"):
        simulation("fedavg", trace=Trace([done]))
    plain = simulation("fedavg", rounds=0, system=SystemConfig(dropout=0.1)).step().trace
    assert plain is not None
    with pytest.raises(ConfigError, match=r"of synchronous rounds; set system\.mode=synchronous"):
        buffered("fedavg", trace=Trace([plain]))


def test_nobody_left_is_told() -> None:
    sim = buffered("fedavg", speed=10.0, buffer=2)
    away = Listed({0: [(0.0, 50.0)], 1: [(0.0, 3.0)]})
    system = System(sim.buffer.system.settings, away, sim.buffer.system.devices)
    sim.buffer = type(sim.buffer)(system, 0, 5, 2, 5)
    with pytest.raises(RunError, match="stays at"):
        stepped(sim, 40)


def test_nobody_quick_enough_is_told() -> None:
    sim = buffered("fedavg", speed=1.0, deadline=0.5, buffer=2)
    with pytest.raises(RunError, match="stays at"):
        sim.step()
