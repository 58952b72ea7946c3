"""Shifted test sets: images under common corruptions, and test sets of the user's own.

The 15 corruptions at 5 severities (Hendrycks and Dietterich, ICLR 2019) are those of the package
imagecorruptions-imaug, with the strengths of ImageNet-C, whose images have 224 pixels a side. On 32 pixels those would
leave little to recognise, so an image smaller than 64 pixels is enlarged by a whole factor, corrupted, and averaged
back, which brings the strengths near those of CIFAR-10-C. Absolute accuracies do not compare with published CIFAR-10-C
numbers; methods compare with each other.

Test sets of the user's own are files of the same form as the training data, read with the constants of the training
data. Their clients and parts, if they name any, are ignored: every model is tested on every row.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailorfl.data.columns import class_numbers, need_columns, numeric, target_columns, unknown_class
from tailorfl.data.preparation import PREPARATION, Preparation, prepared_alike
from tailorfl.data.registry import load_source
from tailorfl.data.source import Source, check_finite, subset
from tailorfl.data.table_files import READING, read_table
from tailorfl.errors import ConfigError, DataError, MissingExtraError, check_known
from tailorfl.settings.data import CorruptionConfig

KINDS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
"""The available corruptions."""
WORKING_SIDE = 64
_SMALLEST_SIDE = 32  # of images that the package accepts
_SEEDED = ("glass_blur", "impulse_noise")  # these draw from their own generators, seeded by an argument

Image = NDArray[np.uint8]


def corrupted_sets(
    source: Source, rows: NDArray[np.int64], config: CorruptionConfig, seed: int
) -> dict[str, Source]:
    """Return corrupted copies of test images, one source per corruption and severity, named like "fog-3".

    An image is corrupted the same way whichever other images, kinds and severities are requested.

    Args:
        source: images `[samples, channels, height, width]`, 1 or 3 channels, uint8 or float32 in [0, 1].
        rows: int64 rows of `source` to take images from.
        config: the corruptions; at most `samples` images are drawn from `rows` once and used for every set.
        seed: seed of the draw and of the corruptions.

    Raises:
        ConfigError: for unknown kinds.
        DataError: if the source does not hold images.
        MissingExtraError: if the package imagecorruptions-imaug is not installed.
    """
    kinds = KINDS if config.kinds == "all" else config.kinds
    for kind in kinds:
        check_known("corruption", kind, KINDS)
    _check_images(source)
    if not len(rows):
        raise DataError(
            "corruptions need test images, but no training client has test samples; see data.split"
        )
    corrupt = _library()
    if len(rows) > config.samples:
        rng = np.random.default_rng(_entropy(seed, "rows"))
        rows = np.sort(rng.choice(rows, size=config.samples, replace=False))
    clean = subset(source, rows, source.name)
    images = _to_uint8(clean.x)
    sets: dict[str, Source] = {}
    for kind in kinds:
        for severity in config.severities:
            seeds = [_image_seed(seed, kind, severity, int(row)) for row in rows]
            pictures = [_corrupted(corrupt, i, kind, severity, s) for i, s in zip(images, seeds, strict=True)]
            x = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()
            sets[f"{kind}-{severity}"] = replace(
                clean,
                name=f"{source.name} {kind}-{severity}",
                x=x if source.x.dtype == torch.uint8 else x.to(torch.float32) / 255.0,
            )
    return sets


def _check_images(source: Source) -> None:
    if source.x.dim() != 4 or source.x.shape[1] not in (1, 3):
        raise DataError(
            f"corruptions need images [samples, 1 or 3 channels, height, width], but source '{source.name}' "
            f"has samples of shape {list(source.input_shape)}"
        )
    if source.x.is_floating_point() and not bool(((source.x >= 0) & (source.x <= 1)).all()):
        raise DataError(
            f"corruptions need uint8 images or floats in [0, 1], but source '{source.name}' has values outside"
        )


def _library() -> Callable[..., Image]:
    try:
        from imagecorruptions import corrupt
    except ModuleNotFoundError as error:
        if error.name != "imagecorruptions":
            raise
        raise MissingExtraError("imagecorruptions-imaug", "corruptions") from error
    function: Callable[..., Image] = corrupt
    return function


def _to_uint8(x: Tensor) -> Image:
    """Return uint8 or float images as uint8 `[images, height, width, channels]`."""
    if x.is_floating_point():
        x = (x * 255.0).round().to(torch.uint8)
    images: Image = x.permute(0, 2, 3, 1).numpy()
    return images


def _corrupted(corrupt: Callable[..., Image], image: Image, kind: str, severity: int, seed: int) -> Image:
    """Return one `[height, width, channels]` image corrupted at working size and averaged back."""
    height, width, channels = image.shape
    factor = max(1, math.ceil(WORKING_SIDE / min(height, width)))
    if kind == "pixelate":  # its blocks would be as small as an enlarged pixel and change nothing
        factor = min(factor, 2)
    large = np.repeat(np.repeat(image, factor, axis=0), factor, axis=1)
    below, right = (max(0, _SMALLEST_SIDE - side) for side in large.shape[:2])
    large = np.pad(large, ((0, below), (0, right), (0, 0)), mode="symmetric")
    if channels == 1:
        large = np.repeat(large, 3, axis=2)
    with _numpy_seed(seed):
        arguments = {"seed": seed} if kind in _SEEDED else {}
        large = corrupt(np.ascontiguousarray(large), severity=severity, corruption_name=kind, **arguments)
    large = large[: height * factor, : width * factor].astype(np.float64)
    blocks = large.reshape(height, factor, width, factor, 3).mean(axis=(1, 3))
    if channels == 1:
        blocks = blocks.mean(axis=2, keepdims=True)
    corrupted: Image = np.round(blocks).astype(np.uint8)
    return corrupted


@contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """Seed NumPy's global generator, which the package draws from, and restore it afterwards."""
    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(state)  # noqa: NPY002


