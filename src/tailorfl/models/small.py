"""Small models: linear ones, multilayer perceptrons and plain convolutional networks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from tailorfl.errors import ModelError
from tailorfl.models.dropout import ChannelDropout, Dropout
from tailorfl.models.factories import (
    check_choice,
    image_shape,
    make_norm,
    named_factory,
    vector_length,
)
from tailorfl.printable import shown

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
}


def logistic(
    input_shape: Sequence[int], outputs: int, *, bias: bool = True, zeros: bool = False
) -> nn.Sequential:
    """Linear map of the flattened sample with bias; logistic regression when trained with a log loss.

    With `zeros` it starts at 0, so weights of features that a client never sees stay 0; else as torch draws it.
    """
    length = vector_length("logistic", input_shape)
    head = nn.Linear(length, outputs, bias=bias)
    if zeros:
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), head=head))


def linear(
    input_shape: Sequence[int], outputs: int, *, bias: bool = False, zeros: bool = False
) -> nn.Sequential:
    """Linear map of the flattened sample without bias, x -> xᵀw, as in the papers' least-squares problems."""
    return logistic(input_shape, outputs, bias=bias, zeros=zeros)


def cox(input_shape: Sequence[int], outputs: int = 1, *, bias: bool = True) -> nn.Sequential:
    """Linear risk score of a Cox model; 39 features -> 1 score is FLamby's TCGA-BRCA baseline.

    The partial likelihood does not depend on the bias; the model has it because the baseline does (40 scalars).
    """
    if outputs != 1:
        raise ModelError(
            f"model 'cox' has one output, the risk score, but the data needs {outputs}; use 'logistic'."
        )
    return logistic(input_shape, 1, bias=bias)


def mlp(
    input_shape: Sequence[int],
    outputs: int,
    *,
    hidden: int | Sequence[int] = (200,),
    activation: str = "relu",
    norm: str = "none",
    dropout: float = 0.0,
    softmax: bool = False,
) -> nn.Sequential:
    """Multilayer perceptron on the flattened sample; layers fc1, fc2, ... and head.

    With `softmax` it ends in a softmax, whose outputs the loss takes for logits, as in LG-FedAvg's released code.
    """
    check_choice("activation", activation, tuple(ACTIVATIONS))
    width = vector_length("mlp", input_shape)
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for number, size in enumerate(_sizes("mlp", hidden), start=1):
        layers[f"fc{number}"] = nn.Linear(width, size)
        layers[f"norm{number}"] = make_norm(norm, size, dims=0)
        layers[f"activation{number}"] = ACTIVATIONS[activation]()
        layers[f"dropout{number}"] = Dropout(dropout)
        width = size
    layers["head"] = nn.Linear(width, outputs)
    if softmax:
        layers["softmax"] = nn.Softmax(dim=-1)
    return _chain(layers)


def _sizes(model: str, hidden: int | Sequence[int]) -> tuple[int, ...]:
    sizes = (hidden,) if isinstance(hidden, int) else hidden
    if (
        isinstance(sizes, str)
        or not isinstance(sizes, Sequence)
        or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
    ):
        raise ModelError(
            f"model '{model}' takes channels and hidden as lists of widths such as [200], got {shown(hidden)}."
        )
    return tuple(sizes)


def _chain(layers: OrderedDict[str, nn.Module]) -> nn.Sequential:
    """Return the network of some layers, after each of which features of frozen layers may be kept."""
    network = nn.Sequential(layers)
    network.feature_boundary = tuple(layers)[:-1]  # type: ignore[assignment]
    return network


@dataclass(frozen=True)
class _Plan:
    """Layout of a plain convolutional network: conv, norm (, 2x2 max-pool), ReLU ..., then linear layers."""

    channels: tuple[int, ...]
    kernel: int
    padding: int
    pooled: tuple[int, ...]  # numbers (from 1) of the convolutions followed by pooling
    hidden: tuple[int, ...]

    def least_side(self) -> int:
        """Return the smallest side, in pixels, that leaves at least one pixel before the linear layers."""
        side = 1
        while self.last_side(side) < 1:
            side += 1
        return side

    def last_side(self, side: int) -> int:
        """Return the side of the last feature map; below 1 if the image does not fit."""
        for number in range(1, len(self.channels) + 1):
            side += 2 * self.padding - self.kernel + 1
            side = side // 2 if number in self.pooled else side
            if side < 1:
                return 0
        return side


