"""Networks in bfloat16: what is rounded and what is not, by hand; refusals; what is measured and what is then taken.

The arithmetic is tried on any processor: where it has no instruction for bfloat16, torch imitates it.
"""

from __future__ import annotations

import logging
import pickle
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from engines.networks import Undecided
from methods.settings import NAMES
from methods.small import CLASSES, TRAIN, assert_same, everything, federation, personal, simulation
from tailorfl.core.client import Client
from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines import choice, devices
from tailorfl.engines.base import CohortTask, Inference, Parts
from tailorfl.engines.choice import Auto, make_engine
from tailorfl.engines.devices import HOST, chosen, computing
from tailorfl.engines.in_process import InProcessEngine, Sequential, Vectorized
from tailorfl.engines.pool import PooledEngine
from tailorfl.engines.process_pool import ProcessPool
from tailorfl.errors import ConfigError
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.models.functional import Model
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.sample_privacy import SampleDP

KINDS: dict[str, type[InProcessEngine]] = {"sequential": Sequential, "vectorized": Vectorized}
kinds = pytest.mark.parametrize("kind", KINDS)
UNIT = 2.0**-8
"""The largest relative error of rounding to bfloat16."""


def half(kind: str) -> InProcessEngine:
    return KINDS[kind](precision="bfloat16")


