"""Progress of a pretraining and of a tuning: a live bar in a terminal, a line per epoch or trial elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from tailorfl.report.progress import display
from tailorfl.report.tables import human_seconds
from tailorfl.runs.folders import as_words
from tailorfl.runs.pretrain import Epoch, Watcher
from tailorfl.tuning.run import Watch

if TYPE_CHECKING:
    from tailorfl.tuning.trials import Trial


@contextmanager
def watcher(console: Console, *, quiet: bool = False) -> Iterator[Watcher]:
    """Yield the watcher for a console; within the block, the library's log messages go to the same console."""
    with display(console, quiet, Watcher, LiveEpochs, EpochLines) as watch:
        yield watch


def described(epoch: Epoch, metric: str) -> list[str]:
    """Return the readable numbers of an epoch, without parts that have no samples."""
    scores = {"val": epoch.val, "test": epoch.test}
    texts = [f"{part} {metric} {score:.4f}" for part, score in scores.items() if not math.isnan(score)]
    return [f"loss {epoch.loss:.4f}", *texts]


class EpochLines(Watcher):
    """One line at the start and one per epoch; for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._name, self._metric, self._epochs = "", "", 0

    def started(self, name: str, epochs: int, metric: str, done: int) -> None:
        """Print what begins."""
        self._name, self._metric, self._epochs = name, metric, epochs
        resumed = f", resumed after epoch {done}" if done else ""
        self._print(f"{name}: {epochs} epochs{resumed}")

    def epoch_done(self, epoch: Epoch) -> None:
        """Print the epoch's results, and its duration."""
        facts = [*described(epoch, self._metric), f"{epoch.seconds:.1f} s"]
        self._print(f"{self._name}: epoch {epoch.epoch}/{self._epochs}, {', '.join(facts)}")

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


class LiveEpochs(Watcher):
    """A bar with the last epoch's results and the time left."""

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


class TuningLines(Watch):
    """One line per trial; for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def ended(self, label: str, trial: Trial, used: float) -> None:
        """Print the result of a trial."""
        self._console.print(Text(trial_line(label, trial)), soft_wrap=True)


class Bar(Watch):
    """One bar for all methods, in samples, and a line per trial above it."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._used = progress, dict[str, float]()
        self._task = progress.add_task("tuning", total=None, facts="")
        self._before, self._trials = 0.0, 0

    def began(self, samples: int, used: float) -> None:
        """Set the bar's total."""
        self._before = used
        self._progress.update(self._task, total=samples, completed=used)

    def ended(self, label: str, trial: Trial, used: float) -> None:
        """Move the bar."""
        self._progress.console.print(Text(trial_line(label, trial)))
        self._trials += 1
        self._before += used - self._used.get(label, used - trial.samples)
        self._used[label] = used
        self._progress.update(self._task, completed=self._before, facts=f"{self._trials} trials · {label}")


def trial_line(label: str, trial: Trial) -> str:
    """Return the result of a trial in one line."""
    state = "" if trial.state == "complete" else f" {trial.state}"
    score = "–" if trial.score is None else f"{trial.score:.4f}"
    return f"[{label} #{trial.number}] {score}{state} {as_words(trial.values)} {human_seconds(trial.seconds)}"
