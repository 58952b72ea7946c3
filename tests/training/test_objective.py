"""Every loss against its formula; padding changes nothing; `vmap` equals the loop."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from scipy.special import gammaln
from scipy.stats import poisson
from torch import Tensor, nn
from torch.func import grad, vmap

from tailorfl.data.source import NO_TARGET
from tailorfl.training.objective import LOSSES, cox

BATCH = 9


def problem(task: str, seed: int = 0, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """Random double outputs and targets of a task."""
    rng = torch.Generator().manual_seed(seed)
    if task == "generation":
        y = torch.randint(0, 4, (batch, 5), generator=rng)
        y[torch.arange(5) < torch.randint(1, 5, (batch, 1), generator=rng)] = NO_TARGET
        return torch.randn(batch, 5, 4, generator=rng, dtype=torch.float64), y
    outputs = torch.randn(
        batch, {"binary": 1, "survival": 1}.get(task, 4), generator=rng, dtype=torch.float64
    )
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
    return outputs, torch.stack([event, time], dim=1)


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


@pytest.mark.parametrize("task", LOSSES)
def test_the_loss_is_the_mean_of_its_formula(task):
    outputs, y = problem(task)
    assert float(LOSSES[task](outputs, y, None)) == pytest.approx(by_hand(task, outputs.numpy(), y.numpy()))


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


@pytest.mark.parametrize("task", LOSSES)
def test_all_padding_is_loss_zero_with_gradient_zero(task):
    outputs, y = problem(task)
    nothing = torch.zeros(BATCH, dtype=torch.float64)
    assert float(LOSSES[task](outputs, y, nothing)) == 0.0
    assert float(grad(LOSSES[task])(outputs, y, nothing).abs().sum()) == 0.0


@pytest.mark.parametrize("task", LOSSES)
def test_the_order_of_samples_does_not_matter(task):
    outputs, y = problem(task)
    order = torch.randperm(BATCH, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(LOSSES[task](outputs, y, None), LOSSES[task](outputs[order], y[order], None))


@pytest.mark.parametrize("task", LOSSES)
def test_the_gradient_is_the_derivative(task):
    outputs, y = problem(task)
    outputs.requires_grad_()
    weight = torch.tensor([1.0] * 6 + [0.0] * 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda o: LOSSES[task](o, y, None), (outputs,))
    assert torch.autograd.gradcheck(lambda o: LOSSES[task](o, y, weight), (outputs,))


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
    large = outputs.float() * 1e4
    assert torch.isfinite(LOSSES[task](large, y.float() if y.is_floating_point() else y, None))
    assert torch.isfinite(grad(LOSSES[task])(large, y.float() if y.is_floating_point() else y, None)).all()


def flamby_cox(scores: Tensor, truth: Tensor) -> Tensor:
    """The Cox loss of FLamby's TCGA-BRCA baseline: sort by falling time, accumulate risk from the top."""
    order = torch.argsort(truth[:, 1], descending=True)
    risk, event = scores[order, 0], truth[order, 0]
    return ((torch.logcumsumexp(risk, 0) - risk) * event).mean()


def test_without_ties_cox_is_the_loss_of_the_flamby_baseline():
    outputs, y = problem("survival", seed=3, batch=40)
    torch.testing.assert_close(cox(outputs, y, None), flamby_cox(outputs, y))
    torch.testing.assert_close(grad(cox)(outputs, y, None), grad(flamby_cox)(outputs, y))


def test_tied_times_share_their_risk_set():
    """Breslow: two deaths at one time are each compared with everyone alive then, the other included."""
    outputs = torch.tensor([[0.3], [-0.2], [1.0]], dtype=torch.float64)
    y = torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 1.0]], dtype=torch.float64)
    alive = math.log(math.exp(0.3) + math.exp(-0.2))
    assert float(cox(outputs, y, None)) == pytest.approx((2 * alive - 0.3 + 0.2) / 3)


def test_cox_sees_only_differences_of_risk():
    outputs, y = problem("survival")
    torch.testing.assert_close(cox(outputs + 7.0, y, None), cox(outputs, y, None))


def test_the_hessian_of_the_half_squared_error_is_the_second_moment():
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 3, generator=rng).double(), torch.randn(20, 1, generator=rng).double()
    hessian = torch.func.hessian(lambda w: LOSSES["regression"](x @ w[:, None], y, None))(
        torch.zeros(3).double()
    )
    torch.testing.assert_close(hessian, x.T @ x / 20)


def test_the_reference_losses_of_torch_agree():
    outputs, y = problem("classification")
    torch.testing.assert_close(LOSSES["classification"](outputs, y, None), nn.CrossEntropyLoss()(outputs, y))
    outputs, y = problem("multilabel")
    torch.testing.assert_close(LOSSES["multilabel"](outputs, y, None), nn.BCEWithLogitsLoss()(outputs, y))


@pytest.mark.parametrize("task", LOSSES)
def test_a_loss_says_whether_it_compares_samples(task: str) -> None:
    """A loss that does not is the mean of what it is of each sample alone, also as a worker process gets it."""
    loss = pickle.loads(pickle.dumps(LOSSES[task]))
    outputs, y = problem(task)
    alone = torch.stack([loss(outputs[k : k + 1], y[k : k + 1], None) for k in range(len(y))])
    apart = bool((loss(outputs, y, None) - alone.mean()).abs() > 1e-4)
    assert loss.mixes == apart
