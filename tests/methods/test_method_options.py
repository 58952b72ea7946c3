"""Options that only some methods have: they do what they say, and nothing where they are off."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from methods.settings import make, row
from methods.small import assert_same, everything, federation, personal, simulation
from tailorfl.core.method import make_method, methods

LENGTHS = [
    (name, field.removesuffix("_epochs"))
    for name, cls in methods().items()
    for field in cls.model_fields
    if field.endswith("_epochs")
    and (name, field) not in {("plgu_grep", "body_epochs"), ("feddpa", "ft_epochs")}
]
"""Every length that a method counts in epochs; PLGU-GRep's body takes single batches, FedDPA's LoRA has its tests."""


@pytest.mark.parametrize(
    ("name", "what"),
    [pytest.param(*of, marks=[] if k % 2 else [pytest.mark.slow]) for k, of in enumerate(LENGTHS)],
)
def test_lengths_may_be_given_in_steps(name: str, what: str) -> None:
    """Clients of 8 samples in batches of 4: two epochs are four steps, and three steps are something else."""
    data, outcomes, model = federation((8, 8, 8)), [], "batch_norm" if name == "fedbn" else "mlp"
    others = {key: value for key, value in row(name).options.items() if key != f"{what}_epochs"}
    for length in ({f"{what}_epochs": 2}, {f"{what}_steps": 4}, {f"{what}_steps": 3}):
        sim = simulation(make_method(name, {**others, **length}), model, data=data, rounds=2)
        outcomes.append({**everything(sim), **personal(sim)})
    assert_same(outcomes[0], outcomes[1])
    assert any(not torch.equal(t, outcomes[2][n]) for n, t in outcomes[0].items())


def test_broadcast_all_reaches_every_client_and_changes_nothing_else() -> None:
    few, every = (
        simulation(make("lg_fedavg", broadcast_all=to_all), rounds=3, fraction=0.4)
        for to_all in (False, True)
    )
    assert every.traffic.down_unicast * 2 == few.traffic.down_unicast * 5 > 0
    assert every.traffic.up == few.traffic.up
    assert_same(personal(few), personal(every))


LADDER = {"schedule": {"kind": "dynamic", "values": [0.5, 2.0]}}


def test_all_options_written_out_make_an_equal_method() -> None:
    """As result folders hold them; also where a length is given in steps."""
    for name, method in methods().items():
        fields = method.model_fields
        lengths = {n: 3 for n in fields if n.endswith("_steps") and n.replace("_steps", "_epochs") in fields}
        choices: list[dict[str, Any]] = [{}, lengths, LADDER if name == "fedclup" else {}]
        for options in choices:
            made = make_method(name, options)
            assert make_method(name, made.all_options()) == made, name
