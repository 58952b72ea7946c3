"""What is stored of a job: a record a round, and the summary at its end."""

from __future__ import annotations

import math
from typing import Any

from tailorfl.errors import TailorflError
from tailorfl.evaluation.metrics import LOWER_IS_BETTER
from tailorfl.evaluation.protocols import headline
from tailorfl.evaluation.summary import summaries, summarize
from tailorfl.rounds.one_round import RoundResult
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.reductions import remarks
from tailorfl.runs.store import SECONDS, RunStore

GROWN = 10.0
"""A training loss that ends at so many times that of guessing (or its first, where nobody guesses) has diverged."""


def round_record(sim: Simulation, done: RoundResult, seconds: float) -> dict[str, Any]:
    """Return what is stored of a round, evaluations apart; `seconds` that the job has taken so far."""
    traffic = sim.traffic.as_dict()
    # Where ε counts on nobody seeing who took part, no record says it.
    participants: dict[str, Any] = (
        {} if sim.cohort_is_secret else {"clients": list(done.clients), "rejected": list(done.rejected)}
    )
    if done.trace is not None:
        participants["absent"] = list(done.absent)
    if done.trace is not None and done.trace.simulated:
        participants[SECONDS] = sim.clock
    return {
        "round": sim.round,
        **participants,
        **{f"loss/{stage}": value for stage, value in done.losses.items()},
        **traffic,
        "bytes": traffic["bytes_up"] + traffic["bytes_down"],
        "gradients": sim.gradients,
        "round_seconds": done.seconds,
        "seconds": seconds,
        "engine": sim.engine.name,
    }


def summary_of(
    sim: Simulation, store: RunStore, identity: dict[str, Any], seconds: float, metric: str
) -> dict[str, Any]:
    """Return the final numbers, read back from the records: a resumed run cannot differ from an uninterrupted one.

    `metric` is the one that comes first.
    """
    frame = store.clients()
    model, _ = headline(sim)
    if frame.empty:
        raise TailorflError(f"no client was evaluated after round {sim.round}, so there is no result")
    final = frame[frame["round"] == sim.round]
    rows = [{str(k): v for k, v in row.items()} for row in final.to_dict("records")]
    headline_rows = final[(final["model"] == model) & (final["set"] == "local")]
    if headline_rows.empty:
        raise TailorflError(
            f"no client was evaluated on its local test data (model {model}); add 'local' to eval.final"
        )
    return {
        **identity,
        "title": sim.method.title,
        "rounds": sim.round,
        "model": model,
        "metric": metric,
        "metrics": {**_over_clients(headline_rows, metric), **summaries(rows)},
        "best_by_validation": _best_by_validation(frame, model, metric),
        "bytes_up": sim.traffic.bytes_up,
        "bytes_down": sim.traffic.bytes_down,
        "traffic": sim.traffic.as_dict(),
        "gradients": sim.gradients,
        "gradients_each": sim.gradients / max(sim.turns, 1),
        "trained_scalars": sim.trained_scalars,
        "reductions": remarks(sim, sim.round),
        "seconds": seconds,
        "engine": sim.engine.name,
        "clients": len(sim.federation.members),
        **_malicious(sim),
        **_features(sim),
        **({} if sim.cohort_is_secret else _rejected(sim, store)),
        "loss_grew": _growth(sim, store),
        **_of_the_system(store),
    }


def _of_the_system(store: RunStore) -> dict[str, float]:
    """Return the share of the clients that were asked which took part, and simulated seconds.

    Nothing where all do at once.
    """
    rounds = store.rounds()
    if "absent" not in rounds:
        return {}
    absent = rounds["absent"].map(len).sum()
    reached = sum(
        len({*row["clients"], *row["absent"]}) for row in rounds[["clients", "absent"]].to_dict("records")
    )
    facts = {"answered": 1.0 - float(absent) / max(reached, 1)}
    return facts | ({"simulated_seconds": float(rounds[SECONDS].iloc[-1])} if SECONDS in rounds else {})


def _over_clients(rows: Any, metric: str) -> dict[str, float]:
    return summarize(rows[metric], rows["samples"], higher_is_better=metric not in LOWER_IS_BETTER)


def _rejected(sim: Simulation, store: RunStore) -> dict[str, Any]:
    """How many updates were rejected, and in which rounds, by name of the client."""
    rejected: dict[str, list[int]] = {}
    for row in store.rounds()[["round", "rejected"]].to_dict("records"):
        for client in row["rejected"]:
            rejected.setdefault(sim.federation.names[client], []).append(int(row["round"]))
    return {"rejected": sum(map(len, rejected.values())), "rejected_clients": rejected}


def _malicious(sim: Simulation) -> dict[str, Any]:
    """Who worked against the others, by name, and how; the numbers of the summary are of the others."""
    hostile = sim.malicious
    if not hostile.clients:
        return {}
    names = [sim.federation.names[client] for client in sorted(hostile.clients)]
    return {"malicious": {"kind": hostile.settings.kind, "clients": names}}


def _features(sim: Simulation) -> dict[str, str]:
    """Whether what frozen layers give out was computed once, in words; nothing where none are frozen."""
    frozen = any(group.model.frozen for group in sim.groups)
    return {"features": sim.features_note} if frozen else {}


def _growth(sim: Simulation, store: RunStore) -> list[float] | None:
    """Return the training loss of the first and the last round where training diverged though all numbers are finite.

    That is where it ends at `GROWN` times its first value, or that of guessing, whichever is larger.
    """
    rounds, source = store.rounds(), sim.federation.source
    if "loss/train" not in rounds:
        return None
    losses = rounds["loss/train"].dropna()
    guessing = {
        "classification": math.log(max(2, source.outputs)),
        "binary": math.log(2),
        "multilabel": math.log(2),
    }
    usual = guessing.get(source.task)
    if losses.empty or not losses.iloc[-1] > GROWN * (losses.iloc[0] if usual is None else usual):
        return None
    return [float(losses.iloc[0]), float(losses.iloc[-1])]


def _best_by_validation(frame: Any, model: str, metric: str) -> dict[str, Any] | None:
    """Return the evaluated round with the best mean validation metric, and the test metric there, or None."""
    rows = frame[frame["model"] == model]
    means = rows.groupby(["set", "round"])[metric].mean()
    if "val" not in means.index.get_level_values(0) or means["val"].isna().all():
        return None
    best = int(means["val"].idxmin() if metric in LOWER_IS_BETTER else means["val"].idxmax())
    return {
        "round": best,
        "val": float(means["val"][best]),
        "local": float(means["local"].get(best, float("nan"))),
    }
