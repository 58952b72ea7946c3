"""A federation in numbers before anything trains: sizes and classes of clients, and how different clients are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailorfl.data.federation import PARTS, Federation
from tailorfl.data.source import Source
from tailorfl.partition.rows import Ints

Floats = NDArray[np.float64]

BINS = 20
"""Bins of equally many training samples into which numeric targets are put."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
SHUFFLED = 2_000
"""Clients over which the effect of chance is averaged, by repeatedly dealing all samples at random."""
MOST_DEALS = 20


@dataclass(frozen=True)
class Figure:
    """One number about how different clients are.

    Attributes:
        key: its name in JSON.
        meaning: in words.
        value: for the training parts of the training clients.
        chance: the same if these samples are dealt at random to clients of these sizes; None if that is meaningless.
    """

    key: str
    meaning: str
    value: float
    chance: float | None = None


@dataclass(frozen=True, eq=False)
class Overview:
    """The clients of a federation in numbers; all counts are of training samples unless noted otherwise.

    Attributes:
        name, task: of the source.
        clients: name of every client, held-out ones last.
        num_clients: number of training clients, which come first.
        sizes: `[clients]` int64 samples by part: train, val, test.
        what: the things counted: classes, labels, domains, or bins of a target or time; "" if there are none.
        cells: the name of each of these.
        counts: `[clients, cells]` int64.
        classes: `[clients]` int64 different classes, None for tasks without.
        events: `[clients]` int64 observed events, None for tasks other than survival.
        quantiles: `[clients, 5]` of the target (the first one) or the time, at `QUANTILES`; None for other tasks.
        figures: how different clients are.
        further: number of samples of the public and of each shifted set.
    """

    name: str
    task: str
    clients: tuple[str, ...]
    num_clients: int
    sizes: dict[str, Ints]
    what: str
    cells: tuple[str, ...]
    counts: Ints
    classes: Ints | None
    events: Ints | None
    quantiles: Floats | None
    figures: tuple[Figure, ...]
    further: dict[str, int]

    @property
    def shares(self) -> Floats:
        """Share of each client's training samples in each cell, `[clients, cells]`."""
        shares: Floats = self.counts / np.maximum(self.sizes["train"], 1)[:, None]
        return shares

    def largest(self) -> tuple[Ints, Floats]:
        """Return the cell with most of each client's training samples, and its share, `[clients]` both."""
        first = self.counts.argmax(axis=1)
        return first, self.shares[np.arange(len(first)), first]

    def from_large_to_small(self, most: int) -> Ints:
        """Return at most `most` clients: all in their order, or else evenly spaced from the largest to the smallest."""
        everyone = len(self.clients)
        if everyone <= most:
            return np.arange(everyone)
        order = np.argsort(-self.sizes["train"], kind="stable")
        return order[np.linspace(0, everyone - 1, most).round().astype(np.int64)]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as a JSON-compatible dictionary."""
        return {
            "data": self.name,
            "task": self.task,
            "training_clients": self.num_clients,
            "figures": {f.key: {"value": f.value, "by_chance": f.chance} for f in self.figures},
            "further_sets": self.further,
            "counted": self.what,
            "cells": list(self.cells),
            "clients": [self._client(client) for client in range(len(self.clients))],
        }

    def _client(self, client: int) -> dict[str, Any]:
        row: dict[str, Any] = {
            "name": self.clients[client],
            "role": "train" if client < self.num_clients else "held out",
            **{part: int(sizes[client]) for part, sizes in self.sizes.items()},
        }
        if self.classes is not None:
            row["classes"] = int(self.classes[client])
        if self.events is not None:
            row["events"] = int(self.events[client])
        if self.quantiles is not None:
            row["quantiles"] = {
                f"{share:g}": float(value)
                for share, value in zip(QUANTILES, self.quantiles[client], strict=True)
            }
        return {**row, "counts": self.counts[client].tolist()}


def overview(federation: Federation) -> Overview:
    """Return the numbers of a federation. No model is needed and nothing is trained."""
    source = federation.source
    counted, cells, cell_of = _cells(federation)
    values = _numbers(source)
    classed = source.task in ("classification", "binary")
    counts = _counts(federation, len(cells), cell_of)
    further = {} if federation.public is None else {"public": len(federation.public)}
    return Overview(
        name=source.name,
        task=source.task,
        clients=federation.names,
        num_clients=federation.num_clients,
        sizes={part: federation.sizes(part) for part in PARTS},
        what=counted,
        cells=cells,
        counts=counts,
        classes=(counts > 0).sum(axis=1) if classed else None,
        events=_counts(federation, 1, source.y[:, :1].numpy())[:, 0] if source.task == "survival" else None,
        quantiles=None if values is None else _quantiles(federation, values),
        figures=_figures(federation, values),
        further={**further, **{name: len(shifted_set) for name, shifted_set in federation.shifted.items()}},
    )


def _cells(federation: Federation) -> tuple[str, tuple[str, ...], NDArray[Any]]:
    """Return (the things counted, names of cells, `[samples]` cell of every sample or `[samples, cells]` 0/1)."""
    source = federation.source
    values = _numbers(source)
    if values is not None:
        train = values[federation.part("train")[: federation.num_clients].flat()]
        edges = np.unique(np.quantile(train, np.arange(1, BINS) / BINS)) if len(train) else np.zeros(0)
        word = "time" if source.task == "survival" else "target"
        ends = ["-inf", *(f"{edge:.4g}" for edge in edges), "inf"]
        names = tuple(f"{low} to {high}" for low, high in pairwise(ends))
        return f"bins of the {word}", names, np.searchsorted(edges, values, side="right")
    if source.task == "generation":
        if "domain" not in source.groups:
            return "", (), np.zeros((len(source), 0), dtype=np.int64)
        return "domains", source.group_names["domain"], source.groups["domain"].numpy()
    several = 2 if source.task == "binary" else source.outputs
    named = source.info.get("classes")
    names = tuple(named) if named and len(named) == several else tuple(map(str, range(several)))
    if source.task == "multilabel":
        return "labels", names, source.y.numpy()
    return "classes", names, source.y.numpy()


def _counts(federation: Federation, cells: int, cell_of: NDArray[Any]) -> Ints:
    rows, clients = federation.part("train"), len(federation)
    owner, flat = rows.owners(), rows.flat()
    if cell_of.ndim == 2:
        counts = np.zeros((clients, cells), dtype=np.int64)
        np.add.at(counts, owner, cell_of[flat].astype(np.int64))
        return counts
    return np.bincount(owner * cells + cell_of[flat], minlength=clients * cells).reshape(clients, cells)


def _numbers(source: Source) -> Floats | None:
    """Return `[samples]` the first target of a regression or of counts, the time of survival, or None."""
    if source.task not in ("regression", "counts", "survival"):
        return None
    return source.y[:, 1 if source.task == "survival" else 0].double().numpy()


def _quantiles(federation: Federation, values: Floats) -> Floats:
    """Return `[clients, 5]` quantiles of every client's training values, interpolated linearly as in NumPy."""
    import pandas as pd

    rows = federation.part("train")
    train = pd.Series(values[rows.flat()]).groupby(rows.owners()).quantile(np.array(QUANTILES)).unstack()
    return train.reindex(range(len(rows))).to_numpy(dtype=np.float64)


