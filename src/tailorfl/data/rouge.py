"""ROUGE-1: how many words a text shares with the right one."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from tailorfl.errors import MissingExtraError


class Rouge(NamedTuple):
    """Shares in [0, 1]."""

    precision: float
    recall: float
    f1: float


@functools.lru_cache(maxsize=1 << 16)  # the same few answers meet each other thousands of times
def rouge1(text: str, reference: str) -> Rouge:
    """ROUGE-1 of a text against a reference: the overlap of their words, each counted as often as in both.

    Lower case, no stemming, words of a-z and 0-9 (Lin, 2004, as the package rouge-score computes it). 0 where one of
    the two has no word.

    Raises:
        MissingExtraError: if rouge-score is not installed.
    """
    score = _scorer().score(reference, text)["rouge1"]
    return Rouge(float(score.precision), float(score.recall), float(score.fmeasure))


@functools.cache
def _scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as missing:
        raise MissingExtraError("rouge-score", "text") from missing
    return RougeScorer(["rouge1"], use_stemmer=False)
