"""FedCLUP's rules (Yu et al., ICML 2025) for λ of the next round, and for the step sizes and local steps given λ.

    constant     λ is the method's `lam`
    corollary    Corollary 1, λ is its bound:     R ≤ 1/√n:  max(64κ²L, max(2κ, 5)·μ·s) − μ
                                                  else:      ρ²/(nμR²)
                 with s = (2L²R² + ρ²/n) / (L²R² + ρ²/N), N = n · clients
    heuristic    once, after round `switch` or the first later one with enough replies, from the clients' models:
                 R̂ = mean_i ‖v_i − w‖
                 λ = c/(n R̂²) if R̂ ≥ 1/√n, else c/(√n R̂)     (c = 5 in the paper's experiments)
    dynamic      after each round, from the validation error e_t:
                 (e_{t−p} − e_t)/|e_{t−p}| < tol  ⇒  λ = min(max(λ·factor, least), most), or the next of `values`

Corollary 1's constants are those of a proof: κ = 10 requires a λ of 6e4. The paper describes the dynamic rule in
prose only. λ only ever grows (a sentence under one figure says the opposite), and each λ is kept for at least p
rounds: e_{t−p} is then the last error of the previous λ. The first p + 1 rounds all have λ_0.

| symbol | here |
|---|---|
| R, ρ | `radius`, `rho` |
| n, N / n | `samples`, `clients` |
| c | `constant` |
| p | `patience` |
| λ_0, λ_min, λ_max | `start`, `least`, `most` |

Step sizes and number of local steps are functions of λ:

    server step γλ    "mean" 1;   "theory" (λ + L)/(2L), Corollary 2;   "edge" (λ + L)/L, the synthetic experiments
    client step η     "deterministic" 1/(λ + L), Corollary 2
                      "stochastic" min(μ(λ + L)/(4L(λ + μ)²), 1/(λ + L)), the theorem on mini-batches
    K                 the smallest with (2 + 64λ²/μ²) (1 − η(λ + μ))^K ≤ (1 − γL_g)⁴, L_g = λL/(λ + L), in the proof
                      of Theorem 2 (docs/theory.md)

Theorem 2 requires γ < 1/L_g = 1/λ + 1/L and η ≤ 1/(λ + L). "mean" is always below that, but slow if λ is much larger
than L, and needs many steps if λ is much smaller; "edge" is the boundary itself, and the fastest in practice, but
no K meets the condition there.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.messages import Replies
from tailorfl.errors import ConfigError
from tailorfl.theory.fedclup import fewest_steps as of_theory
from tailorfl.theory.fedclup_statistics import Problem, lambda_range
from tailorfl.training import tree

ERROR = "val"
"""Name of the validation error that a rule watches, among the numbers that clients report."""
ESTIMATED = "estimated"
"""Entry of the heuristic rule's memory once R has been estimated."""
ServerRule = Literal["mean", "theory", "edge"]
ClientRule = Literal["deterministic", "stochastic"]


class PenaltyRule(BaseModel):
    """The rule for λ of a round; a rule that changes λ keeps its memory in the server's state."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    changes: ClassVar[bool] = False
    """Whether λ may differ between rounds, so that the server has to send it."""
    watches: ClassVar[bool] = False
    """Whether clients report their validation error."""

    def first(self, lam: float, mu: float | None, smoothness: float | None) -> float:
        """Return λ of the first round; `lam` is the method's."""
        return lam

    def memory(self) -> TensorDict:
        """Return the rule's memory before the first round."""
        return tree.empty()

    def after(
        self, lam: float, memory: TensorDict, replies: Replies, w: TensorDict
    ) -> tuple[float, TensorDict]:
        """Return λ of the next round and the new memory; `w` is the model that clients had received."""
        return lam, memory


class Constant(PenaltyRule):
    """λ as given."""

    kind: Literal["constant"] = "constant"


