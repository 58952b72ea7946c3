"""Whether ensemble distillation can be tested at a scale: the average of the clients' models beside their ensemble.

    python studies/perada_kd_gate.py runs/perada_kd_gate [--scale small] [KEY=VALUE ...]

trains a start by FedAvg (`start.safetensors`) and then the recipe perada_kd_gate from it, and writes gate.csv and
gate.md: for each E and round, on everybody's validation samples,

    average    accuracy of the mean g of the clients' models
    ensemble   accuracy of softmax(mean of the clients' logits), which is what distillation teaches
    headroom   ensemble − average
    KL         mean of KL(ensemble ‖ average)
    Φ          mean of ‖g(x) − (1/M) Σ_m h_m(x)‖₁ with probabilities, as in PerAda's theory
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.messages import Replies
from tailorfl.models.functional import Model
from tailorfl.models.weights import save_weights
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.job import Job
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.loading import expand, load

START_ROUNDS = {"smoke": 1, "small": 30, "paper": 30}
POINT = 0.01
PIECE = 500
"""Samples that a model sees at once."""


@dataclass(frozen=True)
class Gap:
    """What lies between an average and its ensemble."""

    average: float
    ensemble: float
    headroom: float
    kl: float
    phi: float


def gap(model: Model, mean: TensorDict, models: TensorDict, x: Tensor, y: Tensor) -> Gap:
    """Return the gap of `mean` and its `models` [clients, ...] on samples [n, ...] of classes [n]."""
    with torch.no_grad():
        own = torch.cat([model(mean, part) for part in torch.split(x, PIECE)])
        each = torch.stack(
            [torch.cat([model(one, part) for part in torch.split(x, PIECE)]) for one in models.unbind(0)]
        )
    teacher, student = each.mean(0).log_softmax(-1), own.log_softmax(-1)
    average = float((own.argmax(-1) == y).double().mean())
    ensemble = float((teacher.argmax(-1) == y).double().mean())
    kl = float((teacher.exp() * (teacher - student)).sum(-1).mean())
    phi = float((student.exp() - each.softmax(-1).mean(0)).abs().sum(-1).mean())
    return Gap(average, ensemble, ensemble - average, kl, phi)


class Watched(Simulation):
    """A simulation that remembers the models of which it made the last average."""

    teachers: TensorDict

    def aggregated(self, server: TensorDict, replies: Replies) -> TensorDict:
        """Aggregate, and keep the models."""
        self.teachers = replies.stack
        return super().aggregated(server, replies)


def start(config: ExperimentConfig, seed: int, folder: Path) -> Path:
    """Train FedAvg's model on the recipe's data; return the file of its weights."""
    plain = load(
        {**config.to_dict(), "variants": {}},
        {"methods": ["fedavg"], "train": {"epochs": 1}, "rounds": START_ROUNDS[config.scale or "small"]},
    )
    job = Job(plain, plain.methods[0], seed)
    sim = make_simulation(job, make_federation(plain, seed))
    for _ in range(job.rounds):
        sim.step()
    model = sim.global_model()
    assert model is not None
    return save_weights(model, folder / "start.safetensors")


def watched(config: ExperimentConfig, seed: int) -> Iterator[Gap]:
    """Yield the gap after each round of an experiment's only line."""
    job = Job(config, config.methods[0], seed)
    federation = make_federation(config, seed)
    sim = make_simulation(job, federation, None, Watched)
    rows = torch.from_numpy(federation.part("val").flat())
    x, y = federation.source.take(rows), federation.source.targets(rows)
    for _ in range(job.rounds):
        sim.step()
        mean = sim.global_model()
        assert mean is not None
        yield gap(sim.model, mean, sim.teachers, x, y)


def text(frame: pd.DataFrame) -> str:
    """Return gate.md of the rows of all rounds."""
    last = frame[frame["round"] == frame["round"].max()].groupby("E", sort=False).mean(numeric_only=True)
    best = float(last["headroom"].max())
    said = (
        "so there is something to distil"
        if best >= POINT
        else "below a point, so distillation cannot be tested here"
    )
    lines = ["| E | average | ensemble | headroom | KL | Φ |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for name, row in last.iterrows():
        shares = " | ".join(f"{100 * row[key]:.2f}" for key in ("average", "ensemble", "headroom"))
        lines.append(f"| {name} | {shares} | {row['kl']:.4f} | {row['phi']:.4f} |")
    head = "# Is there anything to distil?\n\nAfter the last round, on everybody's validation images, in %:\n"
    return "\n".join([head, *lines, f"\nThe largest headroom is {100 * best:.2f} points, {said}.", ""])


def main() -> None:
    """Train, measure and write."""
    parser = argparse.ArgumentParser(description="the gate of distillation")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scale", choices=sorted(START_ROUNDS), default="small")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    config = load("perada_kd_gate", given.settings, scale=given.scale)
    torch.set_num_threads(config.threads)
    given.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in config.seeds:
        weights = start(config, seed, given.folder)
        for name, one in expand(config).items():
            begun = load(one.to_dict(), {"model": {**one.model.model_dump(), "weights": str(weights)}})
            for number, found in enumerate(watched(begun, seed), start=1):
                rows.append({"E": name, "seed": seed, "round": number, **asdict(found)})
                print(rows[-1], flush=True)
                frame = pd.DataFrame(rows)
                frame.to_csv(given.folder / "gate.csv", index=False, float_format="%.5f", lineterminator="\n")
    (given.folder / "gate.md").write_text(text(frame), encoding="utf-8")


if __name__ == "__main__":
    main()
