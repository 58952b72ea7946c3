"""The settings of the system that clients run on, `system`: who answers when, and what the server does about it."""

from __future__ import annotations

from pydantic import Field

from tailorfl.settings.base import Settings, Whole


class SystemConfig(Settings):
    """Who answers when, and what the server does about those that do not; as it stands, all answer at once."""

    min_replies: Whole = Field(
        default=0, ge=0, description="a round with fewer replies changes neither the server nor a client"
    )
    trace: str | None = Field(
        default=None,
        description="play a recorded run again: trace.jsonl of a job, or the result folder that has one for each job",
    )
