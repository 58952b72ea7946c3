"""Devices: which there are, and that a run on one gives the numbers of the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from methods.settings import NAMES
from methods.small import assert_close, everything, federation, personal, simulation
from tailorfl.engines import devices
from tailorfl.engines.choice import make_engine
from tailorfl.engines.devices import Fetched, Place, device_of
from tailorfl.engines.in_process import Vectorized
from tailorfl.errors import ConfigError

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int, built_for: str | None = "13.0") -> None:
    """Let torch see so many GPUs, and say what it is built for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.version, "cuda", built_for)


@pytest.mark.parametrize(
    ("gpus", "name", "device"),
    [
        (0, "auto", "cpu"),
        (0, "cpu", "cpu"),
        (2, "auto", "cuda:0"),
        (2, "cuda", "cuda:0"),
        (2, "cuda:1", "cuda:1"),
        (2, "cpu", "cpu"),
    ],
)
def test_auto_is_the_first_gpu_where_there_is_one(
    gpus: int, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, gpus)
    assert device_of(name) == torch.device(device)


REFUSED: list[tuple[int, str | None, str, str]] = [
    *((0, None, name, f"but is '{name}'") for name in ("gpu", "cuda:", "cuda:x", "cpu:0", "mps", "")),
    (0, None, "cuda", r"engine.device=cuda needs a GPU, but torch .* is built without CUDA"),
    (0, "13.0", "cuda:0", r"is built for CUDA 13.0 but finds no GPU; .* check the driver"),
    (2, "13.0", "cuda:2", r"engine.device=cuda:2, but torch sees 2 GPU\(s\): cuda:0 to cuda:1"),
]


@pytest.mark.parametrize(("gpus", "built_for", "name", "message"), REFUSED)
def test_a_device_that_is_not_there_is_refused_with_what_torch_sees(
    gpus: int, built_for: str | None, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, gpus, built_for)
    with pytest.raises(ConfigError, match=message):
        make_engine("vectorized", device=name)


def test_worker_processes_calculate_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 1)
    with pytest.raises(ConfigError, match=r"engine.workers=2: workers compute on the CPU"):
        make_engine("sequential", workers=2, device="auto")


def test_nothing_is_copied_for_the_host() -> None:
    place, cohort = Place(), simulation("ditto").cohort((0, 1))
    assert place.cohort(cohort) is cohort
    assert place.source(cohort.source) is cohort.source


def test_a_data_set_goes_to_a_device_once_and_only_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    source = federation().source
    size = source.x.nbytes + source.y.nbytes
    monkeypatch.setattr(devices, "free_memory", lambda device: int(size / devices.DATA_SHARE))
    place = Place(torch.device("meta"))
    there = place.source(source)
    assert there.x.device.type == "meta"
    assert place.source(source) is there
    monkeypatch.setattr(devices, "free_memory", lambda device: int(size / devices.DATA_SHARE) - 2)
    fetched = Place(torch.device("meta")).source(source)
    assert isinstance(fetched, Fetched)
    assert fetched.x is source.x
    assert fetched.take(torch.arange(3)).device.type == fetched.targets(torch.arange(3)).device.type == "meta"
    rows = torch.tensor([[4, 0], [2, 2]])
    here = Fetched.of(source, torch.device("cpu"))
    assert torch.equal(here.take(rows), source.take(rows))
    assert torch.equal(here.targets(rows), source.targets(rows))


@pytest.mark.slow
def test_everything_that_calculates_does_so_on_the_device() -> None:
    """On a device of paper, which refuses to mix with CPU tensors, numbers are those of the CPU to the bit."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(here / "on_paper.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{len(NAMES) + 13} cases of 5 clients"]


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_gives_the_numbers_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # TF32 keeps 10 bits of a number; convolutions use it unless told otherwise.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for engine, model_name in product(
        ("sequential", "vectorized", "auto"), ("cnn2", "batch_norm", "dropout")
    ):
        host, gpu = (
            simulation(name, model_name, make_engine(engine, device=device)) for device in ("cpu", "cuda")
        )
        for sim in (host, gpu):
            sim.step()
        assert_close(everything(gpu), everything(host), atol=1e-4, rtol=1e-3)
        assert_close(personal(gpu), personal(host), atol=1e-4, rtol=1e-3)


@pytest.mark.cuda
@needs_gpu
def test_a_gpu_that_is_full_takes_smaller_chunks() -> None:
    whole, cut = (simulation("ditto", "cnn2", Vectorized(5, torch.device("cuda"))) for _ in range(2))
    whole.step()
    used = torch.cuda.max_memory_allocated() / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(used * 0.7)
    try:
        torch.cuda.empty_cache()
        cut.step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert_close(everything(cut), everything(whole), atol=1e-4, rtol=1e-3)
