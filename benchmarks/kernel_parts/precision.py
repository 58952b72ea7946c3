"""float32 against bfloat16: single operations of the engines, and whole rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from kernel_parts.operations import CONVOLUTIONS, convolution_backward
from kernel_parts.rounds import BERT, RESNETS, federated
from kernel_parts.timing import BATCH, RATE, Table, in_turn
from torch.nn import functional as F

from tailorfl.core.method import make_method
from tailorfl.engines.choice import make_engine
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PRODUCTS = {
    "a large product": (1024, 1024, 1024),
    "linear 784×200": (BATCH, 784, 200),
    "its weight's gradient": (200, BATCH, 784),
    "linear 3136×128": (BATCH, 3136, 128),
    "LoRA: frozen 384×384, 640 tokens": (640, 384, 384),
    "LoRA: A, rank 8": (640, 384, 8),
    "LoRA: B": (640, 8, 384),
}
"""Rows, what is summed over, columns."""
RESNET20 = {"16→16 on 32×32": (16, 16, 32), "32→32 on 16×16": (32, 32, 16), "64→64 on 8×8": (64, 64, 8)}
"""Channels given and made, and the side of the images, of ResNet-20."""

Made = Callable[[torch.dtype], Callable[[], object]]


def operations() -> Table:
    """Return microseconds of operations in both types; what goes into bfloat16 is rounded before the clock starts."""
    return [_row(name, made) for name, made in _operations()]


def _row(name: str, made: Made) -> dict[str, Any]:
    found = in_turn({kind: made(dtype) for kind, dtype in DTYPES.items()})
    each = {f"{kind} µs": 1e6 * seconds for kind, seconds in found.items()}
    return {"operation": name, **each, "times as fast": found["float32"] / found["bfloat16"]}


def _operations() -> Iterator[tuple[str, Made]]:
    for name, (rows, inner, columns) in PRODUCTS.items():
        yield name, _product(rows, inner, columns)
    for last, table in ((True, CONVOLUTIONS), (False, RESNET20)):
        for name, sizes in table.items():
            layout = "channels last" if last else "NCHW"
            yield f"{name}, {layout}", _convolution(*sizes, last)
            yield f"{name}, {layout}, backward", _backward(*sizes, last)
    yield "ReLU of 10 × 32 images of 28×28", lambda dtype: _of(torch.relu, (BATCH, 32, 28, 28), dtype)
    yield "group norm of 10 × 16 images of 32×32", lambda dtype: _of(_norm, (BATCH, 16, 32, 32), dtype)
    yield "rounding 200×784 numbers", lambda dtype: _rounding(dtype)


def _product(rows: int, inner: int, columns: int) -> Made:
    def made(dtype: torch.dtype) -> Callable[[], object]:
        a, b = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
        return lambda: a @ b.T

    return made


def _images(
    given: int, made: int, side: int, last: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    how = torch.channels_last if last else torch.contiguous_format
    x, weight = torch.randn(BATCH, given, side, side), torch.randn(made, given, 3, 3)
    return x.to(dtype, memory_format=how), weight.to(dtype, memory_format=how)


def _convolution(given: int, made: int, side: int, last: bool) -> Made:
    def way(dtype: torch.dtype) -> Callable[[], object]:
        x, weight = _images(given, made, side, last, dtype)
        return lambda: F.conv2d(x, weight, padding=1)

    return way


def _backward(given: int, made: int, side: int, last: bool) -> Made:
    """Both gradients, or that of the weight alone where the input is the samples."""

    def way(dtype: torch.dtype) -> Callable[[], object]:
        x, weight = _images(given, made, side, last, dtype)
        g = torch.randn_like(F.conv2d(x, weight, padding=1))
        how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [given > 3, True, False])
        return lambda: convolution_backward(g, x, weight, None, *how)

    return way


def _of(
    operation: Callable[[torch.Tensor], object], shape: tuple[int, ...], dtype: torch.dtype
) -> Callable[[], object]:
    x = torch.randn(shape).to(dtype)
    return lambda: operation(x)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return F.group_norm(x, 2)


def _rounding(dtype: torch.dtype) -> Callable[[], object]:
    """What a weight costs beside its product; of float32 a copy."""
    weight = torch.randn(200, 784)
    return lambda: weight.to(dtype, copy=True)


def rounds() -> Table:
    """Return seconds of FedAvg's round in both precisions, by each engine; 60 samples a client."""
    table: Table = []
    for title, model, x, classes, clients, batch in _works():
        data = federated(x, classes, clients)
        config = TrainConfig(epochs=1, batch_size=batch, lr=RATE)
        for engine in ("sequential", "vectorized"):
            sims = {
                kind: Simulation(
                    make_method("fedavg"), data, model, config, engine=make_engine(engine, precision=kind)
                )
                for kind in DTYPES
            }
            found = in_turn({kind: sim.step for kind, sim in sims.items()}, repeat=5, least=0.05)
            seconds = {f"{kind} s": taken for kind, taken in found.items()}
            ratio = found["float32"] / found["bfloat16"]
            table.append({"work": title, "engine": engine, **seconds, "times as fast": ratio})
    return table


def _works() -> Iterator[tuple[str, Model, torch.Tensor, int, int, int]]:
    """(title, model, samples, classes, clients, batch)"""
    networks: dict[str, tuple[dict[str, Any], tuple[int, ...], int, tuple[int, ...]]] = {
        "mlp": ({"hidden": (200,)}, (1, 28, 28), 20, (10, 60)),
        "cnn2": ({}, (1, 28, 28), 8, (10, 60)),
        "resnet20": (RESNETS["resnet20"], (3, 32, 32), 4, (10, 60)),
    }
    for name, (options, shape, clients, batches) in networks.items():
        for batch in batches:
            model = Model(lambda name=name, options=options, shape=shape: build(name, shape, 10, **options))  # type: ignore[misc]
            yield (
                f"{name}, batch {batch}, {clients} clients",
                model,
                torch.randn(clients * 60, *shape),
                10,
                clients,
                batch,
            )
    for clients, batch, length in ((4, 10, 64), (8, 4, 32)):
        options = {**BERT, "lora": 8, "lora_dropout": 0.0, "pooling": "mean"}
        model = Model(lambda length=length, options=options: build("bert", (length,), 2, **options))  # type: ignore[misc]
        tokens = torch.randint(1000, 30000, (clients * batch, length))
        yield f"LoRA, batch {batch} × {length} tokens, {clients} clients", model, tokens, 2, clients, batch
