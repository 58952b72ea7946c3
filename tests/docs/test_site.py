"""The site has every page, describes everything that there is, and loads nothing from elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from blocks import ROOT

import tailorfl
from tailorfl.cli.main import app
from tailorfl.core.method import all_methods
from tailorfl.data.registry import data_sources

MADE = {"index.md", "changelog.md", "contributing.md"}
MADE |= {f"reference/{page}.md" for page in ("commands", "methods", "python")}
"""Pages that docs/site_pages.py makes."""


def in_navigation() -> list[str]:
    """The pages that mkdocs.yml names, in order."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return re.findall(r"^ *- (?:[^:\n]+: )?([\w/-]+\.md)$", text.partition("\nnav:")[2], re.MULTILINE)


def test_every_page_is_in_the_navigation_once() -> None:
    pages = [page.name for page in (ROOT / "docs").glob("*.md")]
    assert sorted(in_navigation()) == sorted([*pages, *MADE])


def test_references_leave_nothing_out(script: Callable[[str], ModuleType]) -> None:
    made = script("site_pages")
    python, commands, described = made.python_page(), made.commands_page(), made.methods_page()
    found = re.findall(r"heading: tailorfl\.(\w+),", python)
    assert sorted([*found, "__version__"]) == sorted(tailorfl.__all__)
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    assert known <= set(re.findall(r"^## `tailorfl (\w+)`$", commands, re.MULTILINE))
    for name, method in all_methods().items():
        own = described.partition(f"`method={name}`")[2].partition("\n### ")[0]
        assert set(re.findall(r"^\| `(\w+)` \|", own, re.MULTILINE)) >= set(method.model_fields), name


def test_the_table_of_data_sets_is_up_to_date(script: Callable[[str], ModuleType]) -> None:
    made = script("data_sets_table")
    text = (ROOT / "docs" / "data-sets.md").read_text(encoding="utf-8")
    assert made.page() == text, "run: python docs/data_sets_table.py --write"
    with_files = {name for name, source in data_sources().items() if source.files}
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == with_files


def test_the_pages_of_settings_and_rules_are_up_to_date(script: Callable[[str], ModuleType]) -> None:
    made = script("settings_table")
    remedy = "run python docs/settings_table.py --write"
    assert made.FILE.read_text(encoding="utf-8") == made.page(), remedy
    assert made.ROBUST.read_text(encoding="utf-8") == made.page_of_rules(), remedy


@pytest.mark.parametrize(
    ("place", "text", "expected"),
    [
        ("README.md", "[a](docs/evaluation.md#x)", "[a](evaluation.md#x)"),
        ("README.md", "![a](docs/images/demo.svg)", "![a](images/demo.svg)"),
        ("README.md", "[a](LICENSE)", "[a]({}/LICENSE)"),
        ("docs/methods.md", "[a](../README.md#speed)", "[a](index.md#speed)"),
        ("docs/methods.md", "[a](../src/tailorfl/methods)", "[a]({}/src/tailorfl/methods)"),
        ("docs/methods.md", "[a](theory.md), [b](#c), [c](https://x.org/y)", None),
    ],
)
def test_links_lead_into_the_site_or_the_repository(
    script: Callable[[str], ModuleType], place: str, text: str, expected: str | None
) -> None:
    made = script("site_pages")
    wanted = text if expected is None else expected.format(f"{made.ADDRESS}/blob/main")
    assert made.relinked(text, Path(place)) == wanted


class Loads(HTMLParser):
    """Collects what a page loads: scripts, styles, fonts, pictures, frames; not what its links lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed"):
            self.addresses += [values[name] for name in ("src", "srcset") if name in values]
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next", "alternate"):
            self.addresses.append(values.get("href", ""))
        self.addresses += of_styles(values.get("style", ""))


def of_styles(text: str) -> list[str]:
    """What a style sheet loads."""
    return [a or b for a, b in re.findall(r"url\(['\"]?([^)'\"]+)|@import ['\"]([^'\"]+)", text)]


def loads(site: Path) -> Iterator[tuple[Path, str]]:
    """Yield every file of a site with each address that it loads."""
    for file in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = file.read_text(encoding="utf-8")
        yield from (
            (file, at) for at in (of_styles(text) if file.suffix == ".css" else Loads(text).addresses)
        )


def test_what_a_page_loads_is_seen() -> None:
    page = (
        '<script src="//a/b.js"></script><link rel="stylesheet" href="https://fonts/x"><a href="https://y">'
    )
    assert Loads(page).addresses == ["//a/b.js", "https://fonts/x"]
    assert of_styles("@import 'https://z'; a { src: url(\"https://w\") }") == ["https://z", "https://w"]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    addresses = list(loads(tmp_path))
    assert len(addresses) > 5 * len(in_navigation())
    assert not [(file, at) for file, at in addresses if re.match(r"(\w+:)?//", at)]
    for file, at in addresses:
        if not at.startswith("data:"):
            name = at.partition("?")[0].partition("#")[0]
            home = tmp_path if name.startswith("/") else file.parent  # 404.html is shown at any depth
            assert (home / name.lstrip("/")).exists(), f"{file} loads {at}"
    index = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))
    searched = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert searched == {page.replace(".md", ".html") for page in in_navigation()}
    assert yaml.safe_dump(index["docs"]).count("Ditto") > 10
