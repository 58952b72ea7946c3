"""Checkpoints whose damage is always detected: a safetensors file and a JSON file with its size and sha256.

`checkpoint-000012.safetensors` holds the tensors after round 12, `checkpoint-000012.json` the metadata. The JSON file
is written last, so its existence shows that the tensors were complete; it also has a digest of its own content. Nothing
is pickled.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailorfl.errors import RunError
from tailorfl.runs.files import decode, digest_of, encode, replacing, reporting, sha256, write_text

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

KEPT = 2  # the newest may be damaged by the crash after which it is needed
_NAME = re.compile(r"checkpoint-(\d{6,})\.(json|safetensors)")
_OS_ERROR = re.compile(r"os error (\d+)")


def save(
    folder: Path,
    round: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    keep: Collection[int] | None = None,
) -> None:
    """Write the checkpoint of a round and delete all but the newest two, or all but it and those of the rounds `keep`.

    `tensors` may have any dtype, shape and device; `meta` is anything that `files.encode` accepts. Raises RunError if
    the file system refuses; older checkpoints are then intact.
    """
    path = _tensors_path(folder, round)
    with replacing(path) as part:
        write_tensors(part, tensors)
        facts = {"bytes": part.stat().st_size, "sha256": sha256(part)}
    about = {"round": round, **facts, "meta": meta}
    write_text(path.with_suffix(".json"), encode({**about, "digest": digest_of(about)}, indent=1))
    stored = rounds(folder)
    remove(folder, stored[:-KEPT] if keep is None else [r for r in stored if r != round and r not in keep])


def load_latest(folder: Path) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
    """Return round, tensors (on the CPU) and metadata of the newest intact checkpoint, or None if there never was one.

    A damaged checkpoint is skipped with a warning. Raises RunError if all of them are damaged.
    """
    damage: list[str] = []
    for round in reversed(rounds(folder)):
        try:
            return round, *load(folder, round)
        except RunError as error:
            damage.append(str(error))
            log.warning("skipping a damaged checkpoint in '%s': %s", folder, error)
    if damage:
        raise RunError(
            f"no usable checkpoint in '{folder}': {'; '.join(damage)}; restore the files from a copy, or move the "
            "folder away to start again"
        )
    return None


def load(folder: Path, round: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors (on the CPU) and metadata of the checkpoint of a round. Raises RunError if it is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = _tensors_path(folder, round)
    try:
        meta = _checked(path)["meta"]
        return load_file(path), meta
    except (KeyError, SafetensorError) as error:
        raise RunError(f"{path.stem} cannot be read ({error!r})") from error


def problems(folder: Path) -> dict[int, str]:
    """Return round -> sentence about the problem, for each damaged checkpoint of a folder."""
    sentences = {}
    for round in rounds(folder):
        try:
            _checked(_tensors_path(folder, round))
        except RunError as error:
            sentences[round] = str(error)
    return sentences


def remove(folder: Path, unwanted: list[int]) -> None:
    """Delete the checkpoints of these rounds, and tensors left without their JSON file by a crash."""
    with reporting(folder, "delete old checkpoints in"):
        for round in unwanted:  # the JSON file first, so that no crash leaves one without tensors
            _tensors_path(folder, round).with_suffix(".json").unlink(missing_ok=True)
        stored = set(rounds(folder))
        for path in folder.glob("checkpoint-*.safetensors"):
            match = _NAME.fullmatch(path.name)
            if match and int(match[1]) not in stored:
                path.unlink()


def remove_after(folder: Path, round: int) -> None:
    """Delete the checkpoints of rounds later than `round`."""
    remove(folder, [later for later in rounds(folder) if later > round])


def rounds(folder: Path) -> list[int]:
    """Return the rounds that have a checkpoint (its JSON file), ascending."""
    matches = (_NAME.fullmatch(path.name) for path in folder.glob("checkpoint-*.json"))
    return sorted(int(match[1]) for match in matches if match)


def _tensors_path(folder: Path, round: int) -> Path:
    return folder / f"checkpoint-{round:06d}.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file with tied tensors under every name; operating system errors become OSErrors."""
    from safetensors.torch import save_file

    plain: dict[str, Tensor] = {}
    written: set[int] = set()
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        # safetensors refuses tensors that share memory, such as slices of stacked clients and tied weights
        is_slice = copy.untyped_storage().nbytes() != copy.numel() * copy.element_size()
        plain[name] = copy.clone() if is_slice or copy.data_ptr() in written else copy
        written.add(copy.data_ptr())
    with system_errors():
        save_file(plain, path)


@contextmanager
def system_errors() -> Iterator[None]:
    """Turn operating system errors inside safetensors into OSErrors."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), str(error)) from error


def _checked(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's JSON file. Raises RunError unless both files are undamaged."""
    try:
        facts: dict[str, Any] = decode(path.with_suffix(".json").read_text(encoding="utf-8"))
        digest = facts.pop("digest", None)  # older folders have no digests
        if digest is not None and digest_of(facts) != digest:
            raise RunError(f"{path.with_suffix('.json').name} was changed after it was written")
        size = path.stat().st_size
        if size != facts["bytes"]:
            raise RunError(f"{path.name} has {size} bytes instead of {facts['bytes']}")
        if sha256(path) != facts["sha256"]:
            raise RunError(
                f"{path.name} has the right size ({size} bytes), but was changed after it was written"
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path.stem} cannot be read ({error!r})") from error
    return facts
