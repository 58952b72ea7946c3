"""ResNets (He et al., 2016): of basic blocks with torchvision's names, and the thin ones for 32x32 images.

ResNet-18 and the like have conv1, bn1, layerX.Y.conv1, ..., fc. ResNet-20, -32 and -56 have stages of 16, 32 and 64
channels (section 4.2) and the head `linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn.functional import pad, relu

from tailorfl.errors import ConfigError
from tailorfl.models.adapters import ResidualAdapter, optional_adapter
from tailorfl.models.factories import check_choice, check_dropout, image_shape, make_norm, named_factory

BLOCKS: dict[str, tuple[int, int, int, int]] = {
    "resnet10": (1, 1, 1, 1),
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
}
WIDTH = 64
"""Channels of the first stage in the published networks; every further stage has twice as many."""


class ResidualBlock(nn.Module):
    """Base of blocks whose output is added to a skip connection; PerAda's input split finds blocks by it."""


class _TwoConvolutions(ResidualBlock):
    """Two 3x3 convolutions with normalisation; with adapters, one is between each of the two and its norm."""

    def __init__(self, channels: int, width: int, stride: int, norm: str, dropout: float | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.adapter1 = optional_adapter(width, norm, dropout)
        self.bn1 = make_norm(norm, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.adapter2 = optional_adapter(width, norm, dropout)
        self.bn2 = make_norm(norm, width)

    def skip(self, x: Tensor) -> Tensor:
        """Return what is added to the output of the convolutions for an input, in their shape."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, height, width] -> [batch, width, height/stride, width/stride]; `x` does not change."""
        skip = self.skip(x)
        out = relu(self.bn1(self.adapter1(self.conv1(x))))
        out = self.bn2(self.adapter2(self.conv2(out)))
        return relu(out + skip)


class BasicBlock(_TwoConvolutions):
    """Two 3x3 convolutions with normalisation, plus the input (projected if the shape changes)."""

    def __init__(self, channels: int, width: int, stride: int, norm: str, dropout: float | None) -> None:
        super().__init__(channels, width, stride, norm, dropout)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or channels != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), make_norm(norm, width)
            )

    def skip(self, x: Tensor) -> Tensor:
        """Return the input, or its projection."""
        return x if self.downsample is None else self.downsample(x)


class ResNet(nn.Module):
    """Stem, four stages of basic blocks with w, 2w, 4w and 8w channels, mean over the pixels, linear head `fc`.

    `adapters` puts residual adapters into every block; `dropout` is in them, or before the head without them.

    `stem` "imagenet" is a 7x7 convolution of stride 2 and a max-pool, which PerAda keeps even for 32x32
    images (the last map is then 1x1); "cifar" is a 3x3 convolution of stride 1. The norm layers are called
    bn* even if they are group norms, so that weight files fit by name.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        channels: int,
        outputs: int,
        norm: str,
        stem: str,
        adapters: bool,
        dropout: float,
        width: int,
    ) -> None:
        super().__init__()
        small, inner, w = stem == "cifar", dropout if adapters else None, width
        self.conv1 = nn.Conv2d(
            channels, w, 3 if small else 7, stride=1 if small else 2, padding=1 if small else 3, bias=False
        )
        self.bn1 = make_norm(norm, w)
        self.maxpool: nn.Module = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(BasicBlock, w, w, blocks[0], 1, norm, inner)
        self.layer2 = _stage(BasicBlock, w, 2 * w, blocks[1], 2, norm, inner)
        self.layer3 = _stage(BasicBlock, 2 * w, 4 * w, blocks[2], 2, norm, inner)
        self.layer4 = _stage(BasicBlock, 4 * w, 8 * w, blocks[3], 2, norm, inner)
        self.dropout: nn.Module = nn.Dropout(dropout) if dropout and not adapters else nn.Identity()
        self.fc = nn.Linear(8 * w, outputs)
        self.feature_boundary = _boundary(blocks)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        _reset_adapters(self)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, height, width] -> [batch, outputs]."""
        out = self.maxpool(relu(self.bn1(self.conv1(x))))
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        scores: Tensor = self.fc(self.dropout(out.mean((2, 3))))
        return scores


def _stage(
    kind: type[_TwoConvolutions],
    channels: int,
    width: int,
    blocks: int,
    stride: int,
    norm: str,
    dropout: float | None,
) -> nn.Sequential:
    first = kind(channels, width, stride, norm, dropout)
    return nn.Sequential(first, *(kind(width, width, 1, norm, dropout) for _ in range(blocks - 1)))


def _boundary(blocks: Sequence[int]) -> tuple[str, ...]:
    """Return the modules after which features of frozen layers may be kept, for stages of these numbers of blocks."""
    stages = (f"layer{stage}.{block}" for stage, count in enumerate(blocks, 1) for block in range(count))
    return (*stages, "dropout")


