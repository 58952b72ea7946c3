"""Words for settings under which one method is another one, of which tests make rows that run both sides."""

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


def personally(
    line: str, other: str, other_options: Mapping[str, Any] | None = None, exact: bool = True, **options: Any
) -> Same:
    """A personal model that is the other method's personal one."""
    return Same(line, options, other, other_options or {}, "personal", "personal", exact)


def itself(line: str, name: str, **options: Any) -> Same:
    """A personal model that is the method's own global one."""
    return Same(line, options, name, options, "personal", "global", said=True)


def drawn(which: Which, **options: Any) -> Same:
    """A model that stays as it was drawn."""
    return Same("drawn", options, "", {}, which, "global", exact=False, said=True, models=("mlp", "dropout"))


def pac_is_rep(head_epochs: int = 1, **options: Any) -> Same:
    """FedPAC without what makes it itself."""
    other = {"head_epochs": head_epochs, "body_epochs": 1}
    same = personally("FedRep", "fedrep", other, exact=False, **options, head_epochs=head_epochs)
    return replace(same, said=True)


def in_run(same: Same, **run: Any) -> Same:
    """The same, said in a run of other rounds or another fraction."""
    return replace(same, run=run, said=True)


def of_mlp(same: Same, **changes: Any) -> Same:
    """The same, on a network without batch norm and dropout, with other changes."""
    return replace(same, models=("mlp",), **changes)


def unnormed(same: Same, **changes: Any) -> Same:
    """The same, on networks without batch norm, with other changes."""
    return replace(same, models=("mlp", "dropout"), **changes)


def own_start(same: Same) -> Same:
    """The same, of clients that each draw an initial model."""
    return replace(same, options={**same.options, "own_init": True}, other_options={"own_init": True})


UPLOAD = {"lam": 0.0, "own_init": False, "first_round": "upload"}
NUMBERS = "../references/test_references.py"
REMARKS = "test_reduction_remarks.py"
REFERENCE = "its numbers: references/test_references.py"
NO_LORA = (fedavg("no LoRA", said=True), nothing_personal("no LoRA"))
"""On a model without LoRA there is nothing to freeze, and no factor to keep."""
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
