"""The public set: samples without labels that the server and every client may look at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.random import Generator

from tailorfl.data.dealing import official_part
from tailorfl.data.registry import load_source
from tailorfl.data.source import Source
from tailorfl.errors import DataError
from tailorfl.partition.rows import Ints
from tailorfl.partition.splits import stream

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
    count = max(1, round(OWN_SHARE * len(training))) if samples is None else samples
    if count >= len(training):
        raise DataError(
            f"a public set of {count} samples leaves nothing of the {len(training)} training samples of "
            f"source '{source.name}'; use a smaller public_samples"
        )
    return np.sort(rng.choice(training, size=count, replace=False))


def public_set(public: str | Source, samples: int | None, source: Source, seed: int) -> Source:
    """Return the public set of a federation of `source`, out of another source.

    Images keep their own set's channel statistics, as in PerAda's released code.

    Args:
        public: a source or its name.
        samples: how many samples, drawn at random; None: all.
        source: the clients', whose models must be able to read the public samples.
        seed: of the data.

    Raises:
        DataError: if shapes or tokenizers differ, or there are fewer samples than asked for.
    """
    pool = load_source(public) if isinstance(public, str) else public
    if pool.input_shape != source.input_shape:
        raise DataError(
            f"public source '{pool.name}' has samples of shape {list(pool.input_shape)}, but the clients "
            f"of '{source.name}' have {list(source.input_shape)}; use a public source of the same shape"
        )
    if pool.holds_tokens != source.holds_tokens or pool.info.get("tokenizer") != source.info.get("tokenizer"):
        raise DataError(
            f"public source '{pool.name}' and the clients' source '{source.name}' are not tokenized alike; give "
            "both the same tokenizer"
        )
    count = len(pool) if samples is None else samples
    if count > len(pool):
        raise DataError(
            f"public source '{pool.name}' has {len(pool)} samples, fewer than public_samples={count}"
        )
    rows = np.sort(stream(seed, "public").choice(len(pool), size=count, replace=False))
    return replace(public_from_rows(pool, rows), augment=source.augment)
