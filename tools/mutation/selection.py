"""Which recorded tests run a line of the present source, fastest first."""

from __future__ import annotations

import difflib
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from forks import ROOT
from points import Point


@dataclass(frozen=True)
class Recorded:
    """A recorded test: its id, and its seconds when it was recorded."""

    id: str
    seconds: float

    @property
    def function(self) -> str:
        """Its id without the parameters."""
        return self.id.partition("[")[0]


class Selection:
    """The records of a store."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._records = [json.loads(path.read_text()) for path in sorted(store.glob("tests.*.json"))]
        self._old: dict[tuple[str, str], dict[int, int]] = {}

    def tests(self, point: Point) -> list[Recorded]:
        """Tests that run the changed lines; of a line that runs at import, tests that run anything of the file."""
        for lines in (range(point.line, point.end + 1), range(point.statement, point.statement + 1)):
            found = self._of(point.file, set(lines))
            if found:
                return found
        return self._of(point.file, None)

    def _of(self, file: str, lines: set[int] | None) -> list[Recorded]:
        found: list[Recorded] = []
        for record in self._records:
            if file not in record["lines"]:
                continue
            new = self._now(file, record["sources"][file])
            who: set[int] = set()
            for line, numbers in record["lines"][file].items():
                if lines is None or new.get(int(line)) in lines:
                    who.update(numbers)
            found += [Recorded(*record["tests"][k]) for k in who]
        return in_turn(found)

    def _now(self, file: str, key: str) -> dict[int, int]:
        """Present line of every recorded line of a file."""
        if (file, key) not in self._old:
            before = (self._store / "sources" / key).read_text().splitlines()
            now = (ROOT / file).read_text().splitlines()
            blocks = difflib.SequenceMatcher(None, before, now, autojunk=False).get_matching_blocks()
            self._old[file, key] = {a + k + 1: b + k + 1 for a, b, size in blocks for k in range(size)}
        return self._old[file, key]


def in_turn(tests: list[Recorded]) -> list[Recorded]:
    """Fastest first, but one parameter set of every function before the second of any."""
    by_function: dict[str, list[Recorded]] = defaultdict(list)
    for test in sorted(tests, key=lambda t: t.seconds):
        by_function[test.function].append(test)
    order = sorted(((k, t.seconds, t.id), t) for held in by_function.values() for k, t in enumerate(held))
    return [t for _, t in order]


def within(tests: list[Recorded], seconds: float, most: int) -> list[Recorded]:
    """The first tests that take no longer than so many seconds together."""
    out: list[Recorded] = []
    for test in tests:
        if seconds - test.seconds < 0 and out:
            continue
        seconds -= test.seconds
        out.append(test)
        if len(out) == most:
            break
    return out
