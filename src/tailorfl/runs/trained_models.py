"""The models that clients of a run deploy, as plain modules: from its newest checkpoint, as in evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tailorfl.core.answers import Answering
from tailorfl.errors import ConfigError, ModelError, RunError, unknown
from tailorfl.evaluation.judges import Answers, Portions
from tailorfl.evaluation.selection import Selection
from tailorfl.interface import check_kind
from tailorfl.models.layers import head_name
from tailorfl.printable import quoted
from tailorfl.rounds.groups import by_group
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import make_federation, make_simulation, was_deployed
from tailorfl.runs.fingerprint import data_change, digests, forced, other_settings
from tailorfl.runs.folders import check_source, experiment_in, with_traces_in
from tailorfl.runs.job import Job
from tailorfl.runs.job_loop import make_selection
from tailorfl.runs.store import RunStore
from tailorfl.training import tree

GLOBAL = "global"
"""The name of the model of all clients."""


@dataclass(frozen=True)
class Deployed:
    """One model that leaves a run.

    Attributes:
        name: the client's, or "global" (with several architectures "global-ARCHITECTURE").
        client: the client's number; None for the global model as such.
        kind: personal, or global: the common model, which clients of a method without personal models deploy.
        architecture: its name in `ModelConfig.architectures`.
        module: samples -> outputs, in evaluation mode, with tensors of its own.
        round: number of rounds it was trained; for a model selected by validation, the selected round.
        live: names of the tensors that a run trains; all others are the same for all clients.
        steps: number of batches on which a held-out client has adapted it; None for a client of the federation.
    """

    name: str
    client: int | None
    kind: Literal["personal", "global"]
    architecture: str
    module: nn.Module
    round: int
    live: tuple[str, ...]
    steps: int | None = None


@dataclass(frozen=True)
class Restored:
    """A job of a result folder, restored from its newest checkpoint."""

    job: Job
    sim: Simulation
    selection: Selection | None
    store: RunStore

    @property
    def heldout(self) -> range:
        """Numbers of the clients that never trained."""
        federation = self.sim.federation
        return range(federation.num_clients, len(federation.names))

    @property
    def everyone(self) -> list[int]:
        """Numbers of all clients, including held-out ones, without `data.excluded_clients`."""
        return [*self.sim.federation.members, *self.heldout]

    def number(self, client: str | int) -> int:
        """Return the number of the client with this name, or with this number if no client has that name.

        Raises:
            ConfigError: there is no such client.
        """
        return self.sim.federation.number(client)

    def models(self, clients: Sequence[int], steps: int | None = None) -> Iterator[Deployed]:
        """Yield the clients' deployed models; held-out clients adapt for `steps`, by default the most evaluated."""
        most = max(self.job.config.eval.adapt_steps, default=0)
        for client in clients:
            if self.sim.method.has_personal:
                late = client in self.heldout
                yield self._personal(client, (most if steps is None else steps) if late else None)
            else:
                yield self._global(self._group(client), client)

    def global_models(self) -> Iterator[Deployed]:
        """Yield the global models, one per architecture.

        Raises:
            ConfigError: the method has none.
        """
        for group in self.sim.groups:
            yield self._global(group.name, None)

    def _group(self, client: int) -> str:
        ((group, _),) = by_group(self.sim.groups, (client,))
        return group.name

    def _architecture(self, group: str) -> str:
        return group or next(iter(self.job.config.model_of(self.job.method).architectures))

    def _global(self, group: str, client: int | None) -> Deployed:
        state = self.sim.global_model(group)
        if state is None:
            raise ConfigError(
                f"{self.job.method.label} has no global model; name a client, or use all clients"
            )
        model = next(g.model for g in self.sim.groups if g.name == group)
        several = f"{GLOBAL}-{group}" if group else GLOBAL
        name = several if client is None else self.sim.federation.names[client]
        module = model.alone(tree.tensors(state))
        return Deployed(
            name, client, "global", self._architecture(group), module, self.sim.round, tuple(model.sizes)
        )

    def _personal(self, client: int, steps: int | None) -> Deployed:
        sim, ids, round = self.sim, (client,), self.sim.round
        if self.selection is not None and steps is None:
            models, round = self.selection.models(ids), self.selection.choices[client].round
        else:
            portions = sim.personal_models(ids) if steps is None else sim.newcomer_models(ids, steps)
            ((_, models),) = portions
        group = self._group(client)
        model = next(g.model for g in sim.groups if g.name == group)
        module = model.alone(tree.tensors(models[0]))
        if sim.method.answers:
            module = self._answering(client, models, module)
        name = sim.federation.names[client]
        return Deployed(
            name, client, "personal", self._architecture(group), module, round, tuple(model.sizes), steps
        )

    def _answering(self, client: int, models: TensorDict, module: nn.Module) -> nn.Module:
        """Return the module followed by the method's conversion of outputs into answers."""
        sim, head = self.sim, head_name(module)
        if head is None:
            raise ModelError(f"the answers of {self.job.method.label} need features, and the model has none")
        judge = Answers(sim.engine, Portions(sim), sim.method)
        with torch.no_grad():
            (answers,) = judge.answering(sim.cohort((client,), own=True), models)
        return Answering(module, head, answers).eval()


