"""Models, methods and data of one's own, by `module:name`; and recipes that would run code by surprise."""

from __future__ import annotations

import functools
import itertools
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import tailorfl
from runs.killing import ended, forked
from tailorfl import modules
from tailorfl.cli.main import app
from tailorfl.errors import ConfigError
from tailorfl.methods.ditto import Ditto
from tailorfl.report.progress import looked_at

MINE = '''
    """Somebody's own model, method and data."""
    from pathlib import Path

    import torch
    from torch import nn

    import tailorfl
    from tailorfl.data.own import from_tensors
    from tailorfl.methods.ditto import Ditto

    Path("imported").touch()


    def small(input_shape, outputs, *, width=3):
        return nn.Sequential(nn.Flatten(), nn.Linear(2, width), nn.Linear(width, outputs))


    class MyDitto(Ditto):
        """Ditto with another pull."""
        lam: float = 0.25


    @tailorfl.register
    class Registered(Ditto):
        """Known by its name."""
        name = "doors_registered"


    def blobs(clients: int = 3, shift: float = 1.0):
        owner = torch.arange(20 * clients) % clients
        y = torch.arange(20 * clients) // clients % 2
        x = torch.randn(len(y), 2, generator=torch.Generator().manual_seed(0)) + shift * y[:, None]
        return from_tensors(x, y, clients=owner.numpy(), name="blobs")


    DATA = blobs(2)
    number = 3
'''
SMALL = ["rounds=1", "seeds=1", "engine=sequential"]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module in the current folder that nobody has named or imported yet."""
    name = f"mine_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MINE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(modules, "_NAMED", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    import tailorfl.core.method as registry

    monkeypatch.setattr(registry, "_REGISTRY", registry.all_methods())
    yield name
    sys.modules.pop(name, None)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_command_line_takes_model_method_and_data_of_ones_own(mine: str) -> None:
    settings = [f"model={mine}:small", "model.width=4", f"method={mine}:MyDitto", f"data={mine}:blobs"]
    result = invoke("run", *settings, "data.options.clients=4", *SMALL, "--out", "out", "--quiet")
    assert result.exit_code == 0, result.output
    found = tailorfl.ExperimentResult.load("out")
    assert list(found.table.index) == ["MyDitto"]
    summary, _ = found.jobs[0]
    assert summary["clients"] == 4
    # width 4: (2 + 1) 4 + (4 + 1) 2 scalars
    assert summary["trained_scalars"] == 2 * 22
    assert "lam: 0.25" in Path("out/config.yaml").read_text()


@pytest.mark.parametrize("command", ["run", "compare"])
def test_import_of_a_file_lets_a_recipe_name_what_it_holds(mine: str, command: str) -> None:
    Path("recipe.yaml").write_text(
        f"model: '{mine}:small'\nmethods: [doors_registered, '{mine}:MyDitto']\ndata: '{mine}:DATA'\n"
    )
    refused = invoke(command, "recipe.yaml", *SMALL, "--dry-run")
    assert refused.exit_code == 2
    assert not Path("imported").exists()
    taken = invoke(command, "recipe.yaml", *SMALL, "--import", f"{mine}.py", "--dry-run")
    assert taken.exit_code == 0, taken.output
    assert "doors_registered" in taken.output
    assert Path("imported").exists()


def test_python_takes_them_too(mine: str) -> None:
    with pytest.raises(ConfigError, match=rf"--import {mine}"):
        tailorfl.run({"model": f"{mine}:small", "data": f"{mine}:blobs"}, rounds=1, seeds=1)
    recipe = {"model": f"{mine}:small", "data": f"{mine}:blobs", "method": "doors_registered"}
    result = tailorfl.run(recipe, imports=[f"{mine}.py"], rounds=1, seeds=1, out="python")
    assert list(result.table.index) == ["doors_registered"]
    both = tailorfl.compare(recipe | {"method": "local"}, rounds=1, seeds=1, out="compared")
    assert list(both.table.index) == ["local"]
    modules._NAMED.clear()  # keyword arguments are written by who runs them
    mines = {"data": f"{mine}:blobs", "model": {"name": f"{mine}:small"}, "methods": [f"{mine}:MyDitto"]}
    assert list(tailorfl.run(**mines, rounds=1, seeds=1).table.index) == ["MyDitto"]


def test_a_recipe_takes_methods_that_are_objects(mine: str) -> None:
    Path("recipe.yaml").write_text(f"data: '{mine}:blobs'\nmodel: logistic\nrounds: 1\nseeds: 1\n")
    line = {"name": Ditto(lam=0.5), "label": "pulled"}
    results = tailorfl.reproduce("recipe.yaml", methods=[line], imports=[f"{mine}.py"])
    assert list(results[""].table.index) == ["pulled"]
    assert results[""].config.methods[0].options["lam"] == 0.5


def test_a_factory_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="partial"):
        tailorfl.run(model=functools.partial(dict), rounds=1)


@pytest.mark.parametrize("path", ["given:0123456789ab", "__main__:net"])
def test_what_a_script_has_passed_is_to_be_passed_again(path: str) -> None:
    with pytest.raises(ConfigError, match=path) as refused:
        modules.find(path)
    assert "--import" not in str(refused.value), "that would import the command itself"


BY_SURPRISE = [
    *itertools.product(
        ["run", "reproduce"],
        [
            "model: 'shutil:rmtree'",
            "model: {name: 'shutil:rmtree'}",
            "model: {name: mlp, larger: ['shutil:rmtree']}",
            "method: 'shutil:rmtree'",
            "methods: [{name: local, model: {name: 'shutil:rmtree'}}]",
            "data: 'shutil:rmtree'",
            "data: {name: digits, public: 'shutil:rmtree'}",
            "variants: {a: {model: 'shutil:rmtree'}}",
            "model: 'torch.hub:load'",
            "model: 'MINE:small'",
        ],
    ),
    *itertools.product(
        ["compare", "advise", "bench", "pretrain"], ["model: 'shutil:rmtree'", "data: 'MINE:blobs'"]
    ),
]


@pytest.mark.parametrize(("command", "setting"), BY_SURPRISE)
def test_a_recipe_runs_no_code_by_surprise(
    mine: str, command: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    monkeypatch.setattr(shutil, "rmtree", lambda *given, **options: called.append(given))
    Path("recipe.yaml").write_text(setting.replace("MINE", mine) + "\n")
    known = set(sys.modules)
    result = invoke(command, "recipe.yaml")
    assert result.exit_code in (1, 2), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert not called
    assert mine not in set(sys.modules) - known
    assert not Path("runs").exists()


def test_a_result_folder_runs_no_code_by_surprise(mine: str) -> None:
    assert invoke("run", f"model={mine}:small", f"data={mine}:blobs", "method=local", *SMALL).exit_code == 0
    modules._NAMED.clear()
    refused = invoke("run", "--resume", "runs/" + next(Path("runs").iterdir()).name)
    assert refused.exit_code == 2
    assert f"--import {mine}" in refused.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model=shutil:rmtree"], "Python's standard library"),
        (["--import", "nowhere.py"], "there is no such file"),
        (["--import", "no_such_module_here"], "No module named"),
        (["--import", "numpy.py"], "another module is called 'numpy'"),
        (["--import", "broken.py"], "ZeroDivisionError"),
        (["model=MINE:missing"], "has no 'missing', only"),
        (["model=MINE:number"], "cannot be called"),
        (["model=MINE:MyDitto"], "cannot be called"),
        (["method=MINE:small"], "should be a subclass of tailorfl.Method"),
        (["data=MINE:number"], "should be a function that returns a tailorfl.Source"),
        (["data=MINE:small"], "needs the option 'input_shape'"),
        (["method=MINE:MyDitto", "method.lamb=3"], "Did you mean 'lam'?"),
    ],
)
def test_what_cannot_be_used_is_said(mine: str, words: list[str], said: str) -> None:
    Path("numpy.py").write_text("")
    Path("broken.py").write_text("1 / 0\n")
    result = invoke("run", *(word.replace("MINE", mine) for word in words))
    assert result.exit_code in (1, 2)
    assert said in result.output


def test_console_script_finds_modules_of_the_current_folder(mine: str) -> None:
    """Unlike `python -m`, the command `tailorfl` does not look into the current folder for modules."""

    def outside() -> None:
        sys.path = [place for place in sys.path if place not in ("", str(Path.cwd()))]

    words = ["run", f"data={mine}:blobs", "model=logistic", "method=local", "--dry-run"]
    code, said = ended(*forked(*words, before=outside))
    assert code == 0, said


class Watcher(tailorfl.Observer):
    """Remembers what it sees."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.done: list[str] = []

    def round_done(self, job: tailorfl.Job, done: tailorfl.RoundResult) -> None:
        self.rounds.append(done.round)

    def job_done(self, job: tailorfl.Job, summary: dict[str, object]) -> None:
        self.done.append(f"{job.method.label} {job.seed}")


