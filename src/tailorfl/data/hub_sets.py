"""Public data sets of the Hugging Face hub: fetched once, at a pinned commit, and checked by their sha256.

They are read from the data folder, laid out like the hub's cache, or from the hub's own cache, and otherwise fetched
into the latter. None of them is part of this package: read the terms of each set before sharing anything made from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from tailorfl.data.columns import numbered
from tailorfl.data.huggingface import huggingface
from tailorfl.data.registry import data_source
from tailorfl.data.source import Source, labelled
from tailorfl.data.storage import DATA_VARIABLE, data_folders
from tailorfl.data.text import TEXTS, reading_of, text_classes, token_info, tokenized
from tailorfl.data.tokenizers import load_tokenizer
from tailorfl.errors import ConfigError, DataError, check_known, needs_extra
from tailorfl.hub import unreachable
from tailorfl.partition.rows import spread_indices

SUBJECTS = ("World", "Sports", "Business", "Sci/Tech")
"""The classes of AG News."""
WINDOW = 80
"""Characters of a sample of Shakespeare; as many rows are left out between a role's training and test rows."""
_BLOCK = 100_000
"""Rows whose tokens are held as lists at a time."""
_SHARDS = "train-00000-of-00001.parquet", "test-00000-of-00001.parquet"


@dataclass(frozen=True)
class HubSet:
    """A data set of the hub.

    Attributes:
        repository: OWNER/NAME.
        revision: commit of the repository, which names its contents.
        files: path of the file of each part ("train", "test") in the repository.
        digests: sha256 of the file of each part, if it was published.
    """

    repository: str
    revision: str
    files: Mapping[str, str]
    digests: Mapping[str, str]

    @property
    def command(self) -> str:
        """The command that fetches it into the hub's cache."""
        return f"hf download {self.repository} --repo-type dataset --revision {self.revision}"


def _shards(repository: str, revision: str, folder: str, *digests: str) -> HubSet:
    """Return a data set whose parts are one parquet file each."""
    parts = ("train", "test")[: len(digests) or 2]
    files = {part: f"{folder}/{shard}" for part, shard in zip(parts, _SHARDS, strict=False)}
    return HubSet(repository, revision, files, dict(zip(parts, digests, strict=False)))


HUB_SETS = {
    "ag_news": _shards(
        "fancyzhx/ag_news", "eb185aade064a813bc0b7f42de02595523103ca4", "data",
        "fc508d6d9868594e3da960a8cfeb63ab5a4746598b93428c224397080c1f52ee",
        "71de87ec66bc5737752a2502204dfa6d7fe9856ade3ea444dc6317789a4f13fb",
    ),
    "cifar10": _shards(
        "uoft-cs/cifar10", "0b2714987fa478483af9968de7c934580d0bb9a2", "plain_text",
        "8428b53a88a11ac374111006708df51469e315a22ac6d66470afd9c78d2ae883",
        "841389e6f2d64f28bf17310e430aebac20ec3ba611a3c5e231dc93c645ce84de",
    ),
    "cifar100": _shards(
        "uoft-cs/cifar100", "aadb3af77e9048adbea6b47c21a81e47dd092ae5", "cifar100",
        "694865d6b990e234804f01268586c41e88bcbbb75e20858432c05ad4081aca23",
        "98776c529bb146a9c791229df74a5cf076be9b43d82dbbd334b6a7788d73dc68",
    ),
    "fashion_mnist": _shards(
        "zalando-datasets/fashion_mnist", "531be5e2ccc9dba0c201ad3ae567a4f3d16ecdd2", "fashion_mnist"
    ),
    "femnist": _shards(
        "flwrlabs/femnist", "df739a2b09df2b5cc1ec93107659b9a9a8566487", "data",
        "cdb389c8d41d5facab79a4a8d452724c30d9c629a1c1e0b1e9ae9de2c633522b",
    ),
    "mnist": _shards(
        "ylecun/mnist", "77f3279092a1c1579b2250db8eafed0ad422088c", "mnist",
        "f2c01285a9f89399335b00ee4e8d499dc4e46db5e39c74903ce5618d895eb3bf",
        "d49fcf556ce25b002b302e318ce4a11098bbfe5d4499c3f35d7c72297c52374b",
    ),
    "shakespeare": HubSet(
        "flwrlabs/shakespeare", "2cfe3a5ba0d9b34634ade086803a479b2c2b8e11", {"train": "shakespeare.csv"}, {}
    ),
}  # fmt: skip


