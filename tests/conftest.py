"""Helpers shared by all tests. pytest puts this folder on the path: helpers are imported as `methods.small`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tailorfl import modules
from tailorfl.data.storage import data_file
from tailorfl.engines import choice
from tailorfl.errors import DataError
from tailorfl.report import plots
from tailorfl.report.result import ExperimentResult
from tailorfl.runs import cost_estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NOT_QUICK = (
    *(
        "benchmark",
        "cli",
        "deploy",
        "docs",
        "examples",
        "export",
        "tools",
        "notebooks",
        "package",
        "references",
    ),
    *("report", "runs", "studies", "theory", "tuning"),
)
"""Folders of tests that start processes, run whole experiments, or compare with other people's code."""

torch.set_num_threads(1)  # tests train tiny models: a second thread only waits, for minutes on a busy machine


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--quick`, the inner loop of `make quick`."""
    parser.addoption("--quick", action="store_true", help="each test function once, without slow folders")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave slow folders out of `--quick`."""
    folder = collection_path.relative_to(Path(__file__).parent).parts[:1]
    return True if config.getoption("--quick") and folder and folder[0] in NOT_QUICK else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the first set of parameters of every test function in `--quick`."""
    if config.getoption("--quick"):
        functions = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
        first = {id(item) for item in functions.values()}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in first])
        items[:] = [item for item in items if id(item) in first]


@pytest.fixture(autouse=True)
def modules_named_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that a test names with --import or imports= stays named in its process; here until the test ends."""
    monkeypatch.setattr(modules, "_NAMED", dict(modules._NAMED))


def outlined(figure: Figure, axes: Axes, path: str | Path) -> None:
    """Write the numbers that a picture shows in place of the picture."""
    Path(path).write_bytes(b"\x89PNG" + repr([line.get_xydata().tolist() for line in axes.lines]).encode())


@pytest.fixture(autouse=True)
def quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is plotted is computed and not painted: only the tests of plots look at pictures."""
    monkeypatch.setattr(plots, "_save", outlined)


PLOT = ExperimentResult.plot


@pytest.fixture(scope="session", autouse=True)
def no_plots() -> Iterator[None]:
    """Experiments plot nothing when they end, which is a fifth of the work, but where a test asks for `plotting`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExperimentResult, "plot", lambda *_: [])
        yield


@pytest.fixture
def plotting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experiments plot what they found, as they do for users."""
    monkeypatch.setattr(ExperimentResult, "plot", PLOT)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pulls the plug during a test, and killed processes lose nothing that they wrote."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def a_quick_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """--dry-run counts, and tries one batch of a client, where a test does not ask how sure its seconds are."""
    monkeypatch.setattr(cost_estimate, "PROBE_SECONDS", 0.0)


def find_or_skip(file: str) -> Path:
    """The path of a data file; skips the running test, with the reason, where it cannot be found."""
    try:
        return data_file(file)
    except DataError as missing:
        pytest.skip(str(missing))


@pytest.fixture(autouse=True)
def a_quick_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The automatic engine tries each way once, for one step: only its own tests care which one is faster."""
    monkeypatch.setattr(choice, "PROBE_STEPS", 1)
    monkeypatch.setattr(choice, "PROBE_SECONDS", 0.0)


@pytest.fixture(scope="session")
def need_data() -> Callable[[str], Path]:
    """`need_data("mnist.npz")` is the file's path; skips the test where the data folder lacks it."""
    return find_or_skip
