"""Prepare features for models after the split: encode words, fill gaps, standardise numbers.

All constants come from training rows, shared ones from those of training clients. A table takes the same steps in a
simulation and in a deployment where each client has only its own file: `summarise` at each client, `combine` at the
server, `by_training_rows` at each client. Other numbers go through `tailorfl.data.scaling`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tailorfl.data.columns import class_names, kind_of, numbers_of, numeric, tidy, words_of
from tailorfl.data.constants import Constants, combine, read_constants
from tailorfl.data.federation import Federation
from tailorfl.data.scaling import (
    FITTED_TABLE,
    PRIVATE_SCALING,
    SCALING,
    Scaling,
    check_unshared,
    standardised,
)
from tailorfl.data.source import Source, strata_of
from tailorfl.data.summaries import CLASSES, Roles, Summary, summarise
from tailorfl.errors import ConfigError, DataError
from tailorfl.partition.rows import Ints
from tailorfl.settings.data import Normalisation

if TYPE_CHECKING:
    import pandas as pd  # at run time only when tables are read: it takes 60 MB

TABLE = "table"
"""Key of `Source.info`: the `RawTable` that a source was read from, until it is prepared."""

GIVEN = "given"
"""Key of `Source.info`: `given_digest` of the source that these samples were prepared from."""

PREPARATION = "preparation"
"""Key of `Source.info`: the `Preparation` that made `Source.x` from a table."""


@dataclass(frozen=True, eq=False)
class RawTable:
    """A table as it was read, and the roles of its columns."""

    frame: pd.DataFrame
    roles: Roles

    def numbers(self, name: str) -> Tensor:
        """Return float32 `[rows, features]`, NaN where a cell is missing and throughout columns of words.

        Raises:
            DataError: a number that float32 cannot hold.
        """
        columns = [
            numbers_of(name, column, values) if is_number else np.full(len(values), np.nan)
            for column, values, is_number in self._features()
        ]
        return torch.from_numpy(np.stack(columns, axis=1).astype(np.float32))

    def feed(self, digest: Any) -> None:
        """Add to a digest the content that `numbers` leaves out: the roles, and the columns of words."""
        digest.update(self.roles.model_dump_json().encode())
        for column, values, is_number in self._features():
            if not is_number:
                digest.update(repr((column, words_of(values))).encode())

    def _features(self) -> Iterator[tuple[str, pd.Series[Any], bool]]:
        """Yield (name, cells, whether they are numbers) of every feature."""
        for column in self.roles.inputs(self.frame):
            values = tidy(self.frame[column], self.roles.na_values)
            yield column, values, column not in self.roles.words and kind_of(values) == "number"


@dataclass(frozen=True, eq=False)
class ClientRows:
    """The rows of a table that belong to one client.

    Attributes:
        name: of the client.
        rows: int64, all of them, ascending.
        train: int64 positions in `rows` of its training rows.
    """

    name: str
    rows: Ints
    train: Ints

    def summarise(self, table: RawTable) -> Summary:
        """Return the client's summary of its rows of a table."""
        return summarise(table.frame.iloc[self.rows], table.roles, self.train, self.name)


@dataclass(frozen=True, eq=False)
class Preparation:
    """The constants of a federation of tables.

    Attributes:
        everyone: of all training clients; for clients without their own.
        own: by client name; also for clients that use those of all but lack a column.
    """

    everyone: Constants
    own: Mapping[str, Constants] = field(default_factory=dict)

    @classmethod
    def by_client(
        cls, everyone: Constants, fitted: Mapping[str, Constants], summaries: Sequence[Summary]
    ) -> Preparation:
        """Return the constants of a federation, with the columns that each client lacks.

        Args:
            everyone: of all training clients.
            fitted: by client name, for clients with their own constants.
            summaries: of clients' training rows.
        """
        of_clients = dict(fitted)
        for summary in summaries:
            present = {
                column for column, column_summary in summary.columns.items() if column_summary.kind != "empty"
            }
            if absent := tuple(column for column in everyone.columns if column not in present):
                of_client = of_clients.get(summary.name, everyone)
                of_clients[summary.name] = of_client.model_copy(update={"absent": absent})
        return cls(everyone, of_clients)

    def of(self, client: str | None) -> Constants:
        """Return the constants of a client."""
        return self.everyone if client is None else self.own.get(client, self.everyone)

    def facts(self) -> dict[str, Any]:
        """Return the constants as a JSON-compatible dictionary."""
        of_clients = {name: constants.to_dict() for name, constants in self.own.items()}
        return {**self.everyone.to_dict(), **({"clients": of_clients} if of_clients else {})}


