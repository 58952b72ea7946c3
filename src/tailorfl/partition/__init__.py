"""Partitions: how one data set is dealt to clients. One entry point, `partition`; recipes in four files.

`skew`: iid, quantity, dirichlet, dirichlet_perada. `classes`: labels_per_client, class_groups, shards, classes_prob,
fedclup_classes. `groups`: natural, domain. `published`: niid_bench, sorted_shards, those of Flower Datasets.
A recipe is a function `(strata, clients, rng, *, test, **options) -> Deal` that uses only labels (or group ids);
everything random comes from `rng`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.random import Generator

from tailorfl.errors import DataError, check_known
from tailorfl.partition.classes import class_groups, classes_prob, fedclup_classes, labels_per_client, shards
from tailorfl.partition.deal import Deal
from tailorfl.partition.groups import domain, natural
from tailorfl.partition.published import flwr, niid_bench, sorted_shards
from tailorfl.partition.rows import Ints
from tailorfl.partition.skew import dirichlet, dirichlet_perada, iid, quantity

__all__ = ["RECIPES", "Deal", "Recipe", "partition", "recipe_named"]


@dataclass(frozen=True)
class Recipe:
    """A partition by name.

    Attributes:
        function: deals the samples.
        group: the kind of group whose ids replace labels; None: labels. Such a recipe names clients after groups
            and may take all of them (`clients=None`).
        classes: whether it deals classes unequally; numeric targets are put into bins for it.
    """

    function: Callable[..., Deal]
    group: str | None = None
    classes: bool = False

    def options(self) -> tuple[str, ...]:
        """Return the names of the options that the recipe takes."""
        parameters = inspect.signature(self.function).parameters.values()
        return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "test")


RECIPES: Mapping[str, Recipe] = {
    "class_groups": Recipe(class_groups, classes=True),
    "classes_prob": Recipe(classes_prob, classes=True),
    "dirichlet": Recipe(dirichlet, classes=True),
    "dirichlet_perada": Recipe(dirichlet_perada, classes=True),
    "domain": Recipe(domain, group="domain"),
    "fedclup_classes": Recipe(fedclup_classes, classes=True),
    "flwr": Recipe(flwr, classes=True),
    "iid": Recipe(iid),
    "labels_per_client": Recipe(labels_per_client, classes=True),
    "natural": Recipe(natural, group="client"),
    "niid_bench": Recipe(niid_bench, classes=True),
    "quantity": Recipe(quantity),
    "shards": Recipe(shards, classes=True),
    "sorted_shards": Recipe(sorted_shards, classes=True),
}


def recipe_named(name: str) -> Recipe:
    """Return the recipe `name`.

    Raises:
        ConfigError: if there is none; the message has the nearest name.
    """
    check_known("partition", name, RECIPES)
    return RECIPES[name]


def partition(
    name: str,
    strata: Ints,
    clients: int | None,
    rng: Generator,
    *,
    test: Ints | None = None,
    options: Mapping[str, Any] | None = None,
) -> Deal:
    """Deal samples to clients by recipe `name`.

    Args:
        name: one of `RECIPES`.
        strata: `[samples]` int64 label, or group id for recipes along groups.
        clients: number of clients; None only for recipes along groups, where it means all groups.
        rng: source of randomness; equal generators give equal deals.
        test: `[test samples]` int64, the same for the official test part, which is then dealt alike.
        options: the recipe's own options.

    Raises:
        ConfigError: for an unknown recipe or option, or an invalid value of an option.
        DataError: if the data cannot be dealt as requested; the message says why and what to change.
    """
    recipe = recipe_named(name)
    chosen = dict(options or {})
    for option in chosen:
        check_known(f"option of partition '{name}'", option, recipe.options())
    if len(strata) == 0:
        raise DataError(f"partition '{name}' got no samples to deal")
    if clients is None and recipe.group is None:
        raise DataError(f"partition '{name}' needs the number of clients")
    if clients is not None and not 1 <= clients <= len(strata):
        raise DataError(
            f"partition '{name}' cannot deal {len(strata)} samples to {clients} clients; "
            "use at least one client and at most as many as there are samples"
        )
    return recipe.function(strata, clients, rng, test=test, **chosen)
