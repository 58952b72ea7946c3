"""Client-level differential privacy (DP-FedAvg: McMahan et al., ICLR 2018).

"Learning Differentially Private Recurrent Language Models." Nobody can tell from what the server makes of the replies
whether a client's data were used.

    Δ_i = reply_i − what it is measured from (`Method.anchor`),   all floating entries together
    Δ_i ← Δ_i · min(1, C/‖Δ_i‖₂)
    the server needs only the mean:      Δ ← (1/m) ( Σ_i Δ_i + N(0, σ²C²) )        and sees nothing else
    it looks at replies one by one:      Δ_i ← Δ_i + N(0, σ²C²)                    for every client

The server is trusted to clip and to add the noise. An update that is not finite counts as zero, since leaving it out
would tell that there was one. Neighbours are two runs in one of which a client's updates are all zero ("zero-out"), so
what one client changes is at most C.

| clients of a round | m | what a round costs a client |
|---|---|---|
| `bernoulli`, of a mean | the expected number qN | the Gaussian mechanism of σ, Poisson-sampled with rate q |
| all others | the number of clients in it | one Gaussian mechanism of σ in a round it takes part in, else nothing |

Only clients that are drawn each by itself, in secret, make a round cheaper than taking part in it: then nobody may see
who was drawn nor how many, so the mean is over the expected number and a round of nobody is noise like all others. A
sample of fixed size has no such bound (whoever is drawn keeps another one out), `proportional` sampling prefers some,
and replies that are looked at one by one show who sent them; there the cohort is taken as public.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.errors import ConfigError, ModelError
from tailorfl.privacy.ledger import EVERYONE, Use, Uses
from tailorfl.settings.experiment import Sampling
from tailorfl.training import tree
from tailorfl.training.keys import derive
from tailorfl.training.sample_privacy import ClippedNoise, normal


@dataclass(frozen=True)
class ClientDP(ClippedNoise):
    """Clips every client's update to `clip`, and adds noise of deviation `noise`·`clip`."""


@dataclass(frozen=True)
class PrivateUpdates:
    """Client-level privacy of the rounds of a run: what the server sees of an update, and what that costs."""

    dp: ClientDP
    mean_only: bool
    """Whether the server needs the mean of the replies and nothing else."""
    seed: int
    sampling: Sampling
    fraction: float
    participants: int

    @property
    def secret(self) -> bool:
        """Whether privacy counts on nobody seeing who takes part: a mean of clients drawn each by itself."""
        return self.sampling == "bernoulli" and self.fraction < 1 and self.mean_only

    def hidden(
        self,
        replies: TensorDict,
        anchor: TensorDict,
        buffers: Collection[str],
        clients: Sequence[int],
        key: tuple[int, str],
        members: int,
    ) -> TensorDict:
        """Return what the server may see of the replies [clients, ...] of a round.

        Args:
            replies: of the sampled `clients` of one architecture.
            anchor: what they are measured from, as of `private_replies`.
            buffers: names of running statistics.
            clients: their ids.
            key: (round, architecture), of the noise.
            members: so many clients of the architecture may be drawn.

        Raises:
            ConfigError, ModelError: replies hold what noise cannot cover.
        """
        check_payload(replies, buffers)
        expected = self.fraction * members if self.secret else None
        return private_replies(replies, anchor, self.dp, (self.seed, *key), clients, self.mean_only, expected)

    def used(self, clients: Sequence[int], replies: TensorDict) -> dict[int, Uses]:
        """Return what a round costs whom; nothing where nothing is sent."""
        if not any(tensor.is_floating_point() for _, tensor in tree.leaves(replies)):
            return {}
        everyone = self.mean_only and len(clients) == self.participants
        rate = self.fraction if self.secret else 1.0 if everyone else None
        if rate is not None:
            return {EVERYONE: Counter({Use(rate, self.dp.noise): 1})}
        return {client: Counter({Use(1.0, self.dp.noise): 1}) for client in clients}


