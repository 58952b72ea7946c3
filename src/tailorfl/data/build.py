"""From settings to a Federation: load, hold out, deal, split, normalise, add public and shifted sets.

The public set consists of unlabelled samples that the server and every client may use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from pydantic import ValidationError

from tailorfl.data.dealing import (
    Dealt,
    capped,
    deal_rows,
    domain_rows,
    fitting_partition,
    in_turn,
    official_part,
    split_in_turn,
    to_be_tested,
    without_clients,
)
from tailorfl.data.federation import Federation, validate
from tailorfl.data.preparation import plain, prepared, prepared_alike
from tailorfl.data.registry import data_sources, load_source
from tailorfl.data.shifts import TAKEN, corrupted_sets, own_shifts
from tailorfl.data.source import Source, subset
from tailorfl.errors import ConfigError, DataError
from tailorfl.interface import check_kind
from tailorfl.partition.rows import Ints, Rows
from tailorfl.partition.splits import SplitRule, read_split, split_clients, stream
from tailorfl.settings.data import Augmentation, DataConfig, Normalisation
from tailorfl.settings.errors import explain

OWN_SHARE = 0.1
"""Share of the training samples that become a public set from the same source."""
_SET = DataConfig()


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
    excluded_clients: Sequence[str] = _SET.excluded_clients,
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

    Each random choice has its own stream derived from `seed`, so changing the split, say, does not change the
    partition.

    Arguments are the settings `data` of an experiment (`tailorfl.settings.data`, `tailorfl list settings data`), and:

    Args:
        source: a Source instead of `name`, `path` and `options`; `augment` "none" keeps its augmentation.
        partition_options: for natural and domain also `group`, the kind of group.
        split: see `tailorfl.partition.splits.read_split`.
        public: may be a Source too.
        shifts: name -> file, folder, data frame or Source.
        joined: to replay a deployment, the names of its clients in the order of their numbers, in groups that joined
            at once. With `path` each client had its own file, which is split and prepared as in the deployment.
        seed: not negative.

    Raises:
        ConfigError: for settings that are unknown or contradict one another.
        DataError: for data that are missing, broken or cannot be dealt as requested.
        MissingExtraError: if corruptions are requested and their package is not installed.
    """
    config = _config(dict(locals()))
    loaded = config.name if source is None else None
    source = _load(config) if source is None else source
    is_own_public = public is source or (isinstance(public, str) and public in (source.name, loaded))
    source = source if augment == "none" else replace(source, augment=augment)
    source = plain(source) if normalise == "none" else source
    rule = read_split(config.split, official=source.test is not None)
    rows, own_public, domains = _pool(source, config, is_own_public, seed)
    dealt = deal_rows(
        source,
        rows,
        config.partition or fitting_partition(source),
        config.partition_options,
        clients=config.clients,
        heldout=config.heldout_clients,
        deal_test=rule.source == "official",
        streams=(stream(seed, "partition"), stream(seed, "held out")),
    )
    official = official_part(source)
    for domain, in_domain in domains.items():
        dealt = dealt.with_heldout(domain, in_domain[~official[in_domain]], in_domain[official[in_domain]])
    order = in_turn(joined, dealt.names, all_of_them=path is not None)
    federation = _divided(source, rows, dealt, rule, config, joined, order, seed)
    if normalise != "none":
        federation = prepared(federation, normalise, len(joined[0]) if len(order) else None)
    shifted = _shifted(federation, rows, domains, config, seed)
    shifted |= own_shifts(federation.source, shifts or {}, loaded, config.options, shifted)
    shared = _shared(public, own_public, federation.source, config, seed)
    federation = replace(federation, public=shared, shifted=shifted)
    validate(federation, config.excluded_clients)
    return federation


def _shared(
    public: str | Source | None, own_rows: Ints, source: Source, config: DataConfig, seed: int
) -> Source | None:
    """Return the public set: rows of the prepared source itself, or a set of its own."""
    if len(own_rows):
        return _public_from_rows(source, own_rows)
    return None if public is None else public_set(public, config.public_samples, source, seed)


