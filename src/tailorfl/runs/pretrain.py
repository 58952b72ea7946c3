"""Trains a model on a labelled data set in one place and writes its weights, for experiments to start from.

    backbone.safetensors   every tensor of the model by its state name: parameters, running statistics, frozen parts
    backbone.json          settings, and rate, loss and scores of every epoch
    backbone.running/      while it is under way: settings, and the state after the last epochs; gone at the end

It is ordinary central training, an epoch a round, on the training part of the source; clients, partition and methods of
the experiment do not matter. Epoch e (from 0) of E has the rate

    η_e = η/2 · (1 + cos(π e / E)),   constant inside the epoch, or from η_e to 0 with train.schedule = linear

and, like every round, an optimizer of its own: momentum and the moments of AdamW start anew.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tailorfl.errors import ConfigError, RunError
from tailorfl.evaluation.metrics import primary
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.models.module_tensors import tensors_of
from tailorfl.models.weights import save_weights
from tailorfl.printable import quoted
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs import checkpoints
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.files import encode, reporting, write_text
from tailorfl.runs.folders import ROOT, locked
from tailorfl.runs.job import Job
from tailorfl.settings.engine import EngineConfig
from tailorfl.settings.experiment import ExperimentConfig, MethodConfig
from tailorfl.settings.loading import load
from tailorfl.settings.names import slug

PLACES = {"val": "val", "local": "test"}
"""Sets of an evaluation, and what they are called here, where there are no clients."""


@dataclass(frozen=True)
class Epoch:
    """What one epoch did; a score of a part without samples is NaN."""

    epoch: int
    """Counted from 1."""
    lr: float
    loss: float
    """Mean over the steps, while they were taken."""
    val: float
    test: float
    seconds: float
    """Of training and evaluation."""


@dataclass(frozen=True)
class Pretrained:
    """A finished pretraining."""

    weights: Path
    report: Path
    metric: str
    """What `val` and `test` of the epochs are."""
    epochs: tuple[Epoch, ...]
    scalars: int
    """Of all tensors in the file."""

    @property
    def seconds(self) -> float:
        """Of all epochs together."""
        return sum(epoch.seconds for epoch in self.epochs)


class Watcher:
    """What a progress display is told. This one shows nothing; override what you want to show."""

    def started(self, name: str, epochs: int, metric: str, done: int) -> None:
        """Note that the training of `name` begins; `done` of its epochs were done before."""

    def epoch_done(self, epoch: Epoch) -> None:
        """One more epoch is done, and can be resumed from."""


def running(weights: Path) -> Path:
    """Return the folder of a pretraining under way that is going to write `weights`."""
    return weights.with_suffix(".running")


def default_file(config: ExperimentConfig) -> Path:
    """Return where the weights of an experiment's model go if not told."""
    return ROOT / f"{slug(config.data.name)}-{slug(config.model.name)}.safetensors"


def experiment_of(weights: Path) -> ExperimentConfig:
    """Return the settings that an interrupted pretraining was started with.

    Raises:
        RunError: there is none.
    """
    file = running(weights) / "config.yaml"
    if not file.is_file():
        known = f"'{weights}' is finished" if weights.is_file() else f"'{weights}' was never begun"
        raise RunError(f"there is no pretraining to resume: {known}; start one without --resume")
    return load(file)


def central(config: ExperimentConfig) -> ExperimentConfig:
    """Return an experiment whose only client holds all training samples of the source.

    Raises:
        ConfigError: settings that pretraining cannot follow.
    """
    train = config.train
    for wrong, why in (
        (config.variants, "pretraining is of one model, but the experiment has variants; leave them out"),
        (config.model.larger, "pretraining is of one model; leave out model.larger"),
        (
            train.steps is not None or train.epochs != 1,
            "pretraining counts epochs as rounds, such as rounds=10; leave train.epochs at 1 and train.steps out",
        ),
        (
            train.round_schedule.kind != "constant",
            "pretraining lets the rate fall as a cosine by itself; leave out train.round_schedule",
        ),
        (train.dp, "pretraining is on public data, which need no privacy; leave out train.dp"),
    ):
        if wrong:
            raise ConfigError(why)
    everything: dict[str, Any] = {
        "partition": "iid", "partition_options": {}, "clients": 1, "heldout_clients": 0,
        "public": None, "public_samples": None, "corruptions": None, "official_set": False, "shifts": {},
    }  # fmt: skip
    changes = {
        "data": config.data.model_copy(update=everything),
        "methods": (MethodConfig(name="centralized", label="centralized"),),
        "engine": EngineConfig(name="sequential"),
        "fraction": 1.0,
        "sampling": "uniform",
    }
    return config.model_copy(update=changes)


def pretrain(
    config: ExperimentConfig,
    weights: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    watch: Watcher | None = None,
    source: Any = None,
) -> Pretrained:
    """Train, write the files and return what they hold; `config` is one that `central` returned.

    `source` is a `tailorfl.data.Source` in place of the configured one.

    Raises:
        TailorflError: see the message; the epochs that were done stay on disk and `resume` continues from there.
    """
    check_output(weights, resume, overwrite)
    watch = Watcher() if watch is None else watch
    torch.set_num_threads(config.threads)
    with locked(running(weights)):
        federation = make_federation(config, config.data.seed_of(config.seeds[0]), source)
        sim = make_simulation(Job(config, config.methods[0], config.seeds[0]), federation)
        state = _Running(running(weights), sim, source is not None)
        if resume:
            state.load()
        else:
            state.begin(config)
        name, metric = f"{config.model.name} on {federation.source.name}", primary(federation.source.task)[0]
        watch.started(name, config.rounds, metric, sim.round)
        while sim.round < config.rounds:
            state.add(_epoch(sim, config.train.lr, config.rounds, metric))
            watch.epoch_done(state.epochs[-1])
        scalars = _write(sim, weights)
        found = Pretrained(weights, weights.with_suffix(".json"), metric, tuple(state.epochs), scalars)
        write_text(found.report, encode(_report(config, sim, found), indent=1))
        state.end()
    return found


