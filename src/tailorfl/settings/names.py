"""Names of all registered things, and of labels in tables and as folders.

Names and options of the registries are read from a file, since importing these takes seconds. Every label has its own
folder, inside the experiment's, whatever characters it contains.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Literal, cast

from tailorfl.errors import ConfigError

CATALOGUE = Path(__file__).with_name("catalogue.json")
"""Names and options of the registries; written when the package is built, and in a checkout when its source changes."""
Kind = Literal["methods", "models", "data", "partitions", "rules", "titles"]
Catalogue = Mapping[Kind, Mapping[str, Sequence[str]]]
"""Kind -> name -> options; for "titles", name of a method -> its title as the only entry."""
LONGEST = 100
"""Largest number of characters in a folder's name; file systems allow 255 bytes, and limit the length of paths."""
OWN_FILES = frozenset(
    {
        "config.yaml",
        "comparison.csv",
        "comparison.md",
        "report.md",
        "report.html",
        "status.json",
        "forced.json",
        "tracked.json",
        "tensorboard",
        "wandb",
        "mlflow.db",
        "tuning.json",
    }
)
"""Names of the experiment's own files, which are next to its methods' folders."""


def known(kind: Kind) -> Mapping[str, Sequence[str]]:
    """Return name -> options of all things of a kind in the library.

    Names that other packages and a user's modules add are not included, so a missing name is a mistake only if there
    are none of these.
    """
    return _catalogue()[kind]


def display_name(label: str, method: str, title: str = "") -> str:
    """Return the name of a method in tables, pictures and messages.

    Args:
        label: The label of the method in its experiment.
        method: Its name. If the label starts with it, as default labels do, the method's title replaces it.
        title: The title of a user's own method, which the catalogue lacks.
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
    # The registries import the settings, and importing them takes seconds.
    return cast(Catalogue, import_module("tailorfl.runs.catalogue").write())


def source_digest() -> str:
    """Return a digest of the package's source, which shows whether the catalogue was made from it."""
    digest = hashlib.blake2b(digest_size=16)
    package = Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)} {file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def slug(label: str) -> str:
    """Return a label as a folder name; Greek letters are written out.

    It has only letters, digits and . = _ + -, does not start with - or ., and has at most `LONGEST` characters: it is
    never "..", a path, a hidden file or one of the experiment's own files. If it would be empty, too long or the name
    of such a file, a few digits of the label's hash are added.

    >>> slug("ε = 0.1, δ = 1e-4")
    'epsilon=0.1-delta=1e-4'
    >>> slug("../../other")
    'other'
    """
    plain = re.sub(r"\s*=\s*", "=", re.sub(r"[α-ωΑ-Ω]", _written_out, label))
    name = re.sub(r"[^A-Za-z0-9.=_+-]+", "-", plain).strip("-.")
    if not name:
        return f"run-{_digits(label)}"
    if len(name) > LONGEST:
        return f"{name[: LONGEST - 9].rstrip('-.')}-{_digits(label)}"
    return f"{name}-{_digits(label)}" if name in OWN_FILES or name.endswith(".png") else name


def check_distinct(labels: Iterable[str], kind: str) -> None:
    """Check that labels have different folders, also if upper and lower case are the same.

    `kind` names the labels in messages.

    Raises:
        ConfigError: two labels would share a folder; names them.
    """
    taken: dict[str, str] = {}
    for label in labels:
        folder = slug(label)
        if folder.lower() in taken:
            raise ConfigError(
                f"{kind}: the labels '{taken[folder.lower()]}' and '{label}' would share the folder "
                f"'{folder}'; change one of them"
            )
        taken[folder.lower()] = label


def _digits(label: str) -> str:
    return hashlib.blake2b(label.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()


def _written_out(letter: re.Match[str]) -> str:
    name = unicodedata.name(letter[0]).rpartition(" ")[2].lower()
    return "lambda" if name == "lamda" else name  # as Unicode spells it
