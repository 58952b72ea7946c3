"""A server's experiment: the venue whose clients are elsewhere, from waiting for them to their last message."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tailorfl.core.method import make_method
from tailorfl.data.build import public_set
from tailorfl.data.federation import Federation
from tailorfl.data.hollow import PARTS, hollow_federation, hollow_source
from tailorfl.data.public import subset
from tailorfl.data.source import Source
from tailorfl.data.summaries import Record
from tailorfl.deploy.agreement import Agreement
from tailorfl.deploy.member import OWN_SETS
from tailorfl.deploy.own_files import form_of
from tailorfl.deploy.own_table import CONSTANTS
from tailorfl.deploy.packet import Packet
from tailorfl.deploy.remote import Line, Remote, evaluate_remotely
from tailorfl.deploy.roster import Answer, Roster, goodbye, missing
from tailorfl.errors import ConfigError, DataError, MessageError, RunError
from tailorfl.experiments.jobs import Job
from tailorfl.experiments.making import make_federation, make_simulation
from tailorfl.experiments.venue import Venue
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.experiment import DEFAULT, ExperimentConfig

log = logging.getLogger(__name__)

LOOK, GOODBYE_SECONDS = 0.2, 5.0
"""Seconds between two looks whether enough clients are there, and for which the last message is waited for."""


def for_deployment(config: ExperimentConfig) -> ExperimentConfig:
    """Returns an experiment as it can take place on real machines: with a checkpoint after every round.

    Raises:
        ConfigError: it cannot; says why, before anything starts.
    """
    for line in config.methods:
        method = make_method(line.name, line.options)
        if method.pooled:
            raise ConfigError(
                f"{method.title} trains on all clients' samples in one place, which a deployment never has; simulate "
                f"it with tailorfl run, and leave '{line.label}' out here"
            )
        train = {**config.train.model_dump(), **line.train}
        if train["class_weights"] == "federated":
            raise ConfigError(
                f"'{line.label}' has train.class_weights=federated, which needs every client's samples of each "
                "class, and those do not leave a client here; take class_weights=client"
            )
    if config.eval.select != "last":
        raise ConfigError(
            f"eval.select={config.eval.select} keeps the personal model of each client's best round, which clients do "
            "not do by themselves yet; take eval.select=last"
        )
    if config.system != DEFAULT.system.model_copy(update={"min_replies": config.system.min_replies}):
        raise ConfigError(
            "system describes devices that are simulated, and here they are real; leave it out but for "
            "system.min_replies, or simulate with tailorfl run"
        )
    if config.engine.precision == "auto":
        raise ConfigError(
            "engine.precision=auto lets each machine measure what is faster there, and clients of one round would not "
            "compute alike; take float32, or bfloat16 where every client's processor has it"
        )
    if config.engine.precision == "tf32":
        raise ConfigError(
            "engine.precision=tf32 is for GPUs, and deployed clients calculate on their processors; take float32 or "
            "bfloat16"
        )
    if config.data.heldout_clients or config.data.heldout_domain:
        raise ConfigError(
            "clients that never train cannot be held out in a deployment; leave out data.heldout_clients and "
            "data.heldout_domain"
        )
    sets = dict.fromkeys((*config.eval.sets, *config.eval.final))
    left = [name for name in sets if name not in (*OWN_SETS, "participants")]
    if left:
        log.warning(
            "no single client can measure models on %s, so these sets of eval are left out", ", ".join(left)
        )
    return config.model_copy(update={"checkpoint_every": 1})


class Deployment:
    """An experiment with the clients of a roster.

    Args:
        roster: who can be reached.
        told: what is called with a sentence for the person who looks on.
    """

    def __init__(self, roster: Roster, told: Callable[[str], None] = lambda sentence: None) -> None:
        self.roster, self._told = roster, told
        self._known: dict[int, tuple[Federation, dict[str, Any], Any]] = {}

    @property
    def venue(self) -> Venue:
        """What an experiment is run with."""
        return Venue(self._federation, self._simulation, evaluate_remotely, self._done)

    def _federation(
        self, config: ExperimentConfig, seed: int, source: Any = None, said: set[str] | None = None
    ) -> Federation:
        """Waits for enough clients and returns the federation that they describe."""
        present = self._wait(config)
        question = Packet("describe", {"experiment": config.to_dict(), "seed": seed})
        answers = self.roster.ask(dict.fromkeys(sorted(present), question), config.deploy.round_seconds)
        described = {name: _described(name, answer) for name, answer in answers.items()}
        names = _in_order(described)
        shares, prepared = described[names[0]]["index"] is not None, None
        if shares:
            sizes = _sizes({name: described[name]["sizes"] for name in names})
            facts = _common([(n, described[n]["source"]) for n in names])
        else:
            sizes, facts, prepared = self._own_files(config, seed, {name: described[name] for name in names})
        if not any(sizes["test"]):
            raise DataError("no client has test samples, so nothing could be measured; see data.split")
        public, server = self._of_server(config, seed, facts, shares)
        federation = hollow_federation(hollow_source(facts), names, sizes, public=public, server=server)
        self._known[id(federation)] = federation, facts, prepared
        self.roster.close_to(names)
        self._told(f"{len(names)} clients with {sum(sizes['train']):,} training samples: {', '.join(names)}")
        return federation

    def _wait(self, config: ExperimentConfig) -> frozenset[str]:
        """Waits for the clients that there must be, and returns their names."""
        wanted = config.deploy.clients or config.data.clients
        if wanted is None:
            raise ConfigError("say how many clients there must be to begin: deploy.clients=4")
        self._told(f"waiting for {wanted} clients, for {config.deploy.wait_seconds:.0f} s at most")
        begin = time.monotonic()
        while len(present := self.roster.refresh()) < wanted:
            if time.monotonic() - begin > config.deploy.wait_seconds:
                raise RunError(
                    f"after {config.deploy.wait_seconds:.0f} s {len(present)} of {wanted} clients are there"
                    + (f": {', '.join(sorted(present))}" if present else "")
                    + "; start the others, or wait longer (deploy.wait_seconds)"
                )
            time.sleep(LOOK)
        if len(present) > wanted:
            raise ConfigError(
                f"{len(present)} clients are there, but the experiment is for {wanted}: {', '.join(sorted(present))}; "
                f"set deploy.clients={len(present)}"
            )
        return present

    def _own_files(
        self, config: ExperimentConfig, seed: int, described: Mapping[str, Mapping[str, Any]]
    ) -> tuple[dict[str, list[int]], dict[str, Any], dict[str, Any]]:
        """(sizes, what a model has to know, by what samples are prepared) of clients with files of their own."""
        form = form_of(config.data)
        names, rows = list(described), [int(found["sizes"]["all"]) for found in described.values()]
        facts = {"experiment": config.to_dict(), "seed": seed, "names": names, "rows": rows}
        question = Packet("summarise", {**facts, "given": CONSTANTS in config.data.options})
        answers = self.roster.ask(dict.fromkeys(names, question), config.deploy.round_seconds)
        told = {name: _told_of(name, answer, form.told) for name, answer in answers.items()}
        features = [str(name) for name in described[names[0]]["source"]["features"]]
        prepared, source = form.common(config.data, features, rows, [summary for _, summary in told.values()])
        return _sizes({name: sizes for name, (sizes, _) in told.items()}), source, prepared

    def _of_server(
        self, config: ExperimentConfig, seed: int, facts: Mapping[str, Any], shares: bool
    ) -> tuple[Source | None, Source | None]:
        """The public set, and labelled samples of the server's own."""
        if shares:  # the experiment's own data, which every process can read
            whole = make_federation(config, seed, None, set())
            own = subset(whole.source, whole.server, whole.source.name) if len(whole.server) else None
            return whole.public, own
        if config.data.public is None:
            return None, None
        return public_set(config.data.public, config.data.public_samples, hollow_source(facts), seed), None

    def _simulation(self, job: Job, federation: Federation, folder: Path | None = None) -> Simulation:
        """Returns a job's run before its first round, with the clients that agree to it."""
        _, facts, prepared = self._known[id(federation)]
        sizes: dict[str, tuple[int, ...]] = {p: tuple(federation.sizes(p).tolist()) for p in PARTS}
        agreement = Agreement(
            job.config.to_dict(), job.method.label, job.seed, federation.names, sizes, facts, prepared
        )
        sim = make_simulation(job, federation, folder, Remote)
        sim.attach(Line(self.roster, agreement, job.config.deploy))
        self.roster.refresh()
        answers = sim.set_up(range(len(federation.names)), job.config.deploy.round_seconds)
        refused = {i: a for i, a in answers.items() if a.fate == "refused"}
        if refused:
            i, answer = next(iter(refused.items()))
            raise RunError(
                f"client '{federation.names[i]}' does not take part in {job.name}: {answer.reason}"
            )
        absent = [federation.names[i] for i, a in answers.items() if a.packet is None]
        if absent:
            log.warning("%s begins without %s", job.name, missing(absent, ()))
        return sim

    def _done(self, sim: Simulation) -> None:
        """Sends the last message of a job: clients write the models that they deploy."""
        assert isinstance(sim, Remote)
        packets = sim.questions_about_models("finish", range(sim.federation.num_clients))
        answers = sim.asked(packets, sim.line.settings.round_seconds)
        for client, answer in answers.items():
            if answer.packet is None:
                log.warning(
                    "'%s' has not got its last message: %s", sim.federation.names[client], answer.reason
                )
        handed = sum(
            a.packet is not None and a.packet.facts.get("exported") is True for a in answers.values()
        )
        self._told(f"{handed} of {len(answers)} clients have written their models to their own disks")

    def goodbye(self) -> None:
        """Tells all clients that there is nothing more."""
        present = self.roster.refresh()
        self.roster.ask(dict.fromkeys(present, goodbye()), GOODBYE_SECONDS)


