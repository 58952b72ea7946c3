"""The tensors that a run is put on a disk as, and goes on from: the server's state and those of clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensordict import TensorDict
from torch import Tensor

from tailorfl.rounds.groups import Group
from tailorfl.training import tree


def saved(server: TensorDict, groups: Sequence[Group]) -> dict[str, Tensor]:
    """Returns by path the tensors from which `restored` goes on exactly; they are not copies."""
    tensors = {f"server/{p}": t for p, t in tree.leaves(server)}
    for group in groups:
        tensors |= {f"{_place(group)}{p}": t for p, t in group.states.dump().items()}
    return tensors


def restored(server: TensorDict, groups: Sequence[Group], tensors: Mapping[str, Tensor]) -> TensorDict:
    """Returns the server's state of what was `saved`, shaped as `server`, and gives clients back theirs."""
    # Copies: a tensor inside a file's buffer may lie where matrix products use other instructions and round
    # otherwise than on memory of their own.
    mine = {p.removeprefix("server/"): t.clone() for p, t in tensors.items() if p.startswith("server/")}
    filled = tree.fill(server, mine)
    for group in groups:
        place = _place(group)
        group.states.load({p.removeprefix(place): t for p, t in tensors.items() if p.startswith(place)})
    return filled


def _place(group: Group) -> str:
    """Where a checkpoint holds the private states of a group's clients."""
    return f"clients/{group.name}/" if group.name else "clients/"
