"""One round: who takes part, what the clients did, what was sent, and what is said about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core import tree
from tailorfl.core.keys import generator
from tailorfl.core.ledger import Uses
from tailorfl.core.messages import Broadcast, PerArchitecture, PerClient, Traffic, count_down, count_up
from tailorfl.engines.groups import Group, by_group, message_for
from tailorfl.errors import DivergenceError
from tailorfl.settings.experiment import Sampling


@dataclass(frozen=True)
class RoundResult:
    """What one round did."""

    round: int
    clients: tuple[int, ...]
    """Sampled clients."""
    rejected: tuple[int, ...]
    """Clients whose update was not finite; their state is as before the round."""
    losses: dict[str, float]
    """Means over the accepted clients of what they report: training losses by stage, and what a method adds."""
    seconds: float
    traffic: Traffic
    gradients: int = 0
    """Gradients of single samples that the clients computed, all together."""
    server_seconds: float = 0.0
    """Part of `seconds` that the server's aggregation took."""

    @property
    def clients_per_second(self) -> float:
        """Sampled clients over seconds."""
        return len(self.clients) / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Trained:
    """What the clients of one architecture did in a round."""

    group: Group
    ids: tuple[int, ...]
    replies: TensorDict
    metrics: TensorDict
    finite: Tensor
    """Whose update holds only finite numbers, bool [clients]; the new states are staged in the group's store."""
    message: TensorDict | PerClient
    """What they had received."""
    uses: Mapping[int, Uses]
    """What private training used, by client."""
    gradients: int = 0
    """Gradients of single samples that all of them computed together."""

    def among(self, wanted: set[int]) -> Trained:
        """The part of the clients that are `wanted`."""
        return self.of([k for k, i in enumerate(self.ids) if i in wanted])

    def of(self, positions: Sequence[int]) -> Trained:
        """The part of the clients at `positions`."""
        if len(positions) == len(self.ids):
            return self
        index = torch.tensor(positions, dtype=torch.int64)
        return replace(
            self,
            ids=tuple(self.ids[k] for k in positions),
            replies=self.replies[index],
            metrics=self.metrics[index],
            finite=self.finite[index],
            message=message_for(self.message, self.group, positions),
        )


REDRAWS = 10_000
"""Empty cohorts after which one client is drawn at random: so many happen only where fraction · N is below 0.002, and
there a cohort that is not empty has one client but for a chance in a thousand."""


def sample_clients(
    seed: int,
    round: int,
    sizes: NDArray[np.int64],
    fraction: float,
    sampling: Sampling,
    may_be_empty: bool = False,
) -> tuple[int, ...]:
    """Returns the clients of a round in rising order, a function of its arguments only.

    `sizes` [clients] training samples; uniform and proportional sampling take the share `fraction`, at least one.
    Bernoulli sampling draws again where nobody was drawn, unless the cohort `may_be_empty`: then each client is in it
    with probability `fraction`, which drawing again raises to fraction/(1 − (1 − fraction)^N).
    """
    total = len(sizes)
    rng = generator(seed, "sample", round)
    if sampling == "bernoulli":
        for _ in range(REDRAWS):
            chosen = np.flatnonzero(rng.random(total) < fraction)
            if len(chosen) or may_be_empty:
                return tuple(int(c) for c in chosen)
        return (int(rng.integers(total)),)
    share = sizes / sizes.sum() if sampling == "proportional" else None
    size = min(sampled_clients(fraction, total), total)
    return tuple(sorted(int(c) for c in rng.choice(total, size=size, replace=False, p=share)))


def sampled_clients(fraction: float, total: int) -> int:
    """Returns how many of `total` clients a share of them is, at least one."""
    return max(1, round_half_up(fraction * total))


def round_half_up(value: float) -> int:
    """Returns the nearest integer, halves upwards, so that 0.25 · 10 clients is 3 on every machine."""
    return int(np.floor(value + 0.5))


def count_traffic(
    message: Broadcast,
    groups: Sequence[Group],
    done: Sequence[Trained],
    sampled: set[int],
    reached: Sequence[int],
) -> Traffic:
    """Returns the traffic of a round: the clients `reached` receive, those of `done` that were `sampled` send."""
    traffic = Traffic()
    buffers = {b for g in groups for b in g.model.buffers}
    if isinstance(message, PerArchitecture):
        for group, where in by_group(groups, reached):
            traffic.add(count_down(message[group.name], len(where), buffers))
    else:
        traffic.add(count_down(message, len(reached), buffers))
    for part in done:
        senders = sum(i in sampled for i in part.ids)
        # Replies of one architecture are of equal size: those of the sampled cost as many others would.
        traffic.add(count_up(part.replies[:senders], buffers))
    return traffic


def check_server(old: TensorDict, new: TensorDict, round: int, options: Sequence[str]) -> None:
    """Nothing if the server's state holds no NaN or infinity that it did not hold before.

    `options` are the settings of the method that the server's step depends on.

    Raises:
        DivergenceError: it does, though every update that it was made of is finite.
    """
    before = dict(tree.leaves(old))
    for path, tensor in tree.leaves(new):
        bad = ~torch.isfinite(tensor) if tensor.is_floating_point() else torch.zeros(())
        held = before.get(path)
        if held is not None and held.shape == tensor.shape and held.is_floating_point():
            bad = bad & torch.isfinite(held)
        if bad.any():
            raise DivergenceError(
                f"round {round}: the server's '{path}' is NaN or infinite after aggregation, though every update was "
                f"finite: {_too_long(options)}"
            )


HUGE = 1e6
"""Numbers in the server's state from which on clients that diverge are not to blame."""


def why_all_diverged(server: TensorDict, options: Sequence[str]) -> str:
    """Returns what to do where no client's update was finite: by what they were sent, theirs or the server's step."""
    floats = [t for _, t in tree.leaves(server) if t.is_floating_point() and t.numel()]
    largest = max((float(t.abs().max()) for t in floats), default=0.0)
    if largest > HUGE:
        return f"the server had sent numbers up to {largest:.2g}: {_too_long(options)}"
    return "lower train.lr, set train.clip, or check the scale of the data"


def _too_long(options: Sequence[str]) -> str:
    named = f" ({', '.join(options)})" if options else ""
    return f"the server's own step is too long, not train.lr; lower the method's server settings{named}"


def means_of(metrics: Sequence[TensorDict]) -> dict[str, float]:
    """Returns the mean over clients of every metric, whatever architecture a client has; nothing without clients."""
    if not metrics:
        return {}
    leaves = [dict(tree.leaves(part)) for part in metrics]
    return {name: float(torch.cat([part[name] for part in leaves]).double().mean()) for name in leaves[0]}


def listed(clients: Sequence[int], most: int = 20) -> str:
    """Returns ids for a message, `most` of them at most."""
    more = len(clients) - most
    return ", ".join(map(str, clients[:most])) + (f" and {more} more" if more > 0 else "")
