"""What is published: its needs are declared, its page stands alone, its name, version and address are one each."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from readme_renderer.markdown import render

import tailorfl

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
ADDRESS = PROJECT["urls"]["Repository"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
UNDECLARED = {"pydantic_core", "fastapi", "httpx", "starlette", "uvicorn"}
"""A half of pydantic, and what flwr serves and calls with: each pins the versions that fit to it."""
OTHER_NAMES = {"imagecorruptions": "imagecorruptions-imaug"}
"""Modules that are not called like what is installed, where it is not."""
IMPORTED = re.compile(r"^ *(?:import (?=[\w. ]+(?:  #.*)?$)|from (?=[\w.]+ import ))(\w+)", re.MULTILINE)
TEXTS = (".md", ".toml", ".cff", ".yml", ".yaml", ".ipynb", ".py", "Dockerfile")


def third_party() -> set[str]:
    """The top-level names that the package imports anywhere and that are neither its own nor Python's."""
    texts = (file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py"))
    found = {name for text in texts for name in IMPORTED.findall(text)}
    return found - set(sys.stdlib_module_names) - {"tailorfl"}


def test_every_import_is_declared() -> None:
    declared = [*PROJECT["dependencies"], *(r for e in PROJECT["optional-dependencies"].values() for r in e)]
    names = {canonicalize_name(Requirement(text).name) for text in declared}
    at_home = packages_distributions()
    undeclared = {
        module
        for module in third_party()
        if not {canonicalize_name(home) for home in at_home.get(module, [OTHER_NAMES.get(module, module)])}
        & names
    }
    assert undeclared == UNDECLARED


def test_only_extras_bound_versions_from_above() -> None:
    """What a federation's transport cannot live with yet is no bound for those who do not use it."""
    bounds = {r.name: str(r.specifier) for r in map(Requirement, PROJECT["dependencies"])}
    assert {name: bound for name, bound in bounds.items() if not re.fullmatch(r">=[\d.]+", bound)} == {}


def as_published() -> str:
    """The README as the package's page shows it."""
    text = README
    for step in PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(step["pattern"], step["replacement"], text)
    return text.replace("$HFPR_VERSION", tailorfl.__version__)


def test_the_page_of_the_package_stands_alone() -> None:
    """No link and no picture is looked for beside the page, and each is a file of the repository."""
    here = set(re.findall(r"\]\((?!\w+:|#)([^)\s]+)\)", README))
    there = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", as_published())
    made = {(bool(mark), target) for mark, target in there if target.startswith(f"{ADDRESS}/")}
    tag = f"v{tailorfl.__version__}"
    kinds = {True: f"{ADDRESS}/raw/{tag}/", False: f"{ADDRESS}/blob/{tag}/"}
    assert {target.removeprefix(kinds[picture]) for picture, target in made} == here
    assert not [target for _, target in there if not re.match(r"https://|#", target)]
    page = render(as_published())
    assert page is not None
    assert page.count("<img ") == len(re.findall(r"!\[", README)) > 0
    assert "<table>" in page


def test_the_address_is_the_same_everywhere() -> None:
    owner, name = ADDRESS.split("/")[-2:]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        if line.endswith(TEXTS) and not line.startswith("results/") and (ROOT / line).is_file():
            text = (ROOT / line).read_text(encoding="utf-8")
            for other in re.findall(rf"github(?:\.com|usercontent\.com)?/([\w.-]+/{name})\b", text):
                assert other == f"{owner}/{name}", f"{line} has another address than pyproject.toml"


def test_how_to_cite_is_valid_and_of_this_version() -> None:
    citation = ROOT / "CITATION.cff"
    schema = ["--builtin-schema", "vendor.citation-file-format", str(citation)]
    command = [sys.executable, "-m", "check_jsonschema", *schema]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    data = yaml.safe_load(citation.read_text(encoding="utf-8"))
    assert data["version"] == tailorfl.__version__
    assert data["license"] == PROJECT["license"]
    assert data["repository-code"] == ADDRESS
    assert f"version = {{{tailorfl.__version__}}}" in README
