"""The model of a client after the last round, written to its own disk as `tailorfl export` does it."""

from __future__ import annotations

from pathlib import Path

from tailorfl.data.remote_federation import client_samples, source_facts
from tailorfl.deploy.local_run import LocalRun
from tailorfl.errors import ModelError
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.export.folder import write
from tailorfl.runs.fingerprint import environment
from tailorfl.runs.job import Job
from tailorfl.runs.prediction_log import finish, keeper
from tailorfl.runs.store import RunStore
from tailorfl.runs.trained_models import Restored


def hand_over(job: Job, run: LocalRun, client: int, place: Path) -> str:
    """Writes the model that a client deploys into a folder, with its metrics, and returns a sentence about it."""
    kept = keeper(job, run)
    records = evaluate(run, Protocol(("val", "local")), kept=kept, clients=(client,))
    facts = {
        "label": job.method.label,
        "seed": job.seed,
        "environment": environment(),
        "source": source_facts(run.federation.source),
        "sizes": client_samples(run.federation, client).sizes,
    }
    with RunStore.create(place.parent / "records", facts, overwrite=True) as store:
        store.append_clients(records)
        if kept is not None:
            finish(kept, job, run, store)
        restored = Restored(job, run, None, store)
        (model,) = restored.models([client])
        try:
            write(restored, model, place)
        except ModelError as error:
            return f"the model of this client stays in its private state, it cannot be exported: {error}"
    return f"the {model.kind} model of this client after round {run.round} lies in '{place}'"
