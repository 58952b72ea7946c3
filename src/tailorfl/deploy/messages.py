"""Messages between a server and its clients: packets, their bytes, and the transport that carries them.

A packet is facts as JSON beside named tensors, in the format of safetensors; nothing is pickled. Its bytes are the 32
bytes of a SHA-256 and then one safetensors file, whose metadata has the facts. The digest tells bytes that were damaged
on the way; who sent them, TLS and the keys of nodes tell. A transport (a post) sends such bytes as letters, and knows
nothing of what is in them.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal, Protocol, get_args

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.errors import MessageError
from tailorfl.privacy import Use, Uses
from tailorfl.runs.files import decode, encode
from tailorfl.training import tree

PROTOCOL = 1
"""Of messages; server and clients have the same."""
VERSION = version("tailorfl")
"""Of tailorfl; server and clients have the same up to the last number."""
LEFT = "left"
"""Code of the refusal of a client that leaves a federation for good."""
SAME_MINOR = "install versions on both that differ in the last number alone"
"""What to do about two versions that are not compatible."""
LARGEST = 2**31
"""Bytes of a packet, at most."""
LARGEST_FACTS = 2**23
"""Bytes of a packet's facts and names, at most: as JSON they take many times that in memory."""
DIGEST = 32
_FACTS = "tailorfl"

Kind = Literal["hello", "describe", "summarise", "setup", "train", "evaluate", "finish", "goodbye", "failure"]
"""What a packet asks for; its answer is of the same kind, or a failure."""
LetterKind = Literal["query", "train", "evaluate"]
"""The kinds of letters that a transport knows."""


@dataclass(frozen=True)
class Packet:
    """One message.

    Attributes:
        kind: what it asks for, or answers.
        facts: what JSON can hold.
        tensors: by name, of any dtype and shape.
    """

    kind: Kind
    facts: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """Return its bytes. Raises MessageError where they are more than `LARGEST`."""
        from safetensors.torch import save

        same = self._same_memory()
        plain = {n: t.detach().cpu().contiguous().clone() for n, t in self.tensors.items() if n not in same}
        # safetensors sorts by name, and sums over the tensors of a model are rounded as these are ordered.
        order = list(self.tensors)
        about = encode(
            {"protocol": PROTOCOL, "kind": self.kind, "order": order, "same": same, "facts": dict(self.facts)}
        )
        body = save(plain, metadata={_FACTS: about})
        if len(body) + DIGEST > LARGEST:
            raise MessageError(
                f"a message of {len(body):,} bytes is more than the {LARGEST:,} that may travel"
            )
        return hashlib.sha256(body).digest() + body

    def _same_memory(self) -> dict[str, str]:
        """Send a tensor once that has several names.

        So it is where the global model is what is deployed.
        """
        first_names: dict[tuple[Any, ...], str] = {}
        same: dict[str, str] = {}
        for name, t in self.tensors.items():
            key = (t.data_ptr(), t.device, t.dtype, t.shape, t.stride())
            if first_names.setdefault(key, name) != name:
                same[name] = first_names[key]
        return same

    @classmethod
    def decoded(cls, data: bytes, largest: int = LARGEST) -> Packet:
        """Return what `encoded` gave.

        Raises:
            MessageError: too many bytes, not what was sent, of another protocol, or no packet at all.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        if len(data) > largest:
            raise MessageError(f"a message has {len(data):,} bytes; at most {largest:,} are taken")
        digest, body = data[:DIGEST], data[DIGEST:]
        if hashlib.sha256(body).digest() != digest:
            raise MessageError(
                f"a message of {len(data):,} bytes is not what was sent: its digest is another one"
            )
        try:
            length = int.from_bytes(body[:8], "little")
            if length > len(body):
                raise ValueError("it ends before its facts do")
            if length > LARGEST_FACTS:
                raise MessageError(
                    f"a message has {length:,} bytes of facts; at most {LARGEST_FACTS:,} are taken"
                )
            about = decode(decode(body[8 : 8 + length])["__metadata__"][_FACTS])
            protocol = about["protocol"]
            if protocol != PROTOCOL:
                raise MessageError(
                    f"a message is of protocol {protocol!r}, but this is protocol {PROTOCOL}; use the same version of "
                    "tailorfl on the server and all clients"
                )
            loaded, kind, facts = load(body), about["kind"], about["facts"]
            repeated = {name: loaded[first] for name, first in about["same"].items()}
            size = len(body) + sum(t.nbytes for t in repeated.values())
            if size > largest:
                raise MessageError(f"a message has {size:,} bytes of tensors; at most {largest:,} are taken")
            loaded |= {name: tensor.clone() for name, tensor in repeated.items()}
            tensors = {name: loaded.pop(name) for name in about["order"]} | loaded
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise MessageError(f"a message cannot be read: {type(error).__name__}: {error}"[:300]) from error
        if kind not in get_args(Kind) or not isinstance(facts, dict):
            raise MessageError(f"a message is of no known kind: {str(kind)[:40]!r}")
        return cls(kind, facts, tensors)

    def digest(self) -> str:
        """Return what tells it from any other packet, as hexadecimal digits."""
        return self.encoded()[:DIGEST].hex()

    def fact(self, name: str, kind: type | tuple[type, ...]) -> Any:
        """Return a fact. Raises MessageError where it is missing, or of another type."""
        value = self.facts.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise MessageError(f"a message '{self.kind}' has no usable '{name}': {str(value)[:60]!r}")
        return value

    def part(self, name: str) -> TensorDict:
        """Return the tensors whose names begin with `name`/, as the tree that was sent."""
        start = f"{name}/"
        return tree.nest((n[len(start) :], t) for n, t in self.tensors.items() if n.startswith(start))


def flat(name: str, tensors: TensorDict) -> dict[str, Tensor]:
    """Return the leaves of a tree as tensors of a packet, which `Packet.part(name)` puts together again."""
    return {f"{name}/{path}": tensor for path, tensor in tree.leaves(tensors)}


def compatible(version: str) -> bool:
    """Return whether another version of tailorfl may take part: one that differs in the last number alone."""
    return version.split(".")[:2] == VERSION.split(".")[:2]


def failure(reason: str, code: str = "refused") -> Packet:
    """Return the answer of somebody who does not do what was asked; `code` is a word that programs read."""
    return Packet("failure", {"reason": reason[:500], "code": code})


class RefusalError(MessageError):
    """A question is not answered; `code` is a word for it that programs read."""

    def __init__(self, reason: str, code: str) -> None:
        super().__init__(reason)
        self.code = code


def same_shape(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor], what: str) -> None:
    """Check that tensors have the names, shapes and dtypes of `like`.

    Raises:
        MessageError: one is missing, not asked for, or another one; names it.
    """
    for name in like:
        if name not in tensors:
            raise MessageError(f"{what} lacks '{name}'")
    for name, tensor in tensors.items():
        if name not in like:
            raise MessageError(f"{what} has '{name[:80]}', which was not asked for")
        if tensor.shape != like[name].shape or tensor.dtype != like[name].dtype:
            raise MessageError(
                f"{what}: '{name}' is {tensor.dtype} of shape {list(tensor.shape)}, but should be {like[name].dtype} "
                f"of shape {list(like[name].shape)}"
            )


def all_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return the name of the first tensor that holds NaN or infinity; "" where none does."""
    return next(
        (n for n, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())), ""
    )


