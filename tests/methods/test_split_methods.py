"""FedPer, FedRep, LG-FedAvg and FedBN."""

from __future__ import annotations

from dataclasses import replace

import pytest

from methods.reductions import ONE, SHARED_HEAD, THREE, Same, local, nothing_personal
from methods.settings import Card, Limit, Row, make
from methods.small import model, simulation
from tailorfl.errors import ModelError
from tailorfl.testing.contract import whole

CONTRACTS = {
    "fedbn": Row(
        Card(lambda s: s.d - s.norm, lambda s: s.d - s.norm, whole, True, False),
        limit=Limit("pooled"),
        same=(
            Same("T04", {}, "fedavg", {}, "personal", "global", models=("mlp", "dropout"), said=True),
            local(personal_part="all"),
        ),
    ),
    "fedper": Row(
        Card(lambda s: s.d - s.head, lambda s: s.d - s.head, whole, True, False),
        limit=Limit("pooled", 1, {"personal_part": "none"}),
        same=(
            nothing_personal(personal_part="none"),
            local(personal_part="all"),
            Same("T04", {}, "fedsim", {}, "personal", "personal"),
        ),
        remarks=(
            (
                {"personal_part": "all", "final_personal_epochs": 1},
                "more epochs",
                "test_reduction_remarks.py",
            ),
        ),
    ),
    "fedrep": Row(
        Card(lambda s: s.d - s.head, lambda s: s.d - s.head, whole, True, False),
        {"head_epochs": 2},
        Limit("pooled", 1, {"personal_part": "none", "head_epochs": 0}),
        same=(
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
        remarks=(({"body_epochs": 0}, "never trains what clients share", "test_reduction_remarks.py"),),
    ),
    "lg_fedavg": Row(
        Card(lambda s: s.head, lambda s: s.head, whole, True, False),
        limit=Limit("pooled", 1, {"personal_part": "none"}),
        not_on=("logistic",),
        same=(nothing_personal(**SHARED_HEAD), local(personal_part="all")),
    ),
}


@pytest.mark.parametrize("name", ["fedper", "fedrep", "lg_fedavg"])
def test_a_personal_part_that_matches_nothing_is_an_error(name: str) -> None:
    """Only FedBN may find nothing: it is FedAvg then."""
    with pytest.raises(ModelError, match="norm"):
        simulation(make(name, personal_part="norm"), "mlp")
    assert set(simulation("fedbn", "mlp").server.keys()) == set(model("mlp").init(0).keys())
