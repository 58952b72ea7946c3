"""The public set: samples without labels that the server and every client may look at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.random import Generator

from tailorfl.data.dealing import official_part
from tailorfl.data.registry import load_source
from tailorfl.data.rows import Ints
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError, DataError

OWN_SHARE = 0.1


def subset(source: Source, rows: Ints, name: str) -> Source:
    """Copy of the samples `rows` as a source of its own, without groups and official split."""
    taken = torch.from_numpy(rows)
    return replace(
        source,
        name=name,
        x=source.x[taken],
        y=source.y[taken],
        test=None,
        groups={},
        group_names={},
        credit=None if source.credit is None else source.credit[taken],
    )


def public_from_rows(source: Source, rows: Ints) -> Source:
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


def own_public_rows(source: Source, rows: Ints, samples: int | None, rng: Generator) -> Ints:
    """Return `samples` of the training rows among `rows`, ascending, to be taken from the clients; default a tenth.

    Raises:
        DataError: if that leaves no training rows.
    """
    training = rows[~official_part(source)[rows]]
    count = max(1, round(OWN_SHARE * len(training))) if samples is None else _at_least_one(samples)
    if count >= len(training):
        raise DataError(
            f"a public set of {count} samples leaves nothing of the {len(training)} training samples of "
            f"source '{source.name}'; use a smaller public_samples"
        )
    return np.sort(rng.choice(training, size=count, replace=False))


def public_source(public: str | Source, samples: int | None, model_of: Source, rng: Generator) -> Source:
    """Return the public set out of another source, `samples` of it drawn at random, or all.

    Images keep their own set's channel statistics, as in PerAda's released code.

    Args:
        public: a source or its name.
        samples: how many samples.
        model_of: the clients' source, whose models must be able to read the public samples.
        rng: source of randomness.

    Raises:
        DataError: if shapes or tokenizers differ, or there are fewer samples than asked for.
    """
    pool = load_source(public) if isinstance(public, str) else public
    if pool.input_shape != model_of.input_shape:
        raise DataError(
            f"public source '{pool.name}' has samples of shape {list(pool.input_shape)}, but the clients "
            f"of '{model_of.name}' have {list(model_of.input_shape)}; use a public source of the same shape"
        )
    if (
        pool.info.get("tokenizer") != model_of.info.get("tokenizer")
        or pool.holds_tokens != model_of.holds_tokens
    ):
        raise DataError(
            f"public source '{pool.name}' and the clients' source '{model_of.name}' are not tokenized alike; give "
            "both the same tokenizer"
        )
    count = len(pool) if samples is None else _at_least_one(samples)
    if count > len(pool):
        raise DataError(
            f"public source '{pool.name}' has {len(pool)} samples, fewer than public_samples={count}"
        )
    return public_from_rows(pool, np.sort(rng.choice(len(pool), size=count, replace=False)))


def _at_least_one(samples: int) -> int:
    if samples < 1:
        raise ConfigError(f"public_samples must be at least 1, but is {samples}")
    return samples
