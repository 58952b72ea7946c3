"""Engines by name."""

from __future__ import annotations

from typing import get_args

from tailorfl.engines.auto import Auto
from tailorfl.engines.base import Engine
from tailorfl.engines.devices import available, check_precision, device_of
from tailorfl.engines.pool import PooledEngine, WorkerPool
from tailorfl.engines.process_pool import ProcessPool
from tailorfl.engines.ray_pool import RayPool
from tailorfl.engines.sequential import Sequential
from tailorfl.engines.vectorized import Vectorized
from tailorfl.errors import ConfigError, unknown
from tailorfl.settings.engine import EngineName
from tailorfl.settings.experiment import DEFAULT


def make_engine(
    name: str = DEFAULT.engine.name,
    chunk: int | None = DEFAULT.engine.chunk,
    workers: int = DEFAULT.engine.workers,
    cluster: str | None = DEFAULT.engine.cluster,
    gpus: float = DEFAULT.engine.gpus,
    start_seconds: float = DEFAULT.engine.start_seconds,
    device: str = DEFAULT.engine.device,
    precision: str = DEFAULT.engine.precision,
) -> Engine:
    """Return an engine by name.

    With two `workers` or more it runs in so many processes, with the same numbers.

    Args:
        name: sequential, vectorized or auto.
        chunk: clients together; by default what fits.
        workers: processes that run clients.
        cluster: address of a Ray cluster for the workers, "auto", or "local" for one of this machine.
        gpus: GPUs that each worker of a cluster reserves.
        start_seconds: how long the workers of a cluster may take to start.
        device: where clients calculate: cpu, cuda, cuda:N, or auto (cuda where there is a GPU).
        precision: what networks multiply in: float32, tf32, bfloat16, or auto (a lower one than float32 where that
            is measured to be worth it).

    Raises:
        ConfigError: unknown name, a device that is not there, a precision that it has no instructions for,
            worker processes where they cannot be had, or a cluster without workers.
    """
    if name not in get_args(EngineName):
        raise unknown("engine", name, get_args(EngineName))
    target = device_of(device)
    check_precision(precision, target)
    if workers > 1 and cluster is None and target.type != "cpu":
        raise ConfigError(
            f"engine.workers={workers} are processes that calculate on the CPU, but engine.device={device} is "
            f"{target}; a GPU trains many clients at once, so leave out one of the two"
        )
    if cluster is not None:
        if workers < 1:
            raise ConfigError(
                f"engine.cluster={cluster} needs engine.workers, how many of its workers to use"
            )
    elif gpus:
        raise ConfigError("engine.gpus is for the workers of a cluster; set engine.cluster, or leave it out")
    pool: WorkerPool | None = RayPool(workers, cluster, gpus, start_seconds) if cluster is not None else None
    if pool is None and workers > 1:
        pool = ProcessPool(workers)
    first = "float32" if precision == "auto" else precision
    one_by_one, together = Sequential(target, first), Vectorized(chunk, target, first)
    if name == "auto" or precision == "auto":
        tried = available(target) if precision == "auto" else (first,)
        return Auto(one_by_one, together, pool=pool, kind=name, precisions=tried)
    kind = together if name == "vectorized" else one_by_one
    return kind if pool is None else PooledEngine(kind, pool)
