"""The settings of how an experiment is carried out: `engine`, `deploy` and `track`.

Of these only the engine's precision affects results. A simulation does not use `deploy`.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from tailorfl.settings.base import Number, Settings, Whole

_WITH_PASSWORD = re.compile(
    r"https?://[^/]*@|[^/]+://[^/]*:[^/]*@|.*[?&](ssl)?(password|passwd|pwd)=", re.IGNORECASE
)
"""The start of an address that holds a password, or a name that a password may follow."""

EngineName = Literal["auto", "sequential", "vectorized"]
StatePlace = Literal["memory", "disk"]
PrecisionName = Literal["float32", "tf32", "bfloat16", "auto"]
FeaturePlace = Literal["auto", "disk", "off"]
WandbMode = Literal["offline", "online"]


class EngineConfig(Settings):
    """The engine that trains the clients; `engine: auto` is short for `{name: auto}`."""

    short_form: ClassVar[str | None] = "name"

    name: EngineName = Field(
        default="auto",
        description="one client after another, many at once, or the faster of the two (measured)",
    )
    chunk: Whole | None = Field(default=None, ge=1, description="clients trained at once; null: all that fit")
    states: StatePlace = Field(
        default="memory", description="storage of private models; disk: files of the result folder"
    )
    features: FeaturePlace = Field(
        default="auto",
        description=(
            "storage of frozen layers' outputs, computed once per sample; auto: memory, and beyond features_memory a "
            "file of the result folder; disk: always a file; off: not kept"
        ),
    )
    features_memory: Number = Field(
        default=2.0, ge=0, description="gigabytes of memory for features, per job"
    )
    device: str = Field(default="cpu", description="device of the clients: cpu, cuda, cuda:N or auto")
    precision: PrecisionName = Field(
        default="float32",
        description="precision of products; auto: a lower one if measured to be 1.15 x as fast",
    )
    workers: Whole = Field(
        default=0, ge=0, le=1024, description="worker processes that train clients; 0 or 1: none"
    )
    cluster: str | None = Field(
        default=None, description="address of a Ray cluster for the workers: auto, local, or host:port"
    )
    gpus: Number = Field(default=0.0, ge=0, description="GPUs that each worker of a cluster reserves")
    start_seconds: Number = Field(
        default=120.0, gt=0, description="seconds in which workers of a cluster must start"
    )

    @field_validator("features", mode="before")
    @classmethod
    def _as_in_yaml(cls, value: Any) -> Any:
        """Return `off` for the False that YAML reads from it."""
        return "off" if value is False else value

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise ValueError("should be auto, cpu, cuda or cuda:N")
        return value

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments for `make_engine`."""
        return self.model_dump(exclude={"states", "features", "features_memory"})


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
        description=(
            "seconds that the server waits for enough clients at the start and in a pause, and at the end for clients "
            "without their model"
        ),
    )
    min_replies: Whole = Field(
        default=0,
        ge=0,
        description=(
            "number of replies below which a round pauses; 0: a majority of its clients. It may change at each start "
            "of the server"
        ),
    )
    lost_state: Literal["refuse", "restart"] = Field(
        default="refuse",
        description="a client that lost its state is left out, or starts again as one that never trained",
    )
    max_bytes: Whole = Field(
        default=2**30, ge=1024, description="largest message in bytes; larger ones are refused"
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
        if isinstance(value, str) and _WITH_PASSWORD.match(value):
            raise ValueError(
                "should not contain a password, since result folders keep it; set it with MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or for a database in a file of its own, such as ~/.pgpass"
            )
        return value

    @property
    def leaves_the_machine(self) -> bool:
        """Whether trackers send rounds elsewhere."""
        return self.wandb == "online" or isinstance(self.mlflow, str)
