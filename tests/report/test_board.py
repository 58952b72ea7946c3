"""The board: two addresses, no files, this machine alone; and the page in a real browser beside a real run."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tailorfl
from report.browsing import Tab
from report.tiny import TINY
from runs.killing import forked
from tailorfl.errors import ConfigError, RunError
from tailorfl.report import board as boards
from tailorfl.report.board import Board
from tailorfl.report.live import Watched

SMALL = {**TINY, "name": "<b>small</b>", "methods": [{"name": "fedavg", "label": "<img src=x>"}], "rounds": 2}
LONG = (
    "rounds=400", "seeds=2", "eval.every=5", "data.samples=300", "data.clients=8", "methods=[fedavg,local]",
    "engine=sequential", "train.epochs=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished experiment."""
    out = tmp_path_factory.mktemp("board") / "out"
    tailorfl.run(SMALL, out=out)
    return out


@pytest.fixture
def serving() -> Iterator[Callable[..., Board]]:
    """`serving(folder)` is a board that answers until the test ends."""
    open_ones: list[Board] = []

    def start(*arguments: Any, **options: Any) -> Board:
        server = Board(*arguments, **options)
        open_ones.append(server)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    yield start
    for server in open_ones:
        server.shutdown()
        server.server_close()


def asked(
    server: Board, path: str, host: str | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of a request whose address is sent as it is."""
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", f"127.0.0.1:{port}" if host is None else host)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    connection.close()
    return found


def test_it_answers_with_the_page_and_the_state(folder: Path, serving: Callable[..., Board]) -> None:
    server = serving(folder)
    assert server.server_address[0] == "127.0.0.1"
    status, headers, page = asked(server, "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"http://" not in page.replace(b"http://www.w3.org/2000/svg", b"")  # a name, which nobody loads
    assert b"https://" not in page
    assert b"small" not in page
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    status, headers, state = asked(server, "/state.json?1")
    assert (status, headers["content-type"]) == (200, "application/json; charset=utf-8")
    assert json.loads(state) == json.loads(json.dumps(Watched(folder).look()))
    for _, headers, _ in (asked(server, "/"), asked(server, "/state.json"), asked(server, "/x")):
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
        assert headers["server"].strip() == "tailorfl"
    assert asked(server, "/", method="HEAD")[2] == b""
    assert asked(server, "/", method="POST")[0] == 501


def test_no_path_leads_to_a_file(folder: Path, serving: Callable[..., Board]) -> None:
    server = serving(folder)
    for path in (
        "/config.yaml", "/../config.yaml", "/..%2f..%2fetc/passwd", "//etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "*",
        "/state.json/../config.yaml", "/fedavg/seed-0/rounds.jsonl", "file:///etc/passwd", "http://127.0.0.1/config.yaml",
    ):  # fmt: skip
        status, _, body = asked(server, path)
        assert status == 404, path
        assert b"rounds" not in body
        assert b"root:" not in body


ADMITTED = ("127.0.0.1", "localhost:9000", "LOCALHOST", "[::1]:80", "127.9.9.9")
REFUSED = (
    "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8730", "192.168.0.5", "0.0.0.0:8730",
    "localhost@evil.example", "localhost:80:evil.example", "",
)  # fmt: skip


@pytest.mark.parametrize("path", ["/", "/state.json"])
def test_a_name_that_somebody_else_points_here_is_refused(
    path: str, folder: Path, serving: Callable[..., Board]
) -> None:
    server = serving(folder)
    assert [asked(server, path, host)[0] for host in ADMITTED] == [200] * len(ADMITTED)
    for host in REFUSED:
        status, _, body = asked(server, path, host)
        assert status == 403, host
        assert b"<" not in body
    with socket.create_connection(server.server_address[:2], timeout=10) as raw:  # without a host
        raw.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        assert b" 403 " in raw.recv(100)


def test_other_machines_only_where_asked(folder: Path, serving: Callable[..., Board]) -> None:
    for host in ("0.0.0.0", "192.168.0.5", "::", "example.org"):
        with pytest.raises(ConfigError, match="--share"):
            Board(folder, host)
    server = serving(folder, "0.0.0.0", share=True)
    assert asked(server, "/", "192.168.0.5:8730")[0] == 200
    assert asked(server, "/", socket.gethostname())[0] == 200
    assert asked(server, "/", "evil.example")[0] == 403
    with pytest.raises(RunError, match="choose another with --port"):
        Board(folder, port=server.server_address[1])


def test_what_cannot_be_read_is_said_on_the_page(tmp_path: Path, serving: Callable[..., Board]) -> None:
    tailorfl.run(SMALL, out=tmp_path)
    server = serving(tmp_path)
    (job,) = tmp_path.glob("*/seed-0")
    (job / "rounds.jsonl").write_text("nonsense\n")
    status, _, body = asked(server, "/state.json")
    assert status == 200
    assert "line 1 of" in json.loads(body)["error"]


def test_who_says_nothing_holds_nobody_up(
    folder: Path, serving: Callable[..., Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boards._Handler, "timeout", 0.2)
    server = serving(folder)
    with socket.create_connection(server.server_address[:2], timeout=10) as silent:
        assert asked(server, "/")[0] == 200
        assert silent.recv(1) == b""  # closed


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """The number of a process that runs an experiment, once its folder is there; ended with the test."""
    out = tmp_path / "out"
    process, words = forked("run", *LONG, "--out", str(out), "--quiet")
    until(lambda: (out / "config.yaml").is_file())
    yield process, out
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    words.close()
    os.waitpid(process, 0)


def until(holds: Callable[[], Any]) -> None:
    """Wait until something holds; the page's policy forbids that of the browser, which would be handed code."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_page_follows_a_run_in_a_browser(
    running: tuple[int, Path], serving: Callable[..., Board], tab: Tab
) -> None:
    """Seconds of it are the browser's and the run's, which are both processes of their own."""
    process, out = running
    server = serving(out)
    page = tab.page
    page.goto(server.address)
    page.wait_for_selector("#jobs tr td")
    assert page.inner_text("#status") == "running"
    assert page.locator("#jobs tr").count() == 4
    until(lambda: page.locator("#chart path[fill=none]").count())
    before = page.evaluate("state.jobs[0].round")
    until(lambda: page.evaluate("state.jobs[0].round") > before)
    shown = page.inner_text("#jobs tr:first-child td:nth-child(3)")
    assert int(shown.partition("/")[0]) > before
    page.hover("#jobs tr:first-child")
    assert page.locator("#chart path[fill-opacity]").count() == 1  # the quantiles of the line pointed at
    page.select_option("#what", "losses")
    assert page.locator("#chart path[fill=none]").count() >= 1
    os.kill(process, signal.SIGKILL)
    until(lambda: page.inner_text("#status") == "interrupted")
    assert "the process was killed" in page.inner_text("#facts")
    assert tab.messages == []
    assert set(tab.requests) == {server.address, f"{server.address}state.json"}


def test_names_are_texts_on_the_page(folder: Path, serving: Callable[..., Board], tab: Tab) -> None:
    server, page = serving(folder), tab.page
    page.goto(server.address)
    page.wait_for_selector("#jobs tr td")
    assert page.inner_text("#name") == "<b>small</b>"
    assert page.inner_text("#jobs tr td:first-child") == "<img src=x>, seed 0"
    assert page.locator("img").count() == 0
    assert page.inner_text("#status") == "finished"
    # What a page of somebody else's put into it would not run, and could send nothing anywhere.
    assert page.evaluate(
        "new Promise(done => { document.addEventListener('securitypolicyviolation', e => done(e.violatedDirective));"
        "const s = document.createElement('script'); s.textContent = 'window.bad = 1'; document.body.append(s); })"
    ).startswith("script-src")
    assert page.evaluate("window.bad") is None
