"""The server's app inside Flower: what becomes of it when the process that it serves is gone."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tailorfl.deploy.flower.frames import put

pytest.importorskip("flwr")
STUCK = """
import sys, time
import tailorfl.deploy.flower.server_app as module
module.ENDS_WITHIN = 0.2

class Post:
    def nodes(self):
        print("asked", flush=True)
        time.sleep(600)  # as a call that tries for ever to reach a server

module.serve(Post(), sys.argv[1])
"""


@pytest.mark.timeout(60)
def test_a_call_that_never_ends_does_not_outlive_the_server(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        app = subprocess.Popen([sys.executable, "-c", STUCK, path], stdout=subprocess.PIPE, text=True)
        connection, _ = listening.accept()
        put(connection, {"do": "nodes"})
        assert app.stdout is not None
        assert app.stdout.readline() == "asked\n"
        assert app.poll() is None
        connection.close()
        assert app.wait(20) == 1
