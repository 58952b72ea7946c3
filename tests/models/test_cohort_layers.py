"""Layers of a whole cohort: equal to every client's own layer, forward and backward, and in what steps they take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tailorfl.models import cohort_convs, cohort_layers
from tailorfl.models.cohort_convs import MANY_CHANNELS, MaxPool2d, Pool, taken_along
from tailorfl.models.cohort_layers import WeightStep, descending, used_once
from tailorfl.models.functional import Model
from tailorfl.models.mapping import over_clients

CLIENTS, BATCH = 3, 5
Build = Callable[[], nn.Module]


def chain(*behind: nn.Module, conv: nn.Conv2d | None = None) -> nn.Sequential:
    """A convolution, what stands behind it, and a second such convolution."""
    first = conv or nn.Conv2d(2, 24, 3, padding=1)
    second = nn.Conv2d(first.out_channels, 4, 3, padding=1)
    return nn.Sequential(first, *behind, second, *behind, nn.Flatten())


def pooled(**conv: nn.Conv2d) -> nn.Sequential:
    return chain(nn.MaxPool2d(2), nn.ReLU(), **conv)


IMAGE = (2, 20, 20)
POOLED: dict[str, tuple[tuple[int, ...], Build]] = {
    "pool, relu": (IMAGE, pooled),
    "relu, pool": (IMAGE, lambda: chain(nn.ReLU(), nn.MaxPool2d(2))),
    "identities": (IMAGE, lambda: chain(nn.Identity(), nn.MaxPool2d(2), nn.Identity(), nn.ReLU())),
    "overlapping, padded": (IMAGE, lambda: chain(nn.MaxPool2d(3, stride=2, padding=1), nn.ReLU())),
    "of two sides, up": (IMAGE, lambda: chain(nn.ReLU(), nn.MaxPool2d((2, 3), ceil_mode=True))),
    "dilated": (IMAGE, lambda: chain(nn.MaxPool2d(2, stride=1, dilation=2), nn.ReLU())),
    "single pixels": (IMAGE, lambda: pooled(conv=nn.Conv2d(2, 24, 1))),
    "one channel out": (IMAGE, lambda: pooled(conv=nn.Conv2d(2, 1, 11, padding=5))),
    "in a chain of chains": (IMAGE, lambda: nn.Sequential(pooled(), nn.Linear(100, 2))),
}
"""Where convolutions take the pooling along."""


class Prompted(nn.Module):
    """Adds a vector of its own to all samples, through a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.vector, self.layer = nn.Parameter(torch.randn(6)), nn.Linear(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.vector)


