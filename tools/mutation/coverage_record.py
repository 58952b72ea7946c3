"""Which test runs which line of tailorfl, and how long it takes: recorded once, file by file of the tests.

A record, STORE/FOLDER.test_file.json, is valid for the text of its test file:

    {"hash": of the test file, "tests": {test id: seconds}, "lines": {source file: {line: [number of a test]}},
     "sources": {source file: hash of the text the lines belong to}}

Texts of the sources lie in STORE/sources/HASH, so that lines can be found again after a change (`mutate.py`).
What a fixture of a module or of the session runs counts for every test of the file, as all of them may use it.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forks import ROOT, SOURCE, forked

OPTIONS = [
    "-q",
    "-p",
    "no:cacheprovider",
    "-m",
    "not slow",
    "--durations=0",
    "--no-header",
    "--hypothesis-seed=0",
]
PARAMETERS = 4
LEFT_OUT = ("tests/docs/", "tests/cli/", "tests/test_layers.py", "tests/runs/test_resume.py")
"""Tests that work through processes of their own, or that run everything at once."""


def digest(text: str) -> str:
    """Return what names a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_files(under: list[str]) -> list[Path]:
    """The test files under some folders or of some names, relative to the repository; those left out are."""
    found: set[Path] = set()
    for place in under:
        path = ROOT / place
        found |= {path} if path.is_file() else set(path.rglob("test_*.py"))
    names = sorted(path.relative_to(ROOT) for path in found)
    return [name for name in names if not str(name).startswith(LEFT_OUT)]


def record(store: Path, under: list[str], seconds: float = 1500.0) -> None:
    """Record every test file that has no valid record yet."""
    (store / "sources").mkdir(parents=True, exist_ok=True)
    for file in test_files(under):
        place = store / (str(file).replace("/", ".").removesuffix(".py") + ".json")
        current = digest((ROOT / file).read_text())
        if place.is_file() and json.loads(place.read_text())["hash"] == current:
            continue
        log = store / "log" / (place.stem + ".txt")
        log.parent.mkdir(exist_ok=True)
        code, took = forked(lambda f=file, p=place, h=current: _record_one(f, p, h, store), log, seconds)
        print(f"{time.strftime('%H:%M:%S')} {file}: exit {code}, {took:.0f} s", flush=True)


def thinned(items: list[pytest.Item]) -> list[pytest.Item]:
    """At most `PARAMETERS` parameter sets of every test function, and of each method that their names contain.

    Thousands of tests are the same function for method after method and model after model. Which lines a function
    reaches hardly depends on more of them, and recording all takes hours. References have a case for every option
    of a method, so all of them are kept.
    """
    from tailorfl.core.method import methods

    names = set(methods())
    kept: list[pytest.Item] = []
    seen: dict[tuple[str, str], int] = {}
    for item in items:
        function, _, parameters = item.nodeid.partition("[")
        words = re.split(r"[^a-z0-9_]+", parameters)
        key = function, next((word for word in words if word in names), "")
        seen[key] = seen.get(key, 0) + 1
        if function.startswith("tests/references/") or seen[key] <= (1 if key[1] else PARAMETERS):
            kept.append(item)
    return kept


class _Contexts:
    """Tells coverage which test runs, and keeps how long each took and which ones passed."""

    def __init__(self, cov: Any) -> None:
        self.cov, self.seconds = cov, dict[str, float]()
        self.numbers: dict[str, int] = {}
        self.passed: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = thinned(items)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        number = self.numbers.setdefault(item.nodeid, len(self.numbers))
        self.cov.switch_context(str(number))
        yield
        self.cov.switch_context("file")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        wide = fixturedef.scope != "function"
        if wide:
            self.cov.switch_context("file")
        yield
        item = getattr(request, "_pyfuncitem", None)
        if wide and item is not None:
            self.cov.switch_context(str(self.numbers[item.nodeid]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)


def _record_one(file: Path, place: Path, current: str, store: Path) -> int:
    import coverage

    texts = {str(p.relative_to(ROOT)): p.read_text() for p in SOURCE.rglob("*.py")}
    cov = coverage.Coverage(data_file=None, source=[str(SOURCE)], config_file=False)
    contexts = _Contexts(cov)
    cov.start()
    code = pytest.main([*OPTIONS, str(file)], plugins=[contexts])
    cov.stop()
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        return int(code)
    data = cov.get_data()
    lines: dict[str, dict[int, list[int]]] = {}
    kept = {n for test, n in contexts.numbers.items() if test in contexts.passed}
    for source in data.measured_files():
        found: dict[int, list[int]] = {}
        for line, names in data.contexts_by_lineno(source).items():
            if names == [""]:  # at import: no test's own
                continue
            whole = "file" in names
            who = kept if whole else {int(n) for n in names if n.isdigit()} & kept
            found[line] = sorted(who)
        lines[str(Path(source).relative_to(ROOT))] = found
    sources = {name: digest(texts[name]) for name in lines}
    for name, key in sources.items():
        (store / "sources" / key).write_text(texts[name])
    seconds = [contexts.seconds.get(test, 0.0) for test in contexts.numbers]
    tests = [[test, round(s, 4)] for (test, _), s in zip(contexts.numbers.items(), seconds, strict=True)]
    place.write_text(json.dumps({"hash": current, "tests": tests, "lines": lines, "sources": sources}))
    return 0
