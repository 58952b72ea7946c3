"""Settings under which one method is another one: the table that `test_method_reductions.py` runs.

Every registered method stands in it, in `ROWS` of `settings.py` with a known optimum, or in `ELSEWHERE` with the test
that proves it; so a new method cannot be forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Which = Literal["personal", "global"]
TRAININGS: Mapping[str, Mapping[str, Any]] = {
    "plain steps": {"momentum": 0.0, "weight_decay": 0.0, "clip": 0.3},
    "linear decay": {"clip": 0.3, "schedule": "linear"},
    "adamw": {"optimizer": "adamw", "momentum": 0.0, "lr": 0.01, "clip": 0.3, "schedule": "linear"},
}
"""Changes of the training settings, which have momentum, weight decay and a constant rate. Every row of the table holds
under each of them: a row that did not would have to name those it needs in its `train`.
"""
ALL_MODELS = ("mlp", "batch_norm", "dropout")


@dataclass(frozen=True)
class Same:
    """`which` model of a method with `options` is `other_which` model of `other` with `other_options`."""

    line: str
    """Of the matrix of cross-method tests."""
    options: Mapping[str, Any]
    other: str
    """"" for the model that was drawn at the start."""
    other_options: Mapping[str, Any] = field(default_factory=dict)
    which: Which = "global"
    other_which: Which = "global"
    exact: bool = True
    """To the bit; otherwise up to rounding, where both compute the same in another order."""
    train: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the training settings under which it holds."""
    models: tuple[str, ...] = ALL_MODELS
    said: bool = False
    """Whether the method names the other one before a run with these settings."""
    other_train: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the training settings of the other method, on top of `train`."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Changes of rounds and fraction."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """`sizes` of the clients, `validation` = False for none."""


def fedavg(line: str, exact: bool = True, said: bool = False, **options: Any) -> Same:
    """A global model that is FedAvg's."""
    return Same(line, options, "fedavg", exact=exact, said=said)


def local(exact: bool = True, line: str = "T03", said: bool = True, **options: Any) -> Same:
    """A personal model that is LocalTrain's."""
    return Same(line, options, "local", {}, "personal", "personal", exact, said=said)


def nothing_personal(line: str = "T04", other: str = "fedavg", said: bool = True, **options: Any) -> Same:
    """A personal model that is FedAvg's global one, on every client."""
    return Same(line, options, other, {}, "personal", "global", said=said)


def drawn(which: Which, **options: Any) -> Same:
    """A model that stays as it was drawn."""
    return Same("drawn", options, "", {}, which, "global", exact=False, said=True, models=("mlp", "dropout"))


def pac_is_rep(head_epochs: int = 1, **options: Any) -> Same:
    """FedPAC without what makes it itself."""
    options, other = {**options, "head_epochs": head_epochs}, {"head_epochs": head_epochs, "body_epochs": 1}
    return Same("FedRep", options, "fedrep", other, "personal", "personal", exact=False, said=True)


def in_run(same: Same, **run: Any) -> Same:
    """The same, said in a run of other rounds or another fraction."""
    return replace(same, run=run, said=True)


def own_start(same: Same) -> Same:
    """The same, of clients that each draw an initial model."""
    return replace(same, options={**same.options, "own_init": True}, other_options={"own_init": True})


SHARED_HEAD = {"personal_part": "none"}
SGD = {"optimizer": "sgd", "schedule": "constant"}
FULL_STEP = {"batch_size": 0, "steps": 1, "epochs": None}
QUICK_HN = {"hidden": 8, "depth": 1, "embedding": 3, "server_lr": 1e-3}
ONE = {"epochs": 1, "steps": None}
THREE = {"epochs": 3, "steps": None}
PLAIN = {"momentum": 0.0, "weight_decay": 0.0, "optimizer": "sgd", "schedule": "constant"}


def ditto_of_perada(which: Which, said: bool = True, lam: float = 0.7, **options: Any) -> Same:
    """PerAda without distillation."""
    other = {"lam": lam}
    return Same("T07", {"lam": 0.7, **options}, "ditto", other, which, which, exact=False, said=said)


HALF = {"server": {"lr": 0.5}}
ALONE = {"lam": 0.0, "own_init": True}
WITHOUT = {"distil": {"steps": 0}}

