"""Changes to the records of a run that is to go on otherwise than it was begun. The store must be open to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tailorfl.errors import RunError
from tailorfl.runs.files import decode_lines, encode, encode_lines, read_lines, replacing, write_text
from tailorfl.runs.store import RunStore


def record_of(store: RunStore, round: int) -> dict[str, Any]:
    """Returns the record of a round, as it was written. Raises RunError if there is none."""
    for record in decode_lines(read_lines(store.path / "rounds.jsonl")):
        if record["round"] == round:
            return dict(record)
    raise RunError(f"'{store.path}' has no record of round {round}; restore rounds.jsonl from a copy")


def amend(
    store: RunStore, round: int, record: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]
) -> None:
    """Replaces the record of the last round, and all that is recorded of clients in it, each file at once."""
    for name, records in (("clients.jsonl", clients), ("rounds.jsonl", [record])):
        lines = read_lines(store.path / name)
        before = [line for line, old in zip(lines, decode_lines(lines), strict=True) if old["round"] != round]
        with replacing(store.path / name) as part:
            part.write_bytes(b"".join(line + b"\n" for line in before))
            with part.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in encode_lines(records))


def reconfigure(store: RunStore, config: Mapping[str, Any]) -> None:
    """Replaces the configuration of a run."""
    write_text(store.path / "config.json", encode(config, indent=1))
