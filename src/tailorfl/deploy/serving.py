"""A server's experiment: the backend with remote clients, from waiting for them to their last message."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tailorfl.data.build import public_set
from tailorfl.data.federation import PARTS, Federation, client_number
from tailorfl.data.remote_federation import remote_federation, remote_source
from tailorfl.data.source import Source, subset
from tailorfl.data.summaries import JsonRecord
from tailorfl.data.table_files import name_lacking, shared_columns
from tailorfl.deploy.checks import (
    check_finite,
    check_share,
    check_sizes,
    features_of,
    largest_group,
    read_description,
    unfit,
    usable,
)
from tailorfl.deploy.connected_clients import ConnectedClients, goodbye, named
from tailorfl.deploy.experiment import for_deployment
from tailorfl.deploy.membership import DescribedClients, Membership, Sizes, agreement_of, why_nobody_joins
from tailorfl.deploy.messages import LEFT, Packet, Transport
from tailorfl.deploy.own_files import kind_of
from tailorfl.deploy.remote_evaluation import evaluate_remotely
from tailorfl.deploy.remote_rounds import LOOK, OTHER_SETTINGS, RemoteRounds
from tailorfl.errors import ConfigError, DataError, MessageError, RunError
from tailorfl.printable import visible
from tailorfl.report.experiment import run_experiment
from tailorfl.report.result import ExperimentResult
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import check, make_federation, make_simulation, with_all_options
from tailorfl.runs.extension import resumed
from tailorfl.runs.fingerprint import note_data
from tailorfl.runs.folders import experiment_in
from tailorfl.runs.job import Job, Observer
from tailorfl.runs.job_loop import Backend
from tailorfl.runs.store import RunStore
from tailorfl.settings.experiment import ExperimentConfig

log = logging.getLogger(__name__)

RETURN_SECONDS = 30.0
"""Seconds for which a restarted server waits for the clients of its federation to come back."""
GOODBYE_SECONDS = 5.0
"""Time limit of the last message to all clients."""


class DeployedExperiment:
    """An experiment with the clients that are connected.

    Args:
        connected: the clients that can be reached.
        out: the result folder.
        config: the experiment.
        begun: whether the folder has a part of it, which is continued.
    """

    def __init__(
        self, connected: ConnectedClients, out: Path, config: ExperimentConfig, begun: bool = False
    ) -> None:
        self.connected, self.out, self.notify = connected, out, connected.notify
        self.config = with_all_options(config)
        self.membership = Membership.of(out, self.config, begun)
        self.membership.gone |= set(self.config.data.excluded_clients)
        self._without_model: dict[str, str] = {}

    @property
    def backend(self) -> Backend:
        """The functions that run an experiment with these clients."""
        return Backend(self._federation, self._simulation, evaluate_remotely, self._done, is_remote=True)

    @property
    def jobs(self) -> list[Job]:
        """The jobs of the experiment."""
        return [
            Job(self.config, method, seed) for seed in self.config.seeds for method in self.config.methods
        ]

    # -- before the first round -----------------------------------------------------------------------------

    def _federation(
        self, config: ExperimentConfig, seed: int, source: Any = None, warned: set[str] | None = None
    ) -> Federation:
        """Return the federation that has begun, or a new one once enough clients have described their data."""
        clients = self.membership.clients.get(str(seed))
        if clients is None:
            clients = self._described(config, seed)
            self.membership.clients[str(seed)] = clients
            self.membership.save()
        else:
            self._wait_for_return(clients.names)
        members = [name for name in clients.names if name not in self.membership.gone]
        self.connected.close_to(members, self.membership.allowed)
        samples = sum(clients.sizes["train"])
        self.notify(f"{len(members)} clients with {samples:,} training samples: {', '.join(members)}")
        federation = self._remote_federation(config, seed, clients)
        if len(clients.groups) > 1:  # a crash may have come after the list of clients was written
            job = next(job for job in self.jobs if config.data.seed_of(job.seed) == seed)
            note_data(self.jobs, self.out, job, federation)
        return federation

    def _remote_federation(
        self, config: ExperimentConfig, seed: int, clients: DescribedClients
    ) -> Federation:
        """Return the federation of these clients as the server sees it."""
        source = remote_source(clients.source)
        public: Source | None = None
        server: Source | None = None
        if clients.shared:  # the experiment's own data, which every process can read
            central = make_federation(config, seed, None, set())
            public = central.public
            server = (
                subset(central.source, central.server, central.source.name) if len(central.server) else None
            )
        elif config.data.public is not None:
            public = public_set(config.data.public, config.data.public_samples, source, seed)
        return remote_federation(source, clients.names, clients.sizes, public=public, server=server)

    def _expected(self, config: ExperimentConfig) -> int:
        """Return the number of clients needed to begin: that of other seeds, or the experiment's setting."""
        for clients in reversed(self.membership.clients.values()):
            return len(set(clients.names) - self.membership.left)
        if places := config.deploy.clients or config.data.clients:
            return places - len(config.data.excluded_clients)
        raise ConfigError(
            "the number of clients is not set; set how many must connect before training starts, such as "
            "deploy.clients=4"
        )

    def _described(self, config: ExperimentConfig, seed: int) -> DescribedClients:
        """Wait for enough clients with data that fit together; turn away, by name, those whose data do not."""
        seconds = config.deploy.wait_seconds
        self.notify(f"waiting for {self._expected(config)} clients, at most {seconds:.0f} s")
        question = Packet("describe", {"experiment": config.to_dict(), "seed": seed})
        described, turned_away = dict[str, Mapping[str, Any]](), dict[str, str]()
        begin = time.monotonic()
        while True:
            expected, left, present = self._expected(config), self.membership.left, self.connected.refresh()
            for name in sorted(present & left):
                self.connected.leave_out(name, "it has left for good, or is left out (data.excluded_clients)")
            present -= left | self.membership.late
            if len(present) > expected:
                raise ConfigError(
                    f"{len(present)} clients are connected, but the experiment is for {expected}: "
                    f"{', '.join(sorted(present))}; set deploy.clients={len(present)}"
                )
            described = {name: facts for name, facts in described.items() if name in present}
            if len(present) == expected:
                new = dict.fromkeys(sorted(present - described.keys()), question)
                answers, refused = self.connected.ask(new, config.deploy.round_seconds), dict[str, str]()
                leavers = [name for name, answer in answers.items() if answer.code == LEFT]
                self.membership.leave(leavers, self.notify)
                described |= usable(
                    answers, lambda _, packet: read_description(packet, config.deploy.max_samples), refused
                )
                if described and len(described) + len(refused) == expected:
                    refused |= unfit(config, seed, described)
                    if not refused:
                        return self._clients(config, seed, described)
                for name, reason in refused.items():
                    self.connected.leave_out(name, reason)
                    described.pop(name, None)
                turned_away |= refused
                if refused and not described:
                    raise RunError(f"no client can take part: {_listed(refused)}")
            if time.monotonic() - begin > seconds:
                raise RunError(
                    f"after {seconds:.0f} s {len(described) or len(present)} of {expected} clients are connected"
                    + (f": {', '.join(sorted(present))}" if present else "")
                    + (f"; turned away: {_listed(turned_away)}" if turned_away else "")
                    + "; start the others, or wait longer (deploy.wait_seconds)"
                )
            time.sleep(LOOK)

    def _clients(
        self, config: ExperimentConfig, seed: int, described: Mapping[str, Mapping[str, Any]]
    ) -> DescribedClients:
        """Return the clients of a new federation, in the order of their numbers."""
        first = next(iter(described.values()))
        if first["index"] is None:
            clients = self._own_files(config, seed, {name: described[name] for name in sorted(described)})
        else:
            numbers = {name: int(facts["index"]) for name, facts in described.items()}
            if config.data.excluded_clients:
                everyone = make_federation(config, seed, None, set()).names
                excluded = {name: client_number(everyone, name) for name in config.data.excluded_clients}
                if set(numbers.values()) & set(excluded.values()):
                    raise ConfigError(
                        "a connected client is excluded under another name (data.excluded_clients)"
                    )
                numbers |= excluded
            names = sorted(numbers, key=lambda name: (numbers[name], name))
            if first["total"] != len(names) and (reason := why_nobody_joins(config)):
                raise ConfigError(
                    f"the experiment's data have {first['total']} clients, but {len(names)} are connected: "
                    f"{', '.join(names)}; start one for each, or set data.clients={len(names)}, since {reason}"
                )
            sizes: Sizes = {
                part: [int(described[name]["sizes"][part]) if name in described else 0 for name in names]
                for part in PARTS
            }
            clients = DescribedClients(names, sizes, dict(first["source"]), None, shared=True)
        if not any(clients.sizes["test"]):
            raise DataError(
                "no client has test samples, so nothing can be evaluated; give the test part a share in data.split"
            )
        return clients

    def _wait_for_return(self, names: Sequence[str]) -> None:
        """Wait up to `RETURN_SECONDS` for the clients of a federation that has begun."""
        members = set(names) - self.membership.left
        seconds = min(RETURN_SECONDS, self.config.deploy.wait_seconds)
        begin = time.monotonic()
        while (absent := members - self.connected.refresh()) and time.monotonic() - begin < seconds:
            if time.monotonic() - begin < LOOK:
                self.notify(f"waiting for {named(absent)} to come back, at most {seconds:.0f} s")
            time.sleep(LOOK)

    def _own_files(
        self, config: ExperimentConfig, seed: int, described: Mapping[str, Mapping[str, Any]]
    ) -> DescribedClients:
        """Return clients with files of their own; those without a usable summary are excluded for good."""
        kind, limits = kind_of(config.data), config.deploy
        if unknown_rows := set(config.data.excluded_clients) - limits.excluded_rows.keys():
            raise ConfigError(
                f"deploy.excluded_rows does not have the number of rows of {named(unknown_rows)}; use the experiment "
                "that tailorfl unlearn wrote"
            )
        rows = {name: int(facts["sizes"]["all"]) for name, facts in described.items()}
        rows |= {name: limits.excluded_rows[name] for name in config.data.excluded_clients}
        names = sorted(rows)
        rows = {name: rows[name] for name in names}
        facts = {"experiment": config.to_dict(), "seed": seed, "names": names, "rows": list(rows.values())}
        question = Packet("summarise", facts)
        summaries, refused = dict[str, tuple[dict[str, int], JsonRecord]](), dict[str, str]()

        def read(name: str, packet: Packet) -> tuple[dict[str, int], JsonRecord]:
            sizes = packet.fact("sizes", dict)
            check_sizes(sizes, PARTS, rows[name])
            summary = kind.summary_type.from_dict(packet.fact("summary", dict), "its summary")
            if getattr(summary, "rows", 0) > sizes["train"]:
                raise DataError(f"its summary is of more than its {sizes['train']} training rows")
            return sizes, summary

        begin = time.monotonic()
        while missing := [name for name in described if name not in (*summaries, *refused)]:
            if time.monotonic() - begin > limits.wait_seconds:
                refused |= dict.fromkeys(missing, "it does not answer")
                break
            self.connected.refresh()
            answers = self.connected.ask(dict.fromkeys(missing, question), limits.round_seconds)
            summaries |= usable(answers, read, refused)
            if len(summaries) + len(refused) < len(described):
                time.sleep(LOOK)

        def common(group: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
            features = shared_columns(features_of(described, group))
            try:
                prepared, source = kind.common(
                    config.data, features, list(rows.values()), [summaries[name][1] for name in group]
                )
            except (ArithmeticError, ValueError, LookupError, TypeError, RuntimeError) as error:
                raise DataError(f"no constants can be computed from their summaries: {error}") from error
            check_finite(prepared)
            return prepared, source

        fitting, reasons = largest_group(list(summaries), common)
        refused |= reasons
        if len(fitting) <= len(described) // 2:
            raise RunError(f"too few clients can take part: {_listed(refused)}")
        for name, reason in refused.items():
            log.warning("'%s' is left out: %s", name, reason)
            self.connected.leave_out(name, reason)
            self.membership.gone.add(name)
        name_lacking(features_of(described, fitting))
        prepared, source = common(fitting)
        sizes: Sizes = {part: [summaries[n][0][part] if n in fitting else 0 for n in names] for part in PARTS}
        return DescribedClients(names, sizes, source, prepared, shared=False)

    def _simulation(self, job: Job, federation: Federation, folder: Path | None = None) -> RemoteRounds:
        """Return a job's run before its first round, with the clients that agree to it."""
        sim = self._remote(job, federation, folder)
        self.connected.refresh()
        answers, names = sim.set_up(sim.members), sim.federation.names
        refused = {names[i]: answers[i].reason for i in sim.members if answers[i].fate == "refused"}
        if len(sim.members) - len(refused) < sim.needed(sim.members):
            raise RunError(f"too few clients take part in {job.name}: {_listed(refused)}")
        if absent := [names[i] for i, a in answers.items() if a.packet is None]:
            log.warning("%s begins without %s", job.name, named(absent))
        return sim

    def _remote(self, job: Job, federation: Federation, folder: Path | None = None) -> RemoteRounds:
        seed = job.config.data.seed_of(job.seed)
        clients = self.membership.clients[str(seed)]
        if len(clients.names) > len(federation):  # a client has joined in an earlier job of this seed
            federation = self._remote_federation(job.config, seed, clients)
        sim = make_simulation(job, federation, folder, RemoteRounds)
        sim.attach(job, self.connected, clients, self.membership, functools.partial(self._admit, sim))
        return sim

    # -- joining --------------------------------------------------------------------------------------------

    def _admit(self, sim: RemoteRounds) -> None:
        """Let the connected clients join that the operator has allowed; tell those that cannot the reason."""
        new = self.membership.allowed() - set(sim.clients.names)
        for name in sorted(new & self.connected.refresh() if new else ()):
            try:
                if reason := why_nobody_joins(self.config):
                    raise ConfigError(reason)
                self._join(sim, name)
            except (MessageError, DataError, ConfigError) as error:
                reason = visible(str(error))
                log.warning("'%s' cannot join: %s", name, reason)
                self.connected.leave_out(name, reason)

    def _join(self, sim: RemoteRounds, name: str) -> None:
        """Let a client take part from the next round on, once it has agreed; one that does not answer is asked again.

        Its samples are prepared with the existing constants, which do not change.

        Raises:
            MessageError, DataError, ConfigError: the client, or the description of its data, does not fit the others.
        """
        job, clients = sim.job, sim.clients
        config, seed = job.config, job.config.data.seed_of(job.seed)
        about = {"experiment": config.to_dict(), "seed": seed}
        answer = self._answer(name, Packet("describe", about))
        if answer is None:
            return
        facts = read_description(answer, config.deploy.max_samples)
        if clients.shared != (facts["index"] is not None):
            raise DataError(
                "either this client or the others have their own files (--data); give every client a file, or none"
            )
        sizes: Mapping[str, int] = facts["sizes"]
        rows = sum(sizes.values())
        if clients.shared:
            central = make_federation(config, seed, None, set())
            check_share(
                name, facts, central, {client_number(central.names, member) for member in clients.names}
            )
        else:
            about |= {
                "names": [*clients.names, name],
                "rows": [*clients.prepared["rows"], rows],
                "joins": True,
            }
            answer = self._answer(name, Packet("summarise", about))
            if answer is None:
                return
            sizes = answer.fact("sizes", dict)
            check_sizes(sizes, PARTS, rows)
        grown = clients.with_client(name, sizes, rows)
        agreement = agreement_of(job, grown)
        answer = self._answer(name, Packet("setup", agreement.facts()))
        if answer is None:
            return
        if answer.facts.get("digest") != agreement.digest(sim):
            raise MessageError(OTHER_SETTINGS)
        federation = self._remote_federation(config, seed, grown)
        sim.take_in(federation, grown)
        self.membership.clients[str(seed)] = grown
        self.membership.save()
        note_data(self.jobs, self.out, job, federation)
        self.notify(f"'{name}' joins with round {sim.round + 1}, as client {len(grown.names)}")

    def _answer(self, name: str, question: Packet) -> Packet | None:
        """Return a client's answer, or None if there is none. Raises MessageError if it refuses."""
        answer = self.connected.ask({name: question}, self.config.deploy.round_seconds)[name]
        if answer.fate == "refused":
            raise MessageError(answer.reason)
        return answer.packet

    # -- after the last round -------------------------------------------------------------------------------

    def _done(self, sim: Simulation) -> None:
        """Send the last message of a job to all clients that have not left."""
        assert isinstance(sim, RemoteRounds)
        self._hand_over(sim, sim.members)

    def _hand_over(self, sim: RemoteRounds, clients: Sequence[int]) -> None:
        """Send the last message of a job, upon which clients write the models that they deploy."""
        job, names = sim.job, sim.federation.names
        handed = self.membership.handed.setdefault(str(job.folder), set())
        answers = sim.asked(sim.questions_about_models("finish", clients))
        for client, answer in answers.items():
            if answer.packet is not None:
                handed.add(names[client])
                continue
            log.warning("'%s' has no model of %s yet: %s", names[client], job.name, answer.reason)
            if answer.fate == "refused":
                self._without_model[names[client]] = f"it has no model of {job.name}: {answer.reason}"
        self.membership.save()
        self.notify(
            f"{len(handed)} of {len(sim.members)} clients have their models of {job.name} on their own disks"
        )

    def hand_over_the_rest(self) -> None:
        """Wait at most `deploy.wait_seconds` for clients that lack a job's last message, and send it."""
        begin, announced, seconds = time.monotonic(), False, self.config.deploy.wait_seconds
        while missing := self._missing():
            absent = sorted(set[str]().union(*(names for _, names in missing)))
            if time.monotonic() - begin > seconds:
                self.notify(
                    f"{named(absent)} did not fetch the last model within {seconds:.0f} s; the same command sends it "
                    "later"
                )
                break
            if not announced:
                self.notify(f"waiting for {named(absent)} to fetch the last model, at most {seconds:.0f} s")
                announced = True
            present = self.connected.refresh()
            for job, names in missing:
                if names & present:
                    federation = self._federation(self.config, self.config.data.seed_of(job.seed))
                    sim = self._remote(job, federation)
                    checkpoint = RunStore.open(self.out / job.folder, readonly=True).latest_checkpoint()
                    if checkpoint is None:
                        raise RunError(
                            f"'{self.out / job.folder}' has lost its checkpoint; restore it from a copy"
                        )
                    sim.load(*checkpoint[1:])
                    self._hand_over(sim, [federation.names.index(name) for name in names & present])
            time.sleep(LOOK)

    def _missing(self) -> list[tuple[Job, set[str]]]:
        """Return the finished jobs whose last message some clients lack, with the names of these."""
        missing: list[tuple[Job, set[str]]] = []
        for job in self.jobs:
            clients = self.membership.clients.get(str(self.config.data.seed_of(job.seed)))
            if clients is None or not (self.out / job.folder / "config.json").is_file():
                continue
            if RunStore.open(self.out / job.folder, readonly=True).status != "finished":
                continue
            done = self.membership.left | self.membership.handed.get(str(job.folder), set())
            if lacking := set(clients.names) - done - self._without_model.keys():
                missing.append((job, lacking))
        return missing

    def goodbye(self) -> None:
        """Tell all clients that the federation has ended, and those without a model the reason."""
        present = self.connected.refresh(GOODBYE_SECONDS)
        self.connected.ask(
            {name: goodbye(self._without_model.get(name, "")) for name in present}, GOODBYE_SECONDS
        )


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"'{name}': {reason}" for name, reason in reasons.items())[:1000]


def host_experiment(
    post: Transport,
    config: ExperimentConfig,
    out: Path,
    *,
    notify: Callable[[str], None] = lambda sentence: None,
    observer: Observer | None = None,
) -> ExperimentResult:
    """Run an experiment with the clients of a transport, and return its result.

    Args:
        post: the transport of messages.
        config: the experiment; see `for_deployment` for settings that it cannot have.
        out: result folder; the same experiment in it is continued.
        notify: called with a sentence for the operator.
        observer: receives the rounds.

    Raises:
        TailorflError: see the message; finished work stays on disk and the same call continues from there.
    """
    config = for_deployment(config)
    check(config)
    name = config.name
    config, mode = resumed(out, config)
    if mode == "resume" and experiment_in(out).name != name:
        raise ConfigError(
            f"'{out}' holds the experiment '{experiment_in(out).name}', not '{name}'; choose another folder (--out)"
        )
    connected = ConnectedClients(post, config.deploy.max_bytes, notify)
    deployment = DeployedExperiment(connected, out, config, mode != "new")
    result = run_experiment(config, out, way=mode, observer=observer, backend=deployment.backend)
    deployment.hand_over_the_rest()
    deployment.goodbye()
    return result
