"""Makes docs/settings.md from `tailorfl.settings`, and the table of rules in docs/robust.md from the rules.

python docs/settings_table.py            prints the page
python docs/settings_table.py --write    writes both
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tailorfl.rounds.robust import RULES
from tailorfl.settings.listing import Setting, settings

FILE = Path(__file__).resolve().parent / "settings.md"
ROBUST = FILE.with_name("robust.md")
BEGIN, END = "<!-- rules: made by docs/settings_table.py -->\n", "<!-- end of rules -->\n"
INTRODUCTION = """# Settings

This page is for you if you look for a setting of an experiment: its key, type, range, default and meaning. Settings are
groups in YAML (`train: {lr: 0.1}`), `train.lr=0.1` on the command line, and `run(train={"lr": 0.1})` in Python. Options
of methods, models, data and partitions go next to the name of the thing; `tailorfl list methods`, `models`, `data` and
`partitions` show them. `tailorfl list settings train` prints one group. The page is made from `tailorfl.settings` by
`python docs/settings_table.py --write`.
"""


def page() -> str:
    """Return the page: a table for each group, and one for the keys outside of groups."""
    groups: dict[str, list[Setting]] = {}
    for setting in settings():
        head, dot, _ = setting.key.partition(".")
        groups.setdefault(head if dot else "", []).append(setting)
    return INTRODUCTION + "".join(map(section, groups, groups.values()))


def section(group: str, found: list[Setting]) -> str:
    """Return the heading and the table of one group."""
    title = f"`{group}`" if group else "An experiment"
    lines = [("Setting", "Type and range", "Default", "Meaning"), ("---",) * 4]
    lines += [(f"`{s.key}`", s.type, f"`{s.default}`" if s.default else "", s.meaning) for s in found]
    cells = (f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)
    return f"\n## {title}\n\n{''.join(cells)}"


def page_of_rules() -> str:
    """Return docs/robust.md with the table of the rules that are registered."""
    rows = [
        ("`server.robust`", "In place of the mean", "Options", "Stands", "A round costs the server"),
        ("---",) * 5,
    ]
    for rule in RULES.values():
        options = "; ".join(f"`{option}`: {default}" for option, default in rule.options.items())
        rows.append((f"`{rule.name}`", rule.meaning, options, rule.withstands, rule.cost))
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    before, _, rest = ROBUST.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + table + END + rest.partition(END)[2]


def main() -> None:
    """Print or write the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/settings.md and docs/robust.md")
    if parser.parse_args().write:
        FILE.write_text(page(), encoding="utf-8")
        ROBUST.write_text(page_of_rules(), encoding="utf-8")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
