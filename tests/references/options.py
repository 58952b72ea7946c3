"""The cases of `cases.py` that look at one option each, by method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from references import settings as base
from references.settings import Case


def each(common: Mapping[str, Any], model: str = "mlp", **options: tuple[Any, ...]) -> list[Case]:
    """One case for every value of every option, all others as in `common`."""
    return [
        Case({**common, name: value}, model, f"{name}={value}")
        for name, found in options.items()
        for value in found
    ]


def server(kind: str, **more: float) -> Case:
    chosen = {**base.SERVER, "kind": kind, "lr": 0.1, "beta2": 0.9, "eps": 0.01, "initial": 0.02, **more}
    return Case({**base.AVERAGE, "server": chosen}, why=f"server {kind}")


def distil(common: Mapping[str, Any], **more: Any) -> Case:
    why = ", ".join(f"{n}={v}" for n, v in more.items())
    return Case({**common, "distil": {**base.DISTIL, **more}}, why=why)


def normed(common: Mapping[str, Any], **more: Any) -> Case:
    """On a model with running statistics."""
    return Case({**common, **more}, "norm", "running statistics")


TAUGHT = (
    {"temperature": 2.0},
    {"average": "probabilities"},
    {"link": "sigmoid"},
    {"rounds": 1},
    {"batch_size": 9},
    {"steps": 9, "select": "best", "lr": 0.2},
)
DITTO = {
    "weights": "samples",
    "lam": 0.6,
    "personal_epochs": None,
    "dynamic_lam": (),
    "dynamic_every": "round",
}
FACTORS = {**base.AVERAGE, "averages": "factors"}
TUNED = {**base.AVERAGE, "ft_epochs": 2, "ft_scope": "all"}
ROD = {**base.AVERAGE, "gamma": 0.7, "personal_rate": 0.6}
FIXED = {**base.APFL, "adaptive": False}
BABU = {"weights": "uniform", "personal_part": "head", "ft_epochs": 2, "ft_scope": "full"}
REP = {**base.SPLIT, "head_epochs": 2, "body_epochs": 1}
ALT = {**REP, **base.PENALTY}
KNOWN = {**base.FEDCLUP, "smoothness": 2.5, "convexity": 0.4}
CONSTANT = {"kind": "constant"}
DYNAMIC = {"kind": "dynamic", "values": (0.0, 0.2, 0.9), "patience": 1, "tol": 0.9}
HEURISTIC = {"kind": "heuristic", "switch": 1, "constant": 5.0, "samples": 10.0, "most": 20.0}
NEARLY_ROUND = {**base.FEDCLUP, "smoothness": 1.0, "convexity": 0.9, "lr_rule": "deterministic"}
ALIKE = {"kind": "corollary", "radius": 0.05, "rho": 2.0, "samples": 15, "clients": 100}
NEARLY = {"kind": "corollary", "radius": 0.05, "rho": 0.1, "samples": 15, "clients": 5}
COROLLARY = {"kind": "corollary", "radius": 1.0, "rho": 2.0, "samples": 15, "clients": 5}

OPTIONS: dict[str, list[Case]] = {
    "local": [*each({"weights": "uniform"}, own_init=(True,)), normed({"weights": "uniform"})],
    "local_average": [Case({"weights": "uniform"}, why="uniform"), normed({"weights": "samples"})],
    "fedavg": [
        *each(base.AVERAGE, weights=("uniform",)),
        server("sgd", momentum=0.7),
        server("adam", momentum=0.7),
        server("yogi", momentum=0.7),
        server("adagrad", momentum=0.7),
        Case(base.AVERAGE, "half frozen", "frozen layers"),
        Case(base.AVERAGE, "lora", "AdamW", train="adamw"),
        normed(base.AVERAGE),
    ],
    "fedprox": [normed({**base.AVERAGE, "mu": 0.5})],
    "fedsam": [normed({**base.AVERAGE, "rho": 0.3})],
    "fedavg_ft": [*each(TUNED, ft_epochs=(0,), ft_steps=(3,), ft_scope=("head",)), normed(TUNED)],
    "fedit": [
        Case(FACTORS, "lora", "AdamW", train="adamw"),
        Case({**FACTORS, "averages": "product"}, "lora", "product"),
    ],
    "fedlora": [
        Case({**TUNED, "averages": "factors"}, "lora", "AdamW", train="adamw"),
        Case({**TUNED, "averages": "product", "weights": "uniform"}, "lora", "product"),
    ],
    "scaffold": [
        Case({"weights": "samples", "global_lr": 0.7}, why="samples"),
        normed({"weights": "uniform", "global_lr": 0.7}),
    ],
    "feddyn": [
        Case({"weights": "samples", "alpha": 0.4, "scale_alpha": False}, why="samples"),
        Case({"weights": "uniform", "alpha": 0.4, "scale_alpha": True}, why="scaled"),
        normed({"weights": "uniform", "alpha": 0.4, "scale_alpha": False}),
    ],
    "mr_mtl": [
        Case({"weights": "uniform", "lam": 0.6, "mean_of": "sampled"}, why="sampled"),
        *(
            Case({"weights": "samples", "lam": 0.6, "mean_of": m}, why=f"samples, {m}")
            for m in ("all", "sampled")
        ),
        normed({"weights": "uniform", "lam": 0.6, "mean_of": "all"}),
        normed({"weights": "uniform", "lam": 0.6, "mean_of": "sampled"}),
    ],
    "ditto": [
        *each(
            DITTO,
            weights=("uniform",),
            personal_epochs=(0,),
            personal_steps=(3,),
            dynamic_lam=((0.0, 4.0, 0.5),),
        ),
        Case(
            {**DITTO, "dynamic_lam": (0.0, 4.0, 0.5), "dynamic_every": "step"},
            why="λ by steps",
            train="decay",
        ),
        normed(DITTO),
    ],
    "pfedme": [
        *each(
            base.PFEDME,
            beta=(0.6, 0.0),
            inner_wd=(0.2,),
            personal_lr=(None,),
            weights=("uniform",),
            keep=("w",),
        ),
        *each(base.PFEDME, personal_epochs=(2,), personal_steps=(3,)),
        normed(base.PFEDME),
    ],
    "apfl": [
        *each(FIXED, alpha=(0.3, 0.0, 1.0), personal_w=("global",)),
        *each(base.APFL, alpha=(0.0, 1.0)),
        Case(base.APFL, why="adamw", train="adamw"),
        *(Case({**base.APFL, "mixture": "old"}, why=f"old {t}", train=t) for t in ("momentum", "adamw")),
        normed(FIXED),
    ],
    "l2gd": [Case({**base.L2GD, "smoothness": 1.1}, why="smoothness", rounds=6)],
    "per_fedavg": [
        *each(base.PER, variant=("HF",), adapt_steps=(0,), weights=("samples",)),
        normed(base.PER),
    ],
    "fedclup": [
        *each(KNOWN, gamma=("theory", "edge"), lr_rule=("deterministic", "stochastic")),
        *each(base.FEDCLUP, local_steps=(3,), weights=("samples",), lam=(0.0,)),
        *each({**base.FEDCLUP, "local_steps": 3}, batch_reuse=(True,)),
        Case({**KNOWN, "gamma": "theory", "schedule": HEURISTIC}, why="heuristic λ", rounds=3),
        Case({**KNOWN, "gamma": "theory", "schedule": COROLLARY}, why="λ of the corollary"),
        *(
            Case(
                {**NEARLY_ROUND, "schedule": rule},
                why=f"λ of alike clients, ρ={rule['rho']}",
            )
            for rule in (ALIKE, NEARLY)
        ),
        Case({**base.FEDCLUP, "batch_reuse": True}, why="one batch, the run's steps", train="steps"),
        Case({**KNOWN, "schedule": {**HEURISTIC, "most": 0.7}}, why="bounded λ", rounds=3),
        Case({**KNOWN, "schedule": {**HEURISTIC, "samples": 400.0}}, why="heuristic λ, far", rounds=3),
        Case(
            {**KNOWN, "lr_rule": "deterministic", "schedule": HEURISTIC},
            why="η follows a λ that changes",
            rounds=3,
        ),
        Case({**base.FEDCLUP, "schedule": "constant"}, why="a rule by its name"),
        Case({**base.FEDCLUP, "schedule": DYNAMIC}, why="dynamic λ", rounds=5),
        normed({**KNOWN, "gamma": "theory"}),
    ],
    "fedper": [
        *each(
            base.SPLIT, personal_part=("none", "all"), final_personal_epochs=(2,), final_personal_steps=(1,)
        ),
        normed(base.SPLIT),
    ],
    "fedsim": [
        *each({**base.SPLIT, **base.PENALTY}, server_lr=(0.6,), weights=("uniform",)),
        *each({**base.SPLIT, **base.PENALTY, "lam": 0.5}, centre=("start", "zero")),
    ],
    "fedbn": [
        Case({**base.SPLIT, "personal_part": "norm", "final_personal_epochs": 2}, "norm", "final epochs")
    ],
    "lg_fedavg": [
        Case(
            {**base.SPLIT, "personal_part": "extractor:2", "broadcast_all": True}, "deep", "two shared layers"
        ),
        normed({**base.SPLIT, "personal_part": "extractor", "broadcast_all": False}),
    ],
    "fedrep": [
        *each(
            REP, "deep", personal_part=("head",), final_personal_epochs=(2,), head_steps=(3,), body_steps=(2,)
        ),
        normed(REP),
    ],
    "fedalt": [
        *each(ALT, server_lr=(0.6,), weights=("uniform",), head_steps=(3,), body_steps=(2,)),
        *each({**ALT, "lam": 0.5}, centre=("start", "zero")),
    ],
    "fedbabu": [*each(BABU, ft_scope=("head", "body"), ft_epochs=(0,), ft_steps=(3,)), normed(BABU)],
    "feddf": [distil({"weights": "samples"}, **more) for more in TAUGHT]
    + [normed({"weights": "uniform", "distil": base.DISTIL})],
    "perada": [distil(base.PERADA, **more) for more in TAUGHT]
    + each(
        base.PERADA,
        variant=("released",),
        personal_epochs=(2,),
        personal_lr=(0.03,),
        personal_steps=(3,),
        weights=("samples",),
    )
    + [normed(base.PERADA)],
    "perfed_ckt": [
        *each(base.CKT, clusters=(1, 3), own_init=(False,), public_batch=(128,), warm_rounds=(1,)),
        *each({**base.CKT, "warm_rounds": 1}, first_round=("upload",)),
        Case({**base.CKT, "first_round": "upload"}, why="predictions before training", rounds=3),
        normed(base.CKT),
    ],
    "fedoa": [
        *each(
            base.FEDOA, distance=("batch_l2", "cosine", "pearson"), own_init=(False,), weights=("samples",)
        ),
        *each({**base.FEDOA, "own_init": False}, personal_start=(0,)),
        normed(base.FEDOA),
    ],
    "fedsdr": [*each(base.OA, personal_start=(0,), own_init=(False,)), normed(base.OA)],
    "plgu_lf": [
        *each(
            base.LF, "deep", score_norm=("mean", "none", "ones"), lwsam_form=("asam",), grad_at=("personal",)
        ),
        *each(base.LF, "deep", eps_from=("global",), power=(4.0, float("inf")), personal_layers=(0, 2, 3)),
        *each({**base.LF, "lwsam_form": "asam"}, "deep", power=(1.5,)),
        normed(base.LF),
        normed(base.LF, personal_layers=2),
    ],
    "plgu_grep": [
        *each(
            base.GREP, "deep", score_norm=("mean", "none", "ones"), lwsam_form=("asam",), reuse_grad=(True,)
        ),
        *each(
            base.GREP, "deep", power=(4.0,), head_steps=(3,), final_personal_epochs=(2,), body_steps=(0, 1, 3)
        ),
        normed(base.GREP),
    ],
    "pfedhn": [
        *each(base.PFEDHN, weights=("samples",), depth=(0,), server_clip=(None,), server_momentum=(0.0,)),
        normed(base.PFEDHN),
    ],
    "plgu_ghn": [
        *each({**base.PFEDHN, "rho": 0.3}, weights=("samples",), depth=(0,), rho=(0.0,), server_clip=(None,)),
        Case(
            {
                **base.HYPER,
                "server_momentum": 0.0,
                "server_weight_decay": 0.0,
                "server_clip": None,
                "rho": 0.3,
            }
        ),
    ],
    "hypcluster": [
        *each({"weights": "samples", "clusters": 2}, clusters=(1, 3), weights=("uniform",)),
        normed({"weights": "samples", "clusters": 2}),
    ],
    "fedala": [
        *(
            Case({**base.FEDALA, n: v}, why=f"{n}={v}", rounds=4)
            for n, v in (("eta", 0.2), ("share", 0.3), ("start", 0.5))
        ),
        Case(base.FEDALA, "norm", "running statistics", rounds=3),
    ],
    "fedamp": [
        *(
            Case({**base.FEDAMP, n: v}, why=f"{n}={v}", rounds=3)
            for n, v in (("alpha", 4.0), ("sigma", 9.0), ("start", "cloud"))
        ),
        Case(base.FEDAMP, "norm", "running statistics", rounds=3),
    ],
    "heurfedamp": [
        *(
            Case({**base.HEURFEDAMP, n: v}, why=f"{n}={v}", rounds=3)
            for n, v in (("cosine_of", "updates"), ("self_weight", 0.3), ("start", "cloud"))
        ),
        Case({**base.HEURFEDAMP, "start": "cloud"}, "norm", "running statistics", rounds=3),
    ],
    "qfedavg": [
        Case({"weights": "uniform", "q": 0.3}, why="uniform, q=0.3", rounds=3),
        Case({"weights": "samples", "q": 1.5}, "norm", "running statistics", rounds=3),
    ],
    "afl": [
        Case({"weights": "uniform", "gamma": 3.0}, why="gamma=3", rounds=4),
        Case({"weights": "uniform", "gamma": 0.2}, "norm", "running statistics", rounds=3),
    ],
    "fednova": [
        Case({**base.AVERAGE, "mu": 0.5}, why="mu=0.5", rounds=3),
        Case(
            {**base.AVERAGE, "mu": 0.0, "server": {**base.SERVER, "momentum": 0.7}},
            why="momentum of the server",
            rounds=3,
        ),
        Case({**base.AVERAGE, "mu": 0.0}, "norm", "running statistics", rounds=3, train="momentum"),
        Case({**base.AVERAGE, "mu": 0.0}, why="adamw", rounds=3, train="adamw"),
    ],
    "pfedgraph": [
        *(
            Case({**base.PFEDGRAPH, n: v}, why=f"{n}={v}", rounds=3)
            for n, v in (
                ("variant", "approximate"),
                ("measure", "head"),
                ("released", True),
                ("alpha", 0.1),
                ("weights", "uniform"),
            )
        ),
        Case(base.PFEDGRAPH, "norm", "running statistics", rounds=3),
    ],
    "cyclic": [
        Case({**base.CYCLIC, "order": "fixed"}, why="by number", rounds=7),
        Case({**base.CYCLIC, "transfer": False}, why="no transfer", rounds=7),
        Case(base.CYCLIC, "norm", "running statistics", rounds=3),
    ],
    "fedphp": [
        Case({**base.FEDPHP, "teach": "mmd"}, why="features teach", rounds=3),
        Case({**base.FEDPHP, "horizon": 0.5}, why="keeps nine tenths", rounds=4),
        Case({**base.FEDPHP, "lam": 1.0}, why="the teacher alone"),
        Case(base.FEDPHP, "norm", "running statistics", rounds=3),
    ],
    "feddbe": [
        Case({**base.FEDDBE, "mu": 1.0, "kappa": 5.0}, why="the last batch", rounds=3),
        Case({**base.FEDDBE, "kappa": 0.0}, why="no pull", rounds=3),
        Case({**base.FEDDBE, "bias": False}, why="no bias", rounds=3),
        Case(base.FEDDBE, "norm", "running statistics", rounds=3),
    ],
    "feddpa": [Case({**base.FEDDPA, "dynamic_on": "local"}, "lora", "local", rounds=3)],
    "flora": [Case({"weights": "uniform", "ranks": (1, 2, 2)}, "lora", "uniform", rounds=3)],
    "hetlora": [Case({**base.HETLORA, "lam": 0.0, "ranks": (1, 2, 2)}, "lora", "no penalty", rounds=3)],
    "fedcp": [
        Case({"weights": "uniform", "lam": 0.0}, why="no discrepancy", rounds=3),
        Case({"weights": "samples", "lam": 3.0}, "norm", "running statistics", rounds=3),
    ],
    "gpfl": [
        Case({**base.GPFL, "conditions": "released"}, why="as released", rounds=3),
        Case(base.GPFL, "norm", "running statistics", rounds=3),
    ],
    "ifca": [
        Case({**base.IFCA, "weights": "samples"}, why="samples", rounds=3),
        Case({**base.IFCA, "send": "gradients", "clusters": 3}, why="gradients", rounds=3),
        Case({**base.IFCA, "warm_rounds": 2}, why="two warm rounds", rounds=4),
        Case({**base.IFCA, "warm_rounds": 9}, why="never chooses", rounds=3),
        Case(base.IFCA, "norm", "running statistics", rounds=3),
    ],
    "cfl": [
        Case({**base.CFL, "weights": "uniform", "first_split": 1}, why="uniform, later", rounds=4),
        Case({**base.CFL, "gamma": 0.6}, why="gamma=0.6", rounds=4),
        Case(base.CFL, "norm", "running statistics", rounds=3),
    ],
    "moon": [
        Case({**base.MOON, "history": 2}, why="history=2", rounds=5),
        Case(base.MOON, "norm", "running statistics", rounds=3),
        Case({**base.MOON, "projection": 5}, why="projection=5", rounds=3),
        Case({**base.MOON, "projection": 5}, "norm", "projection, running statistics", rounds=3),
    ],
    "fedrod": [
        Case({**ROD, n: v}, why=f"{n}={v}, {t}", train=t)
        for n, v in (("personal_rate", 0.1), ("personal_rate", 5.0), ("gamma", 0.0))
        for t in ("adamw", "decay")
    ],
    "fedproto": [
        Case({"weights": "uniform", "lam": 2.0}, why="uniform", rounds=3),
        Case({"weights": "samples", "lam": 2.0}, "norm", "running statistics", rounds=3),
    ],
    "fedas": [
        Case({**base.FEDAS, "align_lr": None, "align_epochs": 2}, why="the run's rate", rounds=3),
        Case({**base.FEDAS, "align_epochs": 0}, why="no alignment", rounds=3),
        Case({**base.FEDAS, "fisher": False}, why="samples", rounds=3),
        Case({**base.FEDAS, "align_steps": 2}, why="align_steps=2", rounds=3),
        Case(base.FEDAS, "norm", "running statistics", rounds=3),
        Case(base.FEDAS, "deep", "a deeper body", rounds=3),
    ],
    "fedem": [
        Case({**base.FEDEM, "normalise": "cohort"}, why="of the cohort", rounds=3),
        Case({**base.FEDEM, "components": 1}, why="one network"),
        Case({**base.FEDEM, "newcomer_passes": 3}, why="newcomer_passes=3"),
        Case({**base.FEDEM, "weights": "uniform"}, why="uniform", rounds=3),
        Case(base.FEDEM, "norm", "running statistics", rounds=3),
        Case(base.FEDEM, "half frozen", "frozen layers", rounds=3),
    ],
    "apple": [
        Case({**base.APPLE, "decay": "cosine"}, why="cosine", rounds=4),
        Case({**base.APPLE, "prior": "uniform"}, why="uniform", rounds=3),
        Case({**base.APPLE, "rate": 3.0, "mu": 0.0}, why="nothing pulls", rounds=3),
        Case(base.APPLE, "norm", "running statistics", rounds=3),
        Case(base.APPLE, "half frozen", "frozen layers", rounds=3),
    ],
    "fedgh": [
        Case({**base.FEDGH, "deploy": "received"}, why="the server's head", rounds=3),
        Case({**base.FEDGH, "server_lr": 0.0}, why="a head as drawn"),
        Case({**base.FEDGH, "server_lr": 200.0}, why="clipped", rounds=3),
        Case(base.FEDGH, "norm", "running statistics", rounds=3),
    ],
    "fedtgp": [
        Case({**base.FEDTGP, "predict": "head"}, why="heads answer", rounds=3),
        Case({**base.FEDTGP, "tau": 1e3, "weights": "uniform"}, why="all the margin", rounds=3),
        Case({**base.FEDTGP, "server_passes": 0}, why="prototypes as drawn", rounds=3),
        Case(base.FEDTGP, "norm", "running statistics", rounds=3),
    ],
    "fedpac": [
        Case({**base.FEDPAC, n: v}, why=f"{n}={v}", rounds=3)
        for n, v in (("mix", False), ("head_lr", 0.3), ("weights", "uniform"), ("head_epochs", 0))
    ],
    "fedfomo": [
        Case({**base.FOMO, name: value}, why=f"{name}={value}", rounds=3)
        for name, value in (("norm", "l1"), ("fallback", "baseline"), ("downloads", 1), ("explore", 1.0))
    ]
    + [Case(base.FOMO, "norm", "running statistics", rounds=3)],
}
