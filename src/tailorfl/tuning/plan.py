"""Plans of tunings: every method's budget, the search spaces, and the folders of tunings.

<folder>/experiment.yaml     the experiment to tune
<folder>/request.json        budget, sampler, seed, and whether grids may be widened
<folder>/trials.db           every trial, in Optuna's format
<folder>/tuning.json         the trials and the chosen settings
<folder>/tuned.yaml          the experiment with the chosen settings, for `tailorfl compare`

The budget of a method is trials × rounds × seeds, counted in samples. A trial trains like the later comparison, with
the experiment's `budget`. All methods get the number of gradients of single samples that this many trials of FedAvg
take (`tailorfl.runs.schedule`): a method whose rounds use more samples gets fewer trials, one whose trials are stopped
early gets more.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tailorfl.errors import ConfigError, RunError
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
from tailorfl.runs.folders import TUNING, check_name, new_folder, whole_experiment
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.tuning.samplers import SAMPLERS, Sampler, check
from tailorfl.tuning.space import Space, spaces
from tailorfl.tuning.trials import FILE

EXPERIMENT, REQUEST = "experiment.yaml", "request.json"
TUNED = "tuned.yaml"
"""The experiment with the chosen settings."""
OLD_STATES = "under-way"
"""Folder where older versions kept the states of trials."""
FIRST_SEED = 1000
"""First seed of tunings, so that seeds added to a comparison do not coincide with them."""
_TEXT = re.compile(r"([1-9]\d{0,5})(?:x([1-9]\d{0,5}))?(?:x([1-9]\d{0,3}))?")


@dataclass(frozen=True)
class Budget:
    """The number of trials, the rounds of each, and the seeds with which each is repeated."""

    trials: int
    rounds: int
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class TuningRequest:
    """The settings of a tuning."""

    budget: str = "20"
    sampler: Sampler = "random"
    seed: int = 0
    """Seed of the sampler."""
    widen: bool = False

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise ConfigError(f"unknown sampler '{self.sampler}'; use one of {', '.join(SAMPLERS)}")


@dataclass(frozen=True)
class Plan:
    """A request worked out for an experiment: the experiment of the trials, and the search spaces."""

    asked: ExperimentConfig
    request: TuningRequest
    budget: Budget
    config: ExperimentConfig
    """The experiment of the trials."""
    spaces: Mapping[str, Space]


def plan(config: ExperimentConfig, request: TuningRequest) -> Plan:
    """Return the plan of a request for an experiment.

    Raises:
        ConfigError: the budget, the experiment's `search` or the sampler do not fit.
    """
    if config.variants:
        raise ConfigError(
            f"'{config.name}' has variants ({', '.join(config.variants)}), each a separate experiment; tune one of "
            "them: give its settings and variants={}"
        )
    budget = parse(request.budget, config)
    space_of = spaces(config)
    for label, space in space_of.items():
        check(label, request.sampler, space)
    return Plan(config, request, budget, tuned_on(config, budget), space_of)


def parse(text: str, config: ExperimentConfig) -> Budget:
    """Return the budget of a text: TRIALS, TRIALSxROUNDS or TRIALSxROUNDSxSEEDS.

    By default rounds are those of the experiment, and there is one seed. The seeds differ from the experiment's.

    Raises:
        ConfigError: the text is not a budget, or has more rounds than the experiment.
    """
    match = _TEXT.fullmatch(text.strip().replace("×", "x"))
    if match is None:
        raise ConfigError(
            f"'{text}' is not a budget; write the trials of each method, such as 20, or trials x rounds x seeds, such "
            "as 20x10x2"
        )
    trials, rounds, seeds = (None if part is None else int(part) for part in match.groups())
    if rounds is not None and rounds > config.rounds:
        raise ConfigError(
            f"the budget '{text}' has {rounds} rounds per trial, more than the experiment's {config.rounds}; give at "
            f"most {config.rounds}"
        )
    free = (seed for seed in itertools.count(FIRST_SEED) if seed not in config.seeds)
    return Budget(trials or 1, rounds or config.rounds, tuple(itertools.islice(free, seeds or 1)))


def tuned_on(config: ExperimentConfig, budget: Budget) -> ExperimentConfig:
    """Return the experiment of the trials: with the budget's rounds and seeds, and lines' own rounds reduced alike."""
    share = budget.rounds / config.rounds
    lines = tuple(
        m if m.rounds is None else m.model_copy(update={"rounds": max(1, round(m.rounds * share))})
        for m in config.methods
    )
    return config.model_copy(update={"rounds": budget.rounds, "seeds": budget.seeds, "methods": lines})


def default_folder(config: ExperimentConfig) -> Path:
    """Return the default folder of a tuning: runs/NAME-tuning, or the next free one."""
    return new_folder(config.model_copy(update={"name": f"{config.name}-tuning"}))


def begin(folder: Path, plan: Plan) -> None:
    """Prepare a folder for a tuning.

    Raises:
        RunError: the folder has a tuning or other files.
    """
    check_name(folder)
    with reporting(folder, "create the folder"):
        folder.mkdir(parents=True, exist_ok=True)
        if not all(_may_stand(path, plan) for path in folder.iterdir()):
            raise RunError(
                f"'{folder}' is not empty; continue the tuning in it with --resume {quoted(folder)}, or choose another "
                "folder with --out"
            )
    write_text(folder / EXPERIMENT, plan.asked.to_yaml())
    facts = {**asdict(plan.request), "experiment": sha256(folder / EXPERIMENT)}
    write_text(folder / REQUEST, encode({**facts, "digest": digest_of(facts)}, indent=1))


def _may_stand(path: Path, plan: Plan) -> bool:
    """Return whether a file in a new tuning's folder is left over from a killed start of the same tuning."""
    if path.name == EXPERIMENT and path.is_file():
        return path.read_bytes() == plan.asked.to_yaml().encode()
    return path.name == ".lock" or path.name.endswith(PART)


