"""Consoles for the output of commands: as wide as COLUMNS or the terminal, 80 columns in a pipe or a file.

Tables are laid out for that width and never cut: titles are folded at words, running text is wrapped, columns that do
not fit go into a further table below, with the names of the rows. If even a name and one column are too wide, every row
becomes a list with a line per column.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from tailorfl.printable import visible
from tailorfl.runs.files import encode

PIPED = 80
"""Columns if the width is unknown."""
NARROWEST = 40
"""Smallest width: below it, names and numbers are longer than a line."""
PROSE = 1
"""`ratio` of a column of running text, which may be wrapped at words; all others stay on one line."""
PROSE_WIDTH = 20
"""Smallest width of running text, unless its longest line is shorter."""
MOST_PARTS = 3
"""Largest number of stacked tables; with more, a row is hard to follow, so each becomes a list."""
BORDER = 3
"""Width that a column of a table takes in addition to its text; the table takes one more."""


def width() -> int:
    """Return how many columns a line of output may have."""
    return max(NARROWEST, shutil.get_terminal_size((PIPED, 25)).columns)


def stdout() -> Console:
    """Return the console of standard output."""
    return Console(width=width(), height=25)


def stderr() -> Console:
    """Return the console of errors and progress, which leaves sentences in one line."""
    return Console(stderr=True)


def print_json(value: object) -> None:
    """Print a value as JSON without folding; NaN is null and an infinity a string, as in result folders."""
    print(encode(value, indent=1))


def remark(mark: str, text: str, style: str) -> Text:
    """Return a coloured word followed by a literal text, without characters that act on the terminal."""
    return Text.assemble((mark, style), " ", visible(text, but="\n\t"))


@contextmanager
def status(quiet: bool, name: str, *, lines: bool = False) -> Iterator[Callable[[str], None]]:
    """Show the present step on stderr: a changing line in a terminal; elsewhere plain `lines`, or nothing.

    Within the block, log messages of the library go there too.
    """
    from tailorfl.report.progress import messages

    console = stderr()
    with messages(console):
        if not quiet and console.is_terminal:
            with console.status(name) as spinner:
                yield lambda text: spinner.update(Text(text))
        elif not quiet and lines:
            yield lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            yield lambda _: None


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a literal text, wrapped between words; parts without blanks, such as paths, are not broken."""
    for line in text.split("\n"):
        console.print(
            _folded(line, console.width), style=style, markup=False, highlight=False, soft_wrap=True
        )


def make_table(
    title: str | None,
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    left: Collection[str] = (),
    prose: Collection[str] = (),
    **options: Any,
) -> Table:
    """Return a table of texts; columns are right-aligned except the first, those in `left` and running text."""
    table = Table(title=None if title is None else Text(title), **options)
    for number, head in enumerate(heads):
        is_left = number == 0 or head in left or head in prose
        table.add_column(
            Text(head), justify="left" if is_left else "right", ratio=PROSE if head in prose else None
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return table


def fits(table: Table, room: int) -> bool:
    """Return whether all columns of a table fit side by side."""
    return _fit([_Column(column) for column in table.columns], room)


def show_table(console: Console, table: Table) -> None:
    """Print a complete table in the width of a console, below its title."""
    if table.title:
        console.print(_text(table.title), style="italic", highlight=False)
    columns = [_Column(column) for column in table.columns]
    parts = [columns] if _fit(columns, console.width) or not table.columns else []
    if not parts and table.show_header:
        parts = _stacked(columns, console.width)
    if 0 < len(parts) <= MOST_PARTS:
        for part in parts:
            _draw(console, table, part)
    else:
        _records(console, columns)
    if table.caption:
        console.print(_text(table.caption), style="dim italic", highlight=False)


@dataclass(frozen=True)
class _Column:
    """A column's title and texts with the width that they need."""

    column: Column

    @property
    def is_prose(self) -> bool:
        return self.column.ratio == PROSE

    @cached_property
    def title(self) -> str:
        return _text(self.column.header).plain

    @cached_property
    def cells(self) -> list[Text]:
        return [_text(cell) for cell in self.column.cells]

    @cached_property
    def natural(self) -> int:
        """The width of the longest line, and of the longest word of the title."""
        lines = (line.cell_len for text in self.cells for line in text.split("\n", allow_blank=True))
        return max((*lines, *(len(word) for word in self.title.split())), default=0)

    @property
    def least(self) -> int:
        return min(self.natural, PROSE_WIDTH) if self.is_prose else self.natural


def _text(value: object) -> Text:
    return value if isinstance(value, Text) else Text.from_markup(str(value))


def _folded(text: str, room: int) -> str:
    """Return a text folded into lines between words."""
    return textwrap.fill(text, max(room, 1), break_long_words=False, break_on_hyphens=False)


def _fit(columns: Sequence[_Column], room: int) -> bool:
    return 1 + sum(column.least + BORDER for column in columns) <= room


def _names(columns: Sequence[_Column]) -> int:
    """Return how many of the first columns identify the rows; one if no number of them does."""
    for count in range(1, len(columns)):
        rows = {
            tuple(text.plain for text in row) for row in zip(*(c.cells for c in columns[:count]), strict=True)
        }
        if len(rows) == len(columns[0].cells):
            return count
    return 1


def _stacked(columns: Sequence[_Column], room: int) -> list[list[_Column]]:
    """Return the columns of stacked tables, each with the rows' names; [] if one column is too wide."""
    names, waiting = list(columns[: _names(columns)]), list(columns[_names(columns) :])
    parts = []
    while waiting:
        fitting = [n for n in range(1, len(waiting) + 1) if _fit([*names, *waiting[:n]], room)]
        if not fitting:
            return []
        parts.append([*names, *waiting[: fitting[-1]]])
        waiting = waiting[fitting[-1] :]
    return parts


def _draw(console: Console, like: Table, columns: Sequence[_Column]) -> None:
    """Print columns that fit; rich divides the remaining width among those of running text."""
    table = Table(show_header=like.show_header, show_lines=like.show_lines)
    for column in columns:
        table.add_column(
            Text(column.title if column.is_prose else _folded(column.title, column.natural)),
            justify=column.column.justify,
            style=column.column.style,
            width=None if column.is_prose else column.natural,
            min_width=column.least,
            no_wrap=not column.is_prose,
            overflow="fold",
        )
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    console.print(table)


def _records(console: Console, columns: Sequence[_Column]) -> None:
    """Print every row as a list: its name, and below it a line per column."""
    name, *quantities = columns
    titles = max((len(column.title) for column in quantities), default=0)
    for position, label in enumerate(name.cells):
        console.print(label, style="bold", overflow="fold", highlight=False)
        for column in quantities:
            text = column.cells[position]
            if 2 + titles + 2 + column.natural <= console.width:
                console.print(Text(f"  {column.title:{titles}}  ") + text, highlight=False)
                continue
            if column.title:
                console.print(f"  {column.title}:", markup=False, highlight=False)
            for line in text.wrap(console, max(console.width - 4, 1), overflow="fold"):
                console.print(Text("    ") + line, highlight=False)
