"""Files that survive a crash, or show damage: atomic replacement, lines, strict JSON, locks and manifests of folders.

A manifest has the size and sha256 of a folder's relevant files, so that readers detect damage. That of a finished run
covers all files from which its numbers are read, that of an export all its files; `manifest.json` is written last. A
folder without one is not finished, or was written by an older version.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tailorfl.errors import RunError

if TYPE_CHECKING:
    import pandas as pd


PART = ".part"  # ending of files that are still being written; the holder of the lock may delete them
LOCK_PATIENCE = 0.3  # seconds; a reader's short probe of the lock must not turn a writer away
AGAIN = "then run the same command again (tailorfl run: with --resume)"
REMEDIES = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG), f"free some space (or raise the quota), {AGAIN}"
    ),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        "choose a place that you may read and write, or change its permissions",
    ),
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
        "there is a file where a folder is needed, or a folder where a file is; choose another name",
    ),
    errno.ENOENT: "it does not exist and cannot be created; check the name or choose another",
    errno.ENAMETOOLONG: "choose a shorter name",
}
"""Advice on errors of the operating system, by number."""
MANIFEST = "manifest.json"


@contextlib.contextmanager
def reporting(path: Path, action: str) -> Iterator[None]:
    """Turn an OSError of the block into a RunError that names `path` and a remedy."""
    try:
        yield
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, f"check the disk, {AGAIN}")
        raise RunError(f"cannot {action} '{path}': {error.strerror or error}; {remedy}") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder that replaces `path` when the block succeeds.

    Readers of `path` see the old content or the complete new one, even after a power cut. If the block fails, `path` is
    unchanged and the temporary file is deleted. Raises RunError if the file system refuses.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    with reporting(path, "write"):
        try:
            yield part
            with part.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(part, path)
            sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):  # report the first error
                part.unlink(missing_ok=True)
            raise


def remove_left_over(folder: Path) -> None:
    """Delete the temporary files and folders of `replacing` whose process was killed while it wrote them."""
    for part in folder.glob(f".*.*{PART}"):
        number = part.name.removesuffix(PART).rpartition(".")[2]
        if number.isdigit() and not _is_alive(int(number)):
            with contextlib.suppress(OSError):  # another process was faster
                shutil.rmtree(part) if part.is_dir() else part.unlink()


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder next to `path` that replaces it, and its content, when the block succeeds.

    If the block fails, `path` is unchanged and the folder is deleted. Raises RunError if the file system refuses.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    parent = next(folder for folder in path.parents if folder.is_dir())
    with reporting(path, "write"):
        try:
            part.mkdir(parents=True)
            remove_left_over(path.parent)
            yield part
            if path.is_dir():
                shutil.rmtree(path)
            part.rename(path)
            sync_folder(path.parent)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            for folder in path.parents:  # those that were created for it
                if folder == parent:
                    break
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically (see `replacing`)."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def sha256(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal digits. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(value: Any) -> str:
    """Return the sha256 of a value as `encode` writes it, in hexadecimal digits."""
    return hashlib.sha256(encode(value).encode()).hexdigest()


def append_lines(path: Path, lines: Sequence[str], *, wait: bool = True) -> None:
    """Append lines in one write and wait until they are on the disk; if that fails, the file keeps its previous length.

    Without `wait` they survive the end of this process, but a power cut only after `sync`. Raises RunError if the file
    system refuses.
    """
    block = "".join(f"{line}\n" for line in lines).encode()
    with reporting(path, "append to"):
        is_new = not path.exists()
        with path.open("ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            try:
                view = memoryview(block)
                # an unbuffered write may write only a part, for instance as much as still fits on the disk
                while view:
                    view = view[file.write(view) :]
                if wait:
                    os.fsync(file.fileno())
            except BaseException:
                file.truncate(before)
                raise
        if is_new:
            sync_folder(path.parent)


def sync(path: Path) -> None:
    """Wait until what was appended to a file is on the disk. Raises RunError if the file system refuses."""
    with reporting(path, "append to"), path.open("ab") as file:
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[bytes]:
    """Return the complete lines of a file, [] if it does not exist, without a half-written last line."""
    with reporting(path, "read"):
        if not path.exists():
            return []
        return path.read_bytes().split(b"\n")[:-1]


def keep_lines(path: Path, lines: Sequence[bytes]) -> None:
    """Reduce a file, if it exists, to these of its lines, byte for byte."""
    content = b"".join(line + b"\n" for line in lines)
    with reporting(path, "read"):
        is_same = not path.exists() or path.stat().st_size == len(content)
    if not is_same:
        with replacing(path) as part:
            part.write_bytes(content)


def sync_folder(folder: Path) -> None:
    """Wait until a folder's entries are on the disk: only then a new or renamed file survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def encode(value: Any, *, indent: int | None = None) -> str:
    """Return `value` as strict JSON, floats exact (shortest text that reads back to the same float).

    JSON has no NaN and infinities: NaN becomes null, an infinity the string "Infinity" or "-Infinity". Numpy and torch
    scalars and arrays become numbers and lists, paths strings. Raises TypeError for anything else.
    """
    return json.dumps(_plain(value), indent=indent)


