"""Commands that messages tell people to type take paths with spaces and quotes."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

import tailorfl
from tailorfl.errors import RunError
from tailorfl.printable import quoted
from tailorfl.report.result import ExperimentResult
from tailorfl.runs.folders import check_folder

BEFORE_A_PATH = re.compile(
    r"(--(resume|extend|out|keys)|tailorfl (check|compare|export|gains|predict|report)) $"
)
SOURCE = Path(tailorfl.__file__).parent


def unquoted(tree: ast.AST) -> list[int]:
    """Lines of f-strings that put something where a shell would read a path, and not through `quoted`."""
    found = []
    for text in ast.walk(tree):
        if not isinstance(text, ast.JoinedStr):
            continue
        for before, value in zip(text.values, text.values[1:], strict=False):
            if not (isinstance(before, ast.Constant) and BEFORE_A_PATH.search(str(before.value))):
                continue
            inner = value.value if isinstance(value, ast.FormattedValue) else None
            if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "quoted":
                continue
            found.append(text.lineno)
    return found


def test_the_rule_sees_what_it_is_for() -> None:
    assert unquoted(ast.parse("f'go on with --resume {folder}'")) == [1]
    assert not unquoted(ast.parse("f'go on with --resume {quoted(folder)}, or leave {folder}'"))


@pytest.mark.parametrize("path", ["my runs/a", "it's", "$HOME/a;b", "plain"])
def test_a_shell_reads_the_path_back(path: str) -> None:
    assert shlex.split(f"tailorfl run --resume {quoted(path)}")[-1] == path


def test_no_message_has_a_bare_path_in_a_command() -> None:
    joined = {"report/page/others.py"}  # several folders, each quoted before they are joined
    texts = {file: file.read_text(encoding="utf-8") for file in sorted(SOURCE.rglob("*.py"))}
    commands = re.compile(
        BEFORE_A_PATH.pattern.removesuffix("$")
    )  # few files have any, and parsing takes time
    wrong = {
        str(file.relative_to(SOURCE)): lines
        for file, text in texts.items()
        if commands.search(text) and (lines := unquoted(ast.parse(text)))
    }
    assert wrong.keys() <= joined, wrong


def test_what_is_said_of_a_folder_with_a_space_can_be_typed(tmp_path: Path) -> None:
    out = tmp_path / "my runs"
    config = tailorfl.load_config({"methods": ["local"], "seeds": 1})
    out.mkdir()
    (out / "config.yaml").write_text(config.to_yaml())
    for call in (
        lambda: check_folder(out, resume=False, overwrite=False),
        lambda: ExperimentResult.load(out),
    ):
        with pytest.raises(RunError) as error:
            call()
        words = shlex.split(str(error.value).partition("--resume ")[2])
        assert words[0].rstrip(".,") == str(out)
