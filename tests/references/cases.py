"""Which reference belongs to which method, and the cases both run.

The main case of a method runs under all training settings; those of `options.py` look at one option each.
"""

from __future__ import annotations

from collections.abc import Callable

from references import (
    adapters,
    apple,
    class_features,
    class_heads,
    clustering,
    collaborators,
    distillation,
    fairness,
    feature_pull,
    fedas,
    fedclup,
    fedem,
    gated_features,
    global_models,
    hypernetworks,
    initialised,
    plgu,
    ranks,
    split_models,
    two_models,
)
from references import settings as base
from references.options import OPTIONS
from references.plain import Outcome
from references.settings import Case

Reference = Callable[..., Outcome]
NORM_PART = {**base.SPLIT, "personal_part": "norm"}
EXTRACTOR = {**base.SPLIT, "personal_part": "extractor", "broadcast_all": False}
TUNED = {**base.AVERAGE, "ft_epochs": 2, "ft_scope": "all"}
BABU = {"weights": "samples", "personal_part": "head", "ft_epochs": 2, "ft_scope": "full"}
REP = {**base.SPLIT, "head_epochs": 2, "body_epochs": 1}
ALT = {**base.SPLIT, **base.PENALTY, "head_epochs": 1, "body_epochs": 2}
DITTO = {"weights": "samples", "lam": 0.6, "personal_epochs": 2, "dynamic_lam": (), "dynamic_every": "round"}

