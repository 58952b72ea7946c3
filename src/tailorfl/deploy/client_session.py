"""A client of a real federation: answers what the server asks, and keeps its samples and private states to itself.

A `ClientSession` is asked one packet after another, by whatever transport brings them, and answers each with one. What
leaves it is in the tables of docs/deploy.md and nothing else: sizes, what a model must know of the data, replies as the
method defines them, the numbers that it reports, and metrics of its models. Its policy and its operator's consent
decide which questions it answers, and each answer is in the log (`release_log`) before it leaves.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tailorfl.data.remote_federation import PARTS, remote_federation, remote_source
from tailorfl.deploy.agreement import Agreement
from tailorfl.deploy.client_state import NEVER, ClientState, uses_as_facts
from tailorfl.deploy.codec import (
    LEFT,
    PROTOCOL,
    SAME_MINOR,
    VERSION,
    Packet,
    all_finite,
    compatible,
    failure,
    flat,
)
from tailorfl.deploy.local_run import LocalRun, as_message, hand_over
from tailorfl.deploy.own_data import DataShare, OwnData
from tailorfl.deploy.own_files import own_data
from tailorfl.deploy.policy import DEFAULT_POLICY, NO_CONSENT, Consent, Policy, described
from tailorfl.deploy.release_log import MISSING, LoggedQuestion, ReleaseLog
from tailorfl.engines.make import make_engine
from tailorfl.errors import (
    ConfigError,
    DataError,
    DivergenceError,
    MemoryLimitError,
    MessageError,
    PolicyError,
    RunError,
    TailorflError,
)
from tailorfl.privacy.ledger import Uses
from tailorfl.runs.build import make_simulation
from tailorfl.runs.eval_schedule import protocol_of
from tailorfl.runs.files import decode, encode, replacing, reporting, write_text
from tailorfl.runs.job import Job
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.names import slug

log = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{32}")
OWN_SETS = ("val", "local")
"""The test sets that a client can look at by itself."""
FAILURES: Mapping[type, str] = {
    DataError: "its data cannot be used",
    PolicyError: "its policy does not allow it",
    RunError: "it cannot read or write its files",
    DivergenceError: "its training has diverged",
    MemoryLimitError: "its memory is too small",
}
"""What the server is told of errors that speak of a client's own things."""
UNLOGGED = ("hello", "goodbye")
"""Answers that tell nothing but the client's name and versions."""
Told = Callable[[str], None]
_UNKNOWN = failure("this client has not agreed on that job, or with other settings", "unknown-job")


@dataclass(frozen=True)
class AgreedJob:
    """One job that this client has agreed on."""

    job: Job
    digest: str
    number: int
    run: LocalRun
    slots: ClientState


@dataclass(frozen=True)
class Outgoing:
    """An answer, and what the log notes of it beside.

    Attributes:
        packet: the answer.
        question: what it answers, where that is answered once.
        content: digest of what it tells of samples, where it must be the same again.
        uses: what private training used for it.
        again: whether it has left before.
    """

    packet: Packet
    question: LoggedQuestion | None = None
    content: str = ""
    uses: Uses | None = None
    again: bool = False


