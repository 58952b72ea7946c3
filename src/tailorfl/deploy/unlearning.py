"""Exact unlearning of a deployment: the experiment that the remaining clients train anew, and its certificate.

The samples are with the clients, so nothing can be replayed at the server. It writes an experiment in which the
client's place is empty. All others keep numbers, splits and random streams; common constants are fitted anew.
"""

from __future__ import annotations

from pathlib import Path

from tailorfl.data.federation import Federation
from tailorfl.data.remote_federation import remote_federation, remote_source
from tailorfl.deploy.membership import NAME, Membership
from tailorfl.errors import ConfigError, RunError
from tailorfl.runs import unlearning
from tailorfl.runs.build import with_all_options
from tailorfl.runs.files import encode, write_text
from tailorfl.runs.fingerprint import deciding
from tailorfl.runs.folders import experiment_in
from tailorfl.runs.job import trouble
from tailorfl.runs.unlearning import Unlearning
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.names import slug


def is_deployed(folder: Path) -> bool:
    """Return whether a result folder holds a deployment."""
    return (folder / NAME).is_file()


def plan(folder: Path, client: str) -> Unlearning:
    """Return what has to be done to forget a client of a deployment.

    Args:
        folder: finished results of a server.
        client: the client's name, or its number where no name is like that.

    Raises:
        ConfigError, RunError: see `tailorfl.runs.unlearning.plan`.
    """
    membership = _membership(folder)

    def federation(config: ExperimentConfig, seed: int) -> Federation:
        clients = membership.clients[str(seed)]
        return remote_federation(remote_source(clients.source), clients.names, clients.sizes)

    return unlearning.plan(folder, client, remote=federation)


def experiment_without(planned: Unlearning) -> ExperimentConfig:
    """Return the experiment for the remaining clients, who neither have the client nor any that has left since.

    Raises:
        ConfigError: a client joined after the start, and nobody could join at the same moment again.
    """
    membership, config = _membership(planned.folder), planned.config
    clients = list(membership.clients.values())
    if any(len(each.groups) > 1 for each in clients):
        raise ConfigError(
            f"clients joined '{planned.folder}' after it had begun, at moments that no other run would repeat; start a "
            "federation of the remaining clients with tailorfl server"
        )
    excluded = tuple(dict.fromkeys((*config.data.excluded_clients, planned.name, *sorted(membership.left))))
    rows = {
        name: each.prepared["rows"][each.names.index(name)]
        for each in clients
        if each.prepared is not None
        for name in excluded
    }
    data = config.data.model_copy(update={"excluded_clients": excluded})
    deploy = config.deploy.model_copy(update={"clients": len(clients[0].names), "excluded_rows": rows})
    name = f"{config.name}-without-{slug(planned.name)}"
    return config.model_copy(update={"name": name, "data": data, "deploy": deploy})


def certify(planned: Unlearning, out: Path) -> None:
    """Write the certificate into the finished results of the remaining clients.

    Raises:
        RunError: they are of another experiment, or not finished.
    """
    remaining, done = experiment_without(planned), with_all_options(experiment_in(out))
    if deciding(done.to_dict()) != deciding(with_all_options(remaining).to_dict()):
        raise RunError(
            f"'{out}' is of another experiment than that of the clients that remain; choose another --out"
        )
    for replay in planned.replays:
        if why := trouble(out / replay.job.folder):
            raise RunError(
                f"{replay.job.name} of the clients that remain {why}; go on with the same tailorfl server command"
            )
    write_text(out / unlearning.NAME, encode(unlearning.certificate(planned, out), indent=1))


def _membership(folder: Path) -> Membership:
    return Membership.of(folder, with_all_options(experiment_in(folder)), begun=True)
