"""What a command leaves behind for the one place that reports errors and interruptions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass
class State:
    """Shared by all commands of a process."""

    debug: bool = False
    begun: Path | None = None
    """The file whose existence tells that what is under way can be continued."""
    again: str = ""
    """The command that continues it."""

    def under_way(self, begun: Path, again: str) -> None:
        """Note what is under way."""
        self.begun, self.again = begun, again

    def done(self) -> None:
        """Nothing is under way any more."""
        self.begun = None
