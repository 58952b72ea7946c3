"""Image sets: MNIST, CIFAR-10, PACS, Tiny-ImageNet, chest X-rays, Omniglot by writer, scikit-learn's digits.

All but the digits are files of the data folder (see `tailorfl.data.storage`); without them MNIST and CIFAR-10 come
from the Hugging Face hub (`tailorfl.data.hub_sets`). None of them is part of this package, and several may be used for
research only: read the licence named in each function before sharing anything made from them. Images are uint8
`[samples, channels, height, width]` with the channel statistics of the training part.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from tailorfl.archives import load_arrays
from tailorfl.data.hub_sets import hub_images
from tailorfl.data.registry import data_source
from tailorfl.data.source import Source, labelled
from tailorfl.data.storage import has_data_file, read_data_file
from tailorfl.errors import ConfigError, DataError, check_known
from tailorfl.hub import package_folder

Bytes = NDArray[np.uint8]


@data_source("MNIST, 60,000 + 10,000 digits of 28x28 pixels", files="mnist.npz")
def mnist(scaling: Literal["standard", "unit"] = "standard") -> Source:
    """MNIST: 60,000 + 10,000 handwritten digits, `[1, 28, 28]`; its origin states no terms of use.

    Args:
        scaling: pixels of mean 0 and deviation 1 ("standard"), or in [0, 1] ("unit").

    Raises:
        ConfigError: an unknown scaling.
    """
    scalings = {"standard": ((0.1307,), (0.3081,)), "unit": ((0.0,), (1.0,))}
    check_known("scaling of mnist", scaling, scalings)
    mean, std = scalings[scaling]
    if not has_data_file("mnist.npz"):
        return hub_images("mnist", mean, std)
    return _two_parts(
        "mnist", read_data_file("mnist.npz", load_arrays), classes=range(10), mean=mean, std=std
    )


@data_source(
    "CIFAR-10, images of 32x32 pixels: 45,000 + 10,000 from lossy JPEG, or all of the Hugging Face hub",
    files="cifar10_jpeg.npz",
    capped=True,
)
def cifar10(samples: int | None = None) -> Source:
    """CIFAR-10, `[3, 32, 32]`: 45,000 + 10,000 images from lossy JPEG, or the 50,000 + 10,000 of the hub.

    The JPEG step costs about ten points of accuracy, so its results compare with each other and not with published
    ones. Those of the hub are the original images. No licence stated.

    Args:
        samples: use only this many images, the first of each part, in the proportion of the parts.
    """
    if not has_data_file("cifar10_jpeg.npz"):
        mean, std = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
        return _first(hub_images("cifar10", mean, std, "img"), samples)
    mean, std = (0.491, 0.482, 0.446), (0.245, 0.243, 0.261)
    return _jpeg_parts("cifar10", "cifar10_jpeg.npz", samples, mean, std)


@data_source(
    "Tiny-ImageNet at 32x32 pixels, 14,000 images, a public unlabelled set", files="tinyimagenet32_jpeg.npz"
)
def tinyimagenet(samples: int | None = None) -> Source:
    """Tiny-ImageNet at `[3, 32, 32]`: 12,000 + 2,000 images of 200 classes, a public unlabelled set.

    No licence stated (ImageNet: non-commercial research only). As the public set of another source, give it
    that source's `mean` and `std`, since the clients' models expect their own scaling.

    Args:
        samples: decode only this many images, the first of each part, in the proportion of the parts.
    """
    mean, std = (0.4828, 0.4509, 0.3999), (0.2621, 0.2536, 0.2676)
    return _jpeg_parts("tinyimagenet", "tinyimagenet32_jpeg.npz", samples, mean, std)


@data_source(
    "PACS, 7,992 images of 64x64 pixels, 7 classes in 4 domains (group 'domain')",
    files="pacs64_jpeg.npz",
    capped=True,
)
def pacs(samples: int | None = None, side: int = 64) -> Source:
    """PACS: 7,992 images `[3, 64, 64]`, 7 classes in 4 domains, no official split; research use only.

    Args:
        samples: decode only this many images from the start; rows are in random order.
        side: pixels a side, 64 or a whole fraction of it such as 32, by averaging squares of pixels.

    Returns:
        A source with group `domain`: art painting, cartoon, photo, sketch.
    """
    if side < 1 or 64 % side:
        raise ConfigError(f"pacs: side must divide 64, such as 64 or 32, but is {side}")
    arrays = read_data_file("pacs64_jpeg.npz", load_arrays)
    count = _capped(samples, len(arrays["y"]))
    return labelled(
        "pacs",
        _smaller(_decode(arrays["jpeg"], arrays["offsets"], count), 64 // side),
        arrays["y"][:count],
        arrays["classes"],
        groups={"domain": (arrays["domain"][:count], arrays["domains"])},
        mean=(0.7614, 0.7418, 0.7131),
        std=(0.2952, 0.3051, 0.3343),
    )


@data_source(
    "chest X-rays, 898 + 225 grey images of 64x64 pixels, 3 unbalanced classes", files="chestxray64.npz"
)
def chestxray() -> Source:
    """Frontal chest X-rays: 898 + 225 grey images `[1, 64, 64]`, 3 unbalanced classes; no licence stated.

    One class comes from another origin than the rest and patients may repeat: for tests, not for medical
    claims.
    """
    arrays = read_data_file("chestxray64.npz", load_arrays)
    return _two_parts("chestxray", arrays, classes=arrays["classes"], mean=(0.5542,), std=(0.2388,))


@data_source(
    "Omniglot, 4,840 characters by 160 writers (groups 'client', 'alphabet')", files="omniglot28.npz"
)
def omniglot() -> Source:
    """Omniglot: 4,840 drawings `[1, 28, 28]` of 242 characters by 160 writers; MIT licence.

    Groups: `client` is the writer (17 to 47 drawings, one of each character of an alphabet), `alphabet` one
    of 8. No official split: a writer draws a character once, so test on other writers or take alphabets as
    clients.
    """
    arrays = read_data_file("omniglot28.npz", load_arrays)
    alphabets = arrays["alphabets"]
    writers = [f"{alphabets[writer // 20]}/{writer % 20:02d}" for writer in range(20 * len(alphabets))]
    return labelled(
        "omniglot",
        torch.from_numpy(arrays["x"]).unsqueeze(1),
        arrays["y"],
        arrays["characters"],
        groups={"client": (arrays["writer"], writers), "alphabet": (arrays["alphabet"], alphabets)},
        mean=(0.0806,),
        std=(0.236,),
    )


@data_source("1,797 digits of 8x8 pixels, bundled with scikit-learn")
def digits() -> Source:
    """Return the 1,797 digits bundled with scikit-learn: float32 `[1, 8, 8]` in [0, 1], no official split.

    From the UCI Optical Recognition of Handwritten Digits set (CC BY 4.0). Needs no data folder.

    Raises:
        DataError: the installation of scikit-learn is incomplete.
    """
    # Read like sklearn.datasets.load_digits, whose import would take a second and 66 MB.
    path = (package_folder("sklearn") or Path()) / "datasets" / "data" / "digits.csv.gz"
    try:
        table = np.loadtxt(path, delimiter=",", dtype=np.float32)
    except OSError as error:
        raise DataError(
            f"the digits of scikit-learn cannot be read: '{path}' ({error}); install it again"
        ) from error
    x = torch.from_numpy(table[:, :-1].reshape(-1, 1, 8, 8) / np.float32(16.0))
    return labelled("digits", x, table[:, -1], range(10))


def _capped(samples: int | None, available: int) -> int:
    if samples is None:
        return available
    if samples < 1:
        raise ConfigError(f"samples must be at least 1, but is {samples}")
    return min(samples, available)


def _two_parts(
    name: str, arrays: dict[str, NDArray[Any]], classes: Any, mean: tuple[float, ...], std: tuple[float, ...]
) -> Source:
    """Return a source from grey image arrays `x_train`, `y_train`, `x_test`, `y_test`."""
    x, y = (np.concatenate([arrays[f"{field}_train"], arrays[f"{field}_test"]]) for field in "xy")
    test = torch.arange(len(y)) >= len(arrays["y_train"])
    return labelled(name, torch.from_numpy(x).unsqueeze(1), y, classes, test=test, mean=mean, std=std)


def _jpeg_parts(
    name: str, file: str, samples: int | None, mean: tuple[float, ...], std: tuple[float, ...]
) -> Source:
    """Return a source from JPEG parts `train` and `test`, of which at most `samples` images are decoded."""
    arrays = read_data_file(file, load_arrays)
    count = _counts(samples, len(arrays["y_train"]), len(arrays["y_test"]))
    parts = [_decode(arrays[f"jpeg_{part}"], arrays[f"offsets_{part}"], n) for part, n in count.items() if n]
    y = np.concatenate([arrays[f"y_{part}"][:n] for part, n in count.items()])
    test = torch.arange(len(y)) >= count["train"]
    return labelled(name, torch.cat(parts), y, arrays["classes"], test=test, mean=mean, std=std)


def _counts(samples: int | None, train: int, test: int) -> dict[str, int]:
    """Return how many of the `train` and `test` images of the two parts are used."""
    used = _capped(samples, train + test)
    tested = round(used * test / (train + test))
    return {"train": used - tested, "test": tested}


def _first(source: Source, samples: int | None) -> Source:
    """Return a source of images with the first of each part, at most `samples`; training ones come first."""
    assert source.test is not None
    trained = int((~source.test).sum())
    count = _counts(samples, trained, len(source) - trained)
    if samples is None or samples >= len(source):
        return source
    rows = torch.cat([torch.arange(count["train"]), trained + torch.arange(count["test"])])
    return replace(source, x=source.x[rows], y=source.y[rows], test=source.test[rows])


def _decode(jpeg: Bytes, offsets: NDArray[np.int64], count: int) -> Tensor:
    """Return the first `count` images of a run of JPEG files, uint8 `[count, 3, height, width]`."""
    blob = memoryview(jpeg.tobytes())

    def picture(row: int) -> Bytes:
        with Image.open(io.BytesIO(blob[offsets[row] : offsets[row + 1]])) as image:
            return np.asarray(image.convert("RGB"), dtype=np.uint8)

    images = np.empty((count, *picture(0).shape), dtype=np.uint8)
    for row in range(count):
        images[row] = picture(row)
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def _smaller(images: Tensor, factor: int) -> Tensor:
    """Return uint8 images `[count, channels, height, width]`, `factor` x `factor` pixels averaged into one."""
    if factor == 1:
        return images
    count, channels, height, width = images.shape
    squares = images.reshape(count, channels, height // factor, factor, width // factor, factor)
    return squares.float().mean((3, 5)).round().to(torch.uint8)


@data_source("features of images that a frozen network has computed, in a .npz file (option path)")
def features(path: str) -> Source:
    """Return a classification source of the feature vectors of a .npz file, such as `studies/features.py` writes.

    Arrays: `x` `[samples, features]` float, `y` `[samples]` int classes from 0, `classes` their names; for an official
    test part `test` `[samples]` bool; for domains `domain` `[samples]` int and `domains`, their names.

    Args:
        path: the .npz file.

    Raises:
        DataError: the file is missing, damaged, or lacks an array.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(
            f"features: there is no file '{file}'; write it with python studies/features.py cifar10 {file} (or pacs)"
        )
    try:
        arrays = load_arrays(file)
        groups = {"domain": (arrays["domain"], arrays["domains"])} if "domain" in arrays else {}
        test = torch.from_numpy(arrays["test"].astype(bool)) if "test" in arrays else None
        x = torch.from_numpy(arrays["x"].astype(np.float32))
        return labelled("features", x, arrays["y"], arrays["classes"], groups=groups, test=test)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"features: '{file}' cannot be used: {error}") from error