class ClientSession:
    """One client.

    Args:
        data: its samples; their `name` is the client's.
        folder: where private states are kept, a folder for each job.
        told: what is called with a sentence for the person who looks on.
        policy: what may be asked.
        consent: what the operator has agreed to; it is asked for where samples are of the client's own file.
    """

    def __init__(
        self,
        data: OwnData,
        folder: Path,
        told: Told = lambda sentence: None,
        policy: Policy = DEFAULT_POLICY,
        consent: Consent = NO_CONSENT,
    ) -> None:
        self.data, self.folder, self.policy, self.consent, self._told = data, folder, policy, consent, told
        self._tasks: dict[str, AgreedJob] = {}
        self._log: ReleaseLog | None = None
        self._experiment_name = ""
        self._shown = ""
        self.leaves = False
        """Whether it answers nothing any more but that it leaves for good."""
        self.ended = False
        """Whether the server has said that there is nothing more."""
        self.turned_away = ""
        """Why the server does not want this client."""

    def answer(self, data: bytes) -> bytes:
        """Return the answer to a packet; whatever goes wrong is an answer too, which says so."""
        release = Outgoing(failure("it cannot read the message", "refused"))
        self._experiment_name = ""
        try:
            asked = Packet.decoded(data, self.policy.max_bytes)
            log.debug("asked: %s", asked.kind)
            found = (
                self._left() if self.leaves and asked.kind != "hello" else self._answers[asked.kind](asked)
            )
            release = found if isinstance(found, Outgoing) else Outgoing(found)
        except Exception as error:
            release = Outgoing(self._failed(error))
        try:
            return self._logged(release)
        except RunError as error:
            return self._failed(error).encoded()

    def _failed(self, error: Exception) -> Packet:
        if isinstance(error, MessageError | ConfigError):  # of what the server has sent
            self._told(f"refused: {error}")
            return failure(str(error), type(error).__name__)
        # what is said of samples, files or a method's numbers stays here
        if not isinstance(error, TailorflError):
            log.error("what the server asked for has failed", exc_info=error)
        self._told(f"failed: {type(error).__name__}: {error}")
        kind = FAILURES.get(type(error), f"it has failed with {type(error).__name__}")
        return failure(f"{kind}; its own log says more", "failed")

    def _logged(self, release: Outgoing) -> bytes:
        """Return the bytes of an answer, once a line about it is on the disk."""
        data = release.packet.encoded()
        if release.packet.kind not in UNLOGGED:
            self.log.append(
                release.packet,
                len(data),
                experiment=self._experiment_name,
                question=release.question,
                answer=release.content,
                uses=release.uses,
                again=release.again,
                delta=self.policy.delta,
            )
        return data

    @property
    def log(self) -> ReleaseLog:
        """What has left this client; read again where somebody else wrote to it, or the folder was taken away."""
        if self._log is None or not self._log.is_current:
            self._log = ReleaseLog(self.folder)
        return self._log

    def close(self) -> None:
        """Let go of all folders."""
        for task in self._tasks.values():
            task.slots.release()
        self._tasks.clear()

    def without_model(self) -> str:
        """Return why this client has no model of what it took part in last; "" where it has one."""
        if self.leaves:
            return ""
        jobs = self.log.jobs
        if not jobs:
            return "the server has nothing more to do, and this client took part in nothing"
        if not jobs[last := list(jobs)[-1]]:
            return (
                f"the server has nothing more to do, but this client has no model of its last job ({last[:8]}); its "
                "private state is kept: start it again while the server runs"
            )
        return ""

    @property
    def _answers(self) -> Mapping[str, Callable[[Packet], Packet | Outgoing]]:
        return {
            "hello": self._hello,
            "describe": self._describe,
            "summarise": self._summarise,
            "setup": self._setup,
            "train": self._train,
            "evaluate": self._evaluate,
            "finish": self._finish,
            "goodbye": self._goodbye,
            "failure": self._not_asked,
        }

    def _left(self) -> Packet:
        self.ended = True
        self._told("the server knows that this client leaves for good")
        return failure("it leaves for good", LEFT)

    def _not_asked(self, asked: Packet) -> Packet:
        raise MessageError("a failure is no question")

    def _goodbye(self, asked: Packet) -> Packet:
        self.ended = True
        self.turned_away = asked.fact("turned_away", str)[:500]
        if not self.turned_away:
            self._told("the server has nothing more to do")
        return Packet("goodbye")

    def _hello(self, asked: Packet) -> Packet:
        theirs = asked.fact("version", str)
        if not compatible(theirs):
            raise MessageError(
                f"the server has tailorfl {theirs[:40]}, but client '{self.data.name}' has {VERSION}; {SAME_MINOR}"
            )
        facts = {"name": self.data.name, "protocol": PROTOCOL, "version": VERSION}
        return Packet("hello", {**facts, "torch": torch.__version__})

    # -- what it is asked to join ---------------------------------------------------------------------------

    def _admitted(self, settings: Mapping[str, Any]) -> tuple[ExperimentConfig, str]:
        """Return the part of an experiment that this client goes by, and the digest by which it was agreed to."""
        try:
            config = ExperimentConfig.model_validate(dict(settings))
        except ValueError as error:
            raise MessageError(f"the server's experiment cannot be read: {error}"[:400]) from error
        self._experiment_name = config.name[:200]
        own_file = not isinstance(self.data, DataShare)
        admitted = self.policy.admitted(config, own_file=own_file)
        if not own_file:
            return admitted, ""
        try:
            return admitted, self.consent.check(config)
        except MessageError:
            if self._shown != (words := described(config)):
                self._shown = words
                self._told(words)
            raise

    def _describe(self, asked: Packet) -> Packet:
        config, _ = self._admitted(asked.fact("experiment", dict))
        found = self.data.described(config, asked.fact("seed", int))
        self._told(f"described its data: {sum(found.sizes.values())} samples")
        facts = {"index": found.index, "total": found.total, "sizes": found.sizes, "source": found.source}
        return Packet("describe", facts)

    def _summarise(self, asked: Packet) -> Outgoing:
        config, digest = self._admitted(asked.fact("experiment", dict))
        names, rows, seed = asked.fact("names", list), asked.fact("rows", list), asked.fact("seed", int)
        self.policy.check_federation(names, rows)
        if self.data.name not in names or seed not in config.seeds:
            raise MessageError(
                f"'summarise' is not for client '{self.data.name}' with a seed of the experiment"
            )
        joins = asked.facts.get("joins") is True  # numbers of samples are told then, and nothing else
        question = None if joins else LoggedQuestion("summarise", digest, seed, asked.digest())
        before = None if question is None else self._only(question, "summary of this experiment and seed")
        try:
            found = self.data.summary(config, seed, names.index(self.data.name), rows)
            if joins:
                found = replace(found, summary={})
            packet = Packet("summarise", {"sizes": found.sizes, "summary": found.summary})
            content = packet.digest()
            if self.policy.needs_noise and (found.summary.get("columns") or found.summary.get("pixels")):
                raise PolicyError(
                    "sums of its rows would leave without noise; the experiment needs data.options.constants (of "
                    "images data.options.scaling=public)"
                )
            if before is not None and before[1] != content:
                raise PolicyError("its summary would be another one than before: its file has changed since")
        except (
            DataError,
            PolicyError,
        ) as error:  # another question would tell where it is refused and where not
            return Outgoing(self._failed(error), question)
        told = "how many samples it has" if joins else f"a summary of {found.sizes['train']} training rows"
        self._told(f"told {told} to {len(names)} clients: {names[:20]}")
        return Outgoing(packet, question, content, again=before is not None)

    def _only(self, question: LoggedQuestion, what: str) -> tuple[str, str] | None:
        """Return the digests of an earlier (question, answer) of this number, which had to be the same question."""
        before = self.log.answered(question)
        if before is not None and before[0] != question.digest:
            raise MessageError(
                f"this client has given its {what} to another question already, and answers each once; begin under "
                "another name"
            )
        return before

    def _setup(self, asked: Packet) -> Packet:
        self.policy.check_federation(asked.fact("names", list), *asked.fact("sizes", dict).values())
        task = self._agreed(Agreement.read(asked.facts))
        known = f", goes on from round {task.slots.rounds[-1]}" if task.slots.rounds else ""
        self._told(
            f"agreed on {task.job.name}: client {task.number + 1} of {len(task.run.federation)}{known}"
        )
        return Packet("setup", {"digest": task.digest})

    def _agreed(self, agreement: Agreement) -> AgreedJob:
        """Make ready for a job, and keep what was agreed on, so that this client can go on after its own restart."""
        config, _ = self._admitted(agreement.experiment)
        job = replace(agreement.job, config=config)
        if self.data.name not in agreement.names:
            raise MessageError(f"the federation has no client '{self.data.name}'")
        self.policy.check_model(config, job.method.label, agreement.source)
        number = agreement.names.index(self.data.name)
        if not isinstance(self.data, DataShare):
            self.policy.check_federation(agreement.names, dict(agreement.prepared or {}).get("rows"))
        own = self.data.own(config, job.seed, number, agreement.prepared)
        for part in PARTS:
            if own.sizes[part] != agreement.sizes[part][number]:
                raise MessageError(
                    f"client '{self.data.name}' has {own.sizes[part]} {part} samples, but had "
                    f"{agreement.sizes[part][number]} when it described its data: they have changed since"
                )
        common = remote_source(agreement.source)
        federation = remote_federation(
            common,
            agreement.names,
            agreement.sizes,
            own=(number, own),
            public=self.data.public(config, job.seed, common),
        )
        run = make_simulation(job, federation, None, LocalRun)
        run.engine = make_engine("sequential", precision=config.engine.precision)
        digest = agreement.digest(run)
        if run.train.dp is not None and self.policy.secret_noise and not isinstance(self.data, DataShare):
            run.population.seed = self._secret(digest)
        if digest not in self._tasks:
            self._check_disk()
            about = {"experiment": config.name, "label": job.method.label, "seed": job.seed}
            place = self.folder / slug(config.name) / job.folder
            slots = ClientState(place, {**about, "digest": digest, "client": self.data.name})
            self._tasks[digest] = AgreedJob(job, digest, number, run, slots)
            agreed = self._agreement_file(digest)
            with reporting(agreed, "write"):
                agreed.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_text(agreed, encode(agreement.facts()))
        return self._tasks[digest]

    def _secret(self, job: str) -> int:
        """Return the seed of this client's own random numbers in a job, from the secret in its state folder."""
        path = self.folder / "secret"
        if not path.is_file():
            with reporting(self.folder, "write to"):
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with replacing(path) as part:
                part.touch(mode=0o600)
                part.write_bytes(secrets.token_bytes(32))
        with reporting(path, "read"):
            return int.from_bytes(hashlib.sha256(path.read_bytes() + job.encode()).digest()[:8])

    def _agreement_file(self, digest: str) -> Path:
        """Return where what was agreed on is kept. Raises MessageError for what is no digest."""
        if not _DIGEST.fullmatch(digest):
            raise MessageError(f"a job is named by a digest, but this is '{digest[:40]}'")
        return self.folder / "agreements" / f"{digest}.json"

    def _task(self, asked: Packet) -> AgreedJob | None:
        """Return the job that a message is about; None where there is no agreement on it that can be read."""
        digest = asked.fact("digest", str)
        held = self._tasks.get(digest)
        if held is not None and not held.slots.folder.is_dir():  # deleted meanwhile: as in a new process
            self._tasks.pop(digest).slots.release()
        agreed = self._agreement_file(digest)
        if digest not in self._tasks and agreed.is_file():
            try:
                agreement = Agreement.read(decode(agreed.read_text(encoding="utf-8")))
            except (ValueError, MessageError) as error:
                log.warning("'%s' is damaged, so the server is asked for it again: %s", agreed, error)
                return None
            self._agreed(agreement)
        task = self._tasks.get(digest)
        self._experiment_name = "" if task is None else task.job.config.name
        return task

    def _check_disk(self) -> None:
        """Raise RunError where the state folder holds more than the policy allows; names what lies there."""
        held: Counter[str] = Counter()
        for path in self.folder.rglob("*"):
            if path.is_file():
                held[path.relative_to(self.folder).parts[0]] += path.stat().st_size
        if held.total() > self.policy.max_disk:
            oldest = sorted(held, key=lambda name: (self.folder / name).stat().st_mtime)
            listed = ", ".join(f"{name} ({held[name]:,} bytes)" for name in oldest[:10])
            raise RunError(
                f"'{self.folder}' holds {held.total():,} bytes; max_disk of the policy is {self.policy.max_disk:,}: "
                f"take away what is not needed any more (oldest first: {listed}), but for left.jsonl and left.head"
            )

    # -- rounds ---------------------------------------------------------------------------------------------

    def _train(self, asked: Packet) -> Packet | Outgoing:
        task = self._task(asked)
        if task is None:
            return _UNKNOWN
        round, acked = self._rounds(task, asked, first=1)
        if not NEVER <= acked < round:
            raise MessageError(f"a message for round {round} cannot go on from round {acked}")
        done_before, acked_before = self.log.latest(task.digest)
        if round < done_before or acked < acked_before:
            raise MessageError(
                f"a message for round {round} goes on from round {acked}, but this client has already answered in "
                f"round {done_before} (from {acked_before}): the message is an old one, or the server has gone back. "
                "To begin the experiment anew give it another name"
            )
        question = LoggedQuestion("train", task.digest, round, _question(asked), acked)
        before, attempt = self._only(question, f"reply of round {round}"), asked.fact("attempt", str)
        stored = None if before is None else task.slots.answer(round)
        if before is not None and stored is not None:
            # with the number of this attempt, as a server has it that was started again
            self._told(f"round {round}: asked again, answered as before")
            packet = replace(stored, facts={**stored.facts, "attempt": attempt})
            return Outgoing(packet, question, before[1], again=True)
        self._check_disk()
        lost = self._begin_at(task, round - 1, acked, asked.fact("restart", bool))
        if lost is not None:
            return lost
        message = self._received(asked, "received")
        foreseen = task.run.foreseen_uses(task.number, message)
        if before is None:
            self._affordable(foreseen)
        begin = time.perf_counter()
        done = task.run.one_round(task.number, message)
        if done is None:
            return failure("its update is not finite", "not-finite")
        seconds = time.perf_counter() - begin
        content = Packet(
            "train", {"round": round, "metrics": done.metrics}, flat("reply", done.reply)
        ).digest()
        if before is not None and before[1] != content:
            raise PolicyError(f"the reply of round {round} would be another one than before")
        facts = {
            "digest": task.digest,
            "round": round,
            "attempt": attempt,
            "metrics": done.metrics if self.policy.metrics else dict.fromkeys(done.metrics),
            "gradients": done.gradients,
            "uses": uses_as_facts(done.uses),
            "seconds": seconds,
        }
        packet = Packet("train", facts, flat("reply", done.reply))
        task.slots.keep(round, done.state, packet.encoded(), acked)
        loss = next(iter(done.metrics.values()), float("nan"))
        self._told(f"round {round} of {task.job.rounds}: trained in {seconds:.1f} s, loss {loss:.4g}")
        again = before is not None
        return Outgoing(packet, question, content, None if again else done.uses, again)

    def _rounds(self, task: AgreedJob, asked: Packet, first: int = 0) -> tuple[int, int]:
        """Return the round that a message is about, and the one that was accepted last."""
        round, acked = asked.fact("round", int), asked.fact("acked", int)
        if not first <= round <= task.job.rounds:
            raise MessageError(f"round {round:.8g} is none of the {task.job.rounds} that were agreed on")
        if acked <= round and self.log.lacks(task.digest, acked):
            self._note_missing(task, acked)
        return round, acked

    def _note_missing(self, task: AgreedJob, acked: int) -> None:
        """Note that the server has accepted what the log does not have: the state folder is an older copy, or new."""
        about = {"accepted": acked, "known": self.log.latest(task.digest)[0]}
        question = LoggedQuestion(MISSING, task.digest, acked, "")
        name = task.job.config.name
        self.log.append(
            Packet("train", about), 0, experiment=name, question=question, delta=self.policy.delta
        )
        self._told(
            f"the server has accepted a reply of round {acked}, which is not in the log '{self.log.path}': its folder "
            "is an older copy or a new one. What left since is unknown, so no epsilon holds from now on"
        )

    def _affordable(self, uses: Uses) -> None:
        """Raise PolicyError where training has too little noise, or costs more than is left of ε."""
        self.policy.check_noise(uses, self.log.epsilon(self.policy.delta, uses))

    def _begin_at(self, task: AgreedJob, done: int, acked: int, restart: bool = False) -> Packet | None:
        """Bring the private state of round `acked` in; return an answer where it is lost."""
        state = None if acked == NEVER else task.slots.state(acked)
        if acked != NEVER and state is None and not restart:
            return failure(
                f"the private state of round {acked} is not on this client's disk any more, or damaged; bring it back, "
                "or set deploy.lost_state=restart at the server",
                "state-missing",
            )
        task.run.begin_at(task.number, done, state)
        return None

    def _received(self, asked: Packet, name: str) -> Any:
        """Return the tensors of a part of a message, once they are known to be finite."""
        bad = all_finite(asked.tensors)
        if bad:
            raise MessageError(f"what the server sent holds NaN or infinity in '{bad}'")
        return as_message(asked.part(name))

    def _evaluate(self, asked: Packet) -> Packet | Outgoing:
        if not self.policy.metrics:
            raise MessageError("no metric leaves this client: its policy has metrics: false")
        task = self._task(asked)
        if task is None:
            return _UNKNOWN
        round, _ = self._rounds(task, asked)
        question = LoggedQuestion("evaluate", task.digest, round, _question(asked))
        before = self._only(question, f"metrics after round {round}")
        lost = self._brought(task, asked)
        if lost is not None:
            return lost
        sets = asked.fact("sets", list)
        protocol = replace(
            protocol_of(task.job.config), sets=tuple(name for name in OWN_SETS if name in sets)
        )
        records = task.run.evaluated(task.number, protocol)
        uses = _deployment_uses(task.run)
        if uses and before is None:
            self._affordable(uses)
        packet = Packet("evaluate", {"digest": task.digest, "records": records, "uses": uses_as_facts(uses)})
        return Outgoing(packet, question, uses=None if before else uses, again=before is not None)

    def _brought(self, task: AgreedJob, asked: Packet) -> Packet | None:
        """Bring in what the server sends for a look at the models that come out."""
        round, acked = self._rounds(task, asked)
        lost = self._begin_at(task, round, acked, asked.fact("restart", bool))
        if lost is not None:
            return lost
        task.run.received = self._received(asked, "received")
        task.run.shared = self._received(asked, "global") if asked.fact("has_global", bool) else None
        for part in (task.run.received, task.run.shared):
            if part is not None:
                task.run.check_tensors(task.number, part)
        return None

    def _finish(self, asked: Packet) -> Packet | Outgoing:
        task = self._task(asked)
        if task is None:
            return _UNKNOWN
        lost = self._brought(task, asked)
        if lost is not None:
            return lost
        place = task.slots.folder / "model"
        self._told(hand_over(task.job, task.run, task.number, place))
        return Packet("finish", {"digest": task.digest, "exported": place.is_dir()})


