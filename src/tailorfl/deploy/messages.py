"""Messages between a server and its clients: packets, their bytes, and the transport that carries them.

A packet is facts as JSON and named tensors, in the format of safetensors; nothing is pickled. Its bytes are the 32
bytes of a SHA-256, then one safetensors file whose metadata has the facts. The digest detects bytes that were damaged
on the way; TLS and the nodes' keys identify the sender. A transport sends such bytes as letters, and knows nothing of
their content.
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

from tailorfl.errors import (
    DataError,
    DivergenceError,
    MemoryLimitError,
    MessageError,
    PolicyError,
    RunError,
)
from tailorfl.privacy import Use, Uses
from tailorfl.runs.files import decode, encode
from tailorfl.training import tree

PROTOCOL = 2
"""Version of messages; server and clients must have the same."""
VERSION = version("tailorfl")
"""Version of tailorfl; server and clients must have the same except for the last number."""
LEFT = "left"
"""Code of the refusal of a client that leaves a federation for good."""
NO_METRICS = "no-metrics"
"""Code of the refusal of a client whose policy lets no metrics leave."""
SAME_MINOR = "install versions on both that differ only in the last number"
"""Advice for two incompatible versions."""
LARGEST = 2**31
"""Largest number of bytes of a packet."""
LEAST_NOISE = 1e-9
"""Least noise, if there is any: below it no accountant can compute ε, and the noise hides nothing."""
LARGEST_FACTS = 2**23
"""Largest number of bytes of a packet's facts and names: parsed JSON takes many times that in memory."""
DIGEST = 32
_FACTS = "tailorfl"

Kind = Literal["hello", "describe", "summarise", "setup", "train", "evaluate", "finish", "goodbye", "failure"]
"""The request of a packet; its answer is of the same kind, or a failure."""
LetterKind = Literal["query", "train", "evaluate"]
"""The kinds of letters that a transport knows."""


@dataclass(frozen=True)
class Packet:
    """One message.

    Attributes:
        kind: its request, or the request that it answers.
        facts: values that JSON can hold.
        tensors: by name, of any dtype and shape.
    """

    kind: Kind
    facts: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """Return the packet's bytes. Raises MessageError if they are more than `LARGEST`."""
        from safetensors.torch import save

        same = self._same_memory()
        plain = {n: t.detach().cpu().contiguous().clone() for n, t in self.tensors.items() if n not in same}
        # safetensors sorts by name, but the rounding of sums over a model's tensors depends on their order.
        order = list(self.tensors)
        about = encode(
            {"protocol": PROTOCOL, "kind": self.kind, "order": order, "same": same, "facts": dict(self.facts)}
        )
        body = save(plain, metadata={_FACTS: about})
        if len(body) + DIGEST > LARGEST:
            raise MessageError(f"a message has {len(body):,} bytes; at most {LARGEST:,} can be sent")
        return hashlib.sha256(body).digest() + body

    def _same_memory(self) -> dict[str, str]:
        """Return duplicate name -> first name of tensors in the same memory, which are sent once.

        This is the case if the global model is the deployed one.
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
        """Return the packet that `encoded` has encoded.

        Raises:
            MessageError: the bytes are too many, damaged, of another protocol, or no packet at all.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        if len(data) > largest:
            raise MessageError(f"a message has {len(data):,} bytes; at most {largest:,} are accepted")
        digest, body = data[:DIGEST], data[DIGEST:]
        if hashlib.sha256(body).digest() != digest:
            raise MessageError(f"a message of {len(data):,} bytes was changed on the way: its digest differs")
        try:
            length = int.from_bytes(body[:8], "little")
            if length > len(body):
                raise ValueError("it ends before its facts do")
            if length > LARGEST_FACTS:
                raise MessageError(
                    f"a message has {length:,} bytes of facts; at most {LARGEST_FACTS:,} are accepted"
                )
            about = decode(decode(body[8 : 8 + length])["__metadata__"][_FACTS])
            protocol = about["protocol"]
            if protocol != PROTOCOL:
                raise MessageError(
                    f"a message has protocol {protocol!r}, but this side has protocol {PROTOCOL}; use the same version "
                    "of tailorfl on the server and all clients"
                )
            loaded, kind, facts = load(body), about["kind"], about["facts"]
            repeated = {name: loaded[first] for name, first in about["same"].items()}
            size = len(body) + sum(t.nbytes for t in repeated.values())
            if size > largest:
                raise MessageError(
                    f"a message has {size:,} bytes of tensors; at most {largest:,} are accepted"
                )
            loaded |= {name: tensor.clone() for name, tensor in repeated.items()}
            tensors = {name: loaded.pop(name) for name in about["order"]} | loaded
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise MessageError(f"a message cannot be read: {type(error).__name__}: {error}"[:300]) from error
        if kind not in get_args(Kind) or not isinstance(facts, dict):
            raise MessageError(f"a message has an unknown kind: {str(kind)[:40]!r}")
        return cls(kind, facts, tensors)

    def digest(self) -> str:
        """Return the digest of the packet's bytes, as hexadecimal digits."""
        return self.encoded()[:DIGEST].hex()

    def fact(self, name: str, kind: type | tuple[type, ...]) -> Any:
        """Return a fact. Raises MessageError if it is missing, or of another type."""
        value = self.facts.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise MessageError(f"a message '{self.kind}' has no usable '{name}': {str(value)[:60]!r}")
        return value

    def part(self, name: str) -> TensorDict:
        """Return the tensors whose names begin with `name`/, as the tree that was sent."""
        start = f"{name}/"
        return tree.nest((n[len(start) :], t) for n, t in self.tensors.items() if n.startswith(start))


