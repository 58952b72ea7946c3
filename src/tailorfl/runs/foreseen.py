"""What a simulated system will do to a run, found out before anything is trained: replies of a round, and its length.

Who answers when depends on keys, and on what clients have to do. That is counted once, for the first round: where later
rounds are shorter or send more, times differ by as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from tailorfl.rounds.buffered import Buffered
from tailorfl.rounds.events import Timeline
from tailorfl.rounds.participation import TOO_FEW, RoundTrace
from tailorfl.rounds.planning import work_of
from tailorfl.rounds.sampling import sampled_clients
from tailorfl.rounds.simulation import Simulation
from tailorfl.rounds.system import ClientWork


def foreseen(sim: Simulation, rounds: int) -> dict[str, float]:
    """Returns how many replies arrive in the mean of a round, the rounds without effect, and how long all rounds take.

    Args:
        sim: before its first round; it is left as it is.
        rounds: how many there will be.

    Returns:
        `replies_per_round`, `rounds_without_effect`, `simulated_seconds`; nothing where no system is simulated.

    Raises:
        RunError: in buffered rounds nobody can be reached any more; the message says when.
    """
    if sim.system is None:
        return {}
    said = _buffered(sim, rounds) if isinstance(sim, Buffered) else _synchronous(sim, rounds)
    return {
        "replies_per_round": sum(len(one.answered) for one in said) / rounds,
        "rounds_without_effect": sum(one.too_few or not one.answered for one in said),
        "simulated_seconds": sum(one.seconds or 0.0 for one in said),
    }


def _synchronous(sim: Simulation, rounds: int) -> list[RoundTrace]:
    assert sim.system is not None
    work, found, clock = _Work(sim), list[RoundTrace](), 0.0
    wanted = sampled_clients(sim.fraction, sim.participants)
    for number in range(rounds):
        sampled = sim.sample(number)
        asked = sim.trainees(sampled)
        one = sim.system.round(number + 1, clock, sampled, asked, work(asked), wanted)
        clock += one.seconds or 0.0
        enough = len(set(one.answered) & set(sampled)) >= sim.min_replies
        found.append(one if enough else one.refused(asked, TOO_FEW))
    return found


def _buffered(sim: Buffered, rounds: int) -> list[RoundTrace]:
    work, found, timeline = _Work(sim), list[RoundTrace](), Timeline()
    for version in range(rounds):
        one, timeline = sim.buffer.until_full(timeline, version, work)
        found.append(one)
    return found


class _Work:
    """What clients have to do in a round, each counted once."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._of = cache(self._counted)

    def __call__(self, clients: Sequence[int]) -> Mapping[int, ClientWork]:
        assert self._sim.system is not None
        if not self._sim.system.devices.takes_time:
            return dict.fromkeys(clients, ClientWork(0, 0, 0))
        everybody = self._of()
        return {i: everybody[i] for i in clients}

    def _counted(self) -> Mapping[int, ClientWork]:
        clients = tuple(range(self._sim.participants))
        message = self._sim.method.broadcast(self._sim.server, clients)
        return work_of(self._sim, message, clients, 0)[0]
