"""The participation trace: what became of every client that was asked in a round, as written and as read back.

Whoever collects the replies of a round, a simulation of devices or a real deployment, says it by a `RoundTrace`. In a
file each is a line of JSON; played back, it gives the same states to the bit, since nothing else is left to chance:

    {"round": 1, "sampled": [0, 4], "answers": [{"client": 0, "fate": "accepted", "seconds": 3.5}, ...], ...}
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from tailorfl.errors import RunError

Fate = Literal["accepted", "refused", "late", "lost", "unavailable"]
"""The fate of a client: its reply counted; was there and not taken; came too late; never came; it was not asked."""
NOT_FINITE = "not finite"
"""The reason of refusing a reply that holds NaN or infinity; in a replay such a client trains again, in vain."""
TOO_FEW = "too few replies"
"""The reason of refusing the replies of a round with fewer than it needs; in a replay such clients train again, too."""


class ClientOutcome(NamedTuple):
    """The outcome of one client."""

    client: Annotated[int, Field(ge=0, strict=True)]
    fate: Fate = "accepted"
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """From the question to the answer, or to when nobody waited any more; None where nobody knows."""
    reason: str = ""
    """Of a refusal."""
    version: Annotated[int, Field(ge=0, strict=True)] | None = None
    """Aggregations that the server had done when the client started; None: all before this round."""

    @property
    def answered(self) -> bool:
        """A reply arrived in time; it counts, unless its contents or the other replies are to blame."""
        return self.fate == "accepted" or (self.fate == "refused" and self.reason in (NOT_FINITE, TOO_FEW))


@dataclass(frozen=True)
class RoundTrace:
    """The outcomes of the clients that were asked in one round."""

    round: Annotated[int, Field(ge=1, strict=True)]
    """Its number, the first is 1."""
    sampled: tuple[Annotated[int, Field(ge=0, strict=True)], ...]
    """The clients whose replies would count, in rising order."""
    answers: tuple[ClientOutcome, ...]
    """One of every client that was asked, in rising order; of buffered rounds one of every training that ended."""
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Duration of the round."""
    simulated: bool = True
    """Seconds are simulated; if not, they were measured."""
    joined: tuple[tuple[str, ...], ...] = ()
    """Names of the clients of a deployment that take part from this round on, in groups that joined at once; in the
    first line all that are there. They are numbered in this order."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    @property
    def asked(self) -> tuple[int, ...]:
        """The clients that were asked to train, in rising order, each once."""
        return tuple(sorted({a.client for a in self.answers}))

    @property
    def answered(self) -> tuple[int, ...]:
        """The clients whose reply arrived in time, whether it counted or not, in rising order."""
        return tuple(sorted(a.client for a in self.answers if a.answered))

    @property
    def absent(self) -> tuple[int, ...]:
        """The clients that were asked and took no part, in rising order."""
        took_part = {a.client for a in self.answers if a.answered and a.reason != TOO_FEW}
        return tuple(sorted(set(self.asked) - took_part))

    @property
    def too_few(self) -> bool:
        """There were fewer replies than the round needed, so it had no effect."""
        return any(a.reason == TOO_FEW for a in self.answers)

    @property
    def reached(self) -> tuple[int, ...]:
        """The clients that received a message, in rising order, once for each."""
        return tuple(sorted(a.client for a in self.answers if a.fate != "unavailable"))

    def refused(self, clients: Collection[int], reason: str) -> RoundTrace:
        """Return it with the replies of `clients` refused for a reason."""
        if not clients:
            return self
        answers = [
            a._replace(fate="refused", reason=reason) if a.answered and a.client in clients else a
            for a in self.answers
        ]
        return replace(self, answers=tuple(answers))

    def line(self) -> dict[str, Any]:
        """Return it as plain values, as JSON can hold them; an answer without what nothing is known of."""
        answers = [{k: v for k, v in a._asdict().items() if v not in (None, "")} for a in self.answers]
        facts = asdict(replace(self, answers=()))
        if not self.joined:
            del facts["joined"]
        return {**facts, "answers": answers}


_READER: TypeAdapter[RoundTrace] = TypeAdapter(RoundTrace)


class Trace:
    """The rounds of a run that was recorded, to be played again."""

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
        """The clients of a deployment by name, in the order of their numbers and in groups that joined at once."""
        return tuple(group for round_trace in self for group in round_trace.joined)

    @property
    def is_deployed(self) -> bool:
        """Real clients recorded it, each of which trained by itself in a process of its own."""
        return any(not round_trace.simulated for round_trace in self)

    def of(self, round: int) -> RoundTrace:
        """Return what happened in a round; the first is 1.

        Raises:
            RunError: it has none such.
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
            RunError: it cannot be read, or a line is not of a trace; says which.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise RunError(
                f"cannot read the trace '{path}': {reason}; give the trace.jsonl of a job's folder"
            ) from error
        rounds = []
        for number, line in enumerate(lines, start=1):
            try:
                rounds.append(_parsed(line, number))
            except (ValueError, RecursionError) as error:
                raise RunError(
                    f"line {number} of '{path}' is no line of a trace ({error}); restore the file from a copy, "
                    "or give the trace.jsonl of another job"
                ) from error
        return cls(rounds, str(path))


def _parsed(line: str, number: int) -> RoundTrace:
    """Return what the line of a round says; raises ValueError with one sentence about what is wrong with it."""
    try:
        trace = _READER.validate_python(json.loads(line))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"{key or 'it'}: {first['msg']}, got {str(first['input'])[:40]}") from error
    if trace.round != number:
        raise ValueError(f"it is of round {trace.round}, and round {number} belongs here")
    if len(set(trace.answered)) < len(trace.answered) or list(trace.sampled) != sorted(set(trace.sampled)):
        raise ValueError("it has a client twice, or sampled clients out of order")
    if not set(trace.sampled) <= set(trace.asked):
        raise ValueError("it samples clients that were not asked")
    return trace
