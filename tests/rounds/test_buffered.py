"""Buffered rounds against a FedBuff of thirty lines, the reductions of the method, and themselves after a stop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from methods.settings import make, one_of
from methods.small import (
    BOTH,
    SIZES,
    TRAIN,
    after,
    assert_close,
    assert_same,
    everything,
    federation,
    model,
    shared,
)
from rounds.helpers import ASSIGNMENT, MODELS, digest, dumped
from tailorfl.engines.choice import make_engine
from tailorfl.errors import ConfigError, RunError
from tailorfl.rounds.buffered import Buffered
from tailorfl.rounds.participation import Trace
from tailorfl.rounds.simulation import Simulation
from tailorfl.rounds.system import Listed, System
from tailorfl.runs.build import check
from tailorfl.settings.loading import load
from tailorfl.settings.system import RobustConfig, SystemConfig
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


RUN = ("weights", "seed", "trace", "robust", "assignment", "state_folder")


def run(mode: str, name: str, model_name: str = "mlp", engine: str = "sequential", **given: Any) -> Any:
    """A run in buffered or synchronous rounds; what is given beside its own settings is of `system`."""
    train, placed = given.pop("train", TRAIN), given.pop("placed", {})
    method = make(name, **given.pop("options", {}))
    settings = {key: given.pop(key) for key in RUN if key in given}
    kind, of = {"buffered": Buffered, "synchronous": Simulation}[mode], model(model_name)
    return kind(
        method,
        federation(),
        MODELS if "assignment" in settings else of,
        train,
        engine=make_engine(engine, **placed),
        system=SystemConfig.model_validate({"mode": mode, **given}),
        **settings,
    )


def buffered(name: str, *arguments: Any, **given: Any) -> Buffered:
    sim: Buffered = run("buffered", name, *arguments, **given)
    return sim


def answers_of(sim: Buffered) -> Any:
    """Those of one more round."""
    trace = sim.step().trace
    assert trace is not None
    return trace.answers


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
    ages = [sim.round - (a.version or 0) for _ in range(9) for a in answers_of(sim)]
    wanted, seconds = fedbuff(start, 9, k, 0.5 if staleness == "polynomial" else 0.0, weights == "uniform")
    assert max(ages) > 3  # the slowest client is far behind
    for name, tensor in shared(sim).items():
        torch.testing.assert_close(tensor.double(), wanted[name], atol=2e-6, rtol=1e-5)
    assert sim.clock == pytest.approx(seconds)


# -- reductions -------------------------------------------------------------------------------------------------

MEDIAN = RobustConfig(rule="median")
WITH: dict[str, dict[str, Any]] = {
    "ditto": {"name": "ditto", "model_name": BOTH},
    "scaffold": {"name": "scaffold", "model_name": BOTH},
    "median": {"name": "ditto", "robust": MEDIAN},
    "Krum": {"name": "ditto", "robust": RobustConfig(rule="krum", f=0)},
    "norm bound": {"name": "ditto", "robust": RobustConfig(rule="norm_bound", bound=0.1)},
    "flipped signs": {"name": "ditto", "malicious": {"clients": [3], "kind": "sign_flip"}},
    "noise, median": {"name": "ditto", "malicious": {"clients": [3], "kind": "noise"}, "robust": MEDIAN},
    "two architectures": {"name": "local", "assignment": ASSIGNMENT},
    "adam at the server": {"name": "fedavg", "options": {"server": {"kind": "adam", "lr": 0.05}}},
}
"""What buffered rounds may be combined with."""


@pytest.mark.parametrize(
    ("option", "size"),
    [
        pytest.param(option, size, marks=[] if k % 3 == j else [pytest.mark.slow])
        for k, option in enumerate(WITH)
        for j, size in enumerate((3, 5, 1))
    ],
)
def test_equal_durations_are_synchronous_rounds(option: str, size: int) -> None:
    """K clients at once that all take one second: rounds of K clients; with K = 1 one client after another."""
    if option == "Krum" and size == 1:
        pytest.skip("one reply has no neighbours")
    sim = buffered(**WITH[option], buffer=size, concurrency=size, seed=5)
    plain = run("synchronous", **WITH[option], seed=5)
    for _ in range(4):
        done = sim.step()
        assert len(done.clients) == size
        assert done.trace is not None
        assert {a.version for a in done.trace.answers} == {done.round}
        plain.step(sampled=done.clients, training=done.clients)
    expected = dumped(plain)
    assert_same({name: tensor for name, tensor in dumped(sim).items() if name in expected}, expected)
    assert sim.traffic == plain.traffic


def test_every_aggregation_has_a_full_buffer(speeds: dict[str, Any]) -> None:
    sim, arrivals = buffered("fedavg", speed=speeds, buffer=3, dropout=0.3), 0
    for _ in range(8):
        answers = answers_of(sim)
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


# Two replies are too few for Krum.
@pytest.mark.parametrize("option", one_of(3, [option for option in WITH if option != "Krum"]))
def test_a_stop_in_mid_flight_and_a_trace_change_no_bit(option: str) -> None:
    settings = {**FAULTS, **WITH[option]}
    first = buffered(**settings)
    results = [first.step() for _ in range(7)]
    trace = Trace([r.trace for r in results if r.trace])
    answers = [(number, a) for number, one in enumerate(trace) for a in one.answers]
    assert {a.fate for _, a in answers} >= {"accepted", "lost"}
    assert any(a.version is not None and a.version < number for number, a in answers), "nobody was stale"
    half, rest = after(buffered(**settings), 3), buffered(**settings)
    tensors, facts = half.dump()
    assert half.versions
    assert any(f.answer.fate == "accepted" for f in half.timeline.flights)
    rest.load({p: t.clone() for p, t in tensors.items()}, facts)
    assert digest(after(rest, 4)) == digest(first)
    assert (rest.traffic, rest.clock, rest.timeline) == (first.traffic, first.clock, first.timeline)
    again = buffered(trace=trace, **settings)
    played = [again.step() for _ in range(7)]
    assert [(r.trace, r.losses) for r in played] == [(r.trace, r.losses) for r in results]
    assert (again.traffic, again.clock, again.versions) == (first.traffic, first.clock, {})
    middle, resumed = after(buffered(trace=trace, **settings), 3), buffered(trace=trace, **settings)
    resumed.load(*middle.dump())
    for other in (again, after(resumed, 4)):
        states = dumped(other)
        assert_same({name: t for name, t in dumped(first).items() if name in states}, states)


@pytest.mark.parametrize("placed", [{"workers": 2}, {"chunk": 1}, {}])
def test_numbers_do_not_depend_on_where_clients_are(placed: dict[str, int], tmp_path: Path) -> None:
    """Without workers or chunks: states on disk."""
    folder = {} if placed else {"state_folder": tmp_path}
    one, other = (
        buffered("ditto", BOTH, "vectorized", **FAULTS, **more) for more in ({}, {"placed": placed, **folder})
    )
    assert_close(everything(after(one, 3)), everything(after(other, 3)), atol=1e-6, rtol=1e-5)


def test_a_round_that_fails_is_done_again_alike(
    speeds: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, sim = (buffered("ditto", speed=speeds, buffer=2) for _ in range(2))
    after(whole, 4)
    after(sim, 2)
    with monkeypatch.context() as patch:
        patch.setattr(type(sim.method), "aggregate", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sim.step()
    assert_same(everything(after(sim, 2)), everything(whole))


# -- what cannot be ---------------------------------------------------------------------------------------------


def test_samples_may_be_private(speeds: dict[str, Any]) -> None:
    """Each training that ended is in the ledger, and its noise in the model."""
    private = TrainConfig(epochs=1, batch_size=4, lr=0.05, dp=SampleDP(1.0, 1.0, "poisson"))
    sim = buffered("fedavg", train=private, speed=speeds, buffer=2, deadline=5.0, dropout=0.6)
    ended = [a for _ in range(6) for a in answers_of(sim)]
    assert {"late", "lost"} <= {a.fate for a in ended}
    steps = sum(count for *_, count in sim.ledger.rows())
    assert steps == sum(math.ceil(SIZES[a.client] / 4) for a in ended)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"methods": ["fedfomo"]}, "the mean of its clients' replies"),
        ({"methods": [{"name": "ditto", "participation": "all"}]}, "involves all clients in every round"),
        ({"fraction": 0.5}, "drawn one by one"),
        ({"sampling": "proportional"}, "drawn one by one"),
        (
            {"weights": "uniform", "train": {"dp": {"level": "client", "clip": 1.0, "noise": 1.0}}},
            "mode=synchronous",
        ),
        ({"train": {"dp": {"clip": 1.0, "epsilon": 5.0}}}, "train.dp.noise"),
    ],
)
def test_what_has_no_buffered_rounds_is_refused_before_anything_starts(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(load({"methods": ["fedavg"], "system": {"mode": "buffered"}, **given}))


@pytest.mark.parametrize(
    ("name", "options"),
    [("feddbe", {}), ("fedclup", {"schedule": {"kind": "dynamic", "values": [0.0, 0.5]}})],
)
def test_replies_that_differ_between_rounds_cannot_wait_in_one_buffer(
    name: str, options: dict[str, Any]
) -> None:
    """FedDBE sends means of features, then models; FedCLUP nothing while λ is 0."""
    with pytest.raises(ConfigError, match="mode=synchronous"):
        buffered(name, options=options)


def test_numbers_of_clients_that_are_not_there() -> None:
    for name in ("buffer", "concurrency"):
        with pytest.raises(ConfigError, match=f"system.{name}=6 is more than the 5 clients"):
            buffered("fedavg", **{name: 6})
    assert buffered("fedavg").buffer.replies == 2


def test_a_buffer_that_is_too_small_for_krum_is_refused() -> None:
    """No round would ever change the server."""
    rule = RobustConfig(rule="krum", f=1)
    buffered("fedavg", robust=rule, buffer=5)
    with pytest.raises(ConfigError, match="f=1 needs 2f"):
        buffered("fedavg", robust=rule, buffer=4)


def test_a_trace_of_other_rounds_is_refused() -> None:
    for mode, other in (("buffered", "synchronous"), ("synchronous", "buffered")):
        trace = run(mode, "fedavg", dropout=0.1).step().trace
        with pytest.raises(ConfigError, match=rf"{mode} rounds; set system\.mode={mode}"):
            run(other, "fedavg", trace=Trace([trace]))


def test_a_run_that_can_never_go_on_is_an_error() -> None:
    """Nobody is left, or nobody is quick enough."""
    sim = buffered("fedavg", speed=10.0, buffer=2)
    away = Listed({0: [(0.0, 50.0)], 1: [(0.0, 3.0)]})
    system = System(sim.buffer.system.settings, away, sim.buffer.system.devices)
    sim.buffer = type(sim.buffer)(system, 0, 5, 2, 5)
    for stuck in (sim, buffered("fedavg", speed=1.0, deadline=0.5, buffer=2)):
        with pytest.raises(RunError, match="buffer needs"):
            after(stuck, 40)
    in_time = buffered("fedavg", speed=1.0, deadline=float(max(SIZES)), buffer=5)
    assert in_time.step().absent == ()
