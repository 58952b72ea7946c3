"""From settings to a Federation: load, hold out, deal, split, normalise, add public and shifted sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.random import Generator

from tailorfl.arguments import check_kind, check_texts
from tailorfl.data.corruptions import corrupted_sets
from tailorfl.data.dealing import (
    Dealt,
    capped,
    deal_rows,
    domain_rows,
    fitting_partition,
    official_part,
    to_be_tested,
)
from tailorfl.data.federation import Federation
from tailorfl.data.late_clients import in_turn, split_in_turn
from tailorfl.data.preparation import plain, prepared
from tailorfl.data.public import own_public_rows, public_from_rows, public_source, subset
from tailorfl.data.registry import data_sources, load_source
from tailorfl.data.rows import Ints, Rows
from tailorfl.data.shifts import own_shifts
from tailorfl.data.source import Source
from tailorfl.data.splits import SplitRule, read_split, split_clients, stream
from tailorfl.data.validate import validate
from tailorfl.errors import ConfigError, unknown
from tailorfl.printable import shown
from tailorfl.settings.data import Augmentation, DataConfig, Normalisation

_SET = DataConfig()
_KINDS: Mapping[str, tuple[Any, ...]] = {
    "name": (str,),
    "source": (Source, None),
    "path": (str, Path, None),
    "options": (Mapping, None),
    "partition": (str, None),
    "partition_options": (Mapping, None),
    "clients": (Integral, None),
    "samples": (Integral, None),
    "split": (str, Mapping, None),
    "public": (str, Source, None),
    "public_samples": (Integral, None),
    "augment": (str,),
    "corruptions": (Mapping, None),
    "shifts": (Mapping, None),
}
"""What arguments of `build` may be."""


def build(
    name: str = _SET.name,
    *,
    source: Source | None = None,
    partition: str | None = None,
    partition_options: Mapping[str, Any] | None = None,
    clients: int | None = None,
    samples: int | None = None,
    split: str | Mapping[str, Any] | None = None,
    heldout_clients: int | Sequence[str] = _SET.heldout_clients,
    heldout_domain: str | Sequence[str] | None = None,
    public: str | Source | None = None,
    public_samples: int | None = None,
    corruptions: Mapping[str, Any] | None = None,
    official_set: bool = _SET.official_set,
    shifts: Mapping[str, Any] | None = None,
    normalise: Normalisation = _SET.normalise,
    augment: Augmentation = _SET.augment,
    path: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    joined: Sequence[Sequence[str]] = (),
    seed: int = 0,
) -> Federation:
    """Return a federation, the same for the same arguments.

    Each random choice has its own stream derived from `seed`, so that changing the split, say, leaves the
    partition as it was.

    Args as the settings `data` of an experiment (`tailorfl.settings.data`, `tailorfl list settings data`), and:

    Args:
        source: a Source in place of `name`, `path` and `options`; `augment` "none" leaves what it says.
        partition_options: for natural and domain also `group`, the kind of group.
        split: see `tailorfl.data.splits.read_split`.
        public: may be a Source too.
        shifts: name -> file, folder, data frame or Source.
        joined: of a deployment that is played again, the names of its clients in the order of their numbers, in groups
            that joined at once. With `path` each had its own file, which is split and prepared as it was there.
        seed: not negative.

    Raises:
        ConfigError: for settings that are unknown or contradict one another.
        DataError: for data that are missing, broken or cannot be dealt as asked.
        MissingExtraError: if corruptions are asked for and their package is not installed.
    """
    _check(locals())
    by_name = source is None
    source = _load(name, path, options, samples) if source is None else source
    source = source if augment == "none" else replace(source, augment=augment)
    source = plain(source) if normalise == "none" else source
    rule = read_split(split, official=source.test is not None)
    rows = capped(source, samples, stream(seed, "samples"))
    domains = _domains(source, rows, heldout_domain)
    rows = _without(rows, *domains.values())
    own_public = np.empty(0, dtype=np.int64)
    if isinstance(public, str) and public == source.name:
        own_public = own_public_rows(source, rows, public_samples, stream(seed, "public"))
        rows = _without(rows, own_public)
    dealt = deal_rows(
        source,
        rows,
        partition or fitting_partition(source),
        partition_options or {},
        clients=clients,
        heldout=heldout_clients,
        deal_test=rule.source == "official",
        streams=(stream(seed, "partition"), stream(seed, "held out")),
    )
    dealt = _with_domains(dealt, source, domains)
    order = in_turn(joined, dealt.names, all_of_them=path is not None)
    federation = _split_in_order(source, rows, dealt, rule, order, joined if path is not None else (), seed)
    if normalise != "none":
        federation = prepared(federation, normalise, len(joined[0]) if len(order) else None)
    shifted = _shifted(federation, rows, domains, corruptions, official_set, seed)
    shifted |= own_shifts(federation.source, shifts or {}, name if by_name else None, options or {}, shifted)
    shared = _public(federation.source, public, public_samples, own_public, seed)
    federation = replace(federation, public=shared, shifted=shifted)
    validate(federation)
    return federation


def _split_in_order(
    source: Source,
    rows: Ints,
    dealt: Dealt,
    rule: SplitRule,
    order: Ints,
    own_files: Sequence[Sequence[str]],
    seed: int,
) -> Federation:
    """Return the federation with its clients in `order`, if any; with `own_files` each was split when it joined."""
    if len(order) and own_files:
        return split_in_turn(source, dealt.ordered(order, len(order)), own_files, rule, seed)
    federation = _split(source, rows, dealt, rule, stream(seed, "split"))
    return federation.of_clients(order) if len(order) else federation


def _public(
    source: Source, public: str | Source | None, samples: int | None, own_rows: Ints, seed: int
) -> Source | None:
    """Return the public set: rows of the federation's own data, another source, or none."""
    if len(own_rows):
        return public_from_rows(source, own_rows)
    return None if public is None else public_set(public, samples, source, seed)