PLANS: dict[str, _Plan] = {
    "cnn2": _Plan((32, 64), kernel=3, padding=1, pooled=(1, 2), hidden=(128,)),
    "cnn3": _Plan((32, 64, 128), kernel=3, padding=1, pooled=(1, 2, 3), hidden=(128,)),
    "cnn5": _Plan((32, 32, 64, 64, 128), kernel=3, padding=1, pooled=(2, 4, 5), hidden=(256,)),
    "lenet": _Plan((16, 32), kernel=5, padding=0, pooled=(1, 2), hidden=(120, 84)),
    "ckt_cnn": _Plan((6, 16), kernel=5, padding=0, pooled=(1, 2), hidden=(120, 100, 84, 50)),
}


def _plain_cnn(
    model: str,
    plan: _Plan,
    input_shape: Sequence[int],
    outputs: int,
    norm: str,
    dropouts: tuple[float, float],
) -> nn.Sequential:
    """Return the network of a plan: conv1, norm1, ..., fc1, ..., head.

    `dropouts` are the rates for whole channels after the last convolution, and for units after each hidden layer.
    """
    channel_dropout, dropout = dropouts
    width, height, breadth = image_shape(model, input_shape, plan.least_side())
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, size in enumerate(plan.channels, start=1):
        layers[f"conv{number}"] = nn.Conv2d(width, size, plan.kernel, padding=plan.padding)
        layers[f"norm{number}"] = make_norm(norm, size)
        if channel_dropout and number == len(plan.channels):
            layers["channel_dropout"] = ChannelDropout(channel_dropout)
        if number in plan.pooled:
            # Before the ReLU: the same outputs and gradients, for a quarter of its work.
            layers[f"pool{number}"] = nn.MaxPool2d(2)
        layers[f"relu{number}"] = nn.ReLU()
        width = size
    layers["flatten"] = nn.Flatten()
    width *= plan.last_side(height) * plan.last_side(breadth)
    for number, size in enumerate(plan.hidden, start=1):
        layers[f"fc{number}"] = nn.Linear(width, size)
        layers[f"fc_relu{number}"] = nn.ReLU()
        layers[f"fc_dropout{number}"] = Dropout(dropout)
        width = size
    layers["head"] = nn.Linear(width, outputs)
    return _chain(layers)


def _cnn(name: str, description: str) -> Callable[..., nn.Sequential]:
    """Return the factory of the network that is called `name`."""

    def factory(
        input_shape: Sequence[int],
        outputs: int,
        *,
        channels: Sequence[int] = PLANS[name].channels,
        hidden: Sequence[int] = PLANS[name].hidden,
        norm: str = "none",
        dropout: float = 0.0,
        channel_dropout: float = 0.0,
    ) -> nn.Sequential:
        plan = replace(PLANS[name], channels=_sizes(name, channels), hidden=_sizes(name, hidden))
        if len(plan.channels) != len(PLANS[name].channels):
            raise ModelError(
                f"model '{name}' has {len(PLANS[name].channels)} convolutions; give one number of channels for each."
            )
        return _plain_cnn(name, plan, input_shape, outputs, norm, (channel_dropout, dropout))

    return named_factory(factory, name, description)


cnn2 = _cnn(
    "cnn2", "FedCLUP's CNN2: 3x3 convolutions of 32 and 64 channels, linear 128; 421 642 scalars on MNIST."
)
cnn3 = _cnn(
    "cnn3",
    "3x3 convolutions of 32, 64 and 128 channels, linear 128 (FedCLUP names a CNN3 without printing it).",
)
cnn5 = _cnn(
    "cnn5",
    "3x3 convolutions of 32-32-64-64-128 channels, linear 256 (FedCLUP names a CNN5 without printing it).",
)
lenet = _cnn(
    "lenet",
    "pFedHN's LeNet: 5x5 convolutions of 16 and 32 channels, linear 120-84; 121 182 scalars on CIFAR-10.",
)
ckt_cnn = _cnn(
    "ckt_cnn",
    "PerFed-CKT's small CNN: two 5x5 convolutions (6 and 16 channels; unprinted), linear 120-100-84-50.",
)
