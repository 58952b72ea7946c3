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
from tailorfl.settings.loading import parsed

Kind = Literal["at least", "at most", "ordered", "sign", "cells", "exact"]
"""at least: first − second is positive, `gap` as published; of errors the method with the larger one is first.
at most: first − second is no more than `gap`. ordered: the labels of `published` stand in its order. sign:
first − second is positive, of any size. cells: the numbers of `published` come out again, within noise of no more than
`gap`. exact: computed by `check`."""
Gate = Literal["learned", "took part", "trained", "pulled", "settled", "inside grid", "faithful"]
"""What must be so before a comparison counts, see `studies.claims.gates`."""
Apart = Literal["", "twin", "trivial", "print", "formula"]
"""What is no statement of its own: a statement read in another way; what could hardly be otherwise, such as the
quantity that a method penalises; whether printed numbers agree with one another; a formula or a count."""
Labels = Annotated[tuple[str, ...], BeforeValidator(listed)]
MINUS = " - "
"""Between two lines, or two metrics, whose difference is meant."""
Q = 0.2
"""Share of samples that two compared models differ on, where nothing was measured or declared: more than any pair
whose predictions were looked at has."""


class Setting(Settings):
    """What a comparison must share with the paper's for the gate `faithful`; what is empty is not asked."""

    network: Labels = Field(default=(), description="names of models that are of the paper's family")
    split: Labels = Field(
        default=(), description="partitions, with the options that matter: dirichlet alpha=0.01"
    )
    turns: Number = Field(default=0, ge=0, description="rounds that a client takes part in, at least")
    head: Literal["", "trained", "frozen"] = ""
    lam: Literal["", "chosen", "pinned"] = Field(default="", description="λ chosen by tuning, or as printed")

    def over(self, paper: Setting) -> Setting:
        """Return the paper's setting with what is given here in place of it."""
        return paper.model_copy(update={name: getattr(self, name) for name in self.model_fields_set})


class Noise(Settings):
    """The noise of a recipe's test samples, where it was not measured on the models themselves."""

    discordance: Number = Field(ge=0, le=1, description="share of samples that two compared models differ on")
    samples: dict[str, Number] = Field(
        default={},
        description="test set -> samples that it may be drawn from in all seeds, each counted once",
    )
    source: str = Field(min_length=1, description="where the numbers are from")


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
    repeats: int = Field(default=1, ge=1, description="repetitions whose mean a published cell is")
    noiseless: bool = Field(
        default=False,
        description="without noise of test samples: the number is no mean over samples that can be tried again",
    )
    setting: Setting = Field(default=Setting(), description="in place of the paper's, setting by setting")
    apart: Apart = ""
    central: bool = Field(default=False, description="what the paper is for")
    note: str = Field(default="", description="what a reader of the verdict must know")
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
            "cells": [] if self.published and self.recipe and self.gap else ["recipe, published and gap"],
        }.get(self.kind, [] if self.recipe and self.first and self.second else ["recipe, first and second"])
        if lacks:
            raise ValueError(f"claim '{self.id}' is of kind '{self.kind}' and lacks {lacks[0]}")
        if self.kind == "exact" and self.apart not in ("print", "formula"):
            raise ValueError(
                f"claim '{self.id}' is exact; say in apart whether it is a formula or about print"
            )
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
        return tuple(self.published) if self.kind in ("ordered", "cells") else (self.first, *self.second)


class Floor(Settings):
    """What the gates of a paper's comparisons look at: labels of baselines, chance and the best that can be had.

    `fedavg` is empty where one model for all is no sign of whether anything was learned.
    """

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
    setting: Setting = Setting()
    noise: dict[str, Noise] = Field(default={}, description="by recipe, where it was not measured")
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

    def setting_of(self, claim: Claim) -> Setting:
        """Return what a claim's comparison must share with the paper."""
        return claim.setting.over(self.setting)


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
    content = parsed(text, f"'{file}'")
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
