"""Answers that are not what was asked for: each is refused with its reason, and changes nothing."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.federation import (
    Ask,
    became,
    filled,
    is_replayed,
    packed,
    signed,
    small,
    tampered,
    with_facts,
    with_tensor,
)
from tailorfl.deploy.codec import Packet
from tailorfl.report.result import ExperimentResult

HUGE = 10**400


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return Path(self.folder).mkdir, ()  # type: ignore[return-value]


def renamed(answer: bytes) -> bytes:
    """An answer whose first tensor has another name."""
    packet = Packet.decoded(answer)
    (_, tensor), *others = packet.tensors.items()
    return packed(replace(packet, tensors={"reply/other": tensor, **dict(others)}))


def added(name: str, numbers: int = 3) -> Callable[[bytes], bytes]:
    """A change of an answer: one tensor more."""

    def add(answer: bytes) -> bytes:
        packet = Packet.decoded(answer)
        return packed(replace(packet, tensors={**packet.tensors, name: torch.zeros(numbers)}))

    return add


FACTS: list[tuple[dict[str, Any], str]] = [
    ({"round": 1}, "of round 1"),
    ({"attempt": "0" * 16}, "earlier question"),
    ({"digest": "0" * 32}, "another job"),
    ({"metrics": {"loss": "low"}}, "loss = low"),
    ({"metrics": {"a": 1, "a/b": 2}}, "other numbers"),
    ({"metrics": {}}, "other numbers"),
    ({"metrics": {"loss": HUGE}}, "loss = 1000"),
    ({"gradients": "many"}, "'gradients'"),
    ({"gradients": HUGE}, "'gradients'"),
    ({"gradients": -1}, "'gradients'"),
    ({"uses": {"a": 1}}, "'uses'"),
    ({"uses": [[0.1, 1.0]]}, "uses"),
    ({"uses": [[0.1, 1.0, 1, -5]]}, "uses"),
    ({"uses": [[HUGE, 1.0, 1, 1]]}, "uses"),
]
TENSORS: list[tuple[Any, str]] = [
    (lambda t: t[..., :-1].contiguous(), "shape"),
    (lambda t: t.double(), "torch.float64"),
    (filled(float("nan")), "NaN"),
    (filled(float("-inf")), "NaN"),
    (lambda t: t + 100.0, "deploy.max_norm = 50"),
]
HEADS: list[tuple[dict[str, Any], str]] = [
    ({"facts": [1]}, "no known kind"),
    ({"kind": "evaluate"}, "answered by 'evaluate'"),
    ({"kind": "pickle"}, "'pickle'"),
    ({"protocol": 2}, "protocol 2"),
]
BYTES: list[tuple[Callable[[bytes], bytes], str]] = [
    (renamed, "lacks 'fc1.weight'"),
    (added("reply/more"), "'more'"),
    (added("state/more"), "'state/more'"),
    (added("reply/more", 20_000), "at most 40,000"),
    (lambda a: a[:-1] + bytes([a[-1] ^ 1]), "digest"),
    (lambda a: a[:-7], "digest"),
    (lambda a: b"", "digest"),
    (lambda a: signed(b"GET / HTTP/1.1\r\n\r\n"), "cannot be read"),
    (lambda a: signed(b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "), "KeyError"),
]
CHANGES: list[tuple[Callable[[bytes], bytes], str]] = [
    *((lambda a, facts=facts: with_facts(a, **facts), words) for facts, words in FACTS),  # type: ignore[misc]
    *((lambda a, change=change: with_tensor(a, change), words) for change, words in TENSORS),  # type: ignore[misc]
    *((lambda a, head=head: packed(Packet.decoded(a), **head), words) for head, words in HEADS),  # type: ignore[misc]
    *BYTES,
]
PLACES = [(2 + number // 2, 1 + number % 2) for number in range(len(CHANGES) + 2)]
"""In which round it is done, and to which client; the last two are an old answer and a pickled one."""
LAST = PLACES[-1][0] + 1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[ExperimentResult, Path]:
    """A run in each of whose rounds other things are done to the answers of two clients; not in the first and last."""
    folder = tmp_path_factory.mktemp("hostile")
    deploy = {"min_replies": 1, "max_norm": 50.0, "max_bytes": 40_000}
    old: dict[int, bytes] = {}

    def meddle(node: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        answer = ask(body)
        place = (question.facts.get("round"), node - 100)
        if question.kind != "train":
            return answer
        old.setdefault(node, answer)
        if place == PLACES[-1]:
            return pickle.dumps(Bomb(folder / "bomb"))
        if place == PLACES[-2]:
            return old[node]
        return CHANGES[PLACES.index(place)][0](answer) if place in PLACES else answer

    return tampered(small(rounds=LAST, deploy=deploy), folder, meddle), folder


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(PLACES)))
def test_refused_with_the_reason(case: int, run: tuple[ExperimentResult, Path]) -> None:
    words = [*(words for _, words in CHANGES), "of round 1", "digest"][case]
    answer = became(run[0], *PLACES[case])
    assert answer.fate == "refused"
    assert words in answer.reason
    assert became(run[0], PLACES[case][0], 0).fate == "accepted"


def test_nothing_of_it_has_changed_anything(run: tuple[ExperimentResult, Path]) -> None:
    result, folder = run
    assert not (folder / "bomb").exists(), "pickled code has run"
    for client in range(3):
        assert became(result, 1, client).fate == became(result, LAST, client).fate == "accepted"
    is_replayed(result, folder)
