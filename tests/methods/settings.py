"""One row for every registered method.

Small hyper-parameters, its method card, and its optimum on quadratics.

The tests that run over the registry read this table, and `row` fails with the name of a method that is
not in it. So a new method gets all of them by adding one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from tailorfl.core.method import Method, make_method, methods
from tailorfl.testing.contract import Contract, Count, twice, whole
from tailorfl.testing.contract import nothing as none
from tailorfl.testing.small import CLASSES, Parts

LAM = 2.0
"""λ (or μ) of every method on the quadratics."""


def and_one(parts: Parts) -> int:
    """A model and a number beside it."""
    return parts.d + 1


def prototypes(parts: Parts) -> int:
    """C · d_z, from the head's C (d_z + 1) scalars."""
    return parts.head - CLASSES


def width(parts: Parts) -> int:
    """d_z, likewise."""
    return parts.head // CLASSES - 1


def guided(parts: Parts) -> int:
    """A body, an embedding of every class, and two layers of width d_z with their norms; likewise."""
    return parts.d - parts.head + prototypes(parts) + 2 * (width(parts) ** 2 + 3 * width(parts))


def gated(parts: Parts) -> int:
    """A model and a gate of width d_z; likewise."""
    return parts.d + 2 * width(parts) * (width(parts) + 1) + 4 * width(parts)


@dataclass(frozen=True)
class Card:
    """A line of the table of method cards.

    Scalars per sampled client and round, models that are evaluated.
    """

    down: Count
    up: Count
    trained: Count
    personal: bool
    shared: bool
    beside: Count = none
    """Scalars that training makes beside models: corrections, changes that are sent in place of a model."""


Kind = Literal["local", "pooled", "pooled_and_local", "local_and_mean", "coupled", "coupled_global", "ditto"]
"""Names of the optima in `quadratics.optimum`."""


@dataclass(frozen=True)
class Limit:
    """Where a method goes on quadratics with full batches, and with which settings."""

    kind: Kind
    steps: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """What the generated tests need to know about a method."""

    card: Card
    options: Mapping[str, Any] = field(default_factory=dict)
    """Makes it quick; never a value that turns the method into another one."""
    limit: Limit | None = None
    chooses: bool = False
    """Whether clients start with different models: their own, or picked among several by their data."""
    still: Mapping[str, Any] = field(default_factory=dict)
    """Options under which the server trains nothing itself, no step has a rate of its own, and all start alike."""
    by_round: Callable[[int, Parts], tuple[int, int]] | None = None
    """Parameter scalars (down, up) of a client in a round, counted from 0, where rounds differ; m = 2 are sampled."""
    alike: Mapping[str, Any] = field(default_factory=dict)
    """Options under which clients with equal data are equal: only private batches are drawn by a client's id."""
    sparse: bool = False
    """Whether messages leave out rows that are not there yet, or that a client has not: the card says the most."""
    indexed: bool = False
    """Whether the server keeps something of its own for every client id (an embedding)."""
    draws: bool = False
    """Whether a layer of its own draws noise by the client's id."""
    in_turn: bool = False
    """Whether one client a round takes part, in an order by ids, however the run samples."""
    own_rate: bool = False
    """Whether it takes steps at a rate of its own, whatever the run's."""
    mixes_samples: bool = False
    """Whether its loss compares the samples of a batch."""
    unweighted: bool = False
    """Whether no average counts clients by their samples."""
    over_all: bool = False
    """Whether the server's sums are over all clients, sampled or not."""
    not_on: tuple[str, ...] = ()
    """Models on which the method has nothing to split."""

    def contract(self, name: str) -> Contract:
        """What `tailorfl.testing` checks of the method."""
        return Contract(
            make_method(name, dict(self.options)),
            down=self.card.down,
            up=self.card.up,
            by_round=self.by_round,
            at_most=self.sparse,
            trained=self.card.trained,
            beside=self.card.beside,
            personal=self.card.personal,
            shared=self.card.shared,
            chooses=self.chooses,
            still=self.still,
            alike=self.alike,
            by_id=self.indexed or self.in_turn or self.draws,
            in_turn=self.in_turn,
            own_rate=self.own_rate,
            mixes_samples=self.mixes_samples,
            unweighted=self.unweighted,
            over_all=self.over_all,
            not_on=self.not_on,
        )


PROX_STEPS = 10
"""Steps that solve a proximal problem of the quadratics to float32 accuracy (contraction 1/4 a step)."""

