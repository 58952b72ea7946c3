"""The settings of clients and server as a system, `system` and `server`: who answers when, and who is malicious.

By default nothing is simulated: all clients that are asked answer at once and honestly, and the server takes the mean.
All random draws use keys of (seed, client, round), so every engine and a resumed run draw the same. The formulas are in
docs/system.md and docs/robust.md.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tailorfl.settings.base import Number, Settings, Whole, number

Attack = Literal["sign_flip", "scale", "noise", "label_flip", "nan"]
"""Attack of a malicious client."""
AvailabilityKind = Literal["always", "share", "wave", "file"]
Distribution = Literal["instant", "fixed", "lognormal", "half_normal", "uniform", "file"]
Redraw = Literal["client", "round"]
"""Whether a value is drawn once for each client, or each time that it is asked."""
Mode = Literal["synchronous", "buffered"]
Staleness = Literal["polynomial", "constant"]
_SIMULATED = (
    "mode",
    "availability",
    "speed",
    "bandwidth",
    "stragglers",
    "dropout",
    "deadline",
    "over_selection",
)


class MaliciousConfig(Settings):
    """Malicious training clients; drawn by the seed, or given by number."""

    share: Number = Field(
        default=0.0, ge=0, lt=1, description="share of malicious training clients, drawn by the seed"
    )
    clients: tuple[Annotated[Whole, Field(ge=0)], ...] = Field(
        default=(), description="numbers of the malicious clients, instead of a share"
    )
    kind: Attack = Field(
        default="sign_flip",
        description=(
            "sign_flip: update times −strength; scale: update times strength; noise: normal noise; nan: NaN; "
            "label_flip: training on flipped labels"
        ),
    )
    strength: Number | None = Field(
        default=None,
        gt=0,
        description="factor of sign_flip (null: 1) and scale (null: 10); standard deviation of noise (null: 1)",
    )
    from_round: Whole = Field(default=1, ge=1, description="first round in which they attack")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.share and self.clients:
            raise ValueError("has both share and clients; give only one of them")
        if len(set(self.clients)) < len(self.clients):
            raise ValueError("names a client twice in clients")
        leftover = self.model_fields_set & {"kind", "strength", "from_round"}
        if leftover and not self.model_fields_set & {"share", "clients"}:
            raise ValueError(
                f"has {', '.join(sorted(leftover))}, but no malicious clients; set share or clients"
            )
        if self.strength is not None and self.kind in ("label_flip", "nan"):
            raise ValueError(f"has strength, which kind={self.kind} does not use; leave it out")
        return self

    @property
    def any(self) -> bool:
        """Whether there are malicious clients."""
        return self.share > 0 or len(self.clients) > 0


class AvailabilityConfig(Settings):
    """Times at which clients are available; the kind alone is a short form."""

    short_form: ClassVar[str | None] = "kind"

    kind: AvailabilityKind = Field(
        default="always",
        description=(
            "share: each client in a random share of the rounds; wave: each client in a share of every day; file: "
            "times from a CSV file"
        ),
    )
    share: Number = Field(default=0.5, gt=0, le=1, description="for share and wave: share of the time")
    period: Number = Field(default=86400.0, gt=0, description="for wave: length of a day in seconds")
    spread: Number = Field(
        default=1.0,
        ge=0,
        le=1,
        description="for wave: share of a day over which the clients' mornings are spread",
    )
    file: str | None = Field(
        default=None, description="for file: CSV with the columns client, start, end, in seconds"
    )
    repeat: Number | None = Field(
        default=None, gt=0, description="for file: seconds after which it repeats; null: never"
    )

    @model_validator(mode="after")
    def _of_this_kind(self) -> Self:
        wave, file = ["wave"], ["file"]
        owners = {"share": ["share", "wave"], "period": wave, "spread": wave, "file": file, "repeat": file}
        self.check_owner("kind", owners)
        if self.kind == "file" and self.file is None:
            raise ValueError("has kind=file, which needs a CSV file; set file")
        return self


class RateConfig(Settings):
    """A rate per second; the median alone is a short form of `fixed`."""

    short_form: ClassVar[str | None] = "kind"

    kind: Distribution = Field(
        default="instant",
        description="instant takes no time; lognormal, half_normal and uniform are drawn; file: a CSV file",
    )
    median: Number = Field(default=100.0, gt=0, description="median over clients")
    spread: Number = Field(
        default=0.5,
        ge=0,
        description="for lognormal: deviation of the logarithm; for uniform (below 1): ± share of the median",
    )
    redraw: Redraw = Field(default="client", description="draw once for each client, or in each round")
    file: str | None = Field(default=None, description="for file: CSV with the columns client, per_second")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return {"kind": "fixed", "median": value}
        return value

    @model_validator(mode="after")
    def _of_this_kind(self) -> Self:
        drawn = ["lognormal", "half_normal", "uniform"]
        owners = {
            "median": ["fixed", *drawn],
            "spread": ["lognormal", "uniform"],
            "redraw": drawn,
            "file": ["file"],
        }
        self.check_owner("kind", owners)
        if self.kind == "file" and self.file is None:
            raise ValueError("has kind=file, which needs a CSV file; set file")
        if self.kind == "uniform" and self.spread >= 1:
            raise ValueError(
                f"has spread = {self.spread:g} with kind=uniform, so the lowest rate would be 0; set it below 1"
            )
        return self


class StragglersConfig(Settings):
    """Clients that are slower than the speed of their device."""

    share: Number = Field(default=0.0, ge=0, le=1, description="share of the clients")
    factor: Number = Field(default=10.0, ge=1, description="factor on their time")
    redraw: Redraw = Field(default="client", description="always the same clients, or drawn in each round")


class SystemConfig(Settings):
    """Devices, availability and failures of clients, and waiting for them; by default all answer at once."""

    mode: Mode = Field(
        default="synchronous",
        description="synchronous: rounds of a cohort; buffered: FedBuff, which aggregates after every `buffer` replies",
    )
    availability: AvailabilityConfig = AvailabilityConfig()
    speed: RateConfig = Field(
        default=RateConfig(), description="of a device: gradients of single samples per second"
    )
    bandwidth: RateConfig = Field(
        default=RateConfig(), description="of a client's connection: bytes per second"
    )
    upload: Number = Field(
        default=1.0, gt=0, description="upload bandwidth as a share of the download bandwidth"
    )
    stragglers: StragglersConfig = StragglersConfig()
    dropout: Number = Field(
        default=0.0, ge=0, lt=1, description="probability that a client that was reached never answers"
    )
    deadline: Number | None = Field(
        default=None, gt=0, description="simulated seconds after which the server stops waiting"
    )
    over_selection: Number = Field(
        default=0.0, ge=0, description="share of additional clients to ask; those that answer first count"
    )
    min_replies: Whole = Field(
        default=0,
        ge=0,
        description="number of replies below which a round changes neither the server nor a client",
    )
    buffer: Whole | None = Field(
        default=None,
        ge=1,
        description="for buffered: replies of one aggregation; by default 10, but at most half of the clients",
    )
    concurrency: Whole | None = Field(
        default=None, ge=1, description="for buffered: clients that train at once; by default all"
    )
    staleness: Staleness = Field(
        default="polynomial",
        description="for buffered: weight of an update from τ versions ago; polynomial: 1/√(1 + τ); constant: 1",
    )
    trace: str | None = Field(
        default=None,
        description=(
            "replay a recorded run: trace.jsonl of a job, or a result folder with one per job; it replaces the "
            "simulated system"
        ),
    )
    malicious: MaliciousConfig = MaliciousConfig()

    @property
    def is_simulated(self) -> bool:
        """Whether answers and their times are simulated."""
        fields = type(self).model_fields
        return any(getattr(self, name) != fields[name].default for name in _SIMULATED)

    @model_validator(mode="after")
    def _of_this_mode(self) -> Self:
        synchronous, buffered = ["synchronous"], ["buffered"]
        owners = {"buffer": buffered, "concurrency": buffered, "staleness": buffered}
        self.check_owner("mode", {"over_selection": synchronous, "min_replies": synchronous, **owners})
        return self


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
        default=0.2, ge=0, lt=0.5, description="for trimmed_mean: share of the clients dropped at each end"
    )
    f: Whole = Field(
        default=1, ge=0, description="for krum, multi_krum: number of hostile clients to withstand in a round"
    )
    k: Whole | None = Field(
        default=None, ge=1, description="for multi_krum: number of updates to average; null: all but f"
    )
    bound: Annotated[float | Literal["median"], BeforeValidator(_bound)] = Field(
        default="median",
        description="for norm_bound: largest norm of an update, ≥ 0; median: the median of the round's norms",
    )
    noise: Number = Field(
        default=0.0,
        ge=0,
        description="for norm_bound: standard deviation of normal noise in the mean (weak DP)",
    )


class ServerConfig(Settings):
    """Aggregation of the replies at the server."""

    robust: RobustConfig = RobustConfig()
