"""The scales that a recipe can be run at, `scales`: quick to see that it runs, small to decide, as a paper had it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tailorfl.settings.base import Settings

Scale = Literal["smoke", "small", "paper"]
"""smoke: seconds, says nothing of a method; small: decides a claim on a CPU; paper: the printed setting."""


class ScaleConfig(Settings):
    """One scale of a recipe: what it changes, and what is said before it runs."""

    needs: str = Field(default="", description="data, weights and machines that it cannot do without")
    costs: str = Field(default="", description="how long it takes, and on what")
    settings: dict[str, Any] = Field(
        default={}, description="changes of the recipe's settings; variants make theirs after these"
    )
