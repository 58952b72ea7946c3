"""The README.md of an export: a model card in the form that the Hugging Face hub reads, made of model.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tailorfl.errors import ConfigError, MissingExtraError, RunError
from tailorfl.evaluation.metrics import UNIT_METRICS
from tailorfl.export.written_model import lines_for

CARD = "README.md"
LICENSE = "unknown"
"""The hub's word for a licence that nobody has chosen yet."""
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


def card_of(facts: Mapping[str, Any], license_id: str = LICENSE) -> str:
    """Return the model card of a model.

    Args:
        facts: the content of model.json.
        license_id: the licence, as the hub names it.
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
        "Data": _data(facts),
        "Metrics": _metrics(facts, metrics),
        "Privacy": _privacy(facts),
        "Limits": _limits(facts),
        "Use": f"```python\n{lines_for('.', facts).strip()}\n```",
        "Origin": (
            f"Round {origin['round']} of `{origin['experiment']}`, seed {origin['seed']}, with tailorfl "
            f"{origin['tailorfl']} and torch {origin['torch']}. `model.json` has every setting; its fingerprint is "
            f"`{origin['fingerprint']}`."
        ),
        "Licence": _license(license_id),
    }
    text = "\n\n".join(f"## {name}\n\n{content}" for name, content in sections.items())
    front = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    return f"---\n{front}---\n\n# {title}\n\n{_summary(facts)}\n\n{text}\n"


def _summary(facts: Mapping[str, Any]) -> str:
    origin, parameters = facts["provenance"], facts["architecture"]["parameters"]
    model = "The global model" if facts["kind"] == "global" else f"The personal model of {_owner(facts)}"
    return (
        f"{model}, trained with {origin['title']} in a federation of "
        f"{facts['clients']} clients. It is a `{facts['architecture']['name']}` of {parameters:,} parameters."
    )


def _owner(facts: Mapping[str, Any]) -> str:
    return "all clients" if facts["is_global"] else f"the client `{facts['name']}`"


def _data(facts: Mapping[str, Any]) -> str:
    """Sizes and shapes; no sample and no statistic of samples."""
    inputs, samples = facts["inputs"], facts["samples"]
    counts = ", ".join(f"{count:,} {part}" for part, count in samples.items())
    lines = [
        f"- Data: `{facts['reading']['data']}`, task: {inputs['task']}",
        f"- Input: {inputs['type']} of shape {' × '.join(map(str, inputs['shape']))}; outputs: {inputs['outputs']}",
        f"- Samples of {_owner(facts)}: {counts}",
    ]
    return "\n".join(lines)


def _metrics(facts: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
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


def _privacy(facts: Mapping[str, Any]) -> str:
    privacy = facts["privacy"]
    if privacy is None:
        return (
            "Trained without differential privacy: the weights may reveal training samples, so share the model only "
            "with people who may see them."
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
        lines.append("- Fitted to one client: it was not evaluated here on data of anybody else.")
    if facts["samples"]["test"] < FEW_SAMPLES:
        lines.append(f"- Only {facts['samples']['test']} test samples: its metrics are uncertain.")
    return "\n".join(lines)


def _license(license_id: str) -> str:
    return "Not stated by its owner." if license_id == LICENSE else f"`{license_id}`"


def upload(models: Mapping[Path, Mapping[str, Any]], repository: str) -> str:
    """Upload an exported model to a repository of the Hugging Face hub, private if it is new; return its address.

    Args:
        models: folder -> content of model.json, of the one model that was exported.
        repository: OWNER/NAME.

    Raises:
        ConfigError: several models were exported, or one that needs files outside its folder.
        MissingExtraError: huggingface_hub is not installed.
        RunError: the hub refuses, or cannot be reached.
    """
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise MissingExtraError("huggingface-hub", "text") from error
    if len(models) != 1:
        raise ConfigError(
            f"--push uploads one model, but {len(models)} were exported; choose one with --client NAME"
        )
    ((folder, facts),) = models.items()
    if facts.get("transformer", {}).get("base", ".").startswith(".."):
        raise ConfigError("--push uploads one folder, but this model's base lies beside it; add --merge")
    try:
        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        return str(
            api.upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=["__pycache__/*"])
        )
    except HFValidationError as error:
        raise ConfigError(f"--push expects OWNER/NAME, but got '{repository}'") from error
    except Exception as error:  # of the hub, of the network, or of whichever library speaks HTTP
        raise RunError(
            f"'{folder}' was exported, but not uploaded to '{repository}': {error}. Log in with `hf auth login`, "
            "check the name and the network, and repeat with --overwrite"
        ) from error
