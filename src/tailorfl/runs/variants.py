"""One recipe, several settings of it: a paper's table whose rows differ in the data, say.

    variants:
      2 classes: {data: {partition_options: {classes: 2}}, published: {...}}
      6 classes: {data: {partition_options: {classes: 6}}, published: {...}}

Each variant is an experiment of its own, in a folder of its own below the recipe's.
"""

from __future__ import annotations

from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.loading import load


def expand(config: ExperimentConfig) -> dict[str, ExperimentConfig]:
    """Returns the experiments of a configuration by name of the variant; one under "" where it has none.

    Raises:
        ConfigError: a variant has a mistake.
    """
    if not config.variants:
        return {"": config}
    plain = {key: value for key, value in config.to_dict().items() if key != "variants"}
    return {
        name: load({**plain, "name": f"{config.name}, {name}"}, changes)
        for name, changes in config.variants.items()
    }
