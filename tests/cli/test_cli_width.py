"""Every command's output at 80 columns, narrower, and in a pipe: no line is longer, no number and no name is cut."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

import tailorfl
from tailorfl.benchmark import measure
from tailorfl.cli.main import app
from tailorfl.cli.screen import NARROWEST, PROSE, say, show_table
from tailorfl.report import document
from tailorfl.report.progress import Live, bars
from tailorfl.runs.job import Job
from tailorfl.settings.loading import load

TINY = [
    "seeds=3",
    "rounds=2",
    "data.clients=4",
    "data.samples=240",
    "data.heldout_clients=2",
    "model.hidden=[8]",
    "engine=sequential",
]
LONG = "pFedMe with a name, η = 0.05"
METHODS = f"methods=[local,fedavg_ft,{{name: pfedme, label: '{LONG}', lr: 0.05}}]"
FINAL = "eval.final=[local,global,heldout]"
ONE = ["method=local", "seeds=1"]

COMMANDS: dict[str, list[str]] = {
    "run": ["run", *TINY, *ONE, "--out", "run", "--overwrite"],
    "compare": ["compare", *TINY, METHODS, FINAL, "--out", "compare", "--overwrite"],
    "compare --dry-run": ["compare", *TINY, METHODS, "--dry-run"],
    "reproduce": ["reproduce", "tiny.yaml", "--out", "reproduce", "--overwrite"],
    "report": ["report", "done", "--target", "0.01"],
    "check": ["check", "done"],
    "gains": ["gains", "done"],
    "watch": ["watch", "done", "--once"],
    "list": ["list"],
    "list -- settings": ["list", "settings"],
    "list -- one": ["list", "methods", "ditto"],
    "show": ["show", "fedclup"],
    "bench": ["bench", *TINY, "method=fedavg", "--seconds", "0.1", "-o", "found.json"],
    "tune": ["tune", *TINY, METHODS, "--budget", "2x1"],
    "tune --dry-run": ["tune", *TINY, METHODS, "--dry-run"],
    "advise": ["advise", *TINY, "--rounds", "1"],
    "data show": ["data", "show", *TINY],
    "export": ["export", "done", "--client", "0", "--overwrite", "-o", "models"],
    "unlearn": ["unlearn", "done", "--client", "0", "--dry-run"],
    "predict": ["predict", "done", "--client", "0", "--method", "local", "--data", "digits.csv"],
    "pretrain": ["pretrain", "data.samples=240", "rounds=1", "model.hidden=[8]", "--overwrite"],
    "deploy keys": ["deploy", "keys", "keys", "--host", "server.example.org", "--clients", "north,south"],
    "theory moreau": ["theory", "moreau"],
    "theory fedclup": ["theory", "fedclup"],
    "theory fedclup-steps": ["theory", "fedclup-steps"],
    "theory lambda-range": ["theory", "lambda-range"],
    "theory minimax": ["theory", "minimax"],
    "theory l2gd": ["theory", "l2gd"],
    "theory perfed-ckt": ["theory", "perfed-ckt"],
    "theory dp": ["theory", "dp", "--target-epsilon", "8"],
}
SAME = ("report", "check", "gains", "list", "show", "theory")
"""Commands that say the same each time, whose numbers must all be there at every width."""


ENDED = ("board", "server", "client", "deploy join", "deploy leave", "deploy audit", "deploy policy")
"""Commands that end when somebody else tells them to, that need what a federation left, or that run once."""

pytestmark = pytest.mark.usefixtures("a_quick_estimate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a finished experiment, and a recipe with a paper's numbers."""
    here = tmp_path_factory.mktemp("width")
    tailorfl.run(load(None, [*TINY, METHODS, FINAL]), out=here / "done")
    recipe = (
        "{name: tiny, method: local, seeds: 1, rounds: 1, data: {name: digits, clients: 3, samples: 150}, "
        "published: {source: A table of numbers that stand in another paper which nobody has ever heard of, "
        "local: {mean: 0.25, clients: [0.5]}}}"
    )
    (here / "tiny.yaml").write_text(recipe)
    (here / "wards.yaml").write_text("{name: wards, data: digits, method: ditto, deploy: {clients: 2}}")
    (here / "digits.csv").write_text(f"{','.join(f'p{k}' for k in range(64))}\n{','.join('0' * 64)}\n")
    return here


