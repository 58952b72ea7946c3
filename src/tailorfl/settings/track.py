"""The settings of trackers beside the result folder's own records, `track`."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from tailorfl.settings.base import Settings

WandbMode = Literal["offline", "online"]


class TrackConfig(Settings):
    """Trackers that also get the records of each round; rounds.jsonl of every job always has them."""

    tensorboard: bool = Field(default=False, description="TensorBoard's event files, in tensorboard/")
    mlflow: bool | str = Field(
        default=False,
        description="MLflow: true for mlflow.db of the result folder, or the address of a tracking server or database",
    )
    wandb: WandbMode | None = Field(
        default=None, description="Weights & Biases: kept in wandb/ for `wandb sync`, or sent immediately"
    )

    @field_validator("mlflow")
    @classmethod
    def _an_address(cls, value: bool | str) -> bool | str:
        if isinstance(value, str) and ":" not in value:
            raise ValueError(
                "should be true, or an address such as http://127.0.0.1:5000 or sqlite:///mlflow.db"
            )
        if isinstance(value, str) and re.match(r"https?://[^/]*@", value):
            raise ValueError(
                "should hold no password, since result folders keep it; MLflow takes one from MLFLOW_TRACKING_USERNAME "
                "and MLFLOW_TRACKING_PASSWORD"
            )
        return value

    @property
    def leaves_the_machine(self) -> bool:
        """Whether trackers send rounds elsewhere."""
        return self.wandb == "online" or isinstance(self.mlflow, str)
