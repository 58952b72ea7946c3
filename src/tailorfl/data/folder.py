"""A user's own images: a folder of folders, one level for the client (or domain) and one for the class."""

from __future__ import annotations

import os
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from tailorfl.data.registry import data_source
from tailorfl.data.scaling import FITTED_IMAGES, PRIVATE_SCALING, PUBLIC_CHANNEL, Channels
from tailorfl.data.source import Source, labelled
from tailorfl.errors import DataError, check_known
from tailorfl.printable import shown

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
MOST_PIXELS = 50_000_000
"""Maximum number of pixels of an image; a file of a few kilobytes may claim any number."""
MOST_LEVELS = 4
"""Levels of folders that are searched."""
COUNTED = 4_096
"""Images whose bytes are counted at once."""
UNREADABLE = (
    UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, TypeError, SyntaxError, EOFError,
    LookupError, ArithmeticError, AttributeError, NotImplementedError, MemoryError, struct.error, zlib.error,
)  # fmt: skip
"""Errors that the various image readers raise for damaged files."""
_PARTS = ("train", "test")
_GREY_MODES = ("1", "L", "LA", "I;16")


@data_source("own images: [train|test/]client/class/image (option path)", name="folder")
def from_folder(
    path: str | Path, group: str = "client", size: tuple[int, int] | None = None, scaling: Channels = "train"
) -> Source:
    """Return a source from images at `path/CLIENT/CLASS/IMAGE`, or at `path/train/...` and `path/test/...`.

    Grey images give one channel, anything else three. Hidden files and folders (`.name`) are left out.
    Clients and classes are numbered in alphabetical order over both parts.

    Args:
        path: the folder.
        group: name of the natural groups, which are the first level of folders, such as "client" or "domain".
        size: (height, width) to resize every image to; by default all must have the same size already.
        scaling: "train" scales a channel by its mean and deviation over the training part; "public", which
            sample-level privacy requires, to -1 ... 1.

    Raises:
        DataError: for a missing folder, no images, an image at another depth, unreadable files or mixed
            sizes.
    """
    check_size(size)
    root = Path(path).expanduser()
    if not root.is_dir():
        raise DataError(f"image folder '{root}' does not exist or is not a folder")
    files = sorted(_images(root, group))
    if not files:
        raise DataError(f"image folder '{root}' holds no images ({', '.join(SUFFIXES)})")
    paths = [file.relative_to(root).parts for file in files]
    split = all(path_parts[0] in _PARTS for path_parts in paths)
    labels = [_place(root, path_parts, split, group) for path_parts in paths]
    part = [path_parts[0] if split else "train" for path_parts in paths]
    if "train" not in part:
        raise DataError(f"image folder '{root}' has a 'test' folder but no images in 'train'")
    owners, owner = np.unique([label[0] for label in labels], return_inverse=True)
    test = torch.tensor([name == "test" for name in part])
    groups = {group: (owner, owners)}
    return _by_class(
        root, files, [label[1] for label in labels], size, scaling, ~test, test if split else None, groups
    )


def from_client_folder(
    path: str | Path, size: tuple[int, int] | None = None, scaling: Channels = "train"
) -> Source:
    """Return a source from the images of one client alone, at `path/CLASS/IMAGE`; arguments as in `from_folder`.

    Its rows have the same order as in the folder of all clients, in which `path` is a folder of the first level.

    Raises:
        DataError: as in `from_folder`.
    """
    check_size(size)
    root = Path(path).expanduser()
    if not root.is_dir():
        raise DataError(
            f"a client's images are read from a folder with one subfolder per class, but '{root}' is not a folder"
        )
    files = sorted(f for f in root.glob("[!.]*/[!.]*") if f.suffix.lower() in SUFFIXES)
    if not files:
        raise DataError(f"image folder '{root}' holds no images at class/image ({', '.join(SUFFIXES)})")
    return _by_class(root, files, [file.parent.name for file in files], size, scaling)


def _by_class(
    root: Path,
    files: Sequence[Path],
    labels: Sequence[str],
    size: tuple[int, int] | None,
    scaling: Channels,
    train: Tensor | None = None,
    test: Tensor | None = None,
    groups: Mapping[str, tuple[Any, Any]] = {},
) -> Source:
    """Return the source of labelled images in files.

    Channels are scaled by the `train` images, or by all.
    """
    classes, y = np.unique(labels, return_inverse=True)
    x = stack_images((load_image(file, size) for file in files), [str(file) for file in files])
    mean, std, scaled = channel_scaling(x if train is None else x[train], scaling)
    return labelled(root.name, x, y, classes, groups=groups, info=scaled, test=test, mean=mean, std=std)


def check_size(size: Any) -> None:
    """Check that images can be made this large. Raises DataError if not."""
    if size is None:
        return
    pair = isinstance(size, list | tuple) and len(size) == 2
    if not pair or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in size):
        raise DataError(f"size should be (height, width), two whole numbers above 0, but is {shown(size)}")
    if size[0] * size[1] > MOST_PIXELS:
        raise DataError(
            f"size={shown(size)} is {size[0] * size[1]:,} pixels per image; at most {MOST_PIXELS:,} are allowed"
        )


def _images(root: Path, group: str) -> Iterator[Path]:
    """Yield the images below a folder; raise DataError at the first that is neither 3 nor 4 levels deep.

    So a wrong folder (a home folder, a disk) is not searched to its end.
    """
    for directory, folders, names in os.walk(root, followlinks=True):
        depth = len(Path(directory).relative_to(root).parts)
        folders[:] = [] if depth > MOST_LEVELS else [f for f in folders if not f.startswith(".")]
        for name in names:
            if Path(name).suffix.lower() in SUFFIXES and not name.startswith("."):
                file = Path(directory) / name
                if depth not in (2, 3):
                    raise _misplaced(root, file.relative_to(root).parts, group)
                yield file


