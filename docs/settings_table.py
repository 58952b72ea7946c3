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
`python docs/settings_table.py --write`. A default of `null` may also be written.
"""


def page() -> str:
    """Return the page: a table for each group, and one for the keys outside of groups."""
    groups: dict[str, list[Setting]] = {}
    for setting in settings():
        head, dot, _ = setting.key.partition(".")
        groups.setdefault(head if dot else "", []).append(setting)
    meanings = {s.key: s.meaning for s in groups[""] if s.key in groups}
    groups[""] = [s for s in groups[""] if s.key not in groups]
    return INTRODUCTION + "".join(section(g, rows, meanings.get(g, "")) for g, rows in groups.items())


def section(group: str, rows: list[Setting], meaning: str) -> str:
    """Return the heading, the meaning and the table of one group."""
    title = f"`{group}`" if group else "An experiment"
    lines = [("Setting", "Type and range", "Default", "Meaning"), ("---",) * 4]
    lines += [
        (f"`{s.key}`", shorter(s), f"`{s.default}`" if s.default else "", s.meaning)
        for s in without_repeats(rows)
    ]
    cells = (f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)
    return f"\n## {title}\n\n" + (f"{meaning}.\n\n" if meaning else "") + "".join(cells)


def shorter(setting: Setting) -> str:
    """Return the type without the null that the default shows, and with commas between several values."""
    text = setting.type.replace(" or null", "") if setting.default == "null" else setting.type
    return text.replace(" or ", ", ") if text.count(" or ") > 1 else text


def without_repeats(rows: list[Setting]) -> list[Setting]:
    """Return the rows, those of a group in one where an earlier group has the same keys, types and meanings."""
    inside: dict[str, list[Setting]] = {}
    for row in rows:
        inside.setdefault(row.key.rpartition(".")[0], []).append(row)
    seen: dict[tuple[tuple[str, ...], ...], str] = {}
    first = {g: seen.setdefault(tuple(contents(row) for row in inside[g]), g) for g in inside}
    repeated = {g: earlier for g, earlier in first.items() if g != earlier}
    kept = []
    for row in rows:
        group = row.key.rpartition(".")[0]
        if group not in repeated:
            kept.append(row)
        elif row == inside[group][0]:
            kept.append(Setting(f"{group}.*", "", "", f"as `{repeated[group]}.*`"))
    return kept


def contents(setting: Setting) -> tuple[str, ...]:
    """Return everything of a setting but its group."""
    return setting.key.rpartition(".")[2], setting.type, setting.default, setting.meaning


def page_of_rules() -> str:
    """Return docs/robust.md with the table of the rules that are registered."""
    rows = [
        ("`server.robust`", "Instead of the mean", "Options", "Withstands", "A round costs the server"),
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
