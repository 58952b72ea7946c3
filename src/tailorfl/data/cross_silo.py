"""Real federations of a few institutions: the hospitals of FLamby, and the schools of London.

Heart and TCGA-BRCA (du Terrail et al., NeurIPS 2022 Datasets and Benchmarks) follow the released protocol in every
choice that changes a number: the rows that are dropped, the split, the encoding and the scaling. Natural clients are
group `client`; the protocol's split is `test`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from tailorfl.archives import load_arrays
from tailorfl.data.registry import data_source
from tailorfl.data.scaling import PRIVATE_SCALING, SCALING, PrivateScaling, Scaling
from tailorfl.data.source import Source
from tailorfl.data.storage import data_file
from tailorfl.errors import DataError, check_known

if TYPE_CHECKING:
    import pandas as pd  # at run time only when tables are read: it takes 60 MB


HEART_CENTRES = ("cleveland", "hungarian", "switzerland", "va")
TCGA_REGIONS = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")
_SPARSE_COLUMNS = [10, 11, 12]
_SPLIT_SEED = 43
_TRAIN_SHARE = 0.66


PUBLIC_SCALES: dict[object, tuple[float, float]] = {
    # age, years: decades around the middle of adult life
    0: (50.0, 10.0),
    # blood pressure at rest, mm Hg: below 120 is normal, from 140 on stage 2 (ACC/AHA 2017)
    3: (120.0, 20.0),
    # cholesterol, mg/dl: below 200 is desirable, from 240 on high (NCEP ATP III, 2001)
    4: (200.0, 40.0),
    # highest heart rate, 1/min, at 50: 170 = 220 − age (Fox et al., 1971); 145 is 85 % of it, a test's target
    7: (145.0, 25.0),
    # ST depression under exercise, mm: 1 makes a test positive (ACC/AHA 2002)
    9: (1.0, 1.0),
}
"""Column -> (centre, scale), from guidelines and not from these patients; all other columns are 0 or 1."""
LARGEST = 3.0
"""The magnitude at which publicly scaled features are cut off: a cholesterol of 0 means that it was not measured."""
LEVELS = {2: (1.0, 2.0, 3.0, 4.0), 6: (0.0, 1.0, 2.0)}
"""The values of the categorical columns in the description of the data: kind of chest pain, ECG at rest."""
LOWEST_SCORE, SCORE_WIDTH = 1.0, 69.0
"""Scores are from 1 to 70, and become (score − 1)/69."""
PERCENTAGES = (3, 4)
"""Columns that are percentages of a school's pupils; all others are 0 or 1."""


@data_source(
    "FLamby heart disease, 4 hospitals, 740 patients, 13 features, binary label",
    files="flamby/processed.*.data",
)
def heart(scaling: Literal["client", "public"] = "client") -> Source:
    """Heart disease, yes or no, from 13 features of 740 patients in 4 hospitals; UCI, CC BY 4.0.

    Columns 10, 11, 12 and then rows with missing values are dropped, the label is "last column is not 0",
    columns 2 and 6 are one-hot encoded over all hospitals without their first level, and every hospital is
    cut 66/34. Features are already standardised with each client's own TRAIN mean and standard deviation
    (ddof 1), because that is part of the protocol; the deviation gets +1e-9 as in the release, since one
    hospital's cholesterol is constantly 0. With `scaling` "public" they are shifted and scaled by `PUBLIC_SCALES`
    instead, patient by patient, as sample-level differential privacy requires.
    Task `binary`: logistic regression with one output.

    Args:
        scaling: "client" standardises by each hospital's training patients, "public" by fixed numbers.

    Raises:
        ConfigError: another `scaling`.
    """
    import pandas as pd

    check_known("scaling of heart", scaling, ("client", "public"))
    tables = [_heart_table(centre) for centre in HEART_CENTRES]
    label = np.concatenate([(table.iloc[:, -1] != 0).to_numpy() for table in tables]).astype(np.int64)
    client = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    test = np.concatenate([_heart_test_rows(label[client == centre]) for centre in range(len(tables))])
    features = pd.concat([table.iloc[:, :-1] for table in tables], ignore_index=True)
    for kind, levels in LEVELS.items():
        features[kind] = pd.Categorical(features[kind], categories=levels)
    encoded = pd.get_dummies(features, columns=list(LEVELS), drop_first=True)
    x = encoded.to_numpy(dtype=np.float64)
    info: dict[str, Any] = {"features": tuple(str(column) for column in encoded.columns)}
    if scaling == "public":
        scales = np.array([PUBLIC_SCALES.get(column, (0.0, 1.0)) for column in encoded.columns])
        centres, widths = torch.from_numpy(scales.T).unsqueeze(1)
        info[SCALING] = Scaling(centres, widths, clip=LARGEST)
        x = ((x - scales[:, 0]) / scales[:, 1]).clip(-LARGEST, LARGEST)
    else:
        info[PRIVATE_SCALING] = PrivateScaling(
            "each client's own training mean and deviation (FLamby's protocol)", "data.options.scaling=public"
        )
        train_rows = [x[(client == centre) & ~test] for centre in range(len(tables))]
        train_rows.append(x[~test])  # for patients of other hospitals
        mean = np.stack([rows.mean(axis=0) for rows in train_rows])
        deviation = np.stack([rows.std(axis=0, ddof=1) + 1e-9 for rows in train_rows])
        info[SCALING] = Scaling(torch.from_numpy(mean), torch.from_numpy(deviation), HEART_CENTRES)
        x = (x - mean[client]) / deviation[client]
    return Source(
        name="heart",
        x=torch.from_numpy(x.astype(np.float32)),
        y=torch.from_numpy(label),
        task="binary",
        outputs=1,
        test=torch.from_numpy(test),
        groups={"client": torch.from_numpy(client)},
        group_names={"client": HEART_CENTRES},
        info=info,
    )


