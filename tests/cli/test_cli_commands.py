"""Commands that do what they say: help, lists, running, resuming, reporting."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click
import pytest
import typer

import tailorfl
from cli.commands import invoke
from tailorfl.cli.main import COMMANDS, app

SMALL = ["data.clients=4", "data.samples=240", "rounds=2", "seeds=1", "model.hidden=[8]", "engine=sequential"]


pytestmark = pytest.mark.usefixtures("a_quick_estimate")


def test_help_has_every_command_in_its_group() -> None:
    text = invoke("--help").output
    places = [text.index(f"─ {group} ─") for group in COMMANDS]
    assert places == sorted(places)
    for group, end in zip(COMMANDS, [*places[1:], len(text)], strict=True):
        panel = text[text.index(f"─ {group} ─") : end]
        assert all(f"│ {name} " in panel for name in COMMANDS[group])


def test_every_argument_and_option_is_described_and_has_one_word() -> None:
    """What writes something takes -o; a result folder is RESULTS everywhere, and no value is called by its type."""
    commands, described = [typer.main.get_command(app)], 0
    while commands:
        command = commands.pop()
        context = click.Context(command)
        if isinstance(command, click.Group):
            # as a user's command is found
            commands += [c for n in command.commands if (c := command.get_command(context, n)) is not None]
            continue
        for parameter in command.params:
            described += 1
            assert getattr(parameter, "help", None), (command.name, parameter.name)
            metavar = parameter.make_metavar(context)
            assert not {"PATH", "FOLDER", "DIR", "DIRECTORY"} & set(metavar.split()), (command.name, metavar)
            if "Result folder" in parameter.help:  # type: ignore[attr-defined]
                assert "RESULTS" in metavar
            assert ("--out" in parameter.opts) == ("-o" in parameter.opts)
    assert described > 100


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("methods", ["ditto", "two models", "public set", "tailorfl show METHOD"]),
        ("data", ["digits", "bundled with scikit-learn", "heterogeneity = "]),
        ("models", ["cnn2", "hidden = [200]"]),
        ("partitions", ["dirichlet", "alpha = 0.3", "group = client"]),
        ("recipes", ["demo", "Personalized methods"]),
    ],
)
def test_lists_name_things_with_their_defaults(what: str, expected: list[str]) -> None:
    output = invoke("list", what).output
    assert all(text in output for text in expected)


def test_run_prints_the_table_and_leaves_a_result_that_reports_and_resumes() -> None:
    output = invoke("run", "method=local", *SMALL).output
    assert "LocalTrain" in output
    assert "runs/digits" in output
    assert Path("runs/digits/local/seed-0/summary.json").is_file()

    before = Path("runs/digits/comparison.csv").read_text()
    invoke("run", "--resume", "runs/digits", "--quiet")
    assert Path("runs/digits/comparison.csv").read_text() == before

    invoke("report", "runs/digits")
    assert "accuracy" in Path("runs/digits/report.md").read_text()
    page = Path("runs/digits/report.html").read_text()
    assert "<table>" in page
    assert "src=" not in page.partition("<script>")[0]


def test_a_report_of_variants_leaves_out_those_without_a_finished_job() -> None:
    invoke("run", "method=local", "--quiet", "--out", "two/a", *SMALL)
    Path("two/b").mkdir()
    shutil.copy("two/a/config.yaml", "two/b")
    Path("two/config.yaml").write_text("name: two\nvariants: {a: {}, b: {}, c: {}}\n")
    result = invoke("report", "two", "--json")
    assert [row["variant"] for row in json.loads(result.stdout)] == ["a"]
    for missing in ("variant b is left out: 'two/b' has no finished job", "variant c is left out"):
        assert f"warning: {missing}" in result.stderr
    Path("two/a/config.yaml").unlink()
    assert "'two' has no finished job" in invoke("report", "two", code=1).stderr


def test_second_run_takes_the_next_folder_and_overwrite_the_same() -> None:
    for _ in range(2):
        invoke("run", "method=local", "--quiet", *SMALL)
    assert sorted(path.name for path in Path("runs").iterdir()) == ["digits", "digits-2"]
    invoke("run", "method=local", "--quiet", "--overwrite", *SMALL)
    assert sorted(path.name for path in Path("runs").iterdir()) == ["digits", "digits-2"]


def test_progress_in_plain_lines_goes_to_stderr_and_can_be_silent() -> None:
    result = invoke("run", "method=local", "eval.every=1", *SMALL)
    assert "[1/1] LocalTrain seed 0: round 1/2, accuracy " in result.stderr
    assert "clients/s" in result.stderr
    assert "clients/s" not in result.stdout
    assert invoke("run", "method=local", "--quiet", *SMALL).stderr == ""


def test_reproduce_shows_published_numbers_beside_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(
        "name: tiny\nmethod: local\npublished:\n  source: a table\n  local: {mean: 0.25, clients: [0.5]}\n"
    )
    monkeypatch.setattr("tailorfl.settings.loading.recipes", lambda: {"tiny": recipe})
    for given in ("tiny", str(recipe)):  # a recipe by its name, or a file of one's own
        output = invoke("reproduce", given, "--quiet", *SMALL).output
        assert "source: a table" in output
        assert "0.2500" in output
        assert "client 0" in output


def test_dry_run_trains_nothing() -> None:
    output = invoke("compare", "--dry-run", *SMALL).output
    assert "nothing was trained" in output
    assert not Path("runs").exists()


def test_every_exported_name_exists_and_no_other() -> None:
    assert all(getattr(tailorfl, name) is not None for name in tailorfl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tailorfl.nothing  # noqa: B018