def _described(name: str, answer: Answer) -> Mapping[str, Any]:
    """What a client said of its data. Raises RunError where it did not, or it cannot be used."""
    if answer.packet is None:
        raise RunError(f"client '{name}' does not describe its data: {answer.reason}")
    packet = answer.packet
    try:
        sizes, _ = packet.fact("sizes", dict), packet.fact("source", dict)
        if packet.facts.get("index") is not None:
            packet.fact("index", int)
            _check_sizes(sizes, PARTS)
        else:
            _check_sizes(sizes, ("all",))
            packet.fact("source", dict)["features"]
    except (MessageError, KeyError) as error:
        raise RunError(f"what client '{name}' says of its data cannot be used: {error}") from error
    return packet.facts


def _told_of(name: str, answer: Answer, kind: type[Record]) -> tuple[dict[str, int], Record]:
    """(sizes, what it tells) of a client with a file of its own. Raises RunError where it has not told them."""
    if answer.packet is None:
        raise RunError(f"client '{name}' does not summarise its data: {answer.reason}")
    try:
        sizes = answer.packet.fact("sizes", dict)
        _check_sizes(sizes, PARTS)
        return sizes, kind.from_dict(answer.packet.fact("summary", dict), "its summary")
    except (MessageError, DataError) as error:
        raise RunError(f"what client '{name}' tells of its data cannot be used: {error}") from error


