"""The data sets by name: functions that `data_source` marks in any module of this folder.

@data_source("MNIST, 60,000 + 10,000 digits of 28x28 pixels", files="mnist.npz")
def mnist(scaling: Literal["standard", "unit"] = "standard") -> Source: ...
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from tailorfl import modules
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError, DataError, check_known

GIVEN = "given"
"""The name in settings of a source that was passed as an object."""

Load = TypeVar("Load", bound=Callable[..., Source])

_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class DataSource:
    """A data set that has a name.

    Attributes:
        load: returns it; its parameters are the set's options.
        description: one line.
        files: in the folder of data, "" if it needs none.
        capped: whether its option `samples` takes a cap of all samples, which saves reading the others.
    """

    load: Callable[..., Source]
    description: str
    files: str = ""
    capped: bool = False


_MARKED: dict[str, DataSource] = {}


def data_source(
    description: str, *, name: str | None = None, files: str = "", capped: bool = False
) -> Callable[[Load], Load]:
    """Mark a function as the loader of a data set, by default of the function's name; see `DataSource`."""

    def mark(load: Load) -> Load:
        _MARKED[name or load.__name__] = DataSource(load, description, files, capped)
        return load

    return mark


@data_source("own data passed from Python: tailorfl.run(source=...)", name=GIVEN)
def _given() -> Source:
    raise ConfigError(
        f"data.name={GIVEN} means data passed from Python by tailorfl.run(..., source=...); name a source that can be "
        "loaded (`tailorfl list data`), or pass the data again"
    )


@functools.cache
def data_sources() -> Mapping[str, DataSource]:
    """Return every data set that a module of this folder marks, by name."""
    package = importlib.import_module("tailorfl.data")
    for module in pkgutil.iter_modules(package.__path__, "tailorfl.data."):
        importlib.import_module(module.name)
    return dict(sorted(_MARKED.items()))


def sources() -> dict[str, str]:
    """Return one line of description for every source that `load_source` knows."""
    return {name: source.description for name, source in data_sources().items()}


def load_source(name: str, **options: Any) -> Source:
    """Return the source `name`, with the options of its loader, such as `samples=5000` or `seed=1`.

    `name` may be `module:function`, for a module that the user has named (`tailorfl.modules`).

    Raises:
        ConfigError: for an unknown name or option (names the nearest valid one) or a missing option.
        DataError: if its data cannot be found or used.
    """
    loader = loader_of(name)
    parameters = inspect.signature(loader).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for option in () if takes_any else options:
        check_known(f"option of data source '{name}'", option, parameters)
    for option, default in options_of(name).items():
        if default is inspect.Parameter.empty and option not in options:
            raise ConfigError(f"data source '{name}' needs the option '{option}'")
    try:
        source = loader(**options)
    except (OSError, TypeError, ValueError, OverflowError, EOFError) as error:
        # Mistakes that loaders do not check: a path that no file system takes, an option of another type.
        plain = {key: value for key, value in options.items() if isinstance(value, str | int | float | None)}
        raise DataError(
            f"data source '{name}' cannot be read with {plain}: {error if plain == options else type(error).__name__}"
        ) from error
    if not isinstance(source, Source):
        raise DataError(
            f"data source '{name}' should return a tailorfl.Source, but returned a {type(source).__name__}"
        )
    return source


def loader_of(name: str) -> Callable[..., Source]:
    """Return the function that loads a source, or `module:function` of a module that the user has named.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if ":" in name:
        loader = modules.find(name)
        if isinstance(loader, Source):
            return lambda: loader
        if not callable(loader):
            raise ConfigError(
                f"data source '{name}' should be a function that returns a tailorfl.Source, but is a "
                f"{type(loader).__name__}"
            )
        return cast(Callable[..., Source], loader)
    check_known("data source", name, data_sources())
    return data_sources()[name].load


def options_of(name: str) -> dict[str, Any]:
    """Return the options of a source and their defaults; `inspect.Parameter.empty` for required ones.

    Raises:
        ConfigError: there is no such source.
    """
    parameters = inspect.signature(loader_of(name)).parameters.values()
    return {p.name: p.default for p in parameters if p.kind not in _ANY}
