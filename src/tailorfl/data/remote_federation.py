"""A federation with the samples of only one client, or of none: the view of one process of a real deployment.

The sizes of all clients are true, so rounds, weights, batch plans and privacy are those of the whole federation. Rows
of clients whose samples are elsewhere all point to row 0 and must not be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tailorfl.data.federation import PARTS, Federation
from tailorfl.data.scaling import FITTED_IMAGES, FITTED_TABLE, PRIVATE_SCALING
from tailorfl.data.source import Source, subset
from tailorfl.errors import DataError
from tailorfl.partition.rows import Ints

REMOTE = "hollow"
"""Key of `Source.info`: True if all samples of clients are elsewhere, as on the server."""
NAMES = ("classes", "features", "tokenizer", "pad", "vocabulary")
"""Keys of a source's `info` that are sent to the server: names, and constants of the tokenizer."""
FITTED = "fitted"
"""Key of `source_facts`: whether the samples are prepared by statistics of private ones."""


@dataclass(frozen=True)
class ClientSamples:
    """One client's samples: a source of only these, and its rows of each part."""

    source: Source
    train: Ints
    val: Ints
    test: Ints

    @property
    def sizes(self) -> dict[str, int]:
        """Number of samples of each part."""
        return {part: len(getattr(self, part)) for part in PARTS}


def client_samples(federation: Federation, client: int) -> ClientSamples:
    """Return one client's samples of a whole federation, in the order they have there."""
    rows, places = federation.places(client)
    return ClientSamples(subset(federation.source, rows, federation.source.name), **places)


def source_facts(source: Source) -> dict[str, Any]:
    """Return the facts of a source that a model needs, for JSON; no samples, no statistics but those of channels."""
    return {
        "name": source.name,
        "task": source.task,
        "outputs": source.outputs,
        "x": [list(source.x.shape[1:]), str(source.x.dtype).removeprefix("torch.")],
        "y": [list(source.y.shape[1:]), str(source.y.dtype).removeprefix("torch.")],
        "mean": None if source.mean is None else list(source.mean),
        "std": None if source.std is None else list(source.std),
        "augment": source.augment,
        "credit": source.credit is not None,
        FITTED: PRIVATE_SCALING in source.info,
        "info": {key: source.info[key] for key in NAMES if key in source.info},
    }


def remote_source(facts: Mapping[str, Any]) -> Source:
    """Return a source of one empty sample with these facts.

    Raises:
        DataError: they are not what `source_facts` returns.
    """
    try:
        (x_shape, x_type), (y_shape, y_type) = facts["x"], facts["y"]
        x = torch.zeros(1, *x_shape, dtype=getattr(torch, x_type))
        y = torch.zeros(1, *y_shape, dtype=getattr(torch, y_type))
        info = {k: tuple(v) if isinstance(v, list) else v for k, v in facts["info"].items()}
        if facts.get(FITTED):
            info[PRIVATE_SCALING] = FITTED_IMAGES if x_type == "uint8" else FITTED_TABLE
        return Source(
            name=facts["name"],
            x=x,
            y=y,
            task=facts["task"],
            outputs=int(facts["outputs"]),
            mean=None if facts["mean"] is None else tuple(facts["mean"]),
            std=None if facts["std"] is None else tuple(facts["std"]),
            info={**info, REMOTE: True},
            credit=torch.zeros(1, int(facts["outputs"])) if facts["credit"] else None,
            augment=facts["augment"],
        )
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DataError(
            f"the description of a client's data cannot be read: {type(error).__name__}: {error}"
        ) from error


def remote_federation(
    source: Source,
    names: Sequence[str],
    sizes: Mapping[str, Sequence[int]],
    *,
    own: tuple[int, ClientSamples] | None = None,
    public: Source | None = None,
    server: Source | None = None,
) -> Federation:
    """Return the federation as one process sees it.

    Args:
        source: the facts of the data that a model needs, see `remote_source`; it holds no client's samples.
        names: of all clients.
        sizes: for "train", "val" and "test" how many samples each client has.
        own: (number, samples) of the client whose process this is; None on the server.
        public: the public set.
        server: the server's labelled samples.
    """
    rows: dict[str, list[Ints]] = {part: [np.zeros(n, dtype=np.int64) for n in sizes[part]] for part in PARTS}
    server_rows = np.empty(0, dtype=np.int64)
    if own is not None:
        client, samples = own
        source = samples.source
        for part in PARTS:
            rows[part][client] = getattr(samples, part)
    elif server is not None and len(server):
        source = replace(server, name=source.name, info={**server.info, REMOTE: True})
        server_rows = np.arange(len(server), dtype=np.int64)
    return Federation(
        source=source,
        train=rows["train"],
        val=rows["val"],
        test=rows["test"],
        names=tuple(names),
        num_clients=len(names),
        server=server_rows,
        public=public,
    )
