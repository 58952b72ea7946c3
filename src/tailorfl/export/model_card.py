"""The facts of an exported model in model.json, and the model card in README.md, which is made only from them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tailorfl.data.preparation import PREPARATION
from tailorfl.data.scaling import SCALING
from tailorfl.errors import ConfigError, RunError, needs_extra
from tailorfl.evaluation.bootstrap import interval, resampled
from tailorfl.evaluation.metrics import UNIT_METRICS
from tailorfl.evaluation.summary import OF_RECORD
from tailorfl.export.written_model import lines_for
from tailorfl.runs.files import encode
from tailorfl.runs.fingerprint import decisive, environment, meaning
from tailorfl.runs.privacy import NEIGHBOURS, privacy_of, spent
from tailorfl.runs.records import load_predictions, temperature_of
from tailorfl.runs.trained_models import GLOBAL, Deployed, Restored

FORMAT = 2
"""Version of the export format; a reader refuses higher ones. Since 2 a manifest has a digest of every file."""
PARTS = {"val": "validation", "local": "test"}
"""Sets of records, and their names for the recipient of a single model."""
CARD = "README.md"
LICENSE = "unknown"
"""The hub's value for a licence that is not chosen yet."""
TASKS = {
    ("numbers", 1, "classification"): "tabular-classification",
    ("numbers", 1, "binary"): "tabular-classification",
    ("numbers", 1, "regression"): "tabular-regression",
    ("numbers", 3, "classification"): "image-classification",
    ("numbers", 3, "binary"): "image-classification",
    ("tokens", 1, "classification"): "text-classification",
    ("tokens", 1, "binary"): "text-classification",
}
"""(type of a sample, its dimensions, task) -> the hub's task."""
FEW_SAMPLES = 100
"""With fewer test samples, the 95 % interval of an accuracy is up to 20 points wide."""


def facts_of(run: Restored, model: Deployed) -> dict[str, Any]:
    """Return the facts of a model, as plain values for JSON."""
    config = run.job.config
    settings = config.model_of(run.job.method).architectures[model.architecture]
    network_settings = settings.model_dump(mode="json", exclude={"larger", "assign"})
    temperature, federation = temperature_of(run.store, model.client), run.sim.federation
    clients = _clients_of(run, model)
    parts = {"training": federation.train, "validation": federation.val, "test": federation.test}
    return {
        "format": FORMAT,
        "name": model.name,
        "kind": model.kind,
        "is_global": model.client is None,
        "clients": len(federation.members),
        "samples": {part: sum(len(rows[k]) for k in clients) for part, rows in parts.items()},
        "architecture": {
            **(network_settings if run.sim.method.of_networks else {"name": type(model.module).__name__}),
            "parameters": sum(p.numel() for p in model.module.parameters()),
        },
        "inputs": inputs_of(run, model),
        **({} if temperature is None else {"temperature": temperature}),
        "reading": {"data": config.data.name, "options": config.to_dict()["data"]["options"]},
        "metrics": _metrics(run, model, clients),
        "intervals": _intervals(run, model),
        "privacy": _privacy(run, model),
        "provenance": _provenance(run, model),
    }


def inputs_of(run: Restored, model: Deployed) -> dict[str, Any]:
    """Return how raw samples become inputs of one model; only its own client's scaling constants are included."""
    source = run.sim.given.source
    facts, client = meaning(source), None if model.client is None else model.name
    if SCALING in source.info:
        facts["scaling"] = source.info[SCALING].of(client)
    if PREPARATION in source.info:
        facts["preparation"] = source.info[PREPARATION].of(client).to_dict()
    return facts


def _clients_of(run: Restored, model: Deployed) -> list[int]:
    """Return the client of a model; of a global model all training clients that have its architecture."""
    if model.client is not None:
        return [model.client]
    group = next(group for group in run.sim.groups if group.name in ("", model.architecture))
    return [k for k in range(run.sim.federation.num_clients) if k in group.clients]


