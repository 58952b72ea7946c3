"""VGG-11 and VGG-13 with the small head used on CIFAR; names as in torchvision (features.N, classifier.N)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from tailorfl.models.dropout import Dropout
from tailorfl.models.factories import check_choice, image_shape, make_norm, named_factory

# Channels of the 3x3 convolutions of each stage, followed by a 2x2 max-pool (Simonyan and Zisserman, 2015).
STAGES: dict[str, tuple[tuple[int, ...], ...]] = {
    "vgg11": ((64,), (128,), (256, 256), (512, 512), (512, 512)),
    "vgg13": ((64, 64), (128, 128), (256, 256), (512, 512), (512, 512)),
}


class VGG(nn.Module):
    """Convolutional stages, mean over the remaining pixels, then linear 512-512-outputs.

    The head is the CIFAR variant with 512 hidden units; with 10 outputs, batch norm and 3 channels VGG-11 has
    9 756 426 scalars, the size that reproduces the printed communication costs of PerFed-CKT.
    """

    def __init__(
        self, stages: Sequence[Sequence[int]], channels: int, outputs: int, norm: str, dropout: float
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for stage in stages:
            for size in stage:
                layers.append(nn.Conv2d(channels, size, 3, padding=1))
                if norm != "none":  # torchvision's plain VGG has no module for a norm, so indices shift
                    layers.append(make_norm(norm, size))
                layers.append(nn.ReLU())
                channels = size
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(channels, 512), nn.ReLU(), Dropout(dropout),
            nn.Linear(512, 512), nn.ReLU(), Dropout(dropout),
            nn.Linear(512, outputs),
        )  # fmt: skip
        maps = (f"features.{k}" for k in range(len(self.features)))
        self.feature_boundary = (*maps, *(f"classifier.{k}" for k in range(len(self.classifier) - 1)))
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, height, width] -> [batch, outputs]."""
        maps = self.features(x)
        scores: Tensor = self.classifier(maps.mean((2, 3)))
        return scores


def _vgg(name: str, description: str) -> Callable[..., VGG]:
    """Return the factory of the network that is called `name`."""

    def factory(
        input_shape: Sequence[int], outputs: int, *, norm: str = "batch", dropout: float = 0.0
    ) -> VGG:
        check_choice("norm", norm, ("batch", "group", "none"))
        channels, _, _ = image_shape(name, input_shape, least=32)
        return VGG(STAGES[name], channels, outputs, norm, dropout)

    return named_factory(factory, name, description)


vgg11 = _vgg(
    "vgg11", "VGG-11 with batch norm and a 512-512 head (PerFed-CKT); 9 756 426 scalars on CIFAR-10."
)
vgg13 = _vgg("vgg13", "VGG-13 with batch norm and a 512-512 head (PerFed-CKT's largest clients).")
