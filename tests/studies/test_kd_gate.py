"""The gate of distillation: what lies between an average and its ensemble, against numpy and against algebra."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import log_softmax, softmax
from tensordict import TensorDict

from scripts import loaded
from tailorfl.models import build
from tailorfl.models.functional import Model


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return loaded("studies/perada_kd_gate.py")


def drawn(name: str, **options: object) -> tuple[Model, TensorDict, TensorDict]:
    """A model of 4 features and 3 classes, the mean of three states and these states."""
    torch.manual_seed(0)
    model = Model.of(build(name, (4,), 3, **options))
    states = [TensorDict({n: torch.randn_like(t) for n, t in model.init(0).items()}) for _ in range(3)]
    stack = torch.stack(states)
    return model, stack.mean(0), stack


def test_the_average_of_linear_models_is_their_ensemble(study: ModuleType) -> None:
    """The logits of the mean are the mean of the logits; only Φ, whose ensemble is of probabilities, is not 0."""
    model, mean, stack = drawn("logistic")
    found = study.gap(model, mean, stack, torch.randn(40, 4), torch.zeros(40, dtype=torch.int64))
    assert found.headroom == 0
    assert found.kl == pytest.approx(0, abs=1e-6)
    assert found.phi > 0.05


def test_a_gap_is_what_numpy_says(study: ModuleType) -> None:
    model, mean, stack = drawn("mlp", hidden=[5])
    x, y = torch.randn(700, 4), torch.randint(3, (700,))

    def logits(state: TensorDict) -> np.ndarray:
        s = {n: t.double().numpy() for n, t in state.items()}
        hidden = np.maximum(x.double().numpy() @ s["fc1.weight"].T + s["fc1.bias"], 0)
        return hidden @ s["head.weight"].T + s["head.bias"]

    own, each = logits(mean), np.stack([logits(state) for state in stack.unbind(0)])
    found = study.gap(model, mean, stack, x, y)
    teacher, student = log_softmax(each.mean(0), axis=1), log_softmax(own, axis=1)
    assert found.average == pytest.approx((own.argmax(1) == y.numpy()).mean())
    assert found.ensemble == pytest.approx((each.mean(0).argmax(1) == y.numpy()).mean())
    assert found.headroom == pytest.approx(found.ensemble - found.average)
    assert found.kl == pytest.approx((np.exp(teacher) * (teacher - student)).sum(1).mean(), rel=1e-4)
    phi = np.abs(softmax(own, axis=1) - softmax(each, axis=2).mean(0)).sum(1).mean()
    assert found.phi == pytest.approx(phi, rel=1e-4)
    assert 0 < found.phi < 2


def test_less_than_a_point_is_no_test(study: ModuleType) -> None:
    row = {"seed": 0, "average": 0.3, "kl": 0.1, "phi": 0.2}
    row |= {"E": "E = 1", "ensemble": 0.3, "headroom": 0.009}
    weak = pd.DataFrame([{**row, "round": r} for r in (1, 2)])
    assert "0.90 points, below a point, so distillation cannot be tested" in study.text(weak)
    strong = pd.concat([weak, weak.assign(E="E = 4", headroom=[0.0, 0.02])])
    assert "2.00 points, so there is something to distil" in study.text(strong)


def test_the_smoke_runs(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, need_data: Callable[[str], Path]
) -> None:
    need_data("cifar10_jpeg.npz")
    monkeypatch.setattr(sys, "argv", ["gate", str(tmp_path), "--scale", "smoke"])
    study.main()
    rows = pd.read_csv(tmp_path / "gate.csv")
    assert rows[["E", "round"]].to_numpy().tolist() == [["E = 1", 1]]
    assert rows["kl"].gt(0).all()
    assert (tmp_path / "start.safetensors").is_file()