def _reset_adapters(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, ResidualAdapter):
            module.reset_parameters()


def _resnet(name: str, description: str) -> Callable[..., ResNet]:
    """Return the factory of the network that is called `name`."""

    def factory(
        input_shape: Sequence[int],
        outputs: int,
        *,
        norm: str = "batch",
        stem: str = "imagenet",
        adapters: bool = False,
        dropout: float = 0.0,
        width: int = WIDTH,
    ) -> ResNet:
        check_choice("norm", norm, ("batch", "group"))
        check_choice("stem", stem, ("imagenet", "cifar"))
        # With fewer pixels the feature map is a single pixel before the last stage halves it.
        channels, _, _ = image_shape(name, input_shape, least=17 if stem == "imagenet" else 5)
        check_dropout(name, dropout)
        if isinstance(width, bool) or not isinstance(width, int) or width < 8 or width % 8:
            raise ConfigError(
                f"model '{name}': width must be a positive multiple of 8 (channels of the first stage), but is "
                f"{width!r}"
            )
        return ResNet(BLOCKS[name], channels, outputs, norm, stem, adapters, dropout, width)

    return named_factory(factory, name, description)


resnet10 = _resnet(
    "resnet10",
    "ResNet-18 with one block a stage: 4 910 922 scalars at 3 channels and 10 classes, for quick experiments.",
)
resnet18 = _resnet(
    "resnet18",
    "ResNet-18 with torchvision's names; 11 181 642 scalars at 3 channels and 10 classes (PerAda, PLGU).",
)
resnet34 = _resnet(
    "resnet34",
    "ResNet-34 with torchvision's names; 21 318 017 scalars at 3 channels and 65 classes (PerAda).",
)


class PaddedBlock(_TwoConvolutions):
    """Two 3x3 convolutions with normalisation, plus the input.

    If the shape changes, the skip is subsampled and padded with zero channels (the paper's option A), so
    it has no parameters.
    """

    def __init__(self, channels: int, width: int, stride: int, norm: str, dropout: float | None) -> None:
        super().__init__(channels, width, stride, norm, dropout)
        self.stride = stride
        self.grow = width - channels

    def skip(self, x: Tensor) -> Tensor:
        """Return the input, or every `stride`-th pixel of it between zero channels."""
        if not self.grow:
            return x
        thin = x[:, :, :: self.stride, :: self.stride]
        return pad(thin, (0, 0, 0, 0, self.grow // 2, self.grow - self.grow // 2))


class ResNetCifar(nn.Module):
    """3x3 stem, three stages of `blocks` blocks, mean over the pixels, head `linear`; depth 6*blocks + 2.

    `adapters` puts residual adapters into every block; `dropout` is in them, or before the head without them.
    """

    def __init__(
        self, blocks: int, channels: int, outputs: int, norm: str, adapters: bool, dropout: float
    ) -> None:
        super().__init__()
        inner = dropout if adapters else None
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.bn1 = make_norm(norm, 16)
        self.layer1 = _stage(PaddedBlock, 16, 16, blocks, 1, norm, inner)
        self.layer2 = _stage(PaddedBlock, 16, 32, blocks, 2, norm, inner)
        self.layer3 = _stage(PaddedBlock, 32, 64, blocks, 2, norm, inner)
        self.dropout: nn.Module = nn.Dropout(dropout) if dropout and not adapters else nn.Identity()
        self.linear = nn.Linear(64, outputs)
        self.feature_boundary = _boundary((blocks,) * 3)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)
        _reset_adapters(self)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, height, width] -> [batch, outputs]."""
        out = relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        scores: Tensor = self.linear(self.dropout(out.mean((2, 3))))
        return scores


def _thin_resnet(depth: int, description: str) -> Callable[..., ResNetCifar]:
    """Return the factory of the network of a depth."""
    name = f"resnet{depth}"

    def factory(
        input_shape: Sequence[int],
        outputs: int,
        *,
        norm: str = "batch",
        adapters: bool = False,
        dropout: float = 0.0,
    ) -> ResNetCifar:
        check_choice("norm", norm, ("batch", "group"))
        channels, _, _ = image_shape(name, input_shape, least=3)
        check_dropout(name, dropout)
        return ResNetCifar((depth - 2) // 6, channels, outputs, norm, adapters, dropout)

    return named_factory(factory, name, description)


resnet20 = _thin_resnet(20, "CIFAR ResNet-20, 269 722 scalars at 3 channels and 10 classes.")
resnet32 = _thin_resnet(32, "CIFAR ResNet-32, 464 154 scalars at 3 channels and 10 classes.")
resnet56 = _thin_resnet(56, "CIFAR ResNet-56, 853 018 scalars at 3 channels and 10 classes.")
