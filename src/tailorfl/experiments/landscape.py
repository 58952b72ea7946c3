"""The loss landscape around models of a finished or interrupted run, from its newest checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from tailorfl.errors import ConfigError, RunError, unknown
from tailorfl.evaluation.landscape import losses, plane_through, random_plane
from tailorfl.evaluation.selection import Selection
from tailorfl.experiments.fingerprint import forced, other_settings
from tailorfl.experiments.folders import check_source, experiment_in
from tailorfl.experiments.jobs import Job
from tailorfl.experiments.making import make_federation, make_simulation
from tailorfl.experiments.one_job import make_selection
from tailorfl.printable import quoted
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.files import write_text
from tailorfl.runs.store import RunStore
from tailorfl.training.keys import generator

log = logging.getLogger(__name__)

GLOBAL = "global"
Part = Literal["train", "val", "local"]
MARGIN = 0.25
"""How far a plane through three models reaches beyond them, as a share of what they span."""


@dataclass(frozen=True)
class Landscape:
    """Losses on a grid.

    Attributes:
        title: method, seed, models and data.
        a, b: places along the two directions.
        loss: [b, a] mean losses.
        marks: (a, b) of each model by name.
    """

    title: str
    a: NDArray[np.float64]
    b: NDArray[np.float64]
    loss: NDArray[np.float64]
    marks: dict[str, tuple[float, float]]

    def csv(self) -> str:
        """Returns a line a point: a, b, loss."""
        lines = [
            f"{x:.6g},{y:.6g},{self.loss[j, i]:.8g}"
            for j, y in enumerate(self.b.tolist())
            for i, x in enumerate(self.a.tolist())
        ]
        return "\n".join(["a,b,loss", *lines]) + "\n"

    def write(self, path: Path) -> list[Path]:
        """Writes the picture and, beside it, the numbers as CSV; returns both. Raises RunError where that fails."""
        from tailorfl.runs.plots import contours

        contours(self.a, self.b, self.loss, self.marks, path, title=self.title)
        numbers = path.with_suffix(".csv")
        write_text(numbers, self.csv())
        return [path, numbers]


def landscape(
    folder: str | Path,
    models: Sequence[str] = (GLOBAL,),
    *,
    method: str | None = None,
    seed: int | None = None,
    part: Part = "train",
    radius: float = 1.0,
    points: int = 21,
    samples: int = 1000,
    source: Any = None,
) -> Landscape:
    """Returns the loss around one model of a run, or on the plane through three.

    Args:
        folder: result folder of an experiment.
        models: "global" or the number of a client, whose deployable model is meant; one or three.
        method: label of the line, by default the only or first one; `seed` likewise.
        part: samples of the clients that `models` names (of all training clients where it names none).
        radius: how far the grid reaches from one model, in units of its weights' norms.
        points: places along each direction.
        samples: at most so many, a fixed random choice.
        source: the data of a run on data of your own.

    Raises:
        ConfigError: arguments that fit nothing in the folder.
        RunError: the run has no checkpoint.
    """
    if part not in ("train", "val", "local"):
        raise unknown("part", part, ("train", "val", "local"))
    if points < 2 or radius <= 0 or samples < 1:
        raise ConfigError(
            f"a landscape needs points >= 2, radius > 0 and samples >= 1, but got points={points}, "
            f"radius={radius:g}, samples={samples}"
        )
    if len(models) not in (1, 3):
        raise ConfigError(f"name one model or three, but got {len(models)}: {', '.join(models)}")
    job, sim, selection = restored(Path(folder), method, seed, source)
    states = [_state(sim, job, name, selection) for name in models]
    clients = [int(name) for name in models if name != GLOBAL]
    rows = _rows(sim, clients, part, samples)
    if len(states) == 3:
        plane = plane_through(sim.model, states)
        a, b = _window(plane.points, points)
    else:
        plane = random_plane(sim.model, states[0], job.seed)
        a = b = np.linspace(-radius, radius, points)
    found = losses(sim.model, plane, sim.federation.source, rows, a.tolist(), b.tolist())
    named = [name if name == GLOBAL else f"client {name}" for name in models]
    title = f"{job.method.label}, seed {job.seed}, {', '.join(named)}: loss on {len(rows)} {part} samples"
    return Landscape(title, a, b, found, dict(zip(named, plane.points, strict=True)))


def restored(
    folder: Path, method: str | None, seed: int | None, source: Any
) -> tuple[Job, Simulation, Selection | None]:
    """Returns a job of a result folder, the first that fits, and its simulation and chosen models as the newest
    checkpoint has them.

    Raises:
        ConfigError: no such line or seed; data of your own are missing, or given where there were none.
        RunError: there is no checkpoint, the newest is damaged, or the settings are not those of the job.
    """
    config = experiment_in(folder)
    labels = [m.label for m in config.methods]
    if method is not None and method not in labels:
        raise unknown("method of the experiment", method, labels)
    if seed is not None and seed not in config.seeds:
        raise ConfigError(f"the experiment has no seed {seed}; it has {', '.join(map(str, config.seeds))}")
    chosen = config.methods[0 if method is None else labels.index(method)]
    job = Job(config, chosen, config.seeds[0] if seed is None else seed)
    check_source(folder, source)
    place = folder / job.folder
    found = _newest(job, place, folder) if (place / "config.json").is_file() else None
    if found is None:
        if (place / "summary.json").is_file():
            raise RunError(
                f"'{place}' is finished, but its checkpoint-* files, which hold the models, are gone; bring them back "
                "from a copy, or move the folder away and do the job again with --resume"
            )
        raise RunError(f"'{place}' has no checkpoint yet; continue the run with --resume {quoted(folder)}")
    sim = make_simulation(job, make_federation(config, config.data.seed_of(job.seed), source))
    _, tensors, facts = found
    sim.load(tensors, facts)
    selection = make_selection(config, sim, None)
    if selection is not None:
        selection.load(tensors)
    return job, sim, selection


def _newest(job: Job, place: Path, folder: Path) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
    """The newest checkpoint of a job, whose settings are still those that it was made with."""
    store = RunStore.open(place, readonly=True)
    differences = [] if forced(folder) else list(other_settings([job], folder, longer=True, versions=False))
    if differences:
        raise RunError(
            f"'{folder / 'config.yaml'}' does not say what the models were made with ({'; '.join(differences)}); "
            "restore it from a copy"
        )
    try:
        return store.newest_checkpoint()
    except RunError as error:
        raise RunError(
            f"the newest state of {job.name} is lost ({error}), and an older one would be another model; restore it "
            f"from a copy, or do its last rounds again with --resume {quoted(folder)}"
        ) from error


def _state(sim: Simulation, job: Job, name: str, selection: Selection | None) -> TensorDict:
    if len(sim.groups) > 1:
        raise ConfigError("a landscape needs clients of one architecture, but this run has several")
    if name == GLOBAL:
        state = sim.global_model()
        if state is None:
            raise ConfigError(f"{job.method.label} has no global model; name a client by its number")
        return state
    clients = sim.federation.num_clients
    if not name.isdecimal() or int(name) >= clients:
        raise ConfigError(f"no model '{name}'; there are '{GLOBAL}' and the clients 0 to {clients - 1}")
    if not sim.method.has_personal:
        raise ConfigError(f"{job.method.label} has no personal models; name '{GLOBAL}'")
    if selection is not None:
        chosen: TensorDict = selection.models((int(name),))[0]
        return chosen
    ((_, models),) = sim.personal_models((int(name),))
    found: TensorDict = models[0]
    return found


def _rows(sim: Simulation, clients: Sequence[int], part: Part, samples: int) -> Tensor:
    of = sim.federation.part("test" if part == "local" else part)
    ids = sorted(set(clients)) or range(sim.federation.num_clients)
    rows = np.unique(np.concatenate([np.asarray(of[i]) for i in ids]))
    if not len(rows):
        raise ConfigError(f"the clients have no {part} samples; take another part")
    if len(rows) > samples:
        rows = np.sort(generator(0, "landscape").choice(rows, size=samples, replace=False))
    return torch.from_numpy(rows)


def _window(marks: Sequence[tuple[float, float]], points: int) -> list[NDArray[np.float64]]:
    """Places along both directions: a square with the models inside, as both are in the same unit."""
    found = np.array(marks)
    middle, span = (found.max(0) + found.min(0)) / 2, float((found.max(0) - found.min(0)).max())
    half = span * (0.5 + MARGIN)
    return [np.linspace(m - half, m + half, points) for m in middle.tolist()]
