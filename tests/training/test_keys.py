"""Keys are pure functions: independent of shape, call order and process, and never equal by accident."""

from __future__ import annotations

import numpy as np
import pytest

from tailorfl.training.keys import bits, derive, generator, torch_seed


def test_bits_are_splitmix64():
    """The first outputs of the published generator for the seeds 1234567 and 0."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert bits(np.array(1234567, dtype=np.uint64), 5).tolist() == expected
    assert int(bits(np.array(0, dtype=np.uint64), 1)[0]) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("shape", [(24,), (4, 6), (2, 3, 4), (24, 1)])
def test_a_key_does_not_depend_on_the_array_it_is_made_in(shape):
    ids = np.arange(24, dtype=np.uint64).reshape(shape)
    keys = derive(7, "client", 3, "train", ids)
    assert keys.shape == shape
    assert keys.dtype == np.uint64
    for i in range(24):
        assert int(keys.reshape(-1)[i]) == int(derive(7, "client", 3, "train", i))
    words = bits(keys, 5)
    assert words.shape == (*shape, 5)
    np.testing.assert_array_equal(words.reshape(24, 5)[11], bits(keys.reshape(-1)[11], 5))


def test_keys_of_different_purposes_rounds_clients_and_seeds_are_all_different():
    ids = np.arange(500, dtype=np.uint64)
    found = [
        derive(seed, "client", round, purpose, ids)
        for seed in range(5)
        for round in range(10)
        for purpose in ("train", "finetune", "train/noise")
    ]
    assert len(np.unique(np.concatenate(found))) == 5 * 10 * 3 * 500


def test_the_order_and_the_type_of_parts_matter():
    variants = [
        derive(1, 2, 3),
        derive(1, 3, 2),
        derive(2, 1, 3),
        derive(1, "2", 3),
        derive(1, "23"),
        derive(1, 23),
    ]
    assert len({int(v) for v in variants}) == len(variants)


def test_numbers_are_taken_modulo_two_to_the_64():
    assert int(derive(0, -1)) == int(derive(0, 2**64 - 1))
    assert int(derive(2**64 + 5, "x")) == int(derive(5, "x"))


def test_bits_of_neighbouring_keys_are_fair_and_uncorrelated():
    words = bits(derive(0, np.arange(2000, dtype=np.uint64)), 4)
    ones = np.stack([(words >> np.uint64(b)) & np.uint64(1) for b in range(64)]).astype(np.float64)
    # 8000 coins for each of the 64 bits: five standard deviations are 0.028.
    assert np.abs(ones.mean(axis=(1, 2)) - 0.5).max() < 0.03
    uniform = words.astype(np.float64) / 2.0**64
    assert abs(np.corrcoef(uniform[:-1, 0], uniform[1:, 0])[0, 1]) < 0.12
    assert np.abs(np.corrcoef(uniform.T) - np.eye(4)).max() < 0.12


def test_generators_and_seeds_follow_the_key_alone():
    assert generator(1, "sample", 4).random() == generator(1, "sample", 4).random()
    assert generator(1, "sample", 4).random() != generator(1, "sample", 5).random()
    seeds = {torch_seed(s, "init") for s in range(1000)}
    assert len(seeds) == 1000
    assert all(0 <= s < 2**63 for s in seeds)


def test_every_process_derives_the_same_keys():
    """Python's own hash of a string differs from process to process; keys must not."""
    assert int(derive(3, "client", 2, "train", 17)) == 11359801007451059849
