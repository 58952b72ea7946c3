"""How a source's numbers were shifted and scaled: what a model must be told to read something new."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Channels = Literal["train", "public"]
"""Where the mean and deviation of an image's channels come from: its own training images, or constants."""

PUBLIC_CHANNEL = (0.5, 0.5)
"""Mean and deviation of a channel that is scaled by no private image: bytes come to lie between -1 and 1."""

SCALING = "scaling"
"""Key of `Source.info`: the `Scaling` that turned what was read into `Source.x`."""

PRIVATE_SCALING = "private scaling"
"""Key of `Source.info`: the `PrivateScaling` of samples whose scale depends on other samples."""


@dataclass(frozen=True, eq=False)
class Scaling:
    """x = (raw - mean) / deviation, and then cut off at ± `clip`, where that is given.

    Attributes:
        mean, deviation: `[clients + 1, features]`, a row for each of `clients`; the last one is for everybody else.
        clients: names of those who have constants of their own.
        clip: the largest magnitude.
        before: what was done to raw numbers before, where this is a second scaling.
    """

    mean: Tensor
    deviation: Tensor
    clients: tuple[str, ...] = ()
    clip: float | None = None
    before: Scaling | None = None

    def apply(self, raw: Tensor, client: str | None = None) -> Tensor:
        """Returns raw numbers `[samples, ...]` as models read them, float32, by the constants of a client."""
        x = raw if self.before is None else self.before.apply(raw, client)
        row = self.clients.index(client) if client in self.clients else -1
        flat = x.reshape(len(x), -1).to(torch.float64)
        flat = (flat - self.mean[row].to(torch.float64)) / self.deviation[row].to(torch.float64)
        cut = flat if self.clip is None else flat.clamp(-self.clip, self.clip)
        return cut.to(torch.float32).reshape(raw.shape)

    def of(self, client: str | None) -> dict[str, Any]:
        """Returns the constants of one client, or those for everybody else, as JSON can hold them."""
        row = self.clients.index(client) if client in self.clients else -1
        first = {} if self.before is None else {"before": self.before.of(client)}
        cut = {} if self.clip is None else {"clip": self.clip}
        return {"mean": self.mean[row].tolist(), "deviation": self.deviation[row].tolist(), **cut, **first}

    def facts(self) -> dict[str, Any]:
        """Returns the constants as JSON can hold them."""
        rows = [
            {"mean": mean.tolist(), "deviation": deviation.tolist()}
            for mean, deviation in zip(self.mean, self.deviation, strict=True)
        ]
        own = {"clients": dict(zip(self.clients, rows[:-1], strict=True))} if self.clients else {}
        cut = {} if self.clip is None else {"clip": self.clip}
        first = {} if self.before is None else {"before": self.before.facts()}
        return {**rows[-1], **own, **cut, **first}


@dataclass(frozen=True)
class PrivateScaling:
    """That samples were scaled by statistics of private ones, so that one sample changes all others.

    Attributes:
        by: whose statistics, in words.
        instead: what to set for constants that depend on no sample.
        shared: whether they are of several clients, so that one client changes the samples of others.
    """

    by: str
    instead: str
    shared: bool = False