def public_set(public: str | Source, samples: int | None, source: Source, seed: int) -> Source:
    """Return the public set of a federation of `source`, out of another source, see `tailorfl.data.public`."""
    taken = public_source(public, samples, source, stream(seed, "public"))
    return replace(taken, augment=source.augment)


def _check(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError or DataError for arguments of `build` of a wrong kind, or that contradict one another."""
    seed, normalise = arguments["seed"], arguments["normalise"]
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"seed must be a whole number of at least 0, but is {shown(seed)}")
    if not isinstance(normalise, str) or normalise not in get_args(Normalisation):
        raise unknown("normalisation", normalise, get_args(Normalisation))
    if normalise != "none" and arguments["corruptions"] is not None:
        raise ConfigError(
            f"normalise='{normalise}' changes pixel values, which corruptions need as they are; choose one"
        )
    for argument, kinds in _KINDS.items():
        check_kind(argument, arguments[argument], *kinds)
    check_texts("heldout_clients", arguments["heldout_clients"], Integral, str)
    check_texts("heldout_domain", arguments["heldout_domain"], str, None)


def _domains(source: Source, rows: Ints, names: str | Sequence[str] | None) -> dict[str, Ints]:
    """Return the rows of every domain that never trains."""
    rows_of_domain = domain_rows(source, [names] if isinstance(names, str) else list(names or ()))
    return {domain: np.intersect1d(in_domain, rows) for domain, in_domain in rows_of_domain.items()}


def _with_domains(dealt: Dealt, source: Source, domains: Mapping[str, Ints]) -> Dealt:
    """Return what was dealt, and each of these domains as a held-out client."""
    for domain, rows in domains.items():
        official = official_part(source)[rows]
        dealt = dealt.with_heldout(domain, rows[~official], rows[official])
    return dealt


def _shifted(
    federation: Federation,
    rows: Ints,
    domains: Mapping[str, Ints],
    corruptions: Mapping[str, Any] | None,
    official_set: bool,
    seed: int,
) -> dict[str, Source]:
    """Return the shifted sets; of a domain that never trains its official test part, or else all its samples."""
    source = federation.source
    shifted = {
        domain: subset(source, to_be_tested(source, in_domain), f"{source.name} {domain}")
        for domain, in_domain in domains.items()
    }
    if corruptions is not None:
        shifted |= corrupted_sets(source, federation.global_test(), corruptions, seed)
    if official_set:
        if source.test is None:
            raise ConfigError(f"official_set: source '{source.name}' has no official test part")
        shifted["official"] = subset(source, rows[official_part(source)[rows]], f"{source.name} official")
    return shifted


def _without(rows: Ints, *taken: Ints) -> Ints:
    """Return the ascending `rows` that are in none of the `taken`."""
    for other_rows in taken:
        rows = np.setdiff1d(rows, other_rows, assume_unique=True)
    return rows


def _load(
    name: str, path: str | Path | None, options: Mapping[str, Any] | None, samples: int | None
) -> Source:
    all_options = dict(options or {})
    if path is not None:
        all_options["path"] = path
    if samples is not None and name in data_sources() and data_sources()[name].capped:
        all_options.setdefault("samples", samples)
    return load_source(name, **all_options)


def _of_their_classes(source: Source, official: Ints, train: Rows) -> Rows:
    """For every client all official test rows of the classes that it trains on."""
    strata = source.strata.numpy()
    classes = strata[official]
    return Rows.of([official[np.isin(classes, np.unique(strata[train[i]]))] for i in range(len(train))])


def _split(source: Source, rows: Ints, dealt: Dealt, rule: SplitRule, rng: Generator) -> Federation:
    """Every client's rows cut into train, val and test; held-out clients are cut like the others."""
    shares = rule.shares(len(dealt.rows), rng)
    train, val, test = split_clients(dealt.rows, source.strata.numpy(), shares, rng)
    if rule.source == "official":
        test = Rows.of(()) if dealt.test is None else dealt.test
    elif rule.source == "global":
        shared = rows[official_part(source)[rows]]
        test = Rows.shared(shared, len(dealt.rows))
    elif rule.source == "classes":
        test = _of_their_classes(source, rows[official_part(source)[rows]], train)
    return Federation(
        source=source,
        train=train,
        val=val,
        test=test,
        names=dealt.names,
        num_clients=dealt.num_clients,
        server=dealt.server,
    )
