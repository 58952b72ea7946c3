"""Random cases one after another, and the rule for what may come of each.

    python tools/fuzz/running.py 10000 --seed 7        ten thousand cases; prints what breaks the rule
    python tools/fuzz/running.py --only names 4711     one case, with its traceback

A case ends with an error of the library, a correct result, or nothing; never with another error, a wrong result, text
that acts on a terminal, or no end at all.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from fuzz import calls, combinations, data, folders, names, settings
from tailorfl.errors import TailorflError

PATIENCE = 20
"""Seconds of processor time for one case, which takes a fraction of one."""
KINDS = ("settings", "combinations", "data", "data", "folders", "names", "calls")


class Endless(BaseException):
    """A case did not end; no `except Exception` may swallow that."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise Endless in the block after so many seconds of processor time."""

    def stop(*_: object) -> None:
        raise Endless

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def run_case(kind: str, seed: int, root: Path) -> str:
    """Run one case in a folder of its own; `root` has the folders that cases of damage begin with.

    Returns:
        "result" or the name of the library's error.

    Raises:
        AssertionError, or any other error: the rule is broken.
    """
    random_ = random.Random(f"{kind} {seed}")
    torch.manual_seed(seed)
    here = Path.cwd()
    cases: dict[str, Callable[[random.Random, Path], None]] = {
        "settings": settings.case,
        "combinations": combinations.case,
        "data": data.case,
        "names": names.case,
        "calls": calls.case,
        "folders": lambda r, folder: folders.case(r, folder, root),
    }
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(place)  # whatever is written where it should not be is not written to the source
        try:
            with limited(PATIENCE):
                cases[kind](random_, Path(place))
        except TailorflError as error:
            return type(error).__name__ if str(error).strip() else _wordless(error)
        finally:
            os.chdir(here)
    return "result"


def _wordless(error: TailorflError) -> str:
    raise AssertionError("an error without a word") from error


def kind_of(number: int) -> str:
    """The kind of case number so and so."""
    return KINDS[number % len(KINDS)]


def main() -> int:
    """Run what the command line says; the exit code tells whether the rule holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", type=int, nargs="?", default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--kind", choices=sorted(set(KINDS)), help="cases of this kind alone")
    parser.add_argument("--only", nargs=2, metavar=("KIND", "SEED"))
    given = parser.parse_args()
    logging.getLogger("tailorfl").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    found: Counter[tuple[str, str]] = Counter()
    broken = 0
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        if given.only:
            folders.make(root)
            print(run_case(given.only[0], int(given.only[1]), root))
            return 0
        folders.make(root)
        begin = time.perf_counter()
        for number in range(given.seed, given.seed + given.cases):
            kind = given.kind or kind_of(number)
            try:
                found[kind, run_case(kind, number, root)] += 1
            except (Exception, Endless) as error:
                broken += 1
                frames = traceback.extract_tb(error.__traceback__)
                ours = [f for f in frames if "tailorfl" in f.filename or "fuzz" in f.filename]
                where = " ".join(f"{Path(f.filename).name}:{f.lineno}" for f in ours[-3:])
                said = f"{type(error).__name__}: {str(error)[:150]!r}"
                print(f"{kind} {number}: {said} at {where}", flush=True)
        seconds = time.perf_counter() - begin
    for (kind, outcome), count in sorted(found.items()):
        print(f"{kind:12} {outcome:16} {count:6}")
    print(f"{given.cases} cases in {seconds:.0f} s, {broken} broke the rule")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
