"""The settings of a deployment on real machines, `deploy`; a simulation does not look at them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

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
        default=600.0, gt=0, description="how long the server waits for enough clients before it gives up"
    )
    lost_state: Literal["refuse", "restart"] = Field(
        default="refuse",
        description="a client that has lost its private state is left out, or begins anew as one that never trained",
    )
    max_bytes: Whole = Field(
        default=2**30, ge=1024, description="a message of more bytes is refused by whoever receives it"
    )
    max_norm: Number | None = Field(
        default=None,
        gt=0,
        description="a reply whose change of what was sent has a larger L2 norm is refused",
    )