REDUCTIONS: dict[str, tuple[Same, ...]] = {
    "fedavg": (
        Same("one client", {}, "centralized", said=True, data={"sizes": (11,)}),
        in_run(Same("visits", {}, "cyclic"), sampling="cyclic", fraction=1.0),
        in_run(Same("visits", {}, "cyclic", {"order": "fixed"}), sampling="cyclic_fixed", fraction=1.0),
    ),
    "cyclic": (Same("one client", {}, "centralized", said=True, data={"sizes": (11,)}),),
    "fedit": (
        fedavg("T07"),
        Same("one client", {}, "centralized", said=True, data={"sizes": (11,)}),
    ),
    "ffa_lora": (fedavg("no LoRA", said=True),),
    "flexlora": (fedavg("no LoRA", said=True), nothing_personal("no LoRA")),
    "flora": (fedavg("no LoRA", said=True),),
    "hetlora": (fedavg("no LoRA", said=True), nothing_personal("no LoRA")),
    "feddpa": (fedavg("no LoRA", said=True), nothing_personal("no LoRA")),
    "fedsa_lora": (
        nothing_personal("no LoRA", personal_part="lora_B"),
        nothing_personal(**SHARED_HEAD),
        local(personal_part="all"),
    ),
    "fedprox": (
        fedavg("T01", mu=0.0, said=True),
        Same("one step", {"mu": 0.5}, "fedavg", exact=False, said=True, train={"steps": 1, "epochs": None}),
        Same("one step", {"mu": 0.5}, "fedavg", exact=False, said=True, train={"batch_size": 0, "epochs": 1}),
    ),
    "fedsam": (
        fedavg("T01", rho=0.0, said=True),
        fedavg("T01", rho=0.0, said=True),
    ),
    "scaffold": (
        in_run(replace(fedavg("one round", exact=False), other_train=PLAIN), rounds=1),
        # With batch norm a client of one sample takes no step, and no correction.
        in_run(
            replace(
                fedavg("one step", exact=False),
                train=FULL_STEP,
                other_train=PLAIN,
                models=("mlp", "dropout"),
            ),
            fraction=1.0,
        ),
    ),
    "feddf": (
        fedavg("T01", distil={"steps": 0}, said=True),
        fedavg("T01", distil={"rounds": 0}, said=True),
    ),
    "hypcluster": (Same("T01", {"clusters": 1}, "fedavg", {}, "personal", "global", said=True),),
    "ifca": (
        Same("T01", {"clusters": 1}, "fedavg", {}, "personal", "global", said=True),
        Same("T01", {"clusters": 1, "warm_rounds": 2}, "fedavg", {}, "personal", "global", said=True),
        Same(
            "gradients",
            {"clusters": 1, "send": "gradients"},
            "fedavg",
            {},
            "personal",
            "global",
            exact=False,
            said=True,
            other_train={**FULL_STEP, **PLAIN},
            models=("mlp", "dropout"),
        ),
    ),
    "fedala": (
        fedavg("η_W = 0", eta=0.0, said=True),
        nothing_personal("η_W = 0", eta=0.0),
        in_run(fedavg("one round"), rounds=1),
        replace(
            local(line="W = 0", said=False, mixed_part="all", start=0.0, eta=0.0), models=("mlp", "dropout")
        ),
    ),
    "fedamp": (local(lam=0.0),),
    "heurfedamp": (local(lam=0.0),),
    "qfedavg": (replace(fedavg("q = 0", exact=False, q=0.0, said=True), other_train=PLAIN),),
    "fednova": (
        # With batch norm a client of one sample takes no step.
        replace(
            fedavg("equal steps", exact=False, said=True),
            train={"steps": 3, "epochs": None},
            models=("mlp", "dropout"),
            other_train=SGD,
        ),
        in_run(replace(fedavg("one client a round", exact=False), other_train=SGD), fraction=0.2),
    ),
    "pfedgraph": (
        in_run(local(line="one round"), rounds=1),
        in_run(local(line="one client a round", lam=0.0), fraction=0.2),
    ),
    "cfl": (
        nothing_personal("before a split", first_split=20),
        replace(nothing_personal("two clients", first_split=0), data={"sizes": (7, 9)}),
    ),
    "moon": (
        fedavg("μ = 0", mu=0.0, said=True),
        fedavg("Q = 0", history=0, said=True),
        in_run(fedavg("one round"), rounds=1),
    ),
    "knn_per": (
        fedavg("λ = 0", lam=0.0, said=True),
        nothing_personal("λ = 0", lam=0.0),
        fedavg("empty memory", capacity=0, said=True),
        nothing_personal("empty memory", capacity=0),
    ),
    "fedrod": (
        fedavg("γ = 0", exact=False, gamma=0.0, said=True),
        Same(
            "κ = 0", {"personal_rate": 0.0}, "fedrod", {"personal_rate": 0.0}, "personal", "global", said=True
        ),
        Same("global path", {"personal_rate": 3.0}, "fedrod", {"personal_rate": 0.5}),
    ),
    "fedproto": (local(lam=0.0), in_run(local(line="one round", lam=5.0), rounds=1)),
    "fedas": (in_run(local(line="one round", align_epochs=0), rounds=1),),
    "fedgh": (in_run(local(line="one round"), rounds=1),),
    "fedtgp": (
        local(lam=0.0, predict="head"),
        in_run(local(line="one round", lam=5.0, predict="head"), rounds=1),
    ),
    "fedpac": (
        pac_is_rep(lam=0.0, mix=False),
        pac_is_rep(lam=0.0, mix=False, head_epochs=2),
        in_run(pac_is_rep(lam=0.5, mix=False), rounds=1),
        in_run(pac_is_rep(lam=0.0), fraction=0.2),
    ),
    "fedphp": (fedavg("λ = 0", lam=0.0, said=True), fedavg("λ = 0", lam=0.0, teach="mmd", said=True)),
    "fedavg_ft": (
        fedavg("T01", ft_epochs=3),
        nothing_personal("T01", ft_epochs=0),
        fedavg("T01", ft_epochs=0, said=True),
    ),
    "ditto": (
        fedavg("T02", exact=False, lam=0.0),
        fedavg("T02", exact=False, lam=0.7),
        local(lam=0.0),
        local(lam=0.7, dynamic_lam=(0.0, 0.0)),
        replace(
            local(exact=False, dynamic_lam=(0.0, 0.0), dynamic_every="step"),
            other_train=PLAIN,
            models=("mlp",),
        ),
        replace(local(lam=0.0, personal_epochs=3), other_train=THREE),
        drawn("personal", personal_epochs=0),
    ),
    "perada": (
        fedavg("T02", lam=0.7, **WITHOUT),
        ditto_of_perada("global", **WITHOUT),
        ditto_of_perada("personal", **WITHOUT),
        ditto_of_perada("global", lam=1.4, variant="released", **WITHOUT),
        ditto_of_perada("personal", lam=1.4, variant="released", **WITHOUT),
        ditto_of_perada("global", distil={"rounds": 0}),
        ditto_of_perada("personal", distil={"rounds": 0}),
        local(lam=0.0),
        replace(local(lam=0.0, personal_epochs=3, personal_lr=0.02), other_train={**THREE, "lr": 0.02}),
        drawn("personal", personal_epochs=0),
    ),
    "fedlora": (
        Same("T07", {"ft_epochs": 3}, "fedit"),
        nothing_personal("T07", "fedit", ft_epochs=0),
        Same("T07", {"ft_epochs": 0}, "fedit", said=True),
    ),
    "fedoa": (
        Same("T07", {"lam": 0.2}, "fedit"),
        Same("T07", {"lam": 0.7, "distance": "batch_l2"}, "fedit"),
        local(lam=0.0, own_init=False, personal_start=0),
        in_run(drawn("personal", personal_start=2, own_init=False), rounds=2),
    ),
    "fedsdr": (
        Same("T07", {"lam": 0.7}, "fedit"),
        Same("T07", ALONE, "fedoa", ALONE, "personal", "personal"),
        local(lam=0.0, own_init=False, personal_start=0),
        replace(
            local(exact=False, lam=0.7, own_init=False, personal_start=0),
            train={"batch_size": 1},
            models=("mlp",),
        ),
        in_run(drawn("personal", personal_start=2, own_init=False), rounds=2),
    ),
    "apple": (local(rate=0.0, prior="own"),),
    "apfl": (
        *(fedavg("T02", exact=False, alpha=a, adaptive=False) for a in (0.0, 0.4, 1.0)),
        local(exact=False, alpha=1.0, adaptive=False),
    ),
    "fedclup": (
        local(lam=0.0),
        replace(local(lam=0.0, local_steps=2), other_train={"steps": 2, "epochs": None}),
        in_run(
            Same("everyone", {"lam": 0.7}, "mr_mtl", {"lam": 0.7}, "personal", "personal", exact=False),
            fraction=1.0,
        ),
    ),
    "pfedme": (
        Same(
            "ηλ = 1",
            {"lam": 4.0, "lr": 0.25, "inner_steps": 1, "local_rounds": 5},
            "fedavg",
            exact=False,
            said=True,
            other_train={**PLAIN, "weight_decay": 0.01, "steps": 5, "epochs": None},
        ),
        Same(
            "ηλ = 1",
            {
                "lam": 4.0,
                "lr": 0.25,
                "inner_steps": 1,
                "beta": 0.5,
                "personal_lr": 0.02,
            },
            "fedavg",
            {"server": {"lr": 0.5}},
            exact=False,
            said=True,
            other_train={**PLAIN, "weight_decay": 0.01, "steps": 3, "epochs": None, "lr": 0.02},
        ),
        Same(
            "ηλ = 1",
            {"lam": 0.5, "lr": 2.0, "personal_epochs": 3},
            "fedclup",
            {"lam": 0.5},
            "personal",
            "personal",
            exact=False,
            said=True,
            other_train={**THREE, "weight_decay": 0.01},
        ),
        drawn("global", lam=0.0),
        drawn("global", beta=0.0),
    ),
    "perfed_ckt": (
        local(lam=0.0, own_init=False),
        own_start(local(lam=0.0)),
        in_run(local(own_init=False, line="one round"), rounds=1),
        in_run(own_start(local(warm_rounds=2, line="warm rounds")), rounds=3),
        in_run(drawn("personal", own_init=False, first_round="upload"), rounds=1),
    ),
    # All three layers of the largest model of these tests are personal; θ takes plain steps beside ω's.
    "plgu_lf": (
        local(exact=False, personal_layers=3),
        fedavg("T09", exact=False, rho=0.0, said=True),
        Same(
            "T09",
            {"rho": 0.02, "personal_layers": 0, "score_norm": "ones"},
            "fedsam",
            {"rho": 0.02},
            exact=False,
            train=FULL_STEP,
            models=("mlp",),
        ),
    ),
    "plgu_ghn": (
        Same(
            "T08",
            {"rho": 0.0},
            "pfedhn",
            QUICK_HN,
            "personal",
            "personal",
            said=True,
            models=("mlp",),
        ),
    ),
    "mr_mtl": (local(lam=0.0),),
    "fedfomo": (
        local(downloads=0),
        in_run(local(line="one client a round"), fraction=0.2),
        in_run(local(line="one round"), rounds=1),
        replace(local(line="no validation", exact=False), data={"validation": False}),
    ),
    "l2gd": (
        # The coins of this seed are 0, 0, 0, 1.
        in_run(
            Same(
                "T05",
                {"coin_seed": 48},
                "local",
                {"participation": "all"},
                "personal",
                "personal",
                other_train={"steps": 1, "epochs": None},
            ),
            rounds=3,
        ),
    ),
    "per_fedavg": (
        Same("A = 0", {"adapt_steps": 0}, "per_fedavg", {"adapt_steps": 0}, "personal", "global", said=True),
    ),
    "local_average": (local(said=False),),
    "fedper": (
        nothing_personal(personal_part="none"),
        local(personal_part="all"),
        Same("T04", {}, "fedsim", {}, "personal", "personal"),
    ),
    "fedsim": (
        nothing_personal(**SHARED_HEAD),
        local(personal_part="all"),
        replace(
            nothing_personal(personal_part="none", server_lr=0.5, lam=0.3), other_options=HALF, exact=False
        ),
    ),
    "fedrep": (
        replace(nothing_personal(**SHARED_HEAD, head_epochs=0, body_epochs=1), other_train=ONE),
        replace(nothing_personal(**SHARED_HEAD, head_epochs=2, body_epochs=3), other_train=THREE),
        replace(local(personal_part="all", head_epochs=1, body_epochs=1), other_train=ONE),
        replace(local(personal_part="all", head_epochs=3, body_epochs=2), other_train=THREE),
        Same(
            "T04",
            {"head_epochs": 2},
            "fedalt",
            {"head_epochs": 2},
            "personal",
            "personal",
        ),
        Same(
            "T04",
            {"head_epochs": 0, "body_epochs": 3},
            "fedbabu",
            {"ft_epochs": 0},
            "personal",
            "personal",
            said=True,
            other_train=THREE,
        ),
    ),
    "fedalt": (
        replace(nothing_personal(**SHARED_HEAD, head_epochs=0, body_epochs=1), other_train=ONE),
        replace(local(personal_part="all", head_epochs=1, body_epochs=1), other_train=ONE),
    ),
    "fedbn": (
        Same("T04", {}, "fedavg", {}, "personal", "global", models=("mlp", "dropout"), said=True),
        local(personal_part="all"),
    ),
    "lg_fedavg": (nothing_personal(**SHARED_HEAD), local(personal_part="all")),
    "fedbabu": (
        Same("E_ft = 0", {"ft_epochs": 0}, "fedbabu", {"ft_epochs": 0}, "personal", "global", said=True),
        Same(
            "T04",
            {"personal_part": "none", "ft_epochs": 2},
            "fedavg_ft",
            {"ft_epochs": 2},
            "personal",
            "personal",
            said=True,
        ),
        drawn("global", personal_part="all"),
    ),
    "plgu_grep": (
        Same(
            "T09",
            {"body_steps": 0},
            "fedrep",
            {"head_epochs": 2, "body_epochs": 0},
            "personal",
            "personal",
            said=True,
        ),
        replace(local(personal_part="all", head_epochs=3), other_train=THREE),
    ),
}

