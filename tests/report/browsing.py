"""A real browser for tests of pages: Chromium without a window, driven by Playwright, with a new profile."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def why_not() -> str:
    """Why there is no browser, "" where there is one."""
    if find_spec("playwright") is None:
        return "Playwright is not installed: pip install playwright"
    if not any(map(shutil.which, NAMES)):
        return "there is no Chromium: apt-get install chromium"
    return ""


@contextmanager
def browser(profile: Path) -> Iterator[Any]:
    """A browser whose `new_page` gives pages; `profile` is a new folder for what it keeps."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, NAMES)))
    with sync_playwright() as playwright:
        started = playwright.chromium.launch_persistent_context(
            str(profile), executable_path=program, headless=True, args=list(QUIET)
        )
        try:
            yield started
        finally:
            started.close()
