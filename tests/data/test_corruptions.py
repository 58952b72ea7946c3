"""Corrupted test images: names, determinism, severities, and what is refused."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

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
        with pytest.raises(TailorflError, match=r"tailorfl\[corruptions\]") as caught:
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
