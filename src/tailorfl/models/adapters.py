"""Residual adapters: small layers inside a network, which is near what it was without them when training starts."""

from __future__ import annotations

from torch import Tensor, nn

from tailorfl.models.norm import make_norm

INITIAL_DEVIATION = 1e-4
"""Standard deviation of the initial convolution."""


class ResidualAdapter(nn.Module):
    """x + Conv1x1(Dropout(Norm(x))): 2c + c² scalars for c channels (PerAda; Pillutla et al., ICML 2022).

    [batch, channels, height, width] -> the same. The released code of partial personalization adds x twice, which
    the norm that follows takes back; here it is added once.
    """

    def __init__(self, channels: int, norm: str, dropout: float) -> None:
        super().__init__()
        self.norm = make_norm(norm, channels)
        self.dropout: nn.Module = nn.Dropout(dropout) if dropout else nn.Identity()
        self.conv = nn.Conv2d(channels, channels, 1, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the convolution anew, close to 0."""
        nn.init.normal_(self.conv.weight, std=INITIAL_DEVIATION)

    def forward(self, x: Tensor) -> Tensor:
        """The input and a little of its own; `x` is not written to."""
        out: Tensor = x + self.conv(self.dropout(self.norm(x)))
        return out


def optional_adapter(channels: int, norm: str, dropout: float | None) -> nn.Module:
    """A residual adapter, or an Identity where `dropout` is None: names of the backbone do not depend on it."""
    return nn.Identity() if dropout is None else ResidualAdapter(channels, norm, dropout)
