"""What a job keeps of its last evaluation for single clients: predictions of test samples, and temperatures."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import numpy as np

from tailorfl.data.remote_federation import REMOTE
from tailorfl.errors import ConfigError, RunError
from tailorfl.evaluation.calibration import FEWEST, fitted, measures
from tailorfl.evaluation.predictions import Kept, Predictions
from tailorfl.evaluation.protocols import headline
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.files import replacing, reporting, write_text
from tailorfl.runs.job import Job
from tailorfl.runs.privacy import privacy_of
from tailorfl.runs.store import RunStore

log = logging.getLogger(__name__)

TASKS = ("classification", "binary")
CALIBRATION = "calibration.csv"
PREDICTIONS = "predictions.safetensors"
ARRAYS = ("client", "row", "y", "outputs")


def keeper(job: Job, sim: Simulation) -> Kept | None:
    """Return what notes predictions of the last evaluation, None where nothing is to be kept.

    Test samples are kept where there are `eval.predictions` at most; not of generated text, and not of private
    training, whose ε covers no label of a sample. Validation samples are noted to fit temperatures.

    Of samples that are elsewhere nothing is kept here.

    Raises:
        ConfigError: temperatures of a task that has no classes.
    """
    config, source = job.config.eval, sim.federation.source
    if source.info.get(REMOTE):
        return None
    if config.calibrate != "none" and source.task not in TASKS:
        raise ConfigError(
            f"eval.calibrate={config.calibrate} fits probabilities of classes, but '{source.name}' is a task of "
            f"{source.task}; leave it out"
        )
    if config.calibrate == "none" and not _stored(job, sim):
        return None
    return Kept(headline(sim)[0], ("local", "val") if config.calibrate != "none" else ("local",))


def _stored(job: Job, sim: Simulation) -> bool:
    """Whether the predictions themselves are written."""
    samples = int(sim.federation.sizes("test")[: sim.federation.num_clients].sum())
    covered = privacy_of(job) is None and sim.federation.source.task != "generation"
    return covered and 0 < samples <= job.config.eval.predictions


def finish(predictions: Kept, job: Job, sim: Simulation, store: RunStore) -> dict[str, Any]:
    """Write what was kept into a job's folder and return what its summary says of it."""
    test = predictions.part("local")
    if _stored(job, sim):
        save_predictions(store.path, test)
    if "val" not in predictions.parts:
        return {}
    frame = calibrated(test, predictions.part("val"), sim.federation.names)
    text = io.StringIO()
    frame.to_csv(text, index=False, lineterminator="\n")
    write_text(store.path / CALIBRATION, text.getvalue())
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
    """Return a frame with a row a client: its temperature, and what it does to its test part."""
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
    """Return the temperature of a client of a job, None where it has none."""
    import pandas as pd

    file = store.path / CALIBRATION
    if client is None or not file.is_file():
        return None
    frame = pd.read_csv(file)
    temperatures = frame.loc[frame["client"] == client, "temperature"].dropna()
    return float(temperatures.iloc[0]) if len(temperatures) else None


def save_predictions(folder: Path, predictions: Predictions) -> None:
    """Write predictions. Raises RunError where that fails."""
    from safetensors.numpy import save_file

    with replacing(folder / PREDICTIONS) as part:
        arrays = {name: getattr(predictions, name).copy() for name in ARRAYS}
        save_file(arrays, part, metadata={"task": predictions.task})


def load_predictions(folder: Path) -> Predictions | None:
    """Return the predictions of a job, None where none were kept. Raises RunError where they are damaged."""
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