@pytest.fixture
def printed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str], int | None, bool], str]:
    """`printed(arguments, columns, terminal)` is what a command writes on standard output, colours apart.

    `report` prints and writes no files.
    """

    def run(arguments: list[str], columns: int | None, terminal: bool) -> str:
        monkeypatch.setattr("os.get_terminal_size", no_terminal)
        for name in ("COLUMNS", "FORCE_COLOR", "TERM"):
            monkeypatch.delenv(name, raising=False)
        if columns is not None:
            monkeypatch.setenv("COLUMNS", str(columns))
        if terminal:
            monkeypatch.setenv("FORCE_COLOR", "1")
            monkeypatch.setenv("TERM", "xterm")
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", result.stdout)

    monkeypatch.chdir(folder)
    monkeypatch.setattr(measure, "MOST", 1)
    monkeypatch.setattr(document, "write_report", lambda result, target: [result.path / "report.html"])
    return run


def no_terminal(*arguments: object) -> None:
    """As in a pipe, wherever the tests run."""
    raise OSError


def names(group: click.Command, before: str = "") -> Iterator[str]:
    """All commands, those of groups too."""
    if isinstance(group, click.Group):
        for name, command in group.commands.items():
            yield from names(command, f"{before} {name}".strip())
    else:
        yield before


def widest(text: str) -> int:
    """Columns of the longest line; a letter with a bar over it is one."""
    return max(map(cell_len, text.splitlines()))