def discard(folder: Path) -> None:
    """Delete the tuning in a folder, if there is one; nothing else is touched.

    Raises:
        RunError: another process is using it.
    """
    if not (folder / REQUEST).is_file():
        return
    with FolderLock(folder), reporting(folder, "delete the tuning in"):
        shutil.rmtree(folder / OLD_STATES, ignore_errors=True)
        for name in (FILE, TUNING, TUNED, EXPERIMENT, REQUEST):
            (folder / name).unlink(missing_ok=True)


def plan_in(folder: Path) -> Plan:
    """Return the plan of the tuning in a folder.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    check_name(folder)
    if not (folder / REQUEST).is_file():
        raise ConfigError(
            f"'{folder}' has no tuning to continue: it has no {REQUEST}; check the name, or start a tuning there "
            f"(--out {quoted(folder)})"
        )
    try:
        facts = decode((folder / REQUEST).read_text(encoding="utf-8"))
        request, digest = _request(facts), facts.pop("digest", None)
        if digest is not None and digest != digest_of(facts):
            raise ValueError("it was changed after it was written")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"'{folder / REQUEST}' is damaged: {error}; restore it from a copy") from error
    experiment = whole_experiment(folder / EXPERIMENT)
    if digest is not None and facts["experiment"] != sha256(folder / EXPERIMENT):
        raise ConfigError(
            f"'{folder / EXPERIMENT}' has changed since the tuning was started; restore it from a copy, or tune the "
            "changed experiment in another folder (--out)"
        )
    return plan(experiment, request)


def _request(facts: Any) -> TuningRequest:
    """Return the request in a file. Raises ValueError if a part of it is missing."""
    if not isinstance(facts, dict):
        raise ValueError("it has no named values")
    for field in fields(TuningRequest):
        if type(facts.get(field.name)) is not type(field.default):
            raise ValueError(f"{field.name} is {facts.get(field.name, 'missing')!r}")
    return TuningRequest(**{field.name: facts[field.name] for field in fields(TuningRequest)})
