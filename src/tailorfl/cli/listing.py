"""What there is: tables of methods, data, models, partitions and recipes, and the list of all settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tailorfl.cli.screen import PROSE
from tailorfl.errors import unknown
from tailorfl.settings.listing import settings, value_text

Row = tuple[str, str, str]
"""Name, description, options with defaults one a line."""


def tables(names: Iterable[str], only: str | None = None) -> Iterator[Table]:
    """One table for each of the lists `names`, or of its entry `only` alone.

    Raises:
        ConfigError: a list has no such entry.
    """
    for name in names:
        rows = list(LISTS[name]())
        if only is not None:
            known = [row[0] for row in rows]
            if only not in known:
                raise unknown(f"name in the list of {name}", only, known)
            rows = [row for row in rows if row[0] == only]
        has_options = any(options for _, _, options in rows)
        table = Table(title=name, show_lines=has_options)
        table.add_column("Name", style="bold", no_wrap=True)
        table.add_column("What it is", ratio=PROSE)
        if has_options:
            table.add_column("Options and defaults", ratio=PROSE)
        for name_of, description, options in rows:
            cells = (name_of, description, options) if has_options else (name_of, description)
            table.add_row(*map(Text, cells))
        yield table


def show_settings(console: Console, group: str | None = None) -> None:
    """Prints all settings, or those of one group such as `train`.

    Raises:
        ConfigError: there is no such group or key.
    """
    found = settings(group)
    if not found:
        raise unknown("setting or group of settings", str(group), [s.key for s in settings()])
    for setting in found:
        default = f" = {setting.default}" if setting.default else ""
        console.print(Text.assemble((setting.key, "bold"), default, (f"   {setting.type}", "dim")))
        console.print(Padding(Text(setting.meaning), (0, 0, 0, 4), expand=False))


def _methods() -> Iterator[Row]:
    import tailorfl.methods  # noqa: F401  registers the library's methods
    from tailorfl.core.method import methods

    for name, method in methods().items():
        lines = []
        for option, field in method.model_fields.items():
            text = f"{option} = {value_text(field.get_default(call_default_factory=True, validated_data={}))}"
            lines.append(f"{text}  {field.description}" if field.description else text)
        yield name, f"{method.title}: {_summary(method)}\n{method.paper}", "\n".join(lines)


def _data() -> Iterator[Row]:
    from tailorfl.data.registry import options_of, sources

    for name, description in sources().items():
        yield name, description, _options(options_of(name))


def _models() -> Iterator[Row]:
    from tailorfl.models.registry import available, options_of

    for name, description in available().items():
        yield name, description, _options(options_of(name))


def _partitions() -> Iterator[Row]:
    from tailorfl.data.partition import RECIPES

    for name, recipe in sorted(RECIPES.items()):
        defaults = {p.name: p.default for p in inspect.signature(recipe.function).parameters.values()}
        options: dict[str, Any] = {option: defaults[option] for option in recipe.options()}
        if recipe.group is not None:
            options["group"] = recipe.group
        yield name, _summary(recipe.function), _options(options)


def _recipes() -> Iterator[Row]:
    from tailorfl.experiments.config import read, recipes

    for name in recipes():
        yield name, " ".join(str(read(name).get("description", "")).split()), ""


LISTS: Mapping[str, Callable[[], Iterator[Row]]] = {
    "methods": _methods,
    "data": _data,
    "models": _models,
    "partitions": _partitions,
    "recipes": _recipes,
}


def _options(options: Mapping[str, Any]) -> str:
    return "\n".join(
        f"{name} (needed)" if default is inspect.Parameter.empty else f"{name} = {value_text(default)}"
        for name, default in options.items()
    )


def _summary(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")
