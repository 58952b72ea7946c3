"""Names: those of everything that is registered, and a label's in tables and as a folder.

Names and options of the registries are read from a file, since importing these takes seconds. Whatever a label says,
its folder lies inside the experiment's and is its own.
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
"""Names and options of the registries, made before the package is built, and in a checkout when its source changed."""
Kind = Literal["methods", "models", "data", "partitions", "rules", "titles"]
Catalogue = Mapping[Kind, Mapping[str, Sequence[str]]]
"""Kind -> name -> options; of "titles", name of a method -> its title alone."""
LONGEST = 100
"""Characters of a folder's name; file systems take 255 bytes, and paths have an end too."""
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
"""Names that the experiment's own files have beside the folders of its methods."""


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


def slug(label: str) -> str:
    """Return a label as a folder name; Greek letters are written out.

    It has letters, digits and . = _ + - alone, begins with none of - and ., and is at most `LONGEST` long: never "..",
    a path, a hidden file or one of the experiment's own. What had to be cut, or has no such sign at all, is told
    apart by a few digits of the label's hash.

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
    """Nothing if labels name folders of their own, also where upper and lower case are one.

    Raises:
        ConfigError: two of them would share a folder; says which. `kind` they are labels of.
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