def _entropy(seed: int, *purpose: str | int) -> list[int]:
    return [seed, *(zlib.crc32(part.encode()) if isinstance(part, str) else part for part in purpose)]


def _image_seed(seed: int, kind: str, severity: int, row: int) -> int:
    return int(np.random.SeedSequence(_entropy(seed, kind, severity, row)).generate_state(1)[0])


TAKEN = ("val", "local", "participants", "global", "heldout", "malicious", "official", "personal")
"""Names of sets and models of an evaluation, which a shifted set cannot have."""
NOT_OF_SHIFTS = ("path", "data_files", "client", "split")
"""Options of the training data that a separate test set does not have."""


def own_shifts(
    source: Source, shifts: Mapping[str, Any], name: str | None, options: Mapping[str, Any], taken: Any
) -> dict[str, Source]:
    """Return the test sets by name, each a source that models of `source` can read.

    Args:
        source: the training data as models see them, scaled.
        shifts: name -> a file or folder, a data frame, or a Source.
        name: of the data source that read the training data; None if these were passed as an object.
        options: of that data source.
        taken: names of existing shifted sets.

    Raises:
        ConfigError: a name that is taken.
        DataError: a set that cannot be read or has another form; the message names it.
    """
    test_sets = {}
    for shift, value in shifts.items():
        if shift in TAKEN or shift in taken or not shift.strip() or "/" in shift or "+" in shift:
            raise ConfigError(
                f"data.shifts: '{shift}' cannot be the name of a test set; use a name without / and +, other than "
                f"{', '.join((*TAKEN, *taken))}"
            )
        try:
            test_sets[shift] = fitted(source, _loaded(source, value, name, options), shift)
        except DataError as error:
            raise DataError(f"data.shifts: '{shift}': {error}") from error
    return test_sets


