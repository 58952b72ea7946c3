"""The Dockerfile and the workflow are valid, and do with this repository what they say."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_the_workflow_is_valid_and_runs_what_every_change_must_pass() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, str(WORKFLOW)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (job,) = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run", "make docs"]
    (python,) = [step["with"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert python["python-version"] in SpecifierSet(project["requires-python"])
    assert f"python:{python['python-version']}-slim" in DOCKERFILE


def copied() -> list[str]:
    """What the Dockerfile copies from the repository."""
    lines = [line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ")]
    return [name for names in lines if not names[0].startswith("--") for name in names]


def test_the_image_gets_what_it_is_built_from() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {"pyproject.toml", "constraints.txt", "src", "README.md", *project["license-files"]}
    assert needed == set(copied())
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[0] == "*"
    for name in copied():
        assert (ROOT / name).exists(), name
        assert f"!{name}" in ignored, name
        assert not [line for line in ignored[1:] if line[0] != "!" and fnmatch(name, line)], name


def test_the_dockerfile_passes_its_linter() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("hadolint has no package for this machine")
    done = subprocess.run([linter, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
