"""The settings of a deployment on real machines, `deploy`; a simulation does not look at them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from tailorfl.settings.base import Number, Settings, Whole


class DeployConfig(Settings):
    """How long a server waits for whom, and what it takes from clients."""

    clients: Whole | None = Field(
        default=None, ge=1, description="how many clients there must be to begin; null: data.clients"
    )
    round_seconds: Number = Field(
        default=600.0,
        gt=0,
        description="a round ends after so long, without the clients that have not answered",
    )
    wait_seconds: Number = Field(
        default=600.0,
        gt=0,
        description="how long the server waits for clients: for enough to begin, in a pause for want of replies, and "
        "at the end for those that have not fetched their model",
    )
    min_replies: Whole = Field(
        default=0,
        ge=0,
        description="with fewer replies a round pauses; 0: a majority of its clients. It may be another one each time "
        "that the server is started",
    )
    lost_state: Literal["refuse", "restart"] = Field(
        default="refuse",
        description="a client that has lost its private state is left out, or begins anew as one that never trained",
    )
    max_bytes: Whole = Field(
        default=2**30, ge=1024, description="a message of more bytes is refused by whoever receives it"
    )
    max_samples: Whole = Field(
        default=10**7, ge=1, description="a client that says it has more samples is turned away"
    )
    max_norm: Number | Literal["auto"] | None = Field(
        default="auto",
        description="a reply whose change of what was sent has a larger L2 norm is refused; auto: 10 × the median of "
        "the clients', null: no bound",
    )

    @field_validator("max_norm")
    @classmethod
    def _above_zero(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, float) and value <= 0:
            raise ValueError("should be above 0")
        return value