def private_replies(
    stack: TensorDict,
    anchor: TensorDict,
    dp: ClientDP,
    key: tuple[int, int, str],
    clients: Sequence[int],
    mean_only: bool,
    expected: float | None = None,
) -> TensorDict:
    """Return what the server may see of the replies `stack` [clients, ...].

    With `mean_only` every row is its anchor plus the one noisy mean of all updates: the mean over rows is what it
    should be, and a single row tells no more than the mean. With `expected`, the number of clients of a round that
    hides who is in it, there is a single row, whose sum is divided by that number; nobody may be in it.

    `anchor` has the entries, by path, that an update is the difference from, in the shape of one reply or
    [clients, ...]. Noise is a function of `key` (seed, round and architecture) and, with replies one by one, of the
    client.

    Raises:
        ConfigError: a reply holds whole numbers that the client had not received, which noise cannot cover, or clients
            had received different things in a round that hides who is in it.
    """
    anchors = dict(tree.leaves(anchor))
    whole_numbers: dict[str, Tensor] = {}
    updates: dict[str, Tensor] = {}
    origins: dict[str, Tensor] = {}
    for path, tensor in tree.leaves(stack):
        origin = matching(anchors.get(path), tensor)
        if expected is not None and origin is not None and len(origin) != 1:
            raise ConfigError(
                f"clients received different things ('{path}'), so their mean shows who took part, which "
                "sampling=bernoulli hides under client-level privacy; set sampling=uniform"
            )
        if tensor.is_floating_point():
            origins[path] = torch.zeros(()) if origin is None else origin
            updates[path] = tensor - origins[path]
        elif origin is None or not torch.equal(tensor, origin.expand_as(tensor)):
            raise ConfigError(
                f"replies hold whole numbers ('{path}'), which the noise of client-level privacy cannot cover"
            )
        else:
            whole_numbers[path] = tensor if expected is None else origin
    _clip(updates, dp.clip)
    seed = derive(key[0], "client-level privacy", key[1], key[2])
    if mean_only:
        number = len(clients) if expected is None else expected
        rows = len(clients) if expected is None else 1
        scale = dp.noise * dp.clip / number if dp.noise > 0 else 0.0
        for n, (path, u) in enumerate(updates.items()):
            total = u.sum(0)
            mean = total / number + _noise(seed, n, total, scale)
            updates[path] = mean.expand(rows, *mean.shape)
    elif dp.noise > 0:
        seeds = derive(seed, np.array(clients, dtype=np.uint64))
        for n, u in enumerate(updates.values()):
            for row, client_seed in zip(u, seeds, strict=True):
                row += _noise(client_seed, n, row, dp.noise * dp.clip)
    private = {p: origins[p] + u for p, u in updates.items()}
    paths = [p for p, _ in tree.leaves(stack)]
    size = stack.batch_size if expected is None else [1]
    return tree.nest(((p, private[p] if p in private else whole_numbers[p]) for p in paths), size)


def check_payload(stack: TensorDict, buffers: Collection[str]) -> None:
    """Nothing if replies hold no running statistics, which are means of squares that no clip of ours bounds.

    Raises:
        ModelError: they do.
    """
    for path, _ in tree.leaves(stack):
        if path.rpartition("/")[2] in buffers:
            raise ModelError(
                f"client-level privacy cannot cover the running statistics that clients send ('{path}'); use group "
                "norm, keep the norm layers on the clients (FedBN), or leave them out of training"
            )


def matching(origin: Tensor | None, reply: Tensor) -> Tensor | None:
    """Return what replies [clients, ...] of a path are measured from, one for all [1, ...] or [clients, ...].

    None where nothing of their shape was received under it.
    """
    if origin is None:
        return None
    if origin.shape == reply.shape[1:]:
        return origin[None]
    return origin if origin.shape == reply.shape else None


def _clip(updates: dict[str, Tensor], limit: float) -> None:
    """Scales every client's update to norm `limit` at most, over all entries together; not finite becomes 0."""
    squares = [u.double().square().reshape(len(u), math.prod(u.shape[1:])).sum(1) for u in updates.values()]
    if not squares:
        return
    norm = torch.stack(squares).sum(0).sqrt()
    scale = (limit / norm.clamp(min=1e-12)).clamp(max=1.0)
    for path, u in updates.items():
        shape = (-1, *(1,) * (u.ndim - 1))
        clipped = u * scale.to(u.dtype).reshape(shape)
        updates[path] = torch.where(norm.isfinite().reshape(shape), clipped, 0.0)


def _noise(
    key: np.ndarray[tuple[int, ...], np.dtype[np.uint64]], number: int, like: Tensor, scale: float
) -> Tensor:
    if scale == 0:
        return torch.zeros_like(like)
    signed = torch.tensor(int(key.astype(np.int64)), dtype=torch.int64)
    return normal(signed, number, like.shape).to(like.dtype) * scale
