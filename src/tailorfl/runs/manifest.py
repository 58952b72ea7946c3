"""The manifest of a folder: size and sha256 of every file that counts, so that whoever reads it notices damage.

A finished run has one of all files that its numbers are read from, an export of all its files; `manifest.json` is
written last of all. A folder without one is not finished, or was written before there were manifests.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tailorfl.runs.files import decode, encode, sha256, write_text

NAME = "manifest.json"


def write(folder: Path, names: Sequence[str]) -> None:
    """Write the manifest of those of the files `names` that there are. Raises RunError where that fails."""
    files = {name: _facts(folder / name) for name in names if (folder / name).is_file()}
    write_text(folder / NAME, encode({"files": files}, indent=1))


def renew(folder: Path) -> None:
    """Write the manifest of a folder again, of the same files as they are now; nothing where there is none."""
    if (folder / NAME).is_file():
        write(folder, list(decode((folder / NAME).read_bytes())["files"]))


def problems(folder: Path, needed: Collection[str] = ()) -> list[str]:
    """Return what is no longer as the manifest says, a sentence each; nothing where there is no manifest.

    A manifest that does not name every file of `needed` is damaged itself.
    """
    file = folder / NAME
    if not file.exists():
        return []
    try:
        files: dict[str, dict[str, Any]] = decode(file.read_bytes())["files"]
        if lost := [name for name in needed if name not in files]:
            return [f"{NAME} has lost {', '.join(lost)}"]
        return [text for name, facts in files.items() if (text := _problem(folder, name, facts))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{NAME} cannot be read ({error!r})"]


def _problem(folder: Path, name: str, facts: dict[str, Any]) -> str | None:
    if not (folder / name).is_file():
        return f"{name} is missing"
    return None if _facts(folder / name) == facts else f"{name} is not what was written"


def _facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}
