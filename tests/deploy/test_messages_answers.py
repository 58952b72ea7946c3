"""Answers that are not what was asked for: each is refused with its reason, and changes nothing."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.federating import experiment
from deploy.tampering import (
    Ask,
    added,
    became,
    filled,
    is_replayed,
    packed,
    renamed,
    run_tampered,
    signed,
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


Change = Callable[[bytes, list[bytes]], bytes]
"""Gets an answer and all earlier answers of the client to questions "train"."""

CASES: dict[str, tuple[Change, str]] = {
    "a name is missing": (lambda a, old: renamed(a, "reply/other"), "lacks 'fc1.weight'"),
    "a tensor more": (lambda a, old: added(a, "reply/more"), "has 'more', which was not asked for"),
    "a tensor outside the reply": (lambda a, old: added(a, "state/more"), "has 'state/more', which was not"),
    "another shape": (
        lambda a, old: with_tensor(a, lambda t: t[..., :-1].contiguous()),
        "but should be torch.float32 of",
    ),
    "another dtype": (lambda a, old: with_tensor(a, lambda t: t.double()), "is torch.float64 of shape"),
    "NaN": (lambda a, old: with_tensor(a, lambda t: filled(t, float("nan"))), "holds NaN or infinity in"),
    "infinity": (
        lambda a, old: with_tensor(a, lambda t: filled(t, float("-inf"))),
        "holds NaN or infinity in",
    ),
    "too large a change": (
        lambda a, old: with_tensor(a, lambda t: t + 100.0),
        "more than deploy.max_norm = 50",
    ),
    "another round": (lambda a, old: with_facts(a, round=1), "its reply is of round 1, or of an earlier"),
    "another attempt": (lambda a, old: with_facts(a, attempt="0" * 16), "or of an earlier question"),
    "another job": (lambda a, old: with_facts(a, digest="0" * 32), "of another job, model or method"),
    "an old answer": (lambda a, old: old[0], "its reply is of round 1, or of an earlier question"),
    "a damaged byte": (
        lambda a, old: a[:-1] + bytes([a[-1] ^ 1]),
        "is not what was sent: its digest is another",
    ),
    "cut off": (lambda a, old: a[:-7], "is not what was sent: its digest is another one"),
    "nothing": (lambda a, old: b"", "is not what was sent: its digest is another one"),
    "too many bytes": (lambda a, old: added(a, "reply/more", 20_000), "at most 40,000 are taken"),
    "no packet": (lambda a, old: signed(b"GET / HTTP/1.1\r\n\r\n"), "a message cannot be read"),
    "a safetensors file of somebody else": (
        lambda a, old: signed(b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "),
        "a message cannot be read: KeyError",
    ),
    "facts that are a list": (
        lambda a, old: packed(Packet.decoded(a), facts=[1]),
        "is of no known kind: 'train'",
    ),
    "another kind": (
        lambda a, old: packed(Packet.decoded(a), kind="evaluate"),
        "'train' was answered by 'eval",
    ),
    "no kind": (
        lambda a, old: packed(Packet.decoded(a), kind="pickle"),
        "a message is of no known kind: 'pickle'",
    ),
    "another protocol": (
        lambda a, old: packed(Packet.decoded(a), protocol=2),
        "is of protocol 2, but this is",
    ),
    "metrics are no numbers": (lambda a, old: with_facts(a, metrics={"loss": "low"}), "reports is no number"),
    "metrics in one another": (
        lambda a, old: with_facts(a, metrics={"a": 1, "a/b": 2}),
        "reports other numbers",
    ),
    "metrics left out": (lambda a, old: with_facts(a, metrics={}), "reports other numbers"),
    "a metric of 400 digits": (lambda a, old: with_facts(a, metrics={"loss": HUGE}), "reports is no number"),
    "gradients are no number": (lambda a, old: with_facts(a, gradients="many"), "no usable 'gradients'"),
    "gradients of 400 digits": (lambda a, old: with_facts(a, gradients=HUGE), "no usable 'gradients'"),
    "less than no gradients": (lambda a, old: with_facts(a, gradients=-1), "no usable 'gradients'"),
    "uses are no list": (lambda a, old: with_facts(a, uses={"a": 1}), "no usable 'uses'"),
    "uses without noise": (lambda a, old: with_facts(a, uses=[[0.1, 1.0]]), "uses of private samples cannot"),
    "uses that take back": (
        lambda a, old: with_facts(a, uses=[[0.1, 1.0, 1, -5]]),
        "uses of private samples",
    ),
    "uses of 400 digits": (lambda a, old: with_facts(a, uses=[[HUGE, 1.0, 1, 1]]), "uses of private samples"),
}
PLACES = {case: (2 + number // 2, 1 + number % 2) for number, case in enumerate(CASES)}
"""In which round it is done, and to which client."""
LAST = 4 + (len(CASES) - 1) // 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[ExperimentResult, Path]:
    """A run in each of whose rounds other things are done to the answers of two clients; not in the first and last."""
    folder = tmp_path_factory.mktemp("hostile")
    config = experiment(
        "ditto",
        rounds=LAST,
        data={"name": "digits", "clients": 3, "samples": 300},
        eval={"every": 0},
        deploy={
            "min_replies": 1,
            "round_seconds": 60.0,
            "wait_seconds": 20.0,
            "max_norm": 50.0,
            "max_bytes": 40_000,
        },
    )
    old: dict[int, list[bytes]] = {100: [], 101: [], 102: []}

    def meddle(node: int, asked: Packet, body: bytes, ask: Ask) -> bytes:
        answer = ask(body)
        if asked.kind != "train":
            return answer
        old[node].append(answer)
        here = (asked.facts["round"], node - 100)
        if here == (LAST - 1, 2):
            return pickle.dumps(Bomb(folder / "bomb"))
        case = next((name for name, place in PLACES.items() if place == here), None)
        return answer if case is None else CASES[case][0](answer, old[node])

    result, _ = run_tampered(config, folder, meddle)
    return result, folder


@pytest.mark.parametrize("case", CASES)
def test_refused_with_the_reason(case: str, run: tuple[ExperimentResult, Path]) -> None:
    answer = became(run[0], *PLACES[case])
    assert answer.fate == "refused"
    assert CASES[case][1] in answer.reason
    assert became(run[0], PLACES[case][0], 0).fate == "accepted"


def test_pickled_code_does_not_run(run: tuple[ExperimentResult, Path]) -> None:
    answer = became(run[0], LAST - 1, 2)
    assert answer.fate == "refused"
    assert "its digest is another one" in answer.reason
    assert not (run[1] / "bomb").exists()


def test_nothing_of_it_has_changed_anything(run: tuple[ExperimentResult, Path]) -> None:
    result, folder = run
    for client in range(3):
        assert became(result, 1, client).fate == became(result, LAST, client).fate == "accepted"
    is_replayed(result.config, folder, result)
