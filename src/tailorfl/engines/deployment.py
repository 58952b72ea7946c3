"""The models that come out: what clients deploy, those that trained and those that join late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tensordict import TensorDict

from tailorfl.core import tree
from tailorfl.core.client import Client
from tailorfl.core.messages import PerClient
from tailorfl.core.method import Method
from tailorfl.engines.base import ClientFunction, Parts
from tailorfl.engines.groups import Group, by_group, message_for


def deployment(method: Method, steps: int | None) -> ClientFunction:
    """Returns the client function whose result is (the model that a client deploys,).

    `steps` is None for a client of the federation; for one that never trained, 0 says that it deploys at once and
    any other number that it trains before.
    """

    def deploy(client: Client, state: TensorDict, received: TensorDict) -> Parts:
        if steps is not None:
            state = method.newcomer(state, received)
            if steps > 0:
                state, _ = method.local(client, state, received)
        return (method.personal(client, state, received),)

    return deploy


def deployment_message(
    method: Method, server: TensorDict, group: Group, ids: Sequence[int], steps: int | None
) -> TensorDict | PerClient:
    """Returns what clients of a group receive before they deploy; `steps` as in `deployment`."""
    if steps is None and not method.personal_receives:
        return tree.empty()
    send = method.broadcast if steps is None else method.welcome
    return message_for(send(server, tuple(ids)), group, range(len(ids)))


def in_parts(
    groups: Sequence[Group], ids: Sequence[int], at_once: int
) -> Iterator[tuple[Group, tuple[int, ...]]]:
    """Yields (group, some of its clients), `at_once` of them at most."""
    for group, where in by_group(groups, ids):
        for start in range(0, len(where), at_once):
            yield group, tuple(ids[k] for k in where[start : start + at_once])
