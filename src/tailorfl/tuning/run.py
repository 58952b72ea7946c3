"""Tunes every method of an experiment, alone or with several worker processes, resumable at any moment.

<folder>/experiment.yaml     what is tuned
<folder>/request.json        budget, sampler, seed, and whether grids may be widened
<folder>/trials.db           every trial, as Optuna keeps them
<folder>/under-way/          checkpoints of the trials that have not ended
<folder>/tuning.json         what was tried and chosen
<folder>/tuned.yaml          the experiment with the chosen settings, for `tailorfl compare`
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tailorfl import modules
from tailorfl.errors import ConfigError, RunError, WorkerError
from tailorfl.evaluation.metrics import LOWER_IS_BETTER
from tailorfl.printable import quoted
from tailorfl.runs.files import (
    PART,
    FolderLock,
    decode,
    digest_of,
    encode,
    reporting,
    sha256,
    write_text,
)
from tailorfl.runs.folders import check_name, new_folder, whole_experiment
from tailorfl.runs.signals import ended_in_order
from tailorfl.runs.tuned import NAME
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.tuning.budget import Budget, parse, tuned_on
from tailorfl.tuning.outcome import TUNED, Tuned, as_json, experiment
from tailorfl.tuning.samplers import SAMPLERS, Sampler, Search, check
from tailorfl.tuning.search import MethodSearch
from tailorfl.tuning.space import Space, spaces
from tailorfl.tuning.training import UNDER_WAY, Outcome, Stretch, Trainer
from tailorfl.tuning.trials import FILE, Ledger, Trial

log = logging.getLogger(__name__)

EXPERIMENT, REQUEST = "experiment.yaml", "request.json"


@dataclass(frozen=True)
class TuningRequest:
    """How an experiment is to be tuned."""

    budget: str = "20"
    sampler: Sampler = "random"
    seed: int = 0
    """Of what is drawn."""
    widen: bool = False

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise ConfigError(f"unknown sampler '{self.sampler}'; it is one of {', '.join(SAMPLERS)}")


@dataclass(frozen=True)
class Plan:
    """A request, worked out: what trials run, and what is searched."""

    asked: ExperimentConfig
    request: TuningRequest
    budget: Budget
    config: ExperimentConfig
    """What trials run."""
    spaces: Mapping[str, Space]


@dataclass(frozen=True)
class Tuning:
    """What a tuning has come to."""

    folder: Path
    plan: Plan
    samples: int
    """What every method was allowed to see."""
    metric: str
    methods: Sequence[Tuned]

    @property
    def experiment(self) -> Path:
        """The experiment with what was chosen, for `tailorfl.compare`."""
        return self.folder / TUNED

    def as_json(self) -> dict[str, Any]:
        """Return the content of tuning.json."""
        plan = self.plan
        return as_json(
            plan.config, plan.budget, self.samples, plan.request.sampler, self.metric, self.methods
        )


class Watch:
    """What a progress display is told. This one shows nothing."""

    def began(self, samples: int, used: float) -> None:
        """All methods together may see so many samples, and have used so many of them."""

    def told(self, label: str, trial: Trial, used: float) -> None:
        """Note that a trial has ended; its method has used up so many samples."""


def plan(config: ExperimentConfig, request: TuningRequest) -> Plan:
    """Return what a request comes to for an experiment.

    Raises:
        ConfigError: the budget, the experiment's `search` or the sampler do not fit.
    """
    if config.variants:
        raise ConfigError(
            f"'{config.name}' has variants ({', '.join(config.variants)}), each an experiment of its own; tune one: "
            "give its settings beside variants={}"
        )
    budget = parse(request.budget, config)
    found = spaces(config)
    for label, space in found.items():
        check(_search(label, request, budget, True), space)
    return Plan(config, request, budget, tuned_on(config, budget), found)


def default_folder(config: ExperimentConfig) -> Path:
    """Return the folder of a tuning where none is named: runs/NAME-tuning, or the next free one."""
    return new_folder(config.model_copy(update={"name": f"{config.name}-tuning"}))


def begin(folder: Path, plan: Plan) -> None:
    """Make a folder that of a tuning.

    Raises:
        RunError: it holds one, or something else.
    """
    check_name(folder)
    with reporting(folder, "create the folder"):
        folder.mkdir(parents=True, exist_ok=True)
        if not all(_may_stand(path, plan) for path in folder.iterdir()):
            raise RunError(
                f"'{folder}' is not empty; go on with the tuning in it by --resume {quoted(folder)}, or choose another "
                "folder with --out"
            )
    write_text(folder / EXPERIMENT, plan.asked.to_yaml())
    facts = {**asdict(plan.request), "experiment": sha256(folder / EXPERIMENT)}
    write_text(folder / REQUEST, encode({**facts, "digest": digest_of(facts)}, indent=1))


def _may_stand(path: Path, plan: Plan) -> bool:
    """Whether a file in the folder of a new tuning is what a beginning of the same was killed over."""
    if path.name == EXPERIMENT and path.is_file():
        return path.read_bytes() == plan.asked.to_yaml().encode()
    return path.name == ".lock" or path.name.endswith(PART)


def discard(folder: Path) -> None:
    """Delete the tuning in a folder, if there is one; nothing else is touched.

    Raises:
        RunError: another process is working on it.
    """
    if not (folder / REQUEST).is_file():
        return
    with FolderLock(folder), reporting(folder, "delete the tuning in"):
        shutil.rmtree(folder / UNDER_WAY, ignore_errors=True)
        for name in (FILE, NAME, TUNED, EXPERIMENT, REQUEST):
            (folder / name).unlink(missing_ok=True)


def plan_in(folder: Path) -> Plan:
    """Return the plan of the tuning in a folder.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    check_name(folder)
    if not (folder / REQUEST).is_file():
        raise ConfigError(
            f"'{folder}' has no tuning that could go on: it has no {REQUEST}; check the name, or begin the tuning "
            f"there (--out {quoted(folder)})"
        )
    try:
        facts = decode((folder / REQUEST).read_text(encoding="utf-8"))
        request, digest = _request(facts), facts.pop("digest", None)
        if digest is not None and digest != digest_of(facts):
            raise ValueError("it is not what was written")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"'{folder / REQUEST}' is damaged: {error}; restore it from a copy") from error
    experiment = whole_experiment(folder / EXPERIMENT)
    if digest is not None and facts["experiment"] != sha256(folder / EXPERIMENT):
        raise ConfigError(
            f"'{folder / EXPERIMENT}' is not what the tuning was begun with; restore it from a copy, or tune what "
            "it is now in another folder (--out)"
        )
    return plan(experiment, request)