def hub_files(name: str) -> dict[str, str]:
    """Return the file of each part of the data set `name`, fetched if it is not on this machine.

    Raises:
        MissingExtraError: the package that reads the hub's cache is not installed.
        DataError: it is not here and cannot be fetched, or a file is damaged; gives the command that fetches it.
    """
    with needs_extra("huggingface_hub", "data"):
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
    hub_set, files = HUB_SETS[name], {}
    for part, path in hub_set.files.items():
        places = (
            try_to_load_from_cache(hub_set.repository, path, folder, hub_set.revision, "dataset")
            for folder in (*data_folders(), None)
        )
        file = next((place for place in places if isinstance(place, str)), None)
        if file is None:
            try:
                if reason := unreachable():
                    raise ConnectionError(reason)
                file = hf_hub_download(
                    hub_set.repository, path, revision=hub_set.revision, repo_type="dataset"
                )
            except OSError as error:
                raise DataError(
                    f"data set '{name}' ({hub_set.repository} of the Hugging Face hub) is neither in "
                    f"{' or '.join(map(str, data_folders()))} nor in the hub's cache, and cannot be fetched: {error}. "
                    f"Fetch it on a machine that can reach the hub: {hub_set.command} (with --cache-dir into the "
                    f"folder that {DATA_VARIABLE} names)"
                ) from error
        _check(name, Path(file), hub_set, hub_set.digests.get(part, ""))
        files[part] = file
    return files


def _check(name: str, path: Path, hub_set: HubSet, digest: str) -> None:
    """Check a file by its sha256. If none is declared, it is the name under which the cache holds large files."""
    expected = digest or path.resolve().name
    with path.open("rb") as file:
        if len(expected) == 64 and hashlib.file_digest(file, "sha256").hexdigest() != expected:
            raise DataError(
                f"data set '{name}': '{path}' is damaged or a different file: its sha256 should be {expected}. Fetch "
                f"it again: {hub_set.command} --force-download"
            )


def hub_images(
    name: str,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    image: str = "image",
    label: str = "label",
    client: str | None = None,
) -> Source:
    """Return a set of images, converted once into a file that is mapped (`tailorfl.data.huggingface`).

    Args:
        name: a key of `HUB_SETS`.
        mean, std: of each channel.
        image, label, client: its columns.

    Raises:
        MissingExtraError, DataError: as `hub_files` and `huggingface`.
    """
    files = hub_files(name)
    source = huggingface("parquet", label, image, client=client, data_files=files, scaling="public")
    return replace(source, name=name, mean=mean, std=std)


@data_source(
    "Fashion-MNIST, 60,000 + 10,000 clothes of 28x28 pixels, of the Hugging Face hub",
    files="datasets--zalando-datasets--fashion_mnist",
)
def fashion_mnist() -> Source:
    """Fashion-MNIST: 60,000 + 10,000 grey images `[1, 28, 28]` of 10 kinds of clothes; MIT licence."""
    return hub_images("fashion_mnist", (0.2860,), (0.3530,))


@data_source(
    "CIFAR-100, 50,000 + 10,000 images of 32x32 pixels, 100 classes in 20 groups, of the Hugging Face hub",
    files="datasets--uoft-cs--cifar100",
)
def cifar100(label: Literal["fine", "coarse"] = "fine") -> Source:
    """CIFAR-100: 50,000 + 10,000 images `[3, 32, 32]`; no licence stated.

    Args:
        label: the 100 classes ("fine") or the 20 groups of five ("coarse").

    Raises:
        ConfigError: another label.
    """
    check_known("label of cifar100", label, ("fine", "coarse"))
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    return hub_images("cifar100", mean, std, "img", f"{label}_label")


