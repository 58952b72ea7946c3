"""Names and options of everything that is registered, read from a file: importing the registries takes seconds."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Literal, cast

CATALOGUE = Path(__file__).with_name("catalogue.json")
"""Names and options of the registries, made before the package is built, and in a checkout when its source changed."""
Kind = Literal["methods", "models", "data", "partitions", "rules", "titles"]
Catalogue = Mapping[Kind, Mapping[str, Sequence[str]]]
"""Kind -> name -> options; of "titles", name of a method -> its title alone."""


def known(kind: Kind) -> Mapping[str, Sequence[str]]:
    """Return name -> options of everything of a kind that is the library's own.

    It lacks what other packages and a user's own modules add, so a name that is missing in it is a mistake only where
    there are none of these.
    """
    return _catalogue()[kind]


def display_name(label: str, method: str, title: str = "") -> str:
    """Return what tables, pictures and messages call a method.

    Args:
        label: The label of the method in its experiment.
        method: Its name. Where the label begins with it, as labels do that nobody chose, its title takes its place.
        title: The title of a method of the user's own, which the catalogue lacks.
    """
    rest = label.removeprefix(method)
    is_name = label.startswith(method) and rest[:1] in ("", " ")
    return known("titles").get(method, [title or method])[0] + rest if is_name else label


@functools.cache
def _catalogue() -> Catalogue:
    if CATALOGUE.is_file():
        stored = json.loads(CATALOGUE.read_text(encoding="utf-8"))
        if stored["source"] == source_digest():
            return cast(Catalogue, stored["kinds"])
    # The registries stand above the settings, and importing them takes seconds.
    return cast(Catalogue, import_module("tailorfl.runs.catalogue").write())


def source_digest() -> str:
    """Return a digest of the package's source, which tells whether the catalogue was made from it."""
    digest = hashlib.blake2b(digest_size=16)
    package = Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)} {file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
