"""The noise that seeds do not average away, measured: what differences of several seeds share, sample by sample.

A difference of two methods with seed s is a sum over test samples, d_s = Σ_i w_si (a_si − b_si), where w are the
weights that the metric gives them and a, b the scores of both methods' models. Means over seeds keep what two seeds
s ≠ t have in common, Cov(d_s, d_t) = Σ_i v_si v_ti with v_si = w_si (a_si − b_si − d_s), summed over the samples that
both test. Where all seeds test the same samples that is q/N at most, with q the share that one method has right and
the other wrong; where splits are redrawn by seed it is as much smaller as they meet more rarely, so that what is in
the spread over seeds already is not counted again. A sample that several clients test is one sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from studies.claims.claim import MINUS, Claim
from tailorfl.errors import RunError
from tailorfl.report.result import ExperimentResult
from tailorfl.runs.records import load_predictions
from tailorfl.runs.trained_models import Restored, restore

if TYPE_CHECKING:
    import pandas as pd

FILE = "noise.csv"
SEEDS = 4
"""At most so many are looked at."""
KEY = ("metric", "variants", "first", "second")
BATCH = 1000
Term = tuple[float, str, str]
"""Sign, label and variant of a line that a difference is made of."""
TAILS = {"worst5": 0.05, "best5": 0.05, "worst10": 0.1, "best10": 0.1}
"""Share of the clients that a metric is about; of all others it is 1."""


def measured_on(metric: str) -> tuple[str, float]:
    """Return the test set of a metric, and the share of its clients that it is about."""
    steps = metric.split(".")
    if len(steps) >= 4:
        return steps[1], TAILS.get(steps[-1], 1.0)
    if steps[0] in ("deployed", "shared"):
        return ".".join(steps[1:]), 1.0
    return "local", TAILS.get(metric, 1.0)


def shared_variance(shares: Sequence[pd.Series[float]]) -> float:
    """Return the variance of a mean over seeds that more seeds would not lower.

    Args:
        shares: of every seed, by sample, its share v in that seed's difference; together they are 0.

    Returns:
        The mean over pairs of seeds of Σ v v', 0 where that is negative.

    Raises:
        ValueError: there are fewer than two seeds.
    """
    import pandas as pd

    if len(shares) < 2:
        raise ValueError(f"what seeds share takes two of them, got {len(shares)}")
    whole = pd.concat(shares).groupby(level=0).sum()
    single = sum(float((share**2).sum()) for share in shares)
    return max(0.0, (float((whole**2).sum()) - single) / (len(shares) * (len(shares) - 1)))


def share(scores: pd.DataFrame, by_client: bool) -> pd.Series[float]:
    """Return every sample's share in a mean of scores, less the mean's own.

    Args:
        scores: a row for each time that a client's model is tried on a sample: client, sample, score.
        by_client: whether clients count alike, as in `mean`, or samples, as in `weighted_mean`.
    """
    import pandas as pd

    sizes = scores.groupby("client")["score"].transform("size")
    weights = 1 / (sizes * scores["client"].nunique()) if by_client else 1 / len(scores)
    centred = weights * (scores["score"] - (weights * scores["score"]).sum())
    return pd.Series(centred).groupby(scores["sample"]).sum()


def pairs(claim: Claim) -> Iterator[tuple[tuple[str, str, str, str], tuple[Term, ...]]]:
    """Yield the key of every difference that a claim is about, and its terms.

    None of what is not a mean over all clients: a tail's clients differ by method and seed.
    """
    if any(measured_on(metric)[1] < 1 for metric in claim.metric.split(MINUS)):
        return
    labels = [(claim.first, second) for second in claim.second]
    if claim.kind == "ordered":
        labels = list(itertools.combinations(claim.published, 2))
    for first, second in labels if claim.kind != "cells" and MINUS not in claim.metric else ():
        terms = (*_terms(claim, first, 1.0), *_terms(claim, second, -1.0))
        yield (claim.metric, "; ".join(claim.variants), first, second), terms


def measured(found: Mapping[str, ExperimentResult], claims: Iterable[Claim]) -> list[dict[str, Any]]:
    """Return a row for each difference of the claims whose models' predictions can be had, of results by variant."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    tried: dict[tuple[str, ...], pd.Series[float] | None] = {}

    def share_of(metric: str, label: str, variant: str, seed: int) -> pd.Series[float] | None:
        key = (metric, label, variant, str(seed))
        if key not in tried:
            scores = scores_of(found[variant], label, seed, metric)
            tried[key] = None if scores is None else share(scores, metric != "weighted_mean")
        return tried[key]

    for key, terms in (pair for claim in claims if not claim.noiseless for pair in pairs(claim)):
        if key in rows or not all(variant in found for _, _, variant in terms):
            continue
        shares = []
        for seed in _seeds(found, terms):
            parts = [(sign, share_of(key[0], label, variant, seed)) for sign, label, variant in terms]
            if all(part is not None for _, part in parts):
                shares.append(_sum([sign * part for sign, part in parts if part is not None]))
        if len(shares) > 1:
            rows[key] = {
                **dict(zip(KEY, key, strict=True)),
                "variance": shared_variance(shares),
                "seeds": len(shares),
            }
    return list(rows.values())


