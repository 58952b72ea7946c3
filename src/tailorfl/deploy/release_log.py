"""The log of what left a client: one line for each answer, chained by hashes, and the state derived from the lines.

    STATE/left.jsonl    one JSON object per line; "before" is the SHA-256 of the previous line, 64 zeros for the first
    STATE/left.head     the number of lines, and the SHA-256 of the last one

A line is on the disk before its answer leaves. So the log also has all that this client has answered already, and all
uses of private samples, over all experiments and restarts. A log that was restored from an older copy is incomplete: as
soon as the server has accepted an answer that is not in it, a line of the kind `missing` notes this, and no ε holds
from then on.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tailorfl.deploy.messages import Packet, structure, uses_as_facts, uses_from_facts
from tailorfl.errors import MessageError, MissingExtraError, RunError, TailorflError, first_few
from tailorfl.privacy import Uses, epsilon
from tailorfl.runs.files import (
    FolderLock,
    append_lines,
    decode,
    encode,
    keep_lines,
    read_lines,
    reporting,
    write_text,
)

NAME = "left.jsonl"
HEAD = "left.head"
FIRST = "0" * 64
MISSING = "missing"
"""Kind of the line that notes that earlier lines are missing."""
LONGEST_FACTS = 2**16
"""Largest number of characters of an answer's facts that a line quotes; of longer facts it has only the names."""


@dataclass(frozen=True)
class LoggedQuestion:
    """A question that is answered only once, however often it comes.

    Attributes:
        kind: the packet's kind.
        about: digest of the job, or of the experiment if no job is agreed on.
        number: round, or seed.
        digest: digest of the question.
        acked: for training, the round from which it continues.
    """

    kind: str
    about: str
    number: int
    digest: str
    acked: int = 0


@dataclass(frozen=True)
class Release:
    """An answer that leaves, with further facts for the log.

    Attributes:
        packet: the answer.
        question: the question, if it is answered only once.
        content: digest of the content that depends on samples, if a repeated answer must be the same.
        uses: its uses of private samples; None if it was made before.
        again: whether it has left before.
    """

    packet: Packet
    question: LoggedQuestion | None = None
    content: str = ""
    uses: Uses | None = None
    again: bool = False


