"""Local training as a textbook loop.

An ordinary module, torch.optim.SGD, the same batches as the library's plan.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig

State = Mapping[str, Tensor]


def batches(
    sim: Simulation,
    client: int,
    epochs: int | None = 1,
    steps: int | None = None,
    first: int = 0,
    purpose: str = "train",
) -> list[Tensor]:
    """Rows of each batch of a client in the run's present round."""
    plan = sim.cohort((client,)).plan((0,), purpose, sim.train.batch_size, epochs, steps, first)
    return [torch.from_numpy(plan.rows[0, s, : plan.count[0, s]]) for s in range(plan.rows.shape[1])]


def train(
    sim: Simulation,
    start: State,
    rows: Sequence[Tensor],
    only: Collection[str] | None = None,
    prox: tuple[float, State] | None = None,
    config: TrainConfig | None = None,
) -> dict[str, Tensor]:
    """The state after one step of torch.optim.SGD on every batch; a new optimizer each call."""
    config = sim.train if config is None else config
    module = copy.deepcopy(sim.model.module).train()
    module.load_state_dict({n: t.clone() for n, t in start.items()})
    named = {n: p for n, p in module.named_parameters() if only is None or n in only}
    optimizer = torch.optim.SGD(
        named.values(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    )
    source = sim.federation.source
    for batch in rows:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(source.take(batch)), source.y[batch])
        if prox is not None:
            held = {n: p for n, p in named.items() if n in prox[1]}
            loss = loss + prox[0] / 2 * sum((p - prox[1][n]).square().sum() for n, p in held.items())
        loss.backward()
        optimizer.step()
    return {n: t.detach().clone() for n, t in module.state_dict().items()}


def average(states: Sequence[State], weights: Sequence[float]) -> dict[str, Tensor]:
    """Σ a_i state_i with a_i ∝ `weights`; counters are the first one's."""
    total = float(sum(weights))
    out = {}
    for n, first in states[0].items():
        if first.is_floating_point():
            out[n] = (
                torch.stack([s[n].double() * (a / total) for s, a in zip(states, weights, strict=True)])
                .sum(0)
                .float()
            )
        else:
            out[n] = first
    return out