def _figures(federation: Federation, values: Floats | None) -> tuple[Figure, ...]:
    source = federation.source
    rows = federation.part("train").of_clients(np.array(federation.members))  # without excluded clients
    owner, flat, sizes = rows.owners(), rows.flat(), rows.sizes
    figures = [
        Figure("effective_clients", "effective number of clients by size", _effective(sizes[None])),
        Figure("smallest", "training samples of the smallest client", float(sizes.min())),
        Figure("median", "of the median client", float(np.median(sizes))),
        Figure("largest", "of the largest client", float(sizes.max())),
    ]
    rng = np.random.default_rng(0)
    deals = min(MOST_DEALS, -(-SHUFFLED // len(sizes))) if len(sizes) > 1 else 0
    random_orders = [rng.permutation(len(flat)) for _ in range(deals)]

    def add(key: str, meaning: str, measure: Callable[[Ints], float]) -> None:
        chance = [measure(owner[order]) for order in random_orders]
        figures.append(Figure(key, meaning, measure(owner), float(np.mean(chance)) if chance else None))

    if source.task not in ("generation", "regression", "counts"):
        strata = np.unique(source.strata.numpy()[flat], return_inverse=True)[1]
        word = {"survival": "events", "multilabel": "combinations of labels"}.get(source.task, "classes")
        add(
            "total_variation",
            f"mean total-variation distance of a client's {word} to all",
            lambda o: total_variation(o, strata),
        )
        add(
            "effective_classes",
            f"mean effective number of {word} of a client",
            lambda o: effective_classes(o, strata),
        )
        pooled = effective_classes(np.zeros_like(owner), strata)
        figures.append(
            Figure("effective_classes_pooled", f"effective number of {word} of all together", pooled)
        )
    if values is not None:
        word, train_values = ("times" if source.task == "survival" else "targets"), values[flat]
        add(
            "kolmogorov_smirnov",
            f"mean Kolmogorov-Smirnov distance of a client's {word} to all",
            lambda o: kolmogorov_smirnov(o, train_values),
        )
        add(
            "between",
            f"share of the {word}' variance that lies between clients",
            lambda o: between(o, train_values),
        )
    return tuple(figures)


def total_variation(owner: Ints, strata: Ints) -> float:
    """Return the mean over clients of half the L1 distance of their class shares from those of all samples.

    `owner` and `strata` are `[samples]` int64, the client and the class of each; every client from 0 on has some.
    """
    counts = _table(owner, strata)
    shares = counts / counts.sum(axis=1, keepdims=True)
    return float(np.abs(shares - counts.sum(axis=0) / counts.sum()).sum(axis=1).mean() / 2)


def effective_classes(owner: Ints, strata: Ints) -> float:
    """Return the mean over clients of 1 / the sum of squared class shares: k if k classes have equal shares."""
    return _effective(_table(owner, strata))


def kolmogorov_smirnov(owner: Ints, values: Floats) -> float:
    """Return the mean over clients of the largest gap between the distribution functions of their and all values."""
    everything = np.sort(values)
    order = np.lexsort((values, owner))
    own_values, holder = values[order], owner[order]
    sizes = np.bincount(owner)
    rank = np.arange(len(own_values)) - (np.cumsum(sizes) - sizes)[holder]
    below = np.searchsorted(everything, own_values, side="left") / len(everything)
    upto = np.searchsorted(everything, own_values, side="right") / len(everything)
    # among equal values of one client only the first and the last are at the step of its function
    same_before = np.append(False, (own_values[1:] == own_values[:-1]) & (holder[1:] == holder[:-1]))
    same_after = np.append(same_before[1:], False)
    gap_before = np.where(same_before, 0.0, np.abs(rank / sizes[holder] - below))
    gap_after = np.where(same_after, 0.0, np.abs((rank + 1) / sizes[holder] - upto))
    largest = np.zeros(len(sizes))
    np.maximum.at(largest, holder, np.maximum(gap_before, gap_after))
    return float(largest.mean())


def between(owner: Ints, values: Floats) -> float:
    """Return the share of the sum of squares that lies between clients (eta squared); 0 if nothing varies."""
    if values.max() == values.min():  # otherwise a rounding error of their mean would be the only deviation
        return 0.0
    sizes = np.bincount(owner)
    centred = values - values.mean()
    means = np.bincount(owner, weights=centred) / sizes
    return float((sizes * means**2).sum() / (centred**2).sum())


def _table(owner: Ints, strata: Ints) -> Ints:
    clients, classes = int(owner.max()) + 1, int(strata.max()) + 1
    return np.bincount(owner * classes + strata, minlength=clients * classes).reshape(clients, classes)


def _effective(counts: NDArray[Any]) -> float:
    shares = np.asarray(counts, dtype=np.float64)
    shares = shares / shares.sum(axis=1, keepdims=True)
    return float((1 / np.square(shares).sum(axis=1)).mean())
