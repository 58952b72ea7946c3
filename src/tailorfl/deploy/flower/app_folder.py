"""The folder of a Flower app that is tailorfl's server and client: what `flwr run` takes."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from tailorfl.runs.files import write_text

_PROJECT = """\
# A Flower app: its server and its clients are tailorfl's, which is installed wherever it runs.
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "tailorfl-federation"
version = "1.0.0"
description = "Personalized federated learning with tailorfl"
license = "Apache-2.0"
dependencies = ["flwr>=1.40,<2", "tailorfl=={version}"]

[tool.hatch.build.targets.wheel]
packages = ["federation"]

[tool.flwr.app]
publisher = "tailorfl"

[tool.flwr.app.components]
serverapp = "federation.server_app:app"
clientapp = "federation.client_app:app"

[tool.flwr.app.config]
{config}
"""


def write_app(folder: Path, config: Mapping[str, str]) -> None:
    """Writes the app; `config` are settings of a run, each of which `flwr run -c` may change.

    Raises:
        RunError: the file system refuses.
    """
    package = folder / "federation"
    package.mkdir(parents=True, exist_ok=True)
    lines = "\n".join(f'{key} = "{value}"' for key, value in config.items())
    write_text(folder / "pyproject.toml", _PROJECT.format(version=version("tailorfl"), config=lines))
    write_text(package / "__init__.py", '"""A federation of tailorfl."""\n')
    for side in ("server", "client"):
        text = (
            f'"""The {side} of the federation."""\n\n'
            f"from tailorfl.deploy.flower.{side}_app import app as tailorfl_app\n\n"
            "app = tailorfl_app\n"
        )
        write_text(package / f"{side}_app.py", text)
