"""The benchmark of a GPU, tried out on a processor: every way computes the same, and what fails harms nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


ON_PROCESSOR = ("--device", "cpu", "--tiny", "--no-tests", "--seconds", "0.05")


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *words]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "gpu.json"))
    assert done.returncode == 1
    assert "no GPU was found" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_way_takes_the_same_step(tmp_path: Path) -> None:
    """In float32 rounding, by networks of every kind; the table and the file have all of them."""
    place = tmp_path / "gpu.json"
    models = ["logistic", "resnet18", "vit_s", "lora"]
    done = run(*ON_PROCESSOR, "--minutes", "18", "--json", str(place), "--models", *models)
    assert done.returncode == 0, done.stderr
    out = json.loads(place.read_text())
    assert list(out["models"]) == models
    for model, found in out["models"].items():
        expected = {"loop", "vectorized", "sequential", "auto"}
        expected |= {"loop, channels last"} if model in ("resnet18", "vit_s") else set()
        assert set(found) == expected | ({"vectorized, grouped"} if model == "resnet18" else set())
        for way, record in found.items():
            assert "error" not in record, (model, way, record["error"])
            assert record["distance"] < 1e-4, (model, way)
            assert record["median"] > 0
        assert found["loop"]["distance"] == 0
        assert max(r["times_faster"] for w, r in found.items() if w.startswith("loop")) == 1
    assert place.with_suffix(".md").read_text().count("\n| ") == sum(map(len, out["models"].values())) + 1


@pytest.mark.slow
def test_what_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    """Here a library that LoRA needs cannot be imported."""
    (tmp_path / "transformers.py").write_text("raise ImportError('none here')\n")
    place = tmp_path / "gpu.json"
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run(*ON_PROCESSOR, "--json", str(place), "--models", "lora", "logistic", PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    out = json.loads(place.read_text())["models"]
    assert all("error" in record for record in out["lora"].values())
    assert all("error" not in record for record in out["logistic"].values())
    assert "| lora | loop | " in place.with_suffix(".md").read_text()