class Tokens(nn.Module):
    """Adds the entry of every number's token; the entry of token 0 does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1) + self.table((2 * x.detach().abs()).long().clamp(max=3))


NETWORKS: dict[str, tuple[tuple[int, ...], Build]] = {
    "padded tokens": ((6,), Tokens),
    "trained slopes": ((4, 3), lambda: nn.PReLU(4)),
    "one trained slope": ((4,), nn.PReLU),
    "on a single vector": ((7,), Prompted),
    "linear": ((7,), lambda: nn.Linear(7, 4)),
    "without bias": ((7,), lambda: nn.Linear(7, 4, bias=False)),
    "on tokens": ((6, 7), lambda: nn.Linear(7, 4)),
    "small convolution": ((2, 6, 6), lambda: nn.Conv2d(2, 4, 3, padding=1)),
    "large convolution": ((3, 24, 24), lambda: nn.Conv2d(3, 32, 3, padding=1)),
    "one channel": ((1, 28, 28), lambda: nn.Conv2d(1, 32, 5)),
    "stride and groups": ((4, 20, 20), lambda: nn.Conv2d(4, 64, 5, stride=2, padding=2, groups=2, bias=False)),
    "dilation": ((3, 24, 24), lambda: nn.Conv2d(3, 32, 3, dilation=2)),
    "of pixels": ((6, 9, 9), lambda: nn.Conv2d(6, 5, 1)),
    "reflecting": ((2, 8, 8), lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect")),
    "small group norm": ((4, 5, 5), lambda: nn.GroupNorm(2, 4)),
    "large group norm": ((8, 26, 26), lambda: nn.GroupNorm(2, 8)),
    "group norm without scale": (
        (4, 5, 5), lambda: nn.Sequential(nn.GroupNorm(2, 4, affine=False), nn.Conv2d(4, 2, 1)),
    ),
    "convolutions, pooled": (
        (1, 28, 28),
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(4608, 3)),
        ),
    ),
    "convolutions, normalised": (
        (3, 20, 20),
        lambda: nn.Sequential(nn.Conv2d(3, 32, 3), nn.GroupNorm(4, 32), nn.ReLU(), nn.Conv2d(32, 8, 3)),
    ),
    "pooled behind a norm": (
        (8, 20, 20), lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.MaxPool2d(2), nn.Conv2d(8, 9, 3), nn.MaxPool2d(3)),
    ),
    **POOLED,
}  # fmt: skip
networks = pytest.mark.parametrize(("shape", "build"), NETWORKS.values(), ids=NETWORKS.keys())


def cohort(
    shape: tuple[int, ...], build: Build, clients: int = CLIENTS
) -> tuple[Model, dict[str, Tensor], Tensor]:
    """A model, states of all clients [clients, ...] that require gradients, and their inputs."""
    model = Model(build)
    states = [model.init(i) for i in range(clients)]
    stacked = {n: torch.stack([s[n] for s in states]).requires_grad_() for n in model.parameters}
    x = torch.randn(clients, BATCH, *shape, generator=torch.Generator().manual_seed(0))
    return model, stacked, x


def together(model: Model, states: dict[str, Tensor], x: Tensor) -> Tensor:
    with over_clients(len(x)) as clients:
        return clients.all(model(clients.each(states), clients.one(x)))


def alone(module: nn.Module, states: dict[str, Tensor], x: Tensor) -> Tensor:
    """What plain torch calculates for every client."""
    return torch.stack(
        [functional_call(module, {n: t[i] for n, t in states.items()}, x[i]) for i in range(len(x))]
    )


@networks
@pytest.mark.parametrize("clients", [1, CLIENTS])
def test_outputs_and_gradients_are_those_of_every_client(shape, build, clients):
    model, states, x = cohort(shape, build, clients)
    x.requires_grad_()
    outputs, expected = together(model, states, x), alone(build(), states, x)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    g = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    inputs = [x, *states.values()]
    gradients, references = (torch.autograd.grad(out, inputs, g) for out in (outputs, expected))
    for a, b in zip(gradients, references, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["linear", "on tokens", "of pixels", "padded tokens"])
def test_a_batch_may_be_empty(name):
    model, states, x = cohort(*NETWORKS[name])
    outputs = together(model, states, x)
    assert together(model, states, x[:, :0]).shape == outputs[:, :0].shape


@networks
def test_what_all_clients_share(shape, build):
    """An input, or weights, and one client outside of a map."""
    model, states, x = cohort(shape, build)
    state = {n: t[0] for n, t in states.items()}
    with torch.no_grad(), over_clients(CLIENTS) as clients:
        same_input = clients.all(model(clients.each(states), x[0]))
        same_weights = clients.all(model(state, clients.one(x)))
    expected = alone(build(), states, x[:1].expand_as(x))
    torch.testing.assert_close(same_input, expected, rtol=1e-4, atol=1e-5)
    expected = torch.stack([functional_call(build(), state, rows) for rows in x])
    torch.testing.assert_close(same_weights, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.stack([model(state, rows) for rows in x]), expected)


def test_a_map_is_that_of_torch():
    """Also where the client axis is not the first one, and where all clients share a weight."""
    layer, x = nn.Linear(4, 3), torch.randn(5, CLIENTS, 4)
    with torch.no_grad(), over_clients(CLIENTS) as clients:
        found = clients.all(layer(clients.one(x, 1)))
    torch.testing.assert_close(found, torch.func.vmap(layer, in_dims=1)(x))


@pytest.mark.parametrize("name", ["linear", "small convolution", "small group norm", "pooled behind a norm"])
def test_a_derivative_of_torch_around_a_map_is_the_plain_one(name):
    """Layers leave tensors alone that another transform has a hand in."""
    shape, build = NETWORKS[name]
    model, states, x = cohort(shape, build)
    gradients = torch.func.grad(lambda *of: together(model, *of).square().sum(), argnums=(0, 1))(states, x)
    inputs = [*states.values(), x.requires_grad_()]
    expected = torch.autograd.grad(alone(build(), states, x).square().sum(), inputs)
    for gradient, plain in zip([*gradients[0].values(), gradients[1]], expected, strict=True):
        torch.testing.assert_close(gradient, plain, rtol=1e-4, atol=1e-4)


def test_batch_norm_trains_every_client_on_its_own_statistics():
    def build() -> nn.Module:
        layers = (nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 2))
        return nn.Sequential(*layers)

    model, states, x = cohort((2, 6, 6), build)
    buffers = {n: torch.stack([model.init(0)[n]] * CLIENTS) for n in model.buffers}
    names = frozenset(model.parameters)
    own = {n: t.clone() for n, t in buffers.items()}
    with over_clients(CLIENTS) as clients:
        seen = clients.each({**states, **own})
        found = clients.all(model.forward_train(seen, clients.one(x), names))
    for i in range(CLIENTS):
        state = {**{n: t[i] for n, t in states.items()}, **{n: t[i].clone() for n, t in buffers.items()}}
        torch.testing.assert_close(found[i], model.forward_train(state, x[i], names), rtol=1e-4, atol=1e-5)
        for n in model.buffers:
            torch.testing.assert_close(own[n][i], state[n])


STEPS = {
    "rate": {"rate": 0.1},
    "rates of their own": {"rate": torch.tensor([0.1, 0.0, 0.3])},
    "decay": {"rate": 0.1, "keep": 0.95},
    "centre": {"rate": 0.1, "keep": 0.9, "pull": 0.1},
    "all of their own": {
        "rate": torch.tensor([0.1, 0.2, 0.3]),
        "keep": torch.tensor([0.9, 0.8, 1.0]),
        "pull": torch.tensor([0.1, 0.2, 0.0]),
    },
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_a_layer_takes_the_step_that_its_gradient_says(step):
    """keep · W + pull · C − rate · gradient, for linear layers and convolutions."""
    model, states, x = cohort(*NETWORKS["convolutions, pooled"])
    weights = {n: t for n, t in states.items() if t.dim() > 2}
    gradients = torch.autograd.grad(together(model, states, x).square().sum(), list(states.values()))
    centres = {n: torch.randn_like(t) for n, t in weights.items()} if "pull" in step else {}
    expected = {}
    for name, gradient in zip(states, gradients, strict=True):
        rate, keep, pull = (
            torch.as_tensor(value).expand(CLIENTS).reshape(-1, *[1] * (gradient.dim() - 1))
            for value in (step["rate"], step.get("keep", 1.0), step.get("pull", 0.0))
        )
        centre = centres.get(name, torch.zeros(()))
        expected[name] = (keep * states[name] + pull * centre - rate * gradient).detach()
    shares = {t.data_ptr(): WeightStep(**step, centre=centres.get(n)) for n, t in weights.items()}
    with descending(shares) as descent:
        loss = together(model, states, x).square().sum()
    assert descent.taken == set(shares)
    left = torch.autograd.grad(loss, list(states.values()), allow_unused=True)
    for name, before, now in zip(states, gradients, left, strict=True):
        if name in weights:
            assert now is None
            torch.testing.assert_close(states[name].detach(), expected[name], rtol=1e-4, atol=1e-4)
        else:
            torch.testing.assert_close(now, before)


class Tied(nn.Module):
    """Uses one layer twice, and the weight of another one outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once, self.outside = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(self.once(self.twice(self.twice(x)))) @ self.outside.weight


