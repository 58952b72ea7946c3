"""A client of a real federation: answers the server's questions, and keeps its samples and private states to itself.

A `ClientSession` receives packets one by one over any transport, and answers each with one packet. Only the contents of
the table in docs/deploy.md leave it: sizes, the facts of the data that a model needs, replies as the method defines
them, the numbers that it reports, and metrics of its models. Its policy and its operator's consent decide which
questions it answers, and each answer is in the log (`release_log`) before it leaves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDict

from tailorfl.data.federation import PARTS
from tailorfl.data.remote_federation import remote_federation, remote_source
from tailorfl.deploy.client_state import NEVER, ClientState, StateFolder
from tailorfl.deploy.local_run import AgreedJob, LocalRun, as_message, hand_over
from tailorfl.deploy.membership import Agreement
from tailorfl.deploy.messages import (
    FAILURES,
    LEFT,
    NO_METRICS,
    PROTOCOL,
    SAME_MINOR,
    VERSION,
    Packet,
    RefusalError,
    all_finite,
    compatible,
    failure,
    flat,
    uses_as_facts,
)
from tailorfl.deploy.own_data import DataShare
from tailorfl.deploy.own_files import FileOfAnyKind, own_data
from tailorfl.deploy.policy import DEFAULT_POLICY, NO_CONSENT, Consent, Policy, described
from tailorfl.deploy.release_log import MISSING, LoggedQuestion, Release, ReleaseLog
from tailorfl.engines.choice import make_engine
from tailorfl.errors import ConfigError, DataError, MessageError, PolicyError, TailorflError
from tailorfl.printable import visible
from tailorfl.privacy import Uses
from tailorfl.runs.build import make_simulation
from tailorfl.runs.schedule import protocol_of
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.names import slug

log = logging.getLogger(__name__)

OWN_SETS = ("val", "local")
"""The test sets on which a client can evaluate alone."""
UNLOGGED = ("hello", "goodbye")  # they contain only the client's name and versions
LEAVING = Release(failure("it leaves for good", LEFT))
Notify = Callable[[str], None]


class ClientSession:
    """One client.

    Args:
        data: its samples; their `name` is the client's.
        folder: where private states are kept, in one folder per job.
        notify: called with a sentence for the operator.
        policy: limits of what the server may ask.
        consent: the experiments that the operator has agreed to; required if samples come from the client's own file.
    """

    def __init__(
        self,
        data: DataShare | FileOfAnyKind,
        folder: Path,
        notify: Notify = lambda sentence: None,
        policy: Policy = DEFAULT_POLICY,
        consent: Consent = NO_CONSENT,
    ) -> None:
        self.data, self.folder, self._notify = data, folder, notify
        self.policy, self.consent = policy, consent
        self._has_file = not isinstance(data, DataShare)
        self._state = StateFolder(folder)
        self._jobs: dict[str, AgreedJob] = {}
        self._experiment_name = self._shown = ""
        self._leaving = False
        self.leaves = False
        """Whether its only answer from now on is that it leaves for good."""
        self.ended = False
        """Whether the server has ended the session."""
        self.turned_away = ""
        """Why the server has turned this client away."""

    def answer(self, data: bytes) -> bytes:
        """Return the answer to a packet; an error becomes an answer too."""
        self._experiment_name = ""
        try:
            question = Packet.decoded(data, self.policy.max_bytes)
            log.debug("asked: %s", question.kind)
            self._leaving = self.leaves and question.kind not in UNLOGGED
            release = LEAVING if self._leaving else self._answers[question.kind](self, question)
        except Exception as error:
            release = Release(self._failed(error))
        try:
            body = release.packet.encoded()
            if release.packet.kind not in UNLOGGED:
                if release.uses:  # a client that shares the folder may have used epsilon meanwhile
                    self._check_affordable(release.uses)
                self.log.append(release, len(body), self._experiment_name, self.policy.delta)
            return body
        except TailorflError as error:  # without its line nothing leaves
            self._leaving = False
            return self._failed(error).encoded()

    def _failed(self, error: Exception) -> Packet:
        if isinstance(error, RefusalError):
            return failure(str(error), error.code)
        if isinstance(error, MessageError | ConfigError):  # about the server's message
            self._notify(f"refused: {error}")
            return failure(str(error), type(error).__name__)
        # details of samples, files or a method's numbers stay here
        if not isinstance(error, TailorflError):
            log.error("the server's request has failed", exc_info=error)
        self._notify(f"failed: {type(error).__name__}: {error}")
        kind = FAILURES.get(type(error), f"it failed with {type(error).__name__}")
        return failure(f"{kind}; its log has the details", "failed")

    @property
    def log(self) -> ReleaseLog:
        """The log of what has left this client."""
        return self._state.log

    def delivered(self) -> None:
        """Note that the server has the last answer."""
        if self._leaving:
            self.ended = True
            self._notify("the server knows that this client leaves for good")

    def close(self) -> None:
        """Release all folders."""
        for agreed in self._jobs.values():
            agreed.state.release()
        self._jobs.clear()

    def without_model(self) -> str:
        """Return why this client has no model of its last job, "" if it has one."""
        jobs = self.log.jobs
        if self.leaves or (jobs and list(jobs.values())[-1]):
            return ""
        if not jobs:
            return "the server has finished, and this client took part in no job"
        return (
            f"the server has finished, but this client has no model of its last job ({list(jobs)[-1][:8]}); its "
            "private state is kept: start the client again while the server runs"
        )

    def _refuse_failure(self, question: Packet) -> Release:
        raise MessageError("the server sent a failure instead of a question")

    def _goodbye(self, question: Packet) -> Release:
        self.ended = True
        self.turned_away = visible(question.fact("turned_away", str)[:500])
        if not self.turned_away:
            self._notify("the server has nothing more to do")
        return Release(Packet("goodbye"))

    def _hello(self, question: Packet) -> Release:
        version = question.fact("version", str)
        if not compatible(version):
            raise MessageError(
                f"the server has tailorfl {version[:40]}, but client '{self.data.name}' has {VERSION}; {SAME_MINOR}"
            )
        facts = {"name": self.data.name, "protocol": PROTOCOL, "version": VERSION}
        return Release(Packet("hello", {**facts, "torch": torch.__version__}))

    # -- joining --------------------------------------------------------------------------------------------

    def _admitted(self, settings: Mapping[str, Any]) -> tuple[ExperimentConfig, str]:
        """Return the part of an experiment that this client uses, and the digest that its operator has accepted."""
        try:
            config = ExperimentConfig.model_validate(dict(settings))
        except ValueError as error:
            raise MessageError(f"the server's experiment cannot be read: {error}"[:400]) from error
        self._experiment_name = config.name[:200]
        admitted = self.policy.admitted(config, own_file=self._has_file)
        if not self._has_file:
            return admitted, ""
        try:
            return admitted, self.consent.check(config)
        except MessageError:
            if self._shown != (description := described(config)):
                self._shown = description
                self._notify(description)
            raise

    def _describe(self, question: Packet) -> Release:
        config, _ = self._admitted(question.fact("experiment", dict))
        facts = self.data.of_kind(config.data).described(config, question.fact("seed", int))
        self._notify(f"described its data: {sum(facts['sizes'].values())} samples")
        return Release(Packet("describe", facts))

    def _summarise(self, question: Packet) -> Release:
        config, digest = self._admitted(question.fact("experiment", dict))
        names, rows = question.fact("names", list), question.fact("rows", list)
        seed = question.fact("seed", int)
        self.policy.check_federation(names, rows)
        if self.data.name not in names or seed not in config.seeds:
            raise MessageError(
                f"the server asks for the summary of another client than '{self.data.name}', or for a seed that the "
                "experiment does not have"
            )
        joins = question.facts.get("joins") is True  # then only numbers of samples are sent
        same = replace(question, facts={**question.facts, "experiment": digest})  # whatever deploy says now
        logged = None if joins else LoggedQuestion("summarise", digest, seed, same.digest())
        before = None if logged is None else self._only(logged, "summary of this experiment and seed")
        try:
            samples = self.data.of_kind(config.data)
            sizes, summary = samples.summary(config, seed, names.index(self.data.name), rows, joins)
            packet = Packet("summarise", {"sizes": sizes, "summary": summary})
            content = packet.digest()
            if self.policy.needs_noise and (summary.get("columns") or summary.get("pixels")):
                raise PolicyError(
                    "sums of its rows would leave without noise; set data.options.constants in the experiment (for "
                    "images data.options.scaling=public)"
                )
            if before is not None and before[1] != content:
                raise PolicyError(
                    "its summary would differ from the one it sent before: its file has changed since"
                )
        except (DataError, PolicyError) as error:
            # a second question could probe what is refused and what is not
            return Release(self._failed(error), logged)
        what = "its numbers of samples" if joins else f"a summary of {sizes['train']} training rows"
        members = ", ".join(str(name) for name in names[:20] if name not in config.data.excluded_clients)
        self._notify(f"sent the server {what}; clients of the federation: {members}")
        return Release(packet, logged, content, again=before is not None)

    def _only(self, question: LoggedQuestion, what: str) -> tuple[str, str] | None:
        """Return the digests of the earlier (question, answer) with this number; the question must be the same."""
        before = self.log.answered(question)
        if before is not None and before[0] != question.digest:
            raise MessageError(
                f"this client has already sent its {what} in answer to a different question, and sends it only once; "
                "give the experiment another name"
            )
        return before

    def _setup(self, question: Packet) -> Release:
        self.policy.check_federation(question.fact("names", list), *question.fact("sizes", dict).values())
        agreed = self._agree(Agreement.read(question.facts))
        rounds = agreed.state.rounds
        self._notify(
            f"agreed on {agreed.job.name}: client {agreed.number + 1} of {len(agreed.run.federation)}"
            + (f", continues from round {rounds[-1]}" if rounds else "")
        )
        return Release(Packet("setup", {"digest": agreed.digest}))

    def _agree(self, agreement: Agreement) -> AgreedJob:
        """Prepare a job, and store the agreement so that this client can continue after its own restart."""
        config, _ = self._admitted(agreement.experiment)
        job, name = replace(agreement.job, config=config), self.data.name
        if name not in agreement.names:
            raise MessageError(f"the federation has no client '{name}'")
        self.policy.check_model(config, job.method.label, agreement.source)
        number = agreement.names.index(name)
        if self._has_file:
            self.policy.check_federation(agreement.names, dict(agreement.prepared or {}).get("rows"))
        data, common = self.data.of_kind(config.data), remote_source(agreement.source)
        samples = data.samples(config, job.seed, number, agreement.prepared)
        for part in PARTS:
            if samples.sizes[part] != agreement.sizes[part][number]:
                raise MessageError(
                    f"client '{name}' has {samples.sizes[part]} {part} samples, but had "
                    f"{agreement.sizes[part][number]} when it described its data: its data have changed since"
                )
        own = samples.source
        if (own.input_shape, own.outputs) != (common.input_shape, common.outputs):
            raise MessageError(  # the policy's limits were checked for the description alone
                f"the server describes samples of shape {list(common.input_shape)} with {common.outputs} outputs, but "
                f"its constants make samples of shape {list(own.input_shape)} with {own.outputs} outputs"
            )
        public = data.public(config, job.seed, common)
        federation = remote_federation(
            common, agreement.names, agreement.sizes, own=(number, samples), public=public
        )
        run = make_simulation(job, federation, None, LocalRun)
        run.engine = make_engine("sequential", precision=config.engine.precision)
        digest = agreement.digest(run)
        if run.train.dp is not None and self.policy.secret_noise and self._has_file:
            run.population.seed = self._state.seed(digest)
        if digest not in self._jobs:
            self._state.check_size(self.policy.max_disk)
            about = {"experiment": config.name, "label": job.method.label, "seed": job.seed}
            folder = self.folder / slug(config.name) / job.folder
            state = ClientState(folder, {**about, "digest": digest, "client": name})
            self._jobs[digest] = AgreedJob(job, digest, number, run, state)
            self._state.keep_agreement(digest, agreement)
        return self._jobs[digest]

    def _job(self, question: Packet) -> AgreedJob:
        """Return the job that a message is about. Raises RefusalError if there is no agreement on it."""
        digest = question.fact("digest", str)
        agreed = self._jobs.get(digest)
        if agreed is not None and not agreed.state.folder.is_dir():  # deleted meanwhile: as in a new process
            self._jobs.pop(digest).state.release()
            agreed = None
        if agreed is None:
            agreement = self._state.agreement(digest)
            if agreement is not None:
                self._agree(agreement)
            agreed = self._jobs.get(digest)
        if agreed is None:
            raise RefusalError(
                "this client has not agreed on this job, or only with other settings", "unknown-job"
            )
        self._experiment_name = agreed.job.config.name
        return agreed

    # -- rounds ---------------------------------------------------------------------------------------------

    def _train(self, question: Packet) -> Release:
        agreed = self._job(question)
        round, acked = self._rounds(agreed, question, first=1)
        if not NEVER <= acked < round:
            raise MessageError(f"a message for round {round} cannot continue from round {acked}")
        last_round, last_acked = self.log.latest(agreed.digest)
        if round < last_round or acked < last_acked:
            raise MessageError(
                f"a message for round {round} continues from round {acked}, but this client has already answered in "
                f"round {last_round} (from {last_acked}): the message is old, or the server went back to an earlier "
                "round. To start the experiment again, give it another name"
            )
        logged = LoggedQuestion("train", agreed.digest, round, _question_digest(question), acked)
        before, attempt = self._only(logged, f"reply of round {round}"), question.fact("attempt", str)
        stored = None if before is None else agreed.state.answer(round)
        if before is not None and stored is not None:
            # with the number of this attempt, which is new if the server was restarted
            self._notify(f"round {round}: asked again, sent the same answer")
            packet = replace(stored, facts={**stored.facts, "attempt": attempt})
            return Release(packet, logged, before[1], again=True)
        again = before is not None
        self._state.check_size(self.policy.max_disk)
        self._begin_at(agreed, round - 1, acked, question.fact("restart", bool))
        message = self._received(question, "received")
        expected_uses = agreed.run.expected_uses(agreed.number, message)
        if before is None:
            self._check_affordable(expected_uses)
        begin = time.perf_counter()
        try:
            result = agreed.run.one_round(agreed.number, message)
        except RefusalError as error:  # that its update is not finite tells something too
            return Release(self._failed(error), logged, uses=None if again else expected_uses, again=again)
        seconds = time.perf_counter() - begin
        reply = flat("reply", result.reply)
        content = Packet("train", {"round": round, "metrics": result.metrics}, reply).digest()
        if before is not None and before[1] != content:
            raise PolicyError(f"the reply of round {round} would differ from the one sent before")
        facts = {
            "digest": agreed.digest,
            "round": round,
            "attempt": attempt,
            "metrics": result.metrics if self.policy.metrics else dict.fromkeys(result.metrics),
            "gradients": result.gradients,
            "uses": uses_as_facts(result.uses),
            "seconds": seconds,
        }
        packet = Packet("train", facts, reply)
        agreed.state.keep(round, result.state, packet.encoded(), acked)
        loss = f", loss {result.metrics['train']:.4g}" if "train" in result.metrics else ""
        self._notify(f"round {round} of {agreed.job.rounds}: trained in {seconds:.1f} s{loss}")
        return Release(packet, logged, content, None if again else result.uses, again)

    def _rounds(self, agreed: AgreedJob, question: Packet, first: int = 0) -> tuple[int, int]:
        """Return the round of a message, and the last accepted round."""
        round, acked = question.fact("round", int), question.fact("acked", int)
        most = self.policy.max_rounds if agreed.job.has_budget else agreed.job.rounds
        if not first <= round <= most:
            raise MessageError(f"round {round:.8g} is not one of the {most} rounds that were agreed on")
        if acked <= round and self.log.lacks(agreed.digest, acked):
            self._note_missing(agreed, acked)
        return round, acked

    def _note_missing(self, agreed: AgreedJob, acked: int) -> None:
        """Note that the server has accepted a reply missing from the log: the state folder is an older copy, or new."""
        about = {"accepted": acked, "known": self.log.latest(agreed.digest)[0]}
        release = Release(Packet("train", about), LoggedQuestion(MISSING, agreed.digest, acked, ""))
        self.log.append(release, 0, agreed.job.config.name, self.policy.delta)
        self._notify(
            f"the server has accepted a reply of round {acked} that is missing from the log '{self.log.path}': the "
            "folder is an older copy or a new one. It is unknown what has left since, so from now on no epsilon holds"
        )

    def _check_affordable(self, uses: Uses) -> None:
        """Raise PolicyError if training has too little noise, or costs more than the remaining ε."""
        self.policy.check_noise(uses, self.log.epsilon(self.policy.delta, uses))

    def _begin_at(self, agreed: AgreedJob, done: int, acked: int, restart: bool) -> None:
        """Load the private state of round `acked`. Raises RefusalError if it is lost."""
        state = None if acked == NEVER else agreed.state.state(acked)
        if acked != NEVER and state is None and not restart:
            raise RefusalError(
                f"the private state of round {acked} is missing from this client's disk, or damaged; restore it from a "
                "copy, or set deploy.lost_state=restart at the server",
                "state-missing",
            )
        agreed.run.begin_at(agreed.number, done, state)

    def _received(self, question: Packet, name: str) -> TensorDict:
        """Return the tensors of a part of a message. Raises MessageError if any tensor of it is not finite."""
        if path := all_finite(question.tensors):
            raise MessageError(f"the server's message contains NaN or infinity in '{path}'")
        return as_message(question.part(name))

    def _evaluate(self, question: Packet) -> Release:
        if not self.policy.metrics:
            self._notify("refused: no metric leaves this client")
            raise RefusalError("no metric leaves this client: its policy has metrics: false", NO_METRICS)
        agreed = self._job(question)
        round, _ = self._rounds(agreed, question)
        logged = LoggedQuestion("evaluate", agreed.digest, round, _question_digest(question))
        before = self._only(logged, f"metrics after round {round}")
        self._receive_models(agreed, question)
        sets = question.fact("sets", list)
        protocol = replace(
            protocol_of(agreed.job.config), sets=tuple(name for name in OWN_SETS if name in sets)
        )
        records = agreed.run.evaluated(agreed.number, protocol)
        uses = agreed.run.deployment_uses
        if uses and before is None:
            self._check_affordable(uses)
        facts = {"digest": agreed.digest, "records": records, "uses": uses_as_facts(uses)}
        again = before is not None
        return Release(Packet("evaluate", facts), logged, uses=None if again else uses, again=again)

    def _receive_models(self, agreed: AgreedJob, question: Packet) -> None:
        """Load the server's message for an evaluation or export of the deployed model."""
        round, acked = self._rounds(agreed, question)
        self._begin_at(agreed, round, acked, question.fact("restart", bool))
        run = agreed.run
        run.received = self._received(question, "received")
        run.shared = self._received(question, "global") if question.fact("has_global", bool) else None
        for tensors in (run.received, run.shared):
            if tensors is not None:
                run.check_tensors(agreed.number, tensors)

    def _finish(self, question: Packet) -> Release:
        agreed = self._job(question)
        self._receive_models(agreed, question)
        folder = agreed.state.folder / "model"
        self._notify(hand_over(agreed.job, agreed.run, agreed.number, folder))
        return Release(Packet("finish", {"digest": agreed.digest, "exported": folder.is_dir()}))

    _answers: ClassVar[Mapping[str, Callable[[ClientSession, Packet], Release]]] = {
        "hello": _hello,
        "describe": _describe,
        "summarise": _summarise,
        "setup": _setup,
        "train": _train,
        "evaluate": _evaluate,
        "finish": _finish,
        "goodbye": _goodbye,
        "failure": _refuse_failure,
    }


def _question_digest(question: Packet) -> str:
    """Return a digest of a question without the attempt, the evaluated parts, and what to do without a state."""
    facts = {k: v for k, v in question.facts.items() if k not in ("attempt", "sets", "restart")}
    return replace(question, facts=facts).digest()


def member_of(
    *,
    state: str | Path,
    data: str | Path | None = None,
    name: str | None = None,
    notify: Notify = lambda sentence: None,
    policy: Policy = DEFAULT_POLICY,
    experiment: ExperimentConfig | None = None,
    accept: tuple[str, ...] = (),
) -> ClientSession:
    """Return a client.

    Args:
        state: folder of its private states.
        data: its own file or folder; None: its share of the data that the experiment itself names.
        name: by default the name of the file, without its ending, or of the folder.
        notify, policy: see `ClientSession`.
        experiment: the only experiment in which it takes part.
        accept: digests of experiments in which it takes part.

    Raises:
        ConfigError: the client has neither a file nor a name.
    """
    consent = Consent(experiment, frozenset(accept))
    return ClientSession(own_data(data, name, policy), Path(state).expanduser(), notify, policy, consent)