class Corollary(PenaltyRule):
    """Corollary 1's bound for known constants."""

    kind: Literal["corollary"] = "corollary"
    radius: float = Field(ge=0, description="R, distance of the clients' true models from their centre")
    rho: float = Field(gt=0, description="ρ, noise of the gradient of one sample at the true model")
    samples: int = Field(ge=1, description="n, samples of a client")
    clients: int = Field(ge=1, description="number of clients")

    def first(self, lam: float, mu: float | None, smoothness: float | None) -> float:
        """Return the lower bound of λ if learning together pays off, else the upper one."""
        assert mu is not None
        assert smoothness is not None
        allowed = lambda_range(Problem(mu, smoothness, self.rho, self.radius, self.samples, self.clients))
        return allowed.lower if allowed.together else allowed.upper


class Heuristic(PenaltyRule):
    """One change of λ, by the heterogeneity that the server estimates."""

    kind: Literal["heuristic"] = "heuristic"
    changes: ClassVar[bool] = True
    switch: int = Field(ge=1, description="round after which R is estimated (half of all in the paper)")
    constant: float = Field(5.0, gt=0, description="c")
    samples: float | None = Field(
        None, ge=1, description="n, samples of a client; default: their mean in the federation"
    )
    most: float = Field(100.0, gt=0, description="largest λ, used if clients hardly differ")

    def after(
        self, lam: float, memory: TensorDict, replies: Replies, w: TensorDict
    ) -> tuple[float, TensorDict]:
        """Return λ for the estimated heterogeneity after round `switch`; after any other, λ as it is.

        If that round had too few replies, R is estimated after the next one that has enough.
        """
        if replies.round + 1 < self.switch or ESTIMATED in memory.keys():  # noqa: SIM118
            return lam, memory
        n = replies.context.samples if self.samples is None else self.samples
        scaled = math.sqrt(n) * float(distances(replies, w).mean())
        divisor = max(scaled, scaled**2)
        new = min(self.constant / divisor, self.most) if divisor else self.most
        return new, TensorDict({ESTIMATED: torch.tensor(1)})


class Dynamic(PenaltyRule):
    """λ grows whenever the validation error has stopped falling; λ = 0 trains locally and sends nothing."""

    kind: Literal["dynamic"] = "dynamic"
    changes: ClassVar[bool] = True
    watches: ClassVar[bool] = True
    values: tuple[float, ...] = Field(
        (), description="all values of λ, increasing; default: from start to most, each times factor"
    )
    start: float = Field(0.0, ge=0, description="λ_0")
    factor: float = Field(2.0, gt=1, description="factor from one λ to the next")
    least: float = Field(0.01, gt=0, description="λ_min, the smallest after 0")
    most: float = Field(10.0, gt=0, description="λ_max, the last")
    patience: int = Field(3, ge=1, description="rounds over which the error must fall")
    tol: float = Field(1e-3, description="required relative decrease; negative: allowed relative increase")

    @model_validator(mode="after")
    def _rising(self) -> Self:
        steps = zip(self.values, self.values[1:], strict=False)
        if any(a >= b for a, b in steps) or any(value < 0 for value in self.values):
            raise ValueError("values of λ must rise and not be negative")
        if not self.values and max(self.start, self.least) > self.most:
            raise ValueError("start and least must not be above most")
        fields = type(self).model_fields  # defaults that are written out, as in a result folder, do not count
        changed = {n for n in ("start", "factor", "least", "most") if getattr(self, n) != fields[n].default}
        if self.values and changed:
            raise ValueError(f"values already sets every λ; leave out {', '.join(sorted(changed))}")
        return self

    @property
    def ladder(self) -> tuple[float, ...]:
        """Every λ, in the order of use."""
        if self.values:
            return self.values
        out = [self.start]
        while out[-1] < self.most:
            out.append(min(max(out[-1] * self.factor, self.least), self.most))
        return tuple(out)

    def first(self, lam: float, mu: float | None, smoothness: float | None) -> float:
        """Return the smallest λ."""
        return self.ladder[0]

    def memory(self) -> TensorDict:
        """Return the initial memory: no errors yet (newest last), and 0 rounds with the current λ."""
        return TensorDict(
            {
                "errors": torch.full((self.patience + 1,), torch.inf, dtype=torch.float64),
                "held": torch.zeros((), dtype=torch.int64),
            }
        )

    def after(
        self, lam: float, memory: TensorDict, replies: Replies, w: TensorDict
    ) -> tuple[float, TensorDict]:
        """Return the next λ if the error has stopped falling."""
        errors = torch.cat([memory["errors"][1:], self.error(replies).reshape(1)])
        rounds = int(memory["held"]) + 1
        old, new = float(errors[0]), float(errors[-1])
        if rounds >= self.patience and math.isfinite(old) and old - new < self.tol * abs(old):
            lam, rounds = next((value for value in self.ladder if value > lam), lam), 0
        return lam, TensorDict({"errors": errors, "held": torch.tensor(rounds)})

    def error(self, replies: Replies) -> Tensor:
        """Return e_t: the mean of the errors that clients report, weighted as their models are, 0-d float64.

        A client of a deployment may keep its error to itself (NaN).
        """
        reported, weights = replies.metrics[ERROR].double(), replies.weights()
        heard = ~reported.isnan()
        error: Tensor = weights[heard] @ reported[heard] / (weights[heard].sum() / weights.sum())
        return error


