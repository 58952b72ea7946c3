"""Participation: the clients that a round samples, and the trace of their outcomes.

A simulation of devices or a real deployment records each round in a `RoundTrace`, one line of JSON in a file.
Replaying it gives bit-identical states, since nothing else is random:

    {"round": 1, "sampled": [0, 4], "answers": [{"client": 0, "fate": "accepted", "seconds": 3.5}, ...], ...}
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.errors import RunError
from tailorfl.partition.rows import Ints, Rows
from tailorfl.rounds.groups import Group, by_group
from tailorfl.settings.experiment import CYCLIC, Sampling
from tailorfl.training.cohort import Cohort, TrainConfig
from tailorfl.training.keys import generator
from tailorfl.training.objective import LOSSES, balanced, class_counts

REDRAWS = 10_000
"""Empty cohorts after which one client is drawn at random. That many occur only if fraction · N is below 0.002, and
then a cohort that is not empty has a single client with a probability of 0.999."""


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
    Bernoulli sampling redraws empty cohorts, which raises each client's probability from `fraction` to
    fraction/(1 − (1 − fraction)^N); with `may_be_empty` it does not redraw. Cyclic sampling has one client a round,
    whatever the fraction, and each client once in N rounds.
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
    share, size = None, sampled_clients(fraction, total)
    if sampling == "proportional":  # which never draws a client that was left out of the federation
        share, size = sizes / sizes.sum(), min(size, int(np.count_nonzero(sizes)))
    return tuple(sorted(int(c) for c in rng.choice(total, size=size, replace=False, p=share)))


def sampled_clients(fraction: float, total: int) -> int:
    """Return the number of clients that a share of `total` is, at least one."""
    return max(1, round_half_up(fraction * total))


def round_half_up(value: float) -> int:
    """Return the nearest integer, rounding halves up: 0.25 · 10 clients is 3 on every machine."""
    return int(np.floor(value + 0.5))


class Population:
    """The clients that may be sampled: those of the federation, or one that holds all data if `pooled`.

    `poisoned` is the source with flipped labels, used from round `poisoned_from` on (the first is 1); None without
    label flipping.
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
        """Seed of all random numbers that clients draw."""
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
        """The clients that have samples, in rising order; others were left out of the federation."""
        return tuple(np.flatnonzero(self.sizes).tolist())

    def members(self, group: Group) -> Sequence[int]:
        """Return the clients of a group, in rising order."""
        return [i for i in self.present if i in group.clients]

    def cohort(
        self, ids: Sequence[int], round: int, train: TrainConfig, limit: int | None = None, own: bool = False
    ) -> Cohort:
        """Return the cohort `ids` of a round, clients of one architecture.

        `own` selects clients as they deploy: those of the federation even if training is pooled, at the learning rate
        of deployment.
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
        """Number of training samples of each class over all clients that may be sampled, [classes]."""
        return class_counts(self._federation.source, self._train).sum(0)

    def _class_weights(self, train: TrainConfig, source: Source, rows: Sequence[Ints]) -> Tensor | None:
        """Return the class weights of clients with training `rows` of a source, [clients, classes]."""
        if train.class_weights == "none":
            return None
        if train.class_weights == "client":
            return balanced(class_counts(source, rows))
        return balanced(self._overall).expand(len(rows), -1)


Fate = Literal["accepted", "refused", "late", "lost", "unavailable"]
"""Fate of a client: its reply counted, was refused, came too late, or never came; or the client was not reached."""
NOT_FINITE = "not finite"
"""Reason for refusing a reply that holds NaN or infinity; in a replay the client trains again and is refused again."""
TOO_FEW = "too few replies"
"""Reason for refusing all replies of a round that has fewer than it needs; in a replay these clients train again."""


class ClientOutcome(NamedTuple):
    """The outcome of one client."""

    client: Annotated[int, Field(ge=0, strict=True)]
    fate: Fate = "accepted"
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """From the request to the reply, or until the server stopped waiting; None if unknown."""
    reason: str = ""
    """Reason for refusing the reply."""
    version: Annotated[int, Field(ge=0, strict=True)] | None = None
    """Number of aggregations before the client started; None: all before this round."""

    @property
    def answered(self) -> bool:
        """Whether a reply arrived in time; it counts unless it is not finite or the round has too few replies."""
        return self.fate == "accepted" or (self.fate == "refused" and self.reason in (NOT_FINITE, TOO_FEW))


@dataclass(frozen=True)
class RoundTrace:
    """The outcomes of the clients that were asked in one round."""

    round: Annotated[int, Field(ge=1, strict=True)]
    """Number of the round, from 1."""
    sampled: tuple[Annotated[int, Field(ge=0, strict=True)], ...]
    """The clients whose replies would count, in rising order."""
    answers: tuple[ClientOutcome, ...]
    """One for every client that was asked, in rising order; in buffered rounds, one for every training that ended."""
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Duration of the round."""
    simulated: bool = True
    """Whether seconds are simulated; if not, they were measured."""
    joined: tuple[tuple[str, ...], ...] = ()
    """Names of a deployment's clients that take part from this round on, in groups that joined together; in the first
    line all present clients. Clients are numbered in this order."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    @property
    def asked(self) -> tuple[int, ...]:
        """The clients that were asked to train, in rising order, each once."""
        return tuple(sorted({a.client for a in self.answers}))

    @property
    def answered(self) -> tuple[int, ...]:
        """The clients whose reply arrived in time, whether or not it counted, in rising order."""
        return tuple(sorted(a.client for a in self.answers if a.answered))

    @property
    def absent(self) -> tuple[int, ...]:
        """The clients that were asked but took no part, in rising order."""
        took_part = {a.client for a in self.answers if a.answered and a.reason != TOO_FEW}
        return tuple(sorted(set(self.asked) - took_part))

    @property
    def too_few(self) -> bool:
        """Whether the round had fewer replies than it needs, and so no effect."""
        return any(a.reason == TOO_FEW for a in self.answers)

    @property
    def reached(self) -> tuple[int, ...]:
        """The clients that received a message, in rising order, once per message."""
        return tuple(sorted(a.client for a in self.answers if a.fate != "unavailable"))

    def refused(self, clients: Collection[int], reason: str) -> RoundTrace:
        """Return the trace with the replies of `clients` refused for a reason."""
        if not clients:
            return self
        answers = [
            a._replace(fate="refused", reason=reason) if a.answered and a.client in clients else a
            for a in self.answers
        ]
        return replace(self, answers=tuple(answers))

    def line(self) -> dict[str, Any]:
        """Return the trace as plain values for JSON; unknown facts of an answer are left out."""
        answers = [{k: v for k, v in a._asdict().items() if v not in (None, "")} for a in self.answers]
        facts = asdict(replace(self, answers=()))
        if not self.joined:
            del facts["joined"]
        return {**facts, "answers": answers}


_READER: TypeAdapter[RoundTrace] = TypeAdapter(RoundTrace)


class Trace:
    """The rounds of a recorded run, to be replayed."""

    def __init__(self, rounds: Iterable[RoundTrace], name: str = "the trace") -> None:
        self.name = name
        self._rounds = {round_trace.round: round_trace for round_trace in rounds}

    def __len__(self) -> int:
        """Return the number of rounds."""
        return len(self._rounds)

    def __iter__(self) -> Iterator[RoundTrace]:
        """Yield the rounds in order."""
        return (self._rounds[number] for number in sorted(self._rounds))

    @property
    def joined(self) -> tuple[tuple[str, ...], ...]:
        """The names of a deployment's clients, in the order of their numbers, in groups that joined together."""
        return tuple(group for round_trace in self for group in round_trace.joined)

    @property
    def is_deployed(self) -> bool:
        """Whether it was recorded in a deployment, where each client trains alone in its own process."""
        return any(not round_trace.simulated for round_trace in self)

    def of(self, round: int) -> RoundTrace:
        """Return the trace of a round; the first is 1.

        Raises:
            RunError: the run has no such round.
        """
        if round not in self._rounds:
            raise RunError(
                f"'{self.name}' has no round {round}: it ends after {len(self._rounds)}; set rounds={len(self._rounds)}"
            )
        return self._rounds[round]

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Return the trace in a file.

        Raises:
            RunError: the file cannot be read, or a line, which is named, is not of a trace.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
            raise RunError(
                f"cannot read the trace '{path}': {reason}; give the trace.jsonl of a job's folder"
            ) from error
        rounds = []
        for number, line in enumerate(lines, start=1):
            try:
                rounds.append(_parsed(line, number))
            except (ValueError, RecursionError) as error:
                raise RunError(
                    f"line {number} of '{path}' is not a line of a trace ({error}); restore the file from a copy, or "
                    "give the trace.jsonl of another job"
                ) from error
        return cls(rounds, str(path))


def _parsed(line: str, number: int) -> RoundTrace:
    """Return the round on a line. Raises ValueError with one sentence about the mistake."""
    try:
        trace = _READER.validate_python(json.loads(line))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"{key or 'it'}: {first['msg']}, got {str(first['input'])[:40]}") from error
    if trace.round != number:
        raise ValueError(f"it is of round {trace.round}, but this line should be of round {number}")
    if len(set(trace.answered)) < len(trace.answered) or list(trace.sampled) != sorted(set(trace.sampled)):
        raise ValueError("it has a client twice, or sampled clients out of order")
    if not set(trace.sampled) <= set(trace.asked):
        raise ValueError("it samples clients that were not asked")
    return trace
