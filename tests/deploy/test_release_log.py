"""The log of what left a client, and what a client does with files of its own that are damaged."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensordict import TensorDict
from typer.testing import CliRunner

from deploy.federation import (
    PRIVATE,
    Ask,
    Federation,
    asked,
    experiment,
    is_training,
    once_before,
    place_of,
    private_state,
    same,
    small,
    with_facts,
)
from tailorfl.cli.main import app
from tailorfl.deploy.client_session import member_of
from tailorfl.deploy.client_state import StateFolder
from tailorfl.deploy.local_run import LocalResult, LocalRun
from tailorfl.deploy.messages import Packet
from tailorfl.deploy.policy import DEFAULT_POLICY, Policy, experiment_digest, template
from tailorfl.deploy.release_log import HEAD, HEADS, MISSING, NAME, Release, table_rows, verified
from tailorfl.errors import ConfigError, RunError
from tailorfl.privacy import epsilon
from tailorfl.runs.files import decode, read_lines
from tailorfl.settings.experiment import ExperimentConfig

DESCRIBE = Packet("describe", {"experiment": small().to_dict(), "seed": 5}).encoded()


def ran(config: ExperimentConfig, folder: Path) -> Federation:
    """Run an experiment, and return all that passed."""
    with Federation(folder) as federation:
        federation.host(config)
    return federation


def test_each_answer_is_in_the_log_before_it_leaves(federation: Federation, tmp_path: Path) -> None:
    """Names, shapes, bytes, norm and ε of each, as the server saw them."""
    config = small("fedavg", train=PRIVATE, rounds=2, eval={"every": 1})
    counts: list[tuple[int, int]] = []

    def meddle(node: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        before = lines_of(tmp_path / "state-1") if node == 101 else 0
        answer = ask(body)
        if node == 101 and question.kind not in ("hello", "goodbye"):
            counts.append((before, lines_of(tmp_path / "state-1")))
        return answer

    federation.meddle = meddle
    federation.host(config)
    assert counts == [(k, k + 1) for k in range(len(counts))]
    packets = [(Packet.decoded(answer), len(answer)) for node, _, answer in federation.passed if node == 101]
    answers = [(packet, size) for packet, size in packets if packet.kind not in ("hello", "goodbye")]
    entries = verified(tmp_path / "state-1")
    assert [(e["kind"], e["bytes"]) for e in entries] == [(packet.kind, size) for packet, size in answers]
    steps = []
    for entry, (packet, _) in zip(entries, answers, strict=True):
        shapes = {name: list(tensor.shape) for name, tensor in packet.tensors.items()}
        assert {name: shape for name, shape, _ in entry["tensors"]} == shapes
        norm = math.sqrt(sum(float(t.double().square().sum()) for t in packet.tensors.values()))
        assert entry["norm"] == pytest.approx(norm)
        steps += [(q, sigma, n) for q, sigma, _, n in packet.facts.get("uses", ())]
        assert entry["epsilon"] == (pytest.approx(epsilon(steps, 1e-5)) if steps else 0.0)
        assert entry["experiment"] == config.name
    assert [e["number"] for e in entries if e["kind"] == "train"] == [1, 2]


def lines_of(state: Path) -> int:
    """How many lines the log has."""
    return len((state / NAME).read_bytes().splitlines()) if (state / NAME).is_file() else 0


@pytest.mark.slow
def test_without_noise_epsilon_has_no_bound(tmp_path: Path) -> None:
    ran(small(rounds=1), tmp_path)
    entries = verified(tmp_path / "state-0")
    assert [e["epsilon"] for e in entries if e["kind"] in ("setup", "train")] == [0.0, math.inf]
    member = member_of(state=tmp_path / "state-0", name="0", policy=Policy(max_epsilon=100.0))
    private = ran(small("fedavg", train=PRIVATE, name="other", rounds=1), tmp_path / "other")
    for kind in ("setup", "train"):
        answer = asked(member, private.of_kind(kind, 100)[0][1])
    assert answer.kind == "failure"
    assert "policy" in answer.facts["reason"]


def changed(line: bytes) -> bytes:
    """A line of which one digit is another one."""
    return line.replace(b'"bytes": ', b'"bytes": 1')


DAMAGES: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "a line changed": (lambda x: [x[0], changed(x[1]), *x[2:]], "line 2 "),
    "the last line changed": (lambda x: [*x[:-1], changed(x[-1])], "line {last} "),
    "no line": (lambda x: [x[0], b"{", *x[2:]], "line 2 "),
    "a line removed": (lambda x: [x[0], *x[2:]], "line 2 "),
    "the first line removed": (lambda x: x[1:], "line 1 "),
    "the last line removed": (lambda x: x[:-1], "line {last} "),
    "two lines exchanged": (lambda x: [x[1], x[0], *x[2:]], "line 1 "),
    "a line twice": (lambda x: [x[0], *x], "line 2 "),
    "nothing left": (lambda x: [], "line 1 "),
}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state folder of a client after an experiment."""
    folder = tmp_path_factory.mktemp("logged")
    ran(small(rounds=2), folder)
    return folder / "state-1"


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_log_is_named(case: str, state: Path, tmp_path: Path) -> None:
    lines = (state / NAME).read_bytes().splitlines()
    damage, words = DAMAGES[case]
    (tmp_path / NAME).write_bytes(b"".join(line + b"\n" for line in damage(lines)))
    (tmp_path / HEAD).write_bytes((state / HEAD).read_bytes())
    with pytest.raises(RunError) as caught:
        verified(tmp_path)
    assert words.format(last=len(lines)) in str(caught.value)
    assert CliRunner().invoke(app, ["deploy", "audit", str(tmp_path)]).exit_code != 0
    # And such a client tells nothing more: what it has told before is not known.
    assert asked(member_of(state=tmp_path, name="1"), DESCRIBE).kind == "failure"


