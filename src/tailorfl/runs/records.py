"""The stored results of a job: a record per round, and a final summary, predictions on test samples, temperatures."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tailorfl.data.remote_federation import REMOTE
from tailorfl.errors import ConfigError, RunError, TailorflError
from tailorfl.evaluation.calibration import FEWEST, fitted, measures
from tailorfl.evaluation.metrics import LOWER_IS_BETTER
from tailorfl.evaluation.predictions import Kept, Predictions
from tailorfl.evaluation.protocols import headline
from tailorfl.evaluation.summary import summaries, summarize
from tailorfl.rounds.one_round import RoundResult
from tailorfl.rounds.participation import Trace
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.files import replacing, reporting, write_text
from tailorfl.runs.job import Job
from tailorfl.runs.privacy import privacy_of
from tailorfl.runs.reductions import remarks
from tailorfl.runs.store import SECONDS, TRACE, RunStore

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)
GROWN = 10.0
"""Training has diverged if its last loss exceeds this many times that of guessing (its first one, without classes)."""
TASKS = ("classification", "binary")
CALIBRATION = "calibration.csv"
PREDICTIONS = "predictions.safetensors"
ARRAYS = ("client", "row", "y", "outputs")


def round_record(sim: Simulation, done: RoundResult, seconds: float) -> dict[str, Any]:
    """Return the record of a round, without evaluations; `seconds` is the job's time so far."""
    traffic = sim.traffic.as_dict()
    # If ε requires that nobody sees who took part, records do not reveal it.
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
    """Return the final numbers, read from the records, so that a resumed run cannot differ from an uninterrupted one.

    `metric` is the first metric.
    """
    frame, rounds = store.clients(), store.rounds()
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
    higher = metric not in LOWER_IS_BETTER
    over_clients = summarize(headline_rows[metric], headline_rows["samples"], higher_is_better=higher)
    return {
        **identity,
        "title": sim.method.title,
        "rounds": sim.round,
        "model": model,
        "metric": metric,
        "metrics": {**over_clients, **summaries(rows)},
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
        **({} if sim.cohort_is_secret else _rejected(sim, rounds)),
        "loss_grew": _growth(sim, rounds),
        **_of_the_system(store, rounds),
    }


def _of_the_system(store: RunStore, rounds: pd.DataFrame) -> dict[str, float]:
    """Return the share of asked clients that took part, and the simulated seconds.

    Empty if all clients answer at once.
    """
    if "absent" not in rounds:
        return {}
    traces = list(Trace.read(store.path / TRACE))  # methods may ask more clients than were sampled
    asked, absent = (sum(len(getattr(t, name)) for t in traces) for name in ("asked", "absent"))
    facts = {"answered": 1.0 - absent / max(asked, 1)}
    return facts | ({"simulated_seconds": float(rounds[SECONDS].iloc[-1])} if SECONDS in rounds else {})


def _rejected(sim: Simulation, rounds: pd.DataFrame) -> dict[str, Any]:
    """Return the number of rejected updates, and the rounds of rejections by client name."""
    rejected: dict[str, list[int]] = {}
    for row in rounds[["round", "rejected"]].to_dict("records"):
        for client in row["rejected"]:
            rejected.setdefault(sim.federation.names[client], []).append(int(row["round"]))
    return {"rejected": sum(map(len, rejected.values())), "rejected_clients": rejected}


def _malicious(sim: Simulation) -> dict[str, Any]:
    """Return the names of malicious clients, and their attack; the summary's numbers are of all others."""
    hostile = sim.malicious
    if not hostile.clients:
        return {}
    names = [sim.federation.names[client] for client in sorted(hostile.clients)]
    return {"malicious": {"kind": hostile.settings.kind, "clients": names}}


def _features(sim: Simulation) -> dict[str, str]:
    """Return a sentence on the caching of frozen layers' outputs, or nothing without frozen layers."""
    frozen = any(group.model.frozen for group in sim.groups)
    return {"features": sim.features_note} if frozen else {}


def _growth(sim: Simulation, rounds: pd.DataFrame) -> list[float] | None:
    """Return the training losses of the first and the last round if training diverged although all numbers are finite.

    It diverged if the last loss exceeds `GROWN` times the loss of guessing or, for tasks without classes, the first
    loss.
    """
    source = sim.federation.source
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


def _best_by_validation(frame: pd.DataFrame, model: str, metric: str) -> dict[str, Any] | None:
    """Return the evaluated round with the best mean validation metric, and its test metric, or None."""
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