@data_source(
    "FEMNIST, 814,277 characters of 28x28 pixels by 3,597 writers (group 'client'), of the Hugging Face hub",
    files="datasets--flwrlabs--femnist",
)
def femnist() -> Source:
    """FEMNIST of LEAF (Caldas et al. 2018): grey images `[1, 28, 28]` of 62 characters; BSD licence.

    Group `client` is the writer. No official split. Pixels are scaled to -1 ... 1.
    """
    return hub_images("femnist", (0.5,), (0.5,), label="character", client="writer_id")


@data_source(
    "AG News, 120,000 + 7,600 news of 4 subjects, of the Hugging Face hub (options tokenizer, length, ...)",
    files="datasets--fancyzhx--ag_news",
)
def ag_news(tokenizer: str = "byte", length: int = 64, padding: str = "right") -> Source:
    """AG News (Zhang et al. 2015): titles and first sentences of news on four subjects; for research.

    Args:
        tokenizer, length, padding: as for `tailorfl.data.text.text`.
    """
    import pandas as pd

    parts = [pd.read_parquet(file).assign(split=part) for part, file in hub_files("ag_news").items()]
    frame = pd.concat(parts, ignore_index=True)
    frame = frame.assign(label_text=frame["label"].map(dict(enumerate(SUBJECTS))))
    return text_classes("ag_news", frame.rename(columns={"text": "text_a"}), tokenizer, length, padding)


@data_source(
    "Shakespeare of LEAF, 80 characters and the next one, by role (group 'client'), of the Hugging Face hub",
    files="datasets--flwrlabs--shakespeare",
    capped=True,
)
def shakespeare(
    samples: int | None = None,
    min_samples: int = 500,
    tokenizer: str = "byte",
    length: int = WINDOW + 1,
    padding: str = "right",
) -> Source:
    """Shakespeare of LEAF (Caldas et al. 2018): which character follows 80 others; 4.2 million rows, BSD licence.

    A role's rows are windows that move by one character, so they are cut in time: the first 80 % train, the last 20 %
    test, and the rows between them stay unused so that no training row shares a character with a test row.

    Args:
        samples: maximum number of rows, evenly spaced; all of them need 7 GB of memory.
        min_samples: roles with fewer rows are left out.
        tokenizer, length, padding: as for `tailorfl.data.text.text`.

    Returns:
        A source with group `client`: a role in a play.

    Raises:
        ConfigError: no role has that many rows.
    """
    import pandas as pd

    (file,) = hub_files("shakespeare").values()
    columns = ["character_id", "x", "y"]
    frame = pd.read_csv(file, usecols=columns, dtype=str, keep_default_na=False, engine="pyarrow")
    characters = sorted(frame["y"].unique())
    by_role = frame.groupby("character_id")["y"]
    number, size = by_role.cumcount(), by_role.transform("size")
    cut = size * 4 // 5
    frame["test"] = number >= cut + WINDOW
    frame = frame[((number < cut) | frame["test"]) & (size >= min_samples)]
    if frame.empty:
        raise ConfigError(f"shakespeare: no role has min_samples={min_samples} rows; lower min_samples")
    frame = frame.iloc[spread_indices(len(frame), samples)].reset_index(drop=True)
    reading = reading_of("x", None, length, padding)
    blocks = (frame.iloc[start : start + _BLOCK] for start in range(0, len(frame), _BLOCK))
    return labelled(
        "shakespeare",
        torch.cat([tokenized("shakespeare", block, reading, tokenizer) for block in blocks]),
        np.searchsorted(characters, frame["y"].to_numpy(dtype=str)),
        [character if character.strip() else repr(character) for character in characters],
        test=torch.from_numpy(frame["test"].to_numpy(dtype=bool, copy=True)),
        info={**token_info(load_tokenizer(tokenizer)), TEXTS: reading},
        groups={"client": numbered(frame["character_id"])},
    )
