"""The folder that authors of methods copy installs as a package, passes its tests and is found by its name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tailorfl
from scripts import loaded
from tailorfl.core import method as registry
from tailorfl.testing import checks_of

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "examples" / "method-template"
SMALL = ["rounds=1", "seeds=1", "data.samples=120", "data.clients=3", "engine=sequential"]


@pytest.mark.slow
def test_a_copy_installs_passes_its_tests_and_compares(tmp_path: Path) -> None:
    copy, target = tmp_path / "copy", tmp_path / "site"
    shutil.copytree(TEMPLATE, copy, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    source = Path(tailorfl.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{target}{os.pathsep}{source}", "COLUMNS": "200"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    run(
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        str(target),
        ".",
    )
    (copy / "my_method.py").unlink()  # what is tested is what was installed
    assert " passed" in run("pytest", "-p", "no:cacheprovider", "test_my_method.py")
    compare = ("tailorfl", "compare", "demo", "method=local,my_method", *SMALL)
    printed = run(*compare, "--out", str(tmp_path / "runs"), "--quiet")
    assert "MyMethod" in printed


def test_the_templates_method_is_no_method_of_the_library_and_has_every_check() -> None:
    module = loaded("examples/method-template/my_method.py")
    assert module.MyMethod.name not in registry.methods()
    for check in checks_of(module.MyMethod):
        if check.name in (
            "evaluated_models_are_those_promised",
            "newcomers_without_steps_deploy_what_they_receive",
        ):
            check()