ROWS: dict[str, Row] = {
    "local": Row(Card(none, none, whole, True, False), limit=Limit("local"), unweighted=True),
    # Only reports the mean of the local models: it is sent up and never comes back.
    "local_average": Row(Card(none, whole, whole, True, True), limit=Limit("local_and_mean")),
    "centralized": Row(Card(none, none, whole, False, True), limit=Limit("pooled"), unweighted=True),
    "fedavg": Row(Card(whole, whole, whole, False, True), limit=Limit("pooled")),
    "fedprox": Row(
        Card(whole, whole, whole, False, True),
        {"mu": 0.5},
        Limit("coupled_global", PROX_STEPS, {"mu": LAM}),
    ),
    "fedsam": Row(Card(whole, whole, whole, False, True), {"rho": 0.02}),
    "feddf": Row(
        Card(whole, whole, whole, False, True),
        {"distil": {"steps": 3, "batch_size": 4, "lr": 1e-3}},
        still={"distil": {"steps": 0}},
    ),
    "perada": Row(
        Card(whole, whole, twice, True, True),
        # Of a linear model the mean of the teachers' logits is what the student already gives: a gradient of nothing
        # but rounding, which Adam scales up to whole steps.
        {"lam": 0.5, "distil": {"steps": 3, "batch_size": 4, "lr": 1e-3, "average": "probabilities"}},
        Limit("ditto", 1, {"lam": LAM, "distil": {"steps": 0}}),
        still={"distil": {"steps": 0}},
    ),
    "fedit": Row(Card(whole, whole, whole, False, True)),
    "fedala": Row(Card(whole, whole, whole, True, True), {"first_passes": 2}, still={"eta": 0.0}),
    "fedamp": Row(
        Card(whole, whole, whole, True, False),
        {"lam": 0.5, "alpha": 0.5, "sigma": 2.0},
        Limit("local", 1, {"lam": 0.0}),
        unweighted=True,
    ),
    "heurfedamp": Row(
        Card(whole, whole, whole, True, False),
        {"lam": 0.5, "sigma": 2.0},
        Limit("local", 1, {"lam": 0.0}),
        unweighted=True,
    ),
    # Beside a change of the model a number: its curvature, a loss, the steps taken.
    "qfedavg": Row(Card(whole, and_one, whole, False, True), {"q": 0.5}, Limit("pooled", 1, {"q": 0.0})),
    "afl": Row(Card(whole, and_one, whole, False, True), unweighted=True),
    "fednova": Row(Card(whole, and_one, whole, False, True), limit=Limit("pooled")),
    "cyclic": Row(Card(whole, whole, whole, False, True), in_turn=True, unweighted=True),
    "fedphp": Row(Card(whole, whole, whole, True, True), {"lam": 0.3, "horizon": 2.0}),
    # The first round keeps no model and sends the mean features up; those of all go down beside every model.
    "feddbe": Row(
        Card(lambda s: s.d + width(s), whole, whole, True, False, lambda s: -s.d),
        {"kappa": 2.0, "mu": 0.5},
        by_round=lambda r, s: (s.d + width(s), s.d if r else width(s)),
    ),
    # h is sent and not trained; of the model with its gate 4 · 9 scalars. ½ (h_i + h) goes up.
    "fedcp": Row(Card(gated, gated, lambda s: s.d - 36, True, False, lambda s: 36), {"lam": 0.5}, draws=True),
    "gpfl": Row(Card(guided, guided, whole, True, False), {"lam": 0.1}, chooses=True),
    "pfedgraph": Row(Card(twice, whole, whole, True, False), {"lam": 0.1}),
    "cfl": Row(
        Card(whole, whole, whole, True, False), {"eps1": 1e3, "eps2": 0.0, "first_split": 0}, chooses=True
    ),
    "moon": Row(Card(whole, whole, whole, False, True), {"mu": 0.5, "tau": 1.0}),
    # Its weights are FedAvg's: what is its own is how a deployed model answers.
    "knn_per": Row(Card(whole, whole, whole, True, True), chooses=True),
    # A second head trains beside the model.
    "fedrod": Row(Card(whole, whole, lambda s: s.d + s.head, True, True)),
    "fedproto": Row(Card(prototypes, prototypes, whole, True, False), {"lam": 0.5}, sparse=True),
    # F_i goes up beside the body.
    "fedas": Row(
        Card(lambda s: s.d - s.head, lambda s: s.d - s.head + 1, whole, True, False),
        {"align_lr": 0.05},
        still={"align_epochs": 0},
        unweighted=True,
    ),
    # All cores but the own one go down, each beside its share; running statistics stay.
    "apple": Row(
        Card(lambda s: 4 * (s.d + 1), whole, whole, True, False),
        {"rate": 0.3, "mu": 0.5, "horizon": 3.0},
        indexed=True,
        unweighted=True,
    ),
    # Two networks travel, and are one model that trains; π is no parameter.
    "fedem": Row(Card(twice, twice, whole, True, False), {"components": 2}, chooses=True, over_all=True),
    # Its head has names that networks of all kinds have in common.
    "fedgh": Row(
        Card(lambda s: s.head, prototypes, whole, True, False, lambda s: -s.head),
        {"server_lr": 0.1},
        still={"server_lr": 0.0},
        alike={"server_lr": 0.0},
        sparse=True,
        unweighted=True,
    ),
    "fedtgp": Row(
        Card(prototypes, prototypes, whole, True, False),
        {"lam": 0.5, "server_passes": 2, "server_batch": 3},
        still={"predict": "head"},
        alike={"server_passes": 0},
        sparse=True,
    ),
    # Up M_i and class means, class counts and V_i beside the model.
    "fedpac": Row(
        Card(
            lambda s: s.d + prototypes(s),
            lambda s: s.d + 2 * prototypes(s) + CLASSES + 1,
            whole,
            True,
            False,
        ),
        {"lam": 0.5},
        chooses=True,
        sparse=True,
    ),
    # On a model without LoRA there is nothing to freeze, and no B to keep; see tests/methods/test_lora_factors.py.
    "hetlora": Row(Card(whole, whole, whole, True, True), chooses=True),
    "flexlora": Row(Card(whole, whole, whole, True, True), chooses=True),
    "feddpa": Row(Card(whole, whole, whole, True, True), chooses=True),
    "flora": Row(Card(whole, whole, whole, False, True), limit=Limit("pooled")),
    "ffa_lora": Row(Card(whole, whole, whole, False, True), limit=Limit("pooled")),
    "fedsa_lora": Row(
        Card(lambda s: s.d - s.head, lambda s: s.d - s.head, whole, True, False),
        {"personal_part": "head"},
        Limit("pooled", 1, {"personal_part": "none"}),
    ),
    "fedlora": Row(Card(whole, whole, whole, True, True), {"ft_epochs": 1}),
    # Some tests look at a single round, the first, in which personal models otherwise do not train yet.
    "fedoa": Row(
        Card(whole, whole, twice, True, True),
        {"lam": 0.5, "personal_start": 0},
        still={"own_init": False},
    ),
    "fedsdr": Row(
        Card(whole, whole, twice, True, True),
        {"lam": 0.5, "personal_start": 0},
        still={"own_init": False},
        mixes_samples=True,
    ),
    "scaffold": Row(Card(twice, twice, whole, False, True, whole), limit=Limit("pooled"), over_all=True),
    "feddyn": Row(
        Card(whole, whole, whole, False, True, whole),
        {"alpha": 0.1},
        Limit("pooled", PROX_STEPS, {"alpha": LAM}),
        over_all=True,
    ),
    "mr_mtl": Row(
        Card(whole, whole, whole, True, False, whole),
        {"lam": 0.5},
        Limit("coupled", PROX_STEPS, {"lam": LAM}),
        over_all=True,
    ),
    "fedavg_ft": Row(
        Card(whole, whole, whole, True, True),
        # 60 tuning epochs of one full batch each reach the client's own optimum.
        limit=Limit("pooled_and_local", 1, {"ft_epochs": 60}),
    ),
    "fedbn": Row(
        Card(lambda s: s.d - s.norm, lambda s: s.d - s.norm, whole, True, False),
        limit=Limit("pooled"),
    ),
    "fedper": Row(
        Card(lambda s: s.d - s.head, lambda s: s.d - s.head, whole, True, False),
        limit=Limit("pooled", 1, {"personal_part": "none"}),
    ),
    "fedrep": Row(
        Card(lambda s: s.d - s.head, lambda s: s.d - s.head, whole, True, False),
        {"head_epochs": 2},
        Limit("pooled", 1, {"personal_part": "none", "head_epochs": 0}),
    ),
    "lg_fedavg": Row(
        Card(lambda s: s.head, lambda s: s.head, whole, True, False),
        limit=Limit("pooled", 1, {"personal_part": "none"}),
        not_on=("logistic",),
    ),
    "fedalt": Row(
        Card(lambda s: s.d - s.head, lambda s: s.d - s.head, whole, True, False),
        {"head_epochs": 2},
        Limit("pooled", 1, {"personal_part": "none", "head_epochs": 0}),
    ),
    "fedsim": Row(
        Card(lambda s: s.d - s.head, lambda s: s.d - s.head, whole, True, False),
        limit=Limit("pooled", 1, {"personal_part": "none"}),
    ),
    "fedbabu": Row(
        # The head is part of the model that trains and never moves.
        Card(lambda s: s.d - s.head, lambda s: s.d - s.head, whole, True, True, lambda s: -s.head),
        {"ft_epochs": 1},
    ),
    # ω and θ are both new; θ takes plain steps, so on quadratics with D = 0 it is not a fixed point of anything simple.
    "plgu_lf": Row(Card(whole, whole, twice, True, True), {"rho": 0.02, "personal_layers": 1}),
    "plgu_grep": Row(
        Card(lambda s: s.d - s.head, lambda s: s.d - s.head, whole, True, False),
        {"head_epochs": 2, "rho": 0.02},
    ),
    "pfedhn": Row(
        Card(whole, whole, whole, True, False),
        {"hidden": 8, "depth": 1, "embedding": 3, "server_lr": 1e-3},
        chooses=True,
        indexed=True,
    ),
    "plgu_ghn": Row(
        Card(whole, whole, whole, True, False),
        {"hidden": 8, "depth": 1, "embedding": 3, "server_lr": 1e-3},
        chooses=True,
        indexed=True,
    ),
    # One matrix of 6 public samples and 4 classes up; two centroids down, none before the first upload.
    "perfed_ckt": Row(
        Card(lambda s: 2 * 24, lambda s: 24, whole, True, False),
        {"lam": 0.5, "public_batch": 4},
        chooses=True,
        by_round=lambda r, s: (2 * 24 * (r > 0), 24),
        alike={"own_init": False, "public_batch": 6},
    ),
    "per_fedavg": Row(Card(whole, whole, whole, True, True), {"alpha": 0.05}, still={"adapt_steps": 0}),
    "hypcluster": Row(
        Card(lambda s: 2 * s.d, whole, whole, True, False),
        limit=Limit("pooled", 1, {"clusters": 1}),
        chooses=True,
    ),
    "ifca": Row(Card(lambda s: 2 * s.d, whole, whole, True, False), {"clusters": 2}, chooses=True),
    # From the second round on: of 2 uploads the one that is not a client's own, and its Δ beside θ_i.
    "fedfomo": Row(
        Card(whole, whole, whole, True, False),
        chooses=True,
        by_round=lambda r, s: (s.d if r else 0, s.d + 1 if r else s.d),
        unweighted=True,
    ),
    # The coins of this seed are 0, 0, 0, 1, 1, 1, 0, 1: models go up at the end of round 2 and down in round 3.
    "l2gd": Row(
        Card(whole, whole, whole, True, True),
        {"coin_seed": 48, "per_round": "coin", "p": 0.5, "lam": 1.0},
        by_round=lambda r, s: (s.d * (r == 3), s.d * (r == 2)),
    ),
    "ditto": Row(Card(whole, whole, twice, True, True), {"lam": 0.5}, Limit("ditto", 1, {"lam": LAM})),
    "pfedme": Row(
        Card(whole, whole, twice, True, True),
        {"lam": 1.0, "inner_steps": 2, "local_rounds": 3, "lr": 0.1},
        Limit("coupled", 1, {"lam": LAM, "inner_steps": PROX_STEPS, "local_rounds": 1, "lr": 1 / LAM}),
        own_rate=True,
    ),
    "apfl": Row(
        Card(whole, whole, twice, True, True),
        {"alpha": 0.3, "adaptive": True},
        Limit("pooled_and_local", 1, {"alpha": 0.8}),
    ),
    "fedclup": Row(
        Card(whole, whole, whole, True, True),
        {"lam": 0.5},
        Limit("coupled", PROX_STEPS, {"lam": LAM}),
    ),
}

