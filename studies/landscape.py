"""Draw the loss around models of a run: on a plane through one, or on the plane through three.

    python -m studies.landscape runs/digits --method ditto --model global -o global.png

    L(a, b) = F(w + a u + b v)                                    F: the mean loss, in evaluation mode

**Random directions** (Li et al., "Visualizing the Loss Landscape of Neural Nets", NeurIPS 2018; PLGU, figure 7): u and
v are normal, each filter (row of a linear layer) rescaled to the norm of the same filter of w, and 0 for biases and
norm layers. So 1 on an axis is as far as the weights are large, whatever their scale.

**Three models** (FedOA, figure 3): w is the first, u points to the second, v is the part of the way to the third that
is orthogonal to u. Axes are in units of the distance between the first two; running statistics are the first model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from studies.program import program, run
from tailorfl.cli.arguments import AsJson, Imports
from tailorfl.cli.screen import print_json, say, stdout
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError, RunError, unknown
from tailorfl.evaluation.further_measures import mean_loss
from tailorfl.evaluation.selection import Selection
from tailorfl.models.functional import Model
from tailorfl.report.plots import DPI, literal
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.files import replacing, write_text
from tailorfl.runs.job import Job
from tailorfl.runs.trained_models import GLOBAL, restore
from tailorfl.training.keys import generator, torch_seed

app = program()
Vector = dict[str, Tensor]
Part = Literal["train", "val", "local"]
LEVELS = 14
"""Lines of equal height."""


@dataclass(frozen=True)
class Plane:
    """A point and two directions in the space of a model's parameters, and where known models lie."""

    origin: TensorDict
    u: Vector
    v: Vector
    points: tuple[tuple[float, float], ...] = ((0.0, 0.0),)
    """(a, b) of the models that the plane was made of."""

    def at(self, a: float, b: float) -> dict[str, Tensor]:
        """Return the state at w + a u + b v."""
        moved = {n: self.origin.get(n) + a * self.u[n] + b * self.v[n] for n in self.u}
        return {**{str(n): t for n, t in self.origin.items()}, **moved}


def random_plane(model: Model, state: TensorDict, seed: int = 0) -> Plane:
    """Return the plane along two filter-normalised random directions, a function of `seed`."""
    generator = torch.Generator().manual_seed(torch_seed(seed, "landscape"))
    u, v = (_filter_normalised(model, state, generator) for _ in range(2))
    return Plane(state, u, v)


def plane_through(model: Model, states: Sequence[TensorDict]) -> Plane:
    """Return the plane through three models.

    Raises:
        ConfigError: not three models, or three that lie on a line (two equal ones among them).
    """
    if len(states) != 3:
        raise ConfigError(f"a plane goes through three models, but {len(states)} were given")
    first, second, third = ({n: s.get(n).double() for n in model.parameters} for s in states)
    u = {n: second[n] - first[n] for n in first}
    to_third = {n: third[n] - first[n] for n in first}
    length = _dot(u, u) ** 0.5
    share = _dot(u, to_third) / max(length**2, 1e-300)
    v = {n: to_third[n] - share * u[n] for n in first}
    height = _dot(v, v) ** 0.5
    if length == 0 or height <= 1e-6 * length:
        raise ConfigError("the three models lie on a line, two of them may be equal; name three that differ")
    places = ((0.0, 0.0), (1.0, 0.0), (share, height / length))
    v = {n: t * (length / height) for n, t in v.items()}
    like = states[0]
    u, v = ({n: t.to(like.get(n).dtype) for n, t in d.items()} for d in (u, v))
    return Plane(like, u, v, places)


def losses(
    model: Model, plane: Plane, source: Source, rows: Tensor, a: Sequence[float], b: Sequence[float]
) -> NDArray[np.float64]:
    """Return the mean loss on samples `rows` at every (a, b), [b, a]."""
    return np.array([[mean_loss(model, plane.at(x, y), source, rows) for x in a] for y in b])