def _place(root: Path, path_parts: tuple[str, ...], split: bool, group: str) -> tuple[str, str]:
    """Return (client, class) of an image from its path below the root."""
    levels = path_parts[1:] if split else path_parts
    if len(levels) != 3:
        raise _misplaced(root, path_parts, group)
    return levels[0], levels[1]


def _misplaced(root: Path, path_parts: tuple[str, ...], group: str) -> DataError:
    return DataError(
        f"image folder '{root}': expected {group}/class/image, or train|test/{group}/class/image, "
        f"but found '{'/'.join(path_parts)}'"
    )


def load_image(file: Path, size: tuple[int, int] | None) -> Picture:
    """Read one image completely and resize it to (height, width) `size` if given; DataError if the file is broken."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # sizes are checked here
            opened = Image.open(file)
        with opened as image:
            pixels = image.width * image.height
            if pixels > MOST_PIXELS:
                raise DataError(
                    f"image '{file}' has {image.width} x {image.height} = {pixels:,} pixels; at most {MOST_PIXELS:,} "
                    "are allowed, so make it smaller first"
                )
            image.load()
            # cameras store a rotated picture and its orientation
            return resized(ImageOps.exif_transpose(image), size)
    except UNREADABLE as error:
        raise DataError(f"image '{file}' cannot be read: {error or type(error).__name__}") from error


def resized(image: Picture, size: tuple[int, int] | None) -> Picture:
    """Return an image of (height, width) `size`, or of its own size if None is given."""
    if image.mode.startswith("I;16") and image.mode != "I;16":
        # Of 16-bit pixels in another byte order, Pillow mixes up the bytes, or cuts values off at 255.
        image = Image.fromarray(np.asarray(image).astype(np.uint16))
    return image if size is None else image.resize((size[1], size[0]), Image.Resampling.BILINEAR)


def stack_images(images: Iterable[Picture], names: Iterable[str]) -> Tensor:
    """Return uint8 `[samples, channels, height, width]`: one channel if all images are grey, otherwise three.

    Args:
        images: images of one size.
        names: the name of each image, for the message.

    Raises:
        DataError: at the first image whose size differs from the first one's.
    """
    arrays: list[NDArray[np.uint8]] = []
    for image, name in zip(images, names, strict=True):
        array = np.asarray(_eight_bits(image), dtype=np.uint8)
        if arrays and array.shape[:2] != arrays[0].shape[:2]:
            height, width = arrays[0].shape[:2]
            raise DataError(
                f"image '{name}' is {array.shape[0]}x{array.shape[1]}, but the first one is {height}x{width} (height x "
                f"width); resize them to one size, for an image folder with size=({height}, {width})"
            )
        arrays.append(array)
    if all(array.ndim == 2 for array in arrays):
        return torch.from_numpy(np.stack(arrays)).unsqueeze(1)
    colour = np.empty((len(arrays), 3, *arrays[0].shape[:2]), dtype=np.uint8)
    for row, array in enumerate(arrays):
        colour[row] = array if array.ndim == 2 else array.transpose(2, 0, 1)
    return torch.from_numpy(colour)


def _eight_bits(image: Picture) -> Picture:
    """Return the image in mode "L" if it is grey, otherwise in mode "RGB"."""
    if image.mode in ("I", "F"):
        raise DataError(
            f"an image has 32 bits per pixel (mode {image.mode}), which would be cut off at 255; save it with 8 or 16 "
            "bits per pixel"
        )
    if image.mode == "I;16":
        # a plain conversion would cut 16-bit values off at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("L" if image.mode in _GREY_MODES else "RGB")


def channel_scaling(
    x: Tensor, scaling: Channels
) -> tuple[tuple[float, ...], tuple[float, ...], dict[str, Any]]:
    """Return mean and deviation of each channel of training images `x`, and their entries in a source's `info`.

    Raises:
        ConfigError: for an unknown scaling.
    """
    check_known("scaling", scaling, get_args(Channels))
    if scaling == "public":
        mean, deviation = ((number,) * x.shape[1] for number in PUBLIC_CHANNEL)
        return mean, deviation, {}
    return *channel_statistics(x), {PRIVATE_SCALING: FITTED_IMAGES}


def channel_statistics(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel of uint8 `[samples, channels, height, width]` after / 255.

    A constant channel gets deviation 1, so that dividing by it changes nothing.
    """
    return statistics_of(channel_counts(x))


def channel_counts(x: Tensor) -> Tensor:
    """Return int64 `[channels, 256]`: how often each byte occurs in uint8 `[samples, channels, height, width]`.

    Counting is exact and needs no float copy of the images; it goes in blocks, since they may be a mapped file.
    """
    counts = torch.zeros(x.shape[1], 256, dtype=torch.int64)
    for start in range(0, len(x), COUNTED):
        for channel in range(x.shape[1]):
            counts[channel] += torch.bincount(x[start : start + COUNTED, channel].flatten(), minlength=256)
    return counts


def statistics_of(counts: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel after / 255, from `channel_counts` (or a sum of several)."""
    values = np.arange(256) / 255.0
    mean, std = [], []
    for row in counts.numpy():
        share = row / row.sum()
        centre = float(share @ values)
        deviation = float(np.sqrt(share @ (values - centre) ** 2))
        mean.append(centre)
        std.append(deviation if deviation > 0 else 1.0)
    return tuple(mean), tuple(std)