def _divided(
    source: Source,
    rows: Ints,
    dealt: Dealt,
    rule: SplitRule,
    config: DataConfig,
    joined: Sequence[Sequence[str]],
    order: Ints,
    seed: int,
) -> Federation:
    """Return the clients with their rows split, in `order` if they joined in turn, without excluded clients."""
    founders = None
    if len(order) and config.path is not None:  # each client had its own file, which was split when it joined
        federation = split_in_turn(source, dealt.ordered(order, len(order)), joined, rule, seed)
        founders = federation.names[: len(joined[0])]
    else:
        federation = _split(source, rows, dealt, rule, stream(seed, "split"))
        federation = federation.of_clients(order) if len(order) else federation
    return without_clients(federation, config.excluded_clients, dealt, founders)


def _pool(
    source: Source, config: DataConfig, is_own_public: bool, seed: int
) -> tuple[Ints, Ints, dict[str, Ints]]:
    """Return the rows for clients, those of a public set from the same source, and those of each held-out domain."""
    rows = capped(source, config.samples, stream(seed, "samples"))
    domains = {
        domain: np.intersect1d(in_domain, rows)
        for domain, in_domain in domain_rows(source, config.heldout_domain or ()).items()
    }
    rows = _without(rows, *domains.values())
    own_public = np.empty(0, dtype=np.int64)
    if is_own_public:
        own_public = _own_public_rows(source, rows, config.public_samples, stream(seed, "public"))
        rows = _without(rows, own_public)
    return rows, own_public, domains


def _config(arguments: Mapping[str, Any]) -> DataConfig:
    """Return the arguments of `build` as settings, without the objects that settings cannot hold.

    Raises:
        ConfigError: if they are invalid or contradict one another.
    """
    source, public, path, shifts = (arguments[name] for name in ("source", "public", "path", "shifts"))
    check_kind("source", source, Source, None)
    check_kind("shifts", shifts, Mapping, None)
    check_kind("path", path, str, Path, None)
    check_kind("seed", arguments["seed"], Integral)
    settings = {key: value for key, value in arguments.items() if key in DataConfig.model_fields} | {
        "path": None if path is None else str(path),
        "public": None if isinstance(public, Source) else public,
        "shifts": dict.fromkeys(shifts or (), ""),
    }
    for group in ("options", "partition_options"):
        settings[group] = {} if settings[group] is None else settings[group]
    try:
        config = DataConfig.model_validate(settings)
    except ValidationError as error:
        raise explain(error, DataConfig, settings, "the data") from None
    if config.normalise != "none" and config.corruptions is not None:
        raise ConfigError(
            f"normalise='{config.normalise}' changes pixel values, but corruptions need the original ones; leave out "
            "one of the two"
        )
    return config


def _shifted(
    federation: Federation, rows: Ints, domains: Mapping[str, Ints], config: DataConfig, seed: int
) -> dict[str, Source]:
    """Return the shifted sets; for a held-out domain its official test part, or all samples if it has none."""
    source = federation.source
    if taken := set(domains).intersection(TAKEN):
        raise ConfigError(
            f"data.heldout_domain: '{min(taken)}' is also the name of a set of every evaluation; rename the domain"
        )
    shifted = {
        domain: subset(source, to_be_tested(source, in_domain), f"{source.name} {domain}")
        for domain, in_domain in domains.items()
    }
    if config.corruptions is not None:
        shifted |= corrupted_sets(source, federation.global_test(), config.corruptions, seed)
    if config.official_set:
        if source.test is None:
            raise ConfigError(f"official_set: source '{source.name}' has no official test part")
        shifted["official"] = subset(source, rows[official_part(source)[rows]], f"{source.name} official")
    return shifted


def _without(rows: Ints, *taken: Ints) -> Ints:
    """Return the ascending `rows` that are in none of the `taken`."""
    for other_rows in taken:
        rows = np.setdiff1d(rows, other_rows, assume_unique=True)
    return rows


