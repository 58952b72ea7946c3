"""The sampler: which clients of a federation may take part, who does in a round, and what a cohort of them is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.partition.rows import Ints, Rows
from tailorfl.rounds.groups import Group, by_group
from tailorfl.settings.experiment import CYCLIC, Sampling
from tailorfl.training.cohort import Cohort, TrainConfig
from tailorfl.training.keys import generator
from tailorfl.training.objective import LOSSES, balanced, class_counts

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
    """Return the clients of a round in rising order, a function of its arguments only.

    `sizes` [clients] training samples; uniform and proportional sampling take the share `fraction`, at least one.
    Bernoulli sampling draws again where nobody was drawn, unless the cohort `may_be_empty`: then each client is in it
    with probability `fraction`, which drawing again raises to fraction/(1 − (1 − fraction)^N). Cyclic sampling has one
    client a round, whatever the fraction, and everyone once in N rounds.
    """
    total = len(sizes)
    if sampling in CYCLIC:
        cycle, turn = divmod(round, total)
        drawn = sampling == "cyclic"
        order = generator(seed, "cycle", cycle).permutation(total) if drawn else np.arange(total)
        return (int(order[turn]),)
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
    """Return how many of `total` clients a share of them is, at least one."""
    return max(1, round_half_up(fraction * total))


def round_half_up(value: float) -> int:
    """Return the nearest integer, halves upwards, so that 0.25 · 10 clients is 3 on every machine."""
    return int(np.floor(value + 0.5))


class Population:
    """The clients that may be sampled: those of the federation, or one that holds all data where it is `pooled`.

    `poisoned` are the samples with flipped labels, which clients see from the round `poisoned_from` on (the first
    is 1); None where nobody flips any.
    """

    def __init__(
        self,
        federation: Federation,
        groups: Sequence[Group],
        seed: int,
        pooled: bool,
        poisoned: Source | None = None,
        poisoned_from: int = 1,
    ) -> None:
        self._federation, self._groups = federation, groups
        self.pooled = pooled
        self.seed = seed
        """Of all random numbers that clients draw."""
        train, val = (federation.part(part)[: federation.num_clients] for part in ("train", "val"))
        self._train, self._val = (Rows.of([train.flat()]), Rows.of([val.flat()])) if pooled else (train, val)
        self._poisoned, self._poisoned_from = poisoned, poisoned_from
        self.sizes = self._train.sizes
        """int64 [clients]: the training samples of each."""

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self._train)

    @cached_property
    def present(self) -> tuple[int, ...]:
        """The clients that have samples, in rising order; the others were left out of the federation."""
        return tuple(np.flatnonzero(self.sizes).tolist())

    def members(self, group: Group) -> Sequence[int]:
        """Return the clients of a group, in rising order."""
        return [i for i in self.present if i in group.clients]

    def cohort(
        self, ids: Sequence[int], round: int, train: TrainConfig, limit: int | None = None, own: bool = False
    ) -> Cohort:
        """Return the cohort `ids` of a round, clients of one architecture.

        `own` are the clients as they deploy: the federation's even where training is pooled, at the rate of tuning.
        """
        ((group, _),) = by_group(self._groups, ids)
        federation = self._federation
        members, val = (federation.train, federation.val) if own else (self._train, self._val)
        trained_on = federation.source
        if self._poisoned is not None and not own and round + 1 >= self._poisoned_from:
            trained_on = self._poisoned
        share = train.round_schedule.deployed(round) if own else train.round_schedule.share(round)
        rows = tuple(members[i] for i in ids)
        return Cohort(
            ids=tuple(ids),
            members=rows,
            val=tuple(val[i] for i in ids),
            source=trained_on,
            model=group.model,
            split=group.context.split,
            public=federation.public,
            loss=LOSSES[federation.source.task],
            config=train if share == 1 else train.decayed(share),
            seed=self.seed,
            round=round,
            limit=limit,
            class_weights=self._class_weights(train, trained_on, rows),
        )

    @cached_property
    def _overall(self) -> Tensor:
        """Training samples of each class of all clients that may be sampled, [classes]."""
        return class_counts(self._federation.source, self._train).sum(0)

    def _class_weights(self, train: TrainConfig, source: Source, rows: Sequence[Ints]) -> Tensor | None:
        """Return what samples of a class count, of clients with these training rows of a source, [clients, classes]."""
        if train.class_weights == "none":
            return None
        if train.class_weights == "client":
            return balanced(class_counts(source, rows))
        return balanced(self._overall).expand(len(rows), -1)
