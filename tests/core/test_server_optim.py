"""Server optimizers against their formulas in numpy, over several rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tensordict import TensorDict

from tailorfl.core.server_training import ServerOptimizer

CASES: list[dict[str, Any]] = [
    {"kind": "sgd"},
    {"kind": "sgd", "lr": 0.3},
    {"kind": "sgd", "lr": 0.3, "momentum": 0.9},
    {"kind": "adam", "lr": 0.1, "momentum": 0.9, "beta2": 0.99, "eps": 1e-3},
    {"kind": "adam", "lr": 0.1, "beta2": 0.9, "eps": 1e-3, "initial": 0.5},
    {"kind": "yogi", "lr": 0.1, "momentum": 0.9, "beta2": 0.9, "eps": 1e-3, "initial": 0.2},
    {"kind": "adagrad", "lr": 0.1, "momentum": 0.5, "eps": 1e-3, "initial": 1e-2},
]


def by_hand(options: dict[str, Any], w: np.ndarray, updates: list[np.ndarray]) -> list[np.ndarray]:
    """Every iterate, in double precision."""
    kind, lr, beta1 = options["kind"], options.get("lr", 1.0), options.get("momentum", 0.0)
    beta2, eps = options.get("beta2", 0.999), options.get("eps", 1e-8)
    m, v, out = np.zeros_like(w), np.full_like(w, options.get("initial", 0.0)), []
    for delta in updates:
        if kind == "sgd":
            m = beta1 * m + delta
            w = w + lr * m
        else:
            m = beta1 * m + (1 - beta1) * delta
            if kind == "adam":
                v = beta2 * v + (1 - beta2) * delta**2
            elif kind == "yogi":
                v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
            else:
                v = v + delta**2
            w = w + lr * m / (np.sqrt(v) + eps)
        out.append(w)
    return out


@pytest.mark.parametrize("options", CASES, ids=lambda o: "-".join(map(str, o.values())))
def test_several_rounds_follow_the_formula(options):
    """Inputs are left alone, and the state keeps its structure: checkpoints fill a template made by `start`."""
    rng = np.random.default_rng(0)
    w0, updates = rng.standard_normal((3, 2)), [rng.standard_normal((3, 2)) for _ in range(6)]
    optimizer = ServerOptimizer(**options)
    w = TensorDict({"w": torch.from_numpy(w0)}, batch_size=[])
    state = optimizer.start(w)
    for expected, delta in zip(by_hand(options, w0, updates), updates, strict=True):
        before = w.clone(), state.clone()
        new, new_state = optimizer.step(w, TensorDict({"w": torch.from_numpy(delta)}, batch_size=[]), state)
        assert bool((w == before[0]).all())
        assert all(torch.equal(t, state[n]) for n, t in before[1].items(True, True))
        assert set(state.keys(True, True)) == set(new_state.keys(True, True))
        w, state = new, new_state
        np.testing.assert_allclose(w["w"].numpy(), expected, rtol=1e-9, atol=1e-12)
    assert optimizer.is_plain_average == (options == {"kind": "sgd"})


def test_momentum_zero_and_rate_one_is_the_average():
    w = TensorDict({"w": torch.tensor([1.0, 2.0])}, batch_size=[])
    mean = TensorDict({"w": torch.tensor([3.0, -1.0])}, batch_size=[])
    optimizer = ServerOptimizer()
    new, state = optimizer.step(w, mean - w, optimizer.start(w))
    assert torch.equal(new["w"], mean["w"])
    assert len(state.keys()) == 0
    assert optimizer.is_plain_average


@pytest.mark.parametrize(
    "bad", [{"lr": 0}, {"momentum": 1.0}, {"kind": "rmsprop"}, {"eps": 0}, {"beta": 0.9}]
)
def test_settings_without_meaning_are_refused(bad):
    with pytest.raises(ValidationError):
        ServerOptimizer(**bad)
