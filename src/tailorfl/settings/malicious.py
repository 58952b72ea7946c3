"""The settings of clients that work against the others, `system.malicious`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tailorfl.settings.base import Number, Settings, Whole

Attack = Literal["sign_flip", "scale", "noise", "label_flip", "nan"]
"""What a malicious client does."""


class MaliciousConfig(Settings):
    """Malicious training clients; drawn by the seed, or given by number."""

    share: Number = Field(
        default=0.0, ge=0, lt=1, description="share of malicious training clients, drawn by the seed"
    )
    clients: tuple[Annotated[Whole, Field(ge=0)], ...] = Field(
        default=(), description="numbers of the malicious clients, instead of a share"
    )
    kind: Attack = Field(
        default="sign_flip",
        description="sign_flip and scale send the update times −strength or strength, noise sends normal "
        "noise, nan sends nan; label_flip trains on flipped labels",
    )
    strength: Number | None = Field(
        default=None,
        gt=0,
        description="factor of sign_flip (null: 1) and scale (null: 10); standard deviation of noise (null: 1)",
    )
    from_round: Whole = Field(default=1, ge=1, description="first round in which they attack")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.share and self.clients:
            raise ValueError("has both share and clients; give one of them")
        if len(set(self.clients)) < len(self.clients):
            raise ValueError("has a client twice in clients")
        if self.strength is not None and self.kind in ("label_flip", "nan"):
            raise ValueError(f"has strength, which kind={self.kind} does not have")
        return self

    @property
    def any(self) -> bool:
        """Whether there are malicious clients."""
        return self.share > 0 or len(self.clients) > 0
