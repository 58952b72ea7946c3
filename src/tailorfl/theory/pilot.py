"""The pilot: every client trains two models on disjoint halves of its samples; the advisor's only training.

The model and the samples decide between two modes:

    optimum   outputs are affine in the parameters (linear, logistic, Cox) and halves have at least 1.5 samples
              for each direction that the data determine: Newton's method, to the optimum, on several halvings
    training  anything else: a few rounds of federated averaging to a common reference, then local training of
              both halves from there with the experiment's own settings. R and V then depend on how far that
              much training takes models from the reference, but both alike: their ratio (and with it the
              regime and lam) depends on it much less
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.data.federation import Federation
from tailorfl.errors import DataError, DivergenceError
from tailorfl.partition.rows import Ints
from tailorfl.theory.objective import Objective
from tailorfl.theory.spread import Floats
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort, TrainConfig
from tailorfl.training.keys import derive

Mode = Literal["optimum", "training"]
Watch = Callable[[str], None]

DENSE = 256
"""Largest number of weights for which the whole Hessian is computed, for Newton's method."""
NEEDED = 1.5
"""Samples that a half needs for each determined direction."""
SHARE = 0.8
"""Share of the clients that must have that many samples for mode "optimum"."""
SPLITS = 4
SCALARS = 2.5e8
"""Largest total number of weights in the models that are held at once."""


@dataclass(frozen=True, eq=False)
class Pilot:
    """Results of training on halves of the clients' data; N clients, d weights."""

    mode: Mode
    objective: Objective
    clients: Ints
    """`[N]` numbers of the clients that took part."""
    rows: tuple[Ints, ...]
    """Training rows of each client."""
    gram: Floats
    """`[N, N]` products `<a_i, b_j>` of models from first and second halves, relative to the reference."""
    gaps: Floats
    """`[N]` squared distances `||a_i - b_i||^2`, mean over the halvings."""
    curved: Floats
    """`[N]` the same in the metric of the curvature, `(a_i - b_i)' H_i (a_i - b_i)`."""
    halves: tuple[tuple[Ints, Ints], ...]
    """Rows of the halves in the last halving."""
    models: tuple[Tensor, Tensor]
    """`[N, d]` models of these halves."""
    reference: Tensor
    """`[d]` mean of all models."""
    rank: int
    """Directions that the data determine; d in training mode."""
    travelled: float
    """Squared distance from the initial model to the reference."""
    seconds: float = 0.0

    @property
    def sizes(self) -> Ints:
        """`[N]` training samples of every client."""
        return np.array([len(rows) for rows in self.rows], dtype=np.int64)


