"""The data sources by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from tailorfl import modules
from tailorfl.data import (
    hospitals,
    huggingface,
    images,
    own,
    schools,
    synthetic,
    synthetic_classes,
)
from tailorfl.data import instructions as answers
from tailorfl.data import text as texts
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError, DataError, unknown

GIVEN = "given"
"""What settings call a source that was handed over."""


def _given() -> Source:
    raise ConfigError(
        f"data.name={GIVEN} stands for data that Python code hands over: tailorfl.run(..., source=...); name a source "
        "that can be loaded (`tailorfl list data`), or hand it over again"
    )


_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

_SOURCES: dict[str, tuple[Callable[..., Source], str]] = {
    "digits": (images.digits, "1,797 digits of 8x8 pixels, bundled with scikit-learn"),
    "mnist": (images.mnist, "MNIST, 60,000 + 10,000 digits of 28x28 pixels"),
    "cifar10": (images.cifar10, "CIFAR-10 from lossy JPEG, 45,000 + 10,000 images of 32x32 pixels"),
    "tinyimagenet": (
        images.tinyimagenet,
        "Tiny-ImageNet at 32x32 pixels, 14,000 images, a public unlabelled set",
    ),
    "pacs": (images.pacs, "PACS, 7,992 images of 64x64 pixels, 7 classes in 4 domains (group 'domain')"),
    "chestxray": (
        images.chestxray,
        "chest X-rays, 898 + 225 grey images of 64x64 pixels, 3 unbalanced classes",
    ),
    "omniglot": (images.omniglot, "Omniglot, 4,840 characters by 160 writers (groups 'client', 'alphabet')"),
    "heart": (hospitals.heart, "FLamby heart disease, 4 hospitals, 13 features, binary label"),
    "tcga": (hospitals.tcga, "FLamby TCGA-BRCA, 6 regions, 39 features, survival"),
    "school": (schools.school, "exam scores of 15,362 pupils, 139 London schools, 28 features, regression"),
    "text": (
        texts.text,
        "sst2, sentiment140, snli, anli, mrpc or boolq (option set), 2,000 + 400 texts each",
    ),
    "airline": (
        texts.airline,
        "tweets to airlines by their authors, 3 sentiments (groups 'client', 'domain')",
    ),
    "flan8": (
        answers.flan8,
        "FLAN instructions, 8 sets of 4 tasks, as choice or generation (groups 'client', 'domain')",
    ),
    "synthetic_linear": (synthetic.synthetic_linear, "linear regression with noise, optimum known"),
    "synthetic_quadratic": (synthetic.synthetic_quadratic, "quadratics as data, closed forms known"),
    "synthetic_logistic": (
        synthetic_classes.synthetic_logistic,
        "FedCLUP's logistic data, own rule for each client",
    ),
    "synthetic_digits": (
        synthetic_classes.synthetic_digits,
        "class prototypes plus noise, for thousands of clients",
    ),
    "features": (
        images.features,
        "features of images that a frozen network has computed, in a .npz file (option path)",
    ),
    GIVEN: (_given, "own data that Python code hands over: tailorfl.run(source=...)"),
    "folder": (own.from_folder, "own images: [train|test/]client/class/image (option path)"),
    "table": (
        own.from_table,
        "own table, or a folder with one a client: .csv, .tsv, .parquet (options path, label, client, ...)",
    ),
    "text_table": (
        texts.from_texts,
        "own texts with a label, in a table or a folder with one a client (options path, label, text, tokenizer, ...)",
    ),
    "huggingface": (
        huggingface.huggingface,
        "Hugging Face data set, of the hub or here, streamed (options path, label, client, ...)",
    ),
    "instructions": (
        answers.instructions,
        "own instructions and answers: JSON lines (options path, form, tokenizer, length, ...)",
    ),
}


def sources() -> dict[str, str]:
    """One line of description for every source that `load_source` knows."""
    return {name: description for name, (_, description) in _SOURCES.items()}


def load_source(name: str, **options: Any) -> Source:
    """The source `name`, with the options of its loader, such as `samples=5000` or `seed=1`.

    `name` may be `module:function`, of a module that was named (`tailorfl.modules`).

    Raises:
        ConfigError: for an unknown name or option (names the nearest valid one) or a missing option.
        DataError: if its data cannot be found or used.
    """
    loader = loader_of(name)
    parameters = inspect.signature(loader).parameters
    for option in options:
        if option not in parameters and not _takes_any(parameters):
            raise unknown(f"option of data source '{name}'", option, parameters)
    for option, parameter in parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind not in _ANY
        if needed and option not in options:
            raise ConfigError(f"data source '{name}' needs the option '{option}'")
    try:
        found = loader(**options)
    except (OSError, TypeError, ValueError, OverflowError, EOFError) as error:
        # What loaders did not look for: a path that no file system takes, an option of another type.
        plain = {key: value for key, value in options.items() if isinstance(value, str | int | float | None)}
        raise DataError(
            f"data source '{name}' cannot be read with {plain}: {error if plain == options else type(error).__name__}"
        ) from error
    if not isinstance(found, Source):
        raise DataError(
            f"data source '{name}' should return a tailorfl.Source, but returned a {type(found).__name__}"
        )
    return found


def loader_of(name: str) -> Callable[..., Source]:
    """Returns the function that loads a source; of `module:function` that of a module that was named.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if ":" in name:
        found = modules.find(name)
        if isinstance(found, Source):
            return lambda: found
        if not callable(found):
            raise ConfigError(
                f"data source '{name}' should be a function that returns a tailorfl.Source, but is a "
                f"{type(found).__name__}"
            )
        return cast(Callable[..., Source], found)
    if name not in _SOURCES:
        raise unknown("data source", name, _SOURCES)
    return _SOURCES[name][0]


def options_of(name: str) -> dict[str, Any]:
    """Returns the options of a source and their defaults; `inspect.Parameter.empty` where one must be given.

    Raises:
        ConfigError: there is no such source.
    """
    parameters = inspect.signature(loader_of(name)).parameters.values()
    return {p.name: p.default for p in parameters if p.kind not in _ANY}


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())
