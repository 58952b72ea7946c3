"""The settings of the data and how clients get them, `data`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    field_serializer,
    field_validator,
    model_validator,
)

from tailorfl.settings.base import Names, Number, Settings, Whole

Augmentation = Literal["none", "flip", "flip_crop"]
Normalisation = Literal["none", "client", "federated"]


class SplitShares(Settings):
    """Shares of a client's samples; `test` may also be a word if the source has a test part."""

    train: Number | None = Field(default=None, gt=0, le=1, description="share to train on")
    val: Number | None = Field(default=None, ge=0, lt=1, description="share for choosing models and settings")
    test: Annotated[float, Field(ge=0, lt=1)] | Literal["official", "classes", "global"] | None = Field(
        default=None,
        description=(
            "share to test on; or the source's test part: official divides it among the clients, classes gives each "
            "client all samples of its classes, global gives all of it to every client"
        ),
    )


class CorruptionConfig(Settings):
    """Corrupted copies of test images as shifted test sets."""

    kinds: Literal["all"] | Names = Field(
        default="all", union_mode="left_to_right", description="names of corruptions"
    )
    severities: tuple[Annotated[Whole, Field(ge=1, le=5)], ...] = Field(
        default=(1, 2, 3, 4, 5), min_length=1, description="severities; each makes a separate set"
    )
    samples: Whole = Field(default=200, ge=1, description="largest number of images in a set")


class DataConfig(Settings):
    """Source of the data, and their division among clients; `model_dump()` fits `data.build.build`."""

    short_form: ClassVar[str | None] = "name"

    name: str = Field(default="digits", description="data source, see `tailorfl list data`")
    path: str | None = Field(default=None, description="file or folder of your own source")
    options: dict[str, Any] = Field(default={}, description="further options of the source")
    samples: Whole | None = Field(
        default=None,
        ge=1,
        description="number of samples to use, spread evenly over test part, clients and classes",
    )
    partition: str | None = Field(
        default=None,
        description="division of samples among clients; by default natural clients or domains, else "
        "dirichlet; {flwr: NAME, ...} is a partitioner of Flower Datasets",
    )
    partition_options: dict[str, Any] = Field(
        default={}, description="options of the partition, such as {alpha: 0.1}"
    )
    clients: Whole | None = Field(
        default=None, ge=1, description="number of training clients; by default all natural ones, or 20"
    )
    split: SplitShares | Literal["perfed_ckt"] | None = Field(
        default=None, description="shares {train, val, test} of every client's samples"
    )
    heldout_clients: Whole | Names = Field(
        default=0,
        union_mode="left_to_right",
        description="number of additional clients that never train, or their names",
    )
    heldout_domain: Names | None = Field(
        default=None, description="domain(s) that never train, each a held-out client and a shifted set"
    )
    excluded_clients: Names = Field(
        default=(),
        description=(
            "names (or numbers) of training clients to leave out after the data are divided; all others keep their "
            "samples, numbers and random streams"
        ),
    )
    public: str | None = Field(
        default=None,
        description="source of the unlabelled public set; with the data's own name, training samples are set aside",
    )
    public_samples: Whole | None = Field(
        default=None,
        ge=1,
        description=(
            "size of the public set; by default all of it, or a tenth of the training samples if public is the data's "
            "own name"
        ),
    )
    corruptions: CorruptionConfig | None = Field(
        default=None, description="corrupted copies of test images, as shifted sets"
    )
    official_set: bool = Field(
        default=False, description="add the whole official test part as the shifted set 'official'"
    )
    shifts: dict[str, str] = Field(
        default={},
        description="your own test sets, {NAME: file or folder}, in the same form as the data; each is a shifted set",
    )
    normalise: Normalisation = Field(
        default="none",
        description=(
            "standardise numbers (in tables, also fill gaps and encode words) with training samples: each client's "
            "own, or those of all clients together"
        ),
    )
    augment: Augmentation = Field(
        default="none",
        description="random changes of training images: flip, or flip_crop, which also crops after padding by 4",
    )
    seed: Whole | None = Field(default=None, ge=0, description="seed of the partition; null: the run's")

    def seed_of(self, run: int) -> int:
        """Return the seed of the partition in a run with seed `run`."""
        return run if self.seed is None else self.seed

    @model_validator(mode="before")
    @classmethod
    def _flower_partition(cls, values: Any) -> Any:
        short = values.get("partition") if isinstance(values, dict) else None
        if not isinstance(short, dict):
            return values
        if "flwr" not in short or values.get("partition_options"):
            raise ValueError(
                "partition should be a name, with its options in partition_options, or {flwr: NAME, ...} with all "
                "options inside"
            )
        options = {key: value for key, value in short.items() if key != "flwr"}
        dealt = {"partitioner": short["flwr"], "options": options}
        return {**values, "partition": "flwr", "partition_options": dealt}

    @field_validator("heldout_clients")
    @classmethod
    def _not_negative(cls, value: int | tuple[str, ...]) -> int | tuple[str, ...]:
        if isinstance(value, int) and value < 0:
            raise ValueError("should be a number of at least 0, or names of clients")
        return value

    @field_serializer("split")
    def _only_given_shares(self, split: SplitShares | str | None) -> Any:
        return split.model_dump(exclude_none=True) if isinstance(split, SplitShares) else split
