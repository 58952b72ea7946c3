"""A table of attacks and faults that a deployment is tried with: what each got at first, and what it gets now.

    python tools/attacks.py [--quick]

Its rows are the tests in tests/deploy with the marker `threat`, which are run for it: what a row says of now holds if
its test passes. `--quick` leaves out the slow ones, which start processes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1] / "tests" / "deploy"
HEAD = ("Who or what", "Does or meets", "At first", "Now", "Test", "Result")
UNKNOWN = "–"


@dataclass
class Row:
    """One attack or fault.

    Attributes:
        before, now: what it got at first, and what its test shows that it gets now.
        test: file and name.
        outcomes: of the test's cases.
    """

    before: str
    now: str
    test: str
    outcomes: set[str] = field(default_factory=set)

    @property
    def result(self) -> str:
        """The worst of the outcomes."""
        return next((word for word in ("failed", "skipped", "passed") if word in self.outcomes), "not run")


class Rows:
    """Pytest's plugin that selects the tests with a threat and notes what becomes of them."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Row] = {}
        self._row_of: dict[str, Row] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep tests with the marker, and make their rows."""
        for item in items:
            for mark in item.iter_markers("threat"):
                name = getattr(item, "originalname", item.name)
                row = Row(mark.kwargs.get("before", UNKNOWN), mark.kwargs["now"], f"{item.path.name}: {name}")
                self._row_of[item.nodeid] = self.rows.setdefault(mark.args, row)
        items[:] = [item for item in items if item.nodeid in self._row_of]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note an outcome; an error before or after a test is a failure of it."""
        if report.when == "call" or report.outcome != "passed":
            self._row_of[report.nodeid].outcomes.add(report.outcome)


def main() -> int:
    """Print the table, and what the tests say where one fails; returns 1 then."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="without the slow tests")
    chosen, rows, said = parser.parse_args(), Rows(), io.StringIO()
    options = ["-q", "-p", "no:cacheprovider", *(["-m", "not slow"] if chosen.quick else [])]
    with contextlib.redirect_stdout(said):
        code = pytest.main([str(TESTS), *options], plugins=[rows])
    if code:
        print(said.getvalue(), file=sys.stderr)
    print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}")
    for (who, what), row in sorted(rows.rows.items(), key=lambda pair: pair[0][0]):
        cells = (who, what, row.before, row.now, row.test, row.result)
        print(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main())