def flat(name: str, tensors: TensorDict) -> dict[str, Tensor]:
    """Return the leaves of a tree as tensors of a packet, from which `Packet.part(name)` restores it."""
    return {f"{name}/{path}": tensor for path, tensor in tree.leaves(tensors)}


def compatible(version: str) -> bool:
    """Return whether another version of tailorfl may take part: it may differ only in the last number."""
    return version.split(".")[:2] == VERSION.split(".")[:2]


def failure(reason: str, code: str = "refused") -> Packet:
    """Return the answer that refuses a request; `code` is a word for programs."""
    return Packet("failure", {"reason": reason[:500], "code": code})


FAILURES: Mapping[type, str] = {
    DataError: "its data cannot be used",
    PolicyError: "its policy does not allow it",
    RunError: "it cannot read or write its files",
    DivergenceError: "its training has diverged",
    MemoryLimitError: "its memory is too small",
}
"""Sentences for the server instead of errors that might reveal the client's data, files or policy."""


class RefusalError(MessageError):
    """A question is not answered; `code` is the reason as a word for programs."""

    def __init__(self, reason: str, code: str) -> None:
        super().__init__(reason)
        self.code = code


def same_shape(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor], what: str) -> None:
    """Check that tensors have the names, shapes and dtypes of `like`.

    Raises:
        MessageError: a tensor is missing, unexpected, or of another shape or dtype; names it.
    """
    for name in like:
        if name not in tensors:
            raise MessageError(f"{what} lacks '{name}'")
    for name, tensor in tensors.items():
        if name not in like:
            raise MessageError(f"{what} has '{name[:80]}', which was not requested")
        if tensor.shape != like[name].shape or tensor.dtype != like[name].dtype:
            raise MessageError(
                f"{what}: '{name}' is {tensor.dtype} of shape {list(tensor.shape)}, but should be {like[name].dtype} "
                f"of shape {list(like[name].shape)}"
            )


def all_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return the name of the first tensor that holds NaN or infinity, "" if none does."""
    return next(
        (n for n, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())), ""
    )


def uses_as_facts(uses: Uses) -> list[list[float]]:
    """Return uses as JSON can hold them: [rate, noise, gradients, count]."""
    return [[use.rate, use.noise, use.gradients, count] for use, count in sorted(uses.items())]


def uses_from_facts(facts: Any) -> Uses:
    """Return the uses that `uses_as_facts` has encoded. Raises MessageError if it is something else."""
    problem = f"uses of private samples cannot be read: {str(facts)[:80]!r}"
    try:
        uses: Uses = Counter({Use(float(q), float(sigma), int(r)): int(n) for q, sigma, r, n in facts})
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(problem) from error
    for use, count in uses.items():
        if not (
            0 <= use.rate <= 1
            and (use.noise == 0 or LEAST_NOISE <= use.noise < math.inf)
            and 1 <= use.gradients < 2**53
            and 0 <= count < 2**53
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
        body: the answer, or None if there will be none.
        problem: why there is none.
    """

    ticket: str
    body: bytes | None
    problem: str = ""


class Transport(Protocol):
    """Sends letters to nodes and returns their answers."""

    def nodes(self) -> dict[int, str]:
        """Return the nodes that can be reached now, each with the name in its certificate, or "".

        A node that comes back may have another number.
        """

    def send(self, letters: Sequence[Letter], seconds: float) -> list[str]:
        """Send letters whose answers are awaited for at most `seconds`; return a ticket for each, "" if it fails."""

    def receive(self, tickets: Sequence[str]) -> list[Arrival]:
        """Return the answers to these letters that have arrived, each once, without waiting."""

    def close(self) -> None:
        """Close the transport within seconds; letters under way are lost."""
