"""Lies of one client: it is named and left out, and the others go on to what they would have reached without it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.federating import members
from deploy.tampering import (
    Ask,
    Tampered,
    became,
    hosted,
    is_replayed,
    is_training,
    packed,
    place_of,
    run_tampered,
    small,
    trace_of,
    with_facts,
    with_tensor,
)
from deploy.test_own_files import clients as with_files
from deploy.test_own_files import of_files, write
from tailorfl.deploy.client_session import ClientSession
from tailorfl.deploy.codec import Packet
from tailorfl.errors import RunError
from tailorfl.report.result import ExperimentResult
from tailorfl.runs.store import RunStore
from tailorfl.settings.experiment import ExperimentConfig

LIAR = 101
"""The node of client 1."""


def lying(change: Callable[[Packet, bytes], bytes], node: int = LIAR) -> Any:
    """A change of all answers of one node."""

    def meddle(asked_node: int, asked: Packet, body: bytes, ask: Ask) -> bytes:
        answer = ask(body)
        return change(asked, answer) if asked_node == node else answer

    return meddle


def run_with(
    config: ExperimentConfig, folder: Path, change: Callable[[Packet, bytes], bytes]
) -> ExperimentResult:
    """Run an experiment whose client 1 changes its answers."""
    return run_tampered(config, folder, lying(change))[0]


def store_of(result: ExperimentResult) -> RunStore:
    """The server's records of the only job."""
    return RunStore.open(next(result.path.glob("*/seed-5")), readonly=True)


# -- in a round ---------------------------------------------------------------------------------------------


@pytest.mark.threat(
    "a client",
    "replies with 1e30",
    now="left out of the round by name",
    before="taken into the mean: there was no bound by default",
)
@pytest.mark.parametrize("round", [1, 2])
def test_a_poisoned_reply_is_refused_by_default(
    round: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = small(rounds=3)

    def poison(asked: Packet, answer: bytes) -> bytes:
        return with_tensor(answer, lambda t: t * 0 + 1e30) if is_training(asked, round) else answer

    result = run_with(config, tmp_path, poison)
    assert became(result, round, 1).fate == "refused"
    assert "deploy.max_norm" in became(result, round, 1).reason
    assert "'1' takes no part" in caplog.text
    fates = [a.fate for one in trace_of(result) for a in one.answers if (one.round, a.client) != (round, 1)]
    assert set(fates) == {"accepted"}
    is_replayed(config, tmp_path, result)


def test_a_poisoned_reply_is_taken_where_there_is_no_bound(tmp_path: Path) -> None:
    config = small(rounds=1, deploy={"max_norm": None, "wait_seconds": 20.0})

    def poison(asked: Packet, answer: bytes) -> bytes:
        return with_tensor(answer, lambda t: t * 0 + 1e4) if asked.kind == "train" else answer

    assert became(run_with(config, tmp_path, poison), 1, 1).fate == "accepted"


@pytest.mark.threat(
    "a client",
    "replies with ever more",
    now="left out from ten times the median on",
    before="taken: there was no bound by default",
)
def test_a_slow_rise_is_refused_once_it_is_ten_times_the_others(tmp_path: Path) -> None:
    """The liar's own accepted replies do not raise the bound; the bound outlives a restart of the server."""
    config = small(rounds=6)
    there = members(tmp_path, 3)

    def rise(asked: Packet, answer: bytes) -> bytes:
        if asked.kind != "train":
            return answer
        found = Packet.decoded(answer)
        tensors = {
            name: asked.tensors[f"received/{name.removeprefix('reply/')}"]
            + 3.0 ** asked.facts["round"] * (t - asked.tensors[f"received/{name.removeprefix('reply/')}"])
            for name, t in found.tensors.items()
        }
        return packed(replace(found, tensors=tensors))

    class Ending(Tampered):
        """Ends the server in round 3."""

        ended = False

        def send(self, letters: Any, seconds: float) -> list[str]:
            if not self.ended and any(is_training(Packet.decoded(x.body), 3) for x in letters):
                self.ended = True
                raise KeyboardInterrupt
            return super().send(letters, seconds)

    post = Ending(there, lying(rise))
    try:
        with pytest.raises(KeyboardInterrupt):
            hosted(config, tmp_path, post)
        result = hosted(config, tmp_path, post)
    finally:
        post.close()
    fates = [became(result, round, 1).fate for round in range(1, 7)]
    assert fates[0] == "accepted"
    assert fates[2:] == ["refused"] * 4
    assert {became(result, round, 0).fate for round in range(1, 7)} == {"accepted"}


@pytest.mark.threat(
    "a client",
    "replies with numbers of what is not there",
    now="left out by name; the others go on",
    before="the run ended with an error",
)
@pytest.mark.parametrize("number", [10**6, -(10**6)])
def test_a_reply_that_names_what_is_not_there(number: int, tmp_path: Path) -> None:
    """It does not end the others by an error of the aggregation."""
    config = small("fedfomo", rounds=3)

    def lie(asked: Packet, answer: bytes) -> bytes:
        if not is_training(asked, 2):
            return answer
        packet = Packet.decoded(answer)
        named = {n: t if t.is_floating_point() else t * 0 + number for n, t in packet.tensors.items()}
        return packed(replace(packet, tensors=named))

    result = run_with(config, tmp_path, lie)
    assert became(result, 2, 1).fate == "refused"
    assert "cannot be aggregated" in became(result, 2, 1).reason
    assert {became(result, 2, client).fate for client in (0, 2)} == {"accepted"}
    is_replayed(config, tmp_path, result)


LOSSES: dict[str, Any] = {"1e308": 1e308, "none": None, "infinite": math.inf, "negative": -1e15}


@pytest.mark.threat("a client", "reports an impossible loss", now="left out of the round by name")
@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_that_no_training_has(case: str, tmp_path: Path) -> None:
    config = small("fedavg", rounds=1)

    def boast(asked: Packet, answer: bytes) -> bytes:
        if asked.kind != "train":
            return answer
        return with_facts(
            answer, metrics=dict.fromkeys(Packet.decoded(answer).facts["metrics"], LOSSES[case])
        )

    result = run_with(config, tmp_path, boast)
    assert became(result, 1, 1).fate == "refused"
    assert "no number from" in became(result, 1, 1).reason
    losses = store_of(result).rounds().filter(like="loss/").to_numpy()
    assert losses.size
    assert (abs(losses) < 100).all()


# -- in an evaluation ---------------------------------------------------------------------------------------

RECORDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "accuracy 1e6": lambda row: row | {"accuracy": 1e6},
    "loss 1e308": lambda row: row | {"loss": 1e308},
    "more samples": lambda row: row | {"samples": 10**12},
    "a metric that nobody else has": lambda row: row | {"zeal": 1.0},
    "a metric less": lambda row: {k: v for k, v in row.items() if k != "accuracy"},
    "no loss": lambda row: {k: v for k, v in row.items() if k != "loss"},
}


