"""The experiment of a deployment: settings that it cannot have, and the experiment that forgets a client.

Exact unlearning: the samples are with the clients, so the server cannot replay anything. It writes an experiment in
which the client's place is empty, which the remaining clients train again, and then its certificate. All others keep
their numbers, splits and random streams; common constants are fitted again.
"""

from __future__ import annotations

import logging
from pathlib import Path

from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.remote_federation import remote_federation, remote_source
from tailorfl.deploy.client_session import OWN_SETS
from tailorfl.deploy.membership import NAME, Membership
from tailorfl.errors import ConfigError, RunError
from tailorfl.runs import unlearning
from tailorfl.runs.build import with_all_options
from tailorfl.runs.files import encode, write_text
from tailorfl.runs.fingerprint import decisive
from tailorfl.runs.folders import experiment_in
from tailorfl.runs.job import Job, trouble
from tailorfl.runs.privacy import privacy_of
from tailorfl.runs.unlearning import Unlearning
from tailorfl.settings.experiment import DEFAULT, ExperimentConfig
from tailorfl.settings.names import slug

log = logging.getLogger(__name__)


def for_deployment(config: ExperimentConfig) -> ExperimentConfig:
    """Return an experiment as it runs on real machines: with a checkpoint after every round.

    Raises:
        ConfigError: it cannot run there; the message says why.
    """
    for line in config.methods:
        method = make_method(line.name, line.options)
        if method.pooled:
            raise ConfigError(
                f"{method.title} trains on all clients' samples in one place, which a deployment never has; simulate "
                f"it with tailorfl run, and leave '{line.label}' out here"
            )
        privacy = privacy_of(Job(config, line, config.seeds[0]))
        is_secret = method.sampled(config.sampling) == "bernoulli" and config.fraction < 1
        if privacy is not None and privacy.level == "client" and is_secret:
            raise ConfigError(
                f"the epsilon of '{line.label}' holds only if nobody sees who takes part (sampling=bernoulli), but a "
                "deployment shows it on the network and in its trace; set sampling=uniform"
            )
        if {**config.train.model_dump(), **line.train}["class_weights"] == "federated":
            raise ConfigError(
                f"'{line.label}' has train.class_weights=federated, which needs every client's class counts, and those "
                "do not leave a client here; set class_weights=client"
            )
    problems = {
        f"'{config.name}' has variants ({', '.join(config.variants)}), each a separate federation; give the settings "
        "of one as KEY=VALUE, and variants={}": config.variants,
        "clients cannot choose their best rounds yet; use eval.select=last": config.eval.select != "last",
        "system describes simulated devices, and a deployment has real ones; leave it out (deploy.min_replies sets how "
        "many replies a round needs), or simulate with tailorfl run": config.system != DEFAULT.system,
        "engine.precision=auto lets each machine choose its fastest precision, so the clients of a round would not "
        "compute alike; use float32, or bfloat16 if all support it": config.engine.precision == "auto",
        "engine.precision=tf32 is for GPUs, but deployed clients compute on their CPUs; use float32 or "
        "bfloat16": config.engine.precision == "tf32",
        "clients that never train cannot be held out in a deployment; leave out data.heldout_clients and "
        "data.heldout_domain": config.data.heldout_clients or config.data.heldout_domain,
    }
    for problem, applies in problems.items():
        if applies:
            raise ConfigError(problem)
    chosen = () if config.eval.final == DEFAULT.eval.final else config.eval.final  # no warning of a default
    sets = dict.fromkeys((*config.eval.sets, *chosen))
    if dropped := ", ".join(name for name in sets if name not in (*OWN_SETS, "participants")):
        log.warning(
            "a single client cannot evaluate models on %s, so these sets of eval are left out", dropped
        )
    return config.model_copy(update={"checkpoint_every": 1})


def is_deployed(folder: Path) -> bool:
    """Return whether a result folder holds a deployment."""
    return (folder / NAME).is_file()


def plan_unlearning(folder: Path, client: str) -> Unlearning:
    """Return the plan for forgetting a client of a deployment.

    Args:
        folder: finished results of a server.
        client: the client's name, or its number if no client has that name.

    Raises:
        ConfigError, RunError: see `tailorfl.runs.unlearning.plan`.
    """
    membership = _membership(folder)

    def federation(config: ExperimentConfig, seed: int) -> Federation:
        clients = membership.clients[str(seed)]
        return remote_federation(remote_source(clients.source), clients.names, clients.sizes)

    return unlearning.plan(folder, client, remote=federation)


def experiment_without(planned: Unlearning) -> ExperimentConfig:
    """Return the experiment of the remaining clients, without this client and all that have left since.

    Raises:
        ConfigError: a client joined after the start, at a moment that cannot be repeated.
    """
    membership, config = _membership(planned.folder), planned.config
    clients = list(membership.clients.values())
    if any(len(each.groups) > 1 for each in clients):
        raise ConfigError(
            f"clients joined '{planned.folder}' after it had begun, at moments that no other run can repeat; start a "
            "federation of the remaining clients with tailorfl server"
        )
    began = {name for each in clients for name in each.names}  # others left before the start
    left = sorted(membership.left & began)
    excluded = tuple(dict.fromkeys((*config.data.excluded_clients, planned.name, *left)))
    rows = {
        name: each.prepared["rows"][each.names.index(name)]
        for each in clients
        if each.prepared is not None
        for name in excluded
        if name in each.names  # who has left is in no later seed
    }
    data = config.data.model_copy(update={"excluded_clients": excluded})
    deploy = config.deploy.model_copy(update={"clients": len(clients[0].names), "excluded_rows": rows})
    name = f"{config.name}-without-{slug(planned.name)}"
    return config.model_copy(update={"name": name, "data": data, "deploy": deploy})


def certify(planned: Unlearning, out: Path) -> None:
    """Write the certificate into the finished results of the remaining clients.

    Raises:
        RunError: the results are of another experiment, or not finished.
    """
    remaining, done = (with_all_options(c) for c in (experiment_without(planned), experiment_in(out)))
    labels, rows = [replay.job.method.label for replay in planned.replays], remaining.deploy.excluded_rows
    differs = (decisive(remaining.to_dict(), x) != decisive(done.to_dict(), x) for x in labels)
    if any(differs) or done.deploy.excluded_rows != rows:
        raise RunError(
            f"'{out}' holds another experiment than that of the remaining clients; choose another --out"
        )
    for replay in planned.replays:
        if why := trouble(out / replay.job.folder):
            raise RunError(
                f"{replay.job.name} of the remaining clients {why}; continue with the same tailorfl server command"
            )
    write_text(out / unlearning.NAME, encode(unlearning.certificate(planned, out), indent=1))


def _membership(folder: Path) -> Membership:
    return Membership.of(folder, with_all_options(experiment_in(folder)), begun=True)
