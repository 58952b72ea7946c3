"""Takes the pictures of a report that docs/report.md shows, in Chromium without a window.

    tailorfl report RESULTS -o report.html
    python docs/report_pictures.py report.html

writes docs/images/report_1400.png (clients, one of them under the pointer, on a desk) and report_400.png (the begin of
the page on a phone, dark).
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

IMAGES = Path(__file__).parent / "images"
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")


def opened(browser: Browser, file: Path, width: int, height: int, scheme: str) -> Page:
    """Return the page, drawn."""
    page = browser.new_page(viewport={"width": width, "height": height})
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    page.goto(file.resolve().as_uri())
    page.wait_for_selector("html[data-drawn]")
    return page


def pictures(file: Path, program: str) -> None:
    """Write both pictures."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        desk = opened(browser, file, 1400, 1000, "light")
        desk.locator("#clients").scroll_into_view_if_needed()
        desk.evaluate("document.getElementById('clients').scrollIntoView()")
        points = desk.locator("#chart-against-1 .points_marks path")
        points.nth(points.count() // 2).hover(force=True)
        desk.wait_for_selector("#chart-gains .shown_marks path", state="attached")
        desk.wait_for_timeout(300)  # the tip fades in
        desk.screenshot(path=IMAGES / "report_1400.png")
        phone = opened(browser, file, 400, 1500, "dark")
        phone.screenshot(path=IMAGES / "report_400.png")
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        parser.error("there is no Chromium")
    pictures(parser.parse_args().report, found)
