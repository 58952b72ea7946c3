"""Exact unlearning: a finished experiment replayed without one client, and the certificate of the replay.

The result is bit-identical to that of a run which never had the client, under the same trace. All others keep their
samples, numbers and random streams, and so their batches, dropout masks and noise; the client's place is empty, and it
is missing wherever it would have been sampled (`data.excluded_clients`). No old state is used: every job starts at
round 0. Checkpoints from before the client's first contribution are not kept, and statistics of all clients (N, the
mean number of samples, constants that scale data) include the client from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tailorfl.core.method import Method, make_method
from tailorfl.core.reduction import hold
from tailorfl.data.federation import Federation
from tailorfl.data.scaling import PRIVATE_SCALING, PrivateScaling
from tailorfl.engines.choice import keep_choice
from tailorfl.errors import ConfigError, RunError
from tailorfl.printable import quoted
from tailorfl.rounds.participation import ClientOutcome, RoundTrace, Trace
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs import checkpoints
from tailorfl.runs.build import make_federation, make_simulation, was_deployed, with_all_options
from tailorfl.runs.files import digest_of, encode, encode_lines, reporting, sha256, write_text
from tailorfl.runs.fingerprint import digests, environment, forced, other_data, other_settings, refuse
from tailorfl.runs.folders import CERTIFICATE, TUNING, check_source, experiment_in, with_traces_in
from tailorfl.runs.job import Job, Observer, trouble
from tailorfl.runs.job_loop import SIMULATED, Backend
from tailorfl.runs.store import TRACE, RunStore
from tailorfl.settings.experiment import ExperimentConfig

NAME = CERTIFICATE
REPLAYED = "replayed"
"""The folder of the traces without the client, if the cohorts of a run do not follow from its settings alone."""
NOBODY = -1
"""Number of the client in a job of a deployment that it had left before."""
STATEMENT = (
    "Every tensor of the states, and every number of the tables, is bit-identical to that of a run which never had the "
    "client under the same trace: its place is empty, and all other clients keep their samples, numbers, cohorts, "
    "batches and random streams. This holds on a CPU with the versions and the engine that are named here."
)
TRAINED_ANEW = (
    "The remaining clients trained anew from round 0, each on its own machine; every state, model and number is of a "
    "run that never had the client. If is_same_trace is true, the same clients took part in every round as before, and "
    "the results are bit-identical to those under the former trace without the client."
)
"""Statement in the certificate of a deployment."""


@dataclass(frozen=True)
class Replay:
    """One job that is repeated without the client.

    Attributes:
        job: the job with the client.
        trace: the trace of its rounds; None if data are pooled, or who took part is secret.
        client: number of the client to forget, or `NOBODY`.
        members: numbers of the remaining clients.
        engine: the engine of its rounds.
        seconds: the time that it took.
    """

    job: Job
    trace: tuple[RoundTrace, ...] | None
    client: int
    members: tuple[int, ...]
    rounds: int
    engine: str
    seconds: float

    @property
    def asked(self) -> list[int]:
        """The rounds in which the client was asked to train; all of them without a trace."""
        if self.trace is None:
            return list(range(1, self.rounds + 1))
        return [round_trace.round for round_trace in self.trace if self.client in round_trace.asked]

    @property
    def remaining(self) -> tuple[RoundTrace, ...] | None:
        """The trace without the client."""
        return None if self.trace is None else tuple(_without(t, self.client) for t in self.trace)


@dataclass(frozen=True)
class Unlearning:
    """The replay of an experiment without a client.

    Attributes:
        folder: the results with the client.
        config: the experiment with the client.
        name: the client's name; `number` is its number.
        replays: one for each job.
        federation: the one with the client, for the first seed.
        is_traced: whether traces are written and replayed; else the cohorts follow from the settings.
        is_deployed: whether the samples are with the clients, which train again.
    """

    folder: Path
    config: ExperimentConfig
    name: str
    number: int
    replays: tuple[Replay, ...]
    federation: Federation
    is_traced: bool
    is_deployed: bool = False

    @property
    def rounds(self) -> int:
        """Number of rounds to replay, over all jobs."""
        return sum(replay.rounds for replay in self.replays)

    def without(self, out: Path) -> ExperimentConfig:
        """Return the experiment without the client, for the result folder `out`."""
        excluded = (*self.config.data.excluded_clients, self.name)
        data = self.config.data.model_copy(update={"excluded_clients": excluded})
        system = self.config.system
        if self.is_traced:
            system = system.model_copy(update={"trace": str(out.resolve() / REPLAYED)})
        return self.config.model_copy(update={"data": data, "system": system})

    def write_traces(self, out: Path) -> None:
        """Write the trace of every job without the client to the folder that `without` sets."""
        for replay in self.replays if self.is_traced else ():
            if replay.remaining is None:
                continue
            folder = out / REPLAYED / replay.job.folder
            with reporting(folder, "create the folder"):
                folder.mkdir(parents=True, exist_ok=True)
            lines = encode_lines([round_trace.line() for round_trace in replay.remaining])
            write_text(folder / TRACE, "".join(f"{line}\n" for line in lines))

    @property
    def backend(self) -> Backend:
        """The simulation in which each job keeps the engine that it had."""
        engines = {replay.job.folder: replay.engine for replay in self.replays}

        def simulation(job: Job, federation: Federation, folder: Path | None) -> Simulation:
            sim = make_simulation(job, federation, folder)
            keep_choice(sim.engine, engines[job.folder])
            return sim

        return replace(SIMULATED, simulation=simulation)


def plan(
    folder: Path,
    client: str,
    source: Any = None,
    remote: Callable[[ExperimentConfig, int], Federation] | None = None,
) -> Unlearning:
    """Return the plan for forgetting a client of an experiment; nothing is trained.

    Args:
        folder: finished results.
        client: the client's name, or its number if no client has that name.
        source: the data of a run on your own data.
        remote: for a deployment, a function that returns the server's federation for an experiment and a seed.

    Raises:
        ConfigError: there is no such client, it never trained, or an exact replay is not possible; says why.
        RunError: jobs are not finished or damaged, or settings, data or versions are not those of the run.
    """
    config = experiment_in(folder)
    if config.variants:
        raise ConfigError(
            f"'{folder}' has {len(config.variants)} variants, each with its own result folder; give one of these "
            "folders"
        )
    config = with_all_options(config)
    jobs = [Job(config, method, seed) for seed in config.seeds for method in config.methods]
    _check_jobs(jobs, folder, source, remote is not None)
    here = with_traces_in(folder, config)
    federations: dict[int, Federation] = {}
    numbers: dict[int, int] = {}
    name, replays = "", []
    for job in jobs:
        seed = config.data.seed_of(job.seed)
        if seed not in federations:
            federation = make_federation(here, seed, source) if remote is None else remote(config, seed)
            federations[seed] = federation
            refuse(folder, list(other_data(jobs, folder, job, federation, digests(federation))), False)
            name = name or federation.names[federation.number(client)]
            numbers[seed] = NOBODY
            if remote is None or name in federation.names:  # else it had left before this seed began
                numbers[seed] = federation.number(name)
                if numbers[seed] >= federation.num_clients:
                    raise ConfigError(
                        f"'{name}' is held out and never trained, so there is nothing to unlearn"
                    )
                federation.without([name])
        replays.append(_replay(job, folder / job.folder, federations[seed], numbers[seed]))
    first = next(iter(federations.values()))
    if remote is not None:
        return Unlearning(folder, config, name, replays[0].client, tuple(replays), first, False, True)
    sampling = {_method(job).sampled(config.sampling) for job in jobs}
    is_traced = "proportional" in sampling or any((folder / job.folder / TRACE).is_file() for job in jobs)
    if is_traced and config.budget != "rounds":
        raise ConfigError(
            f"a trace has a fixed number of rounds, but with budget={config.budget} the number depends on the work of "
            "the remaining clients; train again from the start with data.excluded_clients"
        )
    return Unlearning(folder, config, name, replays[0].client, tuple(replays), first, is_traced)


def _method(job: Job) -> Method:
    return make_method(job.method.name, job.method.options)


def _check_jobs(jobs: Sequence[Job], folder: Path, source: Any, is_deployed: bool) -> None:
    """Raise ConfigError or RunError unless all jobs of a folder are finished and can be replayed to the bit."""
    problems = [f"{job.name} {why}" for job in jobs if (why := trouble(folder / job.folder))]
    if problems:
        command = (
            "the same tailorfl server command" if is_deployed else f"tailorfl run --resume {quoted(folder)}"
        )
        raise RunError(
            f"only a finished experiment can be unlearned, but {problems[0]}; finish it with {command}"
        )
    if forced(folder):
        raise RunError(
            f"'{folder}' was resumed by force with other settings, data or versions, so no replay gives its numbers; "
            "train again from the start with data.excluded_clients"
        )
    check_source(folder, source)
    refuse(folder, list(other_settings(jobs, folder)), False)
    for job in jobs:
        models = job.config.model_of(job.method).architectures
        if len(models) > 1:
            raise ConfigError(
                f"{job.method.label} assigns {len(models)} architectures by the sizes of all clients, so without this "
                "client others would get another architecture; train again from the start with data.excluded_clients"
            )
        if not is_deployed and was_deployed(job, folder):
            raise ConfigError(
                f"'{folder}' is of a deployment, but federation.json, which lists its clients, is missing; restore it "
                "from a copy"
            )


def _replay(job: Job, folder: Path, federation: Federation, client: int) -> Replay:
    store, method = RunStore.open(folder, readonly=True), _method(job)
    rounds, summary = store.rounds(), store.summary or {}
    return Replay(
        job,
        _recorded(store, method, federation.members),
        client,
        tuple(i for i in federation.members if i != client),
        len(rounds),
        str(rounds["engine"].iloc[-1]),
        float(summary["seconds"]),
    )


def _recorded(store: RunStore, method: Method, members: tuple[int, ...]) -> tuple[RoundTrace, ...] | None:
    """Return the trace of a job: the recorded one, or that of a plain simulation, in which all asked clients answer."""
    if (store.path / TRACE).is_file():
        return tuple(Trace.read(store.path / TRACE))
    rounds = store.rounds()
    if method.pooled or "clients" not in rounds:
        return None
    asks_all = method.participation == "all"
    cohorts = [tuple(map(int, clients)) for clients in rounds["clients"]]
    return tuple(
        RoundTrace(number, cohort, tuple(map(ClientOutcome, members if asks_all else cohort)))
        for number, cohort in enumerate(cohorts, start=1)
    )


def _without(trace: RoundTrace, client: int) -> RoundTrace:
    answers = tuple(answer for answer in trace.answers if answer.client != client)
    return replace(trace, sampled=tuple(i for i in trace.sampled if i != client), answers=answers)


def trace_digest(trace: Sequence[RoundTrace] | None) -> str | None:
    """Return a digest of the sampled and the asked clients in each round, or None without a trace."""
    if trace is None:
        return None
    return digest_of([[t.round, list(t.sampled), list(t.asked)] for t in trace])


class CertificateWriter(Observer):
    """Writes the certificate into a result folder once every job in it is done."""

    def __init__(self, unlearning: Unlearning) -> None:
        self._unlearning = unlearning

    def experiment_done(self, folder: Path) -> None:
        """Compare the cohorts of the replay with those of the trace, and write the certificate."""
        write_text(folder / NAME, encode(certificate(self._unlearning, folder), indent=1))


def certificate(unlearning: Unlearning, out: Path) -> dict[str, Any]:
    """Return the facts of the replay, with and without the client, as JSON can hold them.

    Raises:
        RunError: the cohorts in `out` are not those of the trace without the client.
    """
    return {
        "statement": TRAINED_ANEW if unlearning.is_deployed else STATEMENT,
        "client": {"name": unlearning.name, "number": unlearning.number},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(),
        "results": {"with": str(unlearning.folder), "without": str(out)},
        "settings": {
            "with": digest_of(unlearning.config.to_dict()),
            "without": digest_of(with_all_options(experiment_in(out)).to_dict()),
        },
        "jobs": [_job_facts(replay, unlearning, out) for replay in unlearning.replays],
        "recomputed": list(_recomputed(unlearning)),
        "not_recomputed": list(_not_recomputed(unlearning)),
    }


def _job_facts(replay: Replay, unlearning: Unlearning, out: Path) -> dict[str, Any]:
    """Return digests of one job's data, trace and last state, with and without the client."""
    folders = {"with": unlearning.folder / replay.job.folder, "without": out / replay.job.folder}
    stores = {key: RunStore.open(folder, readonly=True) for key, folder in folders.items()}
    played, former = _recorded(stores["without"], _method(replay.job), replay.members), replay.remaining
    # The number of rounds may follow from the work of the remaining clients; then only common rounds are compared.
    common = min(len(played or ()), len(former or ())) if replay.job.has_budget else None
    is_same_trace = trace_digest(played and played[:common]) == trace_digest(former and former[:common])
    if not (is_same_trace or unlearning.is_deployed):
        raise RunError(
            f"{replay.job.name} was replayed with other cohorts than those of its trace without the client, so '{out}' "
            "does not unlearn the client; please report this"
        )
    return {
        "job": str(replay.job.folder),
        "rounds": len(stores["without"].rounds()),
        "rounds_with_client": replay.asked,
        "engine": replay.engine,
        "data": {key: store.config["data"] for key, store in stores.items()},
        "trace": {"with": trace_digest(replay.trace), "without": trace_digest(played)},
        "is_same_trace": is_same_trace,
        "state": {key: _last_state(store.path) for key, store in stores.items()},
    }


