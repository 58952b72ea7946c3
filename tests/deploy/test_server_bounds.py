"""Lies of one client: it is named and left out, and the others go on to what they would have reached without it."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.federation import (
    PRIVATE,
    After,
    Ask,
    Deployed,
    Federation,
    Meddle,
    deployed,
    filled,
    lying,
    packed,
    refusal,
    signed,
    small,
    with_facts,
    with_tensor,
)
from deploy.owned import of_files, owners, write_tables
from methods.settings import one_of
from tailorfl.deploy.messages import Packet
from tailorfl.errors import RunError
from tailorfl.privacy import PrivacyLedger
from tailorfl.rounds.participation import NOT_FINITE, TOO_FEW

LIAR = 101
"""The node of client 1."""


# -- answers that are not what was asked for ----------------------------------------------------------------

HUGE = 10**400


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return self.folder.mkdir, ()  # type: ignore[return-value]


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


def bare(answer: bytes) -> bytes:
    """An answer whose tensors do not say that they are its reply."""
    packet = Packet.decoded(answer)
    return packed(replace(packet, tensors={n.removeprefix("reply/"): t for n, t in packet.tensors.items()}))


def hidden(answer: bytes) -> bytes:
    """An answer with a poisoned reply, and after it an honest one that does not say what it is."""
    packet, honest = Packet.decoded(answer), Packet.decoded(bare(answer))
    poisoned = {n: torch.full_like(t, 1e30) for n, t in packet.tensors.items()}
    return packed(replace(packet, tensors={**poisoned, **honest.tensors}))


FACTS: list[tuple[dict[str, Any], str]] = [
    ({"round": 1}, "round 1"),
    ({"attempt": "0" * 16}, "earlier question"),
    ({"digest": "0" * 32}, "another job"),
    ({"metrics": {"loss": "low"}}, "loss = low"),
    ({"metrics": {"a": 1, "a/b": 2}}, "expected numbers: train"),
    ({"metrics": {}}, "expected numbers: train"),
    *(({"metrics": {"loss": loss}}, "a number from") for loss in (HUGE, 1e308, math.inf, -1e15)),
    ({"metrics": {"loss": 1.0, "val": None}}, "a number from"),
    ({"gradients": "many"}, "'gradients'"),
    ({"gradients": HUGE}, "'gradients'"),
    ({"gradients": -1}, "'gradients'"),
    ({"uses": {"a": 1}}, "'uses'"),
    ({"uses": [[0.1, 1.0]]}, "uses"),
    ({"uses": [[0.1, 1.0, 1, -5]]}, "uses"),
    ({"uses": [[HUGE, 1.0, 1, 1]]}, "uses"),
    ({"uses": [[0.1, 1e-300, 1, 1]]}, "uses"),
    ({"uses": [[0.1, 1.0, HUGE, 1]]}, "uses"),
    ({"uses": [[0.1, 1.0, 1, 1]]}, "its uses"),
]
TENSORS: list[tuple[Any, str]] = [
    (lambda t: t[..., :-1].contiguous(), "shape"),
    (lambda t: t.double(), "torch.float64"),
    (filled(float("nan")), "NaN"),
    (filled(float("-inf")), "NaN"),
    (lambda t: t + 100.0, "deploy.max_norm = 50"),
]
HEADS: list[tuple[dict[str, Any], str]] = [
    ({"facts": [1]}, "unknown kind"),
    ({"kind": "evaluate"}, "answered by 'evaluate'"),
    ({"kind": "pickle"}, "'pickle'"),
    ({"protocol": 1}, "protocol 1"),
]
BYTES: list[tuple[Callable[[bytes], bytes], str]] = [
    (renamed, "lacks 'fc1.weight'"),
    (added("reply/mo\nre"), r"'mo\nre'"),
    (bare, "'fc1.bias', which was not requested"),
    (hidden, "'fc1.bias', which was not requested"),
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
WORDS = [*(words for _, words in CHANGES), "for round 1", "digest"]
"""Of the refusals; the last two are of an old answer and of a pickled one."""
LIARS = 5
PLACES = [(2 + number // LIARS, 1 + number % LIARS) for number in range(len(WORDS))]
"""In which round it is done, and to which client; all are honest in the first round and the last, client 0 in all."""
LAST = PLACES[-1][0] + 1
THREATS = {
    "a number from": pytest.mark.threat(
        "a client", "reports an impossible loss", now="left out of the round by name"
    ),
    "'fc1.bias', which was not requested": pytest.mark.threat(
        "a client",
        "hides its reply behind an honest one of other names",
        now="left out of the round by name",
        before="aggregated without a check",
    ),
}
"""Words of a refusal -> what it is about, for the table of tools/attacks.py."""


@pytest.fixture(scope="module")
def lied_to(tmp_path_factory: pytest.TempPathFactory) -> Deployed:
    """A run in each of whose rounds other things are done to the answers of all clients but one."""
    folder = tmp_path_factory.mktemp("hostile")
    deploy = {"min_replies": 1, "max_norm": 50.0, "max_bytes": 40_000}
    old: dict[int, bytes] = {}

    def meddle(node: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        answer, place = ask(body), (question.facts.get("round"), node - 100)
        if question.kind != "train":
            return answer
        old.setdefault(node, answer)
        if place == PLACES[-1]:
            return pickle.dumps(Bomb(folder / "bomb"))
        if place == PLACES[-2]:
            return old[node]
        return CHANGES[PLACES.index(place)][0](answer) if place in PLACES else answer

    data = {"name": "digits", "clients": 1 + LIARS, "samples": 300}
    return deployed(small(rounds=LAST, deploy=deploy, data=data), folder, 1 + LIARS, meddle)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        pytest.param(place, words, marks=THREATS.get(words, ()))
        for place, words in zip(PLACES, WORDS, strict=True)
    ],
)
def test_refused_with_the_reason(place: tuple[int, int], words: str, lied_to: Deployed) -> None:
    answer = lied_to.became(*place)
    assert answer.fate == "refused"
    assert words in answer.reason
    assert lied_to.became(place[0], 0).fate == "accepted"


def test_nothing_of_it_has_changed_anything(lied_to: Deployed) -> None:
    assert not (lied_to.folder / "bomb").exists(), "pickled code has run"
    for client in range(1 + LIARS):
        assert lied_to.became(1, client).fate == lied_to.became(LAST, client).fate == "accepted"
    losses = lied_to.store.rounds().filter(like="loss/").to_numpy()
    assert losses.size
    assert (abs(losses) < 100).all()
    lied_to.is_replayed()


# -- replies that are what was asked for --------------------------------------------------------------------


@pytest.mark.threat(
    "a client", "replies with 1e30", now="left out by name", before="taken: there was no bound"
)
def test_a_poisoned_reply_is_refused_by_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the first round, which has no earlier one to compare with, and in the second."""

    def poison(question: Packet, answer: bytes) -> bytes:
        return with_tensor(answer, lambda t: t * 0 + 1e30) if question.facts["round"] < 3 else answer

    result = deployed(small(rounds=3), tmp_path, 3, lying(poison))
    assert result.fates_of(1) == ["refused", "refused", "accepted"]
    assert all("deploy.max_norm" in result.became(number, 1).reason for number in (1, 2))
    assert "'1' takes no part" in caplog.text
    assert result.fates_of(0) == result.fates_of(2) == ["accepted"] * 3
    result.is_replayed()


