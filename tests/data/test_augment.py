"""Augmented images: a function of (key, place in the batch), with torchvision's crops and flips as outcomes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tailorfl.data.build import build
from tailorfl.data.source import PADDING, Source, augment
from tailorfl.errors import ConfigError, DataError

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def images(*shape: int) -> Tensor:
    """Random pixels of 1 to 255, so that black is nothing but padding."""
    return torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def pictures(count: int = 40, **changes: Any) -> Source:
    x, y = images(count, 3, 8, 8), torch.arange(count) % 4
    return Source("pictures", x, y, "classification", 4, **{"mean": MEAN, "std": STD, **changes})


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


def test_every_image_is_one_of_the_crops_of_its_flips_and_flipped_as_by_the_flip_alone() -> None:
    x = images(3, 6, 3, 8, 10)
    alone, changed = augment(x, KEYS, "flip"), augment(x, KEYS, "flip_crop")
    assert (changed.shape, changed.dtype) == (x.shape, x.dtype)
    same, mirrored = ((alone == other).flatten(2).all(2) for other in (x, x.flip(-1)))
    assert torch.equal(same, ~mirrored)
    assert 0 < int(same.sum()) < 18
    happened = {(i, j): what_happened(x[i, j], changed[i, j]) for i, j in product(range(3), range(6))}
    assert all(flipped == mirrored[place] for place, (flipped, *_) in happened.items())
    assert len(set(happened.values())) > 10
    assert augment(x, KEYS, "none") is x


@pytest.mark.parametrize("kind", ["flip", "flip_crop"])
def test_the_outcome_depends_on_key_and_place_alone(kind: Any) -> None:
    x, order = images(3, 6, 3, 8, 8), torch.tensor([2, 0, 1])
    whole = augment(x, KEYS, kind)
    assert torch.equal(augment(x, KEYS, kind), whole)
    assert torch.equal(augment(x[order], KEYS[order], kind), whole[order])
    assert torch.equal(augment(x[:, :4], KEYS, kind), whole[:, :4])
    assert all(torch.equal(augment(x[i], KEYS[i], kind), whole[i]) for i in range(3))
    assert not torch.equal(augment(x, KEYS + 1, kind), whole)


def test_flips_and_places_are_uniform() -> None:
    """Over 4,000 images: half are mirrored, and each of the 9 × 9 places is taken about equally often."""
    ramp = torch.arange(1, 65, dtype=torch.uint8).view(1, 1, 1, 8, 8).expand(40, 100, 1, 8, 8)
    changed = augment(ramp, torch.arange(40), "flip_crop").flatten(0, 1)
    known = {image.numpy().tobytes(): name for name, image in outcomes(ramp[0, 0]).items()}
    flips, down, right = np.array([known[image.contiguous().numpy().tobytes()] for image in changed]).T
    assert abs(flips.mean() - 0.5) < 0.03
    counts, expected = np.bincount(down * 9 + right, minlength=81), len(changed) / 81
    assert (counts > 0).all()
    # χ² with 80 degrees of freedom is below 125 in 99.9 % of draws.
    assert float(((counts - expected) ** 2 / expected).sum()) < 125
    # What happens to neighbours in a batch, and to the two directions, is unrelated.
    for one, two in ((down, right), (down[:-1], down[1:]), (flips, down)):
        assert abs(np.corrcoef(one, two)[0, 1]) < 0.06


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
    table = Source("table", torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64), "classification", 2)
    for call, words in (
        (lambda: replace(table, augment="flip"), "uint8 images"),
        (lambda: build("digits", augment="flip"), r"digits.*uint8 images"),
        (lambda: pictures(augment="flip-crop"), "Did you mean 'flip_crop'"),
        (lambda: augment(images(1, 1, 8, 8), torch.tensor(0), "rotate"), "unknown augmentation"),
    ):
        with pytest.raises((DataError, ConfigError), match=words):
            call()


def test_a_federation_augments_clients_and_public_images_alike() -> None:
    def kinds(source: Source, **settings: Any) -> tuple[str, str]:
        federation = build(source=source, clients=3, partition="iid", **settings)
        return federation.source.augment, federation.public.augment

    assert kinds(pictures(), public=pictures(24), augment="flip_crop") == ("flip_crop", "flip_crop")
    assert kinds(pictures(augment="flip"), public="pictures") == ("flip", "flip")
    assert kinds(pictures(), public=pictures(24)) == ("none", "none")
