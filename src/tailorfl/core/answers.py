"""What a deployed model is asked and has at hand, where a method answers with more than one pass through a model."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


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


class Answering(nn.Module):
    """A network and what makes answers of its outputs and features, as one module: samples -> answers.

    Args:
        network: samples -> outputs [rows, outputs].
        head: name of the layer in it whose input is the features.
        answers: (outputs, features [rows, width]) -> answers [rows, outputs].
    """

    def __init__(self, network: nn.Module, head: str, answers: nn.Module) -> None:
        super().__init__()
        self.network, self.head, self.answers = network, head, answers

    def forward(self, x: Tensor) -> Tensor:
        """Return samples -> answers [rows, outputs]."""
        inputs = []
        head = self.network.get_submodule(self.head)
        hook = head.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
        try:
            outputs = self.network(x)
        finally:
            hook.remove()
        features = inputs[0][:, -1] if inputs[0].dim() == 3 else inputs[0]
        answers: Tensor = self.answers(outputs, features)
        return answers
