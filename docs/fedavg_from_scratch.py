"""FedAvg (McMahan et al., AISTATS 2017) as a plain loop: PyTorch, one client after another, nothing else.

    python docs/fedavg_from_scratch.py

prints the accuracy on test digits after every fifth round, on 10 clients that hold one or two digits each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Client = tuple[Tensor, Tensor]  # x [samples, features] float32, y [samples] int64
Batches = Callable[[int, int], Iterable[Tensor]]  # (client, round) -> which samples each batch holds
Cohort = Callable[[int], Sequence[int]]  # round -> the clients that take part


def local_sgd(w: nn.Module, data: Client, batches: Iterable[Tensor], lr: float) -> nn.Module:
    """Return a copy of the model after one step of gradient descent on every batch."""
    theta = copy.deepcopy(w)
    optimizer = torch.optim.SGD(theta.parameters(), lr=lr)
    x, y = data
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(theta(x[batch]), y[batch]).backward()
        optimizer.step()
    return theta


def average(models: Sequence[nn.Module], weights: Sequence[float]) -> nn.Module:
    """Return the model whose parameters are Σ a_i θ_i."""
    mean, states = copy.deepcopy(models[0]), [model.state_dict() for model in models]
    mean.load_state_dict(
        {n: sum(a * state[n] for a, state in zip(weights, states, strict=True)) for n in states[0]}
    )
    return mean


def fedavg(
    w: nn.Module, clients: Sequence[Client], cohort: Cohort, batches: Batches, rounds: int, lr: float
) -> nn.Module:
    """Return the global model after `rounds` rounds: w = Σ (n_i / n) LocalSGD(w; client i)."""
    for round in range(rounds):
        chosen = cohort(round)
        thetas = [local_sgd(w, clients[i], batches(i, round), lr) for i in chosen]
        total = sum(len(clients[i][1]) for i in chosen)
        w = average(thetas, [len(clients[i][1]) / total for i in chosen])
    return w


def main() -> None:
    """Train logistic regression on digits, sorted by label and cut into 10 clients."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    x_test, y_test, x, y = x[1500:], y[1500:], x[:1500], y[:1500]
    clients = [(x[rows], y[rows]) for rows in torch.split(y.argsort(stable=True), 150)]
    torch.manual_seed(0)
    w: nn.Module = nn.Linear(64, 10)
    for done in range(5, 31, 5):
        w = fedavg(w, clients, lambda _: range(10), lambda i, _: torch.split(torch.randperm(150), 10), 5, 0.1)
        print(f"round {done:2d}: accuracy {(w(x_test).argmax(1) == y_test).float().mean():.3f}")


if __name__ == "__main__":
    main()