def test_an_observer_of_ones_own_and_the_display(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"data": {"samples": 120, "clients": 2}, "model": "logistic", "rounds": 2, "seeds": 1}

    def run(**options: object) -> str:
        tailorfl.run(method="local", **settings, **options)  # type: ignore[arg-type]
        return capfd.readouterr().err

    watcher = Watcher()
    assert run(observer=watcher) == ""
    assert (watcher.rounds, watcher.done) == ([0, 1], ["local 0"])
    assert "LocalTrain seed 0: round 2/2, accuracy" in run(observer=watcher, progress=True)
    assert watcher.rounds == [0, 1] * 2
    assert run() == ""  # nobody looks on
    assert not looked_at()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert looked_at()
    assert "LocalTrain seed 0: round 2/2" in run()
    assert run(progress=False) == ""


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (tailorfl.run, "observer", Watcher),  # the class instead of one
        (tailorfl.run, "imports", "net.py"),
        (tailorfl.reproduce, "recipe", None),
        (tailorfl.bench, "seconds", "5"),
        (tailorfl.tune, "budget", 2.5),
        (tailorfl.tune, "out", 5),
        (tailorfl.tune, "seed", -1),
        (tailorfl.tune, "workers", 0),
    ],
)
def test_an_argument_of_another_kind_is_named_before_anything_is_written(
    function: Callable[..., object], name: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^{name} "):
        function(**{name: value})
    assert not list(tmp_path.iterdir())
