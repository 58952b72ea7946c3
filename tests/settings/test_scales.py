"""Scales of a recipe: what each changes, in which order, and what is said before it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tailorfl.cli.main import app
from tailorfl.errors import ConfigError
from tailorfl.runs.folders import new_folder
from tailorfl.settings.loading import expand, load, read, recipes

TINY = """
name: tiny
data: {clients: 4, samples: 240}
model: {name: mlp, hidden: [8]}
method: local
seeds: 3
rounds: 9
variants:
  a: {rounds: 2}
  b: {}
scales:
  smoke: {settings: {rounds: 1, seeds: 1, train: {lr: 0.3}}}
  paper: {needs: a file that there is not, costs: a year, settings: {data: {clients: 8}}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    return file


def test_a_scale_changes_the_recipe_overrides_change_the_scale_and_variants_change_both(recipe: Path) -> None:
    base, smoke = load(recipe), load(recipe, ["train.lr=0.7"], scale="smoke")
    for overrides in (["scale=smoke", "train.lr=0.7"], {"scale": "smoke", "train": {"lr": 0.7}}):
        assert load(recipe, overrides) == smoke
    assert (base.rounds, base.scale, base.data.clients) == (9, None, 4)
    assert (smoke.rounds, smoke.seeds, smoke.scale, smoke.train.lr) == (1, (0,), "smoke", 0.7)
    assert {name: one.rounds for name, one in expand(smoke).items()} == {"a": 2, "b": 1}
    assert load(recipe, scale="paper").data.clients == 8


def test_a_written_scale_is_not_applied_again(recipe: Path, tmp_path: Path) -> None:
    changed = load(recipe, ["rounds=5"], scale="smoke")
    file = tmp_path / "config.yaml"
    file.write_text(changed.to_yaml())
    assert load(file) == changed
    assert load(file).rounds == 5


def test_each_scale_has_a_folder_of_its_own(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert new_folder(load(recipe)) == Path("runs/tiny")
    assert new_folder(load(recipe, scale="smoke")) == Path("runs/tiny-smoke")


def test_a_scale_that_there_is_not(recipe: Path) -> None:
    with pytest.raises(ConfigError, match="smoke"):
        load(recipe, scale="small")
    with pytest.raises(ConfigError, match="smoke"):
        load(recipe, ["scale=[smoke]"])
    with pytest.raises(ConfigError, match="has no scales"):
        load(None, scale="small")
    for settings in (3, [3], "rounds"):
        with pytest.raises(ConfigError, match=r"scales\.small\.settings.*should be a group"):
            load({"scales": {"small": {"settings": settings}}}, scale="small")
    recipe.write_text(TINY.replace("paper:", "papers:"))
    with pytest.raises(ConfigError, match="scales"):
        load(recipe)


@pytest.mark.slow
def test_what_a_scale_needs_is_said_first_and_it_is_resumed_by_the_same_command(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dry = CliRunner().invoke(app, ["reproduce", str(recipe), "--scale", "paper", "--dry-run", "--quiet"])
    assert dry.exit_code == 0, dry.output
    said = dry.stderr.splitlines()
    assert said[:3] == ["scale: paper", "needs: a file that there is not", "costs: a year"]
    again = ["reproduce", str(recipe), "--scale", "smoke", "--quiet", "--resume", "there"]
    for _ in range(2):
        done = CliRunner().invoke(app, again)
        assert done.exit_code == 0, done.output
    assert load(Path("there/config.yaml")).scale == "smoke"


def test_every_scale_of_every_recipe_is_a_valid_experiment() -> None:
    for name in recipes():
        settings = read(name)
        for scale in settings.get("scales", {}):
            assert expand(load(settings, scale=scale))
