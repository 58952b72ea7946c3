"""Trains a model on a labelled data set in one place and writes its weights, for experiments to start from.

    backbone.safetensors   every tensor of the model by its state name: parameters, running statistics, frozen parts
    backbone.json          settings, and rate, loss and scores of every epoch
    backbone.running/      the result folder of the job while it runs; deleted at the end

It is an experiment of the method `centralized`, one epoch per round, on the training part of the source; clients,
partition and methods of the given experiment do not matter. Epoch e (from 0) of E has the learning rate

    η_e = η/2 · (1 + cos(π e / E)),   constant inside the epoch, or from η_e to 0 with train.schedule = linear

and, like every round, a new optimizer: momentum and the moments of AdamW start at zero.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tailorfl.data.federation import Federation
from tailorfl.errors import ConfigError, RunError
from tailorfl.evaluation.leading import leading
from tailorfl.models.skeleton import tensors_of
from tailorfl.models.weights import save_weights
from tailorfl.printable import quoted
from tailorfl.rounds.one_round import RoundResult
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import make_simulation
from tailorfl.runs.files import decode, encode, reporting, write_text
from tailorfl.runs.folders import ROOT
from tailorfl.runs.job import Job, Observer
from tailorfl.runs.job_loop import SIMULATED
from tailorfl.runs.runner import run_jobs
from tailorfl.runs.store import RunStore
from tailorfl.settings.eval import EvalConfig
from tailorfl.settings.execution import EngineConfig
from tailorfl.settings.experiment import ExperimentConfig, MethodConfig
from tailorfl.settings.loading import load
from tailorfl.settings.names import slug
from tailorfl.settings.train import RoundScheduleSettings


@dataclass(frozen=True)
class Epoch:
    """The results of one epoch; the score of a part without samples is NaN."""

    epoch: int
    """Counted from 1."""
    lr: float
    loss: float
    """Mean training loss over the epoch's steps."""
    val: float
    test: float
    seconds: float
    """Time since the previous epoch, including its evaluation."""


@dataclass(frozen=True)
class Pretrained:
    """A finished pretraining."""

    weights: Path
    report: Path
    metric: str
    """The metric of `val` and `test` of the epochs."""
    epochs: tuple[Epoch, ...]
    scalars: int
    """Number of scalars in all tensors of the file."""

    @property
    def seconds(self) -> float:
        """Seconds of all epochs together."""
        return sum(epoch.seconds for epoch in self.epochs)


class Watcher:
    """The hooks for a progress display. This class shows nothing; override the hooks that you need."""

    def started(self, name: str, epochs: int, metric: str, done: int) -> None:
        """Note that the training of `name` begins, with `done` epochs done before."""

    def epoch_done(self, epoch: Epoch) -> None:
        """Note that an epoch is done and stored, so that training can be resumed after it."""


def running(weights: Path) -> Path:
    """Return the folder of a running pretraining that will write `weights`."""
    return weights.with_suffix(".running")


def default_file(config: ExperimentConfig) -> Path:
    """Return the default file for the weights of an experiment's model."""
    return ROOT / f"{slug(config.data.name)}-{slug(config.model.name)}.safetensors"


def experiment_of(weights: Path) -> ExperimentConfig:
    """Return the settings of an interrupted pretraining.

    Raises:
        RunError: there is none.
    """
    file = running(weights) / "config.yaml"
    if not file.is_file():
        state = f"'{weights}' is finished" if weights.is_file() else f"'{weights}' was never started"
        raise RunError(f"no pretraining can be resumed: {state}; start one without --resume")
    return load(file)


