"""Changes the source at one random point at a time and looks whether a test notices.

    python tools/mutation/mutate.py record STORE [tests/training ...]    which test runs which line; later what is new
    python tools/mutation/mutate.py run STORE OUT.jsonl --count 300 --seed 1 [--packages core methods]
    python tools/mutation/mutate.py again STORE OUT.jsonl            survivors once more, after a test was added
    python tools/mutation/mutate.py report OUT.jsonl ...             the table, and every survivor

Needs the package coverage. A process that has imported torch and pytest, and not tailorfl, forks a child for every
change; the child imports the changed file in place of the real one and runs the tests that were recorded on that line,
fastest first, until one fails. Nothing is written into the source tree.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import random
import sys
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import coverage_record
from forks import ROOT, SOURCE, Replaced, forked, warm
from points import Point, points
from selection import Recorded, Selection, within

PACKAGES = ("core", "training", "privacy", "rounds", "methods", "evaluation", "theory", "runs")
STAGES = ((8.0, 40), (25.0, 150))
"""(seconds as recorded, number of tests) of the first and of the second try."""
WHOLE = 20
"""Test functions that run with all their parameter sets, recorded or not, in the third try."""
SLACK = 30.0
"""Seconds of processor time for the start and for tests that a change slows down."""


def drawn(packages: Iterable[str], count: int, seed: int) -> list[Point]:
    """So many points, every point of the packages as likely as any other."""
    files = sorted(f for package in packages for f in _files(package))
    everything = [point for file in files for point in points(ROOT, file)]
    print(f"{len(everything)} points in {len(files)} files", flush=True)
    random.Random(seed).shuffle(everything)
    return list(itertools.islice((p for p in everything if p.text(ROOT) is not None), count))


def _files(package: str) -> list[Path]:
    place = SOURCE / package
    return [place.with_suffix(".py")] if place.with_suffix(".py").is_file() else list(place.rglob("*.py"))


@dataclass
class Judge:
    """Runs tests on changed source."""

    selection: Selection
    log: Path

    def verdict(self, point: Point) -> dict[str, Any]:
        """{status, tests, seconds, by}: killed, timeout (killed, too), survived, or uncovered where no test runs it."""
        tests, done, begin = self.selection.tests(point), set[str](), time.monotonic()
        facts = {"file": point.file, "line": point.line, "kind": point.kind, "before": point.before,
                 "after": point.after}  # fmt: skip
        status, by, text = "survived" if tests else "uncovered", "", point.text(ROOT)
        assert text is not None
        for seconds, most in STAGES:
            chosen = within([t for t in tests if t.id not in done], seconds, most)
            if not chosen or status in ("killed", "timeout"):
                break
            done |= {t.id for t in chosen}
            status, by = self._run(point, text, chosen)
        if status == "survived":
            whole = list(dict.fromkeys(t.function for t in sorted(tests, key=lambda t: t.seconds)))[:WHOLE]
            found, by = self._run(point, text, [Recorded(name, 0.5) for name in whole], done)
            status = found if found == "killed" else status
        return {
            **facts,
            "status": status,
            "tests": len(done),
            "seconds": round(time.monotonic() - begin, 1),
            "by": by,
        }

    def _run(
        self, point: Point, text: str, tests: list[Recorded], done: Collection[str] = ()
    ) -> tuple[str, str]:
        order = {test.id: k for k, test in enumerate(tests)}
        files = sorted({test.id.partition("::")[0] for test in tests})
        limit = SLACK + 3 * sum(test.seconds for test in tests)

        def work() -> int:
            sys.meta_path.insert(0, Replaced(ROOT / point.file, text))
            return int(pytest.main([*coverage_record.OPTIONS, "-x", *files], plugins=[_Chosen(order, done)]))

        code, _ = forked(work, self.log, limit * 10, processor=limit)
        said = self.log.read_text(errors="replace").splitlines()
        by = next((line for line in said if line.startswith(("FAILED", "ERROR"))), "")[:160]
        if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return "survived", ""
        return ("timeout", "") if code is None or code < 0 else ("killed", by)


class _Chosen:
    """Runs the chosen tests, or all parameter sets of the chosen functions, in their order; without those done."""

    def __init__(self, order: dict[str, int], done: Collection[str]) -> None:
        self.order, self.done = order, done

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        kept = [item for item in items if self._place(item) >= 0 and item.nodeid not in self.done]
        items[:] = sorted(kept, key=self._place)

    def _place(self, item: pytest.Item) -> int:
        return self.order.get(item.nodeid, self.order.get(item.nodeid.partition("[")[0], -1))


def run(store: Path, out: Path, chosen: list[Point]) -> None:
    """Judge points and append what came out; those that `out` has already are left out."""
    known = {_name(row) for row in _rows([out])} if out.is_file() else set()
    judge = Judge(Selection(store), out.with_suffix(".log"))
    for number, point in enumerate(chosen, start=1):
        if point.name in known:
            continue
        row = judge.verdict(point)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{number}/{len(chosen)} {row['status']} {row['seconds']} s {point.file}:{point.line} "
              f"`{point.before[:60]}` -> `{point.after[:60]}`", flush=True)  # fmt: skip


def again(store: Path, out: Path) -> None:
    """Judge the survivors once more, where the source still has them, and write the results anew."""
    judge, rows = Judge(Selection(store), out.with_suffix(".log")), _rows([out])
    for row in rows:
        if row["status"] in ("survived", "uncovered"):
            at = [p for p in points(ROOT, ROOT / row["file"]) if p.name == _name(row)]
            if at:
                row.update(judge.verdict(min(at, key=lambda p: abs(p.line - row["line"]))))
            else:
                row["status"] = "gone"
            print(
                row["status"],
                row["file"],
                row["line"],
                row["before"][:60],
                "->",
                row["after"][:60],
                flush=True,
            )
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))


def report(files: list[Path]) -> str:
    """The table by package, and the survivors."""
    rows = [row for row in _rows(files) if row["status"] != "gone"]
    count: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in rows:
        for key in (row["file"].split("/")[2], "all"):
            count[key][row["status"]] += 1
    lines = ["| package | changes | killed | timeouts | survived | score |", "|---|---|---|---|---|---|"]
    for key, c in sorted(count.items(), key=lambda item: (item[0] == "all", item[0])):
        total, lost = sum(c.values()), c["survived"] + c["uncovered"]
        lines.append(
            f"| {key} | {total} | {c['killed']} | {c['timeout']} | {lost} | {1 - lost / total:.1%} |"
        )
    lines += ["", "| survivor | change |", "|---|---|"]
    for row in rows:
        if row["status"] in ("survived", "uncovered"):
            change = f"`{row['before'][:90]}` → `{row['after'][:90]}`".replace("|", "\\|")
            lines.append(f"| {row['file'].removeprefix('src/tailorfl/')}:{row['line']} | {change} |")
    return "\n".join(lines)


def _name(row: dict[str, Any]) -> tuple[str, str, str, str]:
    return row["file"], row["kind"], row["before"], row["after"]


def _rows(files: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def main() -> None:
    """Run one of the four commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record")
    one.add_argument("store", type=Path)
    one.add_argument("tests", nargs="*", default=["tests"])
    one = commands.add_parser("run")
    one.add_argument("store", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--count", type=int, default=300)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--packages", nargs="+", default=PACKAGES)
    one.add_argument("--part", default="1/1", help="K/N: only every N-th of them, from the K-th on")
    one = commands.add_parser("again")
    one.add_argument("store", type=Path)
    one.add_argument("out", type=Path)
    one = commands.add_parser("report")
    one.add_argument("files", nargs="+", type=Path)
    given = parser.parse_args()
    if given.command == "report":
        print(report(given.files))
        return
    warm()
    if given.command == "record":
        coverage_record.record(given.store, given.tests)
    elif given.command == "run":
        first, every = map(int, given.part.split("/"))
        chosen = drawn(given.packages, given.count, given.seed)[first - 1 :: every]
        run(given.store, given.out, chosen)
    else:
        again(given.store, given.out)


if __name__ == "__main__":
    main()
