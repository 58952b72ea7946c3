"""What a simulation is put on a disk as, and how it goes on from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tailorfl.core import tree
from tailorfl.core.ledger import Ledger
from tailorfl.core.messages import Traffic
from tailorfl.engines.auto import keep_choice
from tailorfl.rounds.groups import Group

if TYPE_CHECKING:
    from tailorfl.rounds.simulation import Simulation


def dump(sim: Simulation) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns (tensors, facts) from which `load` continues exactly."""
    tensors = {f"server/{p}": t for p, t in tree.leaves(sim.server)}
    for group in sim.groups:
        tensors |= {f"{_place(group)}{p}": t for p, t in group.states.dump().items()}
    facts = {
        "round": sim.round,
        "engine": sim.engine.name,
        "traffic": sim.traffic.as_dict(),
        "gradients": sim.gradients,
        "turns": sim.turns,
    }
    return tensors, {**facts, "ledger": sim.ledger.dump()} if sim.ledger else facts


def load(sim: Simulation, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Restores what `dump` returned."""
    # Copies: a tensor inside a file's buffer may lie where matrix products use other instructions and round
    # otherwise than on memory of their own.
    saved = {p.removeprefix("server/"): t.clone() for p, t in tensors.items() if p.startswith("server/")}
    sim.server = tree.fill(sim.server, saved)
    for group in sim.groups:
        place = _place(group)
        group.states.load({p.removeprefix(place): t for p, t in tensors.items() if p.startswith(place)})
    sim.round, sim.traffic = int(facts["round"]), Traffic(**facts["traffic"])
    sim.gradients, sim.turns = int(facts["gradients"]), int(facts["turns"])
    sim.ledger = Ledger.restore(facts["ledger"]) if "ledger" in facts else Ledger()
    keep_choice(sim.engine, str(facts["engine"]))


def _place(group: Group) -> str:
    """Where a checkpoint holds the private states of a group's clients."""
    return f"clients/{group.name}/" if group.name else "clients/"
