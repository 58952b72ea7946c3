"""What the registries hold: methods, models, data sources and partitions by name, each with its options.

    python -m tailorfl.runs.catalogue    writes them into the package, as is done before it is built

Settings read that file (`tailorfl.settings.errors.known`), so that a typo is answered without torch; where there is
none, as in a checkout, they ask here.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

from tailorfl.core.method import methods
from tailorfl.data.partition import RECIPES, recipe_named
from tailorfl.data.registry import options_of as source_options
from tailorfl.data.registry import sources
from tailorfl.models.registry import available, options_of
from tailorfl.settings.errors import CATALOGUE, Kind


def catalogue() -> dict[Kind, dict[str, list[str]]]:
    """Return kind -> name -> options, of the library's own things alone."""
    package = CATALOGUE.parents[1]
    own = {name: m for name, m in methods().items() if Path(inspect.getfile(m)).is_relative_to(package)}
    return {
        "methods": {name: list(method.model_fields) for name, method in own.items()},
        "models": {name: list(options_of(name)) for name in available()},
        "data": {name: list(source_options(name)) for name in sources()},
        "partitions": {name: partition_options(name) for name in sorted(RECIPES)},
    }


def partition_options(name: str) -> list[str]:
    """Return the options of a partition."""
    recipe = recipe_named(name)
    more = (["group"] if recipe.group is not None else []) + (["bins"] if recipe.classes else [])
    return [*recipe.options(), *more]


if __name__ == "__main__":
    CATALOGUE.write_text(json.dumps(catalogue()), encoding="utf-8")