def uses_as_facts(uses: Uses) -> list[list[float]]:
    """Return uses as JSON can hold them: [rate, noise, gradients, how many]."""
    return [[use.rate, use.noise, use.gradients, count] for use, count in sorted(uses.items())]


def uses_from_facts(facts: Any) -> Uses:
    """Return what `uses_as_facts` was given. Raises MessageError where it is something else."""
    problem = f"uses of private samples cannot be read: {str(facts)[:80]!r}"
    try:
        uses: Uses = Counter({Use(float(q), float(sigma), int(r)): int(n) for q, sigma, r, n in facts})
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(problem) from error
    for use, count in uses.items():
        if not (
            0 <= use.rate <= 1 and 0 <= use.noise < math.inf and use.gradients >= 1 and 0 <= count < 2**53
        ):
            raise MessageError(problem)
    return uses


def structure(tensors: Iterable[tuple[str, Any]]) -> list[list[Any]]:
    """Return the names, shapes and types of tensors, as JSON can hold them."""
    return [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors]


@dataclass(frozen=True)
class Letter:
    """Bytes for one node."""

    node: int
    kind: LetterKind
    body: bytes


@dataclass(frozen=True)
class Arrival:
    """The reply to a letter.

    Attributes:
        ticket: of the letter.
        body: the answer; None where there will be none.
        problem: why there is none.
    """

    ticket: str
    body: bytes | None
    problem: str = ""


class Transport(Protocol):
    """Sends letters to nodes and brings their answers."""

    def nodes(self) -> dict[int, str]:
        """Return the nodes that can be reached now, each with the name in its certificate, or "".

        One that comes back may have another number.
        """

    def send(self, letters: Sequence[Letter], seconds: float) -> list[str]:
        """Send letters that nobody waits for longer than `seconds`; returns a ticket for each, "" where it fails."""

    def receive(self, tickets: Sequence[str]) -> list[Arrival]:
        """Return what has come back for any of these letters, without waiting. Each is brought once."""

    def close(self) -> None:
        """End it, within seconds; letters under way are lost."""
