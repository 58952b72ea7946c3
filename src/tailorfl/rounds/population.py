"""The clients of a federation as rounds see them: who may take part, and what a cohort of them is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from tailorfl.data.federation import Federation
from tailorfl.data.rows import Ints, Rows
from tailorfl.data.source import Source
from tailorfl.rounds.groups import Group, by_group
from tailorfl.rounds.malicious import Malicious
from tailorfl.training.class_weights import balanced, class_counts
from tailorfl.training.cohort import Cohort, TrainConfig
from tailorfl.training.objective import LOSSES


class Population:
    """The clients that may be sampled: those of the federation, or one that holds all data where it is `pooled`.

    `poisoned` are the samples as those see them who train on flipped labels; None where nobody does.
    """

    def __init__(
        self,
        federation: Federation,
        groups: Sequence[Group],
        seed: int,
        pooled: bool,
        malicious: Malicious,
        poisoned: Source | None,
    ) -> None:
        self._federation, self._groups = federation, groups
        self.seed = seed
        """Of all random numbers that clients draw."""
        train, val = (federation.part(part)[: federation.num_clients] for part in ("train", "val"))
        self._train, self._val = (Rows.of([train.flat()]), Rows.of([val.flat()])) if pooled else (train, val)
        self._malicious, self._poisoned = malicious, poisoned
        self.sizes = self._train.sizes
        """int64 [clients]: the training samples of each."""

    def __len__(self) -> int:
        """How many there are."""
        return len(self._train)

    def members(self, group: Group) -> Sequence[int]:
        """Returns the clients of a group, in rising order."""
        total = len(self)
        if isinstance(group.clients, range):
            return group.clients[:total]
        return sorted(i for i in group.clients if i < total)

    def cohort(
        self, ids: Sequence[int], round: int, train: TrainConfig, limit: int | None = None, own: bool = False
    ) -> Cohort:
        """Returns the cohort `ids` of a round, clients of one architecture.

        `own` are the clients as they deploy: the federation's even where training is pooled, at the rate of tuning.
        """
        ((group, _),) = by_group(self._groups, ids)
        federation = self._federation
        members, val = (federation.train, federation.val) if own else (self._train, self._val)
        trained_on = federation.source
        if self._poisoned is not None and not own and self._malicious.attack(round):
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
        """What samples of a class count, of clients with these training rows of a source, [clients, classes]."""
        if train.class_weights == "none":
            return None
        if train.class_weights == "client":
            return balanced(class_counts(source, rows))
        return balanced(self._overall).expand(len(rows), -1)
