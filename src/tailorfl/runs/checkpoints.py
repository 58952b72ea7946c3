"""Checkpoints that are either whole or noticed: a safetensors file and a JSON file with its size and sha256.

`checkpoint-000012.safetensors` holds the tensors after round 12, `checkpoint-000012.json` the meta data. The
JSON file is written last, so its existence says that the tensors were complete; it has a digest of its own content
too. Nothing is pickled.
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

KEPT = 2  # the newest may be damaged by the very crash that makes it needed
_NAME = re.compile(r"checkpoint-(\d{6,})\.(json|safetensors)")
_OS_ERROR = re.compile(r"os error (\d+)")


def save(
    folder: Path,
    round: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    keep: Collection[int] | None = None,
) -> None:
    """Write the checkpoint of a round and delete all but the newest two, or but it and those of the rounds `keep`.

    `tensors` of any dtype, shape and place, `meta` what `files.encode` accepts. Raises RunError where the
    file system refuses; older checkpoints are then intact.
    """
    path = _tensors_path(folder, round)
    with replacing(path) as part:
        write_tensors(part, tensors)
        facts = {"bytes": part.stat().st_size, "sha256": sha256(part)}
    about = {"round": round, **facts, "meta": meta}
    write_text(path.with_suffix(".json"), encode({**about, "digest": digest_of(about)}, indent=1))
    there = rounds(folder)
    remove(folder, there[:-KEPT] if keep is None else [r for r in there if r != round and r not in keep])


def load_latest(folder: Path) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
    """Round, tensors (on the CPU) and meta data of the newest sound checkpoint, None if there never was one.

    A damaged checkpoint is passed over with a warning. Raises RunError if all of them are damaged.
    """
    damage: list[str] = []
    for round in reversed(rounds(folder)):
        try:
            return round, *load(folder, round)
        except RunError as error:
            damage.append(str(error))
            log.warning("passing over a damaged checkpoint in '%s': %s", folder, error)
    if damage:
        raise RunError(
            f"no usable checkpoint in '{folder}': {'; '.join(damage)}; "
            "restore the files from a copy, or move the folder away to start anew"
        )
    return None


def load(folder: Path, round: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors (on the CPU) and meta data of the checkpoint of a round. Raises RunError where it is not sound."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = _tensors_path(folder, round)
    try:
        facts = decode(path.with_suffix(".json").read_text(encoding="utf-8"))
        problem = _changed(path, facts) or _damage(path, facts["bytes"], facts["sha256"])
        if problem is None:
            return load_file(path), facts["meta"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise RunError(f"{path.stem} cannot be read ({error!r})") from error
    raise RunError(problem)


def problems(folder: Path) -> dict[int, str]:
    """Return what is wrong with the checkpoints of a folder, a sentence for the round of each that is damaged."""
    found = {}
    for round in rounds(folder):
        path = _tensors_path(folder, round)
        try:
            facts = decode(path.with_suffix(".json").read_text(encoding="utf-8"))
            problem = _changed(path, facts) or _damage(path, facts["bytes"], facts["sha256"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"{path.stem} cannot be read ({error!r})"
        if problem:
            found[round] = problem
    return found


def remove(folder: Path, unwanted: list[int]) -> None:
    """Delete the checkpoints of these rounds, and tensors left without their JSON file by a crash."""
    with reporting(folder, "delete old checkpoints in"):
        for round in unwanted:  # the JSON file first, so that no crash leaves one that points to nothing
            _tensors_path(folder, round).with_suffix(".json").unlink(missing_ok=True)
        kept = set(rounds(folder))
        for path in folder.glob("checkpoint-*.safetensors"):
            match = _NAME.fullmatch(path.name)
            if match and int(match[1]) not in kept:
                path.unlink()


def remove_after(folder: Path, round: int) -> None:
    """Delete the checkpoints of rounds later than `round`."""
    remove(folder, [later for later in rounds(folder) if later > round])


def rounds(folder: Path) -> list[int]:
    """Return rounds of which there is a checkpoint, ascending: those that have a JSON file."""
    found = (_NAME.fullmatch(path.name) for path in folder.glob("checkpoint-*.json"))
    return sorted(int(match[1]) for match in found if match)


def _tensors_path(folder: Path, round: int) -> Path:
    return folder / f"checkpoint-{round:06d}.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, tied tensors under every name; errors of the operating system become OSErrors."""
    from safetensors.torch import save_file

    plain: dict[str, Tensor] = {}
    written: set[int] = set()
    for name, tensor in tensors.items():
        there = tensor.detach().cpu().contiguous()
        # safetensors refuses tensors that share memory, as slices of a stack of clients and tied weights do
        is_slice = there.untyped_storage().nbytes() != there.numel() * there.element_size()
        plain[name] = there.clone() if is_slice or there.data_ptr() in written else there
        written.add(there.data_ptr())
    with system_errors():
        save_file(plain, path)


@contextmanager
def system_errors() -> Iterator[None]:
    """Turn the errors of safetensors that are the operating system's into OSErrors."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), str(error)) from error


def _changed(path: Path, facts: dict[str, Any]) -> str | None:
    """Return what is wrong with the meta data of a checkpoint; files of before there were digests have none."""
    digest = facts.pop("digest", None)
    if digest is None or digest_of(facts) == digest:
        return None
    return f"{path.with_suffix('.json').name} is not what was written"


def _damage(path: Path, size: int, digest: str) -> str | None:
    """Return what is wrong with a tensor file, None if it is as it was written."""
    found = path.stat().st_size
    if found != size:
        return f"{path.name} has {found} bytes instead of {size}"
    if sha256(path) != digest:
        return f"{path.name} has {size} bytes as it should, but not the ones that were written"
    return None
