"""Shared parts of the model factories: checks of input shapes and options, normalisation layers, and names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from tailorfl.errors import ConfigError, ModelError, unknown

Image = tuple[int, int, int]
Factory = TypeVar("Factory", bound=Callable[..., Any])
SMALLEST = {"cnn2": 4, "resnet20": 3}
"""Pixels that the models for small images need at least along each side."""
LEAST_FEATURES = 4
"""Minimum size of a group of vector features: two that are normalised together always become 1 and -1 in some order."""


def image_shape(model: str, input_shape: Sequence[int], least: int) -> Image:
    """Return (channels, height, width) of one sample.

    Raises ModelError if `input_shape` is not an image or a side has fewer than `least` pixels.
    """
    if len(input_shape) != 3:
        hint = "; add a channel axis to grey images with x.unsqueeze(1)" if len(input_shape) == 2 else ""
        raise ModelError(
            f"model '{model}' takes images of shape (channels, height, width), but the samples have shape "
            f"{tuple(input_shape)}; use 'logistic' or 'mlp' for vectors{hint}."
        )
    channels, height, width = input_shape
    if min(height, width) < least:
        fitting = ["'mlp'", *(f"'{name}'" for name, side in SMALLEST.items() if side <= min(height, width))]
        raise ModelError(
            f"model '{model}' needs images of at least {least}x{least} pixels, but the data has {height}x{width} with "
            f"{channels} channels; use a smaller model such as {' or '.join(fitting)}, or larger images. Samples are "
            "(channels, height, width); if the channels are last, use x.permute(0, 3, 1, 2)."
        )
    return channels, height, width


def vector_length(model: str, input_shape: Sequence[int]) -> int:
    """Return the number of scalars of one flattened sample; raises ModelError for an empty one."""
    length = math.prod(input_shape)
    if not input_shape or length < 1:
        raise ModelError(
            f"model '{model}' needs samples with at least one scalar, got shape {tuple(input_shape)}."
        )
    return length


def check_choice(kind: str, value: str, options: Sequence[str]) -> None:
    """Raise ConfigError with the nearest valid name if `value` is not one of `options`."""
    if value not in options:
        raise unknown(kind, str(value), options)


def check_dropout(model: str, dropout: float) -> None:
    """Raise ConfigError unless `dropout` is a share of units below 1."""
    if not 0 <= dropout < 1:
        raise ConfigError(f"model '{model}': dropout must lie in [0, 1), but is {dropout}")


def named_factory(factory: Factory, name: str, description: str) -> Factory:
    """Return a factory of models with its public name and its line of description."""
    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = description
    return factory


def group_count(channels: int) -> int:
    """Return the number of groups of a GroupNorm over `channels`.

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
    """Return `group_count`, or the next smaller number that leaves enough features in every group."""
    if features < LEAST_FEATURES:
        raise ModelError(
            f"norm=group normalises at least {LEAST_FEATURES} features together, but a layer has only {features}; make "
            "it wider, or set model.norm to batch or none"
        )
    sizes = range(group_count(features), 0, -1)
    return next(n for n in sizes if features % n == 0 and features // n >= LEAST_FEATURES)
