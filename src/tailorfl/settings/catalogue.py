"""The names and options that the registries hold, known without importing torch.

`catalogue.json` is made from the registries (docs/catalogue.py). It lacks what other packages and a user's own modules
add, so a name that is missing in it is a mistake only where there are none of these.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Literal

Kind = Literal["methods", "models", "data", "partitions"]


def known(kind: Kind) -> Mapping[str, Sequence[str]]:
    """Returns name -> options of everything of a kind that is the library's own."""
    return _read()[kind]


@functools.cache
def others_add_methods() -> bool:
    """Whether an installed package adds methods of its own."""
    return any(
        e.value.partition(":")[0] != "tailorfl.methods" for e in entry_points(group="tailorfl.methods")
    )


@functools.cache
def _read() -> Mapping[Kind, Mapping[str, Sequence[str]]]:
    text = files("tailorfl.settings").joinpath("catalogue.json").read_text(encoding="utf-8")
    found: Mapping[Kind, Mapping[str, Sequence[str]]] = json.loads(text)
    return found
