"""Small cohorts, the engines to run them on, and plain torch training to compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tailorfl.core.client import Client
from tailorfl.data.source import Source
from tailorfl.engines.base import CohortTask, Engine
from tailorfl.engines.sequential import Sequential
from tailorfl.engines.vectorized import Vectorized
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.models.split import Split
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort, TrainConfig
from tailorfl.training.objective import LOSSES
from tailorfl.training.plan import Length
from tailorfl.training.update import Optimizer

SIZES = (7, 3, 12, 5)
ENGINES: dict[str, Engine] = {
    "sequential": Sequential(),
    "vectorized": Vectorized(64),
    "chunks of 3": Vectorized(3),
}
engines = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())


def source(samples: int, shape: tuple[int, ...] = (5,), classes: int = 3, seed: int = 0) -> Source:
    """Random features with random classes."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, *shape, generator=rng)
    return Source(
        "random", x, torch.randint(0, classes, (samples,), generator=rng), "classification", classes
    )


def regression(x: Tensor, y: Tensor) -> Source:
    """Given features and targets."""
    return Source("given", x, y.reshape(len(x), -1), "regression", 1)


def deal(sizes: Sequence[int], seed: int = 0) -> tuple[np.ndarray[Any, np.dtype[np.int64]], ...]:
    """Disjoint rows of a source, in no order."""
    order = np.random.default_rng(seed).permutation(sum(sizes)).astype(np.int64)
    return tuple(np.split(order, np.cumsum(sizes)[:-1]))


def model_of(name: str, data: Source, **options: Any) -> Model:
    return Model(lambda: build(name, data.input_shape, data.outputs, **options))


def cohort_of(
    model: Model,
    data: Source,
    sizes: Sequence[int] = SIZES,
    *,
    ids: Sequence[int] | None = None,
    split: Split | None = None,
    limit: int | None = None,
    round: int = 0,
    seed: int = 0,
    members: Sequence[Any] | None = None,
    val: Sequence[Any] | None = None,
    public: Source | None = None,
    **train: Any,
) -> Cohort:
    """A cohort of clients of the given sizes; `train` are settings of TrainConfig."""
    rows = deal(sizes) if members is None else tuple(members)
    return Cohort(
        ids=tuple(range(len(rows)) if ids is None else ids),
        members=rows,
        val=rows if val is None else tuple(val),
        source=data,
        model=model,
        split=split if split is not None else Split.of(model.module, personal="none"),
        loss=LOSSES[data.task],
        config=TrainConfig(**{"batch_size": 4, "lr": 0.1, **train}),
        seed=seed,
        round=round,
        public=public,
        limit=limit,
    )


def run(
    engine: Engine,
    cohort: Cohort,
    function: Any,
    states: TensorDict | None = None,
    received: TensorDict | None = None,
) -> TensorDict:
    """What `function(client, state, received)` returns for every client, stacked."""
    clients = len(cohort.ids)
    states = TensorDict({}, batch_size=[clients]) if states is None else states
    message = tree.empty() if received is None else received
    return engine.map(CohortTask(lambda *inputs: (function(*inputs),), cohort, message), states)[0]


def fit(engine: Engine, cohort: Cohort, start: TensorDict, **options: Any) -> TensorDict:
    """Every client's model after `client.fit(start, **grouped(**options))`."""
    given = grouped(**options)
    return run(engine, cohort, lambda client, _, received: client.fit(received, **given), received=start)


def grouped(**options: Any) -> dict[str, Any]:
    """Arguments of a fit from one flat list, which is shorter where many cases are listed."""
    names = {"optimizer": "kind"}
    of_length = {n: options.pop(n) for n in vars(Length()) if n in options}
    rule = ("lr", "optimizer", "schedule", "momentum", "weight_decay", "clip_each")
    of_rule = {
        names.get(n, n): options.pop(n)
        for n in rule
        if isinstance(options.get(n), Optimizer) is False and n in options
    }
    groups = {"length": Length(**of_length)} if of_length else {}
    return {**options, **groups, **({"optimizer": Optimizer(**of_rule)} if of_rule else {})}


def setting(
    norm: str = "none", dropout: float = 0.0, sizes: tuple[int, ...] = SIZES, **train: Any
) -> tuple[Cohort, TensorDict]:
    """Clients of an MLP with one hidden layer, and its initial state."""
    data = source(sum(sizes))
    model = model_of("mlp", data, hidden=(8,), norm=norm, dropout=dropout)
    return cohort_of(model, data, sizes, **train), model.init(1)


def alone(cohort: Cohort, position: int = 0) -> Client:
    """One client's handle, as the reference engine makes it."""
    return Client(cohort, torch.tensor(position))


def spread(start: TensorDict, clients: int, seed: int = 0, scale: float = 0.1) -> TensorDict:
    """A different model for every client: `start` with noise on its floating parameters, [clients, ...]."""
    rng = torch.Generator().manual_seed(seed)
    out = {}
    for name, value in tree.leaves(start):
        stacked = value.expand(clients, *value.shape).clone()
        if value.is_floating_point() and "running_var" not in name:
            stacked += scale * torch.randn(stacked.shape, generator=rng)
        out[name] = stacked
    return TensorDict(out, batch_size=[clients])


def batches(cohort: Cohort, position: int, **request: Any) -> list[tuple[Tensor, Tensor]]:
    """The (x, y) of every step of one client, in order."""
    asked = {
        "purpose": "train",
        "batch": cohort.config.batch_size,
        "epochs": 1,
        "steps": None,
        "first": 0,
        **request,
    }
    plan = cohort.plan((position,), **asked)
    out = []
    for rows, count in zip(plan.rows[0], plan.count[0], strict=True):
        at = torch.from_numpy(rows[:count])
        out.append((cohort.source.take(at), cohort.source.y[at]))
    return out


def module_at(cohort: Cohort, state: TensorDict) -> nn.Module:
    """A torch module of its own, in training mode, with the tensors of `state`."""
    module = cohort.model._factory()
    module.load_state_dict({n: t.clone() for n, t in tree.leaves(state)})
    return module.train()


def torch_sgd(
    cohort: Cohort,
    position: int,
    start: TensorDict,
    steps: Sequence[tuple[Tensor, Tensor]],
    *,
    train: Sequence[str] | None = None,
    lr: float = 0.1,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip: float | None = None,
    prox: tuple[float, TensorDict] | None = None,
) -> dict[str, Tensor]:
    """State after torch.optim.SGD on a module of its own over given batches; the penalty is in the loss."""
    module = module_at(cohort, start)
    parameters = {n: p for n, p in module.named_parameters() if train is None or n in train}
    optimizer = torch.optim.SGD(parameters.values(), lr=lr, momentum=momentum, weight_decay=weight_decay)
    for x, y in steps:
        optimizer.zero_grad()
        loss = cohort.loss(module(x), y, None)
        if prox is not None:
            lam, centre = prox
            loss = loss + 0.5 * lam * sum((p - centre[n]).square().sum() for n, p in parameters.items())
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters.values(), clip)
        optimizer.step()
    return {n: t.detach().clone() for n, t in module.state_dict().items()}


def assert_states(actual: TensorDict, expected: Mapping[str, Tensor], **tolerance: float) -> None:
    """Equal names, and equal tensors up to float rounding."""
    assert set(map(str, actual.keys())) == set(expected.keys())
    for name, value in tree.leaves(actual):
        torch.testing.assert_close(
            value, expected[name], msg=lambda m, n=name: f"{n}: {m}", **(tolerance or FLOAT)
        )


FLOAT = {"rtol": 1e-4, "atol": 1e-6}