REMARKS: dict[str, tuple[tuple[Mapping[str, Any], str, str], ...]] = {
    "fedem": (({"components": 1, "normalise": "cohort"}, "logarithms of probabilities", "test_fedem.py"),),
    "fedoa": (
        ({"lam": 0.0, "personal_start": 1}, "trains personal models alone", "test_reduction_remarks.py"),
    ),
    "fedsdr": (
        ({"lam": 0.0, "own_init": True}, "trains personal models alone", "test_reduction_remarks.py"),
    ),
    "apfl": (({"alpha": 0.0, "adaptive": False}, "deploys copies", "test_method_reductions.py"),),
    "pfedme": (
        (
            {"lam": 4.0, "lr": 0.25, "inner_steps": 3},
            "deploys what clients send",
            "test_reduction_remarks.py",
        ),
    ),
    "per_fedavg": (({"alpha": 0.0}, "second of every two", "test_per_fedavg.py"),),
    "perfed_ckt": (
        (
            {"lam": 0.0, "own_init": False, "first_round": "upload", "warm_rounds": 1},
            "in all rounds but round 2",
            "test_reduction_remarks.py",
        ),
        (
            {"lam": 0.0, "own_init": False, "first_round": "upload"},
            "from the second round on",
            "test_reduction_remarks.py",
        ),
        ({"clusters": 1}, "without clusters", "test_perfed_ckt.py"),
        ({"clusters": 3}, "cluster of its own", "test_reduction_remarks.py"),
    ),
    "plgu_lf": (({"personal_layers": 0}, "no layer stays personal", "test_plgu.py"),),
    "plgu_grep": (({"rho": 0.0}, "two plain steps", "test_plgu.py"),),
    "fedrep": (({"body_epochs": 0}, "never trains what clients share", "test_reduction_remarks.py"),),
    "fedalt": (({"body_epochs": 0}, "never trains what clients share", "test_reduction_remarks.py"),),
    "fedsim": (({"personal_part": "all", "lam": 0.5}, "with its penalty", "test_reduction_remarks.py"),),
    "fedper": (
        ({"personal_part": "all", "final_personal_epochs": 1}, "more epochs", "test_reduction_remarks.py"),
    ),
}
"""Settings under which a method is something simple that has no name here: (options, words, where it is proved)."""