def _request(facts: Any) -> TuningRequest:
    """Return the request that a file holds, none of whose parts may be missing; ValueError where one is."""
    if not isinstance(facts, dict):
        raise ValueError("it holds no named values")
    for field in fields(TuningRequest):
        if type(facts.get(field.name)) is not type(field.default):
            raise ValueError(f"{field.name} is {facts.get(field.name, 'missing')!r}")
    return TuningRequest(**{field.name: facts[field.name] for field in fields(TuningRequest)})


def tune(folder: Path, plan: Plan, *, workers: int = 1, watch: Watch | None = None) -> Tuning:
    """Tune every method within the budget, and write tuning.json and tuned.yaml; what was tried before is kept.

    With one worker the result is the same to the bit however often it was interrupted.

    Raises:
        TailorflError: see the message; what was tried stays, and the tuning can go on.
    """
    watch = Watch() if watch is None else watch
    with ended_in_order(), FolderLock(folder):
        trainer = Trainer(plan.config, folder)
        metric = trainer.metric()
        samples = plan.budget.trials * trainer.allowance()
        with Ledger.opened(folder) as ledger:
            searches = _searches(folder, plan, samples, metric, ledger, watch)
            watch.began(samples * len(searches), sum(search.used for search in searches.values()))
            with _crew(trainer, folder, workers) as send:
                _work(searches, send, workers)
            tuned = [search.tuned() for search in searches.values()]
        found = Tuning(folder, plan, samples, metric, tuned)
        write_text(folder / NAME, encode(found.as_json(), indent=1))
        chosen = {one.label: one.chosen for one in tuned}
        write_text(folder / TUNED, experiment(plan.asked, chosen).to_yaml())
        shutil.rmtree(folder / UNDER_WAY, ignore_errors=True)
    return found


def _search(label: str, request: TuningRequest, budget: Budget, higher_is_better: bool) -> Search:
    return Search(label, request.sampler, request.seed, higher_is_better, budget.trials)


def _searches(
    folder: Path, plan: Plan, samples: int, metric: str, ledger: Ledger, watch: Watch
) -> dict[str, MethodSearch]:
    found: dict[str, MethodSearch] = {}

    def told(label: str, trial: Trial) -> None:
        if trial.state == "failed":
            log.warning(
                "%s, trial %d, failed and counts as a whole one: %s", label, trial.number, trial.reason
            )
        watch.told(label, trial, found[label].used)

    for line in plan.config.methods:
        found[line.label] = MethodSearch(
            _search(line.label, plan.request, plan.budget, metric not in LOWER_IS_BETTER),
            plan.config,
            line,
            plan.spaces[line.label],
            samples,
            ledger,
            folder,
            widen=plan.request.widen,
            told=told,
        )
    return found


Send = Callable[[Stretch], "Future[Outcome]"]


def _work(searches: Mapping[str, MethodSearch], send: Send, workers: int) -> None:
    """Train stretches, as many at a time as there are workers, until no method has anything left to train."""
    under_way: dict[Future[Outcome], Stretch] = {}
    coming: Iterator[Stretch] = (
        stretch for search in searches.values() for stretch in iter(search.next, None) if stretch is not None
    )
    while True:
        while len(under_way) < workers and (stretch := next(coming, None)) is not None:
            under_way[send(stretch)] = stretch
        if not under_way:
            return
        done, _ = wait(under_way, return_when=FIRST_COMPLETED)
        for future in done:
            stretch = under_way.pop(future)
            further = searches[stretch.label].take(stretch.number, future.result())
            if further is not None:
                under_way[send(further)] = further


@contextmanager
def _crew(trainer: Trainer, folder: Path, workers: int) -> Iterator[Send]:
    """Return what trains stretches: this process alone, or as many others."""
    if workers == 1:

        def here(stretch: Stretch) -> Future[Outcome]:
            future: Future[Outcome] = Future()
            future.set_result(trainer.train(stretch))
            return future

        yield here
        return
    given = (trainer.config, folder, modules.named())
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_enlist, initargs=given)
    try:
        yield lambda stretch: pool.submit(_train, stretch)
    except BrokenProcessPool as error:
        raise WorkerError(
            f"a worker process of the tuning was lost; go on with: tailorfl tune --resume {quoted(folder)}, "
            "with fewer workers where memory was short"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_TRAINER: Trainer | None = None


def _enlist(config: ExperimentConfig, folder: Path, named: Sequence[str]) -> None:
    """Make this process a worker."""
    global _TRAINER
    modules.load(named)
    _TRAINER = Trainer(config, folder)


def _train(stretch: Stretch) -> Outcome:
    assert _TRAINER is not None
    return _TRAINER.train(stretch)
