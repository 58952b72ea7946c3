"""A case, and the options that the cases of a method share. Every hyper-parameter is given: a default may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAMES = {"p_mean": "p", "power": "p", "mean_of": "mean", "averages": "mean_of"}


@dataclass(frozen=True)
class Case:
    """Options of a reference, which calls three of them by other names than the method."""

    options: Mapping[str, Any]
    model: str = "mlp"
    why: str = "main"
    rounds: int = 2
    train: str = "plain"

    def of_method(self) -> dict[str, Any]:
        """The options as the method takes them: a length in epochs or in steps, not both."""
        replaced = {n.replace("_steps", "_epochs") for n in self.options if n.endswith("_steps")}
        return {NAMES.get(n, n): v for n, v in self.options.items() if n not in replaced}


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
    "patience": 2,
    "check_every": 2,
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
APFL = {"weights": "samples", "alpha": 0.3, "adaptive": True, "mixture": "new", "personal_w": "local"}
FEDCLUP = {
    "weights": "uniform",
    "lam": 0.5,
    "gamma": "mean",
    "smoothness": None,
    "convexity": None,
    "lr_rule": "run",
    "local_steps": None,
    "batch_reuse": False,
    "schedule": {"kind": "constant"},
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
    "eps_from": "personal",
    "power": 2.0,
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
    "power": 2.0,
}
HYPER = {"weights": "uniform", "embedding": 3, "hidden": 5, "depth": 2, "server_lr": 0.1}
PFEDHN = {**HYPER, "server_momentum": 0.9, "server_weight_decay": 0.01, "server_clip": 0.05}
L2GD = {
    "weights": "uniform",
    "per_round": "coin",
    "lam": 0.7,
    "p_mean": 0.4,
    "smoothness": None,
    "coin_seed": 8,
}
PER = {"weights": "uniform", "alpha": 0.2, "variant": "FO", "delta": 0.05, "adapt_steps": 2}
CKT = {
    "weights": "uniform",
    "clusters": 2,
    "lam": 2.0,
    "public_batch": 4,
    "own_init": True,
    "warm_rounds": 0,
    "first_round": "train",
}
FOMO = {
    "weights": "uniform",
    "downloads": 4,
    "explore": 0.0,
    "explore_decay": 0.0,
    "fallback": "own",
    "norm": "l2",
}
APPLE = {"rate": 0.4, "mu": 0.3, "horizon": 2.5, "decay": "exponential", "prior": "samples"}
FEDAS = {"weights": "samples", "align_epochs": 1, "align_lr": 0.3, "fisher": True}
FEDEM = {"weights": "samples", "components": 3, "normalise": "all", "newcomer_passes": 1}
FEDALA = {**AVERAGE, "eta": 1.0, "share": 0.8, "first_passes": 3, "start": 1.0}
FEDAMP = {"weights": "uniform", "lam": 0.75, "alpha": 0.5, "sigma": 2.0, "start": "own"}
HEURFEDAMP = {
    "weights": "uniform",
    "lam": 0.75,
    "sigma": 3.0,
    "self_weight": None,
    "cosine_of": "models",
    "start": "own",
}
PFEDGRAPH = {
    "weights": "samples",
    "lam": 0.5,
    "alpha": 0.8,
    "variant": "exact",
    "measure": "all",
    "released": False,
}
CYCLIC = {"weights": "uniform", "order": "drawn", "transfer": True}
IFCA = {"weights": "uniform", "clusters": 2, "send": "models", "warm_rounds": 0}
CFL = {"weights": "samples", "eps1": 10.0, "eps2": 0.01, "first_split": 0, "gamma": 0.0}
MOON = {**AVERAGE, "mu": 2.0, "tau": 0.5, "history": 1}
FEDDBE = {"weights": "samples", "kappa": 3.0, "mu": 0.6, "bias": True}
FEDDPA = {
    "weights": "uniform",
    "a": 0.4,
    "compared": 9,
    "most_dynamic": 0.6,
    "dynamic_on": "global",
}
HETLORA = {"weights": "samples", "ranks": (2, 1), "lam": 0.3, "prune": 0.6, "least": 1}
GPFL = {"weights": "samples", "lam": 0.3, "mu": 0.2, "conditions": "received"}
FEDPHP = {**AVERAGE, "lam": 0.4, "teach": "kd", "horizon": 3.0}
FEDPAC = {"weights": "samples", "lam": 2.0, "head_epochs": 1, "head_lr": None, "mix": True}
PENALTY = {"server_lr": 1.0, "lam": 0.0, "centre": "start"}
FEDGH = {"weights": "uniform", "server_lr": 0.3, "deploy": "trained"}
FEDTGP = {
    "weights": "samples",
    "lam": 2.0,
    "predict": "prototype",
    "tau": 0.3,
    "server_passes": 2,
    "server_lr": 0.2,
    "server_batch": 4,
}
