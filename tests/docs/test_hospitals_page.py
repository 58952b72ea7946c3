"""The walk of docs/hospitals.md by its own commands: predictions for raw rows are those inside the run."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch
from blocks import ROOT, blocks, commands, file_of, invoke

from scripts import loaded
from tailorfl.data.cross_silo import HEART_CENTRES
from tailorfl.errors import DataError
from tailorfl.export.predict import predict
from tailorfl.runs.trained_models import restore

PAGE = ROOT / "docs" / "hospitals.md"


@pytest.fixture(scope="module")
def heart_files() -> ModuleType:
    return loaded("studies/heart_files.py")


def write_or_skip(heart_files: ModuleType, folder: Path, look_alike: bool = False) -> None:
    try:
        heart_files.write(folder, look_alike)
    except DataError as error:
        pytest.skip(f"the Heart data are not here: {error}")


@pytest.mark.parametrize(
    "look_alike", [pytest.param(False, marks=pytest.mark.slow), True], ids=["heart", "look-alike"]
)
def test_from_files_to_predictions(
    look_alike: bool, heart_files: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_or_skip(heart_files, Path("heart"), look_alike)
    tried = []
    for block in blocks(PAGE):
        if (file := file_of(block)) is not None:
            Path(file).write_text(block.text, encoding="utf-8")
        elif block.language == "console":
            for program, *words in commands(block):
                if program == "tailorfl" and words[0] in ("data", "run", "export", "predict"):
                    invoke([*words, "rounds=3", "seeds=1", "--quiet"] if words[0] == "run" else words)
                    tried.append(words[0])
    assert tried == ["data", "run", "export", *["predict"] * 4]
    run = restore("runs/heart", "fedavg_ft")
    federation = run.sim.federation
    assert federation.names == HEART_CENTRES
    start = 0
    for client, name in enumerate(federation.names):
        frame = pd.read_csv(f"heart/hospitals/{name}.csv")
        assert frame.isna().any(axis=1).any()
        rows = torch.arange(start, start + len(frame))
        start += len(frame)
        with torch.no_grad():
            inside = next(run.models([client])).module(federation.source.x[rows])[:, 0].double().sigmoid()
        said = predict(f"models/{name}", f"heart/hospitals/{name}.csv")
        np.testing.assert_allclose(said["p(yes)"], inside, atol=1e-6)
        # and for patients whom the run never saw, by what the command wrote
        new = pd.read_csv(f"heart/new/{name}.csv")
        assert "disease" not in new
        x = federation.source.info["preparation"].of(name).inputs(new)
        with torch.no_grad():
            wanted = next(run.models([client])).module(x)[:, 0].double().sigmoid()
        found = pd.read_csv(f"{name}.csv")
        np.testing.assert_allclose(found["p(yes)"], wanted, atol=1e-6)
        assert found["predicted"].tolist() == ["yes" if p > 0.5 else "no" for p in wanted]


def test_the_files_have_words_and_gaps_and_all_patients(heart_files: ModuleType, tmp_path: Path) -> None:
    write_or_skip(heart_files, tmp_path)
    old, new, diagnoses = (
        {name: pd.read_csv(tmp_path / kind / f"{name}.csv") for name in HEART_CENTRES}
        for kind in ("hospitals", "new", "diagnoses")
    )
    assert [len(old[name]) + len(new[name]) for name in HEART_CENTRES] == [303, 294, 123, 200]
    assert sum(map(len, old.values())) == 829
    assert old["switzerland"]["cholesterol"].isna().all()
    assert old["cleveland"].iloc[0].tolist() == [
        63, "male", "typical angina", 145, 233, "high", "hypertrophy", 150, "no", 2.3, "down", 0, "fixed defect", "no",
    ]  # fmt: skip
    ill = pd.concat([old["va"]["disease"], diagnoses["va"]["disease"]])
    assert (ill == "yes").sum() == (heart_files.raw("va")["disease"] > 0).sum()
