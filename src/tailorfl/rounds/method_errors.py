"""Errors in a method's code, reported alike in every engine: the method, clients, round and stage, and the fix.

Client code is written for one client but run for many at once, so its failures surface as errors of torch. These
functions translate them, and name the code's inputs and what to write instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.method import Method
from tailorfl.engines.base import unsupported
from tailorfl.errors import ClientError, TailorflError, first_few
from tailorfl.models.mapping import physical
from tailorfl.training import operations, tree

MENDS = {
    "data-dependent control flow": (
        "an `if`, `while`, `and`, `max` or `bool()` on a tensor whose value differs between clients; use "
        "torch.where(condition, a, b)"
    ),
    ".item()": (
        "a number read from a tensor by .item(), float() or int(), which differs between clients; calculate with the "
        "tensor"
    ),
    "inplace arithmetic": "a tensor that all clients share is written to; make a new one (a = a + b instead of a += b)",
    "does not require grad": "a gradient through a result of `client.fit`, which has no gradient; give `fit` a "
    "direction or a term",
}
"""Parts of torch's messages, and what they mean in client code."""


@contextmanager
def explained(method: Method, client: Client, stage: str, **inputs: TensorDict) -> Iterator[None]:
    """Turn failures of a method's code into ClientErrors; it must not write to its `inputs`.

    Raises:
        ClientError: the code failed, or wrote to its inputs.
    """
    before = {name: _versions(part) for name, part in inputs.items()}
    try:
        yield
    except TailorflError:
        raise
    except KeyError as error:
        contents = "; ".join(f"{name} has {_names(part)}" for name, part in inputs.items())
        raise ClientError(
            f"{_where(method, client, stage)}: there is no entry {error}; {contents}"
        ) from error
    except Exception as error:
        mend = next((text for mark, text in MENDS.items() if mark in str(error)), None)
        if mend is None and unsupported(error):
            raise  # an operation of the model; another engine may support it
        message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        problem = mend or message
        raise ClientError(f"{_where(method, client, stage)}: {problem}") from error
    for name, part in inputs.items():
        if _versions(part) != before[name]:
            raise ClientError(
                f"{_where(method, client, stage)}: `{name}` was written to, but other clients or the server may use "
                "it; make new tensors (a = a + b instead of a += b) and return them"
            )


def pair(method: Method, client: Client, returned: Any, state: TensorDict) -> tuple[TensorDict, TensorDict]:
    """Return the result of `local`, checked: (new state with the structure of `state`, reply). Raises ClientError."""
    if (
        isinstance(returned, tuple)
        and len(returned) == 2
        and all(isinstance(part, TensorDict) for part in returned)
    ):
        if difference := tree.unlike(tree.shapes(tree.leaves(returned[0])), tree.shapes(tree.leaves(state))):
            raise ClientError(
                f"{_where(method, client, 'local')}: the new private state {difference}; it must keep the names, "
                "shapes and dtypes of client_state()"
            )
        return returned[0], returned[1]
    difference = (
        f"a tuple of {', '.join(type(part).__name__ for part in returned) or 'nothing'}"
        if isinstance(returned, tuple)
        else f"one {type(returned).__name__}"
    )
    raise ClientError(
        f"{_where(method, client, 'local')}: it returned {difference}, but must return (new private state, reply), two "
        "TensorDicts; use tree.empty() of tailorfl.training for an empty one"
    )


def shapes_of_replies(
    method: Method, replies: TensorDict, ids: Sequence[int], round: int, before: tree.Shapes
) -> tree.Shapes:
    """Return the shapes of all reply entries so far: those of `replies` [clients, ...] and of `before`.

    A method may send an entry in some rounds only, but its shape and dtype must stay the same.

    Raises:
        ClientError: an entry has another shape or dtype than before.
    """
    shapes = tree.shapes(tree.leaves(replies), axes=1)
    if difference := tree.unlike(
        shapes, {**shapes, **{path: before[path] for path in shapes.keys() & before.keys()}}
    ):
        raise ClientError(
            f"{method.title}, 'local' of {operations.who(ids)}, round {round + 1}: the reply {difference}, as in "
            "earlier rounds; an entry of a reply must keep its shape and dtype, so give a new entry its own name"
        )
    return {**before, **shapes}


def check_replies_used(method: Method, replied: Sequence[str]) -> None:
    """Check that a method whose clients reply has an `aggregate`; `replied` are the entries of the replies."""
    if replied and type(method).aggregate is Method.aggregate:
        raise ClientError(
            f"{method.title}: 'local' replies with {first_few(replied, 5)}, but {type(method).__name__} defines no "
            "aggregate(server, replies), so the replies are not used; define it, or reply with tree.empty() of "
            "tailorfl.training"
        )


@contextmanager
def changed_replies_named(
    method: Method, round: int, names: Collection[str], before: Collection[str]
) -> Iterator[None]:
    """Turn a failure of `aggregate` into a ClientError if replies lack entries that they had in earlier rounds.

    Other failures are not changed: the server's half is ordinary code, whose traceback is more helpful.
    """
    try:
        yield
    except TailorflError:
        raise
    except Exception as error:
        lacking = sorted(set(before) - set(names))
        if not lacking:
            raise
        raise ClientError(
            f"{method.title}, 'aggregate' of round {round + 1}: {type(error).__name__}: {error}; the replies of this "
            f"round lack {', '.join(lacking[:5])}, which earlier ones had; return the same names from every `local`, "
            "or let `aggregate` check which ones are present"
        ) from error


def whole_model(method: Method, client: Client, returned: Any) -> TensorDict:
    """Return the result of `personal`, checked to be a whole model state. Raises ClientError."""
    if not isinstance(returned, TensorDict):
        raise ClientError(
            f"{_where(method, client, 'personal')}: it returned one {type(returned).__name__}, but must return the "
            "model that the client deploys, a TensorDict"
        )
    expected, names = set(client.names), set(tree.tensors(returned))
    if expected != names:
        extra, absent = sorted(names - expected), sorted(expected - names)
        differences = [f"has {', '.join(extra[:5])}, which the model does not have"] if extra else []
        differences += [f"lacks {', '.join(absent[:5])}"] if absent else []
        raise ClientError(
            f"{_where(method, client, 'personal')}: its result {' and '.join(differences)}; return exactly the whole "
            "model (state.select(...), tree.merge(...))"
        )
    return returned


def _where(method: Method, client: Client, stage: str) -> str:
    return f"{method.title}, '{stage}' of {client.who}, round {client.round + 1}"


def _names(part: TensorDict) -> str:
    return ", ".join(path for path, _ in tree.leaves(part)) or "nothing"


def _versions(part: TensorDict) -> Mapping[str, tuple[int, int]]:
    """Return by path the identity of each tensor and the number of in-place writes to it."""
    return {path: (id(tensor), physical(tensor)[0]._version) for path, tensor in tree.leaves(part)}
