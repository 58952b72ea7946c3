"""Test images under the 15 common corruptions at 5 severities (Hendrycks and Dietterich, ICLR 2019).

The corruptions are those of the package imagecorruptions-imaug, with the strengths of ImageNet-C, whose
images have 224 pixels a side. On 32 pixels those would leave little to recognise, so an image smaller than 64
pixels is enlarged by a whole factor, corrupted, and averaged back, which brings the strengths near those of
CIFAR-10-C. Absolute accuracies do not compare with published CIFAR-10-C numbers; methods compare with each
other.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailorfl.data.public import subset
from tailorfl.data.source import Source
from tailorfl.errors import DataError, MissingExtraError, check_known
from tailorfl.settings.data import CorruptionConfig

KINDS = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
WORKING_SIDE = 64
_SMALLEST_SIDE = 32  # of images that the package takes
_SEEDED = ("glass_blur", "impulse_noise")  # these draw from generators of their own, seeded by an argument

Image = NDArray[np.uint8]


def corrupted_sets(
    source: Source, rows: NDArray[np.int64], config: CorruptionConfig, seed: int
) -> dict[str, Source]:
    """Corrupted copies of test images, one source per corruption and severity, named like "fog-3".

    An image is corrupted the same way whichever other images, kinds and severities are asked for.

    Args:
        source: images `[samples, channels, height, width]`, 1 or 3 channels, uint8 or float32 in [0, 1].
        rows: int64 rows of `source` to take images from.
        config: which corruptions; at most `samples` images are drawn from `rows` once and used for every set.
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
            f"corruptions need uint8 images or floats in [0, 1], but source '{source.name}' has others"
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
    """`[images, height, width, channels]` uint8 of images in either form."""
    if x.is_floating_point():
        x = (x * 255.0).round().to(torch.uint8)
    images: Image = x.permute(0, 2, 3, 1).numpy()
    return images


def _corrupted(corrupt: Callable[..., Image], image: Image, kind: str, severity: int, seed: int) -> Image:
    """One `[height, width, channels]` image corrupted at working size and averaged back."""
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
    """NumPy's global generator, which the package draws from, seeded inside and as before afterwards."""
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
