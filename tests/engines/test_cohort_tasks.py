"""What an engine is handed, and how little an engine has to be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from engines.networks import Linear
from methods.small import SIZES, assert_same, everything, personal, simulation
from tailorfl.core.client import Client
from tailorfl.engines.base import CohortTask, CohortUpdates, Engine, Inference, Parts, Stored
from tailorfl.engines.choice import Auto
from tailorfl.engines.in_process import InProcessEngine, Sequential, Vectorized
from tailorfl.engines.pool import ChunkStates, Known, PooledEngine, Task, pack
from tailorfl.engines.ray_pool import CarriedStates, _unpacked, to_bytes
from tailorfl.engines.state import StateStore
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.models.functional import Model
from tailorfl.training.plan import Length

KINDS = {"sequential": Sequential(), "vectorized": Vectorized(2)}
MEMBERS = {"name", "precision", "hold", "train", "map", "predict"}


class Counted:
    """An engine of the six members and nothing else, which counts its calls."""

    name = "counted"
    precision = "float32"

    def __init__(self) -> None:
        self._inner, self.calls = Sequential(), Counter[str]()

    def _call(self, member: str, *arguments: Any) -> Any:
        self.calls[member] += 1
        return getattr(self._inner, member)(*arguments)

    def hold(self, store: StateStore) -> StateStore:
        return self._call("hold", store)

    def train(self, task: CohortTask, store: StateStore) -> CohortUpdates:
        return self._call("train", task, store)

    def map(self, task: CohortTask, states: TensorDict | Stored) -> Parts:
        return self._call("map", task, states)

    def predict(self, asked: Inference) -> list[Tensor]:
        return self._call("predict", asked)


def test_an_engine_of_six_members_does_whole_runs() -> None:
    """Rounds, deployment, evaluation on own and common samples, newcomers, checkpoints."""
    assert {name for name in vars(Engine) if not name.startswith("_")} == MEMBERS
    counted, plain = Counted(), Sequential()
    mine, theirs = (simulation("ditto", engine=engine, rounds=2) for engine in (counted, plain))
    protocol = Protocol(("val", "local", "global", "heldout"), (0, 2))
    assert evaluate(mine, protocol) == evaluate(theirs, protocol)
    mine.load(*mine.dump())
    assert_same(everything(mine), everything(theirs))
    assert_same(personal(mine), personal(theirs))
    assert set(counted.calls) == MEMBERS - {"name", "precision"}


def message(client: Client, state: TensorDict, received: TensorDict) -> Parts:
    """What a client has and gets: nothing of it depends on who else is there."""
    return (TensorDict({"state": state["n"], "row": received["n"].sum(), "samples": client.samples}),)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "index", [None, torch.tensor([2, 0, 1, 2, 0]), torch.tensor([[2, 1], [0, 0]] + [[1, 2]] * 3)]
)
def test_a_part_of_a_visit_is_what_those_clients_do_in_it(kind: str, index: Tensor | None) -> None:
    """Row i of the table is 10^i, so a client's rows can be told from their sum."""
    table = TensorDict({"n": torch.tensor([1.0, 10.0, 100.0])}, batch_size=[] if index is None else [3])
    cohort = simulation("local").cohort(range(5))
    task, states = CohortTask(message, cohort, table, index), TensorDict({"n": torch.arange(5.0)}, [5])
    rows = [111.0] * 5 if index is None else table["n"][index].reshape(5, -1).sum(1).tolist()
    for where in (range(5), [3, 1], torch.tensor([4])):
        chosen = [int(i) for i in where]
        (found,) = KINDS[kind].map(task.part(where), states[torch.tensor(chosen)])
        assert found["state"].tolist() == chosen
        assert found["row"].tolist() == [rows[i] for i in chosen]
        assert found["samples"].tolist() == [SIZES[i] for i in chosen]


def test_stored_states_are_the_present_ones_or_starts() -> None:
    store = StateStore(TensorDict({"n": torch.tensor(-1.0)}))
    store.put([3], TensorDict({"n": torch.tensor([7.0])}, batch_size=[1]))
    cohort = simulation("local").cohort(range(5))
    task = CohortTask(lambda c, state, r: (TensorDict({"n": state["n"] + 0}),), cohort, TensorDict({}))
    for kind in (*KINDS.values(), Auto()):
        assert kind.map(task, Stored(store))[0]["n"].tolist() == [-1, -1, -1, 7, -1]
        assert kind.map(task, Stored(store, fresh=True))[0]["n"].tolist() == [-1] * 5


