"""A projection of the features before the head, as networks for contrastive losses have it."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from tailorfl.errors import ModelError
from tailorfl.models.layers import head_layer


def project(module: nn.Module, width: int) -> None:
    """Puts Linear(d, d), ReLU, Linear(d, width) before the head, which is drawn anew on that width; in place.

    Raises:
        ModelError: the network has no linear head, or the head is the whole network.
    """
    head = head_layer(module)
    name = next((path for path, part in module.named_modules() if part is head), "")
    if not isinstance(head, nn.Linear) or not name:
        raise ModelError(
            f"a projection stands before a linear head inside a network, which a {type(module).__name__} does not have"
        )
    inner = head.in_features
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        inner=nn.Linear(inner, inner),
        relu=nn.ReLU(),
        outer=nn.Linear(inner, width),
        head=nn.Linear(width, head.out_features, bias=head.bias is not None),
    )
    module.set_submodule(name, nn.Sequential(layers).to(head.weight))
    if hasattr(module, "feature_layer"):
        module.feature_layer = f"{name}.head"  # type: ignore[assignment]
