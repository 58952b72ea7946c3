"""Settings under which one method is another one: the table that `test_method_reductions.py` runs.

Every registered method stands in it, in `ROWS` of `settings.py` with a known optimum, or in `ELSEWHERE` with the test
that proves it; so a new method cannot be forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Which = Literal["personal", "global"]
TRAININGS: Mapping[str, Mapping[str, Any]] = {
    "plain steps": {"momentum": 0.0, "weight_decay": 0.0},
    "clip": {"clip": 0.3},
    "linear decay": {"schedule": "linear"},
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
    other_options: Mapping[str, Any] = field(default_factory=dict)
    which: Which = "global"
    other_which: Which = "global"
    exact: bool = True
    """To the bit; otherwise up to rounding, where both compute the same in another order."""
    train: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the training settings under which it holds."""
    models: tuple[str, ...] = ALL_MODELS


def fedavg(line: str, exact: bool = True, **options: Any) -> Same:
    """A global model that is FedAvg's."""
    return Same(line, options, "fedavg", exact=exact)


def local(exact: bool = True, **options: Any) -> Same:
    """A personal model that is LocalTrain's."""
    return Same("T03", options, "local", {}, "personal", "personal", exact)


def nothing_personal(line: str = "T04", **options: Any) -> Same:
    """A personal model that is FedAvg's global one, on every client."""
    return Same(line, options, "fedavg", {}, "personal", "global")


SHARED_HEAD = {"personal_part": "none"}
FULL_STEP = {"batch_size": 0, "steps": 1, "epochs": None}

REDUCTIONS: dict[str, tuple[Same, ...]] = {
    "fedprox": (fedavg("T01", mu=0.0),),
    "fedsam": (fedavg("T01", rho=0.0),),
    "feddf": (fedavg("T01", distil={"steps": 0}),),
    "hypcluster": (Same("T01", {"clusters": 1}, "fedavg", {}, "personal", "global"),),
    "fedavg_ft": (fedavg("T01", ft_epochs=3), nothing_personal("T01", ft_epochs=0)),
    "ditto": (
        fedavg("T02", exact=False, lam=0.0),
        fedavg("T02", exact=False, lam=0.7),
        local(lam=0.0),
    ),
    "perada": (
        fedavg("T02", distil={"steps": 0}),
        Same("T07", {"lam": 0.7, "distil": {"steps": 0}}, "ditto", {"lam": 0.7}, exact=False),
        Same(
            "T07",
            {"lam": 0.7, "distil": {"steps": 0}},
            "ditto",
            {"lam": 0.7},
            "personal",
            "personal",
            exact=False,
        ),
        Same(
            "T07",
            {"lam": 0.7, "variant": "released", "distil": {"steps": 0}},
            "perada",
            {"lam": 1.4, "distil": {"steps": 0}},
            "personal",
            "personal",
        ),
        Same("T07", {"distil": {"rounds": 0}}, "perada", {"distil": {"steps": 0}}),
        local(lam=0.0),
    ),
    "fedit": (fedavg("T07"),),
    "fedlora": (
        Same("T07", {"ft_epochs": 3}, "fedit"),
        Same("T07", {"ft_epochs": 0}, "fedit", {}, "personal", "global"),
    ),
    "fedoa": (
        Same("T07", {"lam": 0.0}, "fedit"),
        Same("T07", {"lam": 0.7, "distance": "batch_l2"}, "fedit"),
        local(lam=0.0, own_init=False, personal_start=0),
    ),
    "fedsdr": (
        Same("T07", {"lam": 0.7}, "fedit"),
        Same("T07", {"lam": 0.0}, "fedoa", {"lam": 0.0}, "personal", "personal"),
        local(lam=0.0, own_init=False, personal_start=0),
    ),
    "apfl": (
        *(fedavg("T02", exact=False, alpha=a, adaptive=False) for a in (0.0, 0.4, 1.0)),
        local(exact=False, alpha=1.0, adaptive=False),
    ),
    "fedclup": (local(lam=0.0),),
    "perfed_ckt": (local(lam=0.0, own_init=False),),
    # All three layers of the largest model of these tests are personal; θ takes plain steps beside ω's.
    "plgu_lf": (
        local(exact=False, personal_layers=3),
        fedavg("T09", exact=False, rho=0.0),
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
    "mr_mtl": (local(lam=0.0),),
    "fedfomo": (local(downloads=0),),
    "local_average": (local(),),
    "fedper": (
        nothing_personal(personal_part="none"),
        local(personal_part="all"),
        Same("T04", {}, "fedsim", {}, "personal", "personal"),
    ),
    "fedsim": (nothing_personal(**SHARED_HEAD), local(personal_part="all")),
    "fedrep": (
        nothing_personal(**SHARED_HEAD, head_epochs=0, body_epochs=1),
        local(personal_part="all", head_epochs=1, body_epochs=1),
        Same(
            "T04",
            {"head_epochs": 2},
            "fedalt",
            {"head_epochs": 2},
            "personal",
            "personal",
        ),
    ),
    "fedalt": (
        nothing_personal(**SHARED_HEAD, head_epochs=0, body_epochs=1),
        local(personal_part="all", head_epochs=1, body_epochs=1),
    ),
    "fedbn": (
        Same("T04", {}, "fedavg", {}, "personal", "global", models=("mlp", "dropout")),
        local(personal_part="all"),
    ),
    "lg_fedavg": (nothing_personal(**SHARED_HEAD), local(personal_part="all")),
    "plgu_grep": (),
}

ELSEWHERE = {
    "fedavg": "everything else is compared with it; test_fedavg_family.py and docs/test_fedavg_from_scratch.py",
    "local": "everything else is compared with it; test_local_centralized.py",
    "centralized": "one client: test_method_reductions.py",
    "fedbabu": "the frozen head: test_split_methods.py and test_clusters_and_parts.py",
    "plgu_grep": "FedRep with two steps on one batch at ρ = 0: test_plgu.py",
    "pfedhn": "the vjp: test_hypernetwork.py (T08)",
    "plgu_ghn": "ρ = 0 is pFedHN: test_hypernetwork.py (T08)",
    "per_fedavg": "directions on quadratics, α = 0: test_per_fedavg.py",
    "l2gd": "p to 0, time average: test_l2gd.py (T05)",
}
