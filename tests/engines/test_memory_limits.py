"""What does not fit into memory runs in smaller chunks, with the same results and nothing kept of the failed one."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from methods.small import SIZES, assert_close, everything, model, simulation
from tailorfl.core.client import Client
from tailorfl.engines import in_process, memory
from tailorfl.engines.base import CohortTask, Parts, Stacked
from tailorfl.engines.in_process import Sequential, Vectorized, evenly
from tailorfl.engines.memory import Room
from tailorfl.errors import ClientError, MemoryLimitError
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.sample_privacy import SampleDP

HOST = torch.device("cpu")
PRIVATE = TrainConfig(epochs=1, batch_size=4, lr=0.05, dp=SampleDP(clip=1.0, noise=1.0, sampling="shuffle"))
REAL = """
import resource, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/engines"]
import torch
from methods.small import simulation
from tailorfl.training.tree import empty
from tailorfl.engines.in_process import Vectorized
from tensordict import TensorDict

sim = simulation("fedavg", "logistic", Vectorized(5), rounds=1)
used = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmSize:")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 170 * 2**20, resource.RLIM_INFINITY))

def function(client, state, received):
    wide = torch.ones(10 * 2**20) * client.samples  # 40 MiB for each client of a chunk
    return (TensorDict({"sum": wide.mean()}),)

(found,) = sim.run(range(5), sim.states.get(range(5)), empty(), function)
print(found["sum"].tolist(), sim.engine.most)
"""


@pytest.fixture(autouse=True)
def no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a failed chunk leaves is collected without looking at all objects of a test process."""
    monkeypatch.setattr(memory.gc, "collect", lambda: 0)


class Limited:
    """A method whose training fails after it has trained, where more than `most` clients are together."""

    def __init__(self, sim: Simulation, most: int, error: Exception) -> None:
        self.local, self.most, self.error = sim.method.local, most, error
        self.failed: list[int] = []

    def __call__(
        self, client: Client, state: TensorDict, received: TensorDict
    ) -> tuple[TensorDict, TensorDict]:
        found = self.local(client, state, received)
        together = len(client._cohort.ids)
        if together > self.most:
            self.failed.append(together)
            raise self.error
        return found


def limited(sim: Simulation, most: int, error: Exception | None = None) -> Limited:
    """Give the run a method that needs too much memory with more than `most` clients."""
    error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    method = Limited(sim, most, error)
    object.__setattr__(sim.method, "local", method)  # settings of a method are frozen
    return method