def fitted(source: Source, shifted: Source, name: str) -> Source:
    """Return the shifted set with the classes, channels and scaling of `source`, named after both.

    Raises:
        DataError: another task, shape, features or classes.
    """
    if shifted.task != source.task:
        raise DataError(f"its task is {shifted.task}, but the training data's is {source.task}")
    shifted = prepared_alike(source, shifted)
    x = shifted.x
    if x.dim() == 4 and x.shape[1] == 1 and source.x.shape[1:2] == (3,):
        x = x.expand(-1, 3, -1, -1).contiguous()  # grey images among coloured ones, as in training
    if x.shape[1:] != source.x.shape[1:] or x.dtype != source.x.dtype:
        raise DataError(
            f"its samples are {x.dtype} of shape {list(x.shape[1:])}, but those of the training data are "
            f"{source.x.dtype} of shape {list(source.x.shape[1:])}"
        )
    for key in ("features", "tokenizer"):
        if key in shifted.info and key in source.info and shifted.info[key] != source.info[key]:
            raise DataError(
                f"its {key} are {shifted.info[key]}, but those of the training data {source.info[key]}"
            )
    if source.task not in ("classification", "binary") and shifted.outputs != source.outputs:
        raise DataError(f"it has {shifted.outputs} targets, but the training data have {source.outputs}")
    y = _renumbered(source, shifted)
    fitted_source = replace(
        source,
        name=f"{source.name} {name}",
        x=x,
        y=y,
        test=None,
        groups={},
        group_names={},
        credit=shifted.credit,
    )
    check_finite(fitted_source)
    return fitted_source


def _loaded(source: Source, value: Any, name: str | None, options: Mapping[str, Any]) -> Source:
    if isinstance(value, Source):
        return value
    if "label" in source.info and not isinstance(value, Mapping):
        return _table(source, value)
    load_options = {key: value for key, value in options.items() if key not in NOT_OF_SHIFTS}
    if name is None and source.x.dtype == torch.uint8 and source.x.dim() == 4:
        name = "folder"
    if name is None:
        raise DataError(
            "the training data were passed from Python, so it is unknown how to read a file of their kind; pass a "
            "tailorfl.Source: build_federation(source=..., shifts={name: source})"
        )
    if not isinstance(value, str | Path):
        raise DataError(f"expected a file or folder, but got a {type(value).__name__}")
    return load_source(name, **{**load_options, "path": str(value)})


def _table(source: Source, value: Any) -> Source:
    """Return the source of a table with the columns of the training table or Hugging Face data set."""
    name, frame = read_table(value, **source.info.get(READING, {}))
    labels, features = source.info["label"], source.info.get("features")
    if features is None:
        raise DataError("the training data are images of a data set; pass a tailorfl.Source of such images")
    if not len(frame):
        raise DataError(f"table '{name}' has no rows")
    preparation: Preparation | None = source.info.get(PREPARATION)
    if preparation is not None:
        x, y = preparation.everyone.apply(frame, name)
        return Source(name, x, y, source.task, source.outputs, info=dict(source.info))
    need_columns(name, frame, [*labels, *features])
    x = numeric(name, frame, list(features))
    classes = source.info.get("classes")
    if classes is None:
        y, outputs, info = target_columns(name, frame, labels, source.task)
        return Source(name, x, y, source.task, outputs, info={**info, "features": features})
    y = class_numbers(name, frame, labels[0], classes)
    return Source(name, x, y, source.task, source.outputs, info={"features": features, "classes": classes})


def _renumbered(source: Source, shifted: Source) -> Tensor:
    """Return the targets; classes get the numbers that they have in the training data."""
    if source.task not in ("classification", "binary"):
        return shifted.y
    ours, theirs = source.info.get("classes"), shifted.info.get("classes")
    if ours is None or theirs is None or ours == theirs:
        if shifted.outputs > source.outputs:
            raise DataError(f"it has {shifted.outputs} classes, but the training data have {source.outputs}")
        return shifted.y
    present = torch.unique(shifted.y).tolist()
    if missing := [theirs[number] for number in present if theirs[number] not in ours]:
        raise unknown_class(missing[0], ours)
    table = torch.tensor([ours.index(class_name) if class_name in ours else 0 for class_name in theirs])
    return table[shifted.y]
