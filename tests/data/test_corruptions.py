"""Corrupted test images: names, determinism, severities, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tailorfl.data import corruptions
from tailorfl.data.corruptions import KINDS, _corrupted, corrupted_sets
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError, DataError, MissingExtraError, TailorflError


def pictures(channels: int = 3, side: int = 32, count: int = 3) -> Source:
    """Smooth colourful images."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, channels, 4, 4, generator=generator)
    fine = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bilinear")
    return Source(
        "pictures",
        (fine * 255).to(torch.uint8),
        torch.arange(count),
        "classification",
        count,
        mean=(0.5,) * channels,
        std=(0.2,) * channels,
    )


ALL = np.arange(3)


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"kind": "fog"}, "Did you mean 'kinds'"),
            ({"kinds": ["frog"]}, "Did you mean 'fog'"),
            ({"severities": [0]}, "numbers from 1 to 5"),
            ({"severities": []}, "numbers from 1 to 5"),
            ({"samples": 0}, "at least 1"),
        ],
    )
    def test_options(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            corrupted_sets(pictures(), ALL, options, seed=0)

    def test_tables_have_no_corruptions(self) -> None:
        table = Source("table", torch.zeros(3, 5), torch.arange(3), "classification", 3)
        with pytest.raises(DataError, match="need images"):
            corrupted_sets(table, ALL, {}, seed=0)

    def test_floats_must_be_pixels(self) -> None:
        scaled = Source("scaled", torch.full((3, 1, 8, 8), 2.0), torch.arange(3), "classification", 3)
        with pytest.raises(DataError, match=r"floats in \[0, 1\]"):
            corrupted_sets(scaled, ALL, {}, seed=0)

    def test_missing_package_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "imagecorruptions", None)
        with pytest.raises(
            TailorflError, match=r"pip install .*the extra 'corruptions' of tailorfl"
        ) as caught:
            corrupted_sets(pictures(), ALL, {}, seed=0)
        assert isinstance(caught.value, MissingExtraError)


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
        sets = corrupted_sets(source, np.arange(2), {"severities": [1, 5]}, seed=0)
        assert list(sets) == [f"{kind}-{severity}" for kind in KINDS for severity in (1, 5)]
        for name, found in sets.items():
            assert found.x.shape == source.x.shape
            assert found.x.dtype == torch.uint8
            assert torch.equal(found.y, source.y)
            assert found.mean == source.mean
            if name.endswith("5"):
                assert not torch.equal(found.x, source.x)

    def test_damage_grows_with_severity(self) -> None:
        source = pictures(count=3)
        sets = corrupted_sets(source, ALL, {"kinds": ["gaussian_noise", "fog", "contrast"]}, seed=0)
        for kind in ("gaussian_noise", "fog", "contrast"):
            damage = [
                (sets[f"{kind}-{s}"].x.float() - source.x.float()).square().mean().item() for s in (1, 3, 5)
            ]
            assert damage == sorted(damage)

    def test_images_are_corrupted_alike_whatever_else_is_asked_for(self) -> None:
        source = pictures()
        everything = corrupted_sets(source, ALL, {"severities": [2]}, seed=4)
        for kind in KINDS:
            alone = corrupted_sets(source, ALL[1:2], {"kinds": kind, "severities": [2]}, seed=4)
            assert torch.equal(alone[f"{kind}-2"].x[0], everything[f"{kind}-2"].x[1]), kind

    def test_seeds_differ(self) -> None:
        one, two = (corrupted_sets(pictures(), ALL, {"kinds": "shot_noise"}, seed=s) for s in (0, 1))
        assert not torch.equal(one["shot_noise-1"].x, two["shot_noise-1"].x)

    def test_numpys_global_generator_is_left_as_it_was(self) -> None:
        np.random.seed(123)  # noqa: NPY002
        expected = np.random.random(5)  # noqa: NPY002
        np.random.seed(123)  # noqa: NPY002
        corrupted_sets(pictures(), ALL, {"kinds": "snow"}, seed=0)
        assert np.array_equal(np.random.random(5), expected)  # noqa: NPY002

    def test_samples_caps_the_images_and_keeps_them_equal_over_sets(self) -> None:
        sets = corrupted_sets(
            pictures(count=9), np.arange(9), {"kinds": ["fog", "snow"], "samples": 4}, seed=0
        )
        labels = {tuple(found.y.tolist()) for found in sets.values()}
        assert len(labels) == 1
        assert len(labels.pop()) == 4

    def test_float_images_stay_floats_in_their_range(self) -> None:
        source = pictures(channels=1, side=8)
        floats = Source("floats", source.x.float() / 255, source.y, "classification", 3)
        found = corrupted_sets(floats, ALL, {"kinds": "brightness", "severities": [5]}, seed=0)[
            "brightness-5"
        ]
        assert found.x.dtype == torch.float32
        assert 0 <= found.x.min() <= found.x.max() <= 1
        assert found.x.mean() > floats.x.mean()

    def test_images_that_are_not_square(self) -> None:
        source = pictures()
        wide = Source("wide", source.x[:, :, :20].contiguous(), source.y, "classification", 3)
        sets = corrupted_sets(wide, ALL, {"severities": [3]}, seed=0)
        assert {tuple(found.x.shape) for found in sets.values()} == {(3, 3, 20, 32)}


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

        monkeypatch.setattr(corruptions, "_library", lambda: corrupt)

    @staticmethod
    def of(
        seed: int, kinds: Any = ("fog", "glass_blur"), rows: Any = ALL, **options: Any
    ) -> dict[str, Source]:
        options = {"kinds": kinds, "severities": [1, 2], **options}
        return corrupted_sets(pictures(), np.asarray(rows), options, seed=seed)

    def test_the_same_seed_gives_the_same_images_and_another_seed_others(self) -> None:
        first, again, other = self.of(0), self.of(0), self.of(1)
        for name, found in first.items():
            assert torch.equal(found.x, again[name].x)
            assert not torch.equal(found.x, other[name].x)

    def test_every_image_kind_and_severity_has_noise_of_its_own(self) -> None:
        flat = replace(pictures(), x=torch.zeros_like(pictures().x))
        found = corrupted_sets(flat, ALL, {"kinds": ["fog", "snow"], "severities": [1, 2]}, seed=0)
        looks = {image.numpy().tobytes() for one in found.values() for image in one.x}
        assert len(looks) == 2 * 2 * 3

    def test_an_image_is_corrupted_alike_whichever_others_are(self) -> None:
        assert torch.equal(self.of(5, rows=[1])["fog-2"].x[0], self.of(5)["fog-2"].x[1])

    def test_a_cap_draws_by_the_seed(self) -> None:
        many = Source(
            "many", torch.zeros(100, 1, 8, 8, dtype=torch.uint8), torch.arange(100), "classification", 100
        )
        drawn = [
            corrupted_sets(many, np.arange(100), {"kinds": "fog", "severities": [1], "samples": 20}, seed)
            for seed in (0, 0, 1)
        ]
        one, again, other = (set(found["fog-1"].y.tolist()) for found in drawn)
        assert len(one) == 20
        assert one == again != other
        assert max(one) >= 50  # not the first rows

    def test_floats_come_back_as_floats(self) -> None:
        whole = pictures()
        scaled = replace(whole, x=whole.x.float() / 255, mean=None, std=None)
        options = {"kinds": "fog", "severities": [1]}
        expected = corrupted_sets(whole, ALL, options, seed=0)["fog-1"].x.float() / 255
        torch.testing.assert_close(corrupted_sets(scaled, ALL, options, seed=0)["fog-1"].x, expected)
