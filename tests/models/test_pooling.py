"""Pooling that convolutions take along: what every client's own network calculates, and where it is left alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tailorfl.models.cohort_convs import Conv2d
from tailorfl.models.functional import Model
from tailorfl.models.mapping import over_clients
from tailorfl.models.pooling import Pool, taken_along

CLIENTS, BATCH, SIDE = 3, 4, 20


def chain(*behind: nn.Module, conv: nn.Conv2d | None = None) -> nn.Sequential:
    """A convolution, what stands behind it, and a second such convolution."""
    first = conv or nn.Conv2d(2, 24, 3, padding=1)
    second = nn.Conv2d(first.out_channels, 4, 3, padding=1)
    return nn.Sequential(first, *behind, second, *behind, nn.Flatten())


CHAINS: dict[str, Callable[[], nn.Sequential]] = {
    "pool, relu": lambda: chain(nn.MaxPool2d(2), nn.ReLU()),
    "relu, pool": lambda: chain(nn.ReLU(), nn.MaxPool2d(2)),
    "through identities": lambda: chain(nn.Identity(), nn.MaxPool2d(2), nn.Identity(), nn.ReLU()),
    "overlapping, padded": lambda: chain(nn.MaxPool2d(3, stride=2, padding=1), nn.ReLU()),
    "of two sides, up": lambda: chain(nn.ReLU(), nn.MaxPool2d((2, 3), ceil_mode=True)),
    "dilated": lambda: chain(nn.MaxPool2d(2, stride=1, dilation=2), nn.ReLU()),
    "single pixels": lambda: chain(nn.MaxPool2d(2), nn.ReLU(), conv=nn.Conv2d(2, 24, 1)),
    "one channel out": lambda: chain(nn.MaxPool2d(2), nn.ReLU(), conv=nn.Conv2d(2, 1, 11, padding=5)),
    "in a chain of chains": lambda: nn.Sequential(chain(nn.MaxPool2d(2), nn.ReLU()), nn.Linear(100, 2)),
}
chains = pytest.mark.parametrize("build", CHAINS.values(), ids=CHAINS.keys())


def layers(model: Model) -> list[Conv2d]:
    return [part for part in model._eval.module.modules() if isinstance(part, Conv2d)]


@chains
@pytest.mark.parametrize("clients", [1, CLIENTS])
def test_outputs_and_gradients_are_those_of_the_network_as_it_stands(build, clients):
    model, plain = Model(build), build()
    assert all(layer.pool is not None for layer in layers(model))
    x = torch.randn(
        clients, BATCH, 2, SIDE, SIDE, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    drawn = [model.init(i) for i in range(clients)]
    states = {n: torch.stack([s[n] for s in drawn]).requires_grad_() for n in model.parameters}
    inputs = [x, *states.values()]
    with over_clients(clients) as level:
        found = level.all(model(level.each(states), level.one(x)))
    expected = torch.stack(
        [
            torch.func.functional_call(plain, {n: t[i] for n, t in states.items()}, x[i])
            for i in range(clients)
        ]
    )
    g = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    pairs = zip(torch.autograd.grad(found, inputs, g), torch.autograd.grad(expected, inputs, g), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@chains
def test_one_client_and_a_shared_weight(build):
    """Outside a map, and where all clients have the same weights."""
    model, plain = Model(build), build()
    state = model.init(0)
    x = torch.randn(CLIENTS, BATCH, 2, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([torch.func.functional_call(plain, dict(state), one) for one in x])
    torch.testing.assert_close(torch.stack([model(state, one) for one in x]), expected)
    with torch.no_grad(), over_clients(CLIENTS) as level:
        found = level.all(model(state, level.one(x)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_numbers_below_zero_and_of_ties_are_those_of_relu_and_pooling():
    """Where the largest number of a window is not positive, or occurs twice."""
    y = torch.tensor([[-1.0, -2.0, 3.0, 3.0], [-3.0, 0.0, 3.0, 1.0]]).reshape(1, 1, 1, 2, 4)
    pool = Pool((2, 2), (2, 2), (0, 0), (1, 1), False)
    out, places, size = pool.apart(iter(y), 1, False)
    (gradient,) = pool.back(torch.ones_like(out), out, places, size, False)
    expected = y[0].clone().requires_grad_()
    nn.functional.max_pool2d(expected.relu(), 2).sum().backward()
    assert torch.equal(gradient, expected.grad)
    assert torch.equal(gradient[0, 0], torch.tensor([[0.0, 0, 1, 0], [0, 0, 0, 0]]))


class Own(nn.Module):
    """A network whose code may look between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = chain(nn.MaxPool2d(2), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Watched(nn.Sequential):
    """A chain with code of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def with_hook() -> nn.Module:
    found = chain(nn.MaxPool2d(2), nn.ReLU())
    for part in found:
        part.register_forward_hook(lambda *_: None)
    return found


def with_feature() -> nn.Module:
    found = chain(nn.MaxPool2d(2), nn.ReLU())
    found.feature_layer = "2"
    return found


def twice() -> nn.Module:
    conv = nn.Conv2d(2, 2, 3, padding=1)
    return nn.Sequential(OrderedDict(a=conv, pool=nn.MaxPool2d(2), relu=nn.ReLU(), b=conv))


@pytest.mark.parametrize(
    "build",
    [
        Own,
        lambda: Watched(nn.Conv2d(2, 2, 3), nn.MaxPool2d(2), nn.ReLU()),
        with_hook,
        with_feature,
        twice,
        lambda: chain(nn.MaxPool2d(2)),
        lambda: chain(nn.AvgPool2d(2), nn.ReLU()),
        lambda: chain(nn.BatchNorm2d(24), nn.MaxPool2d(2), nn.ReLU()),
        lambda: nn.Sequential(nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(2, 2, 3)),
    ],
)
def test_networks_that_are_left_alone(build):
    module = build()
    before = [type(part) for part in module.modules()]
    assert taken_along(module, nn.Conv2d) == {}
    assert [type(part) for part in module.modules()] == before
