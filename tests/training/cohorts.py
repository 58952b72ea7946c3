"""Small cohorts, the engines to run them on, and plain torch training to compare with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from tailorfl.core.client import Client
from tailorfl.data.source import Source
from tailorfl.engines.base import CohortTask, Engine
from tailorfl.engines.in_process import Sequential, Vectorized
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
engines = pytest.mark.parametrize(
    "engine",
    [
        pytest.param(engine, id=name, marks=[pytest.mark.slow] if "chunks" in name else [])
        for name, engine in ENGINES.items()
    ],
)
"""Every engine; in chunks a test is slow, since cutting a cohort up is the subject of tests/engines."""


def in_turn(name: str, cases: Iterable[Any]) -> pytest.MarkDecorator:
    """Every case in every engine: quick in one client after another or in one for all in turn, else slow."""
    return pytest.mark.parametrize(
        ("engine", name),
        [
            pytest.param(engine, case, id=f"{which}-{case}", marks=[] if j == k % 2 else [pytest.mark.slow])
            for k, case in enumerate(cases)
            for j, (which, engine) in enumerate(ENGINES.items())
        ],
    )


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
    of_length = {n: options.pop(n) for n in vars(Length()) if n in options}
    of_rule = {n: options.pop(n) for n in vars(Optimizer()) if n in options}
    if isinstance(options.get("optimizer"), str):
        of_rule["kind"] = options.pop("optimizer")
    groups = {"length": Length(**of_length)} if of_length else {}
    return {**options, **groups, **({"optimizer": Optimizer(**of_rule)} if of_rule else {})}


def setting(
    norm: str = "none",
    dropout: float = 0.0,
    sizes: tuple[int, ...] = SIZES,
    name: str = "mlp",
    hidden: tuple[int, ...] = (8,),
    **options: Any,
) -> tuple[Cohort, TensorDict]:
    """Clients of an MLP or of a small convolutional network, and its initial state."""
    mlp = name == "mlp"
    data = source(sum(sizes), (5,) if mlp else (1, 8, 8))
    shape = {"hidden": hidden} if mlp else {}
    model = model_of(name, data, norm=norm, dropout=dropout, **shape)
    return cohort_of(model, data, sizes, **options), model.init(1)


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
    """The (x, y) of every step of one client, in order; without the limit of the cohort."""
    length = request if {"epochs", "steps"} & set(request) else vars(cohort.config)
    plan = replace(cohort, limit=None, plans={}).plan(
        (position,),
        request.get("purpose", "train"),
        request.get("batch_size", cohort.config.batch_size),
        None if length.get("steps") is not None else length["epochs"],
        length.get("steps"),
        request.get("first", 0),
    )
    rows = [torch.from_numpy(r[:n]) for r, n in zip(plan.rows[0], plan.count[0], strict=True)]
    return [(cohort.source.take(at), cohort.source.y[at]) for at in rows]


def module_at(cohort: Cohort, state: TensorDict) -> nn.Module:
    """A torch module of its own, in training mode, with the tensors of `state`."""
    module = cohort.model._factory()
    module.load_state_dict({n: t.clone() for n, t in tree.leaves(state)})
    return module.train()


def torch_fit(
    cohort: Cohort,
    position: int,
    start: TensorDict,
    *,
    train: Sequence[str] | None = None,
    prox: tuple[float, TensorDict] | None = None,
    repeat: int = 1,
    **options: Any,
) -> dict[str, Tensor]:
    """State after an optimizer of torch in a plain loop over the planned batches; the penalty is in the loss.

    Args:
        cohort: The client's, with the settings of the run.
        position: The client's place.
        start: The state that it starts from.
        train: Names of the parameters that are trained; None: all.
        prox: (λ, centre).
        repeat: Steps on each batch.
        options: Of the fit, in place of the run's settings.
    """
    steps = [batch for batch in batches(cohort, position, **options)[: cohort.limit] for _ in range(repeat)]
    given = {**vars(cohort.config), **options}
    module = module_at(cohort, start)
    parameters = {n: p for n, p in module.named_parameters() if train is None or n in train}
    of_sgd = {"momentum": given["momentum"]} if given["optimizer"] == "sgd" else {}
    rule = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[given["optimizer"]]
    optimizer = rule(parameters.values(), lr=given["lr"], weight_decay=given["weight_decay"], **of_sgd)
    falls = given["schedule"] == "linear"
    schedule = LambdaLR(optimizer, lambda k: 1 - k / max(len(steps), 1) if falls else 1.0)
    for x, y in steps:
        optimizer.zero_grad()
        loss = cohort.loss(module(x), y, None)
        if prox is not None:
            lam, centre = prox
            loss = loss + 0.5 * lam * sum((p - centre[n]).square().sum() for n, p in parameters.items())
        loss.backward()
        if given["clip"] is not None:
            nn.utils.clip_grad_norm_(parameters.values(), given["clip"])
        optimizer.step()
        schedule.step()
    return {n: t.detach().clone() for n, t in module.state_dict().items()}


def assert_trained(
    cohort: Cohort,
    actual: TensorDict,
    starts: TensorDict,
    tolerance: Mapping[str, float] | None = None,
    **options: Any,
) -> None:
    """Every client's model is that of `torch_fit` from the common start or its own; lists have a value a client."""
    for i in range(len(cohort.ids)):
        start = starts[i] if starts.batch_size else starts
        own = {n: v[i] if isinstance(v, list) else v for n, v in options.items()}
        assert_states(actual[i], torch_fit(cohort, i, start, **own), **(tolerance or FLOAT))


def autograd(cohort: Cohort, state: Mapping[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradient of the batch loss by ordinary autograd."""
    leaves = {n: state[n].detach().clone().requires_grad_() for n in cohort.model.parameters}
    cohort.loss(cohort.model({**dict(state.items()), **leaves}, x), y, None).backward()
    return {n: p.grad for n, p in leaves.items()}


def per_client(**values: Any) -> TensorDict:
    """States of clients from one entry a client of each value."""
    entries = {n: v if isinstance(v, TensorDict) else torch.as_tensor(v) for n, v in values.items()}
    return TensorDict(entries, batch_size=[len(next(iter(entries.values())))])


def assert_states(actual: TensorDict, expected: Mapping[str, Tensor], **tolerance: float) -> None:
    """Equal names, and equal tensors up to float rounding."""
    assert set(map(str, actual.keys())) == set(map(str, expected.keys()))
    for name, value in tree.leaves(actual):
        torch.testing.assert_close(
            value, expected[name], msg=lambda m, n=name: f"{n}: {m}", **(tolerance or FLOAT)
        )


FLOAT = {"rtol": 1e-4, "atol": 1e-6}