def _question(asked: Packet) -> str:
    """Return a digest of what is asked, whichever attempt it is and whichever parts are looked at."""
    facts = {k: v for k, v in asked.facts.items() if k not in ("attempt", "sets")}
    return replace(asked, facts=facts).digest()


def _deployment_uses(run: LocalRun) -> Uses:
    """Return what private training has used for the model that is deployed."""
    return Uses({use: steps for purpose, _, use, steps in run.ledger.rows() if purpose == "deployment"})


def member_of(
    *,
    state: str | Path,
    data: str | Path | None = None,
    name: str | None = None,
    told: Told = lambda sentence: None,
    policy: Policy = DEFAULT_POLICY,
    experiment: ExperimentConfig | None = None,
    accept: tuple[str, ...] = (),
) -> ClientSession:
    """Return a client.

    Args:
        state: folder of its private states.
        data: its own file or folder; None: its share of the data that the experiment itself names.
        name: by default that of the file, without its ending, or of the folder.
        told, policy: see `ClientSession`.
        experiment: the only one that it takes part in.
        accept: digests of experiments that it takes part in.

    Raises:
        ConfigError: it has neither a file nor a name.
    """
    consent = Consent(experiment, frozenset(accept))
    return ClientSession(own_data(data, name, policy), Path(state).expanduser(), told, policy, consent)
