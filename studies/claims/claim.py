"""What papers claim, as data: which method against which.

On what, by how much, and what a comparison needs to count.

`papers/PAPER.yaml` holds a paper's claims. A label may name another variant of its recipe, `Global @ 10
classes`, and be a difference of two lines, `Ditto - Local @ 10 classes`; a metric may be a difference of two, `best5 -
worst5`. Gaps and published numbers are shares, not
percent.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from tailorfl.errors import ConfigError, unknown
from tailorfl.settings.base import Number, Settings, listed
from tailorfl.settings.loading import Loader, parsed

Kind = Literal["at least", "at most", "ordered", "sign", "exact"]
"""at least: first − second is positive, `gap` as published; of errors the method with the larger one is first.
at most: first − second is no more than `gap`. ordered: the labels of `published` stand in its order. sign:
first − second is positive, of any size. exact: computed by `check`."""
Gate = Literal["learned", "took part", "trained", "pulled", "settled", "inside grid"]
"""What must be so before a comparison counts, see `studies.claims.gates`."""
Labels = Annotated[tuple[str, ...], BeforeValidator(listed)]
MINUS = " - "
"""Between two lines, or two metrics, whose difference is meant."""
Q = 0.2
"""Share of samples that two compared models differ on, where it was not measured."""


class Claim(Settings):
    """One sentence of a paper that numbers can confirm or refute."""

    id: str = Field(min_length=1)
    text: str = Field(min_length=1)
    source: str = Field(min_length=1, description="table, figure or section")
    kind: Kind
    recipe: str = ""
    variants: Labels = Field(default=(), description="averaged, a number a seed; none: the recipe has none")
    metric: str = "mean"
    first: str = ""
    second: Labels = Field(
        default=(), description="of several, the claim is about the one that it holds least for"
    )
    gap: Number = Field(default=0.0, ge=0)
    published: dict[str, Number] = Field(
        default={}, description="label -> number, of a higher-is-better metric"
    )
    family: str = Field(default="", description="claims that are corrected together; none: all of the page's")
    points: bool = Field(default=True, description="numbers are shares, told in points; else as they are")
    discordance: Number = Field(default=Q, ge=0, le=1)
    gates: tuple[Gate, ...] | None = Field(default=None, description="in place of the paper's")
    check: str = Field(default="", description="name in studies.claims.exact")
    test: str = Field(default="", description="the test of this repository that holds it")
    impossible: str = Field(default="", description="why nothing here can tell")
    elsewhere: str = Field(default="", description="the committed study that judges it")
    missing: str = Field(default="", description="what is not built or run yet")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.impossible or self.elsewhere or self.missing:
            return self
        lacks = {
            "exact": [] if self.check else ["check"],
            "ordered": []
            if len(self.published) > 1 and self.recipe
            else ["recipe and published of two or more"],
        }.get(self.kind, [] if self.recipe and self.first and self.second else ["recipe, first and second"])
        if lacks:
            raise ValueError(f"claim '{self.id}' is of kind '{self.kind}' and lacks {lacks[0]}")
        if self.kind == "at least" and not self.gap and not self._gaps():
            raise ValueError(f"claim '{self.id}' has no gap: give it, or published numbers of both methods")
        return self

    def _gaps(self) -> bool:
        return all(label in self.published for label in (self.first, *self.second))

    def gap_to(self, second: str) -> float:
        """Return the published gap to one of `second`."""
        if self.kind == "at least" and not self.gap:
            return self.published[self.first] - self.published[second]
        return self.gap

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels that it is about."""
        return tuple(self.published) if self.kind == "ordered" else (self.first, *self.second)


class Floor(Settings):
    """What the gates of a paper's comparisons look at: labels of baselines, chance and the best that can be had."""

    fedavg: str = "FedAvg"
    local: str = "LocalTrain"
    chance: Number = 0.1
    ceiling: Number = 1.0


class Paper(Settings):
    """A paper and its claims; its tests share one error probability (Holm)."""

    paper: str
    title: str
    floor: Floor = Floor()
    gates: tuple[Gate, ...] = ()
    claims: tuple[Claim, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        ids = [claim.id for claim in self.claims]
        twice = sorted({one for one in ids if ids.count(one) > 1})
        if twice:
            raise ValueError(f"has {', '.join(twice)} twice")
        return self

    def gates_of(self, claim: Claim) -> tuple[Gate, ...]:
        """Return what a claim's comparison needs."""
        return self.gates if claim.gates is None else claim.gates


def papers(recipe: str | None = None) -> dict[str, Paper]:
    """Return the packaged papers with their claims, by short name; only those that speak of a `recipe`."""
    named = sorted((Path(__file__).parent / "papers").glob("*.yaml"))
    if recipe is not None:  # reports ask for each experiment, and reading all claims takes half a second
        named = [file for file in named if f"recipe: {recipe}\n" in file.read_text(encoding="utf-8")]
    return {file.stem: read_paper(file) for file in named}


def read_paper(file: Path) -> Paper:
    """Return the claims of a YAML file.

    Raises:
        ConfigError: it cannot be read, or a claim has a mistake.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{file}' cannot be read: {error}") from error
    content = parsed(text, Loader, f"'{file}'")
    if not isinstance(content, Mapping):
        raise ConfigError(f"'{file}' should hold paper, title and claims, but is {content!r}"[:200])
    try:
        return Paper.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise ConfigError(f"in '{file}': {place or 'the file'}: {problem['msg']}") from error


def chosen(name: str | None) -> dict[str, Paper]:
    """Return all papers, or the one of a name. Raises ConfigError for a name that there is not."""
    known = papers()
    if name is None:
        return known
    if name not in known:
        raise unknown("paper", name, known)
    return {name: known[name]}