MAIN: dict[str, tuple[Reference, Case]] = {
    "local": (two_models.local, Case({"weights": "uniform"})),
    "local_average": (two_models.local_average, Case({"weights": "samples"})),
    "centralized": (global_models.centralized, Case({"weights": "uniform"})),
    "fedavg": (global_models.fedavg, Case(base.AVERAGE)),
    "cyclic": (global_models.cyclic, Case(base.CYCLIC, rounds=7)),
    "fedprox": (global_models.fedprox, Case({**base.AVERAGE, "mu": 0.5})),
    "fedsam": (global_models.fedsam, Case({**base.AVERAGE, "rho": 0.3})),
    "fedavg_ft": (global_models.fedavg_ft, Case(TUNED)),
    "fedit": (global_models.fedavg, Case({**base.AVERAGE, "averages": "factors"}, "lora")),
    "ffa_lora": (global_models.fedavg, Case(base.AVERAGE, "lora")),
    "fedsa_lora": (split_models.together, Case({**base.SPLIT, "personal_part": "lora_B"}, "lora")),
    "fedlora": (global_models.fedavg_ft, Case({**TUNED, "averages": "factors"}, "lora")),
    "scaffold": (global_models.scaffold, Case({"weights": "uniform", "global_lr": 0.7})),
    "feddyn": (global_models.feddyn, Case({"weights": "uniform", "alpha": 0.4, "scale_alpha": False})),
    "mr_mtl": (two_models.mr_mtl, Case({"weights": "uniform", "lam": 0.6, "mean_of": "all"})),
    "ditto": (two_models.ditto, Case(DITTO)),
    "pfedme": (two_models.pfedme, Case(base.PFEDME)),
    "apfl": (two_models.apfl, Case(base.APFL)),
    "l2gd": (two_models.l2gd, Case(base.L2GD, rounds=6)),
    "per_fedavg": (two_models.per_fedavg, Case(base.PER)),
    "fedclup": (fedclup.fedclup, Case(base.FEDCLUP)),
    "fedper": (split_models.together, Case(base.SPLIT)),
    "fedsim": (split_models.together, Case({**base.SPLIT, **base.PENALTY})),
    "fedbn": (split_models.together, Case(NORM_PART, "norm")),
    "lg_fedavg": (split_models.together, Case(EXTRACTOR)),
    "fedrep": (split_models.alternating, Case(REP)),
    "fedalt": (split_models.alternating, Case(ALT)),
    "fedbabu": (split_models.fedbabu, Case(BABU)),
    "feddf": (distillation.feddf, Case({"weights": "samples", "distil": base.DISTIL})),
    "perada": (distillation.perada, Case(base.PERADA, "half frozen")),
    "perfed_ckt": (distillation.perfed_ckt, Case(base.CKT)),
    "fedoa": (feature_pull.fedoa, Case(base.FEDOA, "lora")),
    "fedsdr": (feature_pull.fedsdr, Case(base.OA, "lora")),
    "plgu_lf": (plgu.plgu_lf, Case(base.LF, "deep")),
    "plgu_grep": (plgu.plgu_grep, Case(base.GREP, "deep")),
    "pfedhn": (hypernetworks.pfedhn, Case(base.PFEDHN)),
    "plgu_ghn": (hypernetworks.pfedhn, Case({**base.PFEDHN, "rho": 0.3})),
    "hypcluster": (clustering.hypcluster, Case({"weights": "samples", "clusters": 2})),
    "ifca": (clustering.ifca, Case(base.IFCA, rounds=3)),
    "fedfomo": (clustering.fedfomo, Case(base.FOMO, rounds=3)),
    # What it answers has a reference of its own, in tests/methods/test_knn_per.py.
    "knn_per": (global_models.deployed_everywhere, Case(base.AVERAGE)),
    "fedala": (initialised.fedala, Case(base.FEDALA, rounds=4)),
    "fedamp": (collaborators.fedamp, Case(base.FEDAMP, rounds=3)),
    "heurfedamp": (collaborators.heurfedamp, Case(base.HEURFEDAMP, rounds=3)),
    "qfedavg": (fairness.qfedavg, Case({"weights": "samples", "q": 1.5}, rounds=3)),
    "afl": (fairness.afl, Case({"weights": "uniform", "gamma": 0.2}, rounds=3)),
    "fednova": (fairness.fednova, Case({**base.AVERAGE, "mu": 0.0}, rounds=3)),
    "pfedgraph": (collaborators.pfedgraph, Case(base.PFEDGRAPH, rounds=3)),
    "cfl": (clustering.cfl, Case(base.CFL, rounds=4)),
    "moon": (class_features.moon, Case(base.MOON, rounds=3)),
    "fedas": (fedas.fedas, Case(base.FEDAS, rounds=3)),
    "fedem": (fedem.fedem, Case(base.FEDEM, rounds=3)),
    "apple": (apple.apple, Case({**base.APPLE, "weights": "uniform"}, rounds=4)),
    "fedphp": (class_features.fedphp, Case(base.FEDPHP, rounds=3)),
    "feddbe": (class_features.feddbe, Case(base.FEDDBE, rounds=3)),
    "fedrod": (class_features.fedrod, Case({**base.AVERAGE, "gamma": 0.7, "personal_rate": 0.6})),
    "fedproto": (class_features.fedproto, Case({"weights": "samples", "lam": 2.0}, rounds=3)),
    "fedgh": (class_heads.fedgh, Case(base.FEDGH, rounds=3)),
    "fedtgp": (class_heads.fedtgp, Case(base.FEDTGP, rounds=3)),
    "flexlora": (ranks.flexlora, Case({"weights": "samples", "ranks": (2, 1)}, "lora", rounds=3)),
    "flora": (ranks.flora, Case({"weights": "samples", "ranks": (2, 1)}, "lora", rounds=4)),
    "hetlora": (ranks.hetlora, Case(base.HETLORA, "lora", rounds=3)),
    "feddpa": (adapters.feddpa, Case(base.FEDDPA, "lora", rounds=3)),
    "fedcp": (gated_features.fedcp, Case({"weights": "samples", "lam": 3.0}, rounds=3)),
    "gpfl": (gated_features.gpfl, Case(base.GPFL, rounds=3)),
    "fedpac": (class_features.fedpac, Case(base.FEDPAC, rounds=3)),
}
REFERENCES: dict[str, tuple[Reference, list[Case]]] = {
    name: (reference, [case, *OPTIONS.get(name, [])]) for name, (reference, case) in MAIN.items()
}
