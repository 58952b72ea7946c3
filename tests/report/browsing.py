"""A real browser for tests of pages: Chromium without a window, driven by Playwright, with a new profile."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


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


@dataclass
class Tab:
    """A page of a browser, what it writes to the console, and what it requests."""

    page: Any
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", lambda message: self.messages.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def draw(self, file: Path, width: int = 1400) -> None:
        """Open a page of a report and wait until its charts are drawn."""
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("html[data-drawn]", timeout=30_000)
