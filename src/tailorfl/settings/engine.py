"""The settings of what runs the clients, `engine`."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from tailorfl.settings.base import Number, Settings, Whole

EngineName = Literal["auto", "sequential", "vectorized"]
StatePlace = Literal["memory", "disk"]
PrecisionName = Literal["float32", "tf32", "bfloat16", "auto"]
FeaturePlace = Literal["auto", "disk", "off"]


class EngineConfig(Settings):
    """The engine that trains the clients; `engine: auto` is short for `{name: auto}`."""

    short_form: ClassVar[str | None] = "name"

    name: EngineName = Field(
        default="auto", description="one client after another, many at once, or the faster (measured)"
    )
    chunk: Whole | None = Field(default=None, ge=1, description="clients trained at once; null: all that fit")
    states: StatePlace = Field(
        default="memory", description="storage of private models; disk: files of the result folder"
    )
    features: FeaturePlace = Field(
        default="auto",
        description="outputs of frozen layers, computed once per sample, are kept in memory, beyond "
        "features_memory in a file of the result folder (auto), or always in a file (disk); off: not kept",
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
        """Return the word for what YAML reads as False: `off`."""
        return "off" if value is False else value

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise ValueError("should be auto, cpu, cuda or cuda:N")
        return value

    @property
    def arguments(self) -> dict[str, Any]:
        """What `make_engine` takes."""
        return self.model_dump(exclude={"states", "features", "features_memory"})