class ReleaseLog:
    """The log in a client's state folder, verified as it is opened.

    Raises:
        RunError: lines were changed, removed or reordered.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.uses: Uses = Counter()
        """All uses of private samples, over all experiments."""
        self.unbounded = False
        """Whether replies have left that were trained without noise or are not in the log, so that no ε bounds them."""
        self.jobs: dict[str, bool] = {}
        """Agreed job -> whether its model was written here, in the order of the first agreement."""
        self._answers: dict[tuple[str, str, int], tuple[str, str]] = {}
        self._latest: dict[str, tuple[int, int]] = {}
        self._missing: dict[str, int] = {}
        self._count, self._last, self._size = 0, FIRST, 0
        with reporting(folder, "write to"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FolderLock(folder):  # a client of another federation may share the folder
            lines = read_lines(self.path)
            for fields in verified(folder):
                self._note(fields)
            keep_lines(self.path, lines)  # drops a line that a crash cut short
            if lines:
                self._count, self._last = len(lines), _hash(lines[-1])
                self._write_head()  # before the next line, since it may be only one line behind
                self._size = self.path.stat().st_size

    @property
    def is_current(self) -> bool:
        """Whether the file has the size that was read and written here, so no one has removed or extended it."""
        return (self.path.stat().st_size if self.path.is_file() else 0) == self._size

    def answered(self, question: LoggedQuestion) -> tuple[str, str] | None:
        """Return the digests of (question, answer) if a question of this kind and number was answered."""
        return self._answers.get((question.kind, question.about, question.number))

    def latest(self, job: str) -> tuple[int, int]:
        """Return the last round trained in a job, and the round from which it continued."""
        return self._latest.get(job, (0, 0))

    def lacks(self, job: str, round: int) -> bool:
        """Return whether the log has no answer of this or a later round, and no line yet that notes it as missing."""
        return round > max(self._latest.get(job, (0, 0))[0], self._missing.get(job, 0))

    def epsilon(self, delta: float, more: Uses | None = None) -> float | None:
        """Return ε of all answers that have left plus `more` uses, or None without the accountant.

        It is infinite if an answer left without noise, or is not in the log.
        """
        entries = [use.entry(steps) for use, steps in (self.uses + (more or Counter())).items()]
        if self.unbounded:
            return math.inf
        try:
            return epsilon(entries, delta)
        except MissingExtraError:
            return None
        except TailorflError:  # above the range of the tight accountant
            return epsilon(entries, delta, "rdp")

    def append(self, release: Release, size: int, experiment: str, delta: float) -> None:
        """Write the line of an answer, and wait until it is on the disk.

        Args:
            release: the answer.
            size: its number of bytes.
            experiment: the experiment's name.
            delta: δ of the ε so far.

        Raises:
            RunError: the disk is full or refuses, or another process has just written a line.
        """
        with FolderLock(self.path.parent):
            if not self.is_current:
                raise RunError(f"another process has just written to '{self.path}'")
            self._append(release, size, experiment, delta)

    def _append(self, release: Release, size: int, experiment: str, delta: float) -> None:
        packet, question = release.packet, release.question
        size_before, self._size = self._size, -1  # after an error the files are read again, see `is_current`
        floating = [t.detach().double() for t in packet.tensors.values() if t.is_floating_point()]
        facts = dict(packet.facts)
        fields: dict[str, Any] = {
            "n": self._count + 1,
            "before": self._last,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "kind": question.kind if question else packet.kind,
            "refused": packet.kind == "failure",
            "experiment": experiment,
            "about": question.about if question else str(facts.get("digest", "")),
            "number": question.number if question else None,
            "acked": question.acked if question else None,
            "question": question.digest if question else "",
            "answer": release.content,
            "again": release.again,
            "tensors": structure(packet.tensors.items()),
            "facts": facts if len(encode(facts)) <= LONGEST_FACTS else sorted(facts),
            "bytes": size,
            "norm": math.sqrt(sum(float(t.square().sum()) for t in floating)),
            "uses": uses_as_facts(release.uses or Counter()),
        }
        self._note(fields)
        fields["epsilon"] = self.epsilon(delta)
        line = encode(fields)
        append_lines(self.path, [line])
        self._count, self._last = self._count + 1, _hash(line.encode())
        self._write_head()
        self._size = size_before + len(line.encode()) + 1

    def _write_head(self) -> None:
        write_text(self.path.with_name(HEAD), f"{self._count} {self._last}\n")

    def _note(self, fields: Mapping[str, Any]) -> None:
        """Update the state by a line."""
        kind, about, number = fields["kind"], fields["about"], fields["number"]
        if number is not None and fields["question"]:
            self._answers.setdefault((kind, about, number), (fields["question"], fields["answer"]))
        uses = uses_from_facts(fields["uses"])
        self.uses.update(uses)
        if kind == MISSING:
            self._missing[about], self.unbounded = number, True
        if kind == "train" and not fields["refused"]:
            self._latest[about] = (number, fields["acked"])
            self.unbounded |= not fields["again"] and not uses
        if kind in ("setup", "finish") and not fields["refused"]:
            self.jobs[about] = self.jobs.get(about, False) or kind == "finish"


def verified(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, verified against each other and against its head.

    Raises:
        RunError: a line was changed or is missing; names the first.
    """
    path, before = folder / NAME, FIRST
    head = path.with_name(HEAD)
    with reporting(head, "read"):  # first, since the client may be running: then further lines may follow
        words = head.read_text(encoding="utf-8").split() if head.is_file() else ["0", FIRST]
    lines, entries = read_lines(path), list[dict[str, Any]]()
    for number, line in enumerate(lines, 1):
        try:
            fields = dict(decode(line))
            uses_from_facts(fields["uses"])
        except (ValueError, TypeError, KeyError, MessageError) as error:
            raise RunError(f"line {number} of '{path}' was changed: it cannot be read") from error
        if fields.get("n") != number:
            raise RunError(
                f"line {number} of '{path}' was number {fields.get('n')}: lines were removed or moved"
            )
        if fields.get("before") != before:
            raise RunError(
                f"line {number - 1} of '{path}' was changed: line {number} was written after a different line"
            )
        entries.append(fields)
        before = _hash(line)
    count = int(words[0]) if len(words) == 2 and words[0].isdigit() else -1
    if count < 0 or len(lines) > count + 1:  # a crash leaves the head at most one line behind
        raise RunError(f"'{head}' does not match the {len(lines)} lines of '{path}'")
    if len(lines) < count:
        raise RunError(f"line {len(lines) + 1} of '{path}' was removed: there were {count} lines")
    if count and _hash(lines[count - 1]) != words[1]:
        raise RunError(f"line {count} of '{path}' was changed: it is not the last line that was written")
    return entries


HEADS = ("line", "time (UTC)", "experiment", "kind", "number", "what", "bytes", "norm", "epsilon")
"""Columns of the readable table."""


def table_rows(entries: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the lines of a log as rows of a table with the columns `HEADS`."""
    rows, is_private = list[tuple[str, ...]](), False
    for entry in entries:
        tensors, facts = entry["tensors"], entry["facts"]
        shapes = {name.removeprefix("reply/"): ",".join(map(str, shape)) for name, shape, _ in tensors}
        names = [f"{name}[{shape}]" for name, shape in shapes.items()] or sorted(facts)
        # If noise was added before, or lines are missing, the operator may rely on a bound that does not hold.
        is_private = is_private or bool(entry["uses"]) or entry["kind"] == MISSING
        no_bound, spent = "unbounded" if is_private else "no DP", entry["epsilon"]
        rows.append(
            (
                str(entry["n"]),
                entry["time"].removesuffix("+00:00"),
                entry["experiment"],
                f"{entry['kind']}{' (refused)' if entry['refused'] else ''}{' (again)' if entry['again'] else ''}",
                "" if entry["number"] is None else str(entry["number"]),
                first_few(names, 3),
                f"{entry['bytes']:,}",
                f"{entry['norm']:.4g}" if tensors else "",
                "?" if spent is None else no_bound if spent == math.inf else f"{spent:.4g}",
            )
        )
    return rows


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
