"""Augmented images: a function of (key, place in the batch), with torchvision's crops and flips as outcomes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tailorfl.data.augment import PADDING, augment
from tailorfl.data.build import build
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError, DataError

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def images(*shape: int, seed: int = 0) -> Tensor:
    """Random pixels of 1 to 255, so that black is nothing but padding."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, shape, generator=rng, dtype=torch.uint8)


def pictures(count: int = 40, side: int = 8, **changes: object) -> Source:
    fields = {"mean": MEAN, "std": STD, **changes}
    return Source(
        "pictures", images(count, 3, side, side), torch.arange(count) % 4, "classification", 4, **fields
    )  # type: ignore[arg-type]


def outcomes(x: Tensor) -> dict[tuple[bool, int, int], Tensor]:
    """Everything that a flip and a crop may make of one image [C, H, W]."""
    height, width = x.shape[-2:]
    padded = F.pad(x, (PADDING,) * 4)
    found = {}
    for flipped, down, right in product((False, True), range(2 * PADDING + 1), range(2 * PADDING + 1)):
        cut = padded[:, down : down + height, right : right + width]
        found[flipped, down, right] = cut.flip(-1) if flipped else cut
    return found


def what_happened(x: Tensor, changed: Tensor) -> tuple[bool, int, int]:
    (found,) = [name for name, image in outcomes(x).items() if torch.equal(image, changed)]
    return found


KEYS = torch.tensor([-(2**62), -1, 5])


def test_every_image_is_one_of_the_crops_of_its_flips() -> None:
    x = images(3, 6, 3, 8, 10)
    changed = augment(x, KEYS, "flip_crop")
    assert changed.shape == x.shape
    assert changed.dtype == x.dtype
    found = {what_happened(x[i, j], changed[i, j]) for i in range(3) for j in range(6)}
    assert len(found) > 10


def test_a_flip_is_a_flip() -> None:
    x = images(3, 6, 1, 8, 10)
    changed = augment(x, KEYS, "flip")
    same, mirrored = (changed == x).flatten(2).all(2), (changed == x.flip(-1)).flatten(2).all(2)
    assert torch.equal(same, ~mirrored)
    assert 0 < int(same.sum()) < 18


def test_the_flip_of_a_crop_is_that_of_the_flip_alone() -> None:
    x = images(3, 6, 3, 8, 8)
    alone, changed = augment(x, KEYS, "flip"), augment(x, KEYS, "flip_crop")
    for i, j in product(range(3), range(6)):
        assert what_happened(x[i, j], changed[i, j])[0] == torch.equal(alone[i, j], x[i, j].flip(-1))


def test_none_is_the_image() -> None:
    x = images(1, 2, 3, 8, 8)
    assert augment(x, torch.tensor([1]), "none") is x


@pytest.mark.parametrize("kind", ["flip", "flip_crop"])
def test_the_outcome_depends_on_key_and_place_alone(kind: str) -> None:
    x = images(3, 6, 3, 8, 8)
    whole = augment(x, KEYS, kind)  # type: ignore[arg-type]
    assert torch.equal(augment(x, KEYS, kind), whole)  # type: ignore[arg-type]
    order = torch.tensor([2, 0, 1])
    assert torch.equal(augment(x[order], KEYS[order], kind), whole[order])  # type: ignore[arg-type]
    assert torch.equal(augment(x[:, :4], KEYS, kind), whole[:, :4])  # type: ignore[arg-type]
    for i in range(3):
        assert torch.equal(augment(x[i], KEYS[i], kind), whole[i])  # type: ignore[arg-type]
    other = augment(x, KEYS + 1, kind)  # type: ignore[arg-type]
    assert not torch.equal(other, whole)


def test_flips_and_places_are_uniform() -> None:
    """Over 4,000 images: half are mirrored, and each of the 9 × 9 places is taken about equally often."""
    ramp = torch.arange(1, 65, dtype=torch.uint8).view(1, 1, 1, 8, 8).expand(40, 100, 1, 8, 8)
    changed = augment(ramp, torch.arange(40), "flip_crop")
    known = {bytes(image.numpy().tobytes()): name for name, image in outcomes(ramp[0, 0]).items()}
    names = [known[bytes(image.contiguous().numpy().tobytes())] for image in changed.flatten(0, 1)]
    flips = np.array([name[0] for name in names])
    places = np.array([name[1] * 9 + name[2] for name in names])
    assert abs(flips.mean() - 0.5) < 0.03
    counts = np.bincount(places, minlength=81)
    assert (counts > 0).all()
    expected = len(names) / 81
    # χ² with 80 degrees of freedom is below 125 in 99.9 % of draws.
    assert float(((counts - expected) ** 2 / expected).sum()) < 125
    # What happens to neighbours in a batch, and to the two directions, is unrelated.
    down, right = places // 9, places % 9
    assert abs(np.corrcoef(down, right)[0, 1]) < 0.06
    assert abs(np.corrcoef(down[:-1], down[1:])[0, 1]) < 0.06
    assert abs(np.corrcoef(flips, down)[0, 1]) < 0.06


def test_padding_is_a_black_pixel_after_normalisation() -> None:
    source = pictures(augment="flip_crop")
    x = source.take_augmented(torch.arange(40)[None], torch.tensor([3]))[0]
    black = torch.tensor([-m / s for m, s in zip(MEAN, STD, strict=True)])
    raw = augment(source.x, torch.tensor(3), "flip_crop")
    assert int((raw == 0).sum()) > 100
    for channel in range(3):
        padded = x[:, channel][raw[:, channel] == 0]
        torch.testing.assert_close(padded, black[channel].expand(len(padded)))
    inside = replace(source, x=raw, augment="none").take(torch.arange(40))
    assert torch.equal(x, inside)


def test_taking_samples_for_evaluation_changes_nothing() -> None:
    plain, changed = pictures(), pictures(augment="flip_crop")
    rows = torch.arange(12).view(3, 4)
    assert torch.equal(plain.take(rows), changed.take(rows))
    assert torch.equal(plain.take_augmented(rows, KEYS), plain.take(rows))
    assert not torch.equal(changed.take_augmented(rows, KEYS), plain.take(rows))


def test_only_images_can_be_augmented() -> None:
    with pytest.raises(DataError, match="uint8 images"):
        Source(
            "table", torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64), "classification", 2, augment="flip"
        )
    with pytest.raises(DataError, match=r"digits.*uint8 images"):
        build("digits", augment="flip")
    with pytest.raises(ConfigError, match="Did you mean 'flip_crop'"):
        pictures(augment="flip-crop")
    with pytest.raises(ConfigError, match="unknown augmentation"):
        augment(images(1, 1, 8, 8), torch.tensor(0), "rotate")  # type: ignore[arg-type]


def test_a_federation_augments_clients_and_public_images_alike() -> None:
    for source, public, kind in (
        (pictures(), pictures(24), "flip_crop"),
        (pictures(augment="flip"), "pictures", "flip"),
    ):
        asked = {} if source.augment == kind else {"augment": kind}
        federation = build(source=source, clients=3, partition="iid", public=public, **asked)  # type: ignore[arg-type]
        assert federation.public is not None
        assert (federation.source.augment, federation.public.augment) == (kind, kind)
    assert build(source=pictures(), clients=3, partition="iid").source.augment == "none"