def test_only_a_weight_that_one_layer_uses_once_may_take_its_step():
    model, states, x = cohort((4,), Tied)
    loss = together(model, states, x).sum()
    once = dict(zip(states, used_once(loss, list(states.values())), strict=True))
    assert {n for n, single in once.items() if single} == {"once.weight"}


def test_networks_are_their_own_after_a_skeleton_was_made():
    """Layers are exchanged in copies; the module that a user gave stays as it is."""
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(8, 2))
    Model.of(module)
    assert [type(m) for m in module] == [nn.Conv2d, nn.GroupNorm, nn.Flatten, nn.Linear]
    assert issubclass(cohort_convs.Conv2d, nn.Conv2d)
    assert issubclass(cohort_layers.GroupNorm, nn.GroupNorm)


@pytest.mark.parametrize(("shape", "build"), POOLED.values(), ids=POOLED.keys())
def test_convolutions_take_pooling_along(shape, build):
    layers = [p for p in Model(build)._eval.module.modules() if isinstance(p, cohort_convs.Conv2d)]
    assert layers
    assert all(layer.pool is not None for layer in layers)


def test_layers_of_a_bound_module_are_those_of_the_network():
    """Whoever calls a layer by itself gets what it alone computes, without the pooling after it."""
    model, x = Model(pooled), torch.randn(2, *IMAGE)
    state = model.init(0)
    with torch.no_grad(), model.bound(state) as module:
        outputs = [x]
        for layer in module:
            outputs.append(layer(outputs[-1]))
    images = nn.functional.conv2d(x, state["0.weight"], state["0.bias"], padding=1)
    torch.testing.assert_close(outputs[1], images)
    assert torch.equal(outputs[2], nn.functional.max_pool2d(outputs[1], 2))
    torch.testing.assert_close(outputs[-1], model(state, x))


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


