"""Which values every numeric option takes: the ends of its range are taken, what lies beyond is refused by name."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from tailorfl.core.method import methods
from tailorfl.core.server_training import ServerDistillation, ServerOptimizer
from tailorfl.methods.fedclup_rules import Corollary, Dynamic, Heuristic

SMALL = 1e-9
NOT_NEGATIVE = ([0], [-1])
NOT_NEGATIVE_REAL = ([0.0, SMALL], [-SMALL])
POSITIVE = ([SMALL, 1e6], [0.0, -1.0])
AT_LEAST_1 = ([1], [0])
SHARE = ([0.0, 1.0], [-SMALL, 1.0 + SMALL])
SHARE_BELOW_1 = ([0.0, 1.0 - SMALL], [-SMALL, 1.0])
INSIDE_0_1 = ([SMALL, 1.0 - SMALL], [0.0, 1.0])
ABOVE_1 = ([1.0 + SMALL], [1.0, 0.5])
ANY = ([-1.0, 0.0], [])

OF_ALL: dict[str, tuple[list[Any], list[Any]]] = {
    "head_epochs": NOT_NEGATIVE, "body_epochs": NOT_NEGATIVE, "personal_epochs": NOT_NEGATIVE,
    "final_personal_epochs": NOT_NEGATIVE, "ft_epochs": NOT_NEGATIVE, "body_steps": NOT_NEGATIVE,
    "head_steps": NOT_NEGATIVE, "personal_steps": NOT_NEGATIVE, "ft_steps": NOT_NEGATIVE,
    "final_personal_steps": NOT_NEGATIVE,
    "adapt_steps": NOT_NEGATIVE, "personal_layers": NOT_NEGATIVE, "personal_start": NOT_NEGATIVE,
    "downloads": NOT_NEGATIVE, "depth": NOT_NEGATIVE, "coin_seed": NOT_NEGATIVE,
    "lam": NOT_NEGATIVE_REAL, "mu": NOT_NEGATIVE_REAL, "rho": NOT_NEGATIVE_REAL, "explore_decay": NOT_NEGATIVE_REAL,
    "server_weight_decay": NOT_NEGATIVE_REAL, "inner_wd": NOT_NEGATIVE_REAL,
    "smoothness": POSITIVE, "convexity": POSITIVE, "server_lr": POSITIVE, "global_lr": POSITIVE,
    "personal_lr": POSITIVE, "lr": POSITIVE, "server_clip": POSITIVE, "delta": POSITIVE,
    "micro_batch": AT_LEAST_1, "clusters": AT_LEAST_1, "public_batch": AT_LEAST_1, "embedding": AT_LEAST_1,
    "hidden": AT_LEAST_1, "inner_steps": AT_LEAST_1, "local_rounds": AT_LEAST_1,
    "eta": NOT_NEGATIVE_REAL, "gamma": NOT_NEGATIVE_REAL, "personal_rate": NOT_NEGATIVE_REAL, "tau": POSITIVE,
    "capacity": NOT_NEGATIVE, "neighbours": AT_LEAST_1, "scale": POSITIVE,
    "head_lr": POSITIVE, "history": NOT_NEGATIVE, "projection": NOT_NEGATIVE, "first_passes": AT_LEAST_1,
    "align_epochs": NOT_NEGATIVE, "align_steps": NOT_NEGATIVE, "align_lr": POSITIVE,
    "rate": NOT_NEGATIVE_REAL,
    "newcomer_passes": NOT_NEGATIVE, "components": AT_LEAST_1,
    "server_passes": NOT_NEGATIVE, "server_batch": AT_LEAST_1,
    "eps1": NOT_NEGATIVE_REAL, "eps2": NOT_NEGATIVE_REAL, "first_split": NOT_NEGATIVE,
    "q": NOT_NEGATIVE_REAL, "sigma": POSITIVE, "self_weight": SHARE,
    "start": SHARE, "share": ([SMALL, 1.0], [0.0, 1.0 + SMALL]),
    "warm_rounds": NOT_NEGATIVE, "horizon": POSITIVE, "kappa": NOT_NEGATIVE_REAL,
    "explore": SHARE, "server_momentum": SHARE_BELOW_1, "p": ABOVE_1,
}  # fmt: skip
OF_ONE: dict[str, dict[str, tuple[list[Any], list[Any]]]] = {
    "apfl": {"alpha": SHARE},
    "apple": {"downloads": AT_LEAST_1, "greed": NOT_NEGATIVE_REAL},
    "cfl": {"gamma": SHARE},
    "fedamp": {"alpha": POSITIVE},
    "feddbe": {"mu": ([SMALL, 1.0], [0.0, 1.0 + SMALL])},
    "feddpa": {"a": SHARE, "compared": AT_LEAST_1, "most_dynamic": SHARE},
    "feddyn": {"alpha": POSITIVE},
    "fedgh": {"server_lr": NOT_NEGATIVE_REAL},
    "fedphp": {"lam": SHARE},
    "fedtgp": {"tau": NOT_NEGATIVE_REAL},
    "hetlora": {"prune": ([SMALL, 1.0], [0.0, 1.0 + SMALL]), "least": AT_LEAST_1},
    "heurfedamp": {"sigma": NOT_NEGATIVE_REAL},
    "knn_per": {"lam": SHARE},
    "l2gd": {"lam": POSITIVE, "p": INSIDE_0_1},
    "per_fedavg": {"alpha": NOT_NEGATIVE_REAL},
    "pfedgraph": {"alpha": POSITIVE},
    "pfedme": {
        "personal_epochs": AT_LEAST_1, "personal_steps": AT_LEAST_1, "beta": ([0.0, 2.0], [-SMALL, 2.0 + SMALL]),
    },
}  # fmt: skip
"""Where one method's differs from the others'."""
OF_PARTS: dict[type[BaseModel], dict[str, tuple[list[Any], list[Any]]]] = {
    ServerOptimizer: {
        "lr": POSITIVE, "momentum": SHARE_BELOW_1, "beta2": SHARE_BELOW_1, "eps": POSITIVE,
        "initial": NOT_NEGATIVE_REAL,
    },
    ServerDistillation: {
        "steps": NOT_NEGATIVE, "lr": POSITIVE, "batch_size": AT_LEAST_1, "temperature": POSITIVE,
        "rounds": NOT_NEGATIVE, "patience": AT_LEAST_1, "check_every": AT_LEAST_1,
    },
    Corollary: {"radius": NOT_NEGATIVE_REAL, "rho": POSITIVE, "samples": AT_LEAST_1, "clients": AT_LEAST_1},
    Heuristic: {"switch": AT_LEAST_1, "constant": POSITIVE, "samples": ([1.0], [0.5]), "most": POSITIVE},
    Dynamic: {
        "start": NOT_NEGATIVE_REAL, "factor": ABOVE_1, "least": POSITIVE, "most": POSITIVE,
        "patience": AT_LEAST_1, "tol": ANY,
    },
}  # fmt: skip
PARTS = [(part, option) for part, options in OF_PARTS.items() for option in options]


def is_number(annotation: Any) -> bool:
    """Whether an option is a whole or real number, or None."""
    kinds = set(get_args(annotation) or (annotation,)) - {type(None)}
    return bool(kinds) and kinds <= {int, float}


def numeric(model: type[BaseModel]) -> list[str]:
    return [name for name, field in model.model_fields.items() if is_number(field.annotation)]


def takes(model: type[BaseModel], name: str, value: Any) -> bool:
    """Whether the option by itself takes a value, whatever the rest of the settings is."""
    try:
        model(**{name: value})
    except ValidationError as error:
        return name not in [part for found in error.errors() for part in found["loc"]]
    return True


METHODS = [(name, option) for name, cls in sorted(methods().items()) for option in numeric(cls)]


@pytest.mark.parametrize(("method", "option"), METHODS, ids=[f"{m}-{o}" for m, o in METHODS])
def test_an_option_of_a_method_takes_its_range_and_no_more(method: str, option: str) -> None:
    known = OF_ONE.get(method, {}).get(option) or OF_ALL.get(option)
    assert known is not None, f"say in OF_ALL or OF_ONE which values '{option}' of {method} takes"
    ranges(methods()[method], option, *known)


@pytest.mark.parametrize(("model", "option"), PARTS, ids=[f"{m.__name__}-{o}" for m, o in PARTS])
def test_an_option_of_a_part_takes_its_range_and_no_more(model: type[BaseModel], option: str) -> None:
    ranges(model, option, *OF_PARTS[model][option])


def test_every_number_of_a_part_has_a_range() -> None:
    assert all(set(numeric(model)) == set(options) for model, options in OF_PARTS.items())


def ranges(model: type[BaseModel], option: str, taken: list[Any], refused: list[Any]) -> None:
    for value in taken:
        assert takes(model, option, value), f"{option} = {value!r} should be taken"
    for value in refused:
        assert not takes(model, option, value), f"{option} = {value!r} should be refused"