def test_a_poisoned_reply_is_taken_where_there_is_no_bound(tmp_path: Path) -> None:
    lie = lying(lambda question, answer: with_tensor(answer, lambda t: t * 0 + 1e4))
    assert deployed(small(rounds=1, deploy={"max_norm": None}), tmp_path, 3, lie).fates == {"accepted"}


@pytest.mark.slow
@pytest.mark.threat(
    "a client",
    "replies with ever more",
    now="out at ten times the median",
    before="taken: there was no bound",
)
def test_a_slow_rise_is_refused_once_it_is_ten_times_the_others(tmp_path: Path) -> None:
    """The liar's own accepted replies do not raise the bound; the bound outlives a restart of the server."""

    def rise(question: Packet, answer: bytes) -> bytes:
        packet = Packet.decoded(answer)
        sent = {name: question.tensors[name.replace("reply/", "received/")] for name in packet.tensors}
        factor = 3.0 ** question.facts["round"]
        risen = {name: sent[name] + factor * (t - sent[name]) for name, t in packet.tensors.items()}
        return packed(replace(packet, tensors=risen))

    def end() -> None:
        raise KeyboardInterrupt

    config = small(rounds=6)
    with Federation(tmp_path, meddle=lying(rise)) as federation:
        with pytest.raises(KeyboardInterrupt):
            federation.host(config, observer=After({2: end}))
        result = federation.host(config)
    outcomes = result.fates_of(1)
    assert outcomes[0] == "accepted"
    assert outcomes[2:] == ["refused"] * 4
    assert result.fates_of(0) == ["accepted"] * 6