NEVER_SAID = {
    "afl": "one plain step a round, and the model that is used is the mean over rounds",
    "local": "the end itself",
    "local_average": "LocalTrain's personal models whatever its settings",
    "centralized": "the end itself",
    "feddyn": "α > 0, and its server step differs from an average from the first round on",
    "feddbe": "its first round keeps nothing, so it is FedAvg of a round less at most",
    "fedcp": "the gate cannot be told to give all to one head",
    "gpfl": "the loss of its embeddings cannot be turned off",
    "pfedhn": "the hypernetwork cannot be turned off",
}

ELSEWHERE = {
    "fedavg": "everything else is compared with it; test_fedavg_family.py and docs/test_fedavg_from_scratch.py",
    "local": "everything else is compared with it; test_local_centralized.py",
    "centralized": "one client: test_method_reductions.py",
    "fedem": "one network is FedAvg: test_fedem.py",
    "fedbabu": "the frozen head: test_split_methods.py and test_clusters_and_parts.py",
    "plgu_grep": "FedRep with two steps on one batch at ρ = 0: test_plgu.py",
    "feddbe": "without pull and bias FedAvg from the second round on: test_feddbe.py",
    "fedcp": "FedPer where the gate gives the personal head all: test_fedcp.py",
    "gpfl": "FedPer without its guide: test_gpfl.py",
    "pfedhn": "the vjp: test_hypernetwork.py (T08)",
    "per_fedavg": "directions on quadratics, α = 0: test_per_fedavg.py",
    "afl": "its mixture does not move, or to the worst client; a saddle: test_fairness.py",
    "l2gd": "p to 0, time average: test_l2gd.py (T05)",
}
