"""Where the time of a round goes: the operators of torch in one round of an experiment, by their own time.

    python benchmarks/round_profile.py method=fedavg model=logistic data.clients=100
    python benchmarks/round_profile.py demo method=ditto engine.name=vectorized engine.chunk=16

The experiment is given as `tailorfl run` takes it; its first method and seed are profiled, after two rounds.
"""

from __future__ import annotations

import sys

import torch
from torch.profiler import ProfilerActivity, profile

from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.job import Job
from tailorfl.settings.loading import load

WARM_UP = 2
SHOWN = 15


def main(arguments: list[str]) -> None:
    """Profile a round and print the operators that take most of it."""
    named = bool(arguments) and "=" not in arguments[0]
    config = load(arguments[0] if named else None, arguments[named:])
    torch.set_num_threads(config.threads)
    seed = config.seeds[0]
    sim = make_simulation(
        Job(config, config.methods[0], seed), make_federation(config, config.data.seed_of(seed))
    )
    for _ in range(WARM_UP):
        sim.step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        sim.step()
    print(profiled.key_averages().table(sort_by="self_cpu_time_total", row_limit=SHOWN))


if __name__ == "__main__":
    main(sys.argv[1:])