def _filter_normalised(model: Model, state: TensorDict, generator: torch.Generator) -> Vector:
    out = {}
    for name in model.parameters:
        weight = state.get(name)
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.dtype)
        if weight.ndim < 2:
            out[name] = torch.zeros_like(weight)
            continue
        own, given = (t.flatten(1).norm(dim=1) for t in (drawn, weight))
        out[name] = drawn * (given / own.clamp(min=1e-12)).reshape(-1, *[1] * (weight.ndim - 1))
    return out


def _dot(a: Vector, b: Vector) -> float:
    return float(sum((a[n] * b[n]).sum() for n in a))


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
        """Return a line a point: a, b, loss."""
        lines = [
            f"{x:.6g},{y:.6g},{self.loss[j, i]:.8g}"
            for j, y in enumerate(self.b.tolist())
            for i, x in enumerate(self.a.tolist())
        ]
        return "\n".join(["a,b,loss", *lines]) + "\n"

    def write(self, path: Path) -> list[Path]:
        """Write the picture and, beside it, the numbers as CSV; returns both. Raises RunError where that fails."""
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
    """Return the loss around one model of a run, or on the plane through three.

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
    restored = restore(folder, method, seed, source)
    job, sim, selection = restored.job, restored.sim, restored.selection
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


def contours(
    a: NDArray[np.float64],
    b: NDArray[np.float64],
    height: NDArray[np.float64],
    marks: Mapping[str, tuple[float, float]],
    path: Path,
    *,
    title: str,
) -> None:
    """Write lines of equal `height` [b, a], their spacing even on a logarithmic scale above the lowest point.

    Raises RunError where no height is finite, or the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    finite = height[np.isfinite(height)]
    if not len(finite):
        raise RunError("no loss on the grid is finite, so there is nothing to draw; take a smaller radius")
    low, high = float(finite.min()), float(finite.max())
    span = max(high - low, 1e-12)
    levels = low + span * np.geomspace(1e-2, 1.0, LEVELS)
    figure = Figure(figsize=(6.4, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    drawn = axes.contour(a, b, np.where(np.isfinite(height), height, high), levels=levels, cmap="viridis")
    axes.clabel(drawn, fontsize=7, fmt="%.3g")
    for number, (name, (x, y)) in enumerate(marks.items()):
        axes.plot(x, y, "oD^"[number % 3], color="#D55E00", markersize=7, label=literal(name))
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    axes.set_aspect("equal")  # both axes are in the same unit
    axes.set_title(literal(title), fontsize=9, wrap=True)
    axes.set_xlabel("a (along the first direction)")
    axes.set_ylabel("b (along the second direction)")
    with replacing(path) as part:
        figure.savefig(part, format="png", dpi=DPI)


@app.command()
def command(
    folder: Annotated[Path, typer.Argument(help="Result folder of an experiment.")],
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="global (the default) or a client's number; three of them: the plane through them."
        ),
    ] = None,
    method: Annotated[str | None, typer.Option(help="Label of the line; by default the first.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the job; by default the first.")] = None,
    part: Annotated[str, typer.Option(help="Samples: train, val or local (the own test part).")] = "train",
    radius: Annotated[float, typer.Option(help="Reach of the grid, in norms of the weights.")] = 1.0,
    points: Annotated[int, typer.Option(help="Places along each direction.")] = 21,
    samples: Annotated[int, typer.Option(help="At most so many samples.")] = 1000,
    out: Annotated[Path, typer.Option("--out", "-o", help="The PNG file; numbers go beside it.")] = Path(
        "landscape.png"
    ),
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Draw the loss around a model of a run, or on the plane through three of them."""
    found = landscape(
        folder,
        tuple(model or ("global",)),
        method=method,
        seed=seed,
        part=cast(Any, part),
        radius=radius,
        points=points,
        samples=samples,
    )
    files = found.write(out)
    if as_json:
        numbers = {"a": found.a.tolist(), "b": found.b.tolist(), "loss": found.loss.tolist()}
        print_json({"title": found.title, **numbers, "marks": found.marks, "files": [*map(str, files)]})
        return
    console = stdout()
    say(console, found.title)
    say(console, f"lowest {found.loss.min():.4g}, highest {found.loss.max():.4g}")
    written = ", ".join(map(str, files))
    say(console, f"written: {written}")


if __name__ == "__main__":
    run(app)
