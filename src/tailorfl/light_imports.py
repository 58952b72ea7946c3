"""Imports of libraries without what they would load beside: for processes of this program alone, such as a client's.

A program that merely uses this package imports them as they are.
"""

from __future__ import annotations

import sys


def import_tensordict() -> None:
    """Import tensordict without torch's compiler, for which it only marks three functions.

    That saves 85 MB and 0.7 s of computing.
    """
    if "tensordict" in sys.modules:
        return
    import torch.compiler

    marks = torch.compiler.allow_in_graph, torch.compiler.assume_constant_result
    torch.compiler.allow_in_graph = torch.compiler.assume_constant_result = lambda fn: fn
    try:
        import tensordict  # noqa: F401
    finally:
        torch.compiler.allow_in_graph, torch.compiler.assume_constant_result = marks


def import_pandas() -> None:
    """Import pandas without pyarrow, which it only looks for to know whether it is there.

    Texts are then objects of Python in columns of the same type `str`; parquet files are read and written all the
    same. That saves 35 MB.
    """
    if "pandas" in sys.modules or "pyarrow" in sys.modules:
        return
    sys.modules["pyarrow"] = None  # type: ignore[assignment]  # importing it fails, as where it is not installed
    try:
        import pandas  # noqa: F401
    finally:
        del sys.modules["pyarrow"]
