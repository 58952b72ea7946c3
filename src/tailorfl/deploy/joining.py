"""A client as it is told on the command line."""

from __future__ import annotations

from pathlib import Path

from tailorfl.deploy.member import Member, Told
from tailorfl.deploy.own_data import OwnData, Share
from tailorfl.deploy.own_files import OwnFile
from tailorfl.deploy.policy import DEFAULT_POLICY, Consent, Policy
from tailorfl.errors import ConfigError
from tailorfl.settings.experiment import ExperimentConfig


def member_of(
    *,
    state: str | Path,
    data: str | Path | None = None,
    name: str | None = None,
    told: Told = lambda sentence: None,
    policy: Policy = DEFAULT_POLICY,
    experiment: ExperimentConfig | None = None,
    accept: tuple[str, ...] = (),
) -> Member:
    """Return a client.

    Args:
        state: folder of its private states.
        data: its own file or folder; None: its share of the data that the experiment itself names.
        name: by default that of the file, without its ending, or of the folder.
        told, policy: see `Member`.
        experiment: the only one that it takes part in.
        accept: digests of experiments that it takes part in.

    Raises:
        ConfigError: it has neither a file nor a name.
    """
    consent = Consent(experiment, frozenset(accept))
    return Member(own_data(data, name, policy), Path(state).expanduser(), told, policy, consent)


def own_data(data: str | Path | None, name: str | None, policy: Policy = DEFAULT_POLICY) -> OwnData:
    """Return where a client's samples come from."""
    if data is None:
        if name is None:
            raise ConfigError(
                "a client needs its data (--data FILE), or a name (--name NAME) to take that client's share of the "
                "experiment's own data"
            )
        return Share(name)
    path = Path(data).expanduser()
    return OwnFile((path.name if path.is_dir() else path.stem) if name is None else name, path, policy)
