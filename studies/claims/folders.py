"""Evidence from where it lies: result folders of recipes, what was kept of them, and folders of either."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from studies.claims.claim import Claim
from studies.claims.evidence import ABOUT, JOB, NUMBERS, Evidence, joined, of_results
from studies.claims.noise import FILE as NOISE
from studies.claims.noise import KEY, measured, read_noise
from tailorfl.errors import RunError
from tailorfl.report.result import ExperimentResult, results
from tailorfl.runs.files import decode
from tailorfl.runs.folders import TUNING, experiment_in

if TYPE_CHECKING:
    import pandas as pd

CLIENTS = "clients.csv.gz"


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


def keep_records(evidence: Evidence, place: Path, claims: Iterable[Claim]) -> None:
    """Keep, beside the numbers of `evidence`, what they are made of: rows of clients, measured noise, and the tuning.

    Rows that were kept before stay where no run of theirs is given.
    """
    import pandas as pd

    clients, noise, claims = list[pd.DataFrame](), list[pd.DataFrame](), tuple(claims)
    for folder in sorted(map(Path, evidence.places), key=lambda one: (one / ABOUT).is_file()):  # runs first
        if (folder / ABOUT).is_file():
            clients += (
                [pd.read_csv(folder / CLIENTS, keep_default_na=False)] if (folder / CLIENTS).is_file() else []
            )
            noise += (
                [pd.read_csv(folder / NOISE, keep_default_na=False)] if (folder / NOISE).is_file() else []
            )
        else:
            found = results(folder)
            clients.append(client_rows(found))
            noise.append(pd.DataFrame(measured(found, claims)))
        if (folder / TUNING).is_file() and folder != place:
            shutil.copyfile(folder / TUNING, place / TUNING)
    for name, frames, unique in (
        (CLIENTS, clients, [*JOB, "model", "set", "client"]),
        (NOISE, noise, list(KEY)),
    ):
        if frames := [frame for frame in frames if len(frame)]:
            whole = pd.concat(frames).drop_duplicates(unique)
            squeezed = {"method": "gzip", "mtime": 0} if name.endswith(".gz") else None
            whole.to_csv(
                place / name, index=False, float_format="%.8g", lineterminator="\n", compression=squeezed
            )


def client_rows(found: Mapping[str, ExperimentResult]) -> pd.DataFrame:
    """Return a row for each job, model, test set and client: its samples and the metric after the last round."""
    import pandas as pd

    frames = []
    for variant, result in found.items():
        for summary, store in result.jobs:
            rows = store.clients()
            last = rows[rows["round"] == summary["rounds"]][
                ["model", "set", "client", "samples", result.metric]
            ]
            job = dict(zip(JOB, (variant, summary["label"], summary["seed"]), strict=True))
            frames.append(last.rename(columns={result.metric: "value"}).assign(**job))
    whole: pd.DataFrame = pd.concat(frames)[[*JOB, "model", "set", "client", "samples", "value"]]
    return whole


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
        frame["variant"] = frame["variant"].astype(object).where(frame["variant"].notna(), "").astype(str)
        frame["label"] = frame["label"].astype(str)
        rows = [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]
        noise = read_noise(folder)
        return Evidence(
            about["recipe"],
            about["scale"],
            (str(folder),),
            about["digest"],
            tuple(rows),
            about["settings"],
            noise,
        )
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise RunError(f"'{folder}' is damaged: {error}; restore it from a copy, or keep it again") from error