def _last_state(folder: Path) -> dict[str, str] | None:
    """Return the file and the sha256 of the state after the last round, or None if it was deleted."""
    stored = checkpoints.rounds(folder)
    if not stored:
        return None
    file = folder / f"checkpoint-{stored[-1]:06d}.safetensors"
    return {"file": file.name, "sha256": sha256(file)}


def _recomputed(unlearning: Unlearning) -> Iterator[str]:
    """Yield results that depended on the client and no longer do."""
    config, source = unlearning.config, unlearning.federation.source
    yield "states of the server and of every client, personal models, evaluations and tables, from round 0 on"
    yield "everything that counts clients or samples: shares of clients in averages, N, the mean number of samples"
    scaling: PrivateScaling | None = source.info.get(PRIVATE_SCALING)
    if scaling is not None and scaling.shared:
        yield f"the constants that prepare the data ({scaling.by}), fitted without the client"
    trains = [config.train_of(method) for method in config.methods]
    if any(train["class_weights"] == "federated" for train in trains):
        yield "class counts and weights (train.class_weights=federated)"
    if any(train["dp"] is not None for train in trains):
        yield "the ledger of privacy and every epsilon; if an epsilon is the target, also the noise for it"
    if config.eval.select == "val":
        yield "the round that each client chooses by validation (eval.select=val)"
    if config.eval.calibrate != "none":
        yield f"temperatures (eval.calibrate={config.eval.calibrate})"
    if config.budget != "rounds":
        yield f"the number of rounds (budget={config.budget})"


