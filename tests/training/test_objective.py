"""Every loss against its formula, padding, and `vmap`; a Poisson regression of the library is that of scikit-learn."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import gammaln
from scipy.stats import poisson
from sklearn.linear_model import PoissonRegressor
from sklearn.metrics import mean_absolute_error, mean_poisson_deviance
from torch import Tensor
from torch.func import grad, vmap

import tailorfl
from tailorfl.data.build import build
from tailorfl.data.own import from_table
from tailorfl.data.source import NO_TARGET
from tailorfl.errors import DataError
from tailorfl.export.predict import predict
from tailorfl.training.objective import LOSSES, response_losses

BATCH = 9


def problem(task: str, seed: int = 0, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """Random double outputs and targets of a task."""
    rng = torch.Generator().manual_seed(seed)
    if task == "generation":
        y = torch.randint(0, 4, (batch, 5), generator=rng)
        y[torch.arange(5) < torch.randint(1, 5, (batch, 1), generator=rng)] = NO_TARGET
        return torch.randn(batch, 5, 4, generator=rng, dtype=torch.float64), y
    width = 1 if task in ("binary", "survival", "ties") else 4
    outputs = torch.randn(batch, width, generator=rng, dtype=torch.float64)
    if task in ("classification", "binary"):
        return outputs, torch.randint(0, 4 if task == "classification" else 2, (batch,), generator=rng)
    if task == "multilabel":
        return outputs, torch.randint(0, 2, (batch, 4), generator=rng).double()
    if task == "regression":
        return outputs, torch.randn(batch, 4, generator=rng, dtype=torch.float64)
    if task == "counts":
        return outputs, torch.randint(0, 6, (batch, 4), generator=rng).double()
    event = torch.randint(0, 2, (batch,), generator=rng).double()
    time = torch.randperm(batch, generator=rng).double() + 1.0
    return outputs, torch.stack([event, time if task == "survival" else (time / 2).ceil()], dim=1)


def by_hand(task: str, outputs: np.ndarray, y: np.ndarray) -> float:
    """The mean loss, sample by sample."""
    total = 0.0
    for i, (o, t) in enumerate(zip(outputs, y, strict=True)):
        if task == "classification":
            total += math.log(np.exp(o).sum()) - o[t]
        elif task == "binary":
            total += math.log1p(math.exp(-o[0] if t == 1 else o[0]))
        elif task == "multilabel":
            total += np.mean([math.log1p(math.exp(-a if b == 1 else a)) for a, b in zip(o, t, strict=True)])
        elif task == "regression":
            total += 0.5 * ((o - t) ** 2).sum()
        elif task == "counts":  # scipy has the likelihood, with log y!
            total -= (poisson.logpmf(t, np.exp(o)) + gammaln(t + 1)).sum()
        elif task == "generation":
            parts = [math.log(np.exp(a).sum()) - a[b] for a, b in zip(o[:-1], t[1:], strict=True) if b >= 0]
            total += np.mean(parts)
        elif t[0] == 1:
            alive = [float(outputs[j, 0]) for j in range(len(y)) if y[j, 1] >= y[i, 1]]
            total += math.log(np.exp(alive).sum()) - o[0]
    return total / len(y)


@pytest.mark.parametrize("task", [*LOSSES, "ties"])
def test_the_loss_is_the_mean_of_its_formula(task):
    """Deaths at one time are each compared with everyone alive then, the other included (Breslow)."""
    outputs, y = problem(task)
    loss = LOSSES["survival" if task == "ties" else task]
    assert float(loss(outputs, y, None)) == pytest.approx(by_hand(task, outputs.numpy(), y.numpy()))


@pytest.mark.parametrize("task", LOSSES)
@pytest.mark.parametrize("garbage", [0.0, 50.0])
def test_padding_changes_neither_the_loss_nor_the_gradient(task, garbage):
    outputs, y = problem(task)
    padding, padding_y = problem(task, seed=1, batch=4)
    weight = torch.tensor([1.0] * BATCH + [0.0] * 4, dtype=torch.float64)
    joined, labels = torch.cat([outputs, padding * garbage]), torch.cat([y, padding_y])
    loss = LOSSES[task]
    torch.testing.assert_close(loss(joined, labels, weight), loss(outputs, y, None))
    gradient = grad(loss)(joined, labels, weight)
    torch.testing.assert_close(gradient[:BATCH], grad(loss)(outputs, y, None))
    assert torch.equal(gradient[BATCH:], torch.zeros_like(padding))
    assert float(loss(joined, labels, 0.0 * weight)) == 0.0
    assert float(grad(loss)(joined, labels, 0.0 * weight).abs().sum()) == 0.0


@pytest.mark.parametrize("task", LOSSES)
def test_the_gradient_is_the_derivative(task):
    outputs, y = problem(task)
    outputs.requires_grad_()
    weight = torch.tensor([1.0] * 6 + [0.0] * 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda o: LOSSES[task](o, y, None), (outputs,))
    assert torch.autograd.gradcheck(lambda o: LOSSES[task](o, y, weight), (outputs,))


@pytest.mark.parametrize("task", LOSSES)
def test_a_loss_is_as_precise_as_the_outputs(task):
    """Targets are float32, whatever the model is."""
    outputs, y = problem(task)
    narrow = y.float() if y.is_floating_point() else y
    torch.testing.assert_close(LOSSES[task](outputs, narrow, None), LOSSES[task](outputs, y, None))


@pytest.mark.parametrize("task", LOSSES)
def test_vmap_is_the_loop_over_clients(task):
    pairs = [problem(task, seed) for seed in range(5)]
    outputs, y = (torch.stack(part) for part in zip(*pairs, strict=True))
    weight = (torch.arange(BATCH)[None] < torch.tensor([9, 1, 5, 0, 7])[:, None]).double()
    together = vmap(LOSSES[task])(outputs, y, weight)
    for i in range(5):
        torch.testing.assert_close(together[i], LOSSES[task](outputs[i], y[i], weight[i]))


@pytest.mark.parametrize("task", LOSSES)
def test_large_outputs_stay_finite(task):
    outputs, y = problem(task)
    large, y = outputs.float() * 1e4, y.float() if y.is_floating_point() else y
    assert torch.isfinite(LOSSES[task](large, y, None))
    assert torch.isfinite(grad(LOSSES[task])(large, y, None)).all()


@pytest.mark.parametrize("task", LOSSES)
def test_a_loss_says_whether_it_compares_samples(task: str) -> None:
    """A loss that does not is the mean of what it is of each sample alone, also as a worker process gets it."""
    loss = pickle.loads(pickle.dumps(LOSSES[task]))
    outputs, y = problem(task)
    alone = torch.stack([loss(outputs[k : k + 1], y[k : k + 1], None) for k in range(len(y))])
    apart = bool((loss(outputs, y, None) - alone.mean()).abs() > 1e-4)
    assert loss.mixes == apart
    if task == "generation":
        torch.testing.assert_close(response_losses(outputs, y), alone)


def visits(rows: int = 240) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    sites = np.repeat(["ash", "elm"], rows // 2)
    frame = pd.DataFrame({"site": sites, "age": rng.normal(60, 10, rows), "bmi": rng.normal(25, 4, rows)})
    logs = 0.4 * (frame["age"] - 60) / 10 - 0.3 * (frame["bmi"] - 25) / 4 + 0.5
    return frame.assign(visits=rng.poisson(np.exp(logs)))


def test_the_pooled_model_is_scikit_learns(tmp_path: Path) -> None:
    frame = visits()
    source = from_table(frame, label="visits", client="site", task="counts")
    data = {"normalise": "federated", "split": {"train": 0.8, "test": 0.2}}
    result = tailorfl.run(
        source=source, data=data, model={"name": "linear", "bias": True}, method="centralized", rounds=40, seeds=1,
        train={"lr": 0.3, "batch_size": 1000}, eval={"every": 0}, out=tmp_path / "run",
    )  # fmt: skip
    whole = build(source=source, **data, seed=0)  # type: ignore[arg-type]
    rows = np.concatenate(list(whole.train))
    reference = PoissonRegressor(alpha=0, tol=1e-10).fit(whole.source.x[rows], whole.source.y[rows, 0])
    said = predict(tmp_path / "run", frame, client="global", source=source)
    np.testing.assert_allclose(said["predicted"], reference.predict(whole.source.x), rtol=1e-3)
    test = whole.test[0]
    truth, expected = whole.source.y[test, 0].numpy(), reference.predict(whole.source.x[test])
    assert result.table["mean"].iloc[0] > 0
    found = result.clients
    mine = found[(found["client"] == 0) & (found["set"] == "local")].iloc[-1]
    assert mine["deviance"] == pytest.approx(mean_poisson_deviance(truth, expected), rel=1e-3)
    assert mine["mae"] == pytest.approx(mean_absolute_error(truth, expected), rel=1e-3)


@pytest.mark.parametrize("wrong", [-1, 0.5])
def test_other_numbers_are_no_counts(wrong: float) -> None:
    frame = visits(8).astype({"visits": float})
    frame.loc[3, "visits"] = wrong
    with pytest.raises(DataError, match=r"counts task .*1 of 8 .*first sample 3"):
        from_table(frame, label="visits", client="site", task="counts")
