"""Networks that engines cannot run as they run others, and everything that a run has to show."""

from __future__ import annotations

from torch import Tensor, nn

from methods.small import CLASSES, NEWCOMER, SIZES, everything, personal
from tailorfl.rounds.simulation import Simulation


class Linear(nn.Module):
    """A layer on images of 64 numbers."""

    width = 64

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(self.width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.flatten(1))
        return out


class Undecided(Linear):
    """Looks at a number to decide what to compute, which `vmap` cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self.head.weight.sum().item() > 0 else 1.0)


class Broken(Linear):
    """Does not fit the data."""

    width = 63


def outcome(sim: Simulation) -> dict[str, Tensor]:
    """States, deployable models (of the newcomer too) and the newcomer's model after two steps."""
    ((_, adapted),) = sim.newcomer_models((NEWCOMER,), 2)
    models = personal(sim, (*range(len(SIZES)), NEWCOMER))
    return {
        **everything(sim),
        **{f"personal/{n}": t for n, t in models.items()},
        **{f"adapted/{n}": t for n, t in adapted.items()},
    }
