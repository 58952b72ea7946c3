"""The content of an export's model.json: what goes in, what comes out, how good it was, how it came about."""

from __future__ import annotations

import hashlib
import math
from typing import Any

from tailorfl.data.preparation import PREPARATION
from tailorfl.data.scaling import SCALING
from tailorfl.evaluation.bootstrap import interval, resampled
from tailorfl.evaluation.summary import OF_RECORD
from tailorfl.runs.files import encode
from tailorfl.runs.fingerprint import decisive, environment, meaning
from tailorfl.runs.prediction_log import load_predictions, temperature_of
from tailorfl.runs.trained_models import Deployed, Restored

FORMAT = 2
"""Of an export; a reader refuses higher ones. Since 2 there is a manifest, with a digest of every file."""
PARTS = {"val": "validation", "local": "test"}
"""Sets of records and what they are called for somebody who gets one model."""


def facts_of(run: Restored, model: Deployed) -> dict[str, Any]:
    """Return what is known of a model, as JSON can hold it."""
    config = run.job.config
    settings = config.model_of(run.job.method).architectures[model.architecture]
    network_settings = settings.model_dump(mode="json", exclude={"larger", "assign"})
    temperature, federation = temperature_of(run.store, model.client), run.sim.federation
    chosen = slice(federation.num_clients) if model.client is None else slice(model.client, model.client + 1)
    parts = {"training": federation.train, "validation": federation.val, "test": federation.test}
    return {
        "format": FORMAT,
        "name": model.name,
        "kind": model.kind,
        "is_global": model.client is None,
        "clients": federation.num_clients,
        "samples": {part: sum(map(len, rows[chosen])) for part, rows in parts.items()},
        "architecture": {
            **(network_settings if run.sim.method.of_networks else {"name": type(model.module).__name__}),
            "parameters": sum(p.numel() for p in model.module.parameters()),
        },
        "inputs": inputs_of(run, model),
        **({} if temperature is None else {"temperature": temperature}),
        "reading": {"data": config.data.name, "options": config.to_dict()["data"]["options"]},
        "metrics": _metrics(run, model),
        "intervals": _intervals(run, model),
        "privacy": _privacy(run, model),
        "provenance": _provenance(run, model),
    }


def inputs_of(run: Restored, model: Deployed) -> dict[str, Any]:
    """Return how raw samples become inputs of one model; of the scaling constants its client's own alone."""
    source = run.sim.given.source
    facts, client = meaning(source), None if model.client is None else model.name
    if SCALING in source.info:
        facts["scaling"] = source.info[SCALING].of(client)
    if PREPARATION in source.info:
        facts["preparation"] = source.info[PREPARATION].of(client).to_dict()
    return facts


def _metrics(run: Restored, model: Deployed) -> dict[str, dict[str, float]]:
    """Part -> metric -> value of the last evaluation; of a model of all, means over the clients."""
    frame = run.store.clients()
    if frame.empty:
        return {}
    frame = frame[(frame["round"] == run.sim.round) & (frame["model"] == model.kind)]
    if model.client is not None:
        frame = frame[frame["client"] == model.client]
    late = "heldout" if not model.steps else f"heldout+{model.steps}"
    parts = {late: "test"} if model.client in run.heldout else PARTS
    metrics: dict[str, dict[str, float]] = {}
    for name, part in parts.items():
        numbers = (
            frame[frame["set"] == name].drop(columns=[*OF_RECORD], errors="ignore").mean(numeric_only=True)
        )
        values = {str(key): float(value) for key, value in numbers.items() if not math.isnan(value)}
        if values:
            metrics[part] = values
    return metrics


def _intervals(run: Restored, model: Deployed) -> dict[str, tuple[float, float]]:
    """Return the bootstrap interval of the first metric on the client's test part; {} where no predictions are kept."""
    summary, predictions = run.store.summary, load_predictions(run.store.path)
    if summary is None or predictions is None or model.client is None:
        return {}
    predictions, metric = predictions.of(model.client), summary["metric"]
    if not len(predictions.y):
        return {}
    bounds = interval(resampled(metric, predictions, run.job.seed))
    return {} if bounds is None else {metric: (bounds.low, bounds.high)}


def _privacy(run: Restored, model: Deployed) -> dict[str, Any] | None:
    """Return ε of a personal model's client, of a global model the largest of all; None without privacy."""
    privacy = (run.store.summary or {}).get("privacy")
    if privacy is None:
        return None
    import pandas as pd

    spent = pd.read_csv(run.store.path / "privacy.csv", dtype={"client": str})
    if model.kind == "personal":
        spent = spent[spent["client"].isin([str(model.client), "all"])]
    return {
        **{key: privacy[key] for key in ("level", "neighbours", "delta")},
        "epsilon": float(spent["epsilon"].max()),
    }


def _provenance(run: Restored, model: Deployed) -> dict[str, Any]:
    job, stored = run.job, run.store.config
    versions = stored.get("environment") or environment()
    settings = decisive(job.config.to_dict(), job.method.label)
    facts = {"settings": settings, "seed": job.seed, "data": stored.get("data")}
    return {
        "tailorfl": versions["tailorfl"],
        "torch": versions["torch"],
        "experiment": job.config.name,
        "method": job.method.name,
        "label": job.method.label,
        "title": run.sim.method.title,
        "seed": job.seed,
        "round": model.round,
        **({} if model.steps is None else {"steps of a held-out client": model.steps}),
        "settings": settings,
        "data": stored.get("data"),
        "fingerprint": hashlib.blake2b(encode(facts).encode(), digest_size=16).hexdigest(),
    }
