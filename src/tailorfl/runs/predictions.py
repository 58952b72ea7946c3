"""What deployed models said of their clients' test samples, beside the records of a job (`predictions.safetensors`)."""

from __future__ import annotations

from pathlib import Path

from tailorfl.errors import RunError
from tailorfl.evaluation.predictions import Predictions
from tailorfl.runs.files import replacing, reporting

NAME = "predictions.safetensors"
ARRAYS = ("client", "row", "y", "outputs")


def save(folder: Path, said: Predictions) -> None:
    """Writes predictions. Raises RunError where that fails."""
    from safetensors.numpy import save_file

    with replacing(folder / NAME) as part:
        arrays = {name: getattr(said, name).copy() for name in ARRAYS}
        save_file(arrays, part, metadata={"task": said.task})


def load(folder: Path) -> Predictions | None:
    """Returns the predictions of a job, None where none were kept. Raises RunError where they are damaged."""
    from safetensors import SafetensorError, safe_open

    if not (folder / NAME).is_file():
        return None
    with reporting(folder / NAME, "read"):
        try:
            with safe_open(folder / NAME, framework="numpy") as file:
                return Predictions(file.metadata()["task"], *(file.get_tensor(name) for name in ARRAYS))
        except (SafetensorError, TypeError, KeyError) as error:
            raise RunError(
                f"'{folder / NAME}' is damaged ({error}); restore it from a copy, or delete it"
            ) from error
