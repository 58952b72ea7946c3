"""Pages of the site that are made while it is built, and links that lead from it into the repository.

MkDocs calls `on_files` and `on_page_markdown` (see mkdocs.yml). The README is the front page,
CHANGELOG.md and CONTRIBUTING.md are pages; the references of commands, methods and Python are made from what
the package says of itself.
"""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import typer

import tailorfl
from tailorfl.cli.main import app
from tailorfl.core.method import Method, all_methods
from tailorfl.settings.listing import type_text, value_text

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[1]
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"][
    "Repository"
]
AT_HOME = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Files of the repository's root that are pages."""
LEFT = ("help", "install_completion", "show_completion")
"""Options that every command of every program has."""
SUBJECTS = {
    "Run experiments": (
        "run",
        "compare",
        "reproduce",
        "pretrain",
        "bench",
        "merge",
        "load_config",
    ),
    "Results": ("ExperimentResult", "Bench", "export_models", "predict"),
    "Watch": ("Observer", "Job", "RoundResult"),
    "Write a method": (
        "Method",
        "register",
        "Client",
        "Context",
        "Replies",
        "Length",
        "Optimizer",
        "Term",
        "Seen",
    ),
    "Data": ("Source", "Federation", "build_federation"),
    "Models and training": ("Model", "Split", "TrainConfig", "Simulation"),
    "Settings": ("ExperimentConfig",),
}
"""Names of the package by subject; what is in none of them stands under "More"."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    from mkdocs.structure.files import File

    made = {"reference/commands.md": commands_page(), "reference/methods.md": methods_page()}
    made["reference/python.md"] = python_page()
    made |= {page: (ROOT / name).read_text(encoding="utf-8") for name, page in AT_HOME.items()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page's text with links that lead where they should."""
    source = page.file.src_uri
    homes = {made: name for name, made in AT_HOME.items()}
    text = relinked(markdown, Path(homes[source]) if source in homes else Path("docs", source))
    return f"# Changes\n{text.partition('# Changelog')[2]}" if source == "changelog.md" else text


def relinked(markdown: str, place: Path) -> str:
    """Return the text of the file `place`, with its links to pages and other files set right."""

    def target(match: re.Match[str]) -> str:
        name, mark, anchor = match[2].partition("#")
        file = (ROOT / place.parent / name).resolve().relative_to(ROOT).as_posix()
        if file in AT_HOME:
            return f"{match[1]}{AT_HOME[file]}{mark}{anchor})"
        if file.startswith("docs/") and not file.endswith(".py"):
            return f"{match[1]}{file.removeprefix('docs/')}{mark}{anchor})"
        return f"{match[1]}{ADDRESS}/blob/main/{file}{mark}{anchor})"

    if place.parts[:2] == ("docs", "reference"):
        return markdown
    return re.sub(r"(\]\()(?!\w+:|#)([^)\s]+)\)", target, markdown)


def python_page() -> str:
    """Return the reference of everything that `tailorfl` exports, by subject."""
    known = {name for names in SUBJECTS.values() for name in names}
    more = tuple(name for name in tailorfl.__all__ if name not in known and name != "__version__")
    lines = [
        "# Python",
        "",
        "What `import tailorfl` offers; everything is imported when it is first used.",
        "",
    ]
    for title, names in {**SUBJECTS, **({"More": more} if more else {})}.items():
        lines += [f"## {title}", ""]
        lines += map(described, names)
    return "\n".join(lines)


def described(name: str) -> str:
    """Return the line that mkdocstrings replaces by what the docstrings say of `tailorfl.NAME`."""
    home = tailorfl._HOMES.get(name, f"tailorfl:{name}").replace(":", ".")
    return f"::: {home}\n    options: {{heading: tailorfl.{name}, toc_label: {name}}}\n"


def methods_page() -> str:
    """Return the reference of the library's methods: for each family its file's text, then its methods."""
    families: dict[str, list[type[Method]]] = {}
    for method in all_methods().values():
        if method.__module__.startswith("tailorfl.methods."):
            families.setdefault(method.__module__, []).append(method)
    lines = ["# Methods: algorithms and options", ""]
    lines += [
        "What each method does, as the head of its file has it, and its options: `method.NAME=...`.",
        "",
    ]
    for module, found in families.items():
        lines += [f"## {', '.join(method.title for method in found)}", ""]
        lines += [inspect.cleandoc(sys.modules[module].__doc__ or ""), ""]
        for method in found:
            lines += [*about(method), ""]
    return "\n".join(lines)


def about(method: type[Method]) -> Iterator[str]:
    """Yield the lines of one method: what it is, where it is from, and its options."""
    yield f"### {method.title}: `method={method.name}`\n"
    yield f"{inspect.getdoc(method)}\n\nPaper: {method.paper}.\n"
    if method.model_fields:
        yield "| Option | Type and range | Default | Meaning |\n| --- | --- | --- | --- |"
    for name, field in method.model_fields.items():
        default = value_text(field.get_default(call_default_factory=True, validated_data={}))
        cells = (
            f"`{name}`",
            type_text(field.annotation, field.metadata),
            f"`{default}`",
            field.description or "",
        )
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def commands_page() -> str:
    """Return the reference of the command line, from what `--help` shows."""
    group = typer.main.get_command(app)
    return "# Commands\n\n" + "\n".join(help_of("tailorfl", group))


def help_of(name: str, command: click.Command) -> Iterator[str]:
    """Yield the section of a command, then those of the commands in it."""
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    usage = command.get_usage(click.Context(command, info_name=name)).removeprefix("Usage: ")
    yield f"## `{name}`\n\n{inspect.cleandoc(command.help or '')}\n\n    {' '.join(usage.split())}\n"
    told = {p: " ".join(str(getattr(p, "help", None) or "").split()) for p in command.params}
    shown = [p for p in told if told[p] and not getattr(p, "hidden", False) and p.name not in LEFT]
    if shown:
        yield "| Option | Meaning |\n| --- | --- |"
    for parameter in shown:
        words = [*parameter.opts, *parameter.secondary_opts]
        names = words if isinstance(parameter, click.Option) else [str(parameter.metavar or parameter.name)]
        yield f"| {', '.join(f'`{name}`' for name in names)} | {told[parameter].replace('|', '&#124;')} |"
    yield ""
    for below in inner:
        if not below.hidden:
            yield from help_of(f"{name} {below.name}", below)