def _heart_table(centre: str) -> pd.DataFrame:
    import pandas as pd

    table = pd.read_csv(data_file(f"flamby/processed.{centre}.data"), header=None, na_values="?")
    return table.drop(columns=_SPARSE_COLUMNS).dropna()


def _heart_test_rows(label: np.ndarray) -> np.ndarray:
    """Return the protocol's test mask `[samples]` of one hospital; stratified if no class has under 3 patients."""
    from sklearn.model_selection import train_test_split

    stratify = label if np.bincount(label, minlength=2).min() > 2 else None
    _, chosen = train_test_split(
        np.arange(len(label)),
        train_size=_TRAIN_SHARE,
        random_state=_SPLIT_SEED,
        shuffle=True,
        stratify=stratify,
    )
    return np.isin(np.arange(len(label)), chosen)


@data_source(
    "FLamby TCGA-BRCA, 6 regions, 1,088 patients, 39 features, survival",
    files="flamby/brca.csv, flamby/brca_train_test_split.csv",
)
def tcga() -> Source:
    """Breast cancer survival, (event, days), 39 features of 1,088 patients in 6 regions; FLamby's TCGA-BRCA.

    Features are not scaled, as in the protocol. Repository MIT, data under the open-access terms of the
    Genomic Data Commons: do not try to identify patients. Task `survival`: a linear Cox model with one
    output.
    """
    import pandas as pd

    patients = pd.read_csv(data_file("flamby/brca.csv"))
    folds = pd.read_csv(data_file("flamby/brca_train_test_split.csv"))
    table = patients.merge(folds[["pid", "fold2"]], on="pid", how="inner", validate="one_to_one")
    if len(table) != len(folds):
        raise DataError(
            f"tcga: {len(folds) - len(table)} patients of brca_train_test_split.csv are not in brca.csv"
        )
    part = table["fold2"].str.split("_", expand=True)
    features = patients.columns[1:-2]
    return Source(
        name="tcga",
        x=torch.from_numpy(table[features].to_numpy(dtype=np.float32, copy=True)),
        y=torch.from_numpy(table[["E", "T"]].to_numpy(dtype=np.float32, copy=True)),
        task="survival",
        outputs=1,
        test=torch.from_numpy((part[0] == "test").to_numpy(dtype=bool, copy=True)),
        groups={"client": torch.from_numpy(part[1].to_numpy(dtype=np.int64, copy=True))},
        group_names={"client": TCGA_REGIONS},
        info={"features": tuple(features)},
    )


@data_source(
    "exam scores of 15,362 pupils, 139 London schools, 28 features, regression", files="school/school.npz"
)
def school(scaling: Literal["none", "public"] = "none") -> Source:
    """Exam scores of 15,362 pupils of 139 schools (ILEA), in [0, 1], from 28 features; group `client` is the school.

    Two features are percentages of a school, the others 0 or 1 and the last always 1. The protocol of Motley (Wu et
    al., 2022) and of Liu et al. (NeurIPS 2022) standardises them by each school's training pupils
    (`data.normalise: client`), and its linear model has a bias. With `scaling` "public" they are mapped from their
    range to [-1, 1] instead, pupil by pupil, as sample-level differential privacy requires. There is no official
    split. Task `regression`; the metric of both is the squared error, which Motley prints halved.

    Args:
        scaling: "none" leaves features as they are, "public" maps their ranges to [-1, 1].

    Raises:
        ConfigError: another `scaling`.
        DataError: school.npz is missing, damaged, or not `x` `[pupils, 28]`, `y` `[pupils]`, `sizes` `[schools]`.
    """
    check_known("scaling", scaling, ("none", "public"))
    file = data_file("school/school.npz")
    try:
        arrays = load_arrays(file)
        x, y, sizes = (arrays[name] for name in ("x", "y", "sizes"))
        client = np.repeat(np.arange(len(sizes)), sizes)
        info: dict[str, Any] = {}
        if scaling == "public":
            middle = np.full((1, x.shape[1]), 0.5)
            middle[0, PERCENTAGES] = 50.0
            info[SCALING] = Scaling(torch.from_numpy(middle), torch.from_numpy(middle.copy()))
            x = (x - middle) / middle
        return Source(
            name="school",
            x=torch.from_numpy(x.astype(np.float32)),
            y=torch.from_numpy(((y - LOWEST_SCORE) / SCORE_WIDTH).astype(np.float32)).unsqueeze(1),
            task="regression",
            outputs=1,
            groups={"client": torch.from_numpy(client)},
            group_names={"client": tuple(f"school {number}" for number in range(1, len(sizes) + 1))},
            info=info,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"school: '{file}' cannot be used: {error}") from error
