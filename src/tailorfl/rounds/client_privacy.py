"""Client-level differential privacy (DP-FedAvg: McMahan et al., ICLR 2018).

"Learning Differentially Private Recurrent Language Models." The server's result does not reveal whether a client's
data were used.

    Δ_i = reply_i − its origin (`Method.anchor`),   all floating entries together
    Δ_i ← Δ_i · min(1, C/‖Δ_i‖₂)
    the server needs only the mean:      Δ ← (1/m) ( Σ_i Δ_i + N(0, σ²C²) )        and sees only that
    it needs individual replies:         Δ_i ← Δ_i + N(0, σ²C²)                    for every client

The server is trusted to clip and to add the noise. An update that is not finite counts as zero, since leaving it out
would reveal it. Two runs are neighbours if they differ only in one client's updates, which are all zero in one of them
("zero-out"), so one client's contribution changes by at most C.

| clients of a round | m | what a round costs a client |
|---|---|---|
| `bernoulli`, of a mean | the expected number qN | the Gaussian mechanism of σ, Poisson-sampled with rate q |
| all others | the number of clients in it | one Gaussian mechanism of σ in a round it takes part in, else nothing |

Sampling lowers the cost of a round only if clients are drawn independently and in secret. Nobody may then see who was
drawn or how many, so the sum is divided by the expected number, and an empty round is noise like all others. A sample
of fixed size has no such bound (each drawn client keeps another one out), `proportional` sampling prefers some clients,
and individual replies show who sent them; in these cases the cohort is treated as public.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.messages import PRESENT
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
    """Client-level privacy of a run's rounds: the replies that the server sees, and their privacy cost."""

    dp: ClientDP
    mean_only: bool
    """The server needs only the mean of the replies."""
    seed: int
    sampling: Sampling
    fraction: float
    participants: int

    @property
    def secret(self) -> bool:
        """Whether privacy relies on a secret cohort: a mean of clients that are drawn independently."""
        return self.sampling == "bernoulli" and self.fraction < 1 and self.mean_only

    def visible_replies(self, part: Trained, round: int, members: int) -> TensorDict:
        """Return private replies [clients, ...] of the sampled clients of one architecture.

        Args:
            part: their part of a round.
            round: rounds before this one.
            members: number of clients of the architecture that may be drawn.

        Raises:
            ModelError: replies hold running statistics, which clipping updates does not bound.
            ConfigError: replies hold entries that noise cannot cover.
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
        """Return the privacy cost of a round by client; empty if the replies hold no floating numbers."""
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
    """Return the private replies of some clients, which the server may see.

    With `mean_only` every row is its anchor plus the one noisy mean of all updates, so the mean over rows is right and
    a single row reveals no more than the mean. With `expected`, the expected number of clients of a secret cohort,
    there is a single row: the sum divided by that number. The cohort may then be empty.

    Noise is a function of `key` and, for individual replies, of the client.

    Raises:
        ConfigError: a reply holds integers that differ from those received, which noise cannot cover, or clients of a
            secret cohort received different messages.
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
            present = replies.get(f"{path.rpartition('/')[0]}/{PRESENT}")
            if present is not None and present.shape == update.shape[: present.ndim]:
                update = update * along(present, update)  # a row that is not sent has no noise
        replies[path] = origins[path] + update
    if expected is not None:
        replies = {path: t if path in updates.changes else origins[path] for path, t in replies.items()}
    return tree.nest(replies.items(), [rows])


def _clipped(updates: ClientUpdates, limit: float) -> dict[str, Tensor]:
    """Return updates clipped to norm `limit` over all entries together; one that is not finite becomes 0."""
    if not updates.changes:
        return {}
    norms = updates.norms()
    scale = (limit / norms.clamp(min=1e-12)).clamp(max=1.0)
    return {
        path: torch.where(along(norms.isfinite(), u), u * along(scale.to(u.dtype), u), 0.0)
        for path, u in updates.changes.items()
    }
