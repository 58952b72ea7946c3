"""Keys: every random choice is a pure function of (seed, purpose, client, round), never of call order.

The generator is SplitMix64 (Steele, Lea and Flood 2014) in counter mode, vectorised over clients: one numpy call gives
the batch orders of a thousand clients, and a client draws the same numbers alone or in any cohort.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def _finalise(z: Keys | np.uint64) -> Keys:
    z = np.asarray(z, dtype=np.uint64)
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    return np.asarray(z ^ (z >> np.uint64(31)), dtype=np.uint64)


def _number(part: int | str) -> np.uint64:
    if isinstance(part, str):
        return np.uint64(int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "little"))
    return np.uint64(part & 0xFFFFFFFFFFFFFFFF)


def derive(key: Keys | int, *parts: int | str | Keys) -> Keys:
    """Return keys derived from `key` and `parts` in order, uint64; arrays broadcast against each other."""
    with np.errstate(over="ignore"):
        out = np.asarray(_number(key) if isinstance(key, int) else key, dtype=np.uint64)
        for part in parts:
            number = part if isinstance(part, np.ndarray) else _number(part)
            out = _finalise((out + _GOLDEN) ^ _finalise(number.astype(np.uint64) + _GOLDEN))
    return np.asarray(out, dtype=np.uint64)


def bits(keys: Keys, count: int) -> Keys:
    """Return `count` random 64-bit words per key, uint64 [*keys.shape, count]."""
    with np.errstate(over="ignore"):
        counter = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        return _finalise(keys[..., None] + counter)


def generator(key: int, *parts: int | str) -> np.random.Generator:
    """Return a numpy generator for work that is not per client (partitions, sampling a cohort)."""
    return np.random.default_rng(int(derive(key, *parts)))


def torch_seed(key: int, *parts: int | str) -> int:
    """Return a seed for `torch.manual_seed`, an int in [0, 2**63)."""
    return int(derive(key, *parts) >> np.uint64(1))
