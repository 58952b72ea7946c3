"""Labels as names of folders: whatever a label says, its folder lies inside the experiment's and is its own."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable

from tailorfl.errors import ConfigError

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