class Backwards:
    """A team of no processes, which does its last task first."""

    def __init__(self) -> None:
        self.done = 0

    def share(self, store: StateStore) -> None:
        pass

    def states(self, stored: Stored, chunks: Sequence[Sequence[int]]) -> list[ChunkStates]:
        return [CarriedStates(stored, tuple(ids)) for ids in chunks]

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Any]]:
        for k in reversed(range(len(tasks))):
            self.done += 1
            yield k, tasks[k].run()

    def close(self) -> None:
        return


@pytest.mark.parametrize(("steps", "shared"), [(0, 0), (1, 4)])
@pytest.mark.parametrize("fresh", [False, True])
def test_models_are_shared_out_where_making_them_takes_training(steps: int, shared: int, fresh: bool) -> None:
    """The first of five chunks shows it; present states and starts are what workers get, whoever is done first."""
    store = StateStore(TensorDict({"n": torch.tensor(-1.0)}))
    store.put([0, 3], TensorDict({"n": torch.tensor([5.0, 7.0])}, batch_size=[2]))
    sim = simulation("local", "logistic")

    def function(client: Client, state: TensorDict, received: TensorDict) -> Parts:
        if steps:
            client.fit(received, length=Length(steps=steps))
        return TensorDict({"n": state["n"] + 0}), TensorDict({"samples": client.samples})

    task, team = CohortTask(function, sim.cohort(range(5)), sim.init), Backwards()
    states, samples = PooledEngine(Sequential(), team).map(task, Stored(store, fresh))
    assert states["n"].tolist() == ([-1] * 5 if fresh else [5, -1, -1, 7, -1])
    assert samples["samples"].tolist() == list(SIZES)
    assert team.done == shared


def test_bytes_of_any_tensor_are_those_of_its_elements() -> None:
    """Also of one element that was expanded, of every second one, of a scalar, and of none; a reader has a copy."""
    row = torch.arange(6)
    scalar = torch.tensor(7)
    for tensor in (row, row[::2], row.reshape(2, 3).T, scalar, scalar.expand(1), row[:0], row[5:]):
        expected = b"".join(int(v).to_bytes(8, "little") for v in tensor.reshape(-1).tolist())
        assert to_bytes(tensor).tobytes() == expected
        message, arrays = pack(tensor, None)[0], [to_bytes(tensor)]
        assert torch.equal(_unpacked((message, arrays), Known()).mul_(2), 2 * tensor)
        assert arrays[0].tobytes() == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("common", [True, False])
def test_outputs_in_pieces_are_the_outputs(kind: str, common: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are cut, as several processes are asked, or one in several passes; those of the module."""
    engine: InProcessEngine = KINDS[kind]
    sim = simulation("local", "batch_norm", rounds=2)
    ((_, models),) = sim.personal_models(range(5))
    source, rows = sim.federation.source, [torch.arange(k, 3 * k) for k in range(5)]
    asked = Inference(sim.model, models, source, torch.arange(2, 13) if common else rows)
    assert asked.samples == (55 if common else 20)
    # Ten samples of one model at once.
    monkeypatch.setattr("tailorfl.training.cohort.INPUT_BYTES", 4 * 64 * 10)
    whole = engine.predict(asked)
    for k, own in enumerate(whole):
        x = source.x[asked.rows if common else rows[k]]
        state = {name: t[k] for name, t in models.items()}
        expected = torch.func.functional_call(sim.model.module.eval(), state, (x,))
        torch.testing.assert_close(own, expected.detach(), rtol=1e-4, atol=1e-6)
    for pieces in (asked.of_models(2), asked.of_rows(3), engine.shares(asked)):
        assert len(pieces) > 1
        found = asked.joined([engine.predict(piece) for piece in pieces])
        for own, other in zip(whole, found, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, whole, asked.joined([engine.predict(p) for p in engine.shares(asked)])))


class Folding(Linear):
    """Asks how many numbers a sample has, which has no answer where there is none."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.reshape(len(x), -1))
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_models_are_not_asked_for_outputs_on_nothing(kind: str) -> None:
    """And of many workers every sample of every model once."""
    model, source = Model(Folding), simulation("local").federation.source
    states = TensorDict({n: t.expand(2, *t.shape) for n, t in model.init(0).items()}, batch_size=[2])
    for rows in (torch.arange(0), [torch.arange(0)] * 2):
        outputs = KINDS[kind].predict(Inference(model, states, source, rows))
        assert [tuple(t.shape) for t in outputs] == [(0, 4)] * 2
    some = Inference(model, states, source, [torch.arange(3), torch.arange(0)])
    one, none = KINDS[kind].predict(some)
    assert (tuple(one.shape), tuple(none.shape)) == ((3, 4), (0, 4))
    assert sum(share.samples for share in KINDS[kind].shares(some)) == some.samples == 3