def given_digest(source: Source) -> str:
    """Return a digest of the samples as they were given, which is the same for every seed."""
    if GIVEN in source.info:
        return str(source.info[GIVEN])
    digest = hashlib.blake2b(digest_size=16)
    source.feed(digest)
    if TABLE in source.info:
        source.info[TABLE].feed(digest)
    return digest.hexdigest()


def plain(source: Source) -> Source:
    """Return the source with its features unprepared.

    Raises:
        ConfigError: such a table has the options `words` or `na_values`.
        DataError: it is a table with words or empty cells.
    """
    table: RawTable | None = source.info.get(TABLE)
    if table is None:
        return source
    if bool(source.x.isnan().any()):
        if table.roles.words or table.roles.na_values:
            raise ConfigError(
                "data.options.words and na_values need data.normalise=federated or client, which prepares the table"
            )
        try:
            numeric(source.name, table.frame, table.roles.inputs(table.frame))
        except DataError as error:
            raise DataError(
                f"{error}; data.normalise=federated (or client) encodes words, fills empty cells and scales numbers; "
                "data.options.exclude leaves out columns such as ids and dates"
            ) from error
    return replace(source, info=_without_table(source))


def by_constants(source: Source, constants: str | Path | Constants) -> Source:
    """Return the source of a table prepared by given constants, such as public ones.

    Raises:
        ConfigError: they are for another label or task.
        DataError: they cannot be read, or the table does not fit them.
    """
    table: RawTable = source.info[TABLE]
    used = constants if isinstance(constants, Constants) else read_constants(constants)
    ours, theirs = table.roles, used.roles
    if (ours.label, ours.task) != (theirs.label, theirs.task):
        raise ConfigError(
            f"the constants are for the label {', '.join(theirs.label)} ({theirs.task}), but the label is "
            f"{', '.join(ours.label)} ({ours.task})"
        )
    if not used.classes:
        used = used.model_copy(update={"classes": tuple(source.info.get("classes", ()))})
    x, y = used.apply(table.frame, source.name)
    info = {**_without_table(source), "features": used.names, PREPARATION: Preparation(used)}
    if used.classes:
        info["classes"] = used.classes
    return replace(source, x=x, y=y, outputs=used.outputs, info=info)


def prepared(federation: Federation, by: Normalisation, founders: int | None = None) -> Federation:
    """Return the federation with every feature prepared by statistics of training rows.

    Args:
        federation: its source holds floats, or a table.
        by: "federated": of all training clients together; "client": of each client separately (words are encoded alike
            for all). Rows of no client use those of all training clients.
        founders: for a table, the statistics are of this many first clients only; None: of all training clients.

    Raises:
        ConfigError: medians are requested and the statistics are federated.
        DataError: a column cannot be prepared, see `combine`; features are neither floats nor a table.
    """
    original = federation.source
    federation = replace(
        federation, source=replace(original, info={**original.info, GIVEN: given_digest(original)})
    )
    table: RawTable | None = federation.source.info.get(TABLE)
    if table is None:
        if PREPARATION in federation.source.info:
            raise ConfigError(
                f"the constants of '{federation.source.name}' are given by data.options.constants; leave out "
                "data.normalise, or the constants"
            )
        return standardised(federation, by)
    check_medians(table.roles, by)
    # An excluded client has no rows, so it contributes to no constant.
    places = {i: federation.places(i) for i in range(len(federation)) if federation.sizes()[i]}
    clients = [ClientRows(federation.names[i], rows, parts["train"]) for i, (rows, parts) in places.items()]
    if by == "client":
        check_unshared(np.concatenate([client.rows for client in clients]))
    summaries = [client.summarise(table) for client in clients]
    # Classes are those of every row of the source, discarded ones too: a client's summary of its file has them as well.
    classes = {"classes": tuple(federation.source.info.get("classes", ()))}
    fitted = [s for i, s in zip(places, summaries, strict=True) if i < (founders or federation.num_clients)]
    everyone = combine(fitted).model_copy(update=classes)
    source = by_training_rows(federation.source, everyone, clients, summaries, by)
    return replace(federation, source=source)


