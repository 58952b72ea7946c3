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
from references.options import OPTIONS
from references.plain import Outcome
from references.settings import (
    APFL,
    APPLE,
    AVERAGE,
    CFL,
    CKT,
    CYCLIC,
    DISTIL,
    FEDALA,
    FEDAMP,
    FEDAS,
    FEDCLUP,
    FEDDBE,
    FEDDPA,
    FEDEM,
    FEDGH,
    FEDOA,
    FEDPAC,
    FEDPHP,
    FEDTGP,
    FOMO,
    GPFL,
    GREP,
    HETLORA,
    HEURFEDAMP,
    IFCA,
    L2GD,
    LF,
    MOON,
    OA,
    PENALTY,
    PER,
    PERADA,
    PFEDGRAPH,
    PFEDHN,
    PFEDME,
    SPLIT,
    Case,
)

Reference = Callable[..., Outcome]
NORM_PART = {**SPLIT, "personal_part": "norm"}
EXTRACTOR = {**SPLIT, "personal_part": "extractor", "broadcast_all": False}
TUNED = {**AVERAGE, "ft_epochs": 2, "ft_scope": "all"}
BABU = {"weights": "samples", "personal_part": "head", "ft_epochs": 2, "ft_scope": "full"}
REP = {**SPLIT, "head_epochs": 2, "body_epochs": 1}
ALT = {**SPLIT, **PENALTY, "head_epochs": 1, "body_epochs": 2}
DITTO = {"weights": "samples", "lam": 0.6, "personal_epochs": 2, "dynamic_lam": (), "dynamic_every": "round"}

