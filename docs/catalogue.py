"""Makes the package's list of names and options from the registries, so that a typo is answered without torch.

python docs/catalogue.py            prints it
python docs/catalogue.py --write    puts it into the package
"""

from __future__ import annotations

import argparse
import inspect
import json
from pathlib import Path

import tailorfl
from tailorfl.core.method import methods
from tailorfl.data.partition import RECIPES
from tailorfl.data.registry import options_of as source_options
from tailorfl.data.registry import sources
from tailorfl.models.registry import available, options_of
from tailorfl.runs.check import partition_options

PACKAGE = Path(inspect.getfile(tailorfl)).parent
FILE = PACKAGE / "settings" / "catalogue.json"


def catalogue() -> str:
    """Returns the JSON file: kind -> name -> options."""
    own = {n: m for n, m in methods().items() if Path(inspect.getfile(m)).is_relative_to(PACKAGE)}
    found = {
        "methods": {name: list(method.model_fields) for name, method in own.items()},
        "models": {name: list(options_of(name)) for name in available()},
        "data": {name: list(source_options(name)) for name in sources()},
        "partitions": {name: partition_options(name) for name in sorted(RECIPES)},
    }
    kinds = []
    for kind, names in found.items():
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(options)}" for name, options in names.items())
        kinds.append(f" {json.dumps(kind)}: {{\n{rows}\n }}")
    return "{\n" + ",\n".join(kinds) + "\n}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="into the package instead of printing")
    if parser.parse_args().write:
        FILE.write_text(catalogue(), encoding="utf-8")
    else:
        print(catalogue(), end="")
