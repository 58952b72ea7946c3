"""Names in the registries: methods, models, data sources, partitions and robust rules, each with its options.

    python -m tailorfl.runs.catalogue    writes them into the package; this is done before it is built

Settings read that file (`tailorfl.settings.names.known`), so that a typo is reported without importing torch. If the
file does not match the source, as in an edited checkout, it is written again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

from tailorfl.core.method import all_methods
from tailorfl.data.registry import loader_of, sources
from tailorfl.data.registry import options_of as source_options
from tailorfl.errors import RunError
from tailorfl.models.registry import FACTORIES, available, options_of
from tailorfl.partition import RECIPES, recipe_named
from tailorfl.rounds.robust import RULES
from tailorfl.runs.files import write_text
from tailorfl.settings.names import CATALOGUE, Kind, source_digest


def catalogue() -> dict[Kind, dict[str, list[str]]]:
    """Return kind -> name -> options, of the library's own entries only."""
    return {
        "methods": {name: list(m.model_fields) for name, m in all_methods().items() if _is_ours(m)},
        "titles": {name: [m.title] for name, m in all_methods().items() if _is_ours(m)},
        "models": {name: list(options_of(name)) for name in available() if _is_ours(FACTORIES[name])},
        "data": {name: list(source_options(name)) for name in sources() if _is_ours(loader_of(name))},
        "partitions": {
            name: partition_options(name) for name in sorted(RECIPES) if _is_ours(RECIPES[name].function)
        },
        "rules": {
            "none": [],
            **{name: list(rule.options) for name, rule in RULES.items() if _is_ours(rule.function)},
        },
    }


def write() -> dict[Kind, dict[str, list[str]]]:
    """Store the catalogue and return it; in a read-only folder it is built again each time."""
    kinds = catalogue()
    with suppress(RunError):
        write_text(CATALOGUE, json.dumps({"source": source_digest(), "kinds": kinds}))
    return kinds


def _is_ours(registered: type | Callable[..., object]) -> bool:
    return registered.__module__.partition(".")[0] == "tailorfl"


def partition_options(name: str) -> list[str]:
    """Return the options of a partition."""
    recipe = recipe_named(name)
    more = (["group"] if recipe.group is not None else []) + (["bins"] if recipe.classes else [])
    return [*recipe.options(), *more]


if __name__ == "__main__":
    write()