MAIN: dict[str, tuple[Reference, Case]] = {
    "local": (two_models.local, Case({"weights": "uniform"})),
    "local_average": (two_models.local_average, Case({"weights": "samples"})),
    "centralized": (global_models.centralized, Case({"weights": "uniform"})),
    "fedavg": (global_models.fedavg, Case(AVERAGE)),
    "cyclic": (global_models.cyclic, Case(CYCLIC, rounds=7)),
    "fedprox": (global_models.fedprox, Case({**AVERAGE, "mu": 0.5})),
    "fedsam": (global_models.fedsam, Case({**AVERAGE, "rho": 0.3})),
    "fedavg_ft": (global_models.fedavg_ft, Case(TUNED)),
    "fedit": (global_models.fedavg, Case({**AVERAGE, "averages": "factors"}, "lora")),
    "ffa_lora": (global_models.fedavg, Case(AVERAGE, "lora")),
    "fedsa_lora": (split_models.together, Case({**SPLIT, "personal_part": "lora_B"}, "lora")),
    "fedlora": (global_models.fedavg_ft, Case({**TUNED, "averages": "factors"}, "lora")),
    "scaffold": (global_models.scaffold, Case({"weights": "uniform", "global_lr": 0.7})),
    "feddyn": (global_models.feddyn, Case({"weights": "uniform", "alpha": 0.4, "scale_alpha": False})),
    "mr_mtl": (two_models.mr_mtl, Case({"weights": "uniform", "lam": 0.6, "mean_of": "all"})),
    "ditto": (two_models.ditto, Case(DITTO)),
    "pfedme": (two_models.pfedme, Case(PFEDME)),
    "apfl": (two_models.apfl, Case(APFL)),
    "l2gd": (two_models.l2gd, Case(L2GD, rounds=6)),
    "per_fedavg": (two_models.per_fedavg, Case(PER)),
    "fedclup": (fedclup.fedclup, Case(FEDCLUP)),
    "fedper": (split_models.together, Case(SPLIT)),
    "fedsim": (split_models.together, Case({**SPLIT, **PENALTY})),
    "fedbn": (split_models.together, Case(NORM_PART, "norm")),
    "lg_fedavg": (split_models.together, Case(EXTRACTOR)),
    "fedrep": (split_models.alternating, Case(REP)),
    "fedalt": (split_models.alternating, Case(ALT)),
    "fedbabu": (split_models.fedbabu, Case(BABU)),
    "feddf": (distillation.feddf, Case({"weights": "samples", "distil": DISTIL})),
    "perada": (distillation.perada, Case(PERADA, "half frozen")),
    "perfed_ckt": (distillation.perfed_ckt, Case(CKT)),
    "fedoa": (feature_pull.fedoa, Case(FEDOA, "lora")),
    "fedsdr": (feature_pull.fedsdr, Case(OA, "lora")),
    "plgu_lf": (plgu.plgu_lf, Case(LF, "deep")),
    "plgu_grep": (plgu.plgu_grep, Case(GREP, "deep")),
    "pfedhn": (hypernetworks.pfedhn, Case(PFEDHN)),
    "plgu_ghn": (hypernetworks.pfedhn, Case({**PFEDHN, "rho": 0.3})),
    "hypcluster": (clustering.hypcluster, Case({"weights": "samples", "clusters": 2})),
    "ifca": (clustering.ifca, Case(IFCA, rounds=3)),
    "fedfomo": (clustering.fedfomo, Case(FOMO, rounds=3)),
    # What it answers has a reference of its own, in tests/methods/test_knn_per.py.
    "knn_per": (global_models.deployed_everywhere, Case(AVERAGE)),
    "fedala": (initialised.fedala, Case(FEDALA, rounds=4)),
    "fedamp": (collaborators.fedamp, Case(FEDAMP, rounds=3)),
    "heurfedamp": (collaborators.heurfedamp, Case(HEURFEDAMP, rounds=3)),
    "qfedavg": (fairness.qfedavg, Case({"weights": "samples", "q": 1.5}, rounds=3)),
    "afl": (fairness.afl, Case({"weights": "uniform", "gamma": 0.2}, rounds=3)),
    "fednova": (fairness.fednova, Case({**AVERAGE, "mu": 0.0}, rounds=3)),
    "pfedgraph": (collaborators.pfedgraph, Case(PFEDGRAPH, rounds=3)),
    "cfl": (clustering.cfl, Case(CFL, rounds=4)),
    "moon": (class_features.moon, Case(MOON, rounds=3)),
    "fedas": (fedas.fedas, Case(FEDAS, rounds=3)),
    "fedem": (fedem.fedem, Case(FEDEM, rounds=3)),
    "apple": (apple.apple, Case({**APPLE, "weights": "uniform"}, rounds=4)),
    "fedphp": (class_features.fedphp, Case(FEDPHP, rounds=3)),
    "feddbe": (class_features.feddbe, Case(FEDDBE, rounds=3)),
    "fedrod": (class_features.fedrod, Case({**AVERAGE, "gamma": 0.7, "personal_rate": 0.6})),
    "fedproto": (class_features.fedproto, Case({"weights": "samples", "lam": 2.0}, rounds=3)),
    "fedgh": (class_heads.fedgh, Case(FEDGH, rounds=3)),
    "fedtgp": (class_heads.fedtgp, Case(FEDTGP, rounds=3)),
    "flexlora": (ranks.flexlora, Case({"weights": "samples", "ranks": (2, 1)}, "lora", rounds=3)),
    "flora": (ranks.flora, Case({"weights": "samples", "ranks": (2, 1)}, "lora", rounds=4)),
    "hetlora": (ranks.hetlora, Case(HETLORA, "lora", rounds=3)),
    "feddpa": (adapters.feddpa, Case(FEDDPA, "lora", rounds=3)),
    "fedcp": (gated_features.fedcp, Case({"weights": "samples", "lam": 3.0}, rounds=3)),
    "gpfl": (gated_features.gpfl, Case(GPFL, rounds=3)),
    "fedpac": (class_features.fedpac, Case(FEDPAC, rounds=3)),
}
REFERENCES: dict[str, tuple[Reference, list[Case]]] = {
    name: (reference, [case, *OPTIONS.get(name, [])]) for name, (reference, case) in MAIN.items()
}
