"""A client as it is told on the command line."""

from __future__ import annotations

from pathlib import Path

from tailorfl.deploy.member import Member, Told
from tailorfl.deploy.own_data import OwnData, Share
from tailorfl.deploy.own_files import OwnFile
from tailorfl.deploy.packet import LARGEST
from tailorfl.errors import ConfigError


def member_of(
    *,
    state: str | Path,
    data: str | Path | None = None,
    name: str | None = None,
    largest: int = LARGEST,
    told: Told = lambda sentence: None,
) -> Member:
    """Returns a client.

    Args:
        state: folder of its private states.
        data: its own file or folder; None: its share of the data that the experiment itself names.
        name: by default that of the file, without its ending, or of the folder.
        largest, told: see `Member`.

    Raises:
        ConfigError: it has neither a file nor a name.
    """
    return Member(own_data(data, name), Path(state).expanduser(), largest, told)


def own_data(data: str | Path | None, name: str | None) -> OwnData:
    """Returns where a client's samples come from."""
    if data is None:
        if name is None:
            raise ConfigError(
                "a client needs its data (--data FILE), or a name (--name NAME) to take that client's share of the "
                "experiment's own data"
            )
        return Share(name)
    path = Path(data).expanduser()
    return OwnFile((path.name if path.is_dir() else path.stem) if name is None else name, path)