def read_noise(folder: Path) -> dict[tuple[str, str, str, str], float]:
    """Return key -> variance of a folder of kept evidence; nothing where none was measured."""
    import pandas as pd

    if not (folder / FILE).is_file():
        return {}
    frame = pd.read_csv(folder / FILE, keep_default_na=False)
    return {tuple(str(row[name]) for name in KEY): float(row["variance"]) for row in frame.to_dict("records")}  # type: ignore[misc]


def _terms(claim: Claim, label: str, sign: float) -> Iterator[Term]:
    lines, at, variant = label.partition(" @ ")
    variants = (variant,) if at else (claim.variants or ("",))
    for place, line in enumerate(lines.split(MINUS)):
        for one in variants:
            yield (sign / len(variants) if place == 0 else -sign / len(variants)), line, one


def _seeds(found: Mapping[str, ExperimentResult], terms: Iterable[Term]) -> list[int]:
    """The first seeds that all lines of a difference have."""
    there = [
        {s["seed"] for s, _ in found[variant].jobs if s["label"] == label} for _, label, variant in terms
    ]
    return sorted(set.intersection(*there))[:SEEDS]


def _sum(parts: Sequence[pd.Series[float]]) -> pd.Series[float]:
    import pandas as pd

    return pd.concat(parts).groupby(level=0).sum()


def scores_of(result: ExperimentResult, label: str, seed: int, metric: str) -> pd.DataFrame | None:
    """Return client, sample and score of a job on a metric's test set; None where its models or scores are not had."""
    import pandas as pd

    model, part, *_ = metric.split(".") if "." in metric else ("deployed", "local")
    store = next(store for s, store in result.jobs if (s["label"], s["seed"]) == (label, seed))
    kept = load_predictions(store.path) if (model, part) == ("deployed", "local") else None
    if kept is not None:
        scores = _score(kept.task, kept.y, kept.outputs)
        return (
            None
            if scores is None
            else pd.DataFrame({"client": kept.client, "sample": kept.row, "score": scores})
        )
    try:
        job = restore(result.path, label, seed)
    except RunError:
        return None
    frames = list(_tried(job, model, part))
    return pd.concat(frames) if frames else None


def _tried(job: Restored, model: str, part: str) -> Iterator[pd.DataFrame]:
    """Yield what each model says of each sample of a test set."""
    import pandas as pd
    import torch

    federation = job.sim.given
    clients = range(federation.num_clients)
    shared = model in ("shared", "global")
    models = itertools.cycle(job.global_models()) if shared and part == "local" else None
    chosen = models or (job.global_models() if shared else job.models(clients))
    for client, deployed in zip(clients, chosen, strict=False):
        if part == "local":
            sets = [(federation.source, federation.part("test")[client])]
        elif part == "global":
            sets = [(federation.source, federation.global_test())]
        else:
            names = federation.shifted if part == "shifted" else [part]
            sets = [(federation.shifted[name], np.arange(len(federation.shifted[name]))) for name in names]
        for place, (source, rows) in enumerate(sets):
            parts = torch.split(torch.as_tensor(rows), BATCH)
            with torch.no_grad():
                outputs = torch.cat([deployed.module(source.take(some)) for some in parts]).numpy()
            scores = _score(source.task, source.targets(torch.as_tensor(rows)).numpy(), outputs)
            if scores is not None:
                names_of = [f"{source.name} {place} {row}" for row in np.asarray(rows).tolist()]
                yield pd.DataFrame({"client": client, "sample": names_of, "score": scores})


def _score(task: str, y: np.ndarray, outputs: np.ndarray) -> np.ndarray | None:
    """Return what a metric is the mean of: whether a sample is right, or its squared error; None of other tasks."""
    if task == "classification":
        return np.asarray(outputs.argmax(-1) == y, dtype=np.float64)
    if task == "binary":
        return np.asarray((outputs.reshape(-1) > 0) == (y.reshape(-1) > 0.5), dtype=np.float64)
    if task == "regression":
        return np.asarray(
            ((outputs.reshape(len(y), -1) - y.reshape(len(y), -1)) ** 2).mean(1), dtype=np.float64
        )
    return None
