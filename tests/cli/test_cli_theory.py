"""`tailorfl theory`: the papers' numbers on the terminal, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tailorfl.cli.main import app

COMMANDS = ["moreau", "fedclup", "fedclup-steps", "lambda-range", "minimax", "l2gd", "perfed-ckt"]


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def theory(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["theory", *arguments])


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("moreau --lam 1 --mu 1 --L 10", ["0.909091", "1.81818"]),
        ("fedclup --mu 1 --smoothness 10 --lam 1", ["0.55", "0.0909091", "0.8625", "66", "35", "94"]),
        ("fedclup --target 1e-3", ["until 0.001", "47"]),
        ("fedclup-steps --lam 1", ["35", "69", "23", "67", "48", "94", "32", "91"]),
        ("fedclup-steps --lam 10 --share .5", ["1/(lam + L) = 0.05", "0.004132", "248"]),
        ("lambda-range --rho 2 --n 200 --m 10 --mu 1 --smoothness 10 --R 0.05", ["0.0707107", "63999"]),
        ("lambda-range --rho 2 --n 200 --m 10 --mu 1 --smoothness 10 --R 0.5", ["apart", "at most", "0.08"]),
        ("minimax --n 200 --m 10 --R 0.05", ["0.003", "between"]),
        ("l2gd --lam 1 --mu 1 --L 10", ["0.0909091", "25.1191"]),
        ("l2gd --p 0.5", ["0.5", "138.155"]),
        ("perfed-ckt --beta 3 --sigma2 2 --nu 1.7 --v2 .5,1,2,4,.2", ["1.17647", "0.267834", "0.449996"]),
    ],
)
def test_commands_print_what_the_calculators_find(command: str, expected: list[str]) -> None:
    result = theory(*command.split())
    assert result.exit_code == 0, result.output
    assert all(text in result.output for text in expected), result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_defaults(command: str) -> None:
    assert theory(command).exit_code == 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("moreau --lam 0", "lam must be a positive number"),
        ("perfed-ckt --v2 1,x", "v2 must be numbers with commas between them, but is '1,x'"),
        ("fedclup-steps --share 0.5,1", "share must be numbers between 0 and 1, but is '0.5,1'"),
        ("moreu", "Did you mean 'moreau'"),
    ],
)
def test_mistakes_are_explained(command: str, message: str) -> None:
    result = theory(*command.split())
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_help_is_light_and_no_command_needs_torch() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from tailorfl.cli.main import app\n"
        "heavy = {'torch', 'pandas', 'matplotlib', 'sklearn'}\n"
        "assert 'moreau' in CliRunner().invoke(app, ['theory', '--help']).output\n"
        "print(sorted((heavy | {'numpy'}) & set(sys.modules)))\n"
        f"for command in {COMMANDS}:\n"
        "    assert CliRunner().invoke(app, ['theory', command]).exit_code == 0, command\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"]
