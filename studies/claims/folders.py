"""Evidence from where it lies: result folders of recipes, what was kept of them, and folders of either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from studies.claims.evidence import ABOUT, NUMBERS, Evidence, joined, of_results
from tailorfl.errors import RunError
from tailorfl.report.result import results
from tailorfl.runs.files import decode
from tailorfl.runs.folders import experiment_in

if TYPE_CHECKING:
    import pandas as pd


def of_folder(folder: Path) -> Evidence:
    """Return the evidence of a result folder, of all its variants, or of what `keep` has written.

    Raises:
        RunError: it is neither, or has no finished job.
    """
    if (folder / ABOUT).is_file():
        return _kept(folder)
    found = results(folder)
    config = next(iter(found.values())).config if list(found) == [""] else experiment_in(folder)
    return of_results(found, config, folder)


def gathered(folders: Sequence[Path]) -> list[Evidence]:
    """Return the evidence in folders: result folders, kept ones, or folders of such, all of a kind put together.

    Raises:
        RunError: one of them holds no finished job.
    """
    return joined(of_folder(place) for folder in folders for place in _places(folder))


def _places(folder: Path) -> Iterator[Path]:
    """Yield the folder itself, or those in it that hold evidence."""
    if (folder / ABOUT).is_file() or (folder / "config.yaml").is_file():
        yield folder
        return
    inside = sorted({file.parent for name in (ABOUT, "config.yaml") for file in folder.glob(f"*/{name}")})
    if not inside:
        raise RunError(
            f"'{folder}' holds no results: neither it nor a folder in it has config.yaml or {ABOUT}; check the name"
        )
    yield from inside


def _kept(folder: Path) -> Evidence:
    import pandas as pd

    try:
        about = decode((folder / ABOUT).read_text(encoding="utf-8"))
        frame: pd.DataFrame = pd.read_csv(folder / NUMBERS, keep_default_na=False, na_values=[""])
        frame["variant"], frame["label"] = frame["variant"].fillna("").astype(str), frame["label"].astype(str)
        rows = [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]
        return Evidence(about["recipe"], about["scale"], (str(folder),), about["digest"], tuple(rows))
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise RunError(f"'{folder}' is damaged: {error}; restore it from a copy, or keep it again") from error