@pytest.mark.slow
@pytest.mark.threat(
    "a client", "replies with numbers of what is not there", now="left out by name", before="the run ended"
)
def test_a_reply_that_names_what_is_not_there(tmp_path: Path) -> None:
    """It does not end the others by an error of the aggregation; numbers below zero neither."""
    numbers = {1: None, 2: 10**6, 3: -(10**6)}

    def lie(question: Packet, answer: bytes) -> bytes:
        if (number := numbers[question.facts["round"]]) is None:
            return answer
        packet = Packet.decoded(answer)
        tensors = {n: t if t.is_floating_point() else t * 0 + number for n, t in packet.tensors.items()}
        return packed(replace(packet, tensors=tensors))

    result = deployed(small("fedfomo", rounds=3), tmp_path, 3, lying(lie))
    assert result.fates_of(1) == ["accepted", "refused", "refused"]
    assert all("cannot be aggregated" in result.became(round, 1).reason for round in (2, 3))
    assert result.fates_of(0) == result.fates_of(2) == ["accepted"] * 3
    result.is_replayed()


@pytest.mark.threat(
    "a client",
    "refuses with the words of the server's own trace",
    now="left out of the round by name",
    before="the whole round had no effect",
)
def test_who_refuses_in_the_words_of_the_trace_stays_out_alone(tmp_path: Path) -> None:
    words = {1: TOO_FEW, 2: NOT_FINITE, 3: "busy\n2026-01-01 info server: all is well"}
    lie = lying(lambda question, answer: refusal(words[question.facts["round"]]))
    result = deployed(small("fedavg", rounds=3), tmp_path, 3, lie)
    assert result.fates_of(1) == ["refused"] * 3
    assert result.fates_of(0) == result.fates_of(2) == ["accepted"] * 3
    assert not any(result.became(round, 1).answered for round in words)
    assert "\n" not in result.became(3, 1).reason
    result.is_replayed()


