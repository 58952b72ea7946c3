"""Services: what those who watch over them are told (logs, /healthz, /metrics), and the files in docs/services."""

from __future__ import annotations

import configparser
import json
import shlex
import urllib.error
import urllib.request
from pathlib import Path

import click
import pytest
import typer
import yaml

from deploy.federation import experiment
from deploy.running import Field, free_port, until
from tailorfl.cli.deploy import LogFormat, LogLevel, service_log
from tailorfl.cli.main import app
from tailorfl.deploy.running import exposition, served
from tailorfl.errors import RunError

pytest.importorskip("flwr")
FOLDER = Path(__file__).parents[2] / "docs" / "services"


def got(port: int, path: str) -> tuple[int, str]:
    """(status, text) of what is answered; status 0 where nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def numbers(text: str) -> dict[str, float]:
    """The numbers in an exposition."""
    return {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if not line.startswith("#")}


def test_words_of_the_other_side_forge_no_line_of_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with service_log("north", LogFormat.text, LogLevel.info) as log:
        log("clients: south\n2026-01-01T00:00:00.000+00:00 info north: nothing has left")
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith(" info north: clients: south")
    assert second.startswith("  2026")


def test_what_is_answered_at_a_port() -> None:
    port, wrong = free_port(), [""]
    with served(port, lambda: (wrong[0], {"clients": 3.0, "bytes_total": 123456789012.0})):
        assert got(port, "/healthz") == (200, '{"status": "ok"}')
        assert numbers(got(port, "/metrics")[1]) == {
            "tailorfl_up": 1.0,
            "tailorfl_clients": 3.0,
            "tailorfl_bytes_total": 123456789012.0,
        }
        wrong[0] = "no server"
        assert got(port, "/healthz") == (503, '{"status": "no server"}')
        assert numbers(got(port, "/metrics")[1])["tailorfl_up"] == 0.0
        assert got(port, "/")[0] == 404
        with pytest.raises(RunError, match=str(port)), served(port, lambda: ("", {})):
            pass
    assert got(port, "/healthz")[0] == 0
    assert "# TYPE tailorfl_x_total counter\n" in exposition({"x_total": 1.0})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_and_a_client_tell_how_they_are_doing(tmp_path: Path) -> None:
    config = experiment("fedavg", data={"name": "digits", "clients": 1, "samples": 200}, rounds=3)
    ports = [free_port(), free_port()]
    with Field(tmp_path, config) as field:
        words = ["--log-format", "json", "--log-level", "debug"]
        client = field.client(0, "--stay", "--health", str(ports[1]), *words)
        until(lambda: got(ports[1], "/healthz")[0] == 503, 100, "a client without a server")
        assert "refused" in got(ports[1], "/healthz")[1]
        server = field.server("--health", str(ports[0]), *words)
        seen: dict[str, float] = {}

        def whole() -> bool:
            seen.update(numbers(got(ports[0], "/metrics")[1]))
            return server.code is not None

        until(whole, 150, "the end")
        assert server.code == 0
        assert seen["tailorfl_clients"] == 1
        assert seen["tailorfl_messages_total"] >= 3
        own: dict[str, float] = {}

        def answered() -> bool:
            own.update(numbers(got(ports[1], "/metrics")[1]))
            return own["tailorfl_messages_total"] == own["tailorfl_answers_total"] >= 3 + 4

        until(answered, 30, "the last answer")
        assert own["tailorfl_bytes_up_total"] > 1000
        for program, who in ((client, "0"), (server, "server")):
            lines = [json.loads(line) for line in program.said.splitlines() if line.startswith("{")]
            assert {line["who"] for line in lines} == {who}
            assert {"info", "debug"} <= {line["level"] for line in lines} or who == "server"
            assert all(line["time"].endswith("+00:00") for line in lines)
        assert "round 3/3" in server.said


# -- the files in docs/services -----------------------------------------------------------------------------


def parsed(words: list[str]) -> dict[str, object]:
    """The options of a command of tailorfl, by name. Raises click's errors where it is none."""
    command = typer.main.get_command(app)
    assert isinstance(command, click.Group)
    with click.Context(command) as context:
        _, found, rest = command.resolve_command(context, words)
        assert found is not None
        return found.make_context(words[0], list(rest), parent=context).params


def are_secured(options: dict[str, object]) -> None:
    """Assert that a command uses keys, is watched, and logs for machines."""
    assert options["keys"] is not None
    assert options["insecure"] is False
    assert options["health"] is not None
    assert str(options["log_format"]) == "json"


def has_agreed(options: dict[str, object]) -> None:
    """Assert that a client joins the experiment that its operator has accepted, within a policy."""
    assert str(options["experiment_file"]) == "wards.yaml"
    assert str(options["policy"]) == "policy.yaml"


@pytest.mark.parametrize("side", ["server", "client"])
def test_a_unit_of_systemd(side: str) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string((FOLDER / f"tailorfl-{side}.service").read_text())
    assert set(unit) == {"DEFAULT", "Unit", "Service", "Install"}
    program, *words = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name == "tailorfl"
    assert words[0] == side
    options = parsed(words)
    are_secured(options)
    if side == "client":
        has_agreed(options)
    assert unit["Service"]["User"] != "root"
    assert unit["Service"]["Restart"] == {"server": "on-failure", "client": "always"}[side]


@pytest.mark.parametrize("side", ["server", "client"])
def test_a_service_of_compose(side: str) -> None:
    service = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"][side]
    words = shlex.split(service["command"])
    options = parsed(words)
    assert words[0] == side
    are_secured(options)
    assert f"127.0.0.1:{options['health']}/healthz" in service["healthcheck"]["test"][-1]
    mounted = {volume.split(":")[1].removeprefix("/experiments/") for volume in service["volumes"]}
    for name in ("keys", "out", "state", "data", "experiment_file", "policy"):
        if options.get(name) is not None:
            assert str(options[name]).split("/")[0] in mounted, name
    if side == "server":
        assert service["ports"] == [f"{str(options['listen']).rpartition(':')[2]}:8443"]
    else:
        has_agreed(options)
        assert "ports" not in service