@pytest.mark.parametrize("name", ["ditto", "fedfomo"])
def test_chunks_are_halved_until_they_fit_and_results_are_the_same(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole, cut = simulation(name, engine=Vectorized(5)), simulation(name, engine=Vectorized(5))
    method = limited(cut, 1)
    for sim in (whole, cut):
        sim.step()
        sim.step()
    assert method.failed == [5, 2]  # once in a run each
    assert cut.engine.most == 1  # type: ignore[attr-defined]
    assert_close(everything(cut), everything(whole))
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert lines == [
        "round 1: out of memory on cpu with 5 clients at once; continuing with 2",
        "round 1: out of memory on cpu with 2 clients at once; continuing with 1",
    ]


def test_private_batches_of_a_failed_chunk_are_not_counted() -> None:
    whole, cut = (simulation("ditto", engine=Vectorized(5), train=PRIVATE) for _ in range(2))
    limited(cut, 2)
    whole.step()
    cut.step()
    assert cut.ledger._uses == whole.ledger._uses
    assert cut.ledger._uses["training"].keys() == set(range(len(SIZES)))


@pytest.mark.parametrize("engine", [Vectorized(5), Sequential()], ids=["vectorized", "sequential"])
def test_a_client_that_does_not_fit_alone_is_named_with_what_to_lower(
    engine: Vectorized | Sequential,
) -> None:
    sim = simulation("ditto", engine=engine)
    limited(sim, 0)
    before = everything(sim)
    message = r"client 0 alone does not fit .* memory of cpu in round 1 .* train.batch_size"
    with pytest.raises(MemoryLimitError, match=message):
        sim.step()
    assert all(torch.equal(t, before[path]) for path, t in everything(sim).items())


def test_an_allocator_of_the_host_says_it_in_words_even_through_another_error() -> None:
    words = "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
    outer = ClientError("client 3, round 1, stage 'train'")
    outer.__cause__ = RuntimeError(words)
    assert memory.out_of_memory(outer)
    assert memory.out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not memory.out_of_memory(RuntimeError("shapes do not fit"))


def test_other_errors_are_not_tried_again() -> None:
    sim = simulation("ditto", engine=Vectorized(5))
    method = limited(sim, 0, RuntimeError("shapes do not fit"))
    with pytest.raises(ClientError, match="RuntimeError: shapes do not fit"):
        sim.step()
    assert method.failed == [5]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process as Linux does")
def test_a_process_that_really_runs_out_of_memory_goes_on_with_smaller_chunks() -> None:
    tests = str(Path(__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", REAL, tests], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("]")[0] == "[15.0, 1.0, 7.0, 9.0, 3.0"
    assert int(done.stdout.split("]")[1]) < 5


def test_a_chunk_is_no_larger_than_what_fits_into_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cohort = simulation("ditto", "mlp").cohort(range(len(SIZES)))
    each = memory.COPIES * 4 * model("mlp").scalars
    usual = Vectorized().chunk_of(cohort)
    assert usual > 3
    monkeypatch.setattr(memory, "free_memory", lambda device: int(3.5 * each / memory.USABLE))
    assert Vectorized().chunk_of(cohort) == 3
    assert Vectorized(5).chunk_of(cohort) == 5  # asked for
    monkeypatch.setattr(memory, "free_memory", lambda device: 0)
    assert Vectorized().chunk_of(cohort) == 1
    monkeypatch.setattr(memory, "free_memory", lambda device: None)
    assert Vectorized().chunk_of(cohort) == usual


@pytest.mark.parametrize(("free", "expected"), [(350, [2, 3, 3, 2]), (150, [2, 1, 1, 1, 1, 1, 1, 1, 1])])
def test_on_a_gpu_the_first_clients_are_measured_and_the_next_chunk_is_what_fits(
    free: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk takes 100 bytes a client and later ones 10: the most that was seen counts, next round too."""
    sim, chunks = simulation("fedavg", "logistic", Vectorized()), list[int]()
    engine, cohort = sim.engine, sim.cohort(range(len(SIZES)))
    assert isinstance(engine, Vectorized)
    engine.place.device = torch.device("cuda", 0)
    # The device is a name here: nothing is moved and nothing is asked of a GPU.
    monkeypatch.setattr(type(engine.place), "is_host", True)
    peak = {"clients": 0, "bytes": lambda: (100 if len(chunks) == 1 else 10) * chunks[-1]}
    monkeypatch.setattr(in_process, "Peak", lambda device: SimpleNamespace(**peak))
    monkeypatch.setattr(memory, "free_memory", lambda device: int(free / memory.USABLE))

    def function(client: Client, state: TensorDict, received: TensorDict) -> Parts:
        chunks.append(len(client._cohort.ids))
        return (TensorDict({"samples": client.samples}),)

    for _ in range(2):
        (replies,) = engine.map(CohortTask(function, cohort, TensorDict({})), sim.states.get(range(5)))
        assert replies["samples"].tolist() == list(SIZES)
    assert chunks == expected


def test_free_memory_of_the_host_is_known_on_linux() -> None:
    free = memory.free_memory(HOST)
    assert free is None if sys.platform != "linux" else free is not None and free > 0


@pytest.mark.skipif(sys.platform != "linux", reason="containers' limits are files of Linux")
@pytest.mark.parametrize(
    ("limit", "expected"), [("1000000", 1000000 - 700000 + 200000), ("500000", 0), ("max", None)]
)
def test_free_memory_of_the_host_respects_the_limit_of_a_container(
    limit: str, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 200000\nactive_file 0\n")
    unlimited = memory.free_memory(HOST)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    free = memory.free_memory(HOST)
    assert unlimited is not None
    assert free is not None
    assert free == expected if expected is not None else free > 1000000


# -- memory of large tensors that is used again ---------------------------------------------------------------


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_LARGEST_MMAP_THRESHOLD", 1000)


@pytest.mark.usefixtures("small_blocks")
def test_memory_is_used_again_when_its_last_tensor_is_gone():
    room = Room()
    first = room.empty((100, 20), torch.float32)
    place, part = first.data_ptr(), first[50:].transpose(0, 1)
    del first
    part.fill_(3.0)
    other = room.empty((100, 20), torch.float32).fill_(1.0)
    assert other.data_ptr() != place  # a part of the first one still lies there
    assert torch.equal(part, torch.full((20, 50), 3.0))
    del part
    again = room.empty((2000,), torch.int32)
    assert (again.data_ptr(), again.dtype, again.shape) == (place, torch.int32, (2000,))


@pytest.mark.usefixtures("small_blocks")
def test_memory_that_does_not_fit_is_given_back():
    room = Room()
    room.empty((400,), torch.float64)
    small = room.empty((5,), torch.float64)
    assert len(room._free) == 1  # small tensors are none of its business
    large = room.empty((500,), torch.float64)
    assert not room._free
    assert (len(small), len(large)) == (5, 500)


@pytest.mark.usefixtures("small_blocks")
def test_tensors_outlive_their_room_and_a_room_that_is_sent_is_empty():
    room = Room()
    tensor = room.empty((3000,), torch.float32).fill_(2.0)
    room.empty((4000,), torch.float32)
    assert len(room._free) == 1
    assert not pickle.loads(pickle.dumps(room))._free
    del room
    assert float(tensor.sum()) == 6000.0


@pytest.mark.usefixtures("small_blocks")
def test_results_of_a_round_are_not_those_of_the_next():
    room, kept = Room(), []
    for turn in range(3):
        out = Stacked(400, room, AssertionError)
        for start in (0, 200):
            out.put(torch.arange(start, start + 200), [{"w": torch.full((200, 7), float(turn))}])
        kept.append(out.parts()[0]["w"][:100])
    assert [float(t.mean()) for t in kept] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("clients", "most", "sizes"),
    [(100, 9, [9] * 4 + [8] * 8), (5, 9, [5]), (9, 8, [5, 4]), (3, 1, [1, 1, 1])],
)
def test_parts_are_alike(clients, most, sizes):
    parts: list[int] = []
    while sum(parts) < clients:
        parts.append(evenly(clients - sum(parts), most))
    assert parts == sizes
