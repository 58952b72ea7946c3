"""Papers and evidence of made-up numbers, which tests of claims judge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from scipy import stats

from studies.claims.claim import Paper
from studies.claims.evidence import Evidence
from studies.claims.judging import Outcome, judge_paper

BETTER = {"kind": "at least", "first": "a", "second": "b", "gap": 0.05}
NOISELESS = {**BETTER, "noiseless": True}
MLP = {"network": "mlp", "split": "dirichlet alpha=0.1", "head": "trained"}


def paper(*claims: dict[str, Any], **more: Any) -> Paper:
    """Return a paper with these claims about the recipe `r`: c0, c1, ..."""
    named = [{"id": f"c{k}", "text": "t", "source": "s", "recipe": "r", **c} for k, c in enumerate(claims)]
    return Paper.model_validate({"paper": "p", "title": "P", "claims": named, **more})


def evidence(
    numbers: Mapping[str, list[float]], scale: str = "small", variant: str = "", **facts: float
) -> Evidence:
    """Return evidence of the recipe `r`: label -> its number with each seed; all jobs have the same facts."""
    rows = [
        {"variant": variant, "label": label, "seed": seed, "mean": value, "deployed.global": value - 0.1, **facts}
        for label, values in numbers.items()
        for seed, value in enumerate(values)
    ]  # fmt: skip
    return Evidence("r", scale, ("here",), "d", tuple(rows), {variant: MLP})


def together(*parts: Evidence) -> Evidence:
    """Return the evidence of several variants as one."""
    return replace(parts[0], rows=tuple(row for part in parts for row in part.rows))


def with_facts(found: Evidence, facts: Mapping[str, Mapping[str, float]]) -> Evidence:
    """Return evidence in which jobs of a label have these facts."""
    return replace(found, rows=tuple({**row, **facts.get(row["label"], {})} for row in found.rows))


def outcome_of(claim: dict[str, Any], *found: Evidence, **more: Any) -> Outcome:
    """Return the outcome of a paper's only claim."""
    (outcome,) = judge_paper(paper(claim, **more), found)
    return outcome


def differences_of(mean: float, width: float, seeds: int = 4) -> list[float]:
    """Return differences of a given mean whose t interval has a given half width."""
    base = np.linspace(-1, 1, seeds)
    wide = stats.t.ppf(0.975, seeds - 1) * base.std(ddof=1) / math.sqrt(seeds)
    return (mean + base * width / wide).tolist()
