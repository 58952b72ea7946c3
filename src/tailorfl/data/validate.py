"""Checks that a federation can be trained and judged; errors for what is wrong, warnings for what is weak."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tailorfl.data.dealing import client_number
from tailorfl.data.federation import PARTS, Federation, Part
from tailorfl.data.source import all_finite
from tailorfl.errors import DataError, first_few
from tailorfl.partition.rows import Ints

_SHOWN = 5


def validate(federation: Federation, excluded: Sequence[str] = ()) -> None:
    """Nothing if a federation can be trained and judged; clients that were `excluded` have no samples.

    Raises:
        DataError: for rows that do not exist, a row in two parts or at two clients, clients without training
            samples, and numbers that are not finite.
    """
    _check_rows(federation)
    _check_overlap(federation)
    _check_train(federation, excluded)
    _check_finite(federation)


def _check_rows(federation: Federation) -> None:
    samples = len(federation.source)
    rows_of_part: dict[str, Ints] = {part: _rows_of(federation, part) for part in PARTS}
    for part, flat in {**rows_of_part, "server": federation.server}.items():
        wrong = flat[(flat < 0) | (flat >= samples)]
        if len(wrong):
            raise DataError(
                f"{part} rows must lie in 0..{samples - 1}, the rows of source '{federation.source.name}', "
                f"but {_holders(federation, int(wrong[0]))} has row {wrong[0]}"
            )


def _check_overlap(federation: Federation) -> None:
    """No row may serve two purposes; clients may share test rows if all have the same ones, or if they are official."""
    official = federation.source.test
    shareable = np.zeros(len(federation.source), dtype=bool) if official is None else official.numpy()
    used_as = np.zeros(len(federation.source), dtype=np.uint8)  # 0: in none so far, else 1 + the kind
    kinds = [f"{part} part" for part in PARTS] + ["server's validation set"]
    pools = [*(_rows_of(federation, part) for part in PARTS), federation.server]
    for kind, rows in enumerate(pools):
        if kinds[kind] == "test part":
            rows = _shared_once(federation, rows, shareable)
        before = used_as[rows]
        used_as[rows] = kind + 1
        if before.any() or np.count_nonzero(used_as == kind + 1) < len(rows):
            earlier = np.zeros(len(used_as), dtype=np.uint8)
            earlier[rows] = before
            twice = np.flatnonzero((np.bincount(rows, minlength=len(used_as)) > 1) | (earlier > 0))
            row = int(twice[0])
            other_kind = kinds[earlier[row] - 1] if earlier[row] else kinds[kind]
            raise DataError(
                f"{len(twice)} samples are used twice: row {row} is in the {kinds[kind]} of "
                f"{_holders(federation, row)} and again in the {other_kind}; a sample may be in one part of one "
                "client only"
            )


def _check_train(federation: Federation, excluded: Sequence[str]) -> None:
    is_empty = federation.sizes("train") == 0
    is_empty[[client_number(federation.names, name) for name in excluded]] = False
    empty = np.flatnonzero(is_empty)
    if len(empty):
        raise DataError(
            f"{len(empty)} clients have no training samples: {_named(federation, empty)}; use fewer clients, "
            "a larger min_size (or reserve) in partition_options, or a larger train share in split"
        )


def _check_finite(federation: Federation) -> None:
    source = federation.source
    pools = np.concatenate([*(_rows_of(federation, part) for part in PARTS), federation.server])
    for field_name, values in (("features", source.x), ("target", source.y)):
        if not values.is_floating_point() or all_finite(values):
            continue
        bad = np.flatnonzero(~torch.isfinite(values.reshape(len(source), -1)).all(dim=1).numpy())
        used = bad[np.isin(bad, pools)] if len(bad) else bad
        if len(used):
            row = int(used[0])
            raise DataError(
                f"{len(used)} samples hold numbers that are not finite (NaN or infinity), first the {field_name} "
                f"of sample {row} of {_holders(federation, row)}; remove or impute them before building the "
                "federation"
            )


def weaknesses(federation: Federation) -> list[str]:
    """Return what is weak about a valid federation, a sentence each.

    That is clients with a single training sample, with one class only (in training, or in testing too), with test
    classes they never see in training, and with nothing to be tested or selected by.
    """
    train = federation.sizes("train")
    learned, tested = federation.describe("train"), federation.describe("test")
    unseen = np.where(learned == 0, tested, 0).sum(axis=1)
    several = bool((learned.sum(axis=0) > 0).sum() > 1)
    one_class = ((learned > 0).sum(axis=1) == 1) & (train > 1) & several
    guessable = one_class & (federation.sizes("test") > 0) & (unseen == 0)
    cases = [
        (train == 1, "have a single training sample"),
        (guessable, "have one class only, so always guessing it is perfect there"),
        (one_class & ~guessable, "have training samples of one class only"),
        ((federation.sizes("test") == 0) & (train > 0), "have no test samples and cannot be evaluated"),
    ]
    if len(federation.part("test").once()[0]) > 1:  # one global test set holds unseen classes by intention
        mostly_unseen = 2 * unseen > tested.sum(axis=1)
        cases.append((mostly_unseen, "are tested mostly on classes they have no training samples of"))
    if federation.sizes("val").any():
        cases.append(((federation.sizes("val") == 0) & (train > 0), "have no validation samples"))
    messages = [
        f"{mask.sum()} of {len(federation)} clients {text}: {_named(federation, np.flatnonzero(mask))}"
        for mask, text in cases
        if mask.any()
    ]
    if not federation.sizes("val").any():
        messages.append("no client has validation samples, so nothing can be selected by validation")
    return messages


def _rows_of(federation: Federation, part: Part) -> Ints:
    """Return the rows of all clients in one part, those of a shared array once."""
    return federation.part(part).once()[0].flat()


def _holders(federation: Federation, row: int) -> str:
    """Return the first clients that hold a row, for messages."""
    holders = [
        client
        for client in range(len(federation))
        if any(bool((federation.part(part)[client] == row).any()) for part in PARTS)
    ]
    return _named(federation, np.array(holders, dtype=np.int64)) if holders else "the server"


def _named(federation: Federation, clients: Ints) -> str:
    names = [f"'{federation.names[client]}'" for client in clients]
    return f"client{'s' if len(clients) > 1 else ''} {first_few(names, _SHOWN)}"


def _shared_once(federation: Federation, rows: Ints, shareable: NDArray[np.bool_]) -> Ints:
    """Test rows where those that several clients may share stand once, but for those that a client has twice."""
    if np.bincount(rows).max(initial=0) <= 1:  # many times faster than np.unique
        return rows
    distinct = federation.part("test").once()[0]
    pairs = distinct.owners() * len(federation.source) + distinct.flat()
    if len(np.unique(pairs)) < len(pairs):
        return rows
    return np.concatenate([rows[~shareable[rows]], np.unique(rows[shareable[rows]])])
