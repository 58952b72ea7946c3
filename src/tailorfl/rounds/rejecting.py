"""Updates that are not finite: whose they are, what is said about them, and when nothing else is left."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from tailorfl.engines.base import Stored, Visit
from tailorfl.errors import DivergenceError
from tailorfl.rounds.diagnosis import term_to_blame
from tailorfl.rounds.divergence import listed, why_all_diverged
from tailorfl.rounds.federated_run import FederatedRun
from tailorfl.rounds.groups import message_for
from tailorfl.rounds.one_round import Trained

log = logging.getLogger(__name__)


def rejected_clients(run: FederatedRun, done: Sequence[Trained]) -> tuple[int, ...]:
    """Returns the clients that answered with an update that is not finite, in rising order.

    Raises:
        DivergenceError: all that answered did.
    """
    answered = sum(len(t.ids) for t in done)
    rejected = tuple(
        sorted(c for t in done for c, ok in zip(t.ids, t.finite.tolist(), strict=True) if not ok)
    )
    diverged = tuple(i for i in rejected if i not in run.malicious.clients)
    if diverged and len(rejected) < answered:
        log.warning(
            "round %d: update of client %s is not finite and was rejected (%s)",
            run.round + 1,
            listed(diverged),
            (not run.is_blamed and _blamed_term(run, done)) or "learning rate too high?",
        )
        run.is_blamed = True
    # With client-level privacy a stop would tell what a single client's update was.
    if diverged and len(rejected) == answered and run.client_dp is None:
        raise DivergenceError(
            f"round {run.round + 1}: all {answered} clients diverged (updates are NaN or infinite); "
            + (_blamed_term(run, done) or why_all_diverged(run.server, run.method.server_settings))
        )
    return rejected


def _blamed_term(run: FederatedRun, done: Sequence[Trained]) -> str:
    """Which term of the method made the update of the first client that diverged not finite; "" if none did."""
    if run.client_dp is not None:
        return ""
    bad = ((t, k) for t in done for k, ok in enumerate(t.finite.tolist()) if not ok)
    part, k = next((t, k) for t, k in bad if t.ids[k] not in run.malicious.clients)
    message = message_for(part.message, part.group, (k,))
    visit = Visit.of(run.local, run.cohort((part.ids[k],)), message)
    with torch.no_grad():
        return term_to_blame(run.method, visit, Stored(part.group.states), run.engine)
