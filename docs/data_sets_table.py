"""Makes the table of data sets in docs/data-sets.md.

python docs/data_sets_table.py            prints the table
python docs/data_sets_table.py --write    puts it into docs/data-sets.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tailorfl.data.registry import data_sources

PAGE = Path(__file__).with_name("data-sets.md")
BEGIN, END = "<!-- data sets: made by docs/data_sets_table.py -->\n\n", "\n<!-- end of data sets -->\n"


def table() -> str:
    """Return the table of the data sets that need files in the data folder; those of the hub alone do not."""
    rows = ["| `data=` | File in `TAILORFL_DATA` | Content |", "| --- | --- | --- |"]
    for name, source in data_sources().items():
        if source.files and not source.files.startswith("datasets--"):
            files = ", ".join(f"`{file}`" for file in source.files.split(", "))
            rows.append(f"| `{name}` | {files} | {source.description} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """Return docs/data-sets.md with the current table."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"docs/data-sets.md has lost the line {BEGIN!r}"
    assert end, f"docs/data-sets.md has lost the line {END!r}"
    return before + begin + table() + end + after


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/data-sets.md")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
