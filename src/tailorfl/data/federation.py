"""Clients as rows of one data set, the input of every method, engine and evaluation, and checks of its validity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from tailorfl.data.source import Source, all_finite, clean_names
from tailorfl.errors import ConfigError, DataError, check_known, first_few, unknown
from tailorfl.partition.rows import Ints, Rows

Part = Literal["train", "val", "test"]
PARTS: tuple[Part, ...] = ("train", "val", "test")


@dataclass(frozen=True, eq=False)
class Federation:
    """A data set dealt to clients. Samples stay in `source`; a client is three lists of rows.

    Attributes:
        source: the samples.
        train, val, test: per client int64 rows of `source`; any sequence is converted to `Rows`. Clients
            0..num_clients-1 train; the others are held out and must never contribute to anything shared.
        names: name of every client.
        num_clients: number of training clients.
        server: int64 rows that the server, and no client, holds for validation (`dirichlet_perada`).
        public: unlabelled samples that the server and every client may use (its labels are blanked), or None.
        shifted: by name, sources whose rows are all test data: corrupted images, a held-out domain.

    Raises:
        DataError: if the lists do not fit together.
    """

    source: Source
    train: Sequence[Ints]
    val: Sequence[Ints]
    test: Sequence[Ints]
    names: tuple[str, ...]
    num_clients: int
    server: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    public: Source | None = None
    shifted: Mapping[str, Source] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", clean_names(self.names))
        for part in PARTS:
            object.__setattr__(self, part, Rows.of(getattr(self, part)))
        counts = {len(self.train), len(self.val), len(self.test), len(self.names)}
        if len(counts) > 1 or not 1 <= self.num_clients <= len(self.train):
            raise DataError(
                "a federation needs one train, val and test list and one name per client and 1 <= "
                f"num_clients, but got {len(self.train)}, {len(self.val)}, {len(self.test)} lists, "
                f"{len(self.names)} names and num_clients={self.num_clients}"
            )

    def __len__(self) -> int:
        """Return the number of clients, held-out ones included."""
        return len(self.train)

    def part(self, part: Part) -> Rows:
        """Return the rows of every client in one part: "train", "val" or "test"."""
        return Rows.of(getattr(self, part))

    def places(self, client: int) -> tuple[Ints, dict[Part, Ints]]:
        """Return all rows of a client, int64, ascending, and the positions of each part's rows among them."""
        parts = {part: self.part(part)[client] for part in PARTS}
        rows = np.unique(np.concatenate(list(parts.values())))
        return rows, {part: np.searchsorted(rows, part_rows) for part, part_rows in parts.items()}

    def of_clients(self, order: Ints) -> Federation:
        """Return the federation of only the clients `order` (int64), in this order; all of them train."""
        train, val, test = (Rows.of(rows).of_clients(order) for rows in (self.train, self.val, self.test))
        names = tuple(self.names[i] for i in order.tolist())
        return replace(self, train=train, val=val, test=test, names=names, num_clients=len(order))

    @property
    def members(self) -> tuple[int, ...]:
        """The training clients that have samples: all but those left out by `without`."""
        return tuple(np.flatnonzero(self.sizes()[: self.num_clients]).tolist())

    def number(self, client: str | int) -> int:
        """Return the number of a client, given its name, or its number if no client has such a name.

        Raises:
            ConfigError: there is no such client, or it was left out.
        """
        numbers = (*self.members, *range(self.num_clients, len(self)))
        by_name, client = {self.names[i]: i for i in numbers}, str(client)
        if client not in self.names and client.isdecimal() and int(client) in numbers:
            return int(client)
        check_known("client of the run", client, by_name)
        number: int = by_name[client]
        return number

    def without(self, names: Sequence[str]) -> Federation:
        """Return the federation in which these training clients have no rows; every client keeps its number.

        Raises:
            ConfigError: one of them is not a training client, or nobody is left.
        """
        training = self.names[: self.num_clients]
        for name in names:
            check_known("training client", name, training)
        if names and set(names) >= {training[i] for i in self.members}:
            raise ConfigError(
                f"no client is left to train without {', '.join(names)}; exclude fewer (data.excluded_clients)"
            )
        places = np.array([training.index(name) for name in names], dtype=np.int64)
        train, val, test = (self.part(part).emptied(places) for part in PARTS)
        return replace(self, train=train, val=val, test=test)

    def sizes(self, part: Part = "train") -> Ints:
        """Return the number of samples of every client in one part, int64 `[clients]`, held-out clients included."""
        return self.part(part).sizes

    def global_test(self, clients: Sequence[int] | None = None) -> Ints:
        """Return the sorted int64 union of the test rows of the training clients, or of `clients`."""
        chosen = np.arange(self.num_clients) if clients is None else np.asarray(clients, dtype=np.int64)
        distinct, _ = self.part("test").of_clients(chosen).once()
        is_tested = np.zeros(len(self.source), dtype=np.bool_)
        is_tested[distinct.flat()] = True
        return np.flatnonzero(is_tested)

    def describe(self, part: Part = "train") -> Ints:
        """Return the number of samples of every stratum (class) at every client, int64 `[clients, strata]`."""
        strata = self.source.strata.numpy()
        width = int(strata.max()) + 1 if len(strata) else 0
        distinct, which = self.part(part).once()
        cells = distinct.owners() * width + strata[distinct.flat()]
        return np.bincount(cells, minlength=len(distinct) * width).reshape(len(distinct), width)[which]


