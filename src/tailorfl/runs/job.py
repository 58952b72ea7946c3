"""Jobs, each of one method with one seed, and their observers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tailorfl.errors import RunError
from tailorfl.interface import check_hooks
from tailorfl.runs.files import MANIFEST, numbers
from tailorfl.runs.store import TRACE, RunStore
from tailorfl.settings.experiment import ExperimentConfig, MethodConfig
from tailorfl.settings.loading import expand
from tailorfl.settings.names import slug

if TYPE_CHECKING:
    from tailorfl.rounds.one_round import RoundResult

Way = Literal["new", "resume", "extend"]
"""new: in a folder without an experiment; resume: continue an existing one; extend: continue it with additions."""


@dataclass(frozen=True)
class Job:
    """One method with one seed."""

    config: ExperimentConfig
    method: MethodConfig
    seed: int

    @property
    def rounds(self) -> int:
        """Number of rounds; with a budget only the nominal one."""
        return self.method.rounds if self.method.rounds is not None else self.config.rounds

    @property
    def has_budget(self) -> bool:
        """Whether a budget, and not a number of rounds, ends the job."""
        return self.config.budget != "rounds" and self.method.rounds is None

    @property
    def name(self) -> str:
        """Readable name: the label and the seed."""
        return f"{self.method.label}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Path of the job below the experiment's folder."""
        return Path(slug(self.method.label)) / f"seed-{self.seed}"


def other_job(store: RunStore) -> list[str]:
    """Return the problem if a job's folder holds another job, as after folders were swapped; [] if it does not."""
    config, path = store.config, store.path
    label, seed = config.get("label"), config.get("seed")
    if label is None and seed is None:
        return []  # not made by an experiment
    if path.parts[-2:] == (slug(str(label)), f"seed-{seed}"):
        return []
    return [f"it holds another job: {label}, seed {seed}"]


def trouble(folder: Path) -> str:
    """Return why a job's folder has no result: it is not finished, or damaged; "" if it has one."""
    if not (folder / "config.json").is_file():
        return "was not started"
    store = RunStore.open(folder, readonly=True)
    try:
        problems = [*store.problems(), *other_job(store)]
        status = store.status
        if not problems and status == "finished" and not (folder / MANIFEST).is_file():
            store.rounds()  # older folders have no manifest to verify the files
            store.clients()
    except RunError as error:
        return f"damaged: {error}"
    if problems:
        return f"damaged: {', '.join(problems)}; restore it from a copy, or run it again with --resume"
    return "" if status == "finished" else f"not finished ({status})"


class Observer:
    """The hooks for a progress display. This class shows nothing; override the hooks that you need."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_hooks(cls, Observer)

    def experiment_started(self, folder: Path, way: Way) -> None:
        """Note that the first unfinished job begins in an experiment's folder; "new" replaces what was there."""

    def experiment_done(self, folder: Path) -> None:
        """Note that every job in an experiment's folder is finished or diverged; the folder is still locked."""

    def job_started(self, job: Job, position: int, total: int, rounds: int, resumed_from: int) -> None:
        """Note that job number `position` (from 1) of `total` begins; `resumed_from` rounds are already done."""

    def round_done(self, job: Job, done: RoundResult) -> None:
        """Note that a round is done."""

    def evaluated(self, job: Job, round: int, metrics: dict[str, float]) -> None:
        """Note the means over clients by "model/set/metric" after `round` rounds."""

    def recorded(self, job: Job, record: Mapping[str, Any]) -> None:
        """Note that a round's record was stored, or later numbers of it: the entries of rounds.jsonl by name.

        The time of this call does not count as the job's.
        """

    def job_done(self, job: Job, summary: dict[str, Any]) -> None:
        """Note that the job is finished and stored."""

    def job_kept(self, job: Job) -> None:
        """Note that the job was finished before and is skipped."""


class Several(Observer):
    """Calls several observers, in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers


def _tell_all(hook: str) -> Callable[..., None]:
    def tell(self: Several, *arguments: Any) -> None:
        for observer in self._observers:
            getattr(observer, hook)(*arguments)

    return tell


for _hook in [name for name in vars(Observer) if not name.startswith("_")]:
    setattr(Several, _hook, _tell_all(_hook))


def jobs_of(folder: Path, config: ExperimentConfig) -> Iterator[tuple[str, Path]]:
    """Yield (name, folder) of every job of an experiment and of its variants."""
    for variant, experiment in expand(config).items():
        variant_folder = folder / slug(variant) if variant else folder
        for method in experiment.methods:
            for seed in experiment.seeds:
                name = ", ".join(filter(None, (variant, method.label, f"seed {seed}")))
                yield name, variant_folder / slug(method.label) / f"seed-{seed}"


def job_problems(folder: Path) -> list[tuple[bool, str]]:
    """Return (whether it is damage, sentence) for all problems of a job's folder; none if finished and undamaged."""
    if not (folder / "config.json").is_file():
        return [(False, "not started")]
    store = RunStore.open(folder, readonly=True)
    try:
        sentences = (*store.problems(), *other_job(store), *store.checkpoint_problems())
        problems = [(True, text) for text in sentences]
        status = store.status
        store.clients()
        for name in ("rounds.jsonl", TRACE):
            rounds = numbers(folder / name)
            if rounds != list(range(1, len(rounds) + 1)):
                problems.append((True, f"{name} has missing rounds, or several records of a round"))
    except RunError as error:
        return [(True, str(error))]
    return problems if status == "finished" else [*problems, (False, f"not finished ({status})")]
