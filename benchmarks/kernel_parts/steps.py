"""Whole training steps: as one writes them in eager mode, compiled, and by hand without autograd."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from kernel_parts.timing import BATCH, RATE, Table, in_turn
from torch import Tensor, nn
from torch.nn import functional as F

from tailorfl.models.registry import build

NETWORKS: dict[str, dict[str, Any]] = {"logistic": {}, "mlp": {"hidden": (200,)}, "cnn2": {}}
COHORT = 16

Step = Callable[[list[Tensor], Tensor, Tensor], object]
"""Loss, gradient and update, of parameters that it changes, x and y."""
Loss = Callable[[list[Tensor], Tensor, Tensor], Tensor]


@dataclass
class Case:
    """One step, written in two or three ways."""

    loss: Loss
    values: list[Tensor]
    x: Tensor
    y: Tensor
    eager: Step
    by_hand: Step | None = None

    def after(self, step: Step) -> list[Tensor]:
        """Return the parameters after a step."""
        values = [v.clone() for v in self.values]
        step(values, self.x, self.y)
        return [v.detach() for v in values]

    def call(self, step: Step) -> Callable[[], object]:
        """Return a function that takes one step after another, on parameters of its own."""
        values = [v.clone() for v in self.values]
        return lambda: step(values, self.x, self.y)


def compiled() -> Table:
    """Return milliseconds of a step eager, compiled and by hand, and the seconds that compiling took.

    Raises RuntimeError where two ways do not lead to the same parameters.
    """
    table: Table = []
    for name, case in cases().items():
        step = torch.compile(functional(case.loss), fullgraph=True)
        begin, used = time.perf_counter(), sum(os.times()[:4])
        found = case.after(step)
        wall, spent = time.perf_counter() - begin, sum(os.times()[:4]) - used
        steps = {"eager": case.eager, "compiled": step}
        wanted = case.after(steps["eager"])
        if case.by_hand is not None:
            steps["by hand"] = case.by_hand
            agree(name, case.after(case.by_hand), wanted)
        agree(name, found, wanted)
        seconds = in_turn({way: case.call(step) for way, step in steps.items()})
        hand = seconds.get("by hand")
        table.append(
            {
                "step": name,
                "eager ms": 1e3 * seconds["eager"],
                "compiled ms": 1e3 * seconds["compiled"],
                "compiled: times as fast": seconds["eager"] / seconds["compiled"],
                "by hand ms": "" if hand is None else 1e3 * hand,
                "by hand: times as fast": "" if hand is None else seconds["eager"] / hand,
                "compiling s": wall,
                "its CPU s": spent,
            }
        )
    return table


def agree(name: str, found: list[Tensor], wanted: list[Tensor]) -> None:
    """Raise RuntimeError where parameters differ by more than rounding."""
    far = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
    if far > 1e-5:
        raise RuntimeError(f"{name}: two ways of the same step are {far:.1e} apart.")


def cases() -> dict[str, Case]:
    """Return the steps that are measured."""
    made = {}
    for name, options in NETWORKS.items():
        net = build(name, (1, 28, 28), 10, **options)
        values = [p.detach().clone() for p in net.parameters()]
        x, y = torch.randn(BATCH, 1, 28, 28), torch.randint(0, 10, (BATCH,))
        made[f"{name}, one client"] = Case(network_loss(net), values, x, y, module_step(net))
    cnn = made["cnn2, one client"]
    cnn.by_hand = cnn2_by_hand
    shapes = ((COHORT, 200, 784), (COHORT, 200), (COHORT, 10, 200), (COHORT, 10))
    values = [0.05 * torch.randn(*shape) for shape in shapes]
    x, y = torch.randn(COHORT, BATCH, 784), torch.randint(0, 10, (COHORT, BATCH))
    made[f"mlp, {COHORT} clients"] = Case(mlp_loss, values, x, y, eager(mlp_loss), mlp_by_hand)
    return made


def network_loss(net: nn.Module) -> Loss:
    """Return the loss of one client as a function of the module's parameters."""
    names = [name for name, _ in net.named_parameters()]

    def loss(values: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs = torch.func.functional_call(net, dict(zip(names, values, strict=True)), (x,))
        return F.cross_entropy(outputs, y)

    return loss


def module_step(net: nn.Module) -> Step:
    """Return the plain loop's step of a module, which takes the parameters for its own."""
    leaves: list[Tensor] = list(net.parameters())

    def step(values: list[Tensor], x: Tensor, y: Tensor) -> None:
        if leaves[0].data_ptr() != values[0].data_ptr():
            for leaf, value in zip(leaves, values, strict=True):
                leaf.data = value
        slopes = torch.autograd.grad(F.cross_entropy(net(x), y), leaves)
        with torch.no_grad():
            torch._foreach_add_(leaves, list(slopes), alpha=-RATE)

    return step


def eager(loss: Loss) -> Step:
    """Return the same step of a loss that is a function."""

    def step(values: list[Tensor], x: Tensor, y: Tensor) -> None:
        leaves = [v.requires_grad_() for v in values]
        slopes = torch.autograd.grad(loss(leaves, x, y), leaves)
        with torch.no_grad():
            torch._foreach_add_(leaves, list(slopes), alpha=-RATE)

    return step


def functional(loss: Loss) -> Step:
    """Return the same as one function that can be compiled without a break."""
    gradient = torch.func.grad(loss)

    def step(values: list[Tensor], x: Tensor, y: Tensor) -> None:
        for value, slope in zip(values, gradient(values, x, y), strict=True):
            value.sub_(RATE * slope)

    return step


def mlp_loss(values: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The sum of all clients' losses, of two layers with weights [clients, out, in]."""
    w1, b1, w2, b2 = values
    hidden = F.relu(torch.baddbmm(b1.unsqueeze(1), x, w1.transpose(1, 2)))
    outputs = torch.baddbmm(b2.unsqueeze(1), hidden, w2.transpose(1, 2))
    return F.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="sum") / y.shape[1]


def mlp_by_hand(values: list[Tensor], x: Tensor, y: Tensor) -> None:
    """All clients' step, the update inside the products of the gradient."""
    w1, b1, w2, b2 = values
    hidden = torch.baddbmm(b1.unsqueeze(1), x, w1.transpose(1, 2)).relu_()
    g = _slope(torch.baddbmm(b2.unsqueeze(1), hidden, w2.transpose(1, 2)), y)
    back = torch.bmm(g, w2).mul_(hidden > 0)
    for w, b, slope, given in ((w2, b2, g, hidden), (w1, b1, back, x)):
        w.baddbmm_(slope.transpose(1, 2), given, alpha=-RATE)
        b.sub_(slope.sum(1), alpha=RATE)


def cnn2_by_hand(values: list[Tensor], x: Tensor, y: Tensor) -> None:
    """One client's step, channels last; pools before the ReLU, which is the same on a quarter of the numbers."""
    k1, c1, k2, c2, w1, b1, w2, b2 = values
    last = torch.channels_last
    with torch.no_grad():
        x = x.as_strided(
            x.shape, (x.shape[2] * x.shape[3], 1, x.shape[3], 1)
        )  # channels last, of one channel
        k1, k2 = k1.to(memory_format=last), k2.to(memory_format=last)
        before1 = F.conv2d(x, k1, c1, padding=1)
        first, places1 = torch.ops.aten.max_pool2d_with_indices(before1, [2, 2])
        before2 = F.conv2d(first.relu_(), k2, c2, padding=1)
        second, places2 = torch.ops.aten.max_pool2d_with_indices(before2, [2, 2])
        flat = second.relu_().flatten(1)
        hidden = torch.addmm(b1, flat, w1.t()).relu_()
        g = _slope(torch.addmm(b2, hidden, w2.t()), y)
        back = (g @ w2).mul_(hidden > 0)
        image = (back @ w1).view(second.shape).to(memory_format=last).mul_(second > 0)
        for w, b, slope, given in ((w2, b2, g, hidden), (w1, b1, back, flat)):
            w.addmm_(slope.t(), given, alpha=-RATE)
            b.sub_(slope.sum(0), alpha=RATE)
        image = _unpool(image, before2, places2)
        image, slope2, bias2 = _unconvolve(image, first, k2, True)
        image = _unpool(image.mul_(first > 0), before1, places1)
        _, slope1, bias1 = _unconvolve(image, x, k1, False)
        for value, slope in ((values[0], slope1), (c1, bias1), (values[2], slope2), (c2, bias2)):
            value.sub_(slope, alpha=RATE)


def _slope(outputs: Tensor, y: Tensor) -> Tensor:
    """Gradient of the mean cross-entropy of a batch [..., batch, classes] with respect to `outputs`."""
    return (outputs.softmax(-1) - F.one_hot(y, outputs.shape[-1])).div_(y.shape[-1])


def _unpool(g: Tensor, given: Tensor, places: Tensor) -> Any:
    return torch.ops.aten.max_pool2d_with_indices_backward(
        g, given, [2, 2], [2, 2], [0, 0], [1, 1], False, places
    )


def _unconvolve(g: Tensor, x: Tensor, w: Tensor, input_too: bool) -> Any:
    return torch.ops.aten.convolution_backward(
        g, x, w, [len(w)], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [input_too, True, True]
    )
