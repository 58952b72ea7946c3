"""Users' modules: those that an experiment may name as `module:object`, and the objects in them.

Importing a module runs its code, and calling its objects runs more. A recipe may come from anybody, so a recipe alone
imports nothing: the person who runs it must have named the module, with `--import` or `imports=`, or in a setting on
the command line or in Python.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tailorfl.errors import ConfigError

_NAMED: dict[str, str] = {}
"""Module -> the name or file by which it was named in this process; it need not be imported yet."""
_GIVEN: dict[str, Any] = {}
"""`given:DIGEST` -> object that Python code has passed in this process."""


def load(names: Iterable[str]) -> None:
    """Import modules, each by its dotted name or as a file `NAME.py`, and let experiments name their objects.

    Raises:
        ConfigError: one cannot be imported, or its name is that of another module; or `names` is a text.
    """
    if isinstance(names, str):
        raise ConfigError(f"imports should be a list of texts, but is '{names}'")
    for name in names:
        module = _from_file(Path(name)) if name.endswith(".py") else _imported(name)
        _NAMED[module.__name__] = name


def name_in(value: Any) -> None:
    """Let experiments name the modules of every `module:object` in a setting that their user wrote.

    The value is a name, `{name: ...}`, or a list of these. Nothing is imported before it is needed.
    """
    for entry in value if isinstance(value, list | tuple) else [value]:
        name = entry.get("name") if isinstance(entry, Mapping) else entry
        if isinstance(name, str) and ":" in name and name not in _GIVEN:
            module = name.partition(":")[0]
            _NAMED.setdefault(module, module)


def named() -> list[str]:
    """Return the modules and files that were named, as `load` takes them."""
    return list(_NAMED.values())


def path_of(item: Any) -> str:
    """Return the `module:name` of a class or function for settings.

    Raises:
        ConfigError: its module has no such name, as for a lambda or a local function.
    """
    module, name = item.__module__, getattr(item, "__qualname__", type(item).__name__)
    if getattr(sys.modules.get(module), name, None) is not item:
        raise ConfigError(
            f"{name} of the module '{module}' cannot be named in the settings; define it at the top level of a module"
        )
    return f"{module}:{name}"


def give(digest: str, item: Any) -> str:
    """Register an object from Python code for settings of this process, and return its name `given:DIGEST`."""
    path = f"given:{digest}"
    _GIVEN[path] = item
    return path


def find(path: str) -> Any:
    """Return the object `module:name`, or the one that was passed as `given:DIGEST`.

    Raises:
        ConfigError: the module was not named, is in Python's standard library, or has no such object.
    """
    if path in _GIVEN:
        return _GIVEN[path]
    module, _, name = path.partition(":")
    if module == "given" or (module == "__main__" and module not in _NAMED):  # of a script or notebook
        raise ConfigError(
            f"'{path}' was passed from Python; pass the same object again, as tailorfl.run(model=...)"
        )
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(f"'{path}' is in Python's standard library, which has no models, methods or data")
    if module not in _NAMED:
        raise ConfigError(
            f"'{path}' would import the module '{module}' and run its code, which settings may do only if you allow "
            f"it: --import {module} (or --import FILE.py), in Python imports=['{module}']"
        )
    imported = _imported(module)
    if not hasattr(imported, name):
        public = ", ".join(n for n in vars(imported) if not n.startswith("_")) or "nothing"
        raise ConfigError(f"'{path}' cannot be imported: module '{module}' has no '{name}', only {public}")
    return getattr(imported, name)


def _imported(name: str) -> ModuleType:
    """Return the module of a name; from the current folder if there is no other of this name."""
    if name in sys.modules:
        return sys.modules[name]
    try:
        file = Path(f"{name}.py")
        if importlib.util.find_spec(name) is None and file.is_file():
            return _from_file(file)
        return importlib.import_module(name)
    except ConfigError:
        raise
    except Exception as error:  # a user's module may raise anything
        raise _broken(name, error) from error


def _from_file(file: Path) -> ModuleType:
    name, resolved = file.stem, file.resolve()
    if not resolved.is_file():
        raise ConfigError(f"--import {file}: there is no such file")
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ is not None and Path(loaded.__file__).resolve() == resolved:
        return loaded
    if loaded is not None or importlib.util.find_spec(name) is not None:
        raise ConfigError(f"--import {file}: another module is called '{name}'; rename the file")
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--import {file}: this is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.append(str(resolved.parent))  # new worker processes import it by its name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _broken(str(file), error) from error
    return module


def _broken(name: str, error: Exception) -> ConfigError:
    return ConfigError(f"'{name}' cannot be imported: {type(error).__name__}: {error}")