def check_output(weights: Path, resume: bool, overwrite: bool) -> None:
    """Raise ConfigError or RunError if `weights` cannot be written, or may not be replaced."""
    if weights.suffix != ".safetensors":
        raise ConfigError(f"weights are written as a .safetensors file, but out is '{weights}'")
    if resume:
        experiment_of(weights)
        return
    begun = (running(weights) / "config.yaml").is_file()
    if (weights.exists() or begun) and not overwrite:
        what = (
            f"was begun and not finished; continue it with --resume {quoted(weights)}"
            if begun
            else "exists already; use it"
        )
        raise RunError(f"'{weights}' {what}, replace it with --overwrite, or choose another file with --out")


def rate_of(epoch: int, epochs: int, lr: float) -> float:
    """Return η_e for an epoch counted from 0."""
    return lr / 2 * (1 + math.cos(math.pi * epoch / epochs))


def _epoch(sim: Simulation, lr: float, epochs: int, metric: str) -> Epoch:
    begin = time.perf_counter()
    rate = rate_of(sim.round, epochs, lr)
    sim.train = replace(sim.train, lr=rate)
    done = sim.step()
    scores = {r["set"]: float(r[metric]) for r in evaluate(sim, Protocol(tuple(PLACES))) if r["client"] == 0}
    named = {place: scores[name] for name, place in PLACES.items()}
    return Epoch(sim.round, rate, done.losses["train"], **named, seconds=time.perf_counter() - begin)


def _write(sim: Simulation, weights: Path) -> int:
    """Write all tensors of the model and return how many scalars they have."""
    state = sim.global_model()
    assert state is not None
    with sim.model.whole.bound(state) as module:
        tensors = tensors_of(module)
        with reporting(weights, "write"):
            save_weights(tensors, weights)
        return sum(tensor.numel() for tensor in tensors.values())


def _report(config: ExperimentConfig, sim: Simulation, found: Pretrained) -> dict[str, Any]:
    source = sim.given.source
    sizes = {part: int(sim.federation.sizes(part)[0]) for part in ("train", "val", "test")}
    return {
        "weights": found.weights.name,
        "data": source.name,
        "samples": sizes,
        "input_shape": list(source.input_shape),
        "outputs": source.outputs,
        "scalars": found.scalars,
        "metric": found.metric,
        "seconds": found.seconds,
        "epochs": [asdict(epoch) for epoch in found.epochs],
        "settings": config.to_dict(),
    }


class _Running:
    """The folder of a pretraining under way; whoever has it holds its lock."""

    def __init__(self, folder: Path, sim: Simulation, own_source: bool) -> None:
        self.folder, self.sim, self.own_source = folder, sim, own_source
        self.epochs: list[Epoch] = []

    def begin(self, config: ExperimentConfig) -> None:
        """Remove what an earlier one left, and make the folder one that can be resumed."""
        self._clear()
        self._save()
        write_text(self.folder / "config.yaml", config.to_yaml())

    def add(self, epoch: Epoch) -> None:
        """Keep the state after an epoch."""
        self.epochs.append(epoch)
        self._save()

    def load(self) -> None:
        """Go back to the state after the last epoch.

        Raises:
            RunError: it cannot be read.
            ConfigError: it was started with other data.
        """
        found = checkpoints.load_latest(self.folder)
        if found is None:
            raise RunError(f"'{self.folder}' holds no state to resume from; start again with --overwrite")
        _, tensors, meta = found
        if meta["own_source"] != self.own_source:
            had, has = ("without", "") if self.own_source else ("with", ", source=...")
            raise ConfigError(
                f"'{self.folder}' was started {had} data of your own; continue it the same way: "
                f"tailorfl.pretrain(out=..., resume=True{has})"
            )
        self.sim.load(tensors, meta["facts"])
        self.epochs = [_read(epoch) for epoch in meta["epochs"]]

    def end(self) -> None:
        """Leave nothing to resume; `locked` removes the empty folder."""
        (self.folder / "config.yaml").unlink()
        self._clear()

    def _save(self) -> None:
        tensors, facts = self.sim.dump()
        epochs = [asdict(epoch) for epoch in self.epochs]
        meta = {"facts": facts, "epochs": epochs, "own_source": self.own_source}
        checkpoints.save(self.folder, self.sim.round, tensors, meta)

    def _clear(self) -> None:
        (self.folder / "config.yaml").unlink(missing_ok=True)
        checkpoints.remove_after(self.folder, -1)


def _read(written: dict[str, Any]) -> Epoch:
    """Return an epoch as it was before JSON, which has no NaN."""
    found: dict[str, Any] = {key: math.nan if value is None else value for key, value in written.items()}
    return Epoch(**found)
