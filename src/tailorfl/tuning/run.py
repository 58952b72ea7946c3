"""Tunes every method of an experiment, in one or several processes, resumable at any moment, and writes the results."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tailorfl import modules
from tailorfl.errors import ConfigError, WorkerError
from tailorfl.evaluation.metrics import LOWER_IS_BETTER
from tailorfl.printable import quoted
from tailorfl.runs.build import check
from tailorfl.runs.cost_estimate import estimate
from tailorfl.runs.files import FolderLock, encode, write_text
from tailorfl.runs.folders import TUNING
from tailorfl.runs.process import ended_in_order
from tailorfl.runs.schedule import nearest
from tailorfl.settings.experiment import COMPARED, ExperimentConfig
from tailorfl.settings.loading import load
from tailorfl.tuning.plan import OLD_STATES, TUNED, Plan, TuningRequest, begin, default_folder, plan, plan_in
from tailorfl.tuning.samplers import Sampler, Search, size
from tailorfl.tuning.search import MethodSearch, Tuned
from tailorfl.tuning.space import changed, edges
from tailorfl.tuning.training import Outcome, Task, Trainer
from tailorfl.tuning.trials import Ledger, Trial, load_optuna

log = logging.getLogger(__name__)


class Watch:
    """The hooks for a progress display. This class shows nothing."""

    def began(self, samples: int, used: float) -> None:
        """Note the budget of all methods together, and the used part of it, in samples."""

    def ended(self, label: str, trial: Trial, used: float) -> None:
        """Note that a trial has ended; `used` is its method's used budget in samples."""


@dataclass(frozen=True)
class MethodCost:
    """Estimated cost of tuning one method."""

    trials: int
    """Number of complete trials; if some are stopped early there are more, with the same total time."""
    seconds: float


@dataclass(frozen=True)
class Tuning:
    """The results of a tuning."""

    folder: Path
    plan: Plan
    samples: int
    """Budget of every method, in samples."""
    metric: str
    methods: Sequence[Tuned]

    @property
    def experiment(self) -> Path:
        """File of the experiment with the chosen settings, for `tailorfl.compare`."""
        return self.folder / TUNED

    def edges(self, tuned: Tuned) -> dict[str, int]:
        """Return the settings whose chosen value lies at an edge of the searched values: -1 lower, 1 upper."""
        line = next(m for m in self.plan.config.methods if m.label == tuned.label)
        return edges(self.plan.config, line, tuned.space, tuned.chosen)

    def ranks(self) -> dict[str, int | None]:
        """Return every method's rank by its best score (1 is the best, ties share a rank), or None without a score."""
        signed = {
            t.label: (t.best.score or 0.0) * (1 if t.higher_is_better else -1) for t in self.methods if t.best
        }
        ranks = {
            label: 1 + sum(rival > score for rival in signed.values()) for label, score in signed.items()
        }
        return {t.label: ranks.get(t.label) for t in self.methods}

    def as_json(self) -> dict[str, Any]:
        """Return the content of tuning.json."""
        budget, ranks = self.plan.budget, self.ranks()
        return {
            "budget": {
                "trials": budget.trials,
                "rounds": budget.rounds,
                "seeds": list(budget.seeds),
                "samples": self.samples,
            },
            "sampler": self.plan.request.sampler,
            "metric": self.metric,
            "methods": {
                tuned.label: {
                    "space": {key: dimension.plain() for key, dimension in tuned.space.items()},
                    "chosen": tuned.chosen,
                    "rank": ranks[tuned.label],
                    "edges": list(self.edges(tuned)),
                    "trials": [trial.plain() for trial in tuned.trials if trial.done],
                }
                for tuned in self.methods
            },
        }


def foreseen(plan: Plan, watch: Callable[[str], None] | None = None) -> dict[str, MethodCost]:
    """Return the estimated cost of every method with one worker, by label; `watch` is called with each step.

    A trial takes the rounds of the budget, and evaluations of validation parts only: one at its end, and intermediate
    ones if they select models.

    Raises:
        TailorflError: the experiment cannot be built, or no client has validation samples; the message says why.
    """
    config = plan.config
    interval = config.eval.every if config.eval.select == "val" else 0
    validation = config.eval.model_copy(update={"sets": ("val",), "every": interval})
    allowance = plan.budget.trials * Trainer(config, Path()).allowance()
    costs = {}
    for label, row in estimate(config.model_copy(update={"eval": validation}), watch).methods.items():
        gradients = row["gradients_per_round"] * row["rounds"] * len(config.seeds)
        paid = nearest(allowance, gradients) if gradients else plan.budget.trials
        trials = int(min(paid, size(plan.spaces[label])))
        costs[label] = MethodCost(trials, row["seconds"] * trials)
    return costs


