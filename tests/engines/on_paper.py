"""Runs on the device on paper and on the CPU: `python on_paper.py` prints what differs, line by line.

Every method, and what else calculates: other models, privacy, images, data on the host. With tests and tests/engines on
the path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from paper_device import PAPER, OnPaper
from torch import Tensor, nn

import tailorfl.engines.devices as devices
from methods.settings import NAMES
from methods.small import CLASSES, NEWCOMER, SIZES, TRAIN, everything, federation, personal, simulation
from tailorfl.data.federation import Federation
from tailorfl.engines.base import Engine, Inference
from tailorfl.engines.choice import Auto
from tailorfl.engines.in_process import Sequential, Vectorized
from tailorfl.models.functional import Model
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.sample_privacy import SampleDP

Make = Callable[[torch.device], Simulation]


def images() -> Federation:
    """The tiny federation with augmented uint8 images."""
    base = federation()
    low, high = base.source.x.min(), base.source.x.max()
    x = ((base.source.x - low) / (high - low) * 255).to(torch.uint8)
    return replace(base, source=replace(base.source, x=x, mean=(0.5,), std=(0.25,), augment="flip_crop"))


def frozen() -> Model:
    """A network of which the first layer is frozen."""
    return Model(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
        trainable="head",
    )


def of_method(name: str, engine: type[Any] = Vectorized, model: str = "dropout", **settings: Any) -> Make:
    """A run of a method; chunks of three clients where clients run together."""

    def make(device: torch.device) -> Simulation:
        chosen: Engine = Vectorized(3, device) if engine is Vectorized else Sequential(device)
        if engine is Auto:  # which measures on a cohort that no chunk holds
            chosen = Auto(Sequential(device), Vectorized(2, device), kind="vectorized")
        return simulation(name, model, chosen, **settings)

    return make


def with_frozen(device: torch.device) -> Simulation:
    """A run of a model with frozen tensors."""
    return Simulation(simulation("ditto").method, federation(), frozen(), TRAIN, engine=Vectorized(3, device))


def cases() -> Iterator[tuple[str, Make]]:
    """Name and run of every case."""
    yield from ((name, of_method(name)) for name in NAMES)
    yield from ((f"{name} in a loop", of_method(name, Sequential)) for name in ("ditto", "fedfomo", "perada"))
    yield from ((f"ditto on {m}", of_method("ditto", model=m)) for m in ("cnn2", "batch_norm", "group_norm"))
    yield "ditto, measured first", of_method("ditto", Auto)
    yield "frozen layers", with_frozen
    private = TrainConfig(
        epochs=1, batch_size=4, lr=0.05, dp=SampleDP(clip=1.0, noise=1.0, sampling="shuffle")
    )
    yield "private samples", of_method("ditto", model="mlp", train=private)
    adamw = TrainConfig(epochs=2, batch_size=4, lr=0.01, optimizer="adamw", schedule="linear", clip=1.0)
    yield "adamw on a falling rate", of_method("fedavg", model="mlp", train=adamw)
    yield "augmented images", of_method("ditto", data=images())
    devices.free_memory = lambda device: 0  # type: ignore[assignment]
    yield "data on the host", of_method("perada")
    yield "augmented images on the host", of_method("ditto", data=images())


def outcome(sim: Simulation) -> dict[str, Tensor]:
    """States after a round, deployable models, and what they answer."""
    sim.step()
    found = {**everything(sim), **{f"model/{n}": t for n, t in personal(sim, (0, NEWCOMER)).items()}}
    ids = (0, 1)
    ((_, models),) = sim.personal_models(ids)
    rows = [torch.arange(3), torch.arange(2)]
    asked = Inference(sim.model, models, sim.federation.source, rows)
    answers = sim.engine.predict(asked)
    found["all"] = torch.stack(sim.engine.predict(replace(asked, rows=torch.arange(4))))
    return {**found, **{f"answers/{i}": t for i, t in enumerate(answers)}}


def main() -> None:
    """Print a line for everything that differs, then how many cases ran."""
    torch.set_num_threads(1)
    # A CPU evaluates convolutions with channels last, whose sums are rounded in another order.
    Model.channels_last = lambda self, device: False  # type: ignore[method-assign]
    ran = 0
    for name, make in cases():
        ran += 1
        try:
            host, paper = outcome(make(torch.device("cpu"))), outcome(make(PAPER))
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}")
            continue
        for path, tensor in host.items():
            other = paper[path]
            if isinstance(other, OnPaper):
                print(f"{name}: {path} was left on the device")
            elif not torch.equal(tensor, other):
                print(f"{name}: {path} differs by {(tensor.double() - other.double()).abs().max():.3g}")
    print(f"{ran} cases of {len(SIZES)} clients")


if __name__ == "__main__":
    main()