def encode_lines(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return each record as `encode` does, in one call for flat records without NaN and infinities (most of them)."""
    return [json.dumps(record if _is_plain(record) else _plain(record)) for record in records]


def _is_plain(record: Mapping[str, Any]) -> bool:
    """Return whether JSON can hold a record as it is: only strings, integers and finite floats by name."""
    for key, value in record.items():
        kind = type(value)
        if not ((kind is float and value - value == 0) or kind is int or kind is str) or type(key) is not str:
            return False
    return type(record) is dict


def decode(text: str | bytes) -> Any:
    """Return the value of a text written by `encode`; infinities become floats again, NaN becomes None."""
    try:
        return _restored(json.loads(text))
    except RecursionError as error:
        raise ValueError("its brackets nest too deeply") from error


def decode_lines(lines: Sequence[bytes]) -> list[Any]:
    """Return the value of every line written by `encode`; raises ValueError if one is damaged."""
    array = b"[" + b",".join(lines) + b"]"
    try:
        values: list[Any] = json.loads(array)
    except RecursionError as error:
        raise ValueError("its brackets nest too deeply") from error
    if len(values) != len(lines):
        raise ValueError(f"{len(lines)} lines hold {len(values)} values")
    return [_restored(value) for value in values] if b'Infinity"' in array else values


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return float(value) if math.isfinite(value) else f"{'-' if value < 0 else ''}Infinity"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numpy and torch, without importing them
        return _plain(value.tolist())
    raise TypeError(f"cannot store a {type(value).__name__} in JSON: {value!r}")


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if isinstance(value, str) and value in ("Infinity", "-Infinity"):
        return float(value)
    return value


class FolderLock:
    """An advisory lock on a folder (`flock`), held until `release` or any end of the process."""

    def __init__(self, folder: Path) -> None:
        """Take the lock. Raises RunError if it is held already or the folder cannot be written."""
        with reporting(folder, "lock"):
            self._file = (folder / ".lock").open("a+b", buffering=0)
            try:
                self._wait(folder)
                self._file.truncate(0)
                self._file.write(str(os.getpid()).encode())
            except BaseException:
                self._file.close()
                raise

    def _wait(self, folder: Path) -> None:
        deadline = time.monotonic() + LOCK_PATIENCE
        while not _try_lock(self._file.fileno(), fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                owner = os.pread(self._file.fileno(), 32, 0).decode() or "unknown"
                raise RunError(
                    f"process {owner} is writing to '{folder}'; wait until it ends, or choose another name"
                )
            time.sleep(0.02)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock. The file stays: deleting it could split later owners between two files."""
        with contextlib.suppress(ValueError):  # released before
            # Unlock explicitly: worker processes that were started meanwhile have the file open too.
            fcntl.flock(self._file.fileno(), fcntl.LOCK_UN)
        self._file.close()


def is_locked(folder: Path) -> bool:
    """Whether a living process holds the lock of a folder; False if there is no lock file to look at."""
    try:
        with (folder / ".lock").open("rb") as file:
            return not _try_lock(file.fileno(), fcntl.LOCK_SH)
    except OSError:
        return False


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def parsed(path: Path, lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the records in these lines of the file `path`. Raises RunError for a damaged one; names its line."""
    try:
        records = decode_lines(lines)
        if all(map(_is_record, records)):
            return records
    except ValueError:
        pass  # find the damaged line below
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(decode(line))
            if not _is_record(records[-1]):
                raise ValueError("it is not a record of a round")
        except ValueError as error:
            raise RunError(
                f"line {number} of '{path}' is damaged ({error}); delete it to continue without it"
            ) from error
    return records


def numbers(path: Path) -> list[int]:
    """Return the round of each record of a file, in its order. Raises RunError if one is damaged."""
    return [int(record["round"]) for record in parsed(path, read_lines(path))]


def table(path: Path) -> pd.DataFrame:
    """Return the records of a file, one row each; a column with only nulls, which stand for NaN, is of floats."""
    import pandas as pd

    frame = pd.DataFrame(parsed(path, read_lines(path)))
    if "round" not in frame:
        return pd.DataFrame({"round": pd.Series(dtype="int64")})
    for column in frame.columns[frame.isna().all()]:
        frame[column] = frame[column].astype("float64")
    return frame


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and type(value.get("round")) is int


def write_manifest(folder: Path, names: Sequence[str]) -> None:
    """Write the manifest of those of the files `names` that exist. Raises RunError if that fails."""
    files = {name: _facts(folder / name) for name in names if (folder / name).is_file()}
    write_text(folder / MANIFEST, encode({"files": files}, indent=1))


def renew_manifest(folder: Path) -> None:
    """Write the manifest of a folder again for the present state of the same files; do nothing if there is none."""
    if (folder / MANIFEST).is_file():
        write_manifest(folder, list(decode((folder / MANIFEST).read_bytes())["files"]))


def manifest_problems(folder: Path, needed: Collection[str] = ()) -> list[str]:
    """Return a sentence for each difference from the manifest; none if there is no manifest.

    A manifest that does not list every file of `needed` is damaged itself.
    """
    file = folder / MANIFEST
    if not file.exists():
        return []
    try:
        files: dict[str, dict[str, Any]] = decode(file.read_bytes())["files"]
        if lost := [name for name in needed if name not in files]:
            return [f"{MANIFEST} has lost {', '.join(lost)}"]
        return [text for name, facts in files.items() if (text := _problem(folder, name, facts))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST} cannot be read ({error!r})"]


def _problem(folder: Path, name: str, facts: dict[str, Any]) -> str | None:
    if not (folder / name).is_file():
        return f"{name} is missing"
    return None if _facts(folder / name) == facts else f"{name} was changed after it was written"


def _facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}
