"""Every model under `vmap` over stacked states computes what the loop over clients computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from tailorfl.models import build, dropout_key

CLIENTS, BATCH = 2, 3
CASES = [
    ("logistic", (5,), {}), ("linear", (5,), {}), ("cox", (5,), {}),
    ("mlp", (5,), {}), ("mlp", (5,), {"norm": "group"}), ("mlp", (5,), {"softmax": True}),
    ("cnn2", (1, 8, 8), {}), ("cnn2", (1, 8, 8), {"norm": "group"}),
    ("cnn3", (1, 8, 8), {}), ("cnn5", (1, 8, 8), {"norm": "group"}),
    ("lenet", (3, 16, 16), {}), ("ckt_cnn", (3, 16, 16), {"norm": "group"}),
    pytest.param("vgg11", (3, 32, 32), {"norm": "none", "dropout": 0.5}, marks=pytest.mark.slow),
    pytest.param("vgg11", (3, 32, 32), {"norm": "group"}, marks=pytest.mark.slow),
    ("mlp", (5,), {"dropout": 0.5}), ("cnn2", (1, 8, 8), {"dropout": 0.5}),
    ("resnet18", (3, 17, 17), {"norm": "group", "width": 8}), ("resnet20", (3, 9, 9), {"norm": "group"}),
]  # fmt: skip
"""The deeper networks of a family have more of the same blocks, and so has VGG."""
BATCH_NORM_CASES = [
    ("mlp", (5,), {"norm": "batch"}), ("cnn2", (1, 8, 8), {"norm": "batch"}), ("vgg11", (3, 32, 32), {}),
    ("resnet18", (3, 32, 32), {"width": 8}), ("resnet18", (1, 9, 9), {"stem": "cifar", "width": 8}),
    ("resnet20", (3, 8, 8), {}),
]  # fmt: skip


def cohort(name: str, shape: tuple[int, ...], options: dict[str, object]) -> tuple[list[nn.Module], Tensor]:
    torch.manual_seed(0)
    # Double precision: the order of sums differs under vmap, and batch norm over few values amplifies it.
    modules = [build(name, shape, 1 if name == "cox" else 3, **options).double() for _ in range(CLIENTS)]
    return modules, torch.randn(CLIENTS, BATCH, *shape, dtype=torch.float64)


def states(modules: list[nn.Module]) -> dict[str, Tensor]:
    parameters, buffers = stack_module_state(modules)
    return {n: t.detach() for n, t in (parameters | buffers).items()}


@pytest.mark.parametrize(("name", "shape", "options"), CASES, ids=lambda value: str(value))
def test_forward_and_gradient_equal_the_loop(name, shape, options):
    modules, x = cohort(name, shape, options)

    def loss(state: dict[str, Tensor], rows: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        with dropout_key(key):
            out = functional_call(modules[0], state, (rows,))
        return out.square().sum(), out

    stacked, keys = states(modules), torch.arange(CLIENTS)
    step = torch.func.grad(loss, has_aux=True)
    gradients, outputs = vmap(step)(stacked, x, keys)
    for i in range(CLIENTS):
        gradient, output = step({n: t[i] for n, t in stacked.items()}, x[i], keys[i])
        torch.testing.assert_close(outputs[i], output)
        scale = max(g.abs().max().item() for g in gradient.values())
        for n in gradient:
            torch.testing.assert_close(gradients[n][i], gradient[n], rtol=1e-6, atol=1e-10 * scale)


@pytest.mark.parametrize(("name", "shape", "options"), BATCH_NORM_CASES, ids=lambda value: str(value))
def test_batch_norm_and_its_running_statistics_equal_the_loop(name, shape, options):
    modules, x = cohort(name, shape, options)
    module = modules[0]
    buffer_names = [n for n, _ in module.named_buffers()]
    assert buffer_names

    def train_forward(state: dict[str, Tensor], rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        state = {n: t.clone() if n in buffer_names else t for n, t in state.items()}
        return functional_call(module, state, (rows,)), {n: state[n] for n in buffer_names}

    stacked = states(modules)
    before = {n: stacked[n].clone() for n in buffer_names}
    outputs, after = vmap(train_forward)(stacked, x)
    for i, own in enumerate(modules):
        torch.testing.assert_close(outputs[i], own(x[i]))
        own_buffers = dict(own.named_buffers())
        for n in buffer_names:
            torch.testing.assert_close(after[n][i], own_buffers[n])
            assert torch.equal(stacked[n], before[n]), "the caller's statistics must not be written to"
    assert all(after[n].eq(1).all() for n in buffer_names if n.endswith("num_batches_tracked"))
    assert any(not torch.equal(after[n], before[n]) for n in buffer_names if n.endswith("running_mean"))
