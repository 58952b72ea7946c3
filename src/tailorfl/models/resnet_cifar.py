"""ResNet-20, -32 and -56 for 32x32 images: stages of 16, 32 and 64 channels (He et al., 2016, 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn.functional import pad, relu

from tailorfl.models.adapters import ResidualAdapter, optional_adapter
from tailorfl.models.norm import make_norm
from tailorfl.models.resnet import ResidualBlock
from tailorfl.models.shapes import check_choice, check_dropout, image_shape, named_factory


class PaddedBlock(ResidualBlock):
    """Two 3x3 convolutions with normalisation, plus the input.

    Where the shape changes, the skip is subsampled and padded with zero channels (the paper's option A), so
    it has no parameters. With adapters, one stands between each of the two convolutions and its norm.
    """

    def __init__(self, channels: int, width: int, stride: int, norm: str, dropout: float | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.adapter1 = optional_adapter(width, norm, dropout)
        self.bn1 = make_norm(norm, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.adapter2 = optional_adapter(width, norm, dropout)
        self.bn2 = make_norm(norm, width)
        self.stride = stride
        self.grow = width - channels

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, height, width] -> [batch, width, height/stride, width/stride]."""
        out = relu(self.bn1(self.adapter1(self.conv1(x))))
        out = self.bn2(self.adapter2(self.conv2(out)))
        skip = x
        if self.grow:
            thin = x[:, :, :: self.stride, :: self.stride]
            skip = pad(thin, (0, 0, 0, 0, self.grow // 2, self.grow - self.grow // 2))
        return relu(out + skip)


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
        self.layer1 = _stage(16, 16, blocks, 1, norm, inner)
        self.layer2 = _stage(16, 32, blocks, 2, norm, inner)
        self.layer3 = _stage(32, 64, blocks, 2, norm, inner)
        self.dropout: nn.Module = nn.Dropout(dropout) if dropout and not adapters else nn.Identity()
        self.linear = nn.Linear(64, outputs)
        stages = (f"layer{stage}.{block}" for stage in (1, 2, 3) for block in range(blocks))
        self.feature_boundary = (*stages, "dropout")
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)
        for module in self.modules():
            if isinstance(module, ResidualAdapter):
                module.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, height, width] -> [batch, outputs]."""
        out = relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        scores: Tensor = self.linear(self.dropout(out.mean((2, 3))))
        return scores


def _stage(
    channels: int, width: int, blocks: int, stride: int, norm: str, dropout: float | None
) -> nn.Sequential:
    first = PaddedBlock(channels, width, stride, norm, dropout)
    return nn.Sequential(first, *(PaddedBlock(width, width, 1, norm, dropout) for _ in range(blocks - 1)))


def _resnet(depth: int, description: str) -> Callable[..., ResNetCifar]:
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


resnet20 = _resnet(20, "CIFAR ResNet-20, 269 722 scalars at 3 channels and 10 classes.")
resnet32 = _resnet(32, "CIFAR ResNet-32, 464 154 scalars at 3 channels and 10 classes.")
resnet56 = _resnet(56, "CIFAR ResNet-56, 853 018 scalars at 3 channels and 10 classes.")