def run_pilot(
    federation: Federation,
    objective: Objective,
    train: TrainConfig,
    *,
    clients: int = 30,
    rounds: int = 10,
    seed: int = 0,
    watch: Watch = lambda _: None,
) -> Pilot:
    """Train on halves of the data of at most `clients` clients and return the results.

    Args:
        federation: only the training samples of its training clients are used.
        objective: the loss; its `state` is the initial model of all clients.
        train: local training; privacy is switched off, so run a pilot only where the data may be read in plain.
        clients: largest number of clients, drawn by `seed`.
        rounds: rounds of averaging before the halves are trained (training mode only).
        seed: seed of the draw of clients, halves and batches.
        watch: called with a description of each stage.

    Raises:
        DataError: fewer than two clients with at least two samples, or samples that are not finite.
        DivergenceError: training gives models that are not finite.
    """
    begin = time.perf_counter()
    usable = [i for i in federation.members if len(federation.train[i]) >= 2]
    if len(usable) < 2:
        raise DataError(
            "advice needs at least 2 clients with at least 2 training samples each, because it compares halves of "
            f"their data; only {len(usable)} of {len(federation.members)} clients have them"
        )
    fits = max(2, min(clients, len(usable), int(SCALARS // (2 * objective.size))))
    order = np.argsort(derive(derive(seed, "advisor clients"), np.array(usable, dtype=np.uint64)))
    chosen = np.sort(np.array(usable, dtype=np.int64)[order[:fits]])
    for client in chosen:
        objective.samples(federation.train[client])
    pilot = _optimum(federation, objective, chosen, seed, watch) if objective.affine else None
    if pilot is None:
        pilot = _training(federation, objective, train, chosen, rounds, seed, watch)
    return replace(pilot, seconds=time.perf_counter() - begin)


def halve(rows: Sequence[Ints], strata: Ints, seed: int) -> tuple[tuple[Ints, Ints], ...]:
    """Return every client's rows in two halves with similar classes; an odd row goes to the first."""
    out = []
    for position, client_rows in enumerate(rows):
        rng = np.random.default_rng([seed, position])
        mixed = rng.permutation(client_rows)
        mixed = mixed[np.argsort(strata[mixed], kind="stable")]
        out.append((np.sort(mixed[0::2]), np.sort(mixed[1::2])))
    return tuple(out)


def _optimum(
    federation: Federation, objective: Objective, chosen: Ints, seed: int, watch: Watch
) -> Pilot | None:
    """Return the pilot by Newton's method, or None if optima do not exist or samples are too few to determine them."""
    if objective.size > DENSE:
        return None
    exact = replace(objective, dtype=torch.float64)
    start = exact.flat(objective.state)
    everything = np.concatenate([federation.train[client] for client in chosen])
    rank = int(torch.linalg.matrix_rank(exact.hessian(start, everything)))
    strata = federation.source.strata.numpy()
    clients = np.array(
        [c for c in chosen if len(federation.train[c]) // 2 >= NEEDED * rank + 1], dtype=np.int64
    )
    if len(clients) < max(2, SHARE * len(chosen)):
        return None
    rows = tuple(federation.train[client] for client in clients)
    gram, gaps, curved = np.zeros((len(clients),) * 2), np.zeros(len(clients)), np.zeros(len(clients))
    centre = _minimum(exact, start, everything)
    if centre is None:
        return None
    for number in range(SPLITS):
        watch(f"halving {number + 1} of {SPLITS}, {len(clients)} clients to their optimum")
        halves = halve(rows, strata, seed * SPLITS + number)
        optima = [[_minimum(exact, centre, part) for part in pair] for pair in halves]
        if any(model is None for pair in optima for model in pair):
            return None
        a, b = (torch.stack([pair[side] for pair in optima if pair[side] is not None]) for side in (0, 1))  # type: ignore[misc]
        gram += _products(a - centre, b - centre) / SPLITS
        gaps += (a - b).square().sum(1).numpy() / SPLITS
        curved += _curved(exact, centre, rows, a - b) / SPLITS
    reference = (a.mean(0) + b.mean(0)) / 2
    travelled = float((reference - start).square().sum())
    return Pilot(
        "optimum", exact, clients, rows, gram, gaps, curved, halves, (a, b), reference, rank, travelled
    )


def _minimum(objective: Objective, start: Tensor, rows: Ints) -> Tensor | None:
    """Return the point where the gradient vanishes, by Newton's method with step halving; None without convergence."""
    theta, data = start, objective.samples(rows)
    inverse: Tensor | None = None
    for _ in range(30):
        gradient, value = objective.gradient(theta, rows), objective.value(theta, *data)
        # the last step's curvature is good enough to detect convergence
        if inverse is not None and float(gradient @ inverse @ gradient) <= 1e-16 * (1 + abs(float(value))):
            return theta
        # the shortest step, which does not move along directions that no sample determines
        inverse = torch.linalg.pinv(objective.hessian(theta, rows), rtol=1e-10)
        step = inverse @ gradient
        decrease = float(gradient @ step)
        if not np.isfinite(decrease):
            return None
        size = 1.0
        while (
            size > 1e-4 and not objective.value(theta - size * step, *data) <= value - 1e-4 * size * decrease
        ):
            size /= 2
        theta = theta - size * step
    return None


def _training(
    federation: Federation,
    objective: Objective,
    train: TrainConfig,
    chosen: Ints,
    rounds: int,
    seed: int,
    watch: Watch,
) -> Pilot:
    """Return the pilot by local training from a common reference."""
    rows = tuple(federation.train[client] for client in chosen)
    config = replace(train, dp=None)
    start, state = objective.flat(objective.state), objective.state
    weights = torch.tensor([len(client_rows) for client_rows in rows], dtype=torch.float32)
    for number in range(rounds):
        watch(f"round {number + 1} of {rounds} to a common reference, {len(rows)} clients")
        trained = _train(federation, objective, config, state, rows, chosen, seed, number)
        stacked = {
            name: torch.stack([model[name] for model in map(tree.tensors, trained)])
            for name in tree.tensors(state)
        }
        state = tree.weighted_mean(TensorDict(stacked), weights / weights.sum())
    centre = objective.flat(state)
    halves = halve(rows, federation.source.strata.numpy(), seed)
    sides = []
    for side in (0, 1):
        watch(f"half {side + 1} of 2, {len(rows)} clients")
        parts = [pair[side] for pair in halves]
        trained = _train(federation, objective, config, state, parts, chosen, seed, rounds + side)
        sides.append(torch.stack([objective.flat(model) for model in trained]))
    a, b = sides
    at_centre = replace(objective, state=state)
    curved = np.maximum(_curved(at_centre, centre, rows, a - b), 0.0)
    gaps = (a - b).double().square().sum(1).numpy()
    reference = (a.mean(0) + b.mean(0)) / 2
    travelled = float((reference - start).square().sum())
    gram = _products(a - centre, b - centre)
    size = objective.size
    return Pilot(
        "training", at_centre, chosen, rows, gram, gaps, curved, halves, (a, b), reference, size, travelled
    )


def _train(
    federation: Federation,
    objective: Objective,
    config: TrainConfig,
    state: TensorDict,
    rows: Sequence[Ints],
    clients: Ints,
    seed: int,
    number: int,
) -> list[TensorDict]:
    """Return every client's model after one local training on `rows`, from `state`."""
    cohort = Cohort(
        ids=tuple(int(client) for client in clients),
        members=tuple(rows),
        val=tuple(np.empty(0, dtype=np.int64) for _ in rows),
        source=federation.source,
        model=objective.model,
        split=objective.model.split(),
        loss=objective.loss,
        config=config,
        seed=seed,
        round=number,
    )
    out = []
    for position, client in enumerate(clients):
        model = Client(cohort, torch.tensor(position)).fit(state, purpose="advisor")
        if not all(torch.isfinite(tensor).all() for tensor in tree.tensors(model).values()):
            raise DivergenceError(
                f"the pilot's training diverged on client '{federation.names[client]}'; try a smaller train.lr"
            )
        out.append(model)
    return out


def _products(a: Tensor, b: Tensor) -> Floats:
    return np.asarray((a.double() @ b.double().T).numpy())


def _curved(objective: Objective, at: Tensor, rows: Sequence[Ints], gaps: Tensor) -> Floats:
    """Return the squared length of every client's gap in the metric of its own curvature, `[N]`."""
    lengths = [
        float(gap @ objective.along(at, client_rows, gap))
        for client_rows, gap in zip(rows, gaps, strict=True)
    ]
    return np.array(lengths)
