"""A client of a real federation: answers what the server asks, and keeps its samples and private states to itself.

A `Member` is asked one packet after another, by whatever post brings them, and answers each with one. What leaves it is
in the tables of docs/deploy.md and nothing else: sizes, what a model must know of the data, replies as the method
defines them, the numbers that it reports, and metrics of its models.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from tailorfl.core.method import find_method
from tailorfl.data.hollow import PARTS, hollow_federation, hollow_source
from tailorfl.deploy.agreement import Agreement
from tailorfl.deploy.handover import hand_over
from tailorfl.deploy.local_run import LocalRun, as_message
from tailorfl.deploy.own_data import OwnData
from tailorfl.deploy.packet import (
    LARGEST,
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
from tailorfl.deploy.slots import NEVER, Slots, uses_as_facts
from tailorfl.engines.make import make_engine
from tailorfl.errors import (
    ConfigError,
    DataError,
    DivergenceError,
    MemoryLimitError,
    MessageError,
    RunError,
    TailorflError,
)
from tailorfl.evaluation.protocols import Protocol
from tailorfl.experiments.making import make_simulation
from tailorfl.experiments.names import slug
from tailorfl.runs.files import decode, encode, reporting, write_text
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.training.ledger import Uses

log = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{32}")
OWN_SETS = ("val", "local")
"""The test sets that a client can look at by itself."""
FAILURES: Mapping[type, str] = {
    DataError: "its data cannot be used",
    RunError: "it cannot read or write its files",
    DivergenceError: "its training has diverged",
    MemoryLimitError: "its memory is too small",
}
"""What the server is told of errors that speak of a client's own things."""
Told = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """One job that this client has agreed on."""

    agreement: Agreement
    digest: str
    number: int
    run: LocalRun
    slots: Slots


