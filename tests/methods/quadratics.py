"""Quadratic federations.

F_i(w) = ½ (w − c_i)' H_i (w − c_i), their known optima, and the papers' steps in float64.

Client i holds the same rows COPIES[i] times. That leaves F_i (a mean) as it is and makes the sample
weights p_i unequal, so a method that weights wrongly goes elsewhere.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from methods.settings import LAM, Kind, Limit, make, row
from tailorfl.core.method import Method, make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.data.synthetic import closed_form, pooled_optimum, synthetic_quadratic
from tailorfl.engines.choice import make_engine
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig

Floats = NDArray[np.float64]
CLIENTS, DIM, MU, L = 6, 3, 1.0, 3.0
COPIES = (1, 2, 1, 3, 1, 12)
LR = 0.25
"""1/4: contracts the local problem by ½ … ¼ a step, and the proximal one with λ = 2 by ¼."""
WEIGHT = "head.weight"


@cache
def quadratic_federation() -> Federation:
    """Six clients; client i has COPIES[i] copies of its rows."""
    source = synthetic_quadratic(CLIENTS, DIM, DIM, heterogeneity=2.0, condition=L / MU, seed=0)
    owner, tested = source.groups["client"].numpy(), source.test
    assert tested is not None
    train = tuple(np.tile(np.flatnonzero((owner == i) & ~tested.numpy()), COPIES[i]) for i in range(CLIENTS))
    test = tuple(np.flatnonzero((owner == i) & tested.numpy()) for i in range(CLIENTS))
    empty = (np.empty(0, dtype=np.int64),) * CLIENTS
    return Federation(source, train, empty, test, tuple(map(str, range(CLIENTS))), CLIENTS)


def curvature() -> tuple[torch.Tensor, torch.Tensor]:
    """(H [clients, dim, dim], c [clients, dim]) in float64."""
    info = quadratic_federation().source.info
    return info["H"], info["c"]


def shares(weights: str) -> torch.Tensor:
    """p_i for a weighting, [clients] float64."""
    sizes = torch.from_numpy(quadratic_federation().sizes()).double()
    counts = sizes if weights == "samples" else torch.ones_like(sizes)
    return counts / counts.sum()


def optimum(kind: Kind, p: torch.Tensor, lam: float = LAM) -> tuple[Floats | None, Floats]:
    """(global model, personal models) at which a method of this kind stands still; None where it has none.

    local           v_i = c_i
    local_and_mean  v_i = c_i, w = Σ p_i c_i
    pooled          w minimises Σ p F; no personal model, or the shared one
    pooled_and_local  w as pooled; the deployed models are c_i
    coupled         the joint minimiser over (w, v); coupled_global: its w alone
    ditto           w as pooled, v_i = (H_i + λ)⁻¹ (H_i c_i + λ w)
    """
    H, c = curvature()
    pooled = pooled_optimum(H, c, p).numpy()
    w, v = closed_form(H, c, p, lam)
    pull = torch.einsum("kij,kj->ki", H, c) + lam * torch.from_numpy(pooled)
    tied = torch.linalg.solve(H + lam * torch.eye(DIM), pull)
    optima: dict[Kind, tuple[Floats | None, Floats]] = {
        "local": (None, c.numpy()),
        "local_and_mean": ((p @ c).numpy(), c.numpy()),
        "pooled": (pooled, np.broadcast_to(pooled, c.shape)),
        "pooled_and_local": (pooled, c.numpy()),
        "coupled": (w.numpy(), v.numpy()),
        "coupled_global": (w.numpy(), np.broadcast_to(w.numpy(), c.shape)),
        "ditto": (pooled, tied.numpy()),
    }
    return optima[kind]


def quadratic_simulation(
    method: str | Method,
    steps: int = 1,
    *,
    engine: str = "vectorized",
    lr: float = LR,
    **settings: Any,
) -> Simulation:
    """A run with full batches and `steps` local steps."""
    return Simulation(
        make(method) if isinstance(method, str) else method,
        quadratic_federation(),
        Model(lambda: build("linear", (DIM,), 1)),
        TrainConfig(epochs=1, steps=steps, batch_size=0, lr=lr),
        engine=make_engine(engine),
        **settings,
    )


def limit_simulation(name: str, **settings: Any) -> tuple[Simulation, Limit]:
    """A run of a method with the settings under which its optimum is known."""
    limit = row(name).limit
    assert limit is not None
    return quadratic_simulation(make_method(name, dict(limit.options)), limit.steps, **settings), limit


def global_weight(sim: Simulation) -> Floats:
    """The global model as a vector, [dim] float64."""
    found = sim.global_model()
    assert found is not None
    weight: torch.Tensor = found[WEIGHT]
    return weight[0].double().numpy()


def personal_weights(sim: Simulation) -> Floats:
    """The deployable models, [clients, dim] float64."""
    ((_, models),) = sim.personal_models(range(CLIENTS))
    weight: torch.Tensor = models[WEIGHT]
    return weight[:, 0].double().numpy()


def states(sim: Simulation, *path: str) -> Floats:
    """An entry of the private states, [clients, dim] float64."""
    found = sim.states.get(range(CLIENTS)).get((*path, WEIGHT))
    return found[:, 0].double().numpy()


class Reference:
    """The local problems in plain float64 numpy, and gradient descent on them."""

    def __init__(self) -> None:
        H, c = curvature()
        self.H, self.c = H.numpy(), c.numpy()

    def grad(self, i: int, w: Floats) -> Floats:
        """∇F_i(w)."""
        out: Floats = self.H[i] @ (w - self.c[i])
        return out

    def descend(self, i: int, w: Floats, steps: int, lr: float = LR) -> Floats:
        """w after `steps` steps along ∇F_i(w)."""
        for _ in range(steps):
            w = w - lr * self.grad(i, w)
        return w


def one_weight(targets: list[float], method: str, lr: float = 0.2, **options: Any) -> Simulation:
    """Clients of one sample each, all weighing the same: F_i(w) = ½ (w − target_i)²."""
    rows = tuple(np.array([k]) for k in range(len(targets)))
    source = Source("targets", torch.ones(len(targets), 1), torch.tensor(targets)[:, None], "regression", 1)
    return Simulation(
        make_method(method, options),
        Federation(source, rows, rows, rows, tuple(map(str, range(len(targets)))), len(targets)),
        Model(lambda: build("linear", (1,), 1)),
        TrainConfig(batch_size=0, epochs=1, lr=lr),
        engine=make_engine("vectorized"),
    )
