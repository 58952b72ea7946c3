"""LocalTrain and Centralized."""

from __future__ import annotations

import numpy as np

from methods.reductions import local
from methods.settings import Card, Limit, Row, none
from methods.small import NEWCOMER, federation, simulation
from tailorfl.testing.contract import whole

CONTRACTS = {
    "local": Row(
        Card(none, none, whole, True, False),
        limit=Limit("local"),
        unweighted=True,
        proved="everything else is compared with it; test_local_centralized.py",
        never="the end itself",
    ),
    # Only reports the mean of the local models: it is sent up and never comes back.
    "local_average": Row(
        Card(none, whole, whole, True, True),
        limit=Limit("local_and_mean"),
        same=(local(said=False),),
        never="LocalTrain's personal models whatever its settings",
    ),
    "centralized": Row(
        Card(none, none, whole, False, True),
        limit=Limit("pooled"),
        unweighted=True,
        proved="one client: test_method_reductions.py",
        never="the end itself",
    ),
}


def test_centralized_never_sees_held_out_clients() -> None:
    sim = simulation("centralized")
    held_out = set(federation().train[NEWCOMER].tolist())
    assert not held_out & set(np.concatenate(sim.cohort((0,)).members).tolist())
