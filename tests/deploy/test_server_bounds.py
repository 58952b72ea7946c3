"""Lies of one client: it is named and left out, and the others go on to what they would have reached without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.federation import (
    Ask,
    Federation,
    Meddle,
    became,
    fates,
    is_replayed,
    is_training,
    lying,
    packed,
    place_of,
    refusal,
    small,
    store_of,
    tampered,
    trace_of,
    with_facts,
    with_tensor,
)
from deploy.owned import of_files, owners, write_tables
from tailorfl.deploy.codec import Packet
from tailorfl.deploy.transport import Letter
from tailorfl.errors import ConfigError, RunError
from tailorfl.report.result import ExperimentResult

LIAR = 101
"""The node of client 1."""


# -- in a round ---------------------------------------------------------------------------------------------


@pytest.mark.threat(
    "a client",
    "replies with 1e30",
    now="left out of the round by name",
    before="taken into the mean: there was no bound by default",
)
def test_a_poisoned_reply_is_refused_by_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the first round, which has no earlier one to compare with, and in the second."""

    def poison(question: Packet, answer: bytes) -> bytes:
        return with_tensor(answer, lambda t: t * 0 + 1e30) if question.facts["round"] < 3 else answer

    result = tampered(small(rounds=3), tmp_path, lying(poison))
    for number in (1, 2):
        assert became(result, number, 1).fate == "refused"
        assert "deploy.max_norm" in became(result, number, 1).reason
    assert "'1' takes no part" in caplog.text
    assert became(result, 3, 1).fate == "accepted"
    assert {became(result, number, client).fate for number in (1, 2, 3) for client in (0, 2)} == {"accepted"}
    is_replayed(result, tmp_path)


def test_a_poisoned_reply_is_taken_where_there_is_no_bound(tmp_path: Path) -> None:
    lie = lying(lambda question, answer: with_tensor(answer, lambda t: t * 0 + 1e4))
    result = tampered(small(rounds=1, deploy={"max_norm": None}), tmp_path, lie)
    assert became(result, 1, 1).fate == "accepted"


@pytest.mark.slow
@pytest.mark.threat(
    "a client",
    "replies with ever more",
    now="left out from ten times the median on",
    before="taken: there was no bound by default",
)
def test_a_slow_rise_is_refused_once_it_is_ten_times_the_others(tmp_path: Path) -> None:
    """The liar's own accepted replies do not raise the bound; the bound outlives a restart of the server."""

    def rise(question: Packet, answer: bytes) -> bytes:
        packet = Packet.decoded(answer)
        sent = {name: question.tensors[name.replace("reply/", "received/")] for name in packet.tensors}
        factor = 3.0 ** question.facts["round"]
        return packed(
            replace(packet, tensors={n: sent[n] + factor * (t - sent[n]) for n, t in packet.tensors.items()})
        )

    class Ending(Federation):
        """Ends the server in round 3, once."""

        ended = False

        def send(self, letters: Sequence[Letter], seconds: float) -> list[str]:
            if not self.ended and any(is_training(Packet.decoded(x.body), 3) for x in letters):
                self.ended = True
                raise KeyboardInterrupt
            return super().send(letters, seconds)

    config, federation = small(rounds=6), Ending(tmp_path, meddle=lying(rise))
    try:
        with pytest.raises(KeyboardInterrupt):
            federation.host(config)
        result = federation.host(config)
    finally:
        federation.close()
    outcomes = [became(result, round, 1).fate for round in range(1, 7)]
    assert outcomes[0] == "accepted"
    assert outcomes[2:] == ["refused"] * 4
    assert {became(result, round, 0).fate for round in range(1, 7)} == {"accepted"}


@pytest.mark.slow
@pytest.mark.threat(
    "a client",
    "replies with numbers of what is not there",
    now="left out by name; the others go on",
    before="the run ended with an error",
)
def test_a_reply_that_names_what_is_not_there(tmp_path: Path) -> None:
    """It does not end the others by an error of the aggregation; numbers below zero neither."""
    numbers = {2: 10**6, 3: -(10**6)}

    def lie(question: Packet, answer: bytes) -> bytes:
        if (number := numbers.get(question.facts["round"])) is None:
            return answer
        packet = Packet.decoded(answer)
        tensors = {n: t if t.is_floating_point() else t * 0 + number for n, t in packet.tensors.items()}
        return packed(replace(packet, tensors=tensors))

    result = tampered(small("fedfomo", rounds=3), tmp_path, lying(lie))
    for round in numbers:
        assert became(result, round, 1).fate == "refused"
        assert "cannot be aggregated" in became(result, round, 1).reason
        assert {became(result, round, client).fate for client in (0, 2)} == {"accepted"}
    is_replayed(result, tmp_path)


