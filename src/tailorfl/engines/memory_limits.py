"""How much memory there is, and what to do when it was not enough."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from tailorfl.core.cohort import Cohort
from tailorfl.errors import MemoryLimitError

log = logging.getLogger(__name__)

COPIES = 6
"""A client in training holds about so many times its parameters: state, message, copy, gradient, two of the step."""

USABLE = 0.8
"""The share of the free memory that a chunk may take."""

_MEMINFO = Path("/proc/meminfo")

_MARKS = ("DefaultCPUAllocator", "not enough memory", "can't allocate memory", "Cannot allocate memory")
"""How torch says that the host has no memory left; it has no type of its own for that."""


def free_memory(device: torch.device) -> int | None:
    """Returns the bytes that are free on a device; None where nobody says."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    if device.type == "cpu" and _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None


def fitting(device: torch.device, bytes_each: float) -> int:
    """Returns how many clients that take `bytes_each` fit into the free memory, at least one."""
    free = free_memory(device)
    return sys.maxsize if free is None else max(1, int(USABLE * free / max(bytes_each, 1.0)))


def out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that caused it, says that memory was not enough."""
    return any(
        isinstance(e, torch.OutOfMemoryError | MemoryError)
        or (isinstance(e, RuntimeError) and any(mark in str(e) for mark in _MARKS))
        for e in _causes(error)
    )


def halved(cohort: Cohort, device: torch.device, error: BaseException) -> int:
    """Returns how many clients to try after those of `cohort` did not fit together, and says so in the log.

    Raises:
        MemoryLimitError: it was a single one.
    """
    clients = len(cohort.ids)
    if clients == 1:
        raise too_large(cohort, device) from error
    log.warning(
        "round %d: out of memory on %s with %d clients at once; going on with %d",
        cohort.round + 1,
        device,
        clients,
        clients // 2,
    )
    return clients // 2


def too_large(cohort: Cohort, device: torch.device) -> MemoryLimitError:
    """The error of a client that does not fit into memory even alone; `cohort` holds it alone."""
    config = cohort.config
    length = f"{config.epochs:,} epochs" if config.steps is None else f"{config.steps:,} steps"
    return MemoryLimitError(
        f"client {cohort.ids[0]} alone does not fit into the memory of {device} in round {cohort.round + 1} (a model "
        f"of {cohort.model.scalars:,} trained scalars, {length} of batches of {config.batch_size}, which are planned "
        "before the first); lower train.batch_size, take fewer steps or epochs a round (train.steps, train.epochs), a "
        "smaller model or fewer trained layers (model.trainable), or set engine.device to another device"
    )


def release(device: torch.device) -> None:
    """Gives back what a failed chunk has left behind."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Peak:
    """The most memory that a GPU held between the start and a call of `bytes`, beyond what it held at the start."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.reset_peak_memory_stats(device)
        self._start = torch.cuda.memory_allocated(device)

    def bytes(self) -> int:
        """Returns it."""
        return int(torch.cuda.max_memory_allocated(self.device)) - self._start


def _causes(error: BaseException) -> Iterator[BaseException]:
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__
