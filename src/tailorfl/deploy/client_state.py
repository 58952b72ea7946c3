"""The files that a client keeps on its own disk.

    STATE/left.jsonl, left.head      the log of what has left (`release_log`)
    STATE/secret                     32 bytes from which private training draws batches and noise
    STATE/agreements/DIGEST.json     the agreement on a job, from which the client continues after its own restart
    STATE/<experiment>/<label>/seed-<s>/
        job.json                     the identity of the job; another one under the same name is refused
        checkpoint-000007.*          the private state after round 7, with a digest (`tailorfl.runs.checkpoints`)
        answer-000007.packet         the answer of this round, sent again if the same question comes again

There are at most two states: the last one that the server accepted, from which the client continues, and that of its
last answer. The next message tells the client whether it was accepted (`acked`). A state is written before the answer
leaves, each file completely or not at all, so a crash at any moment loses nothing that the server has accepted.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from tailorfl.deploy.membership import Agreement
from tailorfl.deploy.messages import Packet
from tailorfl.deploy.release_log import ReleaseLog
from tailorfl.errors import MessageError, RunError
from tailorfl.runs import checkpoints
from tailorfl.runs.files import (
    FolderLock,
    decode,
    encode,
    remove_left_over,
    replacing,
    reporting,
    write_text,
)

log = logging.getLogger(__name__)

NEVER = 0
"""Instead of a round: the client has never taken part."""
SECRET = 32
"""Number of bytes of the secret."""
_DIGEST = re.compile(r"[0-9a-f]{32}")


class StateFolder:
    """The folder of a client: its log, its secret, and its agreements."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._log: ReleaseLog | None = None

    @property
    def log(self) -> ReleaseLog:
        """The log of what has left this client; read again if another process wrote to it or removed the folder."""
        if self._log is None or not self._log.is_current:
            self._log = ReleaseLog(self.path)
        return self._log

    def seed(self, job: str) -> int:
        """Return the seed of this client's random numbers in a job, derived from the secret (created if missing)."""
        path = self.path / "secret"
        if not path.is_file():
            with reporting(self.path, "write to"):
                self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            with replacing(path) as part:
                part.touch(mode=0o600)
                part.write_bytes(secrets.token_bytes(SECRET))
        with reporting(path, "read"):
            secret = path.read_bytes()
        if len(secret) != SECRET:  # whoever can guess it can remove the noise
            raise RunError(
                f"'{path}' is damaged: it has {len(secret)} bytes instead of {SECRET}; restore it from a copy, or "
                "delete it for a new one"
            )
        return int.from_bytes(hashlib.sha256(secret + job.encode()).digest()[:8])

    def keep_agreement(self, digest: str, agreement: Agreement) -> None:
        """Store the agreement on a job."""
        path = self._agreement(digest)
        with reporting(path, "write"):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_text(path, encode(agreement.facts()))

    def agreement(self, digest: str) -> Agreement | None:
        """Return the agreement on a job, or None if it is missing or damaged."""
        path = self._agreement(digest)
        if not path.is_file():
            return None
        try:
            return Agreement.read(decode(path.read_text(encoding="utf-8")))
        except (ValueError, MessageError) as error:
            log.warning("'%s' is damaged, so the client asks the server for it again: %s", path, error)
            return None

    def _agreement(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise MessageError(f"a job's digest is expected, but the message has '{digest[:40]}'")
        return self.path / "agreements" / f"{digest}.json"

    def check_size(self, most: int) -> None:
        """Raise RunError if the folder holds more bytes than the policy allows; lists its contents."""
        sizes: Counter[str] = Counter()
        for path in self.path.rglob("*"):
            with suppress(FileNotFoundError):  # a temporary file of a client that shares the folder
                if path.is_file():
                    sizes[path.relative_to(self.path).parts[0]] += path.stat().st_size
        if sizes.total() > most:
            oldest = sorted(sizes, key=lambda name: (self.path / name).stat().st_mtime)
            listed = ", ".join(f"{name} ({sizes[name]:,} bytes)" for name in oldest[:10])
            raise RunError(
                f"'{self.path}' holds {sizes.total():,} bytes; max_disk of the policy is {most:,}: delete what you no "
                f"longer need (oldest first: {listed}), but keep left.jsonl and left.head"
            )


class ClientState:
    """The folder of one job; only one process has it at a time.

    Raises:
        RunError: another process has it.
        MessageError: it holds another job.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder = folder
        self._lock = FolderLock(folder)
        remove_left_over(folder)
        about = folder / "job.json"
        if not about.is_file():
            write_text(about, encode(dict(job), indent=1))
            return
        try:
            written = dict(decode(about.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            self.release()
            raise RunError(
                f"'{about}' is damaged, and without it nobody knows which job the private states in its folder belong "
                "to; restore it from a copy, or move the folder away and give the experiment another name"
            ) from error
        differing = sorted(key for key in {*job, *written} if job.get(key) != written.get(key))
        if differing:
            self.release()
            raise MessageError(
                f"'{'/'.join(folder.parts[-3:])}' in this client's state folder holds private states of another job "
                f"(different: {', '.join(differing)}); give the experiment another name, or move that folder away"
            )

    def release(self) -> None:
        """Release the folder for another process."""
        self._lock.release()

    @property
    def rounds(self) -> list[int]:
        """The rounds with a stored state, ascending."""
        return checkpoints.rounds(self.folder)

    def state(self, round: int) -> dict[str, Tensor] | None:
        """Return the state after a round by name, or None if it is missing or damaged."""
        if round not in self.rounds:
            return None
        try:
            return checkpoints.load(self.folder, round)[0]
        except RunError as error:
            log.warning("a private state is damaged: %s", error)
            return None

    def keep(self, round: int, state: Mapping[str, Tensor], answer: bytes, acked: int) -> None:
        """Write the state after a round and its answer; delete those of all rounds but this one and `acked`.

        Raises:
            RunError: the disk is full, or refuses; the previous files are intact.
        """
        checkpoints.save(self.folder, round, state, {"acked": acked}, keep=(acked,))
        with replacing(self._answer(round)) as part:
            part.write_bytes(answer)
        for path in self.folder.glob("answer-*.packet"):
            if path != self._answer(round):
                path.unlink()

    def answer(self, round: int) -> Packet | None:
        """Return the answer of a round, or None if it is missing or damaged."""
        path = self._answer(round)
        if not path.is_file():
            return None
        try:
            return Packet.decoded(path.read_bytes())
        except MessageError as error:
            log.warning("'%s' is damaged, so the client trains its round again: %s", path, error)
            return None

    def _answer(self, round: int) -> Path:
        return self.folder / f"answer-{round:06d}.packet"
