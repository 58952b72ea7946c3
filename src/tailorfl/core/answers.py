"""What a deployed model is asked and has at hand, where a method answers with more than one pass through a model."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Shown(NamedTuple):
    """What a model makes of samples, in evaluation mode."""

    outputs: Tensor
    """[rows, outputs]"""
    features: Tensor
    """What goes into its head, [rows, width]."""


class Memory(NamedTuple):
    """A client's own samples as its model sees them, and their targets."""

    train: Shown
    train_y: Tensor
    val: Shown
    val_y: Tensor
