"""`tailorfl theory`: the papers' numbers on the terminal, without torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from cli.commands import invoke

DP = "--samples 500 --batch 10 --rounds 10 --trainings 2"
NEEDS_OPACUS = pytest.mark.skipif(
    find_spec("opacus") is None, reason="accounting needs opacus: pip install 'tailorfl[privacy]'"
)
COMMANDS = ["moreau", "fedclup", "fedclup-steps", "lambda-range", "minimax", "l2gd", "perfed-ckt"]


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
        pytest.param(
            f"dp {DP} --target-epsilon 3",
            ["rate q 0.02", "steps 1,000", "epsilon by prv 3.9", "epsilon by rdp 4.3", "Poisson samples",
             "noise for epsilon 3 by prv 1.15", "noise for epsilon 3 by rdp 1.21", "zero-out"],
            marks=NEEDS_OPACUS,
        ),
        pytest.param(
            f"dp {DP} --sampling shuffle",
            ["rate q 1", "steps 20", "epsilon by prv 28.4", "passes of shuffled batches"],
            marks=NEEDS_OPACUS,
        ),
    ],
)  # fmt: skip
def test_commands_print_what_the_calculators_find(command: str, expected: list[str]) -> None:
    output = re.sub(r"[ │]+", " ", invoke("theory", *command.split()).output)
    assert all(text in output for text in expected), output


def test_help_is_light_and_no_command_needs_torch() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from tailorfl.cli.main import app\n"
        "heavy = {'torch', 'pandas', 'matplotlib', 'sklearn'}\n"
        "assert 'compare' in CliRunner().invoke(app, ['--help']).output\n"
        "assert 'moreau' in CliRunner().invoke(app, ['theory', '--help']).output\n"
        "print(sorted((heavy | {'numpy'}) & set(sys.modules)))\n"
        f"for command in {COMMANDS}:\n"
        "    assert CliRunner().invoke(app, ['theory', command]).exit_code == 0, command\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"]


@NEEDS_OPACUS
def test_several_gradients_of_a_batch_cost_more() -> None:
    said = [invoke("theory", "dp", "--gradients", count, "--json").output for count in (1, 2)]
    once, twice = (json.loads(text)["values"]["epsilon by rdp"] for text in said)
    assert twice > 2 * once
