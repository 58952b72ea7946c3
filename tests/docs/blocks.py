"""The code blocks of a Markdown file, and what it means to try a documented command."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer
from typer.testing import CliRunner

from tailorfl.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"(?:^<!-- not run: ([^>]+) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHELL = re.compile(r"[][{}*?!]")
"""What a shell would read as a pattern: zsh refuses such a word where no file fits it."""
EXPERIMENTS = ("run", "compare", "reproduce")
ELSEWHERE = ("pip", "git", "cd", "export", "source")
"""Commands of documents that are not ours to try."""
FILES_OF_HOSPITALS = "studies/heart_files.py"
SMALL = ("rounds=1", "seeds=1", "eval.every=0")
FEWER = {"data.name=cifar10": ("data.samples=6000",), "all_methods": ("data.samples=400", "data.clients=5")}
"""Word of an experiment -> settings for its dry run: images are decoded one by one, and methods are many."""
FILE = re.compile(r"# ([\w.-]+\.(?:py|yaml|toml))\n")
"""First line of a block that shows a file; such a block is written to that file, not run."""


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, text, the line it begins at, and why nobody tries it, if nobody does."""

    language: str
    text: str
    line: int
    left: str | None = None


def blocks(document: Path) -> list[Block]:
    """Return the fenced blocks of a document in order."""
    text = document.read_text(encoding="utf-8")
    return [Block(m[2], m[3], text.count("\n", 0, m.start(3)) + 1, m[1]) for m in FENCE.finditer(text)]


def file_of(block: Block) -> str | None:
    """Return the name of the file that a block shows, if it shows one."""
    named = FILE.match(block.text)
    return named[1] if named else None


def lines(block: Block) -> Iterator[str]:
    """Yield what is typed in a console block: the text behind each `$`, with its continued lines."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            yield line[2:]


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the commands of a console block as words."""
    for line in lines(block):
        yield from (shlex.split(part, comments=True) for part in line.split(" && "))


def unquoted(line: str) -> str:
    """A command without what stands in quotes or behind `#`."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|(?:^| )#.*", "", line)


def try_command(words: list[str]) -> None:
    """Try one documented command in the current folder.

    Experiments with --dry-run, and small where later blocks need their result folder.
    """
    while "=" in words[0]:  # a variable of the environment, as in PYTHONPATH=. tailorfl ...
        words = words[1:]
    program, arguments = words[0], words[1:]
    if program == "tailorfl":
        if arguments[0] in EXPERIMENTS and (arguments[1] != "--resume" or len(arguments) > 3):
            invoke([*arguments, *(f for word in arguments for f in FEWER.get(word, ())), "--dry-run"])
            if "--out" in arguments:
                invoke([*arguments, *SMALL, "--quiet"])
        elif arguments[0] == "pretrain" and "--resume" not in arguments:
            invoke([*arguments, "rounds=1", "data.samples=200", "--quiet"])
        elif arguments[0] == "bench":
            invoke([*arguments, "--seconds", "0.1"])
        else:
            invoke(arguments)
    elif program == "make":
        targets = (ROOT / "Makefile").read_text(encoding="utf-8")
        goals = [a for a in arguments if "=" not in a]
        assert all(re.search(rf"^{goal}:", targets, re.MULTILINE) for goal in goals), words
    elif program == "python" and arguments[0] == FILES_OF_HOSPITALS:  # what comes after it reads them
        subprocess.run([sys.executable, ROOT / arguments[0], *arguments[1:], "--look-alike"], check=True)
    elif program == "python" and arguments[:1] == ["-m"] and arguments[1].startswith("studies."):
        package = importlib.util.find_spec(arguments[1]).submodule_search_locations  # type: ignore[union-attr]
        module = importlib.import_module(f"{arguments[1]}.__main__" if package else arguments[1])
        invoke(arguments[2:], module.app)
    elif program == "python" and arguments[0] != "-m":
        assert (ROOT / arguments[0]).is_file(), words
    else:
        assert program in (*ELSEWHERE, "python"), f"nobody knows how to try {words}"


def refuse(block: Block) -> None:
    """Try a console block that shows an error: it is the one that is shown, up to `...` and line breaks."""
    (words,) = commands(block)
    result = CliRunner().invoke(app, words[1:])
    shown = block.text.partition("\nerror:")[2].partition("...")[0]
    assert result.exit_code != 0, block.text
    assert " ".join(shown.split()) in " ".join(result.output.split()), result.output


def invoke(arguments: list[str], app: typer.Typer = app) -> None:
    """Run a command in this process; data that are not on this machine are no failure."""
    result = CliRunner().invoke(app, arguments)
    missing = result.exit_code == 1 and "TAILORFL_DATA" in result.output
    assert missing or result.exit_code == 0, f"tailorfl {shlex.join(arguments)}\n{result.output}"
