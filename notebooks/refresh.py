"""Runs the notebooks in empty folders and writes them back with the outputs that a reader wants.

python notebooks/refresh.py                        all of them
python notebooks/refresh.py from_zero_to_a_figure  one
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parent
STYLE = re.compile(r"\x1b\[[\d;]*m")
"""What makes a terminal's letters bold."""
SECONDS = 600
"""The longest that one cell may take."""


def executed(file: Path) -> NotebookNode:
    """Returns a notebook with the outputs that its cells have now; nothing is left of what it wrote.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails.
    """
    notebook = nbformat.read(file, 4)
    commands = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with TemporaryDirectory() as place:
        client = NotebookClient(
            notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": place}}
        )
        client.execute(env={**os.environ, "PATH": commands})  # `!tailorfl` is that of this environment
    return cleaned(notebook)


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """Returns the notebook without progress, warnings, times of execution and this machine's names."""
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = joined(out for out in cell.outputs if out.get("name") != "stderr")
            for out in cell.outputs:
                if "metadata" in out:
                    out.metadata = {}
                if "text" in out:
                    out.text = STYLE.sub("", out.text)
    return notebook


def joined(outputs: Iterable[NotebookNode]) -> list[NotebookNode]:
    """Returns outputs with what was printed in pieces as one."""
    found: list[NotebookNode] = []
    for out in outputs:
        if found and out.output_type == found[-1].output_type == "stream":
            found[-1].text += out.text
        else:
            found.append(out)
    return found


def main() -> None:
    """Refreshes the notebooks that the command names, or all."""
    for file in sorted(FOLDER.glob("*.ipynb")):
        if not sys.argv[1:] or file.stem in sys.argv[1:]:
            nbformat.write(executed(file), file)
            print(f"{file.name}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
