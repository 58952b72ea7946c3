"""How a source's numbers were shifted and scaled: what a model must be told to read something new."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

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
    """

    mean: Tensor
    deviation: Tensor
    clients: tuple[str, ...] = ()
    clip: float | None = None

    def facts(self) -> dict[str, Any]:
        """Returns the constants as JSON can hold them."""
        rows = [
            {"mean": mean.tolist(), "deviation": deviation.tolist()}
            for mean, deviation in zip(self.mean, self.deviation, strict=True)
        ]
        own = {"clients": dict(zip(self.clients, rows[:-1], strict=True))} if self.clients else {}
        cut = {} if self.clip is None else {"clip": self.clip}
        return {**rows[-1], **own, **cut}


@dataclass(frozen=True)
class PrivateScaling:
    """That samples were scaled by statistics of private ones, so that one sample changes all others.

    Attributes:
        by: whose statistics, in words.
        instead: what to set for constants that depend on no sample.
    """

    by: str
    instead: str
