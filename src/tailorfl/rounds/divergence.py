"""Numbers that are not finite: whose, and what is to be done about it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict

from tailorfl.errors import DivergenceError, first_few
from tailorfl.training import tree


def check_server(old: TensorDict, new: TensorDict, round: int, options: Sequence[str]) -> None:
    """Nothing if the server's state holds no NaN or infinity that it did not hold before.

    `options` are the settings of the method that the server's step depends on.

    Raises:
        DivergenceError: it does, though every update that it was made of is finite.
    """
    before = dict(tree.leaves(old))
    for path, tensor in tree.leaves(new):
        bad = ~torch.isfinite(tensor) if tensor.is_floating_point() else torch.zeros(())
        held = before.get(path)
        if held is not None and held.shape == tensor.shape and held.is_floating_point():
            bad = bad & torch.isfinite(held)
        if bad.any():
            raise DivergenceError(
                f"round {round}: the server's '{path}' is NaN or infinite after aggregation, though every update was "
                f"finite: {_too_long(options)}"
            )


HUGE = 1e6
"""Numbers in the server's state from which on its own step is to blame for clients that diverge, if it has one."""


def why_all_diverged(server: TensorDict, options: Sequence[str]) -> str:
    """Returns what to do where no client's update was finite: by what they were sent, theirs or the server's step."""
    floats = [t for _, t in tree.leaves(server) if t.is_floating_point() and t.numel()]
    largest = max((float(t.abs().max()) for t in floats), default=0.0)
    if largest > HUGE and options:
        return f"the server had sent numbers up to {largest:.2g}: {_too_long(options)}"
    grown = f"clients' models had grown up to {largest:.2g} in the rounds before: " if largest > HUGE else ""
    return f"{grown}lower train.lr, set train.clip, or check the scale of the data"


def _too_long(options: Sequence[str]) -> str:
    named = f" ({', '.join(options)})" if options else ""
    return f"the server's own step is too long, not train.lr; lower the method's server settings{named}"


def listed(clients: Sequence[int], most: int = 20) -> str:
    """Returns ids for a message, `most` of them at most."""
    return first_few([str(client) for client in clients], most)
