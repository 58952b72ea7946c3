"""Which labels the clients of a job have, kept beside its settings, so that a report can show it without the data."""

from __future__ import annotations

from typing import Any

from tailorfl.data.federation import Federation
from tailorfl.data.remote_federation import REMOTE
from tailorfl.runs.job import Job
from tailorfl.runs.privacy import privacy_of

MOST = 50_000
"""Clients times classes up to which they are kept."""
TASKS = ("classification", "binary")


def label_counts(job: Job, federation: Federation) -> dict[str, Any]:
    """Returns {"labels": {"classes": names, "counts": [clients][classes] training samples}}.

    Nothing where samples have no class, where the table is too large, or where training is private: its ε covers no
    count of a client's samples; nor where clients keep their labels to themselves.
    """
    source = federation.source
    if source.task not in TASKS or privacy_of(job) is not None or source.info.get(REMOTE):
        return {}
    counts = federation.describe("train")
    if not counts.size or counts.size > MOST:
        return {}
    given = source.info.get("classes")
    names = [str(name) for name in given] if given is not None and len(given) == counts.shape[1] else None
    return {"labels": {"classes": names or list(map(str, range(counts.shape[1]))), "counts": counts.tolist()}}
