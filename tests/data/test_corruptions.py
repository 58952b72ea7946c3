"""Corrupted test images: names, determinism, severities, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tailorfl.data import shifts
from tailorfl.data.shifts import KINDS, _corrupted, corrupted_sets
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError, DataError, MissingExtraError
from tailorfl.settings.data import CorruptionConfig


def pictures(channels: int = 3, side: int = 32, count: int = 3) -> Source:
    """Smooth colourful images."""
    coarse = torch.rand(count, channels, 4, 4, generator=torch.Generator().manual_seed(0))
    x = (torch.nn.functional.interpolate(coarse, size=(side, side), mode="bilinear") * 255).to(torch.uint8)
    constants = {"mean": (0.5,) * channels, "std": (0.2,) * channels}
    return Source("pictures", x, torch.arange(count), "classification", count, **constants)


ALL = np.arange(3)


def corrupted(source: Source, rows: Any = ALL, seed: int = 0, **options: Any) -> dict[str, Source]:
    return corrupted_sets(source, np.asarray(rows), CorruptionConfig(**options), seed)


def test_what_cannot_be_corrupted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'fog'"):
        corrupted(pictures(), kinds=["frog"])
    for x in (torch.zeros(3, 5), torch.full((3, 1, 8, 8), 2.0), torch.full((3, 1, 8, 8), 1.001)):
        with pytest.raises(DataError, match="corruptions need"):
            corrupted(Source("odd", x, torch.arange(3), "classification", 3))
    with pytest.raises(DataError, match="test images"):
        corrupted(pictures(), rows=ALL[:0])
    monkeypatch.setitem(sys.modules, "imagecorruptions", None)
    with pytest.raises(MissingExtraError, match="'corruptions'"):
        corrupted(pictures())


def test_an_image_enlarged_and_averaged_back_is_itself() -> None:
    rng = np.random.default_rng(0)
    for side, channels in ((8, 1), (28, 1), (32, 3), (40, 3), (64, 3)):
        image = rng.integers(0, 256, (side, side, channels), dtype=np.uint8)
        for kind in ("fog", "pixelate"):
            same = _corrupted(lambda large, **_: large, image, kind, 1, seed=0)
            assert np.array_equal(same, image)


class TestSets:
    @pytest.fixture(autouse=True)
    def _package(self) -> None:
        pytest.importorskip("imagecorruptions")

    @pytest.mark.parametrize(("channels", "side"), [(3, 32), (1, 28), (1, 8)])
    def test_all_kinds_and_severities_change_the_images(self, channels: int, side: int) -> None:
        source = pictures(channels, side, count=2)
        sets = corrupted(source, range(2), severities=[1, 5])
        assert list(sets) == [f"{kind}-{severity}" for kind in KINDS for severity in (1, 5)]
        for name, changed in sets.items():
            x = changed.x
            assert (x.shape, x.dtype, changed.mean) == (source.x.shape, torch.uint8, source.mean)
            assert torch.equal(changed.y, source.y)
            assert name.endswith("1") or not torch.equal(x, source.x)

    def test_damage_grows_with_severity(self) -> None:
        source, kinds = pictures(), ("gaussian_noise", "fog", "contrast")
        sets = corrupted(source, kinds=kinds)
        for kind in kinds:
            changes = [sets[f"{kind}-{severity}"].x.float() - source.x.float() for severity in (1, 3, 5)]
            damage = [float(change.square().mean()) for change in changes]
            assert damage == sorted(damage)

    def test_images_are_corrupted_alike_whatever_else_is_asked_for(self) -> None:
        everything = corrupted(pictures(), severities=[2], seed=4)
        for kind in KINDS:
            alone = corrupted(pictures(), ALL[1:2], kinds=kind, severities=[2], seed=4)
            assert torch.equal(alone[f"{kind}-2"].x[0], everything[f"{kind}-2"].x[1]), kind

    def test_numpys_global_generator_is_left_as_it_was(self) -> None:
        np.random.seed(123)  # noqa: NPY002
        expected = np.random.random(5)  # noqa: NPY002
        np.random.seed(123)  # noqa: NPY002
        corrupted(pictures(), kinds="snow")
        assert np.array_equal(np.random.random(5), expected)  # noqa: NPY002

    def test_images_that_are_not_square(self) -> None:
        source = pictures()
        wide = Source("wide", source.x[:, :, :20].contiguous(), source.y, "classification", 3)
        assert {changed.x.shape for changed in corrupted(wide, severities=[3]).values()} == {(3, 3, 20, 32)}


class TestWithoutThePackage:
    """What surrounds the corruptions, with one of our own in their place: noise from NumPy's global generator."""

    @pytest.fixture(autouse=True)
    def _noise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def corrupt(
            image: NDArray[np.uint8], severity: int, corruption_name: str, seed: int | None = None
        ) -> Any:
            noise = np.random.randint(0, 100, image.shape)  # noqa: NPY002
            if seed is not None:
                noise = np.random.default_rng(seed).integers(0, 100, image.shape)
            return (image.astype(np.int64) // 2 + noise).astype(np.uint8)

        monkeypatch.setattr(shifts, "_library", lambda: corrupt)

    def test_the_same_seed_gives_the_same_images_and_another_seed_others(self) -> None:
        options = {"kinds": ("fog", "glass_blur"), "severities": [1, 2]}
        first, again, other = (corrupted(pictures(), seed=seed, **options) for seed in (0, 0, 1))
        for name, changed in first.items():
            assert torch.equal(changed.x, again[name].x)
            assert not torch.equal(changed.x, other[name].x)

    def test_every_image_kind_and_severity_has_noise_of_its_own(self) -> None:
        black = replace(pictures(), x=torch.zeros_like(pictures().x))
        sets = corrupted(black, kinds=["fog", "snow"], severities=[1, 2])
        assert len({image.numpy().tobytes() for changed in sets.values() for image in changed.x}) == 2 * 2 * 3

    def test_a_cap_draws_by_the_seed_the_same_images_for_all_sets(self) -> None:
        x = torch.zeros(100, 1, 8, 8, dtype=torch.uint8)
        many = Source("many", x, torch.arange(100), "classification", 100)
        drawn = []
        for seed in (0, 0, 1):
            sets = corrupted(many, range(100), seed, kinds=["fog", "snow"], severities=[1], samples=20)
            assert torch.equal(sets["fog-1"].y, sets["snow-1"].y)
            drawn.append(sets["fog-1"].y.tolist())
        assert drawn[0] == drawn[1] != drawn[2]
        assert (len(drawn[0]), max(drawn[0]) >= 50) == (20, True)  # not the first rows

    def test_floats_come_back_as_floats(self) -> None:
        whole = pictures()
        whole.x[0, 0, 0, 0] = 255  # white is 1.0, the largest
        scaled = replace(whole, x=whole.x.float() / 255, mean=None, std=None)
        expected, changed = (corrupted(s, kinds="fog", severities=[1])["fog-1"].x for s in (whole, scaled))
        torch.testing.assert_close(changed, expected.float() / 255)
