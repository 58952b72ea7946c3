"""Numbers standardised by training statistics: each client's own, or those of all training clients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tailorfl.data.federation import Federation
from tailorfl.data.scaling import PRIVATE_SCALING, SCALING, PrivateScaling, Scaling
from tailorfl.errors import DataError
from tailorfl.settings.data import Normalisation

_CONSTANT = 1e-12
_WHOSE = {
    "client": "each client's own training mean and deviation",
    "federated": "the mean and deviation of all training samples",
}


def standardised(federation: Federation, by: Normalisation) -> Federation:
    """The federation with features shifted and scaled by training means and deviations.

    Standard deviations divide by n - 1, as FLamby's Heart protocol does; a feature that is constant is shifted only.

    Args:
        federation: its features are floats; what they were scaled by before is kept as `Scaling.before`.
        by: "client": each client by its own training rows, rows of no client (the server's) by those of all training
            clients together; "federated": all by the latter.

    Raises:
        DataError: if features are not float32, or by client, clients share test rows, which then have no single owner.
    """
    source = federation.source
    if source.x.dtype != torch.float32:
        what = (
            "tokens, which are no numbers"
            if source.holds_tokens
            else "images, which are normalised by channel"
        )
        raise DataError(f"normalise='{by}' is for float features; source '{source.name}' holds {what}")
    clients = len(federation)
    owner = torch.full((len(source),), clients)
    fits = torch.zeros(len(source), dtype=torch.bool)
    for part in ("train", "val", "test"):
        held_rows = federation.part(part)
        rows, held = held_rows.flat(), torch.from_numpy(held_rows.owners())
        if by == "client" and len(np.unique(rows)) < len(rows):
            raise DataError(
                "normalise='client' needs test rows of one client each, but clients share a test set"
            )
        owner[torch.from_numpy(rows)] = held
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


def _statistics(x: Tensor, owner: Tensor, clients: int, training: int) -> tuple[Tensor, Tensor]:
    """Mean and deviation `[clients + 1, features]` by client; the last row is of all training clients."""
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
