"""Makes docs/settings.md from `tailorfl.settings`, so that the two cannot disagree.

python docs/settings_table.py            prints the page
python docs/settings_table.py --write    writes it
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tailorfl.settings.listing import Setting, settings

FILE = Path(__file__).resolve().parent / "settings.md"
INTRODUCTION = """# Settings

Every setting of an experiment: in YAML as groups (`train: {lr: 0.1}`), on the command line as `train.lr=0.1`, in Python
as `run(train={"lr": 0.1})`. Options of methods, models, data and partitions stand beside the name of the thing:
`tailorfl list methods`, `models`, `data`, `partitions`. `tailorfl list settings train` prints a group. This page is
made from `tailorfl.settings` by `python docs/settings_table.py --write`.
"""


def page() -> str:
    """Returns the page: a table for each group, and one for the keys outside of groups."""
    groups: dict[str, list[Setting]] = {}
    for setting in settings():
        head, dot, _ = setting.key.partition(".")
        groups.setdefault(head if dot else "", []).append(setting)
    return INTRODUCTION + "".join(map(section, groups, groups.values()))


def section(group: str, found: list[Setting]) -> str:
    """Returns the heading and the table of one group."""
    title = f"`{group}`" if group else "An experiment"
    lines = [("Setting", "Type and range", "Default", "Meaning"), ("---",) * 4]
    lines += [(f"`{s.key}`", s.type, f"`{s.default}`" if s.default else "", s.meaning) for s in found]
    cells = (f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)
    return f"\n## {title}\n\n{''.join(cells)}"


def main() -> None:
    """Prints or writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/settings.md")
    if parser.parse_args().write:
        FILE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
