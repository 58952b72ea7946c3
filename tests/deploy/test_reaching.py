"""What is in the way between a client and its server. Of one with keys `test_attacks.py` has the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.running import free_port

pytest.importorskip("flwr")
from tailorfl.deploy.flower_server import Link
from tailorfl.deploy.keys import client_keys, make_keys
from tailorfl.deploy.reaching import Reach, in_the_way
from tailorfl.errors import ConfigError, RunError


@pytest.fixture
def plain() -> Iterator[str]:
    port = free_port()
    link = Link("127.0.0.1", port, None)
    yield f"127.0.0.1:{port}"
    link.close()


def test_a_server_without_keys(plain: str, tmp_path: Path) -> None:
    assert in_the_way(plain, None) == ""
    make_keys(tmp_path, ["127.0.0.1"], ["north"])
    with pytest.raises(RunError, match=f"{plain} uses no TLS"):
        in_the_way(plain, client_keys(tmp_path / "clients" / "north"))


def test_a_server_that_is_not_there_yet() -> None:
    """It is said once that it cannot be reached, and once that it can."""
    server, said = f"127.0.0.1:{free_port()}", list[str]()
    reach = Reach(server, None, said.append)
    for _ in range(2):
        reach.failed("the call has failed")
    assert len(said) == 1
    assert "Connection refused" in reach.trouble
    for _ in range(2):
        reach.succeeded()
    assert said[1:] == [f"the server at {server} can be reached"]
    assert reach.trouble == ""


@pytest.mark.parametrize("address", ["example.org", "a:b", ":80", "a:0", "a:65536"])
def test_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        in_the_way(address, None)
