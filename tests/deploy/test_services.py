"""The files for services in docs/services: they parse, and their commands are ones that there are."""

from __future__ import annotations

import configparser
import shlex
from pathlib import Path

import click
import pytest
import typer
import yaml

from tailorfl.cli.main import app

FOLDER = Path(__file__).parents[2] / "docs" / "services"


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


@pytest.mark.parametrize("side", ["server", "client"])
def test_a_unit_of_systemd(side: str) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string((FOLDER / f"tailorfl-{side}.service").read_text())
    assert set(unit) == {"DEFAULT", "Unit", "Service", "Install"}
    program, *words = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name == "tailorfl"
    assert words[0] == side
    are_secured(parsed(words))
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
    for name in ("keys", "out", "state", "data"):
        if options.get(name) is not None:
            assert str(options[name]).split("/")[0] in mounted, name
    if side == "server":
        assert service["ports"] == [f"{str(options['listen']).rpartition(':')[2]}:8443"]
    else:
        assert "ports" not in service
