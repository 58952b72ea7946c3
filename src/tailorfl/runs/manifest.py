"""The manifest of a finished run: size and sha256 of every file that its numbers are read from.

`manifest.json` is written when a run finishes, last of all. What was changed, cut or deleted afterwards is noticed by
whoever reads the run; a run without a manifest is not finished, or was written before there were manifests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tailorfl.runs.files import decode, encode, sha256, write_text

NAME = "manifest.json"


def write(folder: Path, names: Sequence[str]) -> None:
    """Writes the manifest of those of the files `names` that there are. Raises RunError where that fails."""
    files = {name: _facts(folder / name) for name in names if (folder / name).is_file()}
    write_text(folder / NAME, encode({"files": files}, indent=1))


def problems(folder: Path) -> list[str]:
    """Returns what is no longer as the manifest says, a sentence each; nothing where there is no manifest."""
    file = folder / NAME
    if not file.exists():
        return []
    try:
        files: dict[str, dict[str, Any]] = decode(file.read_bytes())["files"]
        return [text for name, facts in files.items() if (text := _problem(folder / name, facts))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{NAME} cannot be read ({error!r})"]


def _problem(path: Path, facts: dict[str, Any]) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    return None if _facts(path) == facts else f"{path.name} is not what was written"


def _facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}