def central(config: ExperimentConfig) -> ExperimentConfig:
    """Return an experiment whose only client holds all training samples of the source.

    Raises:
        ConfigError: pretraining cannot use some of the settings.
    """
    train = config.train
    for wrong, reason in (
        (config.variants, "pretraining trains one model, but the experiment has variants; leave them out"),
        (config.model.larger, "pretraining trains one model; leave out model.larger"),
        (
            train.steps is not None or train.epochs != 1,
            "pretraining counts epochs as rounds; set rounds=10 for 10 epochs, leave train.epochs at 1, and leave out "
            "train.steps",
        ),
        (
            train.round_schedule.kind != "constant",
            "pretraining has its own cosine schedule of the learning rate; leave out train.round_schedule",
        ),
        (
            config.data.excluded_clients,
            "pretraining trains on all samples, which it does not divide among clients, so it cannot leave any out; "
            "leave out data.excluded_clients, or give data without their samples",
        ),
        (train.dp, "pretraining uses public data, which need no privacy; leave out train.dp"),
    ):
        if wrong:
            raise ConfigError(reason)
    everything: dict[str, Any] = {
        "partition": "iid", "partition_options": {}, "clients": 1, "heldout_clients": 0,
        "public": None, "public_samples": None, "corruptions": None, "official_set": False, "shifts": {},
    }  # fmt: skip
    changes = {
        "data": config.data.model_copy(update=everything),
        "methods": (MethodConfig(name="centralized", label="centralized"),),
        "engine": EngineConfig(name="sequential"),
        "train": config.train.model_copy(update={"round_schedule": RoundScheduleSettings(kind="cosine")}),
        "eval": EvalConfig(every=1, sets=("val", "local"), final=("local",), predictions=0),
        "seeds": config.seeds[:1],
        "fraction": 1.0,
        "sampling": "uniform",
        "budget": "rounds",
        "checkpoint_every": 1,
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
    """Train, write the files and return their content; `config` is one that `central` returned.

    `source` is a `tailorfl.data.Source` instead of the configured one.

    Raises:
        TailorflError: see the message; finished epochs stay on disk and `resume` continues from there.
    """
    check_output(weights, resume, overwrite)
    pretraining = _Pretraining(weights, watch or Watcher())
    run_jobs(
        config,
        running(weights),
        way="resume" if resume else "new",
        overwrite=overwrite,
        observer=pretraining,
        source=source,
        backend=replace(SIMULATED, simulation=pretraining.simulation, done=pretraining.write),
    )
    shutil.rmtree(running(weights))
    report = decode(weights.with_suffix(".json").read_bytes())
    epochs = tuple(
        Epoch(**{name: _number(value) for name, value in epoch.items()}) for epoch in report["epochs"]
    )
    return Pretrained(weights, weights.with_suffix(".json"), report["metric"], epochs, report["scalars"])


def rate_of(epoch: int, epochs: int, lr: float) -> float:
    """Return η_e of an epoch counted from 0."""
    return lr / 2 * (1 + math.cos(math.pi * epoch / epochs))


def check_output(weights: Path, resume: bool, overwrite: bool) -> None:
    """Raise ConfigError or RunError if `weights` cannot be written, or may not be replaced."""
    if weights.suffix != ".safetensors":
        raise ConfigError(
            f"out is '{weights}', but weights are written as a .safetensors file; use a name with that ending"
        )
    if resume:
        experiment_of(weights)
        return
    begun = (running(weights) / "config.yaml").is_file()
    taken = [file for file in (weights, weights.with_suffix(".json")) if file.exists()]
    if (taken or begun) and not overwrite:
        problem = (
            f"is not finished; continue it with --resume {quoted(weights)}"
            if begun
            else "exists already; use it"
        )
        raise RunError(
            f"'{weights if begun else taken[0]}' {problem}, replace it with --overwrite, or choose another file with "
            "--out"
        )


class _Pretraining(Observer):
    """Reports the epochs of a job to a watcher, and writes the files at its end."""

    def __init__(self, weights: Path, watch: Watcher) -> None:
        self._weights, self._watch = weights, watch
        self._store: RunStore | None = None
        self._metric = ""

    def simulation(self, job: Job, federation: Federation, folder: Path | None) -> Simulation:
        """Return the simulation of the job, and set the metric for its data."""
        self._metric = leading(federation.source)
        return make_simulation(job, federation, folder)

    def job_started(self, job: Job, position: int, total: int, rounds: int, resumed_from: int) -> None:
        """Report that the epochs begin."""
        self._store = RunStore.open(running(self._weights) / job.folder, readonly=True)
        name = f"{job.config.model.name} on {self._store.config['source']}"
        self._watch.started(name, rounds, self._metric, resumed_from)

    def round_done(self, job: Job, done: RoundResult) -> None:
        """Report a finished epoch."""
        self._watch.epoch_done(self._epochs()[-1])

    def write(self, sim: Simulation) -> None:
        """Write the weights and the report of the job."""
        state, source, epochs = sim.global_model(), sim.given.source, self._epochs()
        assert state is not None
        assert self._store is not None
        with sim.model.whole.bound(state) as module, reporting(self._weights, "write"):
            tensors = tensors_of(module)
            save_weights(tensors, self._weights)
        report = {
            "weights": self._weights.name,
            "data": source.name,
            "samples": {part: int(sim.federation.sizes(part)[0]) for part in ("train", "val", "test")},
            "input_shape": list(source.input_shape),
            "outputs": source.outputs,
            "scalars": sum(tensor.numel() for tensor in tensors.values()),
            "metric": self._metric,
            "seconds": sum(epoch.seconds for epoch in epochs),
            "epochs": [asdict(epoch) for epoch in epochs],
            "settings": self._store.config["experiment"],
        }
        write_text(self._weights.with_suffix(".json"), encode(report, indent=1))

    def _epochs(self) -> list[Epoch]:
        """Return the epochs in the job's records."""
        assert self._store is not None
        settings, records = self._store.config["experiment"], self._store.rounds()
        seconds = records["seconds"].diff().fillna(records["seconds"])
        return [
            Epoch(
                int(record["round"]),
                rate_of(int(record["round"]) - 1, settings["rounds"], settings["train"]["lr"]),
                float(record["loss/train"]),
                float(record.get(f"global/val/{self._metric}", math.nan)),
                float(record.get(f"global/local/{self._metric}", math.nan)),
                float(spent),
            )
            for record, spent in zip(records.to_dict("records"), seconds, strict=True)
        ]


def _number(value: Any) -> Any:
    """Return a value as before its encoding as JSON, which has no NaN."""
    return math.nan if value is None else value
