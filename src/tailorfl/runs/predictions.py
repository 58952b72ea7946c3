"""What deployed models said of their clients' test samples, beside the records of a job (`predictions.safetensors`)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from tailorfl.errors import RunError
from tailorfl.evaluation.predictions import Predictions
from tailorfl.runs.files import replacing, reporting

NAME = "predictions.safetensors"


def save(folder: Path, said: Predictions) -> None:
    """Writes predictions. Raises RunError where that fails."""
    from safetensors.numpy import save_file

    with replacing(folder / NAME) as part:
        save_file({name: array.copy() for name, array in asdict(said).items()}, part)


def load(folder: Path) -> Predictions | None:
    """Returns the predictions of a job, None where none were kept. Raises RunError where they are damaged."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not (folder / NAME).is_file():
        return None
    with reporting(folder / NAME, "read"):
        try:
            return Predictions(**load_file(folder / NAME))
        except (SafetensorError, TypeError) as error:
            raise RunError(
                f"'{folder / NAME}' is damaged ({error}); restore it from a copy, or delete it"
            ) from error