def numbers(text: str) -> set[str]:
    return set(re.findall(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?", text))


def test_every_command_is_captured() -> None:
    said = {name.split(" --")[0] for name in COMMANDS}
    assert set(names(typer.main.get_command(app))) == {*said, *ENDED}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_is_longer_than_80_columns_and_nothing_is_cut(
    name: str, printed: Callable[[list[str], int | None, bool], str]
) -> None:
    text = printed(COMMANDS[name], 80, True)
    assert text.strip()
    assert "…" not in text
    assert widest(text) <= 80
    if name.startswith(("compare", "report")):
        assert all(name in text for name in ("LocalTrain", "FedAvg+FT", LONG))
    if name.startswith(SAME):
        piped = printed(COMMANDS[name], None, False)
        assert piped == text, "80 columns in a pipe too"
        narrow, wide = printed(COMMANDS[name], 60, False), printed(COMMANDS[name], 400, False)
        assert "…" not in narrow
        assert widest(narrow) <= 60
        if name not in ("report", "gains"):  # which leave out details
            assert numbers(wide) == numbers(text) == numbers(narrow)


@pytest.mark.parametrize("columns", [60, 80])
def test_the_comparison_keeps_what_it_is_for(
    columns: int, folder: Path, printed: Callable[[list[str], int | None, bool], str]
) -> None:
    """Every number of every column but details is whole; clients held out stay, and the first table has the costs."""
    text = printed(COMMANDS["report"], columns, True)
    frame = tailorfl.ExperimentResult.load(folder / "done").displayed.table
    for label, row in frame.iterrows():
        lines = [line for line in text.splitlines() if str(label) in line]
        for key in ("mean", "worst10", "deployed.heldout", "deployed.global"):
            if row[key] == row[key]:
                cell = f"{100 * row[key]:.2f} ± {100 * row[f'{key}_ci']:.2f} %"
                assert any(cell in line for line in lines) or cell in text, (label, key)
    assert text.index("accuracy") < text.index("worst client") < text.index("traffic") < text.index("time")
    assert "further columns are in comparison.md: std, best client" in " ".join(text.split())


def test_columns_are_honoured_in_a_pipe(printed: Callable[[list[str], int | None, bool], str]) -> None:
    wide = printed(COMMANDS["report"], 300, False)
    assert widest(wide) > 120
    assert "further columns" not in wide
    assert printed(COMMANDS["report"], 1, False) == printed(COMMANDS["report"], NARROWEST, False)


def shown(table: Table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    show_table(console, table)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_what_does_not_fit_stands_below_and_names_too_long_become_lists() -> None:
    table = Table(title="of [things]")
    table.add_column("name")
    for number in range(4):
        table.add_column(f"quantity {number}", justify="right")
    table.add_column("why", ratio=PROSE)
    table.add_row("short", *(f"{number}.123456789" for number in range(4)), "since it is so " * 4)
    below = shown(table, 60)
    assert below.count("short") == 2
    assert widest(below) <= 60
    assert numbers(shown(table, 200)) == numbers(below)
    table.add_row("x" * 50, *4 * ["17.25"], "because")
    lists = shown(table, 60)
    assert lists.splitlines()[1] == "short"
    assert "  quantity 3  3.123456789" in lists
    assert "x" * 50 in lists
    assert widest(lists) <= 60
    assert "since it is so since" in " ".join(lists.split())


def test_rows_of_the_same_name_keep_what_tells_them_apart() -> None:
    table = Table()
    for name in ("lam", "eta", *(f"quantity {number}" for number in range(6))):
        table.add_column(name)
    for eta in ("one", "two"):
        table.add_row("0.1", eta, *(f"{number}.123456789" for number in range(6)))
    text = shown(table, 60)
    assert text.count("quantity") == 6
    assert text.count(" lam ") == text.count(" eta ") == text.count(" one ") == text.count(" two ") > 1


def test_sentences_are_wrapped_between_words_and_paths_stay_whole() -> None:
    console = Console(file=io.StringIO(), width=40)
    path = "/a/very-long/path-with-hyphens/" + "b" * 30
    say(console, f"results: {path} and [more] of it that needs another line")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert path in lines
    assert all(len(line) <= 40 for line in lines if line != path)
    assert "[more]" in " ".join(lines)


@pytest.mark.parametrize("width", [60, 80])
def test_bars_drop_the_speed_before_anything_is_cut(width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    config = load(None, [METHODS])
    progress = bars(console)
    watch = Live(progress, 6)
    job = Job(config, config.methods[1], 1)
    watch.job_started(job, 2, 6, 1000, 0)
    watch.evaluated(job, 900, {"personal/local/accuracy": 0.8125})
    progress.update(
        progress.tasks[1].id, facts="round 900/1000 · 51234 clients/s · accuracy 0.812 · 1 rejected"
    )
    console.print(progress.get_renderable())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert "round 900/1000" in text
    assert "clients/s" not in text
    assert width < 80 or "accuracy 0.812" in text


def test_numbers_of_the_page_are_whole(folder: Path) -> None:
    """Numbers wrap nowhere but before ±, on a phone; tables scroll in their own frames, running text is folded."""
    document.write_report(tailorfl.ExperimentResult.load(folder / "done"))
    page = (folder / "done" / "report.html").read_text().partition("<script")[0]
    style = page.partition("<style>")[2].partition("</style>")[0]
    rules = {name.strip(): rule for name, rule in re.findall(r"([^{}]+)\{([^}]*)\}", style)}
    assert "white-space:nowrap" in rules["td,td span"]
    assert "overflow-x:auto" in rules[".table"]
    assert "white-space:normal" in rules["td.prose"]
    frames = len(re.findall(r'<div class="table"[^>]*><table>', page))
    assert page.count("<table>") == frames == page.count("</table></div>")
    assert re.search(r'<td data-value="[\d.]+">(<b>)?\d+\.\d\d <span>± \d+\.\d\d %</span>', page)
