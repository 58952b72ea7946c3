"""L2GD (Hanzely and Richtárik, "Federated Learning of a Mixture of Global and Local Models", 2020).

    min  (1/N) Σ_i ( F_i(x_i) + (λ/2)‖x_i − x̄‖² ),   x̄ = mean_i x_i

Every iteration has a coin ζ ~ Bernoulli(p) that all clients and the server share:

    ζ = 0:  x_i = x_i − (α / (N(1−p))) ∇F_i(x_i)                          one mini-batch gradient
    ζ = 1:  x_i = x_i − (αλ / (Np)) (x_i − x̄)

so the expected step is α times the gradient of the objective. Models are sent only when the coin turns from 0 to 1:
clients send x_i, the server sends x̄ back. A further 1 does not change x̄, so clients use the one they have.
That makes p(1−p) exchanges per iteration.

A round lasts until the next exchange, as with every other method: a run of ones, Geometric(1 − p) of them, then a run
of zeros, Geometric(p), that is 1/p gradients and one exchange on average. Before the first exchange all models are
equal, so the first round has no ones. With `per_round: coin` a round is a single iteration, as in the paper's plots;
the next coin is known, so clients send at the end of a 0 that is followed by a 1.

All clients train in every round. With a sampled fraction below 1 only the sampled ones send, and x̄ is their mean.
Coins depend on `coin_seed` and the round, not on the run's seed: runs with several seeds share their coins unless
`coin_seed` varies, too.

| symbol | here |
|---|---|
| x_i, the x̄ it knows | client state `x`, `mean` |
| x̄ of the last exchange | server state `mean` |
| p | `p`, or its optimum λ/(λ + L) for the L given as `smoothness` |
| α | the run's learning rate is η = α/(N(1−p)), so αλ/(Np) = ηλ(1−p)/p |
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import Method, register
from tailorfl.core.reduction import Reduction, RunSetup, as_settings
from tailorfl.errors import ConfigError
from tailorfl.training import tree
from tailorfl.training.keys import generator
from tailorfl.training.plan import Length


@register
class L2GD(Method):
    """Local gradient steps and steps towards the mean, chosen by a shared coin."""

    name = "l2gd"
    title = "L2GD"
    paper = "Hanzely and Richtárik, 2020"
    family = "two models"
    use = "few, random exchanges between local steps"
    grid = {"lam": (0.1, 0.3, 1.0), "p": (0.1, 0.3, 0.5)}
    # A client that idles would miss an exchange and later step towards an outdated mean.
    participation: Literal["all"] = Field(default="all", description="which clients train in a round")
    lam: float = Field(0.3, gt=0, description="λ: strength of the pull towards the mean")
    p: float = Field(0.1, gt=0, lt=1, description="probability of a step towards the mean")
    per_round: Literal["exchange", "coin"] = Field(
        "exchange", description="length of a round: all iterations up to the next exchange, or a single one"
    )
    smoothness: float | None = Field(None, gt=0, description="L: sets p to its optimum λ/(λ + L)")
    coin_seed: int = Field(0, ge=0, description="seed of the coin that server and clients share")

    @property
    def averages_replies(self) -> bool:
        return True

    @property
    def probability(self) -> float:
        """Probability p of ζ = 1."""
        return self.p if self.smoothness is None else self.lam / (self.lam + self.smoothness)

    def pull(self, lr: float) -> float:
        """Return αλ/(Np), the share of the distance to the mean that an iteration with ζ = 1 covers, for η = `lr`."""
        return lr * self.lam * (1 - self.probability) / self.probability

    def coins(self, round: int) -> tuple[int, int]:
        """Return the number of iterations with ζ = 1 at the start of a round, and of those with ζ = 0 that follow."""
        if self.per_round == "coin":
            return (1, 0) if self.averages(round) else (0, 1)
        rng, p = generator(self.coin_seed, "coins of a round", round), self.probability
        ones, zeros = int(rng.geometric(1 - p)), int(rng.geometric(p))
        return (ones if round else 0), zeros

    def averages(self, round: int) -> bool:
        """Return whether ζ = 1 in a round of one coin; before round 0 models are equal, as after a step to the mean."""
        return round < 0 or bool(generator(self.coin_seed, "coin", round).random() < self.probability)

    def exchanges(self, round: int) -> bool:
        """Whether ζ turns from 0 to 1 at a round: the server sends in it, clients at the end of the one before."""
        if self.per_round == "exchange":
            return round > 0
        return self.averages(round) and not self.averages(round - 1)

    def server_state(self, ctx: Context) -> TensorDict:
        share = self.pull(ctx.train.lr)
        if share > 1:
            raise ConfigError(
                f"a step of L2GD towards the mean would go beyond it: lr·lam·(1 − p)/p = {share:.3g}, but it must not "
                f"exceed 1 (½ by the theory); set lr ≤ {ctx.train.lr / share:.3g}, a smaller lam or a larger p"
            )
        return TensorDict({"mean": ctx.init, "round": torch.tensor(0)})

    def client_state(self, ctx: Context) -> TensorDict:
        return TensorDict({"x": ctx.init, "mean": ctx.init})

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        return self.shared(server) if self.exchanges(int(server["round"])) else tree.empty()

    def welcome(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        return self.shared(server)

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        x, mean = state["x"], received if len(received.keys()) else state["mean"]
        ones, zeros = self.coins(client.round)
        for _ in range(ones):
            x = towards(x, mean, self.pull(client.config.lr), client.split.frozen)
        if zeros:
            x = client.fit(x, length=Length(steps=zeros))
        reply = x if self.exchanges(client.round + 1) else tree.empty()
        return TensorDict({"x": x, "mean": mean}), reply

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        mean = replies.mean() if self.exchanges(replies.round + 1) else server["mean"]
        return TensorDict({"mean": mean, "round": torch.tensor(replies.round + 1)})

    def anchor(self, server: TensorDict, received: TensorDict) -> TensorDict:
        return self.shared(server)

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        x: TensorDict = state["x"]
        return x

    def shared(self, server: TensorDict) -> TensorDict:
        mean: TensorDict = server["mean"]
        return mean

    def reductions(self, run: RunSetup) -> tuple[Reduction, ...]:
        if any(self.coins(r)[0] for r in range(run.rounds)):
            return ()
        # There is one round, or each has one coin: all have the same number of steps.
        steps = self.coins(0)[1]
        because = f"with coins that never call for averaging in its rounds ({run.rounds})"
        everyone = {"participation": "all"}
        return (
            Reduction(because, "personal", "local", "personal", everyone, as_settings(Length(steps=steps))),
        )

    def newcomer(self, state: TensorDict, received: TensorDict) -> TensorDict:
        return TensorDict({"x": received, "mean": received})


def towards(x: TensorDict, mean: TensorDict, share: float, frozen: tuple[str, ...]) -> TensorDict:
    """Return x + share·(mean − x) for parameters and running statistics; counters and frozen parts stay."""
    moved = {
        n: t + (mean.get(n) - t) * share
        for n, t in tree.tensors(x).items()
        if t.is_floating_point() and n not in frozen
    }
    return tree.merge(x, TensorDict(moved))