def by_training_rows(
    source: Source,
    everyone: Constants,
    clients: Sequence[ClientRows],
    summaries: Sequence[Summary],
    by: Normalisation,
) -> Source:
    """Return the source of a table prepared by constants of training rows, of all clients or in one client's process.

    Args:
        source: the table, of all clients or of one.
        everyone: the result of `combine` for the summaries of all training clients.
        clients: those whose rows the table has.
        summaries: one for each of them.
        by: "federated": constants of all training clients together; "client": of each client separately (words are
            encoded alike for all). Rows of no client use those of all training clients.

    Raises:
        DataError: the table does not fit the constants.
    """
    table, prepared_source = source.info[TABLE], by_constants(source, everyone)
    fitted: dict[str, Constants] = {}
    for client in clients if by == "client" else ():
        frame = table.frame.iloc[client.rows]
        fitted[client.name] = everyone.fitted_to(frame, client.train)
        prepared_source.x[torch.from_numpy(client.rows)] = fitted[client.name].inputs(frame)
    info = {
        **prepared_source.info,
        PREPARATION: Preparation.by_client(everyone, fitted, summaries),
        PRIVATE_SCALING: FITTED_TABLE,
    }
    return replace(prepared_source, info=info)


def prepared_alike(source: Source, given: Source) -> Source:
    """Return another data set with features prepared like those of `source`, by its constants for rows of no client.

    Features that are prepared or scaled already stay as they are.

    Raises:
        DataError: a table lacks a column, or has cells that models of `source` cannot read.
    """
    table: RawTable | None = given.info.get(TABLE)
    preparation: Preparation | None = source.info.get(PREPARATION)
    if table is not None and preparation is not None:
        info = {**_without_table(given), "features": preparation.everyone.names}
        return replace(given, x=preparation.everyone.inputs(table.frame, given.name), info=info)
    given = plain(given)
    scaling: Scaling | None = source.info.get(SCALING)
    is_alike = (given.x.shape[1:], given.x.dtype) == (source.x.shape[1:], torch.float32)
    if scaling is None or SCALING in given.info or not is_alike:
        return given
    return replace(given, x=scaling.apply(given.x))


def check_medians(roles: Roles, by: Normalisation) -> None:
    """Raise ConfigError if medians are requested and the statistics are those of all clients together."""
    if by == "federated" and roles.impute == "median":
        raise ConfigError(
            "data.options.impute=median does not work with data.normalise=federated, since the median of all clients "
            "cannot be computed from sums; set data.options.impute=mean, or let each client use its own median "
            "(data.normalise=client)"
        )


def _without_table(source: Source) -> dict[str, Any]:
    return {key: value for key, value in source.info.items() if key != TABLE}


def own_strata(frame: pd.DataFrame, roles: Roles, name: str = "table") -> Ints:
    """Return `[rows]` int64 labels by which the rows of a client's own table are balanced.

    Raises:
        DataError: the label is missing or does not fit the task; `name` is the client's, for messages.
    """
    classes = class_names(name, frame, roles.label, roles.na_values) if roles.task in CLASSES else ()
    y = Constants(roles=roles, columns={}, classes=classes).targets(frame, name)
    strata: Ints = strata_of(y, roles.task).numpy()
    return strata
