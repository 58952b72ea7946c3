"""Which reference belongs to which method, and with which options both run.

Every hyper-parameter is given, so that a default may change. The first case of a method runs under all training
settings; the others, which look at one option each, under one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from references import (
    clustering,
    distillation,
    feature_pull,
    fedclup,
    global_models,
    hypernetworks,
    plgu,
    split_models,
    two_models,
)
from references.plain import Outcome

Reference = Callable[..., Outcome]


@dataclass(frozen=True)
class Case:
    """Options of a method; `rename` maps an option to the reference's name of it."""

    options: Mapping[str, Any]
    model: str = "mlp"
    why: str = "main"
    rename: Mapping[str, str] = field(default_factory=dict)
    rounds: int = 2
    train: str = "plain"

    def given(self) -> dict[str, Any]:
        """The options as the reference takes them."""
        return {self.rename.get(n, n): v for n, v in self.options.items()}


SERVER = {"kind": "sgd", "lr": 1.0, "momentum": 0.0, "beta2": 0.999, "eps": 1e-8, "initial": 0.0}
AVERAGE = {"weights": "samples", "server": SERVER}
SPLIT = {"weights": "samples", "personal_part": "head", "final_personal_epochs": 0}
DISTIL = {
    "steps": 3,
    "lr": 0.01,
    "batch_size": 4,
    "temperature": 1.0,
    "average": "logits",
    "link": "softmax",
    "rounds": None,
    "select": "last",
}
PFEDME = {
    "weights": "samples",
    "lam": 1.5,
    "inner_steps": 2,
    "local_rounds": 3,
    "lr": 0.2,
    "personal_lr": 0.3,
    "inner_wd": 0.0,
    "beta": 1.0,
    "personal_epochs": None,
}
FEDCLUP = {
    "weights": "uniform",
    "lam": 0.5,
    "gamma": "mean",
    "smoothness": None,
    "convexity": None,
    "lr_rule": "run",
    "local_steps": None,
    "batch_reuse": False,
}
PERADA = {
    "weights": "uniform",
    "lam": 0.7,
    "personal_epochs": None,
    "personal_lr": None,
    "variant": "paper",
    "distil": DISTIL,
}
OA = {"weights": "uniform", "lam": 0.5, "personal_start": 1, "own_init": True}
FEDOA = {**OA, "distance": "mean_l2", "micro_batch": 2}
LF = {
    "weights": "uniform",
    "personal_layers": 1,
    "rho": 0.3,
    "score_norm": "sum",
    "lwsam_form": "paper",
    "grad_at": "global",
}
GREP = {
    "weights": "uniform",
    "personal_part": "head",
    "final_personal_epochs": 0,
    "head_epochs": 2,
    "body_steps": 2,
    "rho": 0.3,
    "score_norm": "sum",
    "lwsam_form": "paper",
    "reuse_grad": False,
}
HYPER = {"embedding": 3, "hidden": 5, "depth": 2, "server_lr": 0.1}
PFEDHN = {**HYPER, "server_momentum": 0.9, "server_weight_decay": 0.01, "server_clip": 0.5}
L2GD = {"weights": "uniform", "lam": 0.7, "p": 0.4, "smoothness": None, "coin_seed": 8}
PER = {"weights": "uniform", "alpha": 0.2, "variant": "FO", "delta": 0.05, "adapt_steps": 2}
CKT = {"weights": "uniform", "clusters": 2, "lam": 2.0, "public_batch": 4, "own_init": True}
FOMO = {"weights": "uniform", "downloads": 4, "explore": 0.0, "explore_decay": 0.0, "fallback": "own"}
P_MEAN = {"p": "p_mean"}

REFERENCES: dict[str, tuple[Reference, tuple[Case, ...]]] = {
    "local": (two_models.local, (Case({"weights": "uniform"}),)),
    "local_average": (two_models.local_average, (Case({"weights": "samples"}),)),
    "centralized": (global_models.centralized, (Case({"weights": "uniform"}),)),
    "fedavg": (global_models.fedavg, (Case(AVERAGE), Case(AVERAGE, "norm", "running statistics"))),
    "fedprox": (global_models.fedprox, (Case({**AVERAGE, "mu": 0.5}),)),
    "fedsam": (global_models.fedsam, (Case({**AVERAGE, "rho": 0.3}),)),
    "fedavg_ft": (
        global_models.fedavg_ft,
        (Case({**AVERAGE, "ft_epochs": 2, "ft_scope": "all"}),),
    ),
    "fedit": (global_models.fedavg, (Case(AVERAGE, "lora"),)),
    "fedlora": (
        global_models.fedavg_ft,
        (Case({**AVERAGE, "ft_epochs": 2, "ft_scope": "all"}, "lora"),),
    ),
    "scaffold": (global_models.scaffold, (Case({"weights": "uniform", "global_lr": 0.7}),)),
    "feddyn": (global_models.feddyn, (Case({"weights": "uniform", "alpha": 0.4}),)),
    "mr_mtl": (two_models.mr_mtl, (Case({"weights": "uniform", "lam": 0.6}),)),
    "ditto": (
        two_models.ditto,
        (Case({"weights": "samples", "lam": 0.6, "personal_epochs": 2, "dynamic_lam": ()}),),
    ),
    "pfedme": (two_models.pfedme, (Case(PFEDME),)),
    "apfl": (two_models.apfl, (Case({"weights": "samples", "alpha": 0.3, "adaptive": True}),)),
    "l2gd": (two_models.l2gd, (Case(L2GD, rename=P_MEAN, rounds=6),)),
    "per_fedavg": (two_models.per_fedavg, (Case(PER),)),
    "fedclup": (fedclup.fedclup, (Case(FEDCLUP),)),
    "fedper": (split_models.together, (Case(SPLIT),)),
    "fedsim": (split_models.together, (Case(SPLIT),)),
    "fedbn": (split_models.together, (Case({**SPLIT, "personal_part": "norm"}, "norm"),)),
    "lg_fedavg": (
        split_models.together,
        (Case({**SPLIT, "personal_part": "extractor", "broadcast_all": False}),),
    ),
    "fedrep": (split_models.alternating, (Case({**SPLIT, "head_epochs": 2, "body_epochs": 1}),)),
    "fedalt": (split_models.alternating, (Case({**SPLIT, "head_epochs": 1, "body_epochs": 2}),)),
    "fedbabu": (
        split_models.fedbabu,
        (Case({"weights": "samples", "personal_part": "head", "ft_epochs": 2, "ft_scope": "full"}),),
    ),
    "feddf": (distillation.feddf, (Case({"weights": "samples", "distil": DISTIL}),)),
    "perada": (distillation.perada, (Case(PERADA, "half frozen"),)),
    "perfed_ckt": (distillation.perfed_ckt, (Case(CKT),)),
    "fedoa": (feature_pull.fedoa, (Case(FEDOA, "lora"),)),
    "fedsdr": (feature_pull.fedsdr, (Case(OA, "lora"),)),
    "plgu_lf": (plgu.plgu_lf, (Case(LF, "deep"),)),
    "plgu_grep": (plgu.plgu_grep, (Case(GREP, "deep"),)),
    "pfedhn": (hypernetworks.pfedhn, (Case(PFEDHN),)),
    "plgu_ghn": (hypernetworks.plgu_ghn, (Case({**HYPER, "rho": 0.3}),)),
    "hypcluster": (clustering.hypcluster, (Case({"weights": "samples", "clusters": 2}),)),
    "fedfomo": (clustering.fedfomo, (Case(FOMO, rounds=3),)),
}
