"""A client's half of a job in its own process: the rounds of `FederatedRun` for this client alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.messages import PerClient
from tailorfl.data.remote_federation import client_samples, source_facts
from tailorfl.deploy.client_state import ClientState
from tailorfl.deploy.messages import RefusalError
from tailorfl.errors import MessageError, ModelError, TailorflError
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.evaluation.summary import Record
from tailorfl.export.folder import write
from tailorfl.privacy import Uses
from tailorfl.rounds.groups import Group, by_group
from tailorfl.rounds.one_round import counted
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.fingerprint import environment
from tailorfl.runs.job import Job
from tailorfl.runs.records import finish, keeper
from tailorfl.runs.store import RunStore
from tailorfl.runs.trained_models import Restored
from tailorfl.training import tree


@dataclass(frozen=True)
class LocalResult:
    """The outcome of one client's training in a round.

    Attributes:
        state: its new private state, by name.
        reply: its reply.
        metrics: the numbers that it reports with it.
        gradients: number of gradients of single samples that it computed.
        uses: its uses of private samples.
    """

    state: dict[str, Tensor]
    reply: TensorDict
    metrics: dict[str, float]
    gradients: int
    uses: Uses


class LocalRun(Simulation):
    """A simulation with one real client: the one whose samples are here.

    Attributes:
        received: the server's message for an evaluation or export of the deployed model.
        shared: the global model, if the method has one.
    """

    received: TensorDict | None = None
    shared: TensorDict | None = None

    def group_of(self, client: int) -> Group:
        """Return the clients of the same architecture."""
        ((group, _),) = by_group(self.groups, (client,))
        return group

    def begin_at(self, client: int, round: int, state: dict[str, Tensor] | None) -> None:
        """Set the number of rounds done and the client's private state; None: its initial state.

        Raises:
            MessageError: the state is of another method or model.
        """
        self.round = round
        store = self.group_of(client).states
        store.rollback()
        if client in store.clients:
            store.forget((client,))
        if state is None:
            return
        start = dict(tree.leaves(store.fresh((client,))))
        if state.keys() != start.keys():
            raise MessageError("the private state stored here does not have the entries of this job's state")
        store.put((client,), tree.nest(((p, t.unsqueeze(0).clone()) for p, t in state.items()), [1]))

    def one_round(self, client: int, message: TensorDict) -> LocalResult:
        """Train the client for one round and return the result. Raises RefusalError if its update is not finite."""
        group = self.group_of(client)
        trained = self._train(group, (client,), message)
        if not bool(trained.finite.all()):
            group.states.rollback()
            raise RefusalError("its update is not finite", "not-finite")
        group.states.commit((client,))
        state = {p: t[0].clone() for p, t in tree.leaves(group.states.get((client,)))}
        metrics = {p: float(t[0]) for p, t in tree.leaves(trained.metrics)}
        uses = trained.uses.get(client, Uses())
        return LocalResult(state, trained.replies[0], metrics, trained.gradients, uses)

    def evaluated(self, client: int, protocol: Protocol) -> list[Record]:
        """Return the records of this client's models on its own parts."""
        return evaluate(self, protocol, clients=(client,))

    def deployment_message(
        self, group: Group, ids: Sequence[int], steps: int | None
    ) -> TensorDict | PerClient:
        """Return the server's message; before it has sent one, its message at the start."""
        return super().deployment_message(group, ids, steps) if self.received is None else self.received

    def global_model(self, architecture: str | None = None) -> TensorDict | None:
        """Return the global model that the server has sent."""
        return self.shared

    @property
    def deployment_uses(self) -> Uses:
        """The uses of private training for the model that is deployed."""
        return Uses({use: steps for purpose, _, use, steps in self.ledger.rows() if purpose == "deployment"})

    def check_tensors(self, client: int, message: TensorDict) -> None:
        """Check that tensors named like the model's have the same type and shape, also if several are stacked.

        Raises:
            MessageError: a tensor has another type or shape; names it.
        """
        init = tree.tensors(self.group_of(client).context.init)
        for path, tensor in tree.leaves(message):
            like = init.get(path.rpartition("/")[2])
            if like is None:
                continue
            tail = tensor.shape[tensor.dim() - like.dim() :]
            if tensor.dtype != like.dtype or tensor.dim() < like.dim() or tail != like.shape:
                raise MessageError(
                    f"in the server's message '{path}' is {tensor.dtype} of shape {list(tensor.shape)}, but this "
                    f"model's is {like.dtype} of shape {list(like.shape)}"
                )

    def expected_uses(self, client: int, message: TensorDict) -> Uses:
        """Return the uses of private samples that training on a message would need, without reading any sample.

        A method's messages may differ between rounds, so the method must complete a dry run with this one.

        Raises:
            MessageError: the message does not fit the method of this job.
        """
        self.check_tensors(client, message)
        group = self.group_of(client)
        try:
            record, _ = counted(group, self.cohort((client,)), message, self.local)
        except (TailorflError, RuntimeError, KeyError, ValueError, IndexError, TypeError) as error:
            raise MessageError(
                f"the server's message does not fit {self.method.title}: {type(error).__name__}: {error}"[
                    :400
                ]
            ) from error
        return record.uses.get(client, Uses())


@dataclass(frozen=True)
class AgreedJob:
    """One job that this client has agreed on."""

    job: Job
    digest: str
    number: int
    run: LocalRun
    state: ClientState


def as_message(parts: TensorDict) -> TensorDict:
    """Return received tensors as a method needs them: without gradients, in memory of their own."""
    with torch.no_grad():
        return tree.nest((p, t.clone()) for p, t in tree.leaves(parts))


def hand_over(job: Job, run: LocalRun, client: int, folder: Path) -> str:
    """Write the model that a client deploys into a folder, with its metrics, and return a sentence about it."""
    predictions = keeper(job, run)
    records = evaluate(run, Protocol(("val", "local")), kept=predictions, clients=(client,))
    facts = {
        "label": job.method.label,
        "seed": job.seed,
        "environment": environment(),
        "source": source_facts(run.federation.source),
        "sizes": client_samples(run.federation, client).sizes,
    }
    with RunStore.create(folder.parent / "records", facts, overwrite=True) as store:
        store.append_clients(records)
        if predictions is not None:
            finish(predictions, job, run, store)
        restored = Restored(job, run, None, store)
        (model,) = restored.models([client])
        try:
            write(restored, model, folder)
        except ModelError as error:
            return f"the model of this client cannot be exported and stays in its private state: {error}"
    return f"the {model.kind} model of this client after round {run.round} is in '{folder}'"
