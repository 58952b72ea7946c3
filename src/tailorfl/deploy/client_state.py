"""What a client keeps on its own disk of one job: private states by round, and its last answer.

    STATE/<experiment>/<label>/seed-<s>/
        job.json                     what the job is; another one under the same name is refused
        checkpoint-000007.*          the private state after round 7, with a digest (`tailorfl.runs.checkpoints`)
        answer-000007.packet         the answer that was sent of it, sent again if the same question comes again

There are two states at most: the one that the server accepted last, from which the client goes on, and the one of its
last answer. Whether that was accepted the client learns from the next message (`acked`). A state is written before the
answer leaves, each file whole or not at all, so a crash at any moment loses nothing that the server has accepted.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tailorfl.deploy.codec import Packet
from tailorfl.errors import MessageError, RunError
from tailorfl.privacy.ledger import Use, Uses
from tailorfl.runs import checkpoints
from tailorfl.runs.files import FolderLock, decode, encode, replacing, write_text

log = logging.getLogger(__name__)

NEVER = 0
"""In place of a round: the client has never taken part."""


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
        about = folder / "job.json"
        if not about.is_file():
            write_text(about, encode(dict(job), indent=1))
            return
        try:
            held = dict(decode(about.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            self.release()
            raise RunError(
                f"'{about}' is damaged, which says whose private states lie beside it; bring it back from a copy, or "
                "move that folder away and begin under another name"
            ) from error
        differing = sorted(key for key in {*job, *held} if job.get(key) != held.get(key))
        if differing:
            self.release()
            raise MessageError(
                f"'{'/'.join(folder.parts[-3:])}' of this client's state holds private states of another job (other: "
                f"{', '.join(differing)}); give the experiment another name, or move that folder away"
            )

    def release(self) -> None:
        """Let another process have the folder."""
        self._lock.release()

    @property
    def rounds(self) -> list[int]:
        """The rounds of which there are states, ascending."""
        return checkpoints.rounds(self.folder)

    def state(self, round: int) -> dict[str, Tensor] | None:
        """Return the state after a round by name; None where there is none that is sound."""
        if round not in self.rounds:
            return None
        try:
            return checkpoints.load(self.folder, round)[0]
        except RunError as error:
            log.warning("a private state is damaged: %s", error)
            return None

    def keep(self, round: int, state: Mapping[str, Tensor], answer: bytes, acked: int) -> None:
        """Write the state after a round and the answer that was given; drop all rounds but it and `acked`.

        Raises:
            RunError: the disk is full, or refuses; what was there before is intact.
        """
        checkpoints.save(self.folder, round, state, {"acked": acked}, keep=(acked,))
        with replacing(self._answer(round)) as part:
            part.write_bytes(answer)
        for path in self.folder.glob("answer-*.packet"):
            if path != self._answer(round):
                path.unlink()

    def answer(self, round: int) -> Packet | None:
        """Return the answer that was given in a round; None where it is not there, or damaged."""
        path = self._answer(round)
        if not path.is_file():
            return None
        try:
            return Packet.decoded(path.read_bytes())
        except MessageError as error:
            log.warning("'%s' is damaged, so its round is trained once more: %s", path, error)
            return None

    def _answer(self, round: int) -> Path:
        return self.folder / f"answer-{round:06d}.packet"


def uses_as_facts(uses: Uses) -> list[list[float]]:
    """Return uses as JSON can hold them: [rate, noise, gradients, how many]."""
    return [[use.rate, use.noise, use.gradients, count] for use, count in sorted(uses.items())]


def uses_from_facts(facts: Any) -> Uses:
    """Return what `uses_as_facts` was given. Raises MessageError where it is something else."""
    try:
        found: Uses = Counter({Use(float(q), float(sigma), int(r)): int(n) for q, sigma, r, n in facts})
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"uses of private samples cannot be read: {str(facts)[:80]!r}") from error
    if any(
        not (0 <= use.rate <= 1 and 0 <= use.noise < math.inf and use.gradients >= 1 and 0 <= n < 2**53)
        for use, n in found.items()
    ):
        raise MessageError(f"uses of private samples cannot be read: {str(facts)[:80]!r}")
    return found
