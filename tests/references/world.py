"""What a run of the library starts from and draws at random, as a reference's `Problem`.

This is the only bridge between the two: data, the batch plan and other key-derived draws, who is sampled, initial
states. Nothing that a method computes crosses it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn

from references.plain import Batch, Batches, Problem, Settings, State
from tailorfl.core.messages import table_of
from tailorfl.core.method import make_method
from tailorfl.core.server_training import ServerDistillation
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.choice import make_engine
from tailorfl.hashing import uniform
from tailorfl.models.functional import Model
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import tree
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.gradients import public_rows
from tailorfl.training.keys import generator

INPUTS, CLASSES = 6, 3
SIZES = (7, 3, 5, 4, 6)
"""Training samples of the clients; in batches of 3 they leave rests of 1, 0, 2, 1 and 0."""
VALIDATION = (2, 3, 1, 2, 0)
SERVERS = 6
"""Labelled samples of the server."""
PUBLIC = 7
SEED = 27
"""Of 5 clients it samples (0, 2, 3), then (0, 1, 2): some come again, one late, and one never."""


class Widened(nn.Module):
    """Sources hold float32; what follows computes in the dtype of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.get_default_dtype())


class LoRALinear(nn.Module):
    """W x + B A x with a bias; A and B are what adapts."""

    def __init__(self, inputs: int, outs: int, rank: int) -> None:
        super().__init__()
        self.lora_A = nn.Linear(inputs, rank, bias=False)
        self.lora_B = nn.Linear(rank, outs, bias=False)
        self.base = nn.Linear(inputs, outs)  # the last linear layer of the model, which its features go into

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.lora_B(self.lora_A(x))
        return out


def _mlp(*widths: int) -> nn.Module:
    parts: list[nn.Module] = [Widened()]
    for a, b in zip((INPUTS, *widths), (*widths, CLASSES), strict=True):
        parts += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*parts[:-1])


def _normed() -> nn.Module:
    return nn.Sequential(Widened(), nn.Linear(INPUTS, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))


def _lora() -> nn.Module:
    return nn.Sequential(Widened(), LoRALinear(INPUTS, 8, 2), nn.Tanh(), LoRALinear(8, CLASSES, 2))


MODELS: dict[str, Callable[[], Model]] = {
    "mlp": lambda: Model(lambda: _mlp(8)),
    "deep": lambda: Model(lambda: _mlp(8, 5)),
    "norm": lambda: Model(_normed),
    "lora": lambda: Model(_lora, trainable=["*lora_*"]),
    "half frozen": lambda: Model(lambda: _mlp(8, 5), trainable=["3.*", "5.*"]),
}


@cache
def model(name: str) -> Model:
    return MODELS[name]()


@cache
def federation() -> Federation:
    rng = np.random.default_rng(0)
    train, val, test, start = [], [], [], 0
    for size, more in zip(SIZES, VALIDATION, strict=True):
        ids = np.arange(start, start + size + more + 1, dtype=np.int64)
        train.append(ids[:size])
        val.append(ids[size : size + more])
        test.append(ids[size + more :])
        start += len(ids)
    held = np.arange(start, start + SERVERS)
    start += SERVERS
    x = torch.from_numpy(rng.normal(size=(start, INPUTS)).astype(np.float32))
    y = torch.from_numpy(rng.integers(0, CLASSES, start))
    source = Source("tiny", x, y, "classification", CLASSES)
    x = torch.from_numpy(rng.normal(size=(PUBLIC, INPUTS)).astype(np.float32))
    public = Source("public", x, torch.zeros(PUBLIC, dtype=torch.int64), "classification", CLASSES)
    names = tuple(f"client {i}" for i in range(len(SIZES)))
    return Federation(source, tuple(train), tuple(val), tuple(test), names, len(SIZES), held, public)


def simulation(
    method: str, options: Mapping[str, Any], model_name: str, engine: str, fraction: float, train: TrainConfig
) -> Simulation:
    return Simulation(
        make_method(method, dict(options)),
        federation(),
        model(model_name),
        train,
        engine=make_engine(engine, None),
        seed=SEED,
        fraction=fraction,
    )


def problem(sim: Simulation, rounds: int) -> Problem:
    """The problem that a run is about to solve; before its first round."""
    data, train = sim.federation, sim.train
    state = {str(n): t.clone() for n, t in tree.leaves(sim.init)}
    several = len(sim.groups) > 1
    private = [] if several else [flat(sim.states.get((i,)), 0) for i in range(sim.participants)]
    return Problem(
        module=copy.deepcopy(sim.model.module),
        init=state,
        rounds=[sim.sample(t) for t in range(rounds)],
        train=Settings(
            train.lr,
            train.momentum,
            train.weight_decay,
            train.clip,
            train.schedule == "linear",
            train.optimizer == "adamw",
        ),
        sizes=list(SIZES),
        batches=lambda *request, **more: _batches(sim, *request, **more),
        whole=lambda client, part: _weighed(
            sim,
            client,
            [_samples(data.source, torch.from_numpy(data.part(part)[client]))],  # type: ignore[arg-type]
        )[0],
        validation=_samples(data.source, torch.from_numpy(data.server)),
        public=data.public.x if data.public is not None else torch.empty(0),
        public_batches=lambda client, t, size, steps: list(
            public_rows(
                replace(sim.cohort((client,)), round=t).keys((0,), "train/public"), PUBLIC, size, steps
            )[0]
        ),
        distil_batches=lambda t, size, steps: list(
            ServerDistillation(steps=steps, batch_size=size)._batches(PUBLIC, sim.context, t)
        ),
        orders=lambda t, count, passes: [
            torch.from_numpy(rng.permutation(count))
            for rng in [generator(sim.context.seed, "prototypes", t)]
            for _ in range(passes)
        ],
        first_server=flat(sim.server),
        first_private=private,
    )


