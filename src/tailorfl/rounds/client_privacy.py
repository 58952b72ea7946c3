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

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.errors import ConfigError, ModelError
from tailorfl.privacy import EVERYONE, Use, Uses
from tailorfl.rounds.one_round import ClientUpdates, Trained, noise_like
from tailorfl.settings.experiment import Sampling
from tailorfl.training import tree
from tailorfl.training.keys import Keys, derive
from tailorfl.training.sample_privacy import ClippedNoise
from tailorfl.training.update import along


@dataclass(frozen=True)
class ClientDP(ClippedNoise):
    """Clips every client's update to `clip`, and adds noise of deviation `noise`·`clip`."""


@dataclass(frozen=True)
class PrivateUpdates:
    """Client-level privacy of the rounds of a run: what the server sees of an update, and what that costs."""

    dp: ClientDP
    mean_only: bool
    """The server needs the mean of the replies and nothing else."""
    seed: int
    sampling: Sampling
    fraction: float
    participants: int

    @property
    def secret(self) -> bool:
        """Privacy counts on nobody seeing who takes part: a mean of clients drawn each by itself."""
        return self.sampling == "bernoulli" and self.fraction < 1 and self.mean_only

    def visible_replies(self, part: Trained, round: int, members: int) -> TensorDict:
        """Return what the server may see of the replies [clients, ...] of the sampled clients of one architecture.

        Args:
            part: their part of a round.
            round: rounds before this one.
            members: so many clients of the architecture may be drawn.

        Raises:
            ModelError: replies hold running statistics, which are means of squares that no clip of ours bounds.
            ConfigError: replies hold what noise cannot cover.
        """
        for path, _ in tree.leaves(part.replies):
            if path.rpartition("/")[2] in part.group.model.buffers:
                raise ModelError(
                    f"client-level privacy cannot cover the running statistics that clients send ('{path}'); use group "
                    "norm, keep the norm layers on the clients (FedBN), or leave them out of training"
                )
        expected = self.fraction * members if self.secret else None
        key = derive(self.seed, "client-level privacy", round, part.group.name)
        return private_replies(part.updates, self.dp, key, part.ids, self.mean_only, expected)

    def used(self, clients: Sequence[int], replies: TensorDict) -> dict[int, Uses]:
        """Return what a round costs whom; nothing where nothing is sent."""
        if not any(tensor.is_floating_point() for _, tensor in tree.leaves(replies)):
            return {}
        everyone = self.mean_only and len(clients) == self.participants
        rate = self.fraction if self.secret else 1.0
        payers = [EVERYONE] if self.secret or everyone else clients
        return {client: Counter({Use(rate, self.dp.noise): 1}) for client in payers}


def private_replies(
    updates: ClientUpdates,
    dp: ClientDP,
    key: Keys,
    clients: Sequence[int],
    mean_only: bool,
    expected: float | None = None,
) -> TensorDict:
    """Return what the server may see of the replies of some clients.

    With `mean_only` every row is its anchor plus the one noisy mean of all updates: the mean over rows is what it
    should be, and a single row tells no more than the mean. With `expected`, the number of clients of a round that
    hides who is in it, there is a single row, whose sum is divided by that number; nobody may be in it.

    Noise is a function of `key` and, with replies one by one, of the client.

    Raises:
        ConfigError: a reply holds whole numbers that the client had not received, which noise cannot cover, or clients
            had received different things in a round that hides who is in it.
    """
    replies, origins = dict(tree.leaves(updates.replies)), updates.origins
    for path, tensor in replies.items():
        origin = origins.get(path)
        if expected is not None and origin is not None and origin.ndim and len(origin) != 1:
            raise ConfigError(
                f"clients received different things ('{path}'), so their mean shows who took part, which "
                "sampling=bernoulli hides under client-level privacy; set sampling=uniform"
            )
        if path not in updates.changes and (
            origin is None or not torch.equal(tensor, origin.expand_as(tensor))
        ):
            raise ConfigError(
                f"replies hold whole numbers ('{path}'), which the noise of client-level privacy cannot cover"
            )
    rows = len(clients) if expected is None else 1
    number = len(clients) if expected is None else expected
    for n, (path, update) in enumerate(_clipped(updates, dp.clip).items()):
        if mean_only:
            total = update.sum(0)
            update = total / number
            if dp.noise > 0:
                update = update + noise_like(key, n, total) * (dp.noise * dp.clip / number)
            update = update.expand(rows, *update.shape)
        elif dp.noise > 0:
            for row, client_key in zip(update, derive(key, np.array(clients, dtype=np.uint64)), strict=True):
                row += noise_like(client_key, n, row) * (dp.noise * dp.clip)
        replies[path] = origins[path] + update
    if expected is not None:
        replies = {path: t if path in updates.changes else origins[path] for path, t in replies.items()}
    return tree.nest(replies.items(), [rows])


def _clipped(updates: ClientUpdates, limit: float) -> dict[str, Tensor]:
    """Return updates of norm `limit` at most, over all entries together; one that is not finite becomes 0."""
    if not updates.changes:
        return {}
    norms = updates.norms()
    scale = (limit / norms.clamp(min=1e-12)).clamp(max=1.0)
    return {
        path: torch.where(along(norms.isfinite(), u), u * along(scale.to(u.dtype), u), 0.0)
        for path, u in updates.changes.items()
    }
