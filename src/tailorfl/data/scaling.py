"""Numbers shifted and scaled: by training statistics of clients, or by given constants."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tailorfl.data.federation import PARTS, Federation
from tailorfl.errors import DataError
from tailorfl.partition.rows import Ints
from tailorfl.settings.data import Normalisation

Channels = Literal["train", "public"]
"""The origin of the mean and deviation of an image's channels: its own training images, or constants."""

PUBLIC_CHANNEL = (0.5, 0.5)
"""Mean and deviation of a channel scaled without private images: bytes are mapped to -1 ... 1."""

SCALING = "scaling"
"""Key of `Source.info`: the `Scaling` that turned raw numbers into `Source.x`."""

PRIVATE_SCALING = "private scaling"
"""Key of `Source.info`: the `PrivateScaling` of samples whose scale depends on other samples."""


@dataclass(frozen=True, eq=False)
class Scaling:
    """x = (raw - mean) / deviation, then clipped to ± `clip` if given.

    Attributes:
        mean, deviation: `[clients + 1, features]`, a row for each of `clients`; the last one is for everybody else.
        clients: names of the clients with their own constants.
        clip: the largest magnitude.
        before: the scaling applied to raw numbers first, if this is a second one.
    """

    mean: Tensor
    deviation: Tensor
    clients: tuple[str, ...] = ()
    clip: float | None = None
    before: Scaling | None = None

    def apply(self, raw: Tensor, client: str | None = None) -> Tensor:
        """Return raw numbers `[samples, ...]` scaled by the constants of a client, float32."""
        x = raw if self.before is None else self.before.apply(raw, client)
        row = self.clients.index(client) if client in self.clients else -1
        flat = x.reshape(len(x), -1).to(torch.float64)
        flat = (flat - self.mean[row].to(torch.float64)) / self.deviation[row].to(torch.float64)
        cut = flat if self.clip is None else flat.clamp(-self.clip, self.clip)
        return cut.to(torch.float32).reshape(raw.shape)

    def of(self, client: str | None) -> dict[str, Any]:
        """Return the constants of one client, or those for everybody else, as a JSON-compatible dictionary."""
        row = self.clients.index(client) if client in self.clients else -1
        first = {} if self.before is None else {"before": self.before.of(client)}
        cut = {} if self.clip is None else {"clip": self.clip}
        return {"mean": self.mean[row].tolist(), "deviation": self.deviation[row].tolist(), **cut, **first}

    def facts(self) -> dict[str, Any]:
        """Return the constants as a JSON-compatible dictionary."""
        rows = [
            {"mean": mean.tolist(), "deviation": deviation.tolist()}
            for mean, deviation in zip(self.mean, self.deviation, strict=True)
        ]
        of_clients = {"clients": dict(zip(self.clients, rows[:-1], strict=True))} if self.clients else {}
        cut = {} if self.clip is None else {"clip": self.clip}
        first = {} if self.before is None else {"before": self.before.facts()}
        return {**rows[-1], **of_clients, **cut, **first}


@dataclass(frozen=True)
class PrivateScaling:
    """Marks samples that were scaled by statistics of private ones, so that one sample changes all others.

    Attributes:
        by: whose statistics, in words.
        instead: the setting for constants that depend on no sample.
        shared: whether they are of several clients, so that one client changes the samples of others.
    """

    by: str
    instead: str
    shared: bool = False


_CONSTANT = 1e-12
_WHOSE = {
    "client": "each client's own training mean and deviation",
    "federated": "the mean and deviation of all training samples",
}


FITTED_TABLE = PrivateScaling(
    "constants of training rows of all clients",
    "a file of them as data.options.constants, without data.normalise",
    shared=True,  # levels of words and fills of columns that a client never measured, even if means are its own
)
"""The description of a table that is prepared by constants of its own rows."""
FITTED_IMAGES = PrivateScaling(
    "the mean and deviation of all training images",
    "data.options.scaling=public, or scaling='public' of a source in Python",
    shared=True,
)
"""The description of images whose channels are scaled by their own mean and deviation."""


def standardised(federation: Federation, by: Normalisation) -> Federation:
    """Return the federation with features shifted and scaled by training means and deviations.

    Standard deviations divide by n - 1, as FLamby's Heart protocol does; a constant feature is only shifted.

    Args:
        federation: its features are floats; an earlier scaling of them is kept as `Scaling.before`.
        by: "client": each client by its own training rows, rows of no client (the server's) by those of all training
            clients together; "federated": all by the latter.

    Raises:
        DataError: if features are not float32, or `by` is "client" and clients share test rows, so a row has no owner.
    """
    source = federation.source
    if source.x.dtype != torch.float32:
        content = (
            "tokens, which cannot be scaled"
            if source.holds_tokens
            else "images, which are normalised by channel"
        )
        raise DataError(f"normalise='{by}' is for float features; source '{source.name}' holds {content}")
    clients = len(federation)
    owner = torch.full((len(source),), clients)
    fits = torch.zeros(len(source), dtype=torch.bool)
    for part in PARTS:
        held_rows = federation.part(part)
        rows, part_owner = held_rows.flat(), torch.from_numpy(held_rows.owners())
        if by == "client":
            check_unshared(rows)
        owner[torch.from_numpy(rows)] = part_owner
        if part == "train":
            fits[torch.from_numpy(rows)] = True
    x = source.x.reshape(len(source), -1).to(torch.float64)
    mean, deviation = _statistics(x[fits], owner[fits], clients, federation.num_clients)
    names = federation.names
    if by == "federated":
        owner, mean, deviation, names = torch.zeros_like(owner), mean[-1:], deviation[-1:], ()
    scaled = ((x - mean[owner]) / deviation[owner]).to(torch.float32).reshape(source.x.shape)
    before: PrivateScaling | None = source.info.get(PRIVATE_SCALING)
    too = "" if before is None else f", and set {before.instead}"
    info = {
        **source.info,
        SCALING: Scaling(mean, deviation, names, before=source.info.get(SCALING)),
        PRIVATE_SCALING: PrivateScaling(
            _WHOSE[by], f"leave out data.normalise={by}{too}", shared=by == "federated"
        ),
    }
    return replace(federation, source=replace(source, x=scaled, info=info))


def check_unshared(rows: Ints) -> None:
    """Check that no row belongs to two clients. Raises DataError, since each would scale it differently."""
    if len(np.unique(rows)) < len(rows):
        raise DataError(
            "normalise='client' needs each test row to belong to one client, but clients share a test set; set "
            "normalise='federated'"
        )


def _statistics(x: Tensor, owner: Tensor, clients: int, training: int) -> tuple[Tensor, Tensor]:
    """Return mean and deviation `[clients + 1, features]` by client; the last row is of all training clients."""
    shape = (clients + 1, x.shape[1])
    count = torch.bincount(owner, minlength=clients + 1).to(x.dtype).unsqueeze(1)
    total = torch.zeros(shape, dtype=x.dtype).index_add_(0, owner, x)
    mean = total / count.clamp(min=1)
    square = torch.zeros(shape, dtype=x.dtype).index_add_(0, owner, (x - mean[owner]) ** 2)
    deviation = (square / (count - 1).clamp(min=1)).sqrt()
    pooled = x[owner < training]
    mean[clients] = pooled.mean(dim=0)
    deviation[clients] = pooled.std(dim=0, correction=1 if len(pooled) > 1 else 0)
    constant = deviation <= _CONSTANT * (1 + mean.abs())
    return mean, torch.where(constant, torch.ones_like(deviation), deviation)
