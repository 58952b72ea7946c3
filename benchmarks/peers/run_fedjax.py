"""FedAvg and APFL in FedJAX, from its `algorithms`, with its default backend (jax.jit). Run by compare.py.

What makes it fast: arrays in memory, convolutions with channels last, as XLA's CPU code likes them. A round ends when
its weights are there (`block_until_ready`). Compilation falls into the warm-up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
import torch
from fedjax.algorithms import apfl, fed_avg
from jax import Array, lax
from peer_work import ALPHA, Job, State, Work, main

Params = dict[str, Array]


def forward(params: Params, x: Array) -> Array:
    """Return the logits of images [batch, 28, 28, 1]; which layers there are is in the weights' names."""
    number = 1
    while f"conv{number}.weight" in params:
        x = lax.conv_general_dilated(
            x, params[f"conv{number}.weight"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + params[f"conv{number}.bias"])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        number += 1
    x, number = x.reshape(len(x), -1), 1
    while f"fc{number}.weight" in params:
        x = jax.nn.relu(x @ params[f"fc{number}.weight"] + params[f"fc{number}.bias"])
        number += 1
    return x @ params["head.weight"] + params["head.bias"]


def loss(params: Params, batch: dict[str, Array], rng: Array) -> Array:
    """Return the mean log loss of a batch."""
    logs = jax.nn.log_softmax(forward(params, batch["x"]))
    return -jnp.take_along_axis(logs, batch["y"][:, None], axis=1).mean()


def moved(name: str, value: np.ndarray, back: bool) -> np.ndarray:
    """Return a weight of torch with input axes first and channels last, or the other way (`back`)."""
    if value.ndim == 4:
        return value.transpose((3, 2, 0, 1) if back else (2, 3, 1, 0))
    if name == "fc1.weight" and 3136 in value.shape:  # behind pixels [64, 7, 7], here [7, 7, 64]
        if back:
            return value.T.reshape(-1, 7, 7, 64).transpose(0, 3, 1, 2).reshape(-1, 3136)
        return value.reshape(-1, 64, 7, 7).transpose(0, 2, 3, 1).reshape(-1, 3136).T
    return value.T


def to_jax(weights: State) -> Params:
    """Return torch's weights as FedJAX trains them."""
    return {name: jnp.asarray(moved(name, value.numpy(), back=False)) for name, value in weights.items()}


def to_torch(weights: Params) -> State:
    """Return the weights as torch lays them out."""
    return {
        name: torch.from_numpy(moved(name, np.asarray(value), back=True).copy())
        for name, value in weights.items()
    }


def algorithm(work: Work, job: Job) -> fedjax.FederatedAlgorithm:
    """Return the method; the server takes the mean."""
    batches = fedjax.ShuffleRepeatBatchHParams(batch_size=job.batch_size, num_epochs=job.epochs)
    sgd: Callable[[float], fedjax.Optimizer] = fedjax.optimizers.sgd
    if work.case.method == "apfl":
        return apfl.adaptive_personalized_federated_learning(
            jax.grad(loss), sgd(job.lr), sgd(1.0), batches, ALPHA
        )
    return fed_avg.federated_averaging(jax.grad(loss), sgd(job.lr), sgd(1.0), batches)


def run(work: Work, path: Path, jobs: Sequence[Job]) -> None:
    """Do the jobs, each from the initial weights."""
    x = work.x.permute(0, 2, 3, 1).contiguous().numpy()
    y, each = work.y.numpy().astype(np.int32), work.case.samples
    data = [
        fedjax.ClientDataset({"x": x[i * each : (i + 1) * each], "y": y[i * each : (i + 1) * each]})
        for i in range(work.case.clients)
    ]
    key = jax.random.PRNGKey(0)
    clients = [(str(i).encode(), samples, key) for i, samples in enumerate(data)]
    for job in jobs:
        method = algorithm(work, job)
        state = method.init(to_jax(work.init))
        job.mark()
        for _ in range(job.rounds):
            state, _ = method.apply(state, clients)
            jax.block_until_ready(state.params)
            job.mark()
        job.weights = to_torch(state.params)


if __name__ == "__main__":
    main(version("fedjax"), run)
