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

from tailorfl.cli.arguments import AsJson, ResultFolder
from tailorfl.cli.screen import make_table, print_json, remark, say, show_table, stderr, stdout

if TYPE_CHECKING:
    from tailorfl.report.live import Snapshot, Watched

CERTAIN = 1.0
"""Seconds between two checks that must both find nothing running: variants follow each other."""
COLOURS = {"running": "cyan", "finished": "green", "failed": "red", "interrupted": "yellow"}
BESIDE = 8
"""Number of lines of the display that are not rows of jobs."""


def watch(
    folder: ResultFolder,
    once: bool = False,
    as_json: AsJson = False,
    every: Annotated[float, typer.Option(min=0.1, max=3600.0)] = 1.0,
) -> None:
    """Follow a running experiment in the terminal until it ends: jobs, rounds, metric, time left.

    Args:
        once: Print the present state and end; --json does so, too.
        every: Seconds between updates.
    """
    from tailorfl.report.live import Watched

    watched = Watched(_begun(folder))
    snapshot = watched.look()
    if as_json:
        print_json(snapshot)
        return
    if not once and snapshot["status"] == "running":
        snapshot = _follow(watched, every)
    show(stdout(), snapshot)
    if not once and snapshot["status"] != "finished":
        raise typer.Exit(1)


def board(
    folder: ResultFolder,
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8730,
    host: str = "127.0.0.1",
    share: bool = False,
) -> None:
    """Follow a running experiment in a browser on this machine; Ctrl-C closes the page's server.

    Args:
        port: Port; 0 takes a free one.
        host (HOST): Address to listen on.
        share: Let other machines see it, at the address of --host.
    """
    from tailorfl.report.board import Board

    try:
        with Board(_begun(folder), host, port, share) as server:
            say(stdout(), f"board: {server.address} (Ctrl-C closes it)")
            server.serve_forever()
    except KeyboardInterrupt:
        stderr().print("board: closed")


def show(console: Console, snapshot: Snapshot, most: int | None = None) -> None:
    """Print the status of an experiment: a line, and a table with a row per job, of at most `most` jobs."""
    time_left = "" if snapshot["left"] is None else f", {_seconds(snapshot['left'])} left"
    reason = f": {snapshot['message']}" if snapshot["message"] else ""
    head = f"{snapshot['name']}: {snapshot['done']} of {snapshot['total']} jobs{time_left}"
    say(console, f"{head} ({snapshot['status']}{reason})")
    jobs = snapshot["jobs"] if most is None else _nearest(snapshot["jobs"], most)
    show_table(console, _table(jobs, _metric(snapshot)))
    for job in jobs:
        if job["message"]:
            console.print(remark(f"{job['name']}:", job["message"], "bold yellow"), soft_wrap=True)
    if len(jobs) < len(snapshot["jobs"]):
        say(console, f"and {len(snapshot['jobs']) - len(jobs)} more jobs: --once shows all", style="dim")


def _begun(folder: Path) -> Path:
    """Return the folder once the process that prepares an experiment in it has begun."""
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
        while not _is_over(watched, snapshot := watched.look()):
            buffer = io.StringIO()
            room = Console(file=buffer, force_terminal=True, width=console.width, height=console.height)
            show(room, snapshot, most=max(3, console.height - BESIDE))
            display.update(Text.from_ansi(buffer.getvalue()), refresh=True)
            time.sleep(every)
    return watched.look()


def _lines(watched: Watched, every: float) -> Snapshot:
    """Print a line on stderr whenever a job begins, is evaluated or ends; return the last state."""
    console, printed = stderr(), dict[str, Any]()
    while True:
        snapshot = watched.look()
        for job in snapshot["jobs"]:
            news = (job["status"], job["curve"][-1:])
            if job["status"] != "waiting" and printed.get(job["name"]) != news:
                printed[job["name"]] = news
                score = "" if job["score"] is None else f", {_metric(snapshot)} {_number(job['score'], 4)}"
                time_left = f", {_seconds(job['left'])} left" if job["left"] else ""
                rounds = f"round {job['round']}/{job['rounds']}"
                say(console, f"{job['name']}: {job['status']}, {rounds}{score}{time_left}")
        if _is_over(watched, snapshot):
            return watched.look()
        time.sleep(every)


def _is_over(watched: Watched, snapshot: Snapshot) -> bool:
    if snapshot["status"] in ("running", "finished"):
        return bool(snapshot["status"] == "finished")
    time.sleep(CERTAIN)
    return bool(watched.look()["status"] != "running")


def _table(jobs: Sequence[dict[str, Any]], metric: str) -> Table:
    """Return a table with a row per job; ε and the time left are shown if a job has them."""
    is_private = any(job["epsilon"] is not None for job in jobs)
    runs = any(job["left"] for job in jobs)
    rows: list[list[str | Text]] = []
    for job in jobs:
        has_range = job["low"] is not None and job["high"] is not None
        row: list[str | Text] = [
            Text(job["name"], style="bold"),
            _progress(job),
            _number(job["score"], 3),
            f"{_number(job['low'], 2)}–{_number(job['high'], 2)}" if has_range else "–",
            _number(job["loss"], 3),
            _bytes(job),
        ]
        row += [_number(job["epsilon"], 2)] if is_private else []
        row += [_seconds(job["left"]) if job["left"] else "–"] if runs else []
        rows.append(row)
    heads = ["Job", "Round", metric, "10–90 %", "Loss", "Traffic"]
    return make_table(None, heads + ["ε"] * is_private + ["Left"] * runs, rows)


def _progress(job: dict[str, Any]) -> Text:
    """Return progress such as 31/60, with a word if the job neither runs nor is finished."""
    status, done = job["status"], f"{job['round']}/{job['rounds']}"
    words = {"waiting": "waiting", "failed": f"failed, {done}", "interrupted": f"stopped, {done}"}
    return Text(words.get(status, done), style=COLOURS.get(status, ""))


def _nearest(jobs: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return at most `most` jobs, from shortly before the first that is not over."""
    first = next((k for k, job in enumerate(jobs) if job["status"] not in ("finished", "failed")), len(jobs))
    start = max(0, min(first - most // 2, len(jobs) - most))
    return jobs[start : start + most]


def _metric(snapshot: Snapshot) -> str:
    return (snapshot["metric"] or "score").replace("_", " ")


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _seconds(seconds: float) -> str:
    from tailorfl.report.tables import human_seconds

    return human_seconds(seconds)


def _bytes(job: dict[str, Any]) -> str:
    from tailorfl.report.tables import human_bytes

    return "–" if job["bytes_up"] is None else human_bytes(job["bytes_up"] + job["bytes_down"])
