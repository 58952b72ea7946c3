"""Draws what `make demo` prints of its result folder as an SVG file, and copies the plots beside it.

    make demo
    python docs/screenshot.py demo

writes docs/images/demo.svg, per_round.png, per_client.png and per_byte.png.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from tailorfl.cli.results import show_comparison
from tailorfl.cli.screen import say
from tailorfl.report.findings import findings
from tailorfl.report.result import ExperimentResult
from tailorfl.runs.folders import experiment_in

IMAGES = Path(__file__).parent / "images"
WIDTH = 120
"""Columns of the terminal: as many as a README shows without scaling the text down too far."""


def screenshot(folder: Path, width: int = WIDTH) -> str:
    """Return the SVG picture of a result folder's findings and comparison table."""
    result, name = ExperimentResult.load(folder), experiment_in(folder).name
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print("[bold green]$[/] make demo", highlight=False)
    for line in findings(result):
        say(console, line, style="bold")
    show_comparison(console, result, name)
    console.print(f"results: {folder.name}", highlight=False)
    svg = console.export_svg(title="tailorfl", theme=MONOKAI, unique_id="tailorfl")
    # A picture in a page may not load fonts from elsewhere; the reader's own monospace font will do.
    svg = re.sub(r"@font-face\s*{.*?}\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", "DejaVu Sans Mono, Menlo, Consolas, monospace")
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def main() -> None:
    """Write the pictures of a result folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="result folder of a finished experiment")
    folder = parser.parse_args().folder
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "demo.svg").write_text(screenshot(folder), encoding="utf-8")
    for name in ("per_round", "per_client", "per_byte"):
        shutil.copyfile(folder / f"{name}.png", IMAGES / f"{name}.png")


if __name__ == "__main__":
    main()