@pytest.mark.threat(
    "a client",
    "reports thousands of different uses of its samples",
    now="left out of the round by name",
    before="the accountant took hours",
)
def test_uses_that_no_training_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def lie(node: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        answer = ask(body)
        if node != LIAR or question.kind not in ("train", "evaluate") or question.facts["round"] == 3:
            return answer
        if question.kind == "evaluate":  # for which nothing is trained
            return with_facts(answer, uses=[[0.1, 1e-9, 1, 1]])
        ((rate, noise, gradients, count),) = Packet.decoded(answer).facts["uses"]
        uses = {
            1: [[rate, noise + k, gradients, count] for k in range(5000)],
            2: [[rate, noise, gradients, count + 1]],
        }
        return with_facts(answer, uses=uses[question.facts["round"]])

    result = deployed(small("local", train=PRIVATE, eval={"every": 1}), tmp_path, 3, lie)
    assert result.fates_of(1) == ["refused", "refused", "accepted"]
    assert result.fates_of(0) == result.fates_of(2) == ["accepted"] * 3
    assert caplog.text.count("'1' was not evaluated: its uses") == 2
    ledger = PrivacyLedger.restore(result.store.latest_checkpoint()[2]["ledger"])  # type: ignore[index]
    assert {use.noise for _, _, use, _ in ledger.rows()} == {1.0}


# -- in an evaluation ---------------------------------------------------------------------------------------

RECORDS: list[dict[str, Any]] = [
    {"accuracy": 1e6},
    {"loss": 1e308},
    {"samples": 10**12},
    {"zeal": 1.0},
    {"accuracy": "left out"},
    {"loss": "left out"},
    {},
]
"""What is said of an evaluation that nobody can have, one lie a round; in the last each record comes twice."""


@pytest.mark.threat("a client", "reports impossible metrics", now="its evaluation is refused by name")
def test_an_evaluation_that_nobody_can_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def boast(question: Packet, answer: bytes) -> bytes:
        lie = RECORDS[question.facts["round"] - 1]
        rows = [row | lie for row in Packet.decoded(answer).facts["records"]]
        rows = [{k: v for k, v in row.items() if v != "left out"} for row in rows]
        return with_facts(answer, records=rows if lie else rows * 2)

    config = small("fedavg", rounds=len(RECORDS), eval={"every": 1})
    frame = deployed(config, tmp_path, 3, lying(boast, "evaluate")).store.clients()
    for round in range(1, len(RECORDS) + 1):
        assert set(frame["client"][frame["round"] == round]) == {0, 2}, RECORDS[round - 1]
    assert frame["accuracy"].between(0, 1).all()
    assert "zeal" not in frame
    assert caplog.text.count("'1' was not evaluated") == len(RECORDS)


# -- before the first round ---------------------------------------------------------------------------------

DESCRIPTIONS: list[dict[str, Any]] = [
    {"sizes": {"train": 10**9, "val": 1, "test": 1}},
    {"sizes": {"train": 7, "val": 1, "test": 1}},
    {"total": 1e300},
    {"total": 4},
    {"index": 1.5},
    {"index": 0},  # that of another client
    {"index": 10**9},
    {"index": None},  # as one with a file of its own
    {"source": {"name": "digits", "x": [[10**9, 10**9], "float32"]}},
    {"source": None},
    {},
]
"""What one client says of its data, one lie after the other; at last it refuses to say anything."""


@pytest.mark.threat(
    "a client", "describes what it cannot have", now="turned away; the server waits for an honest one"
)
def test_who_describes_what_it_cannot_have(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that lies before the first round: the server waits on, until an honest one of that name is there."""
    monkeypatch.setattr("tailorfl.deploy.serving.LOOK", 0.05)
    reasons: list[str] = []
    nodes = [LIAR, *range(500, 500 + len(DESCRIPTIONS))]

    def lie(node: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        answer, number = ask(body), len(reasons)
        if node != nodes[number] or number == len(DESCRIPTIONS):
            return answer
        if question.kind == "goodbye" and question.facts["turned_away"]:
            reasons.append(question.facts["turned_away"])
            del federation.members[node]
            federation.join(federation.people[LIAR], nodes[number + 1])
        if question.kind != "describe":
            return answer
        return with_facts(answer, **DESCRIPTIONS[number]) if DESCRIPTIONS[number] else refusal()

    federation.meddle = lie
    assert federation.replayed(small("fedavg", rounds=1)).fates == {"accepted"}
    assert len(reasons) == len(DESCRIPTIONS)
    assert all("'1'" in reason for reason in reasons)


def files_run(folder: Path, meddle: Meddle, wait: float = 2.0, normalise: str = "federated") -> Deployed:
    """Run four wards with tables of their own, of which somebody changes the answers."""
    write_tables(folder / "files", gaps=normalise != "none")
    data, deploy = {"normalise": normalise}, {"wait_seconds": wait}
    config = of_files(folder / "files", "fedavg", data=data, deploy=deploy)
    return deployed(config, folder, owners(folder, folder / "files", config), meddle)


@pytest.mark.threat(
    "a client", "says that it has a billion rows", now="turned away before anybody makes room"
)
def test_a_billion_rows_are_refused_before_anybody_makes_room_for_them(tmp_path: Path) -> None:
    rows: list[int] = []

    def lie(node: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        rows.extend(question.facts.get("rows", ()))
        answer = ask(body)
        return (
            with_facts(answer, sizes={"all": 10**9}) if (node, question.kind) == (7, "describe") else answer
        )

    with pytest.raises(RunError, match=r"3 of 4 clients .*'north': .*max_samples"):
        files_run(tmp_path, lie, 0.5)
    assert not rows


def inflated(summary: dict[str, Any], value: float) -> dict[str, Any]:
    """A summary whose sums are another number."""
    columns = {
        name: {k: value if isinstance(v, float) else v for k, v in column.items()}
        for name, column in summary["columns"].items()
    }
    return {**summary, "columns": columns}


def extended(summary: dict[str, Any], column: str) -> dict[str, Any]:
    """A summary of one column more."""
    columns = {**summary["columns"], column: {"kind": "number", "count": 9, "squares": 9.0}}
    return {**summary, "columns": columns, "order": list(columns)}


SUMMARIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "a column that was not described": lambda facts: {"summary": extended(facts["summary"], "zeal")},
    "sizes of 10^12": lambda facts: {"sizes": {"train": 10**12, "val": 0, "test": 0}},
    "more than its rows": lambda facts: {"sizes": {k: v + 1 for k, v in facts["sizes"].items()}},
    "more cells than rows": lambda facts: {"summary": {**facts["summary"], "rows": 1}},
    "more rows than it trains on": lambda facts: {"summary": {**facts["summary"], "rows": 10**9}},
    "sums of 1e300": lambda facts: {"summary": inflated(facts["summary"], 1e300)},
    "no summary": lambda facts: {"summary": {"columns": 3}},
}


@pytest.mark.threat("a client", "gives sums that cannot be", now="stays out; the others go on")
@pytest.mark.parametrize("case", one_of(2, list(SUMMARIES)))
def test_sums_that_cannot_be(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def lie(question: Packet, answer: bytes) -> bytes:
        return with_facts(answer, **SUMMARIES[case](Packet.decoded(answer).facts))

    result = files_run(tmp_path, lying(lie, "summarise", node=7))
    assert "'north' is left out" in caplog.text
    names = ["east", "north", "south", "west"]
    assert {names[a.client] for one in result.trace for a in one.answers} == {"east", "south", "west"}


@pytest.mark.parametrize("normalise", ["federated", "none"])
def test_features_that_no_client_has(
    normalise: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The label among one client's features, or sums that nobody asked for, do not make the others refuse."""

    def lie(question: Packet, answer: bytes) -> bytes:
        facts = Packet.decoded(answer).facts
        if normalise == "none":
            return with_facts(answer, summary=extended(facts["summary"], "age"))
        return with_facts(answer, source={"features": [*facts["source"]["features"], "outcome"]})

    kind = "summarise" if normalise == "none" else "describe"
    result = files_run(tmp_path, lying(lie, kind, node=7), normalise=normalise)
    assert "'north' is left out" in caplog.text
    assert [set(result.fates_of(client)) for client in (0, 2, 3)] == [{"accepted"}] * 3


def test_who_refuses_the_job_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(question: Packet, answer: bytes) -> bytes:
        return refusal()

    result = deployed(small("fedavg", rounds=2), tmp_path / "one", 3, lying(refuse, "setup"))
    assert "client '1' has not agreed: not with us" in caplog.text
    assert {result.became(2, client).fate for client in (0, 2)} == {"accepted"}

    def meddle(node: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        return refusal() if question.kind == "setup" and node != 100 else ask(body)

    with pytest.raises(RunError, match="'1': not with us; '2': not with us"):
        deployed(small("fedavg", rounds=1), tmp_path / "two", 3, meddle)