def client_number(names: Sequence[str], name: str) -> int:
    """Return the number of the client `name`, which is its name in the data, or its number there.

    Raises:
        ConfigError: there is no such client; names the nearest.
    """
    if name in names:
        return list(names).index(name)
    if name.isdecimal() and int(name) < len(names):
        return int(name)
    raise unknown("client", name, list(names))


_SHOWN = 5


def validate(federation: Federation, excluded: Sequence[str] = ()) -> None:
    """Check that a federation can be trained and evaluated. Clients that were `excluded` have no samples.

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
    """Check that no row has two uses; clients may share test rows if all have the same ones or they are official."""
    official = federation.source.test
    shareable = np.zeros(len(federation.source), dtype=bool) if official is None else official.numpy()
    used_as = np.zeros(len(federation.source), dtype=np.uint8)  # 0: not used so far, else 1 + the kind
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
    """Return the weaknesses of a valid federation, a sentence each.

    These are clients with a single training sample, with one class only (in training, or in testing too), tested
    mostly on classes they never see in training, and without test or validation samples.
    """
    train = federation.sizes("train")
    learned, tested = federation.describe("train"), federation.describe("test")
    unseen = np.where(learned == 0, tested, 0).sum(axis=1)
    several = bool((learned.sum(axis=0) > 0).sum() > 1)
    one_class = ((learned > 0).sum(axis=1) == 1) & (train > 1) & several
    guessable = one_class & (federation.sizes("test") > 0) & (unseen == 0)
    cases = [
        (train == 1, "have a single training sample"),
        (guessable, "have only one class, so a constant prediction is perfect there"),
        (one_class & ~guessable, "have training samples of only one class"),
        ((federation.sizes("test") == 0) & (train > 0), "have no test samples and cannot be evaluated"),
    ]
    if len(federation.part("test").once()[0]) > 1:  # a global test set holds unseen classes by design
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
        messages.append(
            "no client has validation samples, so models and settings cannot be chosen by validation"
        )
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
    """Return test rows with each shareable row once; all rows unchanged if one client has a row twice."""
    if np.bincount(rows).max(initial=0) <= 1:  # many times faster than np.unique
        return rows
    distinct = federation.part("test").once()[0]
    pairs = distinct.owners() * len(federation.source) + distinct.flat()
    if len(np.unique(pairs)) < len(pairs):
        return rows
    return np.concatenate([rows[~shareable[rows]], np.unique(rows[shareable[rows]])])
