"""Lengths of a fit: of each client by a tensor, and shares of a pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from tailorfl.errors import TailorflError
from tailorfl.privacy.ledger import PrivacyRecord
from tailorfl.training import tree
from tailorfl.training.plan import Length
from tailorfl.training.sample_privacy import SampleDP
from training.cohorts import (
    SIZES,
    alone,
    assert_states,
    engines,
    fit,
    run,
    setting,
)


@engines
@pytest.mark.parametrize("schedule", ["constant", "linear"])
@pytest.mark.parametrize("steps", [[3, 1, 0, 6], [2, 2, 2, 2]], ids=str)
def test_steps_may_differ_by_client(engine, schedule, steps):
    """As if each trained alone for its number; a client of 0 steps stays where it is."""
    cohort, start = setting(momentum=0.5, schedule=schedule)

    def local(client, state, received):
        return client.fit(received, length=Length(steps=state["steps"]))

    states = TensorDict({"steps": torch.tensor(steps)}, batch_size=[len(SIZES)])
    found = run(engine, cohort, local, states, start)
    for i, own in enumerate(steps):
        expected = alone(cohort, i).fit(start, length=Length(steps=own))
        assert_states(found[i], tree.tensors(expected), rtol=1e-5, atol=1e-6)
        assert (own == 0) == all(torch.equal(found[n][i], t) for n, t in start.items())


@engines
def test_a_share_of_a_pass_is_rounded_up_to_whole_steps(engine):
    """7, 3, 12 and 5 samples in batches of 4 are 2, 1, 3 and 2 of them a pass."""
    cohort, start = setting()
    for epochs, steps in (
        (0.5, [1, 1, 2, 1]),
        (1.5, [3, 2, 5, 3]),
        (0.01, [1, 1, 1, 1]),
        (2.0, [4, 2, 6, 4]),
    ):
        found = fit(engine, cohort, start, epochs=epochs)
        for i, own in enumerate(steps):
            expected = alone(cohort, i).fit(start, length=Length(steps=own))
            assert_states(found[i], tree.tensors(expected), rtol=1e-5, atol=1e-6)
    client = alone(cohort, 2)
    assert float(client.steps(Length(epochs=0.5))) == 2
    with pytest.raises(TailorflError, match="known by that tensor"):
        client.steps(Length(steps=torch.tensor(2)))


@engines
def test_private_steps_that_differ_are_all_accounted(engine):
    records = []
    for steps in (None, 3):
        cohort, start = setting(dp=SampleDP(1.0, 1.0, "shuffle"))
        cohort = replace(cohort, record=(record := PrivacyRecord()))

        def local(client, state, received, steps=steps):
            return client.fit(received, length=Length(steps=state["steps"] if steps is None else steps))

        run(engine, cohort, local, TensorDict({"steps": torch.full((4,), 3)}, batch_size=[4]), start)
        records.append(record.uses)
    assert records[0] == records[1]
    assert len(records[0]) == len(SIZES)