NAMES = tuple(methods())
"""Every registered method, in order of names."""


def in_turn(*ways: tuple[str, ...], names: Sequence[str] = NAMES) -> list[Any]:
    """(name, *way) of every method: one way each, in turn, in the quick suite, and the others among the slow tests."""
    return [
        pytest.param(name, *way, marks=[] if k % len(ways) == j else [pytest.mark.slow])
        for k, name in enumerate(names)
        for j, way in enumerate(ways)
    ]


def one_of(share: int, names: Sequence[str], turn: int = 0) -> list[Any]:
    """The names; one of `share` of them is in the quick suite, the others are among the slow tests.

    For what holds of all methods by one piece of code: a mistake in it shows in the few that stay. `turn` says which.
    """
    return [
        pytest.param(name, marks=[] if k % share == turn % share else [pytest.mark.slow])
        for k, name in enumerate(names)
    ]


def row(name: str) -> Row:
    """The row of a method; fails the running test, saying what to do, where there is none."""
    if name not in ROWS:
        pytest.fail(
            f"the method '{name}' is registered but has no row in ROWS of tests/methods/settings.py; add one"
        )
    return ROWS[name]


def make(name: str, **options: Any) -> Method:
    """The method with its quick options; `options` win."""
    return make_method(name, {**row(name).options, **options})


def with_limit() -> tuple[str, ...]:
    """The methods whose optimum on quadratics is known."""
    return tuple(name for name in NAMES if name in ROWS and ROWS[name].limit is not None)