def tune_experiment(
    config: str | Path | Mapping[str, Any] | ExperimentConfig | None,
    settings: Mapping[str, Any],
    request: TuningRequest,
    *,
    workers: int,
    out: str | Path | None,
    resume: bool,
) -> Tuning:
    """Tune every method of an experiment; see `tailorfl.tune`."""
    if resume:
        if out is None or config is not None or settings or request != TuningRequest():
            raise ConfigError(
                "resume=True continues the tuning in `out` with its original settings; give only out and workers"
            )
        return tune(Path(out), plan_in(Path(out)), workers=workers)
    chosen = load(config, settings, methods=COMPARED, may_import=True)
    check(chosen)
    models = [chosen.model_of(line).architectures.values() for line in chosen.methods]
    if workers > 1 and any(model.name.startswith("given:") for of_line in models for model in of_line):
        raise ConfigError(
            "a model that is passed as an object is only in this process, so other processes cannot train it; set "
            "workers=1, or pass a function at the top level of a module"
        )
    load_optuna()  # before anything is written
    new = plan(chosen, request)
    folder = default_folder(chosen) if out is None else Path(out)
    begin(folder, new)
    return tune(folder, new, workers=workers)


def tune(folder: Path, plan: Plan, *, workers: int = 1, watch: Watch | None = None) -> Tuning:
    """Tune every method within the budget, and write tuning.json and tuned.yaml; earlier trials are kept.

    Raises:
        TailorflError: see the message; finished trials are kept, and the tuning can be continued.
    """
    watch = Watch() if watch is None else watch
    with ended_in_order(), FolderLock(folder):
        trainer = Trainer(plan.config, folder, plan.request.sampler)
        metric = trainer.metric()
        samples = plan.budget.trials * trainer.allowance()
        with Ledger.opened(folder) as ledger:
            searches = _searches(plan, samples, metric, ledger, watch)
            watch.began(samples * len(searches), sum(search.used for search in searches.values()))
            with _crew(trainer, folder, plan.request.sampler, workers) as send:
                _work(searches, send, workers)
            tuned = [search.tuned() for search in searches.values()]
        tuning = Tuning(folder, plan, samples, metric, tuned)
        write_text(folder / TUNING, encode(tuning.as_json(), indent=1))
        chosen = {method.label: method.chosen for method in tuned}
        write_text(tuning.experiment, experiment(plan.asked, chosen).to_yaml())
        shutil.rmtree(folder / OLD_STATES, ignore_errors=True)
    return tuning


def experiment(config: ExperimentConfig, chosen: Mapping[str, Mapping[str, Any]]) -> ExperimentConfig:
    """Return the experiment with the chosen settings, for its own rounds and seeds."""
    lines = tuple(changed(config, line, chosen[line.label]) for line in config.methods)
    return config.model_copy(update={"name": f"{config.name}-tuned", "methods": lines, "search": {}})


def _searches(plan: Plan, samples: int, metric: str, ledger: Ledger, watch: Watch) -> dict[str, MethodSearch]:
    searches: dict[str, MethodSearch] = {}

    def ended(label: str, trial: Trial) -> None:
        if trial.state == "failed":
            log.warning(
                "%s, trial %d failed and counts as a complete trial: %s", label, trial.number, trial.reason
            )
        watch.ended(label, trial, searches[label].used)

    request, higher = plan.request, metric not in LOWER_IS_BETTER
    for line in plan.config.methods:
        searches[line.label] = MethodSearch(
            Search(line.label, request.sampler, request.seed, higher, plan.budget.trials),
            plan.config,
            line,
            plan.spaces[line.label],
            samples,
            ledger,
            widen=request.widen,
            ended=ended,
        )
    return searches


Send = Callable[[Task], "Future[Outcome]"]


def _work(searches: Mapping[str, MethodSearch], send: Send, workers: int) -> None:
    """Train trials, as many at a time as there are workers, until all methods are done."""
    under_way: dict[Future[Outcome], Task] = {}
    unfinished = list(searches.values())

    def next_task() -> Task | None:
        for search in list(unfinished):
            if (task := search.next()) is not None:
                return task
            # The outcome of a trial under way may leave budget for another one, or widen the space.
            if all(other.label != search.search.label for other in under_way.values()):
                unfinished.remove(search)
        return None

    while True:
        while len(under_way) < workers and (task := next_task()) is not None:
            under_way[send(task)] = task
        if not under_way:
            return
        for future in wait(under_way, return_when=FIRST_COMPLETED).done:
            task = under_way.pop(future)
            searches[task.label].take(task.number, future.result())


@contextmanager
def _crew(trainer: Trainer, folder: Path, sampler: Sampler, workers: int) -> Iterator[Send]:
    """Yield the function that trains a trial: in this process, or in one of several others."""
    if workers == 1:

        def here(task: Task) -> Future[Outcome]:
            future: Future[Outcome] = Future()
            future.set_result(trainer.train(task))
            return future

        yield here
        return
    arguments = (trainer.config, folder, sampler, modules.named())
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_enlist, initargs=arguments)
    try:
        yield lambda task: pool.submit(_train, task)
    except BrokenProcessPool as error:
        raise WorkerError(
            f"a worker process of the tuning was lost; continue with: tailorfl tune --resume {quoted(folder)}, with "
            "fewer workers if memory was short"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_TRAINER: Trainer | None = None


def _enlist(config: ExperimentConfig, folder: Path, sampler: Sampler, named: Sequence[str]) -> None:
    """Make this process a worker."""
    global _TRAINER
    modules.load(named)
    _TRAINER = Trainer(config, folder, sampler)


def _train(task: Task) -> Outcome:
    assert _TRAINER is not None
    return _TRAINER.train(task)