def test_a_sound_log_is_printed(state: Path) -> None:
    result = CliRunner().invoke(app, ["deploy", "audit", str(state)], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    entries = verified(state)
    assert f"{len(entries)} lines, all unchanged" in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert entries
    shapes = [f"{name}{shape}".removeprefix("reply/") for e in entries for name, shape, _ in e["tensors"][:1]]
    assert all(shape.replace(" ", "") in result.output for shape in shapes), "none is broken over two lines"
    assert CliRunner().invoke(app, ["deploy", "audit", str(state.parent)]).exit_code == 2


def test_a_log_is_sound_while_its_client_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = StateFolder(tmp_path).log

    def meanwhile(path: Path) -> list[bytes]:
        lines = read_lines(path)
        log.append(Release(Packet("describe")), 0, "running", 1e-5)
        return lines

    monkeypatch.setattr("tailorfl.deploy.release_log.read_lines", meanwhile)
    assert [len(verified(tmp_path)) for _ in range(3)] == [0, 1, 2]


def test_the_epsilon_of_a_line_is_unbounded_where_lines_are_missing(state: Path) -> None:
    plain = verified(state)
    (last, *_) = [entry for entry in reversed(plain) if entry["kind"] == "train"]
    private = {**last, "uses": [[0.5, 2.0, "", 1]], "epsilon": 1.25}
    column = HEADS.index("epsilon")

    def shown(*entries: Mapping[str, Any]) -> list[str]:
        return [row[column] for row in table_rows(entries)]

    assert set(shown(*plain)) == {"0", "no DP"}
    assert shown(last, private, last) == ["no DP", "1.25", "unbounded"]
    assert shown({**last, "kind": MISSING}, last) == ["unbounded", "unbounded"]


def test_a_crash_while_a_line_is_written(state: Path, tmp_path: Path) -> None:
    """Half a line is cut off, and a head that is one line behind is enough."""
    lines = (state / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(lines + b'{"n": 99, "bef')
    (tmp_path / HEAD).write_bytes((state / HEAD).read_bytes())
    assert asked(member_of(state=tmp_path, name="1"), DESCRIBE).kind == "describe"
    assert len(verified(tmp_path)) == len(lines.splitlines()) + 1
    head = (tmp_path / NAME).read_bytes().splitlines()[-1]
    (tmp_path / HEAD).write_bytes((state / HEAD).read_bytes())  # the crash came before the head was written
    assert decode(head)["n"] == len(verified(tmp_path))


def full(*given: Any) -> None:
    """What a write does on a full disk."""
    raise RunError("no space left on device")


def test_an_answer_that_leaves_when_there_is_room_again_has_its_uses(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its line could not be written when it was made, so nothing has left then, and nothing is known of it."""

    def no_room(question: Packet, body: bytes, ask: Ask) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("tailorfl.deploy.release_log.append_lines", full)
            assert Packet.decoded(ask(body)).kind == "failure"

    federation.meddle = once_before(1, no_room)
    federation.host(small(train=PRIVATE, rounds=1))
    (entry,) = (line for line in verified(tmp_path / "state-1") if line["kind"] == "train")
    assert entry["uses"]
    assert not entry["again"]


def test_a_disk_that_has_room_for_lines_and_none_for_their_head(
    state: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However often it happens, the head is at most one line behind."""
    for name in (NAME, HEAD):
        shutil.copy(state / name, tmp_path / name)
    member = member_of(state=tmp_path, name="1")
    with monkeypatch.context() as patch:
        patch.setattr("tailorfl.deploy.release_log.write_text", full)
        for _ in range(2):
            assert asked(member, DESCRIBE).kind == "failure"
    assert asked(member_of(state=tmp_path, name="1"), DESCRIBE).kind == "describe"


# -- files that are damaged ---------------------------------------------------------------------------------


def test_a_secret_that_can_be_guessed_is_no_secret(tmp_path: Path) -> None:
    StateFolder(tmp_path).seed("job")
    (tmp_path / "secret").write_bytes(b"")
    with pytest.raises(RunError, match="secret"):
        StateFolder(tmp_path).seed("job")


SLOW = pytest.mark.slow
DAMAGED_FILES = [
    pytest.param(
        "answer-000003.packet", "refuse", "", marks=SLOW
    ),  # it is trained once more, to the same bits
    pytest.param(f"{'?' * 32}.json", "refuse", "", marks=SLOW),  # what was agreed on is asked for again
    ("job.json", "refuse", "its files"),
    pytest.param("checkpoint-000002.safetensors", "refuse", "state-missing", marks=SLOW),
    pytest.param("checkpoint-000002.safetensors", "restart", "", marks=SLOW),
]


@pytest.mark.parametrize(("name", "lost_state", "failure"), DAMAGED_FILES)
def test_a_file_of_a_client_is_damaged(
    name: str, lost_state: str, failure: str, federation: Federation, tmp_path: Path
) -> None:
    """It is restarted in round 3; what can be made anew is, and what cannot is named, or as the server says."""

    def damage(question: Packet, body: bytes, ask: Ask) -> None:
        if name.startswith("answer"):
            ask(body)  # whose answer gets lost
        (path,) = (tmp_path / "state-1").rglob(name)
        path.write_bytes(path.read_bytes()[:-20] + b"x" * 20)
        federation.restart(101)

    federation.meddle = once_before(3, damage)
    result = federation.host(small("apfl", rounds=4, deploy={"lost_state": lost_state}))
    answers = [a for _, q, a in federation.of_kind("train", 101) if is_training(Packet.decoded(q), 3)]
    answer = Packet.decoded(answers[-1])
    assert answer.kind == ("failure" if failure else "train")
    assert failure in str(answer.facts)
    if not failure and lost_state == "refuse":
        result.is_replayed()
        entries = [e for e in verified(tmp_path / "state-1") if e["kind"] == "train" and not e["again"]]
        assert [e["number"] for e in entries] == [1, 2, 3, 4]


@pytest.mark.slow
def test_another_name_is_another_experiment(federation: Federation, tmp_path: Path) -> None:
    """The same settings under another name begin with states of their own, in another folder of the server."""
    first = small("ditto", rounds=2)
    federation.host(first)
    states = {client: private_state(tmp_path, first, client) for client in range(3)}
    second = first.model_copy(update={"name": "again"})
    with pytest.raises(ConfigError, match="'deployed', not 'again'"):
        federation.host(second)
    assert federation.replayed(second, out="new").fates == {"accepted"}
    assert (place_of(second, tmp_path, 1) / "job.json").is_file()
    for client, state in states.items():
        same(private_state(tmp_path, first, client), state)


def test_the_quota_names_old_experiments(federation: Federation, tmp_path: Path) -> None:
    config = small("ditto", rounds=1)
    federation.host(config)
    setup = federation.of_kind("setup", 101)[0][1]
    settings = {**Packet.decoded(setup).facts["experiment"], "name": "second"}
    said: list[str] = []
    member = federation.client("1", policy=Policy(max_disk=1000), notify=said.append)
    assert asked(member, with_facts(setup, experiment=settings)).kind == "failure"
    assert "oldest first: " in said[-1]
    assert config.name in said[-1]
    assert not (tmp_path / "state-1" / "second").exists()


def test_who_has_no_model_at_the_end_says_so(tmp_path: Path) -> None:
    assert "took part in no job" in member_of(state=tmp_path / "never", name="1").without_model()
    federation = ran(small("ditto", rounds=1), tmp_path)
    assert federation.client("1").without_model() == ""
    *questions, finish, _ = [question for node, question, _ in federation.passed if node == 101]
    member = member_of(state=tmp_path / "killed", name="1")
    for question in questions:
        member.answer(question)
    assert "no model of its last job" in member.without_model()
    member.close()
    again = member_of(state=tmp_path / "killed", name="1")
    assert "no model of its last job" in again.without_model()
    assert asked(again, finish).facts["exported"] is True
    assert again.without_model() == ""


# -- the file of a policy -----------------------------------------------------------------------------------


def test_a_policy_is_written_and_read(tmp_path: Path) -> None:
    config = experiment("ditto", data={"name": "table", "options": {"label": "ill", "features": ["a", "b"]}})
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(config.to_dict(), sort_keys=True))  # in another order
    policy = tmp_path / "policy.yaml"
    result = CliRunner().invoke(app, ["deploy", "policy", str(tmp_path / "e.yaml"), "-o", str(policy)])
    assert result.exit_code == 0, result.output
    assert experiment_digest(config) in result.output
    read = Policy.read(policy)
    assert (read.methods, read.models, read.columns) == (("ditto",), ("mlp",), ("ill", "a", "b"))
    assert (read.max_rounds, read.min_clients) == (2, 2)
    # Another budget pays some methods for more rounds.
    of_bytes = template(config.model_copy(update={"budget": "bytes"}))
    assert yaml.safe_load(of_bytes)["max_rounds"] == DEFAULT_POLICY.max_rounds
    many = Policy.model_validate(
        yaml.safe_load(template(config.model_copy(update={"seeds": (*range(101),)})))
    )
    assert (many.max_seeds, many.max_jobs) == (101, 101)
    policy.write_text(template())
    assert Policy.read(policy) == Policy(min_clients=2)
    assert all(f"\n{key}: " in template() for key in Policy.model_fields)
    assert CliRunner().invoke(app, ["deploy", "policy", "-o", str(policy)]).exit_code == 2


@pytest.mark.parametrize("text", ["min_rows: -1", "max_rows: many", "budget: 3", "a: [", "max_epsilon: 0"])
def test_a_policy_that_cannot_be_used_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(ConfigError, match=text.partition(":")[0] if "[" not in text else "policy.yaml"):
        Policy.read(tmp_path / "policy.yaml")


# -- older copies of a folder -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def older_copy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Packet]:
    """A copy of a client's folder of after round 1, and the question of round 3, when that of round 2 was accepted."""
    folder = tmp_path_factory.mktemp("copied")

    def copy(question: Packet, body: bytes, ask: Ask) -> None:
        shutil.copytree(folder / "state-1", folder / "copy", ignore=shutil.ignore_patterns(".lock"))

    with Federation(folder, meddle=once_before(2, copy)) as federation:
        federation.host(small("ditto", train=PRIVATE))
    return folder / "copy", Packet.decoded(federation.of_kind("train", 101)[-1][1])


def asked_there(state: Path, question: Packet, policy: Policy = DEFAULT_POLICY, **facts: object) -> Packet:
    """What a client of a state folder answers to a question with other facts."""
    with closing(member_of(state=state, name="1", policy=policy)) as member:
        return asked(member, with_facts(question.encoded(), **facts))


@pytest.mark.slow
@pytest.mark.threat(
    "a fault",
    "an older copy of a client's folder",
    now="noted in the log; no epsilon holds",
    before="in silence",
)
def test_an_older_copy_of_a_folder_is_noticed(older_copy: tuple[Path, Packet], tmp_path: Path) -> None:
    """Nobody knows what left after it was made: it is said, noted once, and no epsilon holds from then on."""
    copy, question = older_copy
    state = Path(shutil.copytree(copy, tmp_path / "state"))
    assert math.isfinite(verified(state)[-1]["epsilon"])
    said: list[str] = []
    member = member_of(state=state, name="1", notify=said.append)
    for _ in range(2):
        assert asked(member, question.encoded()).facts["code"] == "state-missing"
    (missing,) = [entry for entry in verified(state) if entry["kind"] == "missing"]
    assert (missing["facts"], missing["epsilon"]) == ({"accepted": 2, "known": 1}, math.inf)
    assert sum("an older copy or a new one" in sentence for sentence in said) == 1
    member.close()
    assert asked_there(state, question, restart=True).kind == "train"
    assert verified(state)[-1]["epsilon"] == math.inf


@pytest.mark.threat(
    "a fault",
    "epsilon is bounded, and the log lost",
    now="no private training",
    before="epsilon was spent anew",
)
@pytest.mark.parametrize("copied", [True, False], ids=["an older copy", "a new folder"])
def test_epsilon_is_not_spent_twice(copied: bool, older_copy: tuple[Path, Packet], tmp_path: Path) -> None:
    """Where its policy bounds ε, also where the server lets it begin anew."""
    copy, question = older_copy
    state = Path(shutil.copytree(copy, tmp_path / "state"))
    if not copied:  # what was agreed on is told again by the server
        for path in (state / NAME, state / HEAD):
            path.unlink()
    answer = asked_there(state, question, Policy(max_epsilon=100.0), restart=True)
    assert answer.kind == "failure"
    assert "policy" in answer.facts["reason"]
    assert not [e for e in verified(state) if e["kind"] == "train" and e["uses"] and e["number"] == 3]


def test_epsilon_that_another_process_spends_meanwhile(
    older_copy: tuple[Path, Packet], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A client of another federation that shares the folder answers while this one trains."""
    copy, question = older_copy
    state = Path(shutil.copytree(copy, tmp_path / "state"))
    other = StateFolder(state).log
    policy = Policy(max_epsilon=other.epsilon(1e-5, other.uses))

    def trained(run: LocalRun, client: int, message: TensorDict) -> LocalResult:
        other.append(Release(Packet("train"), uses=other.uses.copy()), 0, "other", policy.delta)
        return one_round(run, client, message)

    one_round = LocalRun.one_round
    monkeypatch.setattr(LocalRun, "one_round", trained)
    assert asked_there(state, question, policy, round=2, acked=1).kind == "failure"
    assert verified(state)[-1]["experiment"] == "other"


def test_a_copy_of_the_newest_state_goes_on(older_copy: tuple[Path, Packet], tmp_path: Path) -> None:
    """The question of the round after it is answered, as nothing is missing.

    What a killed process had begun to write, as large as a state, is deleted.
    """
    copy, question = older_copy
    state = Path(shutil.copytree(copy, tmp_path / "state"))
    part = place_of(small(), tmp_path, 1).relative_to(tmp_path / "state-1") / f".state.{2**23}.part"
    (state / part).write_bytes(b"0")
    assert asked_there(state, question, Policy(max_epsilon=100.0), round=2, acked=1).kind == "train"
    assert not (state / part).exists()
    assert not [entry for entry in verified(state) if entry["kind"] == "missing"]


@pytest.mark.parametrize("new_secret", [False, True])
def test_noise_is_that_of_the_secret(
    new_secret: bool, older_copy: tuple[Path, Packet], tmp_path: Path
) -> None:
    """As docs/security.md says of a server that denies the last answer: only a new secret gives other noise."""
    state = Path(shutil.copytree(older_copy[0], tmp_path / "state"))
    seed = StateFolder(state).seed("job")
    if new_secret:
        (state / "secret").unlink()
    assert (StateFolder(state).seed("job") == seed) is not new_secret