def _check_sizes(sizes: Mapping[str, Any], parts: Sequence[str]) -> None:
    if any(not isinstance(sizes.get(part), int) or sizes[part] < 0 for part in parts):
        raise MessageError(f"its sizes are {str(sizes)[:80]}")


def _sizes(told: Mapping[str, Mapping[str, int]]) -> dict[str, list[int]]:
    """Returns the sizes of all clients by part."""
    return {part: [int(sizes[part]) for sizes in told.values()] for part in PARTS}


def _in_order(described: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the clients in the order of their numbers: those that data give them, or that of their names."""
    numbered = {name: found["index"] for name, found in described.items() if found["index"] is not None}
    if not numbered:
        return sorted(described)
    if len(numbered) < len(described):
        raise ConfigError(
            "some clients have files of their own (--data) and others have not; give all of them one"
        )
    totals = {found["total"] for found in described.values()}
    if sorted(numbered.values()) != list(range(len(described))) or totals != {len(described)}:
        raise ConfigError(
            f"the experiment's data have {min(totals)} clients, but {len(described)} are here: "
            f"{', '.join(sorted(described))}; start one for each, or set data.clients={len(described)}"
        )
    return sorted(numbered, key=lambda name: numbered[name])


def _common(facts: list[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Returns what all clients say of their data alike. Raises DataError where they differ; says who and in what."""
    (first, found), *others = facts
    for name, other in others:
        differing = [key for key in found if key != "name" and found[key] != other.get(key)]
        if differing:
            key = differing[0]
            raise DataError(
                f"the data of '{first}' and '{name}' differ in {key}: {str(found[key])[:120]} and "
                f"{str(other.get(key))[:120]}; one model must fit both"
            )
    return dict(found)
