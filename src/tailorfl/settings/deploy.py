"""The settings of a deployment on real machines, `deploy`; a simulation does not look at them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from tailorfl.settings.base import Number, Settings, Whole


class DeployConfig(Settings):
    """Waiting times of a server, and limits on what clients send."""

    clients: Whole | None = Field(
        default=None, ge=1, description="number of clients needed to start; null: data.clients"
    )
    excluded_rows: dict[str, Whole] = Field(
        default={},
        description="rows of the files of data.excluded_clients, so that the others split theirs as before; "
        "tailorfl unlearn writes it",
    )
    round_seconds: Number = Field(
        default=600.0, gt=0, description="seconds after which a round ends without the missing clients"
    )
    wait_seconds: Number = Field(
        default=600.0,
        gt=0,
        description="seconds that the server waits for enough clients at the start, in a pause, and at the "
        "end for those without their model",
    )
    min_replies: Whole = Field(
        default=0,
        ge=0,
        description="replies without which a round pauses; 0: a majority of its clients. It may change at "
        "each start of the server",
    )
    lost_state: Literal["refuse", "restart"] = Field(
        default="refuse",
        description="a client that lost its state is left out, or begins anew as one that never trained",
    )
    max_bytes: Whole = Field(
        default=2**30, ge=1024, description="largest message in bytes; a larger one is refused"
    )
    max_samples: Whole = Field(
        default=10**7, ge=1, description="largest number of samples that a client may report"
    )
    max_norm: Number | Literal["auto"] | None = Field(
        default="auto",
        description="largest L2 norm of a reply's change; auto: 10 × the clients' median, null: none",
    )

    @field_validator("max_norm")
    @classmethod
    def _above_zero(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, float) and value <= 0:
            raise ValueError("should be above 0")
        return value