def several(sim: Simulation, rounds: int, assignment: tuple[str, ...]) -> Problem:
    """The problem of a run whose clients have several architectures."""
    base = problem(sim, rounds)
    siblings, private = {}, {}
    for group in sim.groups:
        context = group.context
        siblings[group.name] = replace(
            base,
            module=copy.deepcopy(group.model.module),
            init=flat(context.init),
            distil_batches=lambda t, size, steps, context=context: list(
                ServerDistillation(steps=steps, batch_size=size)._batches(PUBLIC, context, t)
            ),
        )
        for i in (i for i, kind in enumerate(assignment) if kind == group.name):
            private[i] = flat(group.states.get((i,)), 0)
    states = [private[i] for i in range(len(SIZES))]
    return replace(base, siblings=siblings, assignment=assignment, first_private=states)


def coins(seed: int, probability: float, rounds: int) -> list[bool]:
    """L2GD's shared coins, one more than there are rounds."""
    return [bool(generator(seed, "coin", t).random() < probability) for t in range(rounds + 1)]


def owners_sent(sim: Simulation, sampled: tuple[int, ...]) -> dict[int, list[int]]:
    """FedFomo: whose models every sampled client is about to be sent."""
    payloads, index = table_of(sim.method.broadcast(sim.server, sampled))  # type: ignore[arg-type]
    if index is None:
        return {i: [] for i in sampled}
    owner = payloads.get("owner")
    return {i: owner[rows].flatten().tolist() for i, rows in zip(sampled, index, strict=True)}


def gumbel(sim: Simulation, client: int, round: int, step: int, shape: tuple[int, ...]) -> Tensor:
    """The noise that layers draw at a step of a client's training, from uniform numbers by its key."""
    key = replace(sim.cohort((client,)), round=round).keys((0,), "train/noise")[0]
    drawn = torch.from_numpy(np.array(key, dtype=np.uint64).astype(np.int64)) + step
    u = uniform(drawn, 0, torch.Size(shape), torch.device("cpu"), torch.float64)
    return -torch.log(-torch.log(u))


def factors(sim: Simulation, client: int, round: int) -> dict[int, Tensor]:
    """What FLoRA's clients draw for A of each layer, uniform within 1/√in, from uniform numbers by a client's key."""
    key = replace(sim.cohort((client,)), round=round).keys((0,), "drawn: factors of LoRA")[0]
    signed = torch.from_numpy(np.array(key, dtype=np.uint64).astype(np.int64))
    drawn = {}
    for number, (k, wide) in enumerate(((1, INPUTS), (3, 8))):  # A is drawn before B, of each layer in turn
        u = uniform(signed, 2 * number, torch.Size((2, wide)), torch.device("cpu"), torch.float64)
        drawn[k] = (2 * u - 1) / wide**0.5
    return drawn


def flat(state: Any, client: int | None = None) -> State:
    """Tensors by path; of one client of a stack."""
    return {str(p): (t if client is None else t[client]).clone() for p, t in tree.leaves(state)}


def _samples(source: Source, rows: Tensor) -> Batch:
    return source.take(rows), source.y[rows]


def _weighed(sim: Simulation, client: int, batches: list[Batch]) -> list[Batch]:
    """Give the labels of batches what classes count for a client, in scikit-learn's words."""
    wanted, data = sim.train.class_weights, sim.federation
    if wanted != "none":
        alone = wanted == "client" and client >= 0
        rows = data.train[client] if alone else np.concatenate([*data.train[: data.num_clients]])
        labels = data.source.y[torch.from_numpy(rows)].numpy()
        there = np.unique(labels)
        counted = torch.ones(CLASSES, dtype=torch.float64)
        counted[there] = torch.from_numpy(compute_class_weight("balanced", classes=there, y=labels))
        for _, y in batches:
            y.class_weights = counted
    return batches


def _batches(
    sim: Simulation,
    client: int,
    round: int,
    epochs: int | None = None,
    steps: int | None = None,
    first: int = 0,
    purpose: str = "train",
    per_step: int = 1,
) -> Batches:
    """The batches of a client's steps, in the order of the library's plan; client -1 is the pooled one."""
    if epochs is None and steps is None:
        epochs, steps = sim.train.epochs, sim.train.steps
    cohort = replace(sim.cohort((max(client, 0),), own=client >= 0), round=round)
    plan = cohort.plan((0,), purpose, sim.train.batch_size, epochs, steps, first, per_step)
    rows = [
        torch.from_numpy(plan.rows[0, k, : plan.count[0, k]])
        for k in range(plan.rows.shape[1])
        if plan.count[0, k]
    ]
    found = _weighed(sim, client, [_samples(sim.federation.source, r) for r in rows])
    return [found[k : k + per_step] for k in range(0, len(found), per_step)]
