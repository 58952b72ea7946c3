"""Random names of methods, experiments, variants and clients: inside their folder, harmless where they are shown."""

from __future__ import annotations

import io
import random
from pathlib import Path

import torch
from rich.console import Console

from tailorfl.cli.screen import show_table
from tailorfl.data.own import from_tensors
from tailorfl.printable import harmful
from tailorfl.report.plots import LONGEST_LINE, literal
from tailorfl.report.tables import Column, SeedResult, as_table, comparison, csv
from tailorfl.runs.build import check
from tailorfl.runs.folders import new_folder
from tailorfl.settings.loading import expand, load
from tailorfl.settings.names import slug

PIECES = [
    "..", "/",
    "\\", ".", "~", "-", " ", "a", "Z", "9", "é", "日", "🏥", "\x1b[31m", "\x1b]0;x\x07", "\n", "\r", "\t", "\x00",
    "\u202e", "\u2028", "\ud800", "[/x]", "[bold]", "[", "]", "$", "\\$", "|", " | ", "<b>", "&", "*", "_",
    "`", "%s", "{}",
    "con", "seed-0", "config.yaml", "report.md", ".png", "λ", "=", "x" * 120, "\u0301", "\ufeff", "'", '"',
]  # fmt: skip


def name(random_: random.Random) -> str:
    """Return a name of odd pieces; half of them have none that would be refused at once."""
    pieces = PIECES if random_.random() < 0.5 else [piece for piece in PIECES if harmful(piece) is None]
    return "".join(random_.choice(pieces) for _ in range(random_.randrange(6)))


def case(random_: random.Random, folder: Path) -> None:
    """Use a name wherever names are used.

    Raises:
        TailorflError: as it should.
        AssertionError: it leaves its folder, or would be shown raw.
    """
    one, two = name(random_), name(random_)
    for text in (one, two):
        place = slug(text)
        assert Path(place).name == place
        assert place not in ("", ".", "..")
        assert (folder / place).resolve().parent == folder.resolve()
    clients = from_tensors(torch.randn(4, 2), torch.arange(4) % 2, clients=[one, two, one, two], name=one)
    found = clients.group_names["client"]
    assert len(found) == len(set(found)) == len({one, two})
    assert harmful("".join([*found, clients.name])) is None
    settings = {
        "name": one or "x",
        "methods": [{"name": "local", "label": one}, {"name": "fedavg", "label": two}],
        "variants": {two: {}} if random_.random() < 0.5 else {},
        "published": {one: {"mean": 0.5}, "source": two},
    }
    config = load(settings)
    check(config)
    assert new_folder(config).parent == Path("runs")
    for experiment in expand(config).values():
        _show([method.label for method in experiment.methods])


def _show(labels: list[str]) -> None:
    """Raise AssertionError where a table shows a label otherwise than it is."""
    columns = (Column("mean", "mean", "percent", "higher"),)
    frame = comparison([SeedResult(label, "local", 0, {"mean": 0.5}) for label in labels], columns)
    table = as_table(frame, columns)
    for text in (table.markdown(), table.latex(), csv(frame, columns)):
        assert harmful(text, but="\n") is None
    assert len({line.count(" | ") for line in table.markdown().replace("\\|", "").splitlines()}) >= 1
    stream = io.StringIO()
    show_table(Console(file=stream, width=2000), table.rich())
    assert all(label in stream.getvalue() for label in labels)
    folded = [line.replace("\\$", "$") for label in labels for line in literal(label).splitlines()]
    assert all(len(line) <= LONGEST_LINE for line in folded)