@pytest.mark.threat("a client", "reports an impossible loss", now="left out of the round by name")
def test_a_loss_that_no_training_has(tmp_path: Path) -> None:
    impossible = [1e308, None, math.inf, -1e15]

    def boast(question: Packet, answer: bytes) -> bytes:
        loss = impossible[question.facts["round"] - 1]
        return with_facts(answer, metrics=dict.fromkeys(Packet.decoded(answer).facts["metrics"], loss))

    result = tampered(small("fedavg", rounds=len(impossible)), tmp_path, lying(boast))
    for round in range(1, len(impossible) + 1):
        assert became(result, round, 1).fate == "refused"
        assert "no number from" in became(result, round, 1).reason
    losses = store_of(result).rounds().filter(like="loss/").to_numpy()
    assert losses.size
    assert (abs(losses) < 100).all()


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
    frame = store_of(tampered(config, tmp_path, lying(boast, "evaluate"))).clients()
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
    {"source": {"name": "digits", "x": [[10**9, 10**9], "float32"]}},
    {"source": None},
    {},
]
"""What one client says of its data, one lie after the other; at last it refuses to say anything."""


@pytest.mark.slow
@pytest.mark.threat(
    "a client", "describes what it cannot have", now="turned away; the server waits for an honest one"
)
def test_who_describes_what_it_cannot_have_is_turned_away_and_another_comes(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    result = federation.host(small("fedavg", rounds=1))
    assert len(reasons) == len(DESCRIPTIONS)
    assert all("'1'" in reason for reason in reasons)
    assert fates(result) == {"accepted"}
    is_replayed(result, tmp_path)


def files_run(folder: Path, meddle: Meddle, wait: float = 2.0) -> ExperimentResult:
    """Run four wards with tables of their own, of which somebody changes the answers."""
    write_tables(folder / "files")
    data, deploy = {"normalise": "federated"}, {"wait_seconds": wait}
    config = of_files(folder / "files", "fedavg", data=data, deploy=deploy)
    federation = Federation(folder, owners(folder, folder / "files", config), meddle)
    try:
        return federation.host(config)
    finally:
        federation.close()


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

    with pytest.raises(RunError, match=r"3 of 4 clients are there.*'north': .*max_samples"):
        files_run(tmp_path, lie, 0.5)
    assert not rows


def inflated(summary: dict[str, Any], value: float) -> dict[str, Any]:
    """A summary whose sums are another number."""
    columns = {
        name: {k: value if isinstance(v, float) else v for k, v in column.items()}
        for name, column in summary["columns"].items()
    }
    return {**summary, "columns": columns}


SUMMARIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "sizes of 10^12": lambda facts: {"sizes": {"train": 10**12, "val": 0, "test": 0}},
    "more than its rows": lambda facts: {"sizes": {k: v + 1 for k, v in facts["sizes"].items()}},
    "sums of 1e300": lambda facts: {"summary": inflated(facts["summary"], 1e300)},
    "no summary": lambda facts: {"summary": {"columns": 3}},
}


@pytest.mark.threat("a client", "gives sums that cannot be", now="stays out; the others go on")
@pytest.mark.parametrize("case", SUMMARIES)
def test_who_tells_nothing_usable_of_its_file_stays_out_and_the_others_go_on(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lie(question: Packet, answer: bytes) -> bytes:
        return with_facts(answer, **SUMMARIES[case](Packet.decoded(answer).facts))

    result = files_run(tmp_path, lying(lie, "summarise", node=7))
    assert "'north' is left out" in caplog.text
    names = ["east", "north", "south", "west"]
    assert {names[a.client] for one in trace_of(result) for a in one.answers} == {"east", "south", "west"}


def test_who_refuses_the_job_is_named_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refuses = lying(lambda question, answer: refusal(), "setup")
    result = tampered(small("fedavg", rounds=2), tmp_path, refuses)
    assert "client '1' has not agreed: not with us" in caplog.text
    assert {became(result, 2, client).fate for client in (0, 2)} == {"accepted"}


def test_too_few_agree(tmp_path: Path) -> None:
    def meddle(node: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        return refusal() if question.kind == "setup" and node != 100 else ask(body)

    with pytest.raises(RunError, match="'1': not with us; '2': not with us"):
        tampered(small("fedavg", rounds=1), tmp_path, meddle)


@pytest.mark.slow
def test_two_experiments_of_one_folder_but_another_name(federation: Federation, tmp_path: Path) -> None:
    """A name and the states under it belong together, at a client and at the server."""
    config = small(rounds=1)
    renamed = config.model_copy(update={"name": "renamed"})
    federation.host(config)
    with pytest.raises(ConfigError, match="'deployed', not 'renamed'"):
        federation.host(renamed)
    result = federation.host(renamed, "elsewhere")
    assert fates(result) == {"accepted"}
    assert (place_of(renamed, tmp_path, 1) / "job.json").is_file()
    is_replayed(result, tmp_path)
