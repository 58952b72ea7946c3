"""The Heart data as four hospitals would hold them: a CSV each, with words and with the cells that nobody filled.

    python studies/heart_files.py OUT                 from flamby/processed.*.data of the data folder (TAILORFL_DATA)
    python studies/heart_files.py OUT --look-alike    invented patients of the same form, for whoever has not the data

OUT/hospitals gets cleveland.csv, hungarian.csv, switzerland.csv and va.csv; OUT/new gets patients of each hospital that
are in none of these, every tenth, without their diagnosis, and OUT/diagnoses what it was. All 13 columns are kept, and
all patients. A cholesterol or blood pressure of 0 means that nobody measured it and is left empty.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from tailorfl.data.cross_silo import HEART_CENTRES
from tailorfl.data.storage import data_file
from tailorfl.errors import DataError

COLUMNS = (
    "age", "sex", "chest_pain", "pressure", "cholesterol", "sugar", "ecg", "heart_rate", "angina", "st_depression",
    "slope", "vessels", "thallium", "disease",
)  # fmt: skip
WORDS: dict[str, dict[int, str]] = {
    "sex": {0: "female", 1: "male"},
    "chest_pain": {1: "typical angina", 2: "atypical angina", 3: "no angina", 4: "asymptomatic"},
    "sugar": {0: "normal", 1: "high"},
    "ecg": {0: "normal", 1: "ST-T wave", 2: "hypertrophy"},
    "angina": {0: "no", 1: "yes"},
    "slope": {1: "up", 2: "flat", 3: "down"},
    "thallium": {3: "normal", 6: "fixed defect", 7: "reversible defect"},
}
LABEL = "disease"
NOT_MEASURED = ("pressure", "cholesterol")
"""Columns in which 0 says that nobody measured it."""
EVERY = 10
"""One patient of so many is new."""


def raw(centre: str) -> pd.DataFrame:
    """Return a hospital's patients as the Heart data have them, numbers and NaN.

    Raises:
        DataError: the data folder has no such file.
    """
    path = data_file(f"flamby/processed.{centre}.data")
    return pd.read_csv(path, header=None, names=list(COLUMNS), na_values="?")


def invented(centre: str) -> pd.DataFrame:
    """Return as many patients as one can look through, of the same columns; gaps differ between the hospitals."""
    number = HEART_CENTRES.index(centre)
    rng = np.random.default_rng(number)
    rows = (60, 50, 30, 40)[number]
    found = {name: rng.choice(list(words), rows).astype(float) for name, words in WORDS.items()}
    found["age"] = rng.normal(50 + 3 * number, 9, rows).round()
    found["pressure"] = rng.normal(130, 18, rows).round()
    found["cholesterol"] = rng.normal(230, 50, rows).round()
    found["heart_rate"] = rng.normal(150 - 8 * number, 22, rows).round()
    found["st_depression"] = rng.exponential(1, rows).round(1)
    found["vessels"] = rng.integers(0, 4, rows).astype(float)
    risk = (
        (found["age"] - 50) / 9 + (found["chest_pain"] == 4) + found["st_depression"] + found["angina"] - 1.5
    )
    found[LABEL] = (risk + rng.logistic(size=rows) > 0).astype(float)
    frame = pd.DataFrame(found)[list(COLUMNS)]
    for column, share in {
        "slope": 0.2 * number,
        "vessels": 0.3 * number,
        "thallium": 0.3,
        "pressure": 0.1,
    }.items():
        frame.loc[rng.random(rows) < share, column] = np.nan
    if centre == "switzerland":
        frame["cholesterol"] = 0.0
    return frame


def told(frame: pd.DataFrame) -> pd.DataFrame:
    """Return patients with words for codes, an empty cell for what was not measured, and yes or no for the disease."""
    found = frame.copy()
    for column in NOT_MEASURED:
        found[column] = found[column].where(found[column] != 0)
    for column, words in WORDS.items():
        found[column] = found[column].map(words)
    found[LABEL] = np.where(frame[LABEL] > 0, "yes", "no")
    return found


def write(out: Path, look_alike: bool = False) -> None:
    """Write the files of all hospitals."""
    frames = {centre: told(invented(centre) if look_alike else raw(centre)) for centre in HEART_CENTRES}
    for folder in ("hospitals", "new", "diagnoses"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    for centre, frame in frames.items():
        new = np.arange(len(frame)) % EVERY == EVERY - 1
        frame[~new].to_csv(out / "hospitals" / f"{centre}.csv", index=False)
        frame[new].drop(columns=LABEL).to_csv(out / "new" / f"{centre}.csv", index=False)
        frame.loc[new, [LABEL]].to_csv(out / "diagnoses" / f"{centre}.csv", index=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the Heart data as one CSV a hospital.")
    parser.add_argument("out", type=Path, help="folder for hospitals/, new/ and diagnoses/")
    parser.add_argument("--look-alike", action="store_true", help="invented patients, without the data")
    given = parser.parse_args()
    try:
        write(given.out, given.look_alike)
    except DataError as error:
        sys.exit(f"{error}; or add --look-alike, which invents patients of the same form")
