"""Progress of a pretraining: a live bar in a terminal, a line an epoch elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from tailorfl.report.progress import display
from tailorfl.runs.pretrain import Epoch, Watcher


@contextmanager
def watcher(console: Console, *, quiet: bool = False) -> Iterator[Watcher]:
    """Return the watcher that suits a console; log messages of the library go to the same console meanwhile."""
    with display(console, quiet, Watcher, LiveEpochs, EpochLines) as watch:
        yield watch


def described(epoch: Epoch, metric: str) -> list[str]:
    """Return the numbers of an epoch for people; parts without samples are left out."""
    scores = {"val": epoch.val, "test": epoch.test}
    texts = [f"{part} {metric} {score:.4f}" for part, score in scores.items() if not math.isnan(score)]
    return [f"loss {epoch.loss:.4f}", *texts]


class EpochLines(Watcher):
    """One line at the start and one an epoch; for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._name, self._metric, self._epochs = "", "", 0

    def started(self, name: str, epochs: int, metric: str, done: int) -> None:
        """Say what begins."""
        self._name, self._metric, self._epochs = name, metric, epochs
        resumed = f", resumed after epoch {done}" if done else ""
        self._print(f"{name}: {epochs} epochs{resumed}")

    def epoch_done(self, epoch: Epoch) -> None:
        """Say what the epoch found, and how long it took."""
        facts = [*described(epoch, self._metric), f"{epoch.seconds:.1f} s"]
        self._print(f"{self._name}: epoch {epoch.epoch}/{self._epochs}, {', '.join(facts)}")

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


class LiveEpochs(Watcher):
    """A bar with the last epoch's findings and the time left."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None, facts="")
        self._metric, self._epochs = "", 0

    def started(self, name: str, epochs: int, metric: str, done: int) -> None:
        """Start the bar."""
        self._metric, self._epochs = metric, epochs
        self._progress.reset(self._task, total=epochs, completed=done, description=name)
        self._progress.update(self._task, facts=f"epoch {done}/{epochs}")

    def epoch_done(self, epoch: Epoch) -> None:
        """Move the bar; the last epoch leaves a line above it."""
        facts = [f"epoch {epoch.epoch}/{self._epochs}", *described(epoch, self._metric)]
        self._progress.update(self._task, completed=epoch.epoch, facts=" · ".join(facts))
        if epoch.epoch == self._epochs:
            self._progress.console.print(Text(" · ".join(facts)))