@pytest.fixture
def has_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the processor has the instructions, whatever it is."""
    monkeypatch.setattr(devices, "_processor_has_bfloat16", lambda: True)


# -- what is rounded ---------------------------------------------------------------------------------------


def to_half(values: Tensor) -> Tensor:
    return values.bfloat16().double()


SAMPLES, INPUTS, OUTPUTS, RATE = 6, 5, 3, 0.5


def one_layer(samples: int, decay: float) -> tuple[Simulation, Tensor, Tensor]:
    """Two clients of a linear layer without bias, trained by one step on all their samples; x and y of the first."""
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(2 * samples, INPUTS, generator=rng)
    y = torch.randint(0, OUTPUTS, (2 * samples,), generator=rng)
    rows = (np.arange(samples), np.arange(samples, 2 * samples))
    none = (np.empty(0, dtype=np.int64),) * 2
    data = Federation(Source("two", x, y, "classification", OUTPUTS), rows, none, none, ("a", "b"), 2)
    model = Model(lambda: nn.Linear(INPUTS, OUTPUTS, bias=False))
    train = TrainConfig(epochs=1, batch_size=0, lr=RATE, weight_decay=decay)
    return Simulation(make_method("local"), data, model, train), x[:samples].double(), y[:samples]


@kinds
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("samples", [6, 40])  # the step in the backward pass sums many samples in another way
def test_a_step_is_that_of_rounded_inputs(kind: str, samples: int, decay: float) -> None:
    """(1 − η δ) W − η round(G)ᵀ round(X), G of the logits round(round(X) round(W)ᵀ); losses and weights float32."""
    sim, x, y = one_layer(samples, decay)
    sim.engine = half(kind)
    before = sim.init["weight"].double()
    loss = sim.step().losses["train"]
    after = personal(sim)["weight"][0]

    logits = to_half((to_half(x) @ to_half(before).T).float())
    hot = torch.nn.functional.one_hot(y, OUTPUTS).double()
    slope = to_half(((logits.softmax(1) - hot) / samples).float())
    gradient = slope.T @ to_half(x)
    in_one_go = kind == "vectorized" and samples < 32
    kept = (1 - RATE * decay) * before
    wanted = kept - RATE * (gradient if in_one_go else to_half(gradient.float()))
    torch.testing.assert_close(after.double(), wanted, atol=2e-7, rtol=0)
    # Nothing of that is what float32 makes of it.
    exact = kept - RATE * ((x @ before.T).softmax(1) - hot).T @ x / samples
    assert (after - exact).abs().max() > 1e-4
    expected = float(-(logits.log_softmax(1) * hot).sum() / samples)
    assert abs(loss - expected) < 0.2  # the mean over both clients


def dtypes(sim: Simulation) -> set[torch.dtype]:
    """Those of all floating tensors of a run."""
    tensors = {**everything(sim), **personal(sim)}
    return {t.dtype for t in tensors.values() if t.is_floating_point()}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return float(torch.cat([(a[n] - b[n]).flatten().double() for n in a]).norm())


CASES = [("fedavg", "cnn2"), ("ditto", "batch_norm"), ("apfl", "group_norm"), ("scaffold", "dropout")]


@pytest.mark.parametrize(("name", "model"), CASES)
def test_engines_agree_within_rounding_and_keep_float32(name: str, model: str) -> None:
    halves = [simulation(name, model, half(kind), rounds=1) for kind in KINDS]
    assert all(dtypes(sim) == {torch.float32} for sim in halves)
    start, exact = (everything(simulation(name, model, rounds=rounds)) for rounds in (0, 1))
    one, other = map(everything, halves)
    assert 0 < distance(one, exact) < 16 * UNIT * distance(exact, start)
    assert distance(one, other) < 16 * UNIT * distance(exact, start)


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("name", NAMES)
def test_every_method_keeps_float32(name: str, kind: str) -> None:
    sim = simulation(name, "batch_norm", half(kind), rounds=1)
    assert dtypes(sim) <= {torch.float32, torch.float64}
    evaluate(sim, Protocol(("val", "local"), (0, 2)))


class Watching(nn.Module):
    """Notes of every pass whether it computes in bfloat16, and what comes out of its layers."""

    passes: ClassVar[list[tuple[bool, torch.dtype]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.flatten(1))
        self.passes.append((torch.is_autocast_enabled("cpu"), out.dtype))
        return out


def passes() -> set[tuple[bool, torch.dtype]]:
    """The kinds of passes since the last call."""
    seen = set(Watching.passes)
    Watching.passes.clear()
    return seen


@kinds
@pytest.mark.usefixtures("has_bfloat16")
def test_training_evaluation_and_distillation_compute_in_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = Simulation(make_method("feddf"), federation(), Model(Watching), TRAIN, engine=half(kind))
    passes()
    aggregate, in_half = type(sim.method).aggregate, {(True, torch.bfloat16)}
    at_server = set[Any]()

    def watched(method: Any, *replies: Any) -> TensorDict:
        assert passes() == in_half  # of the clients
        out = aggregate(method, *replies)
        at_server.update(passes())
        return out

    monkeypatch.setattr(type(sim.method), "aggregate", watched)
    sim.step()
    assert at_server == in_half
    (_, models), *_ = sim.personal_models(range(5))
    passes()
    outputs = sim.engine.predict(Inference(sim.model, models, sim.federation.source, torch.arange(9)))
    assert passes() == in_half
    assert {t.dtype for t in outputs} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


@kinds
def test_a_methods_own_products_are_float32(kind: str) -> None:
    sim = simulation("fedavg", "mlp")
    a, b = torch.randn(7, 9), torch.randn(9, 5)

    def function(client: Client, state: TensorDict, received: TensorDict) -> Parts:
        moved = client.fit(received)
        return (TensorDict({"product": a @ b, "loss": client.loss(moved)}),)

    task = CohortTask.of(function, sim.cohort((0, 2)), sim.method.broadcast(sim.server, (0, 2)))
    (found,) = half(kind).map(task, sim.states.get((0, 2)))
    assert torch.equal(found["product"][1], a @ b)
    assert found["loss"].dtype == torch.float32


def test_float32_is_what_it_was() -> None:
    """Its bits are the same whether or not something was done in bfloat16 before, and asking for it changes nothing."""
    before = simulation("ditto", "cnn2", "vectorized", rounds=1)
    simulation("ditto", "cnn2", half("vectorized"), rounds=1)
    after = simulation("ditto", "cnn2", make_engine("vectorized", precision="float32"), rounds=1)
    assert_same(everything(before), everything(after))
    sim = Simulation(make_method("fedavg"), federation(), Model(Watching), TRAIN, engine=Sequential())
    passes()
    sim.step()
    assert passes() == {(False, torch.float32)}


@kinds
def test_private_gradients_are_clipped_in_float32(kind: str) -> None:
    """Of one sample without noise the update is η times a gradient of norm C, to float32 rounding."""
    train = TrainConfig(epochs=None, steps=1, batch_size=1, lr=1.0, dp=SampleDP(0.25, 0.0, "shuffle"))
    sim = simulation("local", "mlp", half(kind), rounds=1, train=train)
    start = torch.cat([sim.init[n].flatten() for n in sim.model.parameters])
    norms = torch.cat([t.flatten(1) for t in personal(sim).values()], 1).sub(start).double().norm(dim=1)
    torch.testing.assert_close(norms, torch.full((5,), 0.25, dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.skipif("bfloat16" not in devices.available(HOST), reason="workers look for themselves")
def test_workers_have_the_bits_of_one_process() -> None:
    team = ProcessPool(2)
    try:
        several = simulation("fedavg", "mlp", PooledEngine(half("sequential"), team), rounds=1)
    finally:
        team.close()
    assert several.engine.name == "sequential, bfloat16"
    assert_same(everything(several), everything(simulation("fedavg", "mlp", half("sequential"), rounds=1)))


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("bfloat16", r"engine\.precision=bfloat16 needs instructions"),
        ("tf32", r"tf32 needs a GPU.*engine\.device is cpu"),
        ("bfloat", "bfloat16"),
    ],
)
def test_a_precision_that_the_machine_does_not_have_is_refused(
    precision: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = pickle.dumps(half("vectorized").place)
    monkeypatch.setattr(devices, "_processor_has_bfloat16", lambda: False)
    with pytest.raises(ConfigError, match=message):
        make_engine("vectorized", precision=precision)
    assert make_engine("sequential", precision="auto").precision == "float32"
    # A run that chose it on another machine does not go on in another precision here, nor does a worker.
    for go_on in (lambda: Auto(choice="vectorized, bfloat16"), lambda: pickle.loads(sent)):
        with pytest.raises(ConfigError, match="needs instructions"):
            go_on()


def test_tf32_is_put_back() -> None:
    cudnn: Any = torch.backends.cudnn
    parts: Any = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    before = [part.fp32_precision for part in parts]
    inside: list[str] = []

    def fails() -> None:
        with computing("tf32", torch.device("cuda")):
            inside.extend(part.fp32_precision for part in parts)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fails()
    assert inside == ["tf32"] * 3
    assert [part.fp32_precision for part in parts] == before
    assert before[0] != "tf32"


# -- what is taken -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "taken", "why"),
    [
        ({"float32": 1.15, "bfloat16": 1.0}, "bfloat16", "bfloat16 is 1.15 x"),
        ({"float32": 1.14, "bfloat16": 1.0}, "float32", "1.14 x"),
        ({"float32": 1.0, "bfloat16": 80.0}, "float32", "bfloat16 is 0.01 x the speed"),
        ({"float32": 3.0, "tf32": 1.5, "bfloat16": 1.0}, "bfloat16", "tf32 is 2.00 x"),
        ({"float32": 3.0, "tf32": 1.0, "bfloat16": 1.5}, "tf32", "tf32 is 3.00 x"),
        ({"float32": 3.0}, "float32", "no instructions"),
    ],
)
def test_a_lower_precision_has_to_be_worth_it(seconds: dict[str, float], taken: str, why: str) -> None:
    found, said = chosen(seconds)
    assert found == taken
    assert why in said


def measured(monkeypatch: pytest.MonkeyPatch, times: dict[str, float], ratio: float) -> None:
    """Engines take so many seconds, and in bfloat16 less by `ratio`."""

    def seconds(engine: Any, *part: Any) -> float:
        engine.map(*part)
        return times[engine.kind] / (ratio if engine.precision == "bfloat16" else 1.0)

    monkeypatch.setattr(choice, "_seconds", seconds)


@pytest.mark.usefixtures("has_bfloat16")
@pytest.mark.parametrize(
    ("name", "ratio"), [("auto", 1.1), ("auto", 1.3), ("sequential", 1.3), ("vectorized", 1.1)]
)
def test_auto_takes_what_it_measured_and_says_so(
    name: str, ratio: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured(monkeypatch, {"sequential": 0.2, "vectorized": 0.1}, ratio)
    with caplog.at_level(logging.WARNING, logger="tailorfl"):
        sim = simulation("fedavg", "mlp", make_engine(name, precision="auto"), rounds=2)
    kind, taken = "vectorized" if name == "auto" else name, "bfloat16" if ratio > 1.15 else "float32"
    assert sim.engine.name == (kind if taken == "float32" else f"{kind}, {taken}")
    (message,) = [r.getMessage() for r in caplog.records]
    assert message.startswith(f"engine.precision=auto chose {taken}: bfloat16 is {ratio:.2f} x")
    same = simulation("fedavg", "mlp", KINDS[kind](precision=taken), rounds=2)
    assert_same(everything(sim), everything(same))
    # What a checkpoint says goes on likewise, without another measurement.
    monkeypatch.setattr(choice, "_seconds", None)
    resumed = simulation("fedavg", "mlp", make_engine(name, precision="auto"))
    resumed.load(*sim.dump())
    assert resumed.engine.name == sim.engine.name
    resumed.step(), same.step()
    assert_same(everything(resumed), everything(same))


@pytest.mark.usefixtures("has_bfloat16")
def test_precisions_are_measured_where_only_the_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, {"sequential": 3.0, "vectorized": 3.0}, 3.0)
    engine = make_engine("auto", precision="auto")
    sim = Simulation(make_method("fedavg"), federation(), Model(Undecided), TRAIN, engine=engine)
    sim.step()
    assert sim.engine.name == "sequential, bfloat16"


class Signal(nn.Module):
    """A convolution that only autocast rounds the factors of, and so no map over clients."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(8, 4, 3)), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x.flatten(1).unflatten(1, (8, 8))).flatten(1))
        return out


@pytest.mark.usefixtures("has_bfloat16")
def test_a_layer_that_cannot_be_rounded_together_runs_in_the_loop() -> None:
    def run(engine: Any) -> Simulation:
        sim = Simulation(make_method("fedavg"), federation(), Model(Signal), TRAIN, engine=engine)
        sim.step()
        return sim

    found, reference = run(Auto(half("sequential"), half("vectorized"))), run(half("sequential"))
    assert found.engine.name == reference.engine.name
    assert_same(everything(found), everything(reference))