def _metrics(run: Restored, model: Deployed, clients: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return part -> metric -> value of the last evaluation, the mean over the model's clients."""
    frame = run.store.clients()
    if frame.empty:
        return {}
    frame = frame[(frame["round"] == run.sim.round) & (frame["model"] == model.kind)]
    frame = frame[frame["client"].isin(clients)]
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
    """Return the bootstrap interval of the leading metric on the client's test part; {} without kept predictions."""
    summary, predictions = run.store.summary, load_predictions(run.store.path)
    if summary is None or predictions is None or model.client is None:
        return {}
    predictions, metric = predictions.of(model.client), summary["metric"]
    if not len(predictions.y):
        return {}
    bounds = interval(resampled(metric, predictions, run.job.seed))
    return {} if bounds is None else {metric: (bounds.low, bounds.high)}


def _privacy(run: Restored, model: Deployed) -> dict[str, Any] | None:
    """Return the largest ε of the clients whose samples shape a model; None if noise does not cover all of them.

    An unfinished run has no ε yet, and in a deployment only the server has it.
    """
    settings, privacy = privacy_of(run.job), (run.store.summary or {}).get("privacy")
    is_personal = model.kind == "personal"
    # Client-level privacy adds noise to what clients send, not to what they keep.
    if settings is None or (is_personal and settings.level == "client"):
        return None
    if privacy is None:
        facts = {"level": settings.level, "neighbours": NEIGHBOURS[settings.level], "delta": settings.delta}
        return {**facts, "epsilon": None}
    import pandas as pd

    uses = pd.read_csv(run.store.path / "privacy.csv", dtype={"client": str})
    if is_personal and not run.sim.traffic.bytes_up:  # it has learned from no other client
        uses = uses[uses["client"] == str(model.client)]
    epsilons = [float(value) for value in uses["epsilon"]]
    # A held-out client has adapted just now, perhaps for longer than in any evaluation.
    if model.steps is not None and model.client is not None and (now := spent(run.job, run.sim)):
        epsilons += [epsilon for client, (epsilon, _) in now.epsilons.items() if client == model.client]
    facts = {key: privacy[key] for key in ("level", "neighbours", "delta")}
    return {**facts, "epsilon": max(epsilons, default=0.0)}


def _provenance(run: Restored, model: Deployed) -> dict[str, Any]:
    job, stored = run.job, run.store.config
    versions = stored.get("environment") or environment()
    settings, seed = decisive(job.config.to_dict(), job.method.label), {"seed": job.seed}
    if (
        privacy_of(job) is not None
    ):  # whoever knows the seed can compute the noise, and a digest of it can be guessed
        seed, settings["data"] = {}, {k: v for k, v in settings["data"].items() if k != "seed"}
    facts = {"settings": settings, **seed, "data": stored.get("data")}
    return {
        "tailorfl": versions["tailorfl"],
        "torch": versions["torch"],
        "experiment": job.config.name,
        "method": job.method.name,
        "label": job.method.label,
        "title": run.sim.method.title,
        **seed,
        "round": model.round,
        **({} if model.steps is None else {"steps of a held-out client": model.steps}),
        "settings": settings,
        "data": stored.get("data"),
        "fingerprint": hashlib.blake2b(encode(facts).encode(), digest_size=16).hexdigest(),
    }


def card_of(facts: Mapping[str, Any], license_id: str = LICENSE) -> str:
    """Return the model card of a model.

    Args:
        facts: the content of model.json.
        license_id: the hub's name of the licence.
    """
    origin, inputs, data = facts["provenance"], facts["inputs"], facts["reading"]["data"]
    title = f"{origin['experiment']}: {facts['name']}"
    metrics = facts["metrics"].get("test", {})
    task = TASKS.get((inputs["type"], len(inputs["shape"]), inputs["task"]))
    head: dict[str, Any] = {
        "license": license_id,
        "library_name": "pytorch",
        "tags": ["federated-learning", "personalized-federated-learning", "tailorfl", origin["method"]],
    }
    if task is not None:
        head["pipeline_tag"] = task
    if metrics:
        values = [
            {"type": name, "name": name.replace("_", " "), "value": value} for name, value in metrics.items()
        ]
        result = {
            "task": {"type": task or inputs["task"]},
            "dataset": {"type": data, "name": f"{data}, test part of {_owner(facts)}"},
            "metrics": values,
        }
        head["model-index"] = [{"name": title, "results": [result]}]
    sections = {
        "Data": _data_section(facts),
        "Metrics": _metrics_section(facts, metrics),
        "Privacy": _privacy_section(facts),
        "Limits": _limits(facts),
        "Use": f"```python\n{lines_for('.', facts).strip()}\n```",
        "Origin": (
            f"Round {origin['round']} of `{origin['experiment']}`, {_seed(origin)}, with tailorfl {origin['tailorfl']} "
            f"and torch {origin['torch']}. `model.json` has every setting; its fingerprint is "
            f"`{origin['fingerprint']}`."
        ),
        "Licence": "Not stated by its owner." if license_id == LICENSE else f"`{license_id}`",
    }
    text = "\n\n".join(f"## {name}\n\n{content}" for name, content in sections.items())
    front = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    return f"---\n{front}---\n\n# {title}\n\n{_summary(facts)}\n\n{text}\n"


def _seed(origin: Mapping[str, Any]) -> str:
    return f"seed {origin['seed']}" if "seed" in origin else "seed not stated, as it determines the noise"


def _summary(facts: Mapping[str, Any]) -> str:
    origin, parameters = facts["provenance"], facts["architecture"]["parameters"]
    model = "The global model" if facts["kind"] == "global" else f"The personal model of {_owner(facts)}"
    return (
        f"{model}, trained with {origin['title']} in a federation of "
        f"{facts['clients']} clients. It is a `{facts['architecture']['name']}` of {parameters:,} parameters."
    )


def _owner(facts: Mapping[str, Any]) -> str:
    if not facts["is_global"]:
        return f"the client `{facts['name']}`"
    return "all clients" if facts["name"] == GLOBAL else "all clients of this architecture"


def _data_section(facts: Mapping[str, Any]) -> str:
    """Return sizes and shapes of the data, without samples or statistics of samples."""
    inputs, samples = facts["inputs"], facts["samples"]
    counts = ", ".join(f"{count:,} {part}" for part, count in samples.items())
    lines = [
        f"- Data: `{facts['reading']['data']}`, task: {inputs['task']}",
        f"- Input: {inputs['type']} of shape {' × '.join(map(str, inputs['shape']))}; outputs: {inputs['outputs']}",
        f"- Samples of {_owner(facts)}: {counts}",
    ]
    return "\n".join(lines)


def _metrics_section(facts: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
    if not metrics:
        return "The run has no evaluation of this model."
    rows = [
        f"| {name.replace('_', ' ')} | {_number(name, value)} | {_bounds(name, facts['intervals'].get(name))} |"
        for name, value in metrics.items()
    ]
    whose = "mean over the clients' test parts" if facts["is_global"] else "test part of this client"
    return "\n".join([f"| {whose} | value | 95 % interval |", "| --- | ---: | ---: |", *rows])


def _bounds(name: str, interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"{_number(name, interval[0])} to {_number(name, interval[1])}"


def _number(name: str, value: float) -> str:
    return f"{100 * value:.1f} %" if name in UNIT_METRICS else f"{value:.3f}"


def _privacy_section(facts: Mapping[str, Any]) -> str:
    privacy = facts["privacy"]
    if privacy is None:
        return (
            "Trained without differential privacy: the weights may reveal training samples, so share the model only "
            "with people who may see them."
        )
    if privacy["epsilon"] is None:
        return (
            f"Trained with noise for the differential privacy of one {privacy['level']}. Its ε is not stored here: the "
            "run was not finished, or its accounts are at the server. Without them, share the model only with people "
            "who may see its training samples."
        )
    return (
        f"Differential privacy of one {privacy['level']}: ε = {privacy['epsilon']:.3g} at δ = {privacy['delta']:g} "
        f"({privacy['neighbours']})."
    )


def _limits(facts: Mapping[str, Any]) -> str:
    lines = ["- Research software: it was not validated for any clinical or other use."]
    if facts["kind"] == "global":
        lines.append("- One model for all clients: it may be poor for some of them.")
    else:
        lines.append("- Fitted to one client: it was not evaluated on data of other clients.")
    if facts["samples"]["test"] < FEW_SAMPLES:
        lines.append(f"- Only {facts['samples']['test']} test samples: its metrics are uncertain.")
    return "\n".join(lines)


def upload(models: Mapping[Path, Mapping[str, Any]], repository: str) -> str:
    """Upload an exported model to a repository of the Hugging Face hub, private if it is new; return its address.

    Args:
        models: folder -> content of model.json; a single model.
        repository: OWNER/NAME.

    Raises:
        ConfigError: several models were exported, or one that needs files outside its folder.
        MissingExtraError: huggingface_hub is not installed.
        RunError: the hub refuses, or cannot be reached.
    """
    with needs_extra("huggingface-hub", "text"):
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError
    if len(models) != 1:
        raise ConfigError(
            f"--push uploads one model, but {len(models)} were exported; choose one with --client NAME"
        )
    ((folder, facts),) = models.items()
    if facts.get("transformer", {}).get("base", ".").startswith(".."):
        raise ConfigError("--push uploads one folder, but this model's base is outside it; add --merge")
    try:
        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        return str(
            api.upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=["__pycache__/*"])
        )
    except HFValidationError as error:
        raise ConfigError(f"--push expects OWNER/NAME, not '{repository}'") from error
    except Exception as error:  # from the hub, the network, or the HTTP library
        raise RunError(
            f"'{folder}' was exported, but not uploaded to '{repository}': {error}. Log in with `hf auth login`, check "
            "the name and the network, and run the command again with --overwrite"
        ) from error
