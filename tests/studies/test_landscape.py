"""Planes through models: exact losses, filter norms, where models lie, and lines of equal loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from tensordict import TensorDict
from torch import nn
from typer.testing import CliRunner

import tailorfl
from studies.landscape import LEVELS, app, contours, landscape, losses, plane_through, random_plane
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError, RunError
from tailorfl.evaluation.further_measures import mean_loss
from tailorfl.models.functional import Model
from tailorfl.report.result import ExperimentResult
from tailorfl.runs.trained_models import restore

torch.manual_seed(0)
MODEL = Model.of(nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4)))
SOURCE = Source("tiny", torch.randn(20, 1, 4, 4), torch.randint(0, 4, (20,)), "classification", 4)
ROWS = torch.arange(20)


def test_random_directions_have_the_norm_of_every_filter_and_leave_biases_and_norms() -> None:
    state = MODEL.init(3)
    plane = random_plane(MODEL, state, seed=1)
    for direction in (plane.u, plane.v):
        for name in ("0.weight", "3.weight"):
            drawn, given = (t.flatten(1).norm(dim=1) for t in (direction[name], state[name]))
            torch.testing.assert_close(drawn, given)
        for name in ("0.bias", "1.weight", "1.bias", "3.bias"):
            assert not direction[name].any()
    again, other = random_plane(MODEL, state, seed=1), random_plane(MODEL, state, seed=2)
    assert torch.equal(plane.u["0.weight"], again.u["0.weight"])
    assert not torch.equal(plane.u["0.weight"], other.u["0.weight"])
    assert not torch.allclose(plane.u["0.weight"], plane.v["0.weight"])


def test_every_place_has_the_loss_of_the_model_that_lies_there() -> None:
    state = MODEL.init(3)
    plane = random_plane(MODEL, state, seed=1)
    found = losses(MODEL, plane, SOURCE, ROWS, [-1.0, 0.0, 0.5], [0.0, 2.0])
    assert found.shape == (2, 3)
    for j, b in enumerate((0.0, 2.0)):
        for i, a in enumerate((-1.0, 0.0, 0.5)):
            at = {n: state[n] + a * plane.u[n] + b * plane.v[n] for n in plane.u}
            at |= {n: state[n] for n in MODEL.buffers}
            with torch.no_grad():
                wanted = nn.functional.cross_entropy(MODEL(at, SOURCE.x), SOURCE.y)
            assert found[j, i] == pytest.approx(float(wanted), rel=1e-5)
    assert found[0, 1] == pytest.approx(mean_loss(MODEL, state, SOURCE, ROWS))


def test_the_plane_through_three_models_holds_them_at_their_distances() -> None:
    states = [MODEL.init(k) for k in range(3)]
    plane = plane_through(MODEL, states)
    flat = [torch.cat([s[n].flatten() for n in MODEL.parameters]) for s in states]
    for (a, b), state in zip(plane.points, states, strict=True):
        at = plane.at(a, b)
        for name in MODEL.parameters:
            torch.testing.assert_close(at[name], state[name], rtol=1e-4, atol=1e-5)
    unit = float((flat[1] - flat[0]).norm())
    places = np.array(plane.points)
    for k, m in ((0, 1), (0, 2), (1, 2)):
        apart = float((flat[k] - flat[m]).norm()) / unit
        assert np.linalg.norm(places[k] - places[m]) == pytest.approx(apart, rel=1e-4)
    assert float(sum((plane.u[n] * plane.v[n]).sum() for n in plane.u)) == pytest.approx(0.0, abs=1e-3)


def test_models_on_a_line_span_no_plane() -> None:
    one, other = MODEL.init(0), MODEL.init(1)
    between = TensorDict({n: (one[n] + other[n]) / 2 for n in MODEL.sizes}, batch_size=[])
    for states in ([one, one, other], [one, other, other], [one, other, between]):
        with pytest.raises(ConfigError, match="on a line"):
            plane_through(MODEL, states)
    with pytest.raises(ConfigError, match="three models, but 2"):
        plane_through(MODEL, [one, other])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ExperimentResult:
    settings = {
        "methods": ["local", "ditto"], "data": {"clients": 6}, "rounds": 4, "seeds": 1, "fraction": 0.5,
        "model": "logistic", "eval": {"every": 0},
    }  # fmt: skip
    return tailorfl.run(settings, out=tmp_path_factory.mktemp("landscape") / "run")


@pytest.mark.slow
def test_a_landscape_of_a_stored_run_has_its_models_losses(run: ExperimentResult, tmp_path: Path) -> None:
    found = landscape(run.path, ["global", "1", "4"], method="ditto", part="local", points=5)
    sim = restore(run.path, "ditto").sim
    assert sim.round == 4
    assert list(found.marks) == ["global", "client 1", "client 4"]
    assert found.loss.shape == (5, 5)
    rows = landscape(run.path, ["1"], method="ditto", part="val", points=3, radius=0.5)
    ((_, models),) = sim.personal_models((1,))
    own = torch.from_numpy(np.sort(sim.federation.val[1]))
    assert rows.loss[1, 1] == pytest.approx(
        mean_loss(sim.model, models[0], sim.federation.source, own), rel=1e-5
    )
    picture, numbers = found.write(tmp_path / "l.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    table = pd.read_csv(numbers)
    assert table.shape == (25, 3)
    assert table["loss"].to_numpy() == pytest.approx(found.loss.ravel(), rel=1e-6)
    arguments = [str(run.path), "--method", "ditto", "--points", "3", "-o", str(tmp_path / "g.png")]
    said = CliRunner().invoke(app, arguments)
    assert said.exit_code == 0, said.output
    assert "ditto, seed 0, global" in said.output
    printed = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    written = pd.read_csv(tmp_path / "g.csv")
    assert written["loss"].to_numpy() == pytest.approx(np.ravel(printed["loss"]), rel=1e-6)
    assert printed["marks"] == {"global": [0.0, 0.0]}


def test_what_cannot_be_drawn_is_refused_with_what_there_is(run: ExperimentResult, tmp_path: Path) -> None:
    for arguments, message in (
        ({"models": ["global"], "method": "local"}, "no global model"),
        ({"models": ["9"]}, "clients 0 to 5"),
        ({"models": ["1", "2"]}, "one model or three"),
        ({"models": ["1"], "method": "fedavg"}, "unknown method of the experiment 'fedavg'"),
        ({"models": ["1"], "seed": 7}, "no seed 7; it has 0"),
        ({"models": ["1"], "points": 1}, "points >= 2"),
        ({"models": ["1"], "part": "trian"}, "Did you mean .train"),
    ):
        with pytest.raises(ConfigError, match=message):
            landscape(run.path, **arguments)  # type: ignore[arg-type]
    (run.path / "empty").mkdir(exist_ok=True)
    (tmp_path / "config.yaml").write_text((run.path / "config.yaml").read_text())
    with pytest.raises(RunError, match="no checkpoint yet"):
        landscape(tmp_path, ["1"])


# -- lines of equal height -----------------------------------------------------------------------------------

A, B = np.linspace(-2, 2, 41), np.linspace(-1, 3, 41)
BOWL = A[None, :] ** 2 + (B[:, None] - 1) ** 2
"""[b, a], lowest at a = 0, b = 1, and 8 in the corners."""


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures as they are saved."""
    figures: list[Figure] = []
    real = Figure.savefig

    def savefig(figure: Figure, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        real(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def test_lines_lie_where_the_height_is_theirs_denser_towards_the_lowest_point(
    drawn: list[Figure], tmp_path: Path
) -> None:
    """Levels are 1 % to 100 % of the height of 8, each a fixed multiple of the one before; radii are their roots."""
    contours(A, B, BOWL, {"w": (0.5, 1.5), "v": (-1.0, 0.0)}, tmp_path / "plot.png", title="A bowl")
    (axes,) = drawn[0].axes
    lines = axes.collections[0]
    levels = np.asarray(lines.get_array())
    assert len(levels) == LEVELS
    np.testing.assert_allclose([levels[0], levels[-1]], [0.08, 8.0])
    np.testing.assert_allclose(levels[1:] / levels[:-1], 100 ** (1 / (LEVELS - 1)))
    for level, path in zip(levels, lines.get_paths(), strict=True):
        if level < 3.9:  # a whole circle within the picture
            radius = np.linalg.norm(path.vertices - [0.0, 1.0], axis=1)
            np.testing.assert_allclose(radius, np.sqrt(level), atol=0.03)
    marks = {str(line.get_label()): (line.get_xdata()[0], line.get_ydata()[0]) for line in axes.get_lines()}
    assert marks == {"w": (0.5, 1.5), "v": (-1.0, 0.0)}
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == list(marks)
    assert axes.get_aspect() == 1.0
    assert axes.get_title() == "A bowl"
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_not_finite_counts_as_the_highest(drawn: list[Figure], tmp_path: Path) -> None:
    broken = BOWL.copy()
    broken[0, 0] = np.nan
    broken[-1, -1] = np.inf
    contours(A, B, broken, {}, tmp_path / "plot.png", title="")
    levels = np.asarray(drawn[0].axes[0].collections[0].get_array())
    np.testing.assert_allclose(levels[-1], 8.0)
    with pytest.raises(RunError, match="no loss on the grid is finite"):
        contours(A, B, np.full_like(BOWL, np.nan), {}, tmp_path / "none.png", title="")
    assert not (tmp_path / "none.png").exists()


def test_a_plain_of_one_height_is_drawn_all_the_same(drawn: list[Figure], tmp_path: Path) -> None:
    contours(A, B, np.ones_like(BOWL), {}, tmp_path / "plot.png", title="of one height " * 20)
    assert (tmp_path / "plot.png").is_file()
    assert drawn[0].axes[0].title.get_wrap()  # else a long one leaves the picture
