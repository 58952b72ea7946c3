"""What a job tells about its own comparison, beside its numbers.

Who took part, whether it settled, how far it was pulled.

| fact | meaning |
|---|---|
| fact.took_part.mean, .least | rounds that a client was drawn in: mean over clients, and of the client drawn least |
| fact.never_drawn | share of clients that never were |
| fact.change | change of the mean own metric of the deployed model over the last fifth of the rounds |
| fact.change_val | the same on validation parts |
| fact.change.global, .personal | the same of the model of that kind, where a job records it |
| fact.rate_left | share of the first learning rate that the last round has |
| fact.pull.each, .all | η·λ·(steps) of a personal model in a participation, and in all of them |
| fact.inside_grid | 1 if no tuned value lies at the edge of its grid, 0 if one does, absent if nothing was tuned |
| fact.lam_chosen | 1 if λ was among what was tuned, 0 if it was not, absent if nothing was tuned |
| fact.samples.SET | samples of a test set: of all clients together, or of the common set; `shifted` is all of these |
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from tailorfl.core.method import make_method
from tailorfl.report.result import REFERENCES, ExperimentResult
from tailorfl.runs.folders import TUNING, read_tuning
from tailorfl.runs.store import RunStore
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.training.update import RoundSchedule

OWN = ("val", "local", "participants")
"""Sets of which every client has a part of its own."""
CENTRALIZED = "centralized"
"""The method whose one client is all clients together."""
LAST = 0.2
"""Share of the rounds in which nothing should move any more."""


def facts_of(result: ExperimentResult) -> list[dict[str, float]]:
    """Return the facts of every job of a result, in its order; what a job does not tell is left out."""
    config, tuned = result.config, _tuned(result)
    steps = {int(s["seed"]): _steps(s, config) for s, _ in result.jobs if s["method"] in REFERENCES}
    found = []
    for summary, store in result.jobs:
        facts = {
            **_participation(summary, store),
            **_changes(summary, store, result.metric),
            "fact.rate_left": _rate_left(config, int(summary["rounds"])),
            **_samples(summary, store),
        }
        facts |= _pull(summary, config, steps.get(int(summary["seed"])), facts.get("fact.took_part.mean"))
        if (row := tuned.get(summary["label"])) is not None:
            facts["fact.inside_grid"] = float(not row["edges"])
            facts["fact.lam_chosen"] = float("method.lam" in row["chosen"])
        found.append(facts)
    return found


def _participation(summary: dict[str, Any], store: RunStore) -> dict[str, float]:
    rounds = store.rounds()
    if (
        "clients" not in rounds or summary["method"] == CENTRALIZED
    ):  # secret; of all clients' samples in one place
        return {}
    drawn = Counter(client for cohort in rounds["clients"] for client in cohort)
    clients = int(summary["clients"])
    return {
        "fact.took_part.mean": drawn.total() / clients,
        "fact.took_part.least": float(min(drawn.values())) if len(drawn) == clients else 0.0,
        "fact.never_drawn": 1 - len(drawn) / clients,
    }


def _changes(summary: dict[str, Any], store: RunStore, metric: str) -> dict[str, float]:
    rounds, found = store.rounds(), {}
    deployed = summary["model"]
    for name, model, part in (
        ("fact.change", deployed, "local"),
        ("fact.change_val", deployed, "val"),
        *((f"fact.change.{kind}", kind, "local") for kind in ("global", "personal")),
    ):
        column = f"{model}/{part}/{metric}"
        if column not in rounds:
            continue
        curve = rounds[["round", column]].dropna()
        before = curve[curve["round"] <= (1 - LAST) * summary["rounds"]]
        if len(before):
            found[name] = float(curve[column].iloc[-1] - before[column].iloc[-1])
    return found


def _rate_left(config: ExperimentConfig, rounds: int) -> float:
    schedule = RoundSchedule(**config.train.round_schedule.model_dump(), rounds=rounds)
    return schedule.share(rounds - 1)


def _samples(summary: dict[str, Any], store: RunStore) -> dict[str, float]:
    frame = store.clients()
    final = frame[(frame["round"] == summary["rounds"]) & (frame["model"] == summary["model"])]
    found = {
        str(name): float(some.max() if name == "global" or is_shifted(str(name)) else some.sum())
        for name, some in final.groupby("set")["samples"]
    }
    shifted = [size for name, size in found.items() if is_shifted(name)]
    sizes = found | ({"shifted": sum(shifted)} if shifted else {})
    return {f"fact.samples.{name}": size for name, size in sizes.items()}


def is_shifted(name: str) -> bool:
    """Whether a test set is a shifted one, by its name."""
    return name not in (*OWN, "global") and not name.startswith("heldout") and not name.endswith("_sharpness")


def _steps(summary: dict[str, Any], config: ExperimentConfig) -> float | None:
    """Return steps of a participation of a client that trains alone."""
    train = config.train
    if train.steps is not None:
        return float(train.steps)
    return float(summary["gradients_each"]) / train.batch_size if train.batch_size else None


def _pull(
    summary: dict[str, Any], config: ExperimentConfig, steps: float | None, turns: float | None
) -> dict[str, float]:
    line = next(method for method in config.methods if method.label == summary["label"])
    lam = make_method(line.name, line.options).all_options().get("lam")
    if not isinstance(lam, int | float) or steps is None or turns is None:
        return {}
    each = float({**line.train}.get("lr", config.train.lr)) * float(lam) * steps
    return {"fact.pull.each": each, "fact.pull.all": each * turns} if math.isfinite(each) else {}


def _tuned(result: ExperimentResult) -> dict[str, Any]:
    """Label -> what its tuning came to, of an experiment that was tuned."""
    file = result.path / TUNING
    methods: dict[str, Any] = read_tuning(file)["methods"] if file.is_file() else {}
    return methods
