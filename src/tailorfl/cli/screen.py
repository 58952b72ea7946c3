"""What commands print on: as wide as COLUMNS or the terminal say, 80 columns in a pipe or a file.

Tables are laid out for that width and never cut: titles are folded at words, running text is wrapped, columns that do
not fit beside the others go into a further table below, each with the names of the rows; and where even a name and one
column are too wide, every row becomes a list of its own, a line a column.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from tailorfl.printable import visible
from tailorfl.runs.files import encode

PIPED = 80
"""Columns where nothing says how many there are."""
NARROWEST = 40
"""Less is not tried: names and numbers are then longer than a line."""
PROSE = 1
"""`ratio` of a column of running text, which may be wrapped at words; all others are whole on one line."""
PROSE_WIDTH = 20
"""Running text is given at least so many columns, or as many as its longest line has."""
MOST_PARTS = 3
"""With more tables one above the other, a row is hard to follow: then each becomes a list."""
BORDER = 3
"""Columns that a column of a table takes beside its text; the table takes one more."""


def width() -> int:
    """Return how many columns a line of output may have."""
    return max(NARROWEST, shutil.get_terminal_size((PIPED, 25)).columns)


def stdout() -> Console:
    """Return the console of standard output."""
    return Console(width=width(), height=25)


def stderr() -> Console:
    """Return the console of errors and progress, where sentences are left in one line."""
    return Console(stderr=True)


def print_json(value: object) -> None:
    """Print a value as JSON, which no width folds; NaN is null, an infinity a text, as in result folders."""
    print(encode(value, indent=1))


def remark(mark: str, text: str, style: str) -> Text:
    """Return a coloured word and a text after it, as it is, but without what would act on the terminal."""
    return Text.assemble((mark, style), " ", visible(text, but="\n\t"))


@contextmanager
def status(quiet: bool, name: str, *, lines: bool = False) -> Iterator[Callable[[str], None]]:
    """Tell on stderr what is being done: a line that changes in a terminal; elsewhere plain `lines`, or nothing.

    Log messages of the library go there meanwhile.
    """
    from tailorfl.report.progress import messages

    console = stderr()
    with messages(console):
        if not quiet and console.is_terminal:
            with console.status(name) as shown:
                yield lambda text: shown.update(Text(text))
        elif not quiet and lines:
            yield lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            yield lambda _: None


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a text as it is, wrapped between words; what has no blank in it, as a path, stays whole."""
    for line in text.split("\n"):
        console.print(
            _folded(line, console.width), style=style, markup=False, highlight=False, soft_wrap=True
        )


def fits(table: Table, room: int) -> bool:
    """Return whether a table has room for all its columns beside each other."""
    return _widths([_Column.of(column) for column in table.columns], room) is not None


def show_table(console: Console, table: Table) -> None:
    """Print a table in the width of a console, with all that it has; its title stands above."""
    if table.title:
        console.print(_text(table.title), style="italic", highlight=False)
    columns = [_Column.of(column) for column in table.columns]
    widths = _widths(columns, console.width)
    if widths is not None:
        _draw(console, table, columns, widths)
    else:
        parts = _stacked(columns, console.width) if table.show_header else []
        if not 0 < len(parts) <= MOST_PARTS:
            _records(console, columns)
        else:
            for part in parts:
                _draw(console, table, *part)
    if table.caption:
        console.print(_text(table.caption), style="dim italic", highlight=False)


@dataclass(frozen=True)
class _Column:
    """A column's title, its texts, and whether they may be wrapped."""

    like: Column
    title: str
    cells: tuple[Text, ...]
    prose: bool

    @classmethod
    def of(cls, column: Column) -> _Column:
        texts = tuple(_text(cell) for cell in column.cells)
        return cls(column, _text(column.header).plain, texts, column.ratio == PROSE)

    @property
    def natural(self) -> int:
        """The width of the longest line, and of the longest word of the title."""
        lines = (line.cell_len for text in self.cells for line in text.split("\n", allow_blank=True))
        return max((*lines, *(len(word) for word in self.title.split())), default=0)

    @property
    def least(self) -> int:
        return min(self.natural, PROSE_WIDTH) if self.prose else self.natural


def _text(value: object) -> Text:
    return value if isinstance(value, Text) else Text.from_markup(str(value))


def _folded(text: str, room: int) -> str:
    """Return a text in lines that end between words."""
    return textwrap.fill(text, max(room, 1), break_long_words=False, break_on_hyphens=False)


def _widths(columns: Sequence[_Column], room: int) -> list[int] | None:
    """Return the columns' widths in a table of at most `room`, what is left going to running text.

    None if they do not fit.
    """
    widths = [column.least for column in columns]
    left = room - 1 - sum(widths) - BORDER * len(columns)
    if left < 0:
        return None
    wanting = [i for i, column in enumerate(columns) if column.natural > widths[i]]
    while wanting and left:
        share = max(1, left // len(wanting))
        for i in list(wanting):
            more = min(share, columns[i].natural - widths[i], left)
            widths[i] += more
            left -= more
            if widths[i] == columns[i].natural:
                wanting.remove(i)
    return widths


def _names(columns: Sequence[_Column]) -> tuple[list[_Column], list[_Column]]:
    """Return the first columns, as many as tell the rows apart, and the others."""
    for count in range(1, len(columns)):
        rows = {
            tuple(text.plain for text in row) for row in zip(*(c.cells for c in columns[:count]), strict=True)
        }
        if len(rows) == len(columns[0].cells):
            return list(columns[:count]), list(columns[count:])
    return list(columns[:1]), list(columns[1:])


def _stacked(columns: Sequence[_Column], room: int) -> list[tuple[list[_Column], list[int]]]:
    """Columns and widths of tables one above the other, each with the rows' names; [] where one column is too wide."""
    names, waiting = _names(columns)
    parts = []
    while waiting:
        count, widths = len(waiting), _widths([*names, *waiting], room)
        while widths is None and count > 1:
            count -= 1
            widths = _widths([*names, *waiting[:count]], room)
        if widths is None:
            return []
        parts.append(([*names, *waiting[:count]], widths))
        waiting = waiting[count:]
    return parts


def _draw(console: Console, like: Table, columns: Sequence[_Column], widths: Sequence[int]) -> None:
    table = Table(show_header=like.show_header, show_lines=like.show_lines)
    for column, wide in zip(columns, widths, strict=True):
        table.add_column(
            Text(_folded(column.title, wide)),
            justify=column.like.justify,
            style=column.like.style,
            width=wide,
            no_wrap=not column.prose,
            overflow="fold",
        )
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    console.print(table)


def _records(console: Console, columns: Sequence[_Column]) -> None:
    """Every row as a list: its name, and below it a line a column."""
    name, *others = columns
    titles = max((len(column.title) for column in others), default=0)
    for position, label in enumerate(name.cells):
        console.print(label, style="bold", overflow="fold", highlight=False)
        for column in others:
            text = column.cells[position]
            beside = 2 + titles + 2 + column.natural <= console.width
            if beside:
                console.print(Text(f"  {column.title:{titles}}  ") + text, highlight=False)
                continue
            if column.title:
                console.print(f"  {column.title}:", markup=False, highlight=False)
            for line in text.wrap(console, max(console.width - 4, 1), overflow="fold"):
                console.print(Text("    ") + line, highlight=False)
