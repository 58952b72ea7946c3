"""What an error of a client function says to an engine."""

from __future__ import annotations


def unsupported(error: BaseException) -> bool:
    """Whether an error says that `vmap` lacks a rule for the model, rather than that the model is wrong."""
    return any(mark in str(error) for mark in ("vmap", "Batching rule", "batching rule", "functorch"))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, for a log, or its type where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