def distances(replies: Replies, w: TensorDict) -> Tensor:
    """Return ‖v_i − w‖ over the parameters, [clients] float64."""
    clients = len(replies.clients)
    difference = replies.of_parameters(replies.stack) - replies.of_parameters(w)
    squares = [t.double().reshape(clients, -1).square().sum(1) for _, t in tree.leaves(difference)]
    return torch.stack(squares).sum(0).sqrt()


def _named(rule: Any) -> Any:
    return {"kind": rule} if isinstance(rule, str) else rule


PenaltySchedule = Annotated[
    Annotated[Constant | Corollary | Heuristic | Dynamic, Field(discriminator="kind")],
    BeforeValidator(_named),
]
"""A rule for λ: `{kind: dynamic, tol: 0.01}`, or its kind alone."""


def server_step(rule: ServerRule, lam: float, smoothness: float | None) -> float:
    """Return γλ: how far the server moves from w to the mean of the personal models (0 without a pull)."""
    if lam == 0 or rule == "mean" or smoothness is None:
        return 1.0 if lam > 0 else 0.0
    edge = 1.0 + lam / smoothness
    return edge if rule == "edge" else edge / 2.0


def client_step(rule: ClientRule, lam: Tensor, mu: float | None, smoothness: float) -> Tensor:
    """Return η, of the shape and dtype of `lam`; `mu` is for the stochastic rule only."""
    exact: Tensor = 1 / (lam + smoothness)
    if rule == "deterministic" or mu is None:
        return exact
    return torch.minimum(mu * (lam + smoothness) / (4 * smoothness * (lam + mu) ** 2), exact)


def fewest_steps(lam: float, mu: float, smoothness: float, server: float, eta: float) -> int:
    """Return the smallest K ≥ 1 of the proof for the server's step γλ = `server` and the clients' step η = `eta`.

    >>> fewest_steps(lam=1, mu=1, smoothness=10, server=1, eta=1 / 11)
    69

    Raises:
        ConfigError: no K meets the condition.
    """
    try:
        return of_theory(mu, smoothness, lam, server / lam, eta)
    except ConfigError as error:
        raise ConfigError(
            f"local_steps = theory: no number of steps keeps Theorem 2's rate for λ = {lam:g}: {error}; set lr_rule = "
            "deterministic and gamma = theory or mean, or give local_steps a number"
        ) from error