class Member:
    """One client.

    Args:
        data: its samples; their `name` is the client's.
        folder: where private states are kept, a folder for each job.
        largest: bytes of a message that are taken.
        told: what is called with a sentence for the person who looks on.
    """

    def __init__(
        self, data: OwnData, folder: Path, largest: int = LARGEST, told: Told = lambda sentence: None
    ) -> None:
        self.data, self.folder, self.largest, self._told = data, folder, largest, told
        self._tasks: dict[str, Task] = {}
        self.leaves = False
        """Whether it answers nothing any more but that it leaves for good."""
        self.ended = False
        """Whether the server has said that there is nothing more."""
        self.turned_away = ""
        """Why the server does not want this client."""

    def answer(self, data: bytes) -> bytes:
        """Returns the answer to a packet; whatever goes wrong is an answer too, which says so."""
        try:
            asked = Packet.decoded(data, self.largest)
            log.debug("asked: %s", asked.kind)
            found = (
                self._left() if self.leaves and asked.kind != "hello" else self._answers[asked.kind](asked)
            )
        except (MessageError, ConfigError) as error:  # of what the server has sent
            self._told(f"refused: {error}")
            found = failure(str(error), type(error).__name__)
        except Exception as error:  # what is said of samples, files or a method's numbers stays here
            if not isinstance(error, TailorflError):
                log.exception("what the server asked for has failed")
            self._told(f"failed: {type(error).__name__}: {error}")
            kind = FAILURES.get(type(error), f"it has failed with {type(error).__name__}")
            found = failure(f"{kind}; its own log says more", "failed")
        return found if isinstance(found, bytes) else found.encoded()

    def close(self) -> None:
        """Lets go of all folders."""
        for task in self._tasks.values():
            task.slots.release()
        self._tasks.clear()

    @property
    def _answers(self) -> Mapping[str, Callable[[Packet], Packet | bytes]]:
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

    def _describe(self, asked: Packet) -> Packet:
        config = self._experiment(asked.fact("experiment", dict))
        found = self.data.described(config, asked.fact("seed", int))
        self._told(f"described its data: {sum(found.sizes.values())} samples")
        facts = {"index": found.index, "total": found.total, "sizes": found.sizes, "source": found.source}
        return Packet("describe", facts)

    def _summarise(self, asked: Packet) -> Packet:
        config, rows = self._experiment(asked.fact("experiment", dict)), asked.fact("rows", list)
        names = asked.fact("names", list)
        if (
            self.data.name not in names
            or len(rows) != len(names)
            or not all(isinstance(n, int) for n in rows)
        ):
            raise MessageError("a message 'summarise' does not say how many rows each client has")
        number, seed = names.index(self.data.name), asked.fact("seed", int)
        found = self.data.summary(config, seed, number, rows, asked.fact("given", bool))
        return Packet("summarise", {"sizes": found.sizes, "summary": found.summary})

    def _experiment(self, given: Mapping[str, Any]) -> ExperimentConfig:
        try:
            config = ExperimentConfig.model_validate(dict(given))
        except ValueError as error:
            raise MessageError(f"the server's experiment cannot be read: {error}"[:400]) from error
        for method in config.methods:
            find_method(method.name)  # code of a module is run only where this client has named it (--import)
        return config

    def _setup(self, asked: Packet) -> Packet:
        task = self._agreed(Agreement.read(asked.facts))
        known = f", goes on from round {task.slots.rounds[-1]}" if task.slots.rounds else ""
        of = len(task.agreement.names)
        self._told(f"agreed on {task.agreement.job.name}: client {task.number + 1} of {of}{known}")
        return Packet("setup", {"digest": task.digest})

    def _agreed(self, agreement: Agreement) -> Task:
        """Makes ready for a job, and keeps what was agreed on, so that this client can go on after its own restart."""
        job = agreement.job
        self._experiment(agreement.experiment)
        if self.data.name not in agreement.names:
            raise MessageError(f"the federation has no client '{self.data.name}'")
        number = agreement.names.index(self.data.name)
        own = self.data.own(job.config, job.seed, number, agreement.prepared)
        for part in PARTS:
            if own.sizes[part] != agreement.sizes[part][number]:
                raise MessageError(
                    f"client '{self.data.name}' has {own.sizes[part]} {part} samples, but had "
                    f"{agreement.sizes[part][number]} when it described its data: they have changed since"
                )
        common = hollow_source(agreement.source)
        federation = hollow_federation(
            common,
            agreement.names,
            agreement.sizes,
            own=(number, own),
            public=self.data.public(job.config, job.seed, common),
        )
        run = make_simulation(job, federation, None, LocalRun)
        run.engine = make_engine("sequential", precision=job.config.engine.precision)
        digest = agreement.digest(run)
        if digest in self._tasks:
            return self._tasks[digest]
        about = {"experiment": job.config.name, "label": job.method.label, "seed": job.seed}
        place = self.folder / slug(job.config.name) / job.folder
        slots = Slots(place, {**about, "digest": digest, "client": self.data.name})
        self._tasks[digest] = Task(agreement, digest, number, run, slots)
        kept = self._kept(digest)
        if not kept.is_file():
            with reporting(kept, "write"):
                kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_text(kept, encode(agreement.facts()))
        return self._tasks[digest]

    def _kept(self, digest: str) -> Path:
        """Where what was agreed on is kept; Raises MessageError for what is no digest."""
        if not _DIGEST.fullmatch(digest):
            raise MessageError(f"a job is named by a digest, but this is '{digest[:40]}'")
        return self.folder / "agreements" / f"{digest}.json"

    def _task(self, asked: Packet) -> Task | None:
        """Returns the job that a message is about; None where there is no agreement on it."""
        digest = asked.fact("digest", str)
        held = self._tasks.get(digest)
        if held is not None and not held.slots.folder.is_dir():  # deleted meanwhile: as in a new process
            self._tasks.pop(digest).slots.release()
        if digest not in self._tasks and self._kept(digest).is_file():
            found = self._agreed(Agreement.read(decode(self._kept(digest).read_text(encoding="utf-8"))))
            log.debug("the agreement on %s was read again", found.agreement.job.name)
        return self._tasks.get(digest)

    def _train(self, asked: Packet) -> Packet | bytes:
        task = self._task(asked)
        if task is None:
            return failure("this client has not agreed on that job, or with other settings", "unknown-job")
        round, acked = asked.fact("round", int), asked.fact("acked", int)
        if not NEVER <= acked < round:
            raise MessageError(f"a message for round {round} cannot go on from round {acked}")
        digest, attempt = _question(asked), asked.fact("attempt", str)
        again = task.slots.answered(round, digest)
        if again is not None:  # with the number of this attempt, as a server has it that was started again
            self._told(f"round {round}: asked again, answered as before")
            before = Packet.decoded(again)
            return replace(before, facts={**before.facts, "attempt": attempt})
        task.slots.check_order(round, acked)
        lost = self._begin_at(task, round - 1, acked, asked.fact("restart", bool))
        if lost is not None:
            return lost
        message = self._checked(task, asked)
        begin = time.perf_counter()
        done = task.run.one_round(task.number, message)
        if done is None:
            return failure("its update is not finite", "not-finite")
        seconds = time.perf_counter() - begin
        facts = {
            "digest": task.digest,
            "round": round,
            "attempt": attempt,
            "metrics": done.metrics,
            "gradients": done.gradients,
            "uses": uses_as_facts(done.uses),
            "seconds": seconds,
        }
        answer = Packet("train", facts, flat("reply", done.reply)).encoded()
        task.slots.book(round, digest, done.uses)  # first: an answer that is kept may be sent again
        task.slots.keep(round, done.state, digest, answer, acked)
        loss = next(iter(done.metrics.values()), float("nan"))
        self._told(
            f"round {round} of {task.agreement.job.rounds}: trained in {seconds:.1f} s, loss {loss:.4g}"
        )
        return answer

    def _begin_at(self, task: Task, done: int, acked: int, restart: bool = False) -> Packet | None:
        """Brings the private state of round `acked` in; an answer where it is lost."""
        state = None if acked == NEVER else task.slots.state(acked)
        if acked != NEVER and state is None and not restart:
            return failure(
                f"the private state of round {acked} is not on this client's disk any more; bring it back, or set "
                "deploy.lost_state=restart at the server",
                "state-missing",
            )
        task.run.begin_at(task.number, done, state)
        return None

    def _checked(self, task: Task, asked: Packet) -> TensorDict:
        bad = all_finite(asked.tensors)
        if bad:
            raise MessageError(f"what the server sent holds NaN or infinity in '{bad}'")
        message = as_message(asked.part("received"))
        task.run.check_message(task.number, message)
        return message

    def _evaluate(self, asked: Packet) -> Packet:
        task = self._task(asked)
        if task is None:
            return failure("this client has not agreed on that job, or with other settings", "unknown-job")
        lost = self._brought(task, asked)
        if lost is not None:
            return lost
        config, sets = task.agreement.job.config, asked.fact("sets", list)
        protocol = Protocol(
            tuple(name for name in OWN_SETS if name in sets),
            feature_distance=config.eval.feature_distance,
            sharpness=config.eval.sharpness,
            generation=config.eval.generation,
        )
        records = task.run.evaluated(task.number, protocol)
        uses = uses_as_facts(_deployment_uses(task.run))
        return Packet("evaluate", {"digest": task.digest, "records": records, "uses": uses})

    def _brought(self, task: Task, asked: Packet) -> Packet | None:
        """Brings in what the server sends for a look at the models that come out."""
        round, acked = asked.fact("round", int), asked.fact("acked", int)
        lost = self._begin_at(task, round, acked, asked.fact("restart", bool))
        if lost is not None:
            return lost
        task.run.received = as_message(asked.part("received"))
        task.run.shared = as_message(asked.part("global")) if asked.fact("has_global", bool) else None
        return None

    def _finish(self, asked: Packet) -> Packet:
        task = self._task(asked)
        if task is None:
            return failure("this client has not agreed on that job, or with other settings", "unknown-job")
        lost = self._brought(task, asked)
        if lost is not None:
            return lost
        place = task.slots.folder / "model"
        said = hand_over(task.agreement.job, task.run, task.number, place)
        self._told(said)
        return Packet("finish", {"digest": task.digest, "exported": place.is_dir()})


def _question(asked: Packet) -> str:
    """Returns a digest of what is asked, whichever attempt it is."""
    return replace(asked, facts={k: v for k, v in asked.facts.items() if k != "attempt"}).digest()


def _deployment_uses(run: LocalRun) -> Uses:
    """What private training has used for the model that is deployed."""
    return Uses({use: steps for purpose, _, use, steps in run.ledger.rows() if purpose == "deployment"})
