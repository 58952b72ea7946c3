"""Image sets hold what their origin says: counts by class, shapes, parts and groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tailorfl.data.folder import channel_statistics
from tailorfl.data.registry import load_source
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError

Need = Callable[[str], Path]


def counts(source: Source, test: bool) -> list[int]:
    assert source.test is not None
    return torch.bincount(source.y[source.test == test], minlength=source.outputs).tolist()


def assert_statistics_are_those_of_the_training_part(source: Source, tolerance: float) -> None:
    train = source.x if source.test is None else source.x[~source.test]
    mean, std = channel_statistics(train)
    assert source.mean == pytest.approx(mean, abs=tolerance)
    assert source.std == pytest.approx(std, abs=tolerance)


def test_digits_are_bundled_and_scaled() -> None:
    source = load_source("digits")
    assert source.x.shape == (1797, 1, 8, 8)
    assert source.x.dtype == torch.float32
    assert (float(source.x.min()), float(source.x.max())) == (0.0, 1.0)
    assert source.test is None
    assert torch.bincount(source.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_mnist_counts(need_data: Need) -> None:
    need_data("mnist.npz")
    source = load_source("mnist")
    assert source.x.shape == (70000, 1, 28, 28)
    assert source.x.dtype == torch.uint8
    assert counts(source, test=False) == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert counts(source, test=True) == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert_statistics_are_those_of_the_training_part(source, 1e-4)


def test_cifar10_whole(need_data: Need) -> None:
    need_data("cifar10_jpeg.npz")
    source = load_source("cifar10")
    assert source.x.shape == (55000, 3, 32, 32)
    assert counts(source, test=False) == [4500] * 10
    assert counts(source, test=True) == [1000] * 10
    assert source.info["classes"][:3] == ("airplane", "automobile", "bird")
    assert_statistics_are_those_of_the_training_part(source, 5e-3)


def test_a_capped_set_is_the_start_of_both_parts_in_proportion(need_data: Need) -> None:
    path = need_data("cifar10_jpeg.npz")
    source = load_source("cifar10", samples=110)
    assert source.test is not None
    assert int(source.test.sum()) == 20
    with np.load(path) as arrays:
        labels = np.concatenate([arrays["y_train"][:90], arrays["y_test"][:20]])
    assert source.y.tolist() == labels.tolist()
    larger = load_source("cifar10", samples=220)
    assert larger.test is not None
    assert torch.equal(source.x[:90], larger.x[:90])
    assert torch.equal(source.x[source.test], larger.x[larger.test][:20])
    with pytest.raises(ConfigError, match="samples must be at least 1"):
        load_source("cifar10", samples=0)


def test_one_sample_of_a_set_in_two_parts_is_possible(need_data: Need) -> None:
    need_data("tinyimagenet32_jpeg.npz")
    assert load_source("tinyimagenet", samples=1).x.shape == (1, 3, 32, 32)


def test_tinyimagenet_has_even_classes(need_data: Need) -> None:
    need_data("tinyimagenet32_jpeg.npz")
    source = load_source("tinyimagenet")
    assert source.x.shape == (14000, 3, 32, 32)
    assert counts(source, test=False) == [60] * 200
    assert counts(source, test=True) == [10] * 200
    assert_statistics_are_those_of_the_training_part(source, 1e-4)


def test_pacs_counts_by_domain_and_class(need_data: Need) -> None:
    need_data("pacs64_jpeg.npz")
    source = load_source("pacs")
    table = {
        "art_painting": [303, 204, 228, 147, 161, 236, 359],
        "cartoon": [311, 366, 277, 108, 259, 230, 324],
        "photo": [151, 161, 146, 149, 159, 224, 346],
        "sketch": [618, 592, 602, 486, 653, 64, 128],
    }
    assert source.x.shape == (7992, 3, 64, 64)
    assert source.test is None
    assert source.group_names["domain"] == tuple(table)
    for domain, expected in enumerate(table.values()):
        assert torch.bincount(source.y[source.groups["domain"] == domain]).tolist() == expected
    assert_statistics_are_those_of_the_training_part(source, 1e-4)


def test_chestxray_is_grey_and_unbalanced(need_data: Need) -> None:
    need_data("chestxray64.npz")
    source = load_source("chestxray")
    assert source.x.shape == (1123, 1, 64, 64)
    assert counts(source, test=False) == [99, 399, 400]
    assert counts(source, test=True) == [25, 100, 100]
    assert_statistics_are_those_of_the_training_part(source, 1e-4)


def test_omniglot_writers_draw_each_character_of_their_alphabet_once(need_data: Need) -> None:
    need_data("omniglot28.npz")
    source = load_source("omniglot")
    writer, alphabet = source.groups["client"], source.groups["alphabet"]
    assert source.x.shape == (4840, 1, 28, 28)
    assert torch.equal(writer // 20, alphabet)
    assert torch.bincount(source.y).tolist() == [20] * 242
    characters = [24, 22, 24, 47, 40, 26, 42, 17]
    assert torch.bincount(alphabet).tolist() == [20 * count for count in characters]
    assert torch.bincount(writer).tolist() == [count for count in characters for _ in range(20)]
    pairs = torch.stack([writer, source.y], dim=1)
    assert len(torch.unique(pairs, dim=0)) == len(source)
    assert source.group_names["client"][21] == "Early_Aramaic/01"
    assert_statistics_are_those_of_the_training_part(source, 1e-4)
