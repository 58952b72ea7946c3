"""Installs what `make package` built, wheel and sdist, in clean environments, and uses it there.

    python tests/package/try_package.py dist

A clean environment has pip and what tailorfl declares that it needs, with what that needs, and nothing else. These
packages are not installed again, which would take minutes for torch alone: they are linked from the environment of
this interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
TRIED = """
import importlib, pkgutil, sys
import tailorfl
assert tailorfl.__file__.startswith(sys.prefix), tailorfl.__file__
beside = ("tailorfl.__main__",)  # a command
found = (module.name for module in pkgutil.walk_packages(tailorfl.__path__, "tailorfl."))
names = [name for name in found if not name.startswith(beside)]
from tailorfl.errors import MissingExtraError
for name in names:
    try:
        importlib.import_module(name)
    except MissingExtraError:  # keys, and both ends of Flower, are nothing without theirs
        assert name.startswith("tailorfl.deploy."), name
from tailorfl.settings.names import CATALOGUE
assert CATALOGUE.is_file(), "a typo would wait for torch"
for name in tailorfl.__all__:
    getattr(tailorfl, name)
print(f"{len(names)} modules of tailorfl {tailorfl.__version__} were imported")
"""


def needed(requirements: list[str]) -> Iterator[metadata.Distribution]:
    """Yield the distributions that requirements name, with theirs, each once; extras are followed where asked for."""
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        wanted = waiting.pop()
        for extra in ("", *wanted.extras):
            key = (canonicalize_name(wanted.name), extra)
            if key in seen:
                continue
            seen.add(key)
            found = metadata.distribution(wanted.name)
            if not extra:
                yield found
            inner = (Requirement(text) for text in found.requires or ())
            waiting += [r for r in inner if r.marker is None or r.marker.evaluate({"extra": extra})]


def tops(distribution: metadata.Distribution) -> set[str]:
    """Return the names that a distribution puts into site-packages."""
    names = {file.parts[0] for file in distribution.files or ()}
    return names - {"..", "__pycache__"}


def environment(folder: Path, requirements: list[str]) -> Path:
    """Make a virtual environment that has pip and what `requirements` need; return its interpreter."""
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    place = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(
        subprocess.run([python, "-c", place], capture_output=True, text=True, check=True).stdout.strip()
    )
    for distribution in needed(requirements):
        for name in tops(distribution):
            if not (site / name).exists():
                (site / name).symlink_to(Path(str(distribution.locate_file(name))))
    return python


def requirements_of(wheel: Path) -> list[str]:
    """Return what a wheel declares that it needs without extras."""
    with zipfile.ZipFile(wheel) as file:
        name = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = file.read(name).decode().split("\n\n")[0].splitlines()
    found = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    return [text for text in found if "extra ==" not in text]


def missing_files(wheel: Path) -> list[str]:
    """Return the files of the repository's package that a wheel lacks."""
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(wheel) as file:
        held = set(file.namelist())
    return [name for name in listed.stdout.split() if name.removeprefix("src/") not in held]


def try_it(package: Path, requirements: list[str], folder: Path) -> None:
    """Install a wheel or sdist in a clean environment and run a short `compare demo` outside of the repository."""
    python = environment(folder / "environment", requirements)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TAILORFL"))}

    def call(*words: str | Path) -> None:
        subprocess.run(words, cwd=folder, env=clean, check=True)

    call(python, "-m", "pip", "install", "--quiet", "--no-deps", package.resolve())
    call(python, "-m", "pip", "check")
    call(python, "-c", TRIED)
    command = python.with_name("tailorfl")
    call(command, "compare", "demo", "rounds=2", "seeds=1", "--out", "demo", "--quiet")
    assert (folder / "demo" / "comparison.csv").is_file()


def main() -> None:
    """Try every file in the folder that the command names."""
    folder = Path(sys.argv[1])
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    lacking = missing_files(wheel)
    assert not lacking, f"{wheel.name} lacks {', '.join(lacking)}"
    for package in (wheel, sdist):
        with tempfile.TemporaryDirectory() as place:
            try_it(package, requirements_of(wheel), Path(place))
        print(f"{package.name} works where nothing else is installed")


if __name__ == "__main__":
    main()
