"""FedCLUP (Yu et al., ICML 2025).

"Understanding the Statistical Accuracy-Communication Trade-off in Personalized Federated Learning with Minimax
Guarantees." Deterministic and stochastic.

    min over w, v_i:  Σ_i (1/N) ( F_i(v_i) + (λ/2)‖v_i − w‖² )

    server sends w
    client i:  v_i = LocalSGD(v_i, prox (λ, w)), warm start, v_i persists;   sends v_i
    server:    w = (1 − γλ) w + γλ mean_S v_i                              ( = w − γ mean_S λ(w − v_i) )

Small λ means strong personalization, large λ weak. `gamma`, `lr_rule` and `local_steps` choose γ, η and K by the rules
of the theory (`tailorfl.methods.fedclup_rules`). By default γ = 1/λ, which needs no L: w is the plain mean of the v_i.

The printed stochastic algorithm draws one batch per round for all K steps (`batch_reuse`); its analysis has fresh noise
in every step, which is the default here, and the paper's experiments on real data train for epochs.

`schedule` can change λ between rounds (`tailorfl.methods.fedclup_rules`). γ, and η by `lr_rule`, follow it; v_i and w
are kept. λ is then sent with w as one more scalar. While λ is 0, clients train alone and nothing is sent; when it
becomes positive, clients send v_i in one round and w becomes their mean. For the dynamic rule, clients report their
validation loss along with their reply, or their training loss if they have no validation samples.

| symbol | here |
|---|---|
| λ | `lam` |
| μ, L | `convexity`, `smoothness` |
| η | the run's learning rate, or by `lr_rule` |
| K | the run's steps or epochs, or `local_steps` |
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.core.reduction import Reduction, RunSetup, as_settings, exposure
from tailorfl.errors import ConfigError
from tailorfl.methods.bases import TwoModels
from tailorfl.methods.fedclup_rules import (
    ERROR,
    ClientRule,
    Constant,
    Corollary,
    Dynamic,
    Heuristic,
    PenaltySchedule,
    ServerRule,
    client_step,
    fewest_steps,
    server_step,
)
from tailorfl.training import tree
from tailorfl.training.plan import Length
from tailorfl.training.update import Optimizer


@register
class FedCLUP(TwoModels):
    """Personal models tied to a global one by λ, which trades statistical accuracy against communication."""

    fixed_clients = "its λ depends on the mean number of all clients' samples; give schedule.samples"
    fixed_when = {"schedule__kind": "heuristic", "schedule__samples": None}
    name = "fedclup"
    title = "FedCLUP"
    paper = "Yu et al., ICML 2025"
    family = "two models"
    use = "a chosen point between LocalTrain and one global model, with step sizes from theory"
    grid = {"lam": (0.1, 0.2, 0.5, 1.0, 1.5, 2.5)}
    exposures = [exposure("the losses that clients report for schedule = dynamic", schedule__watches=True)]
    lam: float = Field(0.5, ge=0, description="λ: degree of collaboration; small is high personalization")
    gamma: ServerRule = Field("mean", description="rule for the server's step size γ")
    smoothness: float | None = Field(None, gt=0, description="L, if known; needed by gamma = theory and edge")
    convexity: float | None = Field(None, gt=0, description="μ, if known; needed by rules of the theory")
    lr_rule: ClientRule | Literal["run"] = Field(
        "run", description="η: the run's learning rate, or that of a theorem"
    )
    local_steps: int | Literal["theory"] | None = Field(
        None, description="K, steps of a client in a round; default: as the run's local training"
    )
    batch_reuse: bool = Field(False, description="draw one batch a round and take all K steps on it")
    schedule: PenaltySchedule = Field(
        Constant(),
        description="rule for λ: constant; corollary: radius, rho, samples, clients; heuristic: switch, constant, "
        "samples, most; dynamic: values (or start, factor, least, most), patience, tol",
    )

    @model_validator(mode="after")
    def _needs_constants(self) -> Self:
        needs_mu = {
            "lr_rule = stochastic": self.lr_rule == "stochastic",
            "local_steps = theory": self.local_steps == "theory",
            "schedule = corollary": isinstance(self.schedule, Corollary),
        }
        needs_smoothness = {
            f"gamma = {self.gamma}": self.gamma != "mean",
            "lr_rule = deterministic": self.lr_rule == "deterministic",
            **needs_mu,
        }
        for setting, needed in needs_smoothness.items():
            if needed and self.smoothness is None:
                raise ValueError(f"{setting} needs smoothness (L)")
        for setting, needed in needs_mu.items():
            if needed and self.convexity is None:
                raise ValueError(f"{setting} needs convexity (μ)")
        if self.convexity is not None and self.smoothness is not None and self.convexity > self.smoothness:
            raise ValueError("convexity (μ) must not be above smoothness (L)")
        if isinstance(self.local_steps, int) and self.local_steps < 1:
            raise ValueError("local_steps must be at least 1")
        if self.lam == 0 and isinstance(self.schedule, Heuristic):
            raise ValueError("schedule = heuristic needs lam > 0: it estimates R from what clients send")
        if self.local_steps == "theory" and isinstance(self.schedule, Heuristic):
            raise ValueError("local_steps = theory must know every λ; give a number with this schedule")
        if self.local_steps == "theory" and not self.pulls:
            raise ValueError(
                "local_steps = theory needs a λ > 0: with λ = 0 clients train alone, for any number"
            )
        if self.local_steps == "theory" and self.gamma == "edge":
            raise ValueError(
                "local_steps = theory needs γ < 1/λ + 1/L, and gamma = edge is that bound itself: no number of steps "
                "meets the theorem's condition; set gamma = theory or mean, or give local_steps a number"
            )
        return self

    # -- the server -----------------------------------------------------------------------------------------

    def server_state(self, ctx: Context) -> TensorDict:
        if self.batch_reuse and self.local_steps is None and ctx.train.steps is None:
            raise ConfigError("batch_reuse repeats one batch K times; set K by local_steps or train.steps")
        if self.local_steps == "theory":
            train = ctx.train
            plain = train.optimizer == "sgd" and train.schedule == "constant" and not train.momentum
            if not plain or train.clip is not None or train.round_schedule.kind != "constant":
                raise ConfigError(
                    "local_steps = theory is for plain gradient steps of one size: it needs train.optimizer = sgd, "
                    "momentum = 0, schedule and round_schedule = constant and no clip, or give local_steps a number"
                )
            self.steps_of_theory(train.lr)
        if not self.schedule.changes:
            return ctx.init
        return self._state(ctx.init, self.first_lam, False, self.schedule.memory())

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        if not self.schedule.changes:
            return server
        if int(server["collect"]):
            return server.select("collect")
        if float(server["lam"]) == 0:
            return tree.empty()
        w = server["w"]
        return TensorDict({"w": w, "lam": server["lam"].to(tree.precision(w.values()))})

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        if not self.schedule.changes:
            return replies.towards(server, self.server_step(self.first_lam))
        w, lam = server["w"], float(server["lam"])
        if int(server["collect"]):
            return self._state(replies.mean(), lam, False, server["rule"])
        if lam > 0:
            w = replies.towards(w, self.server_step(lam))
        new, memory = self.schedule.after(lam, server["rule"], replies, server["w"])
        return self._state(w, new, lam == 0 < new, memory)

    @property
    def averages_replies(self) -> bool:
        return not isinstance(self.schedule, Heuristic)  # which measures how far each v_i is from w

    def anchor(self, server: TensorDict, received: TensorDict) -> TensorDict:
        return self.shared(server)

    def shared(self, server: TensorDict) -> TensorDict:
        w: TensorDict = server["w"] if self.schedule.changes else server
        return w

    @staticmethod
    def _state(w: TensorDict, lam: float, collect: bool, rule: TensorDict) -> TensorDict:
        """Return the server's state with a changing λ.

        `collect` is set if λ has just become positive and w is still to be computed.
        """
        flags = {"lam": torch.tensor(lam, dtype=torch.float64), "collect": torch.tensor(int(collect))}
        return TensorDict({"w": w, **flags, "rule": rule})

    # -- a client -------------------------------------------------------------------------------------------

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        if not self.schedule.changes:
            v = self._fit(client, state, self.first_lam, received)
            return v, v
        if "w" in received.keys():  # noqa: SIM118  (a TensorDict)
            v = self._fit(client, state, received["lam"], received["w"])
        else:
            v = self._fit(client, state, 0.0, None)
        if self.schedule.watches:
            error = client.loss(v, "val")
            # The mean over no samples is 0.
            client.metrics[ERROR] = torch.where(error == 0, client.loss(v, "train"), error)
        silent = not len(tuple(received.keys()))
        return v, tree.empty() if silent else v

    def newcomer(self, state: TensorDict, received: TensorDict) -> TensorDict:
        if not self.schedule.changes:
            return received
        start: TensorDict = received["w"] if "w" in received.keys() else state  # noqa: SIM118
        return start

    def reductions(self, run: RunSetup) -> tuple[Reduction, ...]:
        if self.schedule.changes or self.lr_rule != "run" or self.batch_reuse:
            return ()
        local = self.steps_of_theory(run.train.lr) if self.local_steps == "theory" else self.local_steps
        train = as_settings(Length(steps=local))
        if self.first_lam == 0:
            return (Reduction.local("with λ = 0", **train),)
        if not run.everyone or self.server_step(self.first_lam) != 1:
            return ()
        options = {"lam": self.first_lam, "weights": self.weights}
        because = "with γ = 1/λ and all clients in every round"
        return (Reduction(because, "personal", "mr_mtl", "personal", options, train),)

    def _fit(
        self, client: Client, start: TensorDict, lam: float | Tensor, w: TensorDict | None
    ) -> TensorDict:
        """Return v_i after local training with a λ that is known beforehand, or that the server has sent."""
        prox, eta = None if w is None else (lam, w), self._eta(client, lam)
        return client.fit(start, prox=prox, length=self._length(client), optimizer=Optimizer(lr=eta))

    def _eta(self, client: Client, lam: float | Tensor) -> float | Tensor | None:
        """Return the theory's client step size for a λ in this round; None: the run's."""
        if self.lr_rule == "run":
            return None
        if isinstance(lam, Tensor):
            return self.client_step(lam) * client.config.decay
        return client.rate(float(self.client_step(torch.tensor(lam, dtype=torch.float64))))

    def _length(self, client: Client) -> Length:
        steps = self.steps_of_theory(client.config.lr) if self.local_steps == "theory" else self.local_steps
        if not self.batch_reuse:
            return Length(steps=steps)
        repeat = client.config.steps if steps is None else steps
        assert repeat is not None  # `server_state` checks it
        return Length(steps=1, repeat=repeat)

    # -- functions of λ -------------------------------------------------------------------------------------

    @property
    def first_lam(self) -> float:
        """λ of the first round, which is that of every round unless the schedule changes it."""
        return self.schedule.first(self.lam, self.convexity, self.smoothness)

    def lam_of(self, server: TensorDict) -> float:
        """Return λ of the next round."""
        return float(server["lam"]) if self.schedule.changes else self.first_lam

    def server_step(self, lam: float) -> float:
        """Return γλ: how far the server moves from w to the mean of the personal models."""
        return server_step(self.gamma, lam, self.smoothness)

    def client_step(self, lam: Tensor) -> Tensor:
        """Return η if it depends on λ, in the shape and dtype of `lam`."""
        assert self.lr_rule != "run"
        assert self.smoothness is not None
        return client_step(self.lr_rule, lam, self.convexity, self.smoothness)

    @property
    def pulls(self) -> tuple[float, ...]:
        """Every λ > 0 that is known beforehand."""
        values = self.schedule.ladder if isinstance(self.schedule, Dynamic) else (self.first_lam,)
        return tuple(lam for lam in values if lam > 0)

    def steps_of_theory(self, lr: float) -> int:
        """Return the smallest K of Theorem 2's proof for γ and η in use and the λ that needs most; `lr` is the run's η.

        Raises:
            ConfigError: no K meets the condition.
        """
        assert self.convexity is not None
        assert self.smoothness is not None
        mu, smoothness = self.convexity, self.smoothness

        def eta(lam: float) -> float:
            if self.lr_rule == "run":
                return lr
            return float(self.client_step(torch.tensor(lam, dtype=torch.float64)))

        return max(fewest_steps(lam, mu, smoothness, self.server_step(lam), eta(lam)) for lam in self.pulls)