@pytest.mark.threat("a client", "reports impossible metrics", now="its evaluation is refused by name")
@pytest.mark.parametrize("case", RECORDS)
def test_an_evaluation_that_nobody_can_have(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def boast(asked: Packet, answer: bytes) -> bytes:
        if asked.kind != "evaluate":
            return answer
        return with_facts(
            answer, records=[RECORDS[case](row) for row in Packet.decoded(answer).facts["records"]]
        )

    result = run_with(small("fedavg", rounds=1), tmp_path, boast)
    frame = store_of(result).clients()
    assert set(frame["client"]) == {0, 2}
    assert frame["accuracy"].between(0, 1).all()
    assert "zeal" not in frame
    assert "'1' was not evaluated" in caplog.text


def test_an_evaluation_twice(tmp_path: Path) -> None:
    def twice(asked: Packet, answer: bytes) -> bytes:
        if asked.kind != "evaluate":
            return answer
        return with_facts(answer, records=2 * Packet.decoded(answer).facts["records"])

    frame = store_of(run_with(small("fedavg", rounds=1), tmp_path, twice)).clients()
    assert set(frame["client"]) == {0, 2}


# -- before the first round ---------------------------------------------------------------------------------

DESCRIPTIONS: dict[str, dict[str, Any]] = {
    "a billion samples": {"sizes": {"train": 10**9, "val": 1, "test": 1}},
    "other samples": {"sizes": {"train": 7, "val": 1, "test": 1}},
    "a total of 1e300": {"total": 1e300},
    "another total": {"total": 4},
    "no number": {"index": 1.5},
    "the number of another": {"index": 0},
    "a number beyond": {"index": 10**9},
    "other data": {"source": {"name": "digits", "x": [[10**9, 10**9], "float32"]}},
    "no source": {"source": None},
}


@pytest.mark.threat(
    "a client", "describes what it cannot have", now="turned away; the server waits for an honest one"
)
@pytest.mark.parametrize("case", [*DESCRIPTIONS, "a refusal"])
def test_who_describes_what_it_cannot_have_is_turned_away_and_another_comes(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that lies before the first round: the server waits on, until an honest one of that name is there."""
    monkeypatch.setattr("tailorfl.deploy.serving.LOOK", 0.05)
    config = small("fedavg", rounds=1)
    there = members(tmp_path, 3)
    honest = there[LIAR]
    said: list[str] = []

    def lie(node: int, asked: Packet, body: bytes, ask: Ask) -> bytes:
        answer = ask(body)
        if node != LIAR:
            return answer
        if asked.kind == "goodbye" and asked.facts["turned_away"]:
            said.append(asked.facts["turned_away"])
            del post.members[LIAR]
            post.members[555] = honest.answer
        if asked.kind != "describe":
            return answer
        if case == "a refusal":
            return packed(Packet("failure", {"reason": "no", "code": "refused"}))
        return with_facts(answer, **DESCRIPTIONS[case])

    post = Tampered(there, lie)
    try:
        result = hosted(config, tmp_path, post)
    finally:
        post.close()
    assert len(said) == 1
    assert "'1'" in said[0]
    assert {a.fate for one in trace_of(result) for a in one.answers} == {"accepted"}
    is_replayed(config, tmp_path, result)


def files_run(
    folder: Path, change: Callable[[Packet, bytes], bytes], wait: float = 2.0
) -> tuple[ExperimentResult, dict[int, ClientSession]]:
    """Run four wards with files of their own, of which north (node 7) changes its answers."""
    write(folder / "files")
    config = of_files(
        folder / "files",
        "fedavg",
        {"clients": 4, "wait_seconds": wait, "round_seconds": 60.0},
        normalise="federated",
    )
    there = with_files(folder, folder / "files", config)
    post = Tampered(there, lying(change, 7))
    try:
        return hosted(config, folder, post), there
    finally:
        post.close()


@pytest.mark.threat(
    "a client", "says that it has a billion rows", now="turned away before anybody makes room"
)
def test_a_billion_rows_are_refused_before_anybody_makes_room_for_them(tmp_path: Path) -> None:
    seen: list[int] = []

    def lie(asked: Packet, answer: bytes) -> bytes:
        seen.extend(asked.facts.get("rows", ()))
        return with_facts(answer, sizes={"all": 10**9}) if asked.kind == "describe" else answer

    with pytest.raises(RunError, match=r"3 of 4 clients are there.*'north': .*max_samples"):
        files_run(tmp_path, lie, 0.5)
    assert not seen


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
    def lie(asked: Packet, answer: bytes) -> bytes:
        if asked.kind != "summarise":
            return answer
        return with_facts(answer, **SUMMARIES[case](Packet.decoded(answer).facts))

    result, _ = files_run(tmp_path, lie)
    assert "'north' is left out" in caplog.text
    names = ["east", "north", "south", "west"]
    took = {names[a.client] for one in trace_of(result) for a in one.answers}
    assert took == {"east", "south", "west"}


def test_who_refuses_the_job_is_named_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(asked: Packet, answer: bytes) -> bytes:
        refusal = Packet("failure", {"reason": "not with us", "code": "refused"})
        return packed(refusal) if asked.kind == "setup" else answer

    result = run_with(small("fedavg", rounds=2), tmp_path, lambda asked, answer: refuse(asked, answer))
    assert "client '1' has not agreed: not with us" in caplog.text
    assert {became(result, 2, client).fate for client in (0, 2)} == {"accepted"}


def test_too_few_agree(tmp_path: Path) -> None:
    config = small("fedavg", rounds=1)

    def meddle(node: int, asked: Packet, body: bytes, ask: Ask) -> bytes:
        if asked.kind == "setup" and node != 100:
            return packed(Packet("failure", {"reason": "not with us", "code": "refused"}))
        return ask(body)

    with pytest.raises(RunError, match="'1': not with us; '2': not with us"):
        run_tampered(config, tmp_path, meddle)


def test_two_experiments_of_one_folder_but_another_name(tmp_path: Path) -> None:
    """A name and the states under it belong together, at a client and at the server."""
    there = members(tmp_path, 3)
    post = Tampered(there)
    config = small(rounds=1)
    other = config.model_copy(update={"name": "renamed"})
    try:
        hosted(config, tmp_path, post)
        with pytest.raises(Exception, match="'deployed', not 'renamed'"):
            hosted(other, tmp_path, post)
        result = hosted(other, tmp_path / "elsewhere", post)
    finally:
        post.close()
    assert {a.fate for one in trace_of(result) for a in one.answers} == {"accepted"}
    assert (place_of(other, tmp_path, 1) / "job.json").is_file()
    is_replayed(other, tmp_path, result)