def keeper(job: Job, sim: Simulation) -> Kept | None:
    """Return the collector of the last evaluation's predictions, or None if none are kept.

    Predictions on test samples are kept if there are at most `eval.predictions`, except for generated text and private
    training, whose ε does not cover samples' labels. Those on validation samples are collected to fit temperatures.

    Nothing is kept of remote samples.

    Raises:
        ConfigError: temperatures are requested for a task without classes.
    """
    config, source = job.config.eval, sim.federation.source
    if source.info.get(REMOTE):
        return None
    if config.calibrate != "none" and source.task not in TASKS:
        raise ConfigError(
            f"eval.calibrate={config.calibrate} fits probabilities of classes, but the task of '{source.name}' is "
            f"{source.task}; leave it out"
        )
    if config.calibrate == "none" and not _stored(job, sim):
        return None
    return Kept(headline(sim)[0], ("local", "val") if config.calibrate != "none" else ("local",))


def _stored(job: Job, sim: Simulation) -> bool:
    """Return whether the predictions themselves are written."""
    samples = int(sim.federation.sizes("test")[: sim.federation.num_clients].sum())
    covered = privacy_of(job) is None and sim.federation.source.task != "generation"
    return covered and 0 < samples <= job.config.eval.predictions


def finish(predictions: Kept, job: Job, sim: Simulation, store: RunStore) -> dict[str, Any]:
    """Write the kept predictions into a job's folder and return their entries in its summary."""
    test = predictions.part("local")
    if _stored(job, sim):
        save_predictions(store.path, test)
    if "val" not in predictions.parts:
        return {}
    frame = calibrated(test, predictions.part("val"), sim.federation.names)
    write_text(store.path / CALIBRATION, frame.to_csv(index=False, lineterminator="\n"))
    both = frame[frame["temperature"].notna() & frame["ece"].notna()]
    if not len(both):
        log.warning(
            "%s: no client has %d validation samples and a test sample, so no temperature was fitted",
            job.name,
            FEWEST,
        )
    means = {name: float(both[name].mean()) for name in both.columns[5:]} if len(both) else {}
    return {"calibration": {"by": job.config.eval.calibrate, "clients": len(both), **means}}


def calibrated(test: Predictions, val: Predictions, names: Any) -> Any:
    """Return a frame with a row per client: its temperature, and the effect on its test part."""
    import pandas as pd

    rows = []
    for client in np.union1d(test.client, val.client).tolist():
        test_part, val_part = test.of(client), val.of(client)
        temperature = fitted(val_part)
        row = {
            "client": client,
            "name": str(names[client]),
            "val_samples": len(val_part.y),
            "samples": len(test_part.y),
            "temperature": np.nan if temperature is None else temperature,
        }
        before, after = measures(test_part), measures(test_part, temperature or 1.0)
        for measure, value in before.items():
            row[measure] = value
            row[f"{measure}_calibrated"] = np.nan if temperature is None else after[measure]
        rows.append(row)
    return pd.DataFrame(rows)


def temperature_of(store: RunStore, client: int | None) -> float | None:
    """Return the temperature of a client of a job, or None if it has none."""
    import pandas as pd

    file = store.path / CALIBRATION
    if client is None or not file.is_file():
        return None
    frame = pd.read_csv(file)
    temperatures = frame.loc[frame["client"] == client, "temperature"].dropna()
    return float(temperatures.iloc[0]) if len(temperatures) else None


def save_predictions(folder: Path, predictions: Predictions) -> None:
    """Write predictions. Raises RunError if that fails."""
    from safetensors.numpy import save_file

    with replacing(folder / PREDICTIONS) as part:
        arrays = {name: getattr(predictions, name).copy() for name in ARRAYS}
        save_file(arrays, part, metadata={"task": predictions.task})


def load_predictions(folder: Path) -> Predictions | None:
    """Return the predictions of a job, or None if none were kept. Raises RunError if they are damaged."""
    from safetensors import SafetensorError, safe_open

    if not (folder / PREDICTIONS).is_file():
        return None
    with reporting(folder / PREDICTIONS, "read"):
        try:
            with safe_open(folder / PREDICTIONS, framework="numpy") as file:
                return Predictions(file.metadata()["task"], *(file.get_tensor(name) for name in ARRAYS))
        except (SafetensorError, TypeError, KeyError) as error:
            raise RunError(
                f"'{folder / PREDICTIONS}' is damaged ({error}); restore it from a copy, or delete it"
            ) from error