@pytest.mark.parametrize("arguments", [(2,), (3, 2, 1), ((2, 3), None, 0, 2, False, True)])
def test_pooling_rearranged_images_changes_no_number(arguments):
    """Ties, infinities and numbers that are none included, and both derivatives."""
    x = torch.randn(3, MANY_CHANNELS, 11, 9, generator=torch.Generator().manual_seed(0)).relu()
    x[0, 0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    results = []
    for layer in (MaxPool2d(*arguments), nn.MaxPool2d(*arguments)):
        images, g = x.clone().requires_grad_(), torch.ones(3, MANY_CHANNELS, 1, 1, requires_grad=True)
        out = layer(images)
        (first,) = torch.autograd.grad(out, images, g.expand_as(out) * 2, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), g)
        results.append((out, first, second))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert found.is_contiguous()
    assert torch.equal(MaxPool2d(2)(x[1]), nn.MaxPool2d(2)(x[1]))


class Own(nn.Module):
    """A network whose code may look between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = pooled()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Watched(nn.Sequential):
    """A chain with code of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def with_hook() -> nn.Module:
    network = pooled()
    for part in network:
        part.register_forward_hook(lambda *_: None)
    return network


def with_feature() -> nn.Module:
    network = pooled()
    network.feature_layer = "2"
    return network


def twice() -> nn.Module:
    conv = nn.Conv2d(2, 2, 3, padding=1)
    return nn.Sequential(conv, nn.MaxPool2d(2), nn.ReLU(), conv)


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
def test_networks_whose_pooling_is_left_alone(build):
    module = build()
    before = [type(part) for part in module.modules()]
    assert taken_along(module, nn.Conv2d) == {}
    assert [type(part) for part in module.modules()] == before
