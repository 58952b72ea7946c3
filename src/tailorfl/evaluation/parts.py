"""Sums, means and areas of many parts at once, equal to the last bit to those of every part by itself.

A part is a client's samples. Parts lie behind one another in one array, `sizes` [parts] says how long each is. Floating
sums depend on their order, so parts of equal length are summed together, as the rows of a table: numpy sums a row as it
sums an array of that length.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailorfl.partition.rows import Ints

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def owners(sizes: Ints) -> Ints:
    """Return the part of every sample, [samples]."""
    return np.repeat(np.arange(len(sizes)), sizes)


def starts(sizes: Ints) -> Ints:
    """Where every part begins, [parts]."""
    begin: Ints = np.cumsum(sizes) - sizes
    return begin


def tables(sizes: Ints) -> list[tuple[Ints, Ints]]:
    """(parts of one length [m], their samples [m, length]) for every length that occurs, but 0."""
    begin = starts(sizes)
    out = []
    for length in np.unique(sizes[sizes > 0]):
        chosen = np.flatnonzero(sizes == length)
        out.append((chosen, begin[chosen, None] + np.arange(length)))
    return out


def sums(values: Floats, sizes: Ints) -> Floats:
    """Return the sum of every part of `values` [samples], [parts]; 0 of an empty one."""
    out = np.zeros(len(sizes))
    for chosen, samples in tables(sizes):
        out[chosen] = values[samples].sum(axis=1)
    return out


def means(values: Floats, sizes: Ints) -> Floats:
    """Return the mean of every part of `values` [samples], [parts]; NaN of an empty one."""
    with np.errstate(invalid="ignore"):
        return sums(values, sizes) / sizes


def means_where(values: Floats, chosen: Bools) -> Floats:
    """Return the mean over the chosen entries of every row of `values` [parts, entries], [parts].

    NaN where there are none.
    """
    return means(values[chosen], chosen.sum(axis=1))


def areas(scores: Floats, positive: Bools, sizes: Ints) -> Floats:
    """Return the area under the ROC curve of every part, [parts]; each has samples of both classes.

    `scores` [samples] are finite, `positive` [samples]. The curve has a corner for every distinct score, without those
    that lie on a line between their neighbours, and its area is summed by trapezoids, in the order and with the
    roundings of scikit-learn's `roc_auc_score`, which spends most of its time on checking its arguments.
    """
    part = owners(sizes)
    order = np.lexsort((-scores, part))
    ranked, part = scores[order], part[order]
    begin, so_far = starts(sizes), np.cumsum(positive[order], dtype=np.int64)
    right = so_far - np.concatenate([[0], so_far])[begin][part]
    wrong = np.arange(1, len(part) + 1) - begin[part] - right
    # Equal scores are one corner, after the last of them.
    corner = np.concatenate([(ranked[1:] != ranked[:-1]) | (part[1:] != part[:-1]), [True]])
    right, wrong, part = right[corner], wrong[corner], part[corner]
    bends = _bends(right, part) | _bends(wrong, part)
    right, wrong, part = right[bends], wrong[bends], part[bends]
    corners = np.bincount(part, minlength=len(sizes))
    first, last = starts(corners), np.cumsum(corners) - 1
    y, x = right / right[last][part], wrong / wrong[last][part]
    before_y, before_x = np.concatenate([[0.0], y[:-1]]), np.concatenate([[0.0], x[:-1]])
    before_y[first] = before_x[first] = 0.0  # every curve starts at the origin
    return sums((x - before_x) * (y + before_y) / 2.0, corners)


def _bends(counts: Ints, part: Ints) -> Bools:
    """Where the second difference of `counts` is not 0, and at both ends of every part."""
    bends = np.ones(len(counts), dtype=np.bool_)
    inner = (part[2:] == part[:-2]) & (counts[2:] - 2 * counts[1:-1] + counts[:-2] == 0)
    bends[1:-1] = ~inner
    return bends