def _load(config: DataConfig) -> Source:
    options = dict(config.options)
    if config.path is not None:
        options["path"] = config.path
    known_source = data_sources().get(config.name)
    if config.samples is not None and known_source is not None and known_source.capped:
        options.setdefault("samples", config.samples)
    return load_source(config.name, **options)


def _of_their_classes(source: Source, official: Ints, train: Rows) -> Rows:
    """Return for every client all official test rows of the classes that it trains on."""
    strata = source.strata.numpy()
    classes = strata[official]
    return Rows.of([official[np.isin(classes, np.unique(strata[train[i]]))] for i in range(len(train))])


def _split(source: Source, rows: Ints, dealt: Dealt, rule: SplitRule, rng: Generator) -> Federation:
    """Split every client's rows into train, val and test; held-out clients are split like the others."""
    shares = rule.shares(len(dealt.rows), rng)
    train, val, test = split_clients(dealt.rows, source.strata.numpy(), shares, rng)
    if rule.source == "official":
        test = Rows.of(()) if dealt.test is None else dealt.test
    elif rule.source == "global":
        test = Rows.shared(rows[official_part(source)[rows]], len(dealt.rows))
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


def _public_from_rows(source: Source, rows: Ints) -> Source:
    """Return samples `rows` of a source as a public set, their labels blanked to 0 so that nothing can use them.

    Raises:
        DataError: for a generation task, whose inputs hold the responses.
    """
    if source.task == "generation":
        raise DataError(
            f"source '{source.name}' cannot be a public set without labels: the inputs of a generation task hold "
            "the responses; use form=choice"
        )
    labelled = subset(source, rows, f"{source.name} public")
    return replace(labelled, y=torch.zeros_like(labelled.y), credit=None)


def _own_public_rows(source: Source, rows: Ints, samples: int | None, rng: Generator) -> Ints:
    """Return `samples` of the training rows among `rows`, ascending, to be taken from the clients; default a tenth.

    Raises:
        DataError: if that leaves no training rows.
    """
    training = rows[~official_part(source)[rows]]
    count = max(1, round(OWN_SHARE * len(training))) if samples is None else samples
    if count >= len(training):
        raise DataError(
            f"a public set of {count} samples leaves none of the {len(training)} training samples of source "
            f"'{source.name}'; lower public_samples"
        )
    return np.sort(rng.choice(training, size=count, replace=False))


def public_set(public: str | Source, samples: int | None, source: Source, seed: int) -> Source:
    """Return the public set of a federation of `source`, taken from another source.

    Tables and numbers are prepared by the constants of the clients' training samples. Images keep their own set's
    channel statistics, as in PerAda's released code.

    Args:
        public: a source or its name.
        samples: how many samples, drawn at random; None: all.
        source: the source of the clients, whose models must be able to read the public samples.
        seed: of the data.

    Raises:
        DataError: if shapes or tokenizers differ, or there are fewer samples than requested.
    """
    pool = prepared_alike(source, load_source(public) if isinstance(public, str) else public)
    if pool.input_shape != source.input_shape:
        raise DataError(
            f"public source '{pool.name}' has samples of shape {list(pool.input_shape)}, but the clients "
            f"of '{source.name}' have {list(source.input_shape)}; use a public source of the same shape"
        )
    if pool.holds_tokens != source.holds_tokens or pool.info.get("tokenizer") != source.info.get("tokenizer"):
        raise DataError(
            f"public source '{pool.name}' and the clients' source '{source.name}' have different tokenizers; give both "
            "the same one"
        )
    count = len(pool) if samples is None else samples
    if count > len(pool):
        raise DataError(
            f"public source '{pool.name}' has {len(pool)} samples, fewer than public_samples={count}"
        )
    rows = np.sort(stream(seed, "public").choice(len(pool), size=count, replace=False))
    return replace(_public_from_rows(pool, rows), augment=source.augment)