def restore(
    folder: str | Path, method: str | None = None, seed: int | None = None, source: Any = None
) -> Restored:
    """Return a job of a result folder: the line `method` (by default the first) with `seed` (by default the first).

    `source` is the data of a run on your own data.

    Raises:
        ConfigError: no such line or seed, or the folder has variants; your own data are missing, or given for a run
            without them.
        RunError: there is no checkpoint, the newest is damaged, the settings or data are not those of the run, or the
            folder is a server's.
    """
    check_kind("seed", seed, Integral, None)
    folder = Path(folder)
    config = experiment_in(folder)
    if config.variants:
        raise ConfigError(
            f"'{folder}' has variants ({', '.join(config.variants)}), each in a folder of its own; give one of these"
        )
    labels = [m.label for m in config.methods]
    if method is not None and method not in labels:
        raise unknown("method of the experiment", method, labels)
    if seed is not None and seed not in config.seeds:
        raise ConfigError(f"the experiment has no seed {seed}; it has {', '.join(map(str, config.seeds))}")
    chosen = config.methods[0 if method is None else labels.index(method)]
    job = Job(config, chosen, config.seeds[0] if seed is None else seed)
    check_source(folder, source)
    job_folder = folder / job.folder
    checkpoint = _newest(job, job_folder, folder) if (job_folder / "config.json").is_file() else None
    if checkpoint is None:
        if (job_folder / "summary.json").is_file():
            raise RunError(
                f"'{job_folder}' is finished, but its checkpoint-* files, which hold the models, are missing; restore "
                "them from a copy, or move the folder away and run the job again with --resume"
            )
        raise RunError(
            f"'{job_folder}' has no checkpoint yet; continue the run with --resume {quoted(folder)}"
        )
    if was_deployed(job, folder):
        raise RunError(
            f"'{folder}' is the result folder of a server, which does not have its clients' models; each client wrote "
            f"its model to {job.folder}/model of the experiment's folder in its own --state folder"
        )
    played = with_traces_in(folder, config)
    federation = make_federation(played, config.data.seed_of(job.seed), source)
    sim = make_simulation(replace(job, config=played), federation)
    _, tensors, facts = checkpoint
    sim.load(tensors, facts)
    selection = make_selection(config, sim, None)
    if selection is not None:
        selection.load(tensors)
    store = RunStore.open(job_folder, readonly=True)
    if data_change(store.config, digests(sim.given), sim.given.source):
        raise RunError(
            f"the data differ from those of '{folder}', so models that use data again before they are deployed would "
            "change; restore the original data"
        )
    return Restored(job, sim, selection, store)


def _newest(job: Job, job_folder: Path, folder: Path) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
    """Return the newest checkpoint of a job, after checking that the job's settings have not changed since."""
    store = RunStore.open(job_folder, readonly=True)
    differences = [] if forced(folder) else list(other_settings([job], folder, longer=True, restoring=True))
    if differences:
        raise RunError(
            f"'{folder / 'config.yaml'}' is not the experiment that trained the models ({'; '.join(differences)}); "
            "restore it from a copy"
        )
    try:
        return store.newest_checkpoint()
    except RunError as error:
        raise RunError(
            f"the newest state of {job.name} is lost ({error}), and an older one would give another model; restore it "
            f"from a copy, or run the last rounds again with --resume {quoted(folder)}"
        ) from error
