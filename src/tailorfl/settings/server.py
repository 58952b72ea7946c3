"""The settings of what the server does with replies, `server`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from tailorfl.settings.base import Number, Settings, Whole, number


def _bound(value: Any) -> Any:
    if value == "median":
        return value
    if not isinstance(value, int | float) or not number(value) >= 0:
        raise ValueError("should be median or a number of at least 0")
    return value


class RobustConfig(Settings):
    """Robust rules against updates of hostile clients; the rule alone is a short form."""

    short_form: ClassVar[str | None] = "rule"

    rule: str = Field(
        default="none", description="rule that replaces the mean of updates, such as median or krum"
    )
    trim: Number = Field(
        default=0.2, ge=0, lt=0.5, description="of trimmed_mean: share of the clients dropped at either end"
    )
    f: Whole = Field(
        default=1, ge=0, description="of krum, multi_krum: number of hostile clients to withstand in a round"
    )
    k: Whole | None = Field(
        default=None, ge=1, description="of multi_krum: number of updates to average; null: all but f"
    )
    bound: Annotated[float | Literal["median"], BeforeValidator(_bound)] = Field(
        default="median",
        description="of norm_bound: largest norm of an update, ≥ 0; median: that of the round's norms",
    )
    noise: Number = Field(
        default=0.0,
        ge=0,
        description="of norm_bound: standard deviation of normal noise in the mean (weak DP)",
    )


class ServerConfig(Settings):
    """Aggregation of the replies at the server."""

    robust: RobustConfig = RobustConfig()
