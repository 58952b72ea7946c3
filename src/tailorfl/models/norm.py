"""Normalisation layers: which module types count as one, and how the models here make them."""

from __future__ import annotations

import math

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from tailorfl.errors import ModelError
from tailorfl.models.shapes import check_choice

LEAST_FEATURES = 4
"""In a group of features of a vector: two that are normalised together are 1 and -1 or -1 and 1, whatever they were."""

# _NormBase is the common base of every BatchNorm*, SyncBatchNorm and InstanceNorm*.
NORM_TYPES: tuple[type[nn.Module], ...] = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def is_norm(module: nn.Module) -> bool:
    """Return true for a normalisation layer, recognised by its type and never by its name.

    Every family of language models defines a class of its own for RMS norms, such as LlamaRMSNorm.
    """
    return isinstance(module, NORM_TYPES) or type(module).__name__.endswith("RMSNorm")


def group_count(channels: int) -> int:
    """Return number of groups of a GroupNorm over `channels`.

    64 and 128 channels have 8 groups, 256 have 16 and 512 have 32, as in the released code of partial
    personalization (Pillutla et al., ICML 2022); other widths follow the same rule.
    """
    few = math.gcd(channels, 8)
    return max(few, channels // 16) if channels % 16 == 0 else few


def make_norm(kind: str, channels: int, dims: int = 2) -> nn.Module:
    """Return a normalisation layer for inputs [batch, channels, ...] with `dims` spatial axes (0 or 2).

    `kind` is "batch", "group" or "none" (an Identity, so that the names of a model do not depend on it).

    Raises:
        ConfigError: another kind.
        ModelError: a group of features of a vector would be too small.
    """
    check_choice("norm", kind, ("batch", "group", "none"))
    if kind == "group":
        return nn.GroupNorm(group_count(channels) if dims else _vector_groups(channels), channels)
    if kind == "batch":
        return nn.BatchNorm2d(channels) if dims else nn.BatchNorm1d(channels)
    return nn.Identity()


def _vector_groups(features: int) -> int:
    """As `group_count`, or the next smaller number that leaves enough features to every group."""
    if features < LEAST_FEATURES:
        raise ModelError(
            f"norm=group needs layers of at least {LEAST_FEATURES} features, which one group normalises together, but "
            f"a layer is {features} wide; make it wider, or set model.norm to batch or none"
        )
    sizes = range(group_count(features), 0, -1)
    return next(n for n in sizes if features % n == 0 and features // n >= LEAST_FEATURES)