def _not_recomputed(unlearning: Unlearning) -> Iterator[str]:
    """Yield results that still depend on the client, or may, and were not changed."""
    config, federation = unlearning.config, unlearning.federation
    if not unlearning.is_deployed:
        yield "the trace: who was sampled and who answered in each round, except for the client itself"
    if (unlearning.folder / TUNING).is_file():
        yield f"settings that were tuned with the client's data ({TUNING}); tune again without it if they must go"
    if federation.public is not None and config.data.public == config.data.name:
        yield "the public set, drawn from all samples before they were dealt to clients"
    if len(federation.server):
        yield "the server's validation samples, set aside before samples were dealt to clients"
    if "classes" in federation.source.info:
        yield "the names of the classes, read from all samples"
    if config.data.options.get("constants") is not None:
        yield f"the constants that prepare the data, given as a file ({config.data.options['constants']})"
    for method in config.methods:
        for weights in {model.weights for model in config.model_of(method).architectures.values()} - {None}:
            yield f"{method.label}: the initial weights, given as a file ({weights})"
        instance = make_method(method.name, method.options)
        if instance.fixed_clients and hold(instance.fixed_when, instance):
            yield (
                f"{method.label}: {instance.fixed_clients}; the client keeps its place among them, as before the first "
                "round"
            )
    if unlearning.is_deployed:
        yield "the models and private states at the clients, in STATE/NAME of the former experiment: delete them there"
    yield f"'{unlearning.folder}' itself, its exports and its trackers: delete them, they hold the client's share"
