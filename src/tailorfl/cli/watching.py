"""The commands `tailorfl watch` and `tailorfl board`: a running experiment in the terminal, and in a browser."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tailorfl.cli.screen import remark, say, show_table, stderr, stdout

if TYPE_CHECKING:
    from tailorfl.report.live import Snapshot, Watched

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Result folder of an experiment.")]
CERTAIN = 1.0
"""Seconds between the two looks that must agree that nothing runs any more: variants follow each other."""
COLOURS = {"running": "cyan", "finished": "green", "failed": "red", "interrupted": "yellow"}
BESIDE = 8
"""Lines of the display that are not rows of jobs."""


def watch(
    folder: Folder,
    once: Annotated[bool, typer.Option("--once", help="Say how it stands now, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and end.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1, max=3600.0)] = 1.0,
) -> None:
    """Follow a running experiment in the terminal until it ends: jobs, rounds, metric, time left."""
    from tailorfl.report.live import Watched
    from tailorfl.runs.files import encode

    watched = Watched(_begun(folder))
    found = watched.look()
    if as_json:
        typer.echo(encode(found, indent=1))
        return
    if not once and found["status"] == "running":
        found = _follow(watched, every)
    show(stdout(), found)
    if not once and found["status"] != "finished":
        raise typer.Exit(1)


def board(
    folder: Folder,
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8730,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    share: Annotated[
        bool, typer.Option("--share", help="Let other machines see it, at the address of --host.")
    ] = False,
) -> None:
    """Follow a running experiment in a browser on this machine; Ctrl-C closes the page's server."""
    from tailorfl.report.board import Board

    try:
        with Board(_begun(folder), host, port, share) as server:
            say(stdout(), f"board: {server.address} (Ctrl-C closes it)")
            server.serve_forever()
    except KeyboardInterrupt:
        stderr().print("board: closed")


def show(console: Console, found: Snapshot, most: int | None = None) -> None:
    """Print how an experiment stands: a line, and a table with a row a job, of at most `most` jobs."""
    left = "" if found["left"] is None else f", {_seconds(found['left'])} left"
    said = f": {found['message']}" if found["message"] else ""
    head = f"{found['name']}: {found['done']} of {found['total']} jobs{left}"
    say(console, f"{head} ({found['status']}{said})")
    jobs = found["jobs"] if most is None else _nearest(found["jobs"], most)
    show_table(console, _table(jobs, found["metric"]))
    for job in jobs:
        if job["message"]:
            console.print(remark(f"{job['name']}:", job["message"], "bold yellow"), soft_wrap=True)
    if len(jobs) < len(found["jobs"]):
        say(console, f"and {len(found['jobs']) - len(jobs)} more jobs: --once shows all", style="dim")


def _begun(folder: Path) -> Path:
    """Return the folder, once the process that is preparing an experiment in it has begun it."""
    from tailorfl.runs.files import is_locked

    while not (folder / "config.yaml").is_file() and is_locked(folder):
        time.sleep(CERTAIN / 10)
    return folder


def _follow(watched: Watched, every: float) -> Snapshot:
    """Show an experiment, live in a terminal and in lines elsewhere, until nothing runs in its folder any more."""
    from rich.live import Live

    console = Console(stderr=True)
    if not console.is_terminal:
        return _lines(watched, every)
    with Live(console=console, auto_refresh=False, transient=True) as display:
        while True:
            found = watched.look()
            if _is_over(watched, found):
                return watched.look()
            room = Console(
                file=io.StringIO(), force_terminal=True, width=console.width, height=console.height
            )
            show(room, found, most=max(3, console.height - BESIDE))
            assert isinstance(room.file, io.StringIO)
            display.update(Text.from_ansi(room.file.getvalue()), refresh=True)
            time.sleep(every)


def _lines(watched: Watched, every: float) -> Snapshot:
    """Return a line on stderr whenever a job begins, is evaluated or ends."""
    console, told = stderr(), dict[str, Any]()
    while True:
        found = watched.look()
        for job in found["jobs"]:
            news = (job["status"], job["curve"][-1:])
            if job["status"] != "waiting" and told.get(job["name"]) != news:
                told[job["name"]] = news
                score = "" if job["score"] is None else f", {_metric(found)} {_number(job['score'], 4)}"
                left = f", {_seconds(job['left'])} left" if job["left"] else ""
                where = f"round {job['round']}/{job['rounds']}"
                say(console, f"{job['name']}: {job['status']}, {where}{score}{left}")
        if _is_over(watched, found):
            return watched.look()
        time.sleep(every)


def _is_over(watched: Watched, found: Snapshot) -> bool:
    if found["status"] in ("running", "finished"):
        return bool(found["status"] == "finished")
    time.sleep(CERTAIN)
    return bool(watched.look()["status"] != "running")


def _table(jobs: Sequence[dict[str, Any]], metric: str | None) -> Table:
    table = Table()
    table.add_column("Job", style="bold")
    score = (metric or "score").replace("_", " ")
    private = any(job["epsilon"] is not None for job in jobs)
    runs = any(job["left"] for job in jobs)
    columns = [
        "Round",
        score,
        "10–90 %",
        "Loss",
        "Sent",
        *(["ε"] if private else []),
        *(["Left"] if runs else []),
    ]
    for name in columns:
        table.add_column(name, justify="right")
    for job in jobs:
        known = job["low"] is not None and job["high"] is not None
        spread = f"{_number(job['low'], 2)}–{_number(job['high'], 2)}" if known else "–"
        table.add_row(
            Text(job["name"]),
            _progress(job),
            _number(job["score"], 3),
            spread,
            _number(job["loss"], 3),
            _bytes(job),
            *([_number(job["epsilon"], 2)] if private else []),
            *([_seconds(job["left"]) if job["left"] else "–"] if runs else []),
        )
    return table


def _progress(job: dict[str, Any]) -> Text:
    """31/60, with a word where the job neither runs nor is finished."""
    status, done = job["status"], f"{job['round']}/{job['rounds']}"
    words = {"waiting": "waiting", "failed": f"failed, {done}", "interrupted": f"stopped, {done}"}
    return Text(words.get(status, done), style=COLOURS.get(status, ""))


def _nearest(jobs: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """As many jobs as fit, from shortly before the first that is not over."""
    first = next((k for k, job in enumerate(jobs) if job["status"] not in ("finished", "failed")), len(jobs))
    start = max(0, min(first - most // 2, len(jobs) - most))
    return jobs[start : start + most]


def _metric(found: Snapshot) -> str:
    return (found["metric"] or "score").replace("_", " ")


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _seconds(seconds: float) -> str:
    from tailorfl.report.tables import human_seconds

    return human_seconds(seconds)


def _bytes(job: dict[str, Any]) -> str:
    from tailorfl.report.tables import human_bytes

    return "–" if job["bytes_up"] is None else human_bytes(job["bytes_up"] + job["bytes_down"])
