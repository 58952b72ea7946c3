"""Servers that ask for more than a client agreed to: each gets a refusal, before samples are looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from deploy.federation import PRIVATE as NOISE
from deploy.federation import (
    Federation,
    asked,
    experiment,
    filled,
    packed,
    place_of,
    small,
    with_facts,
    with_tensor,
)
from tailorfl.data.own import from_tensors
from tailorfl.data.source import Source
from tailorfl.deploy.client_session import ClientSession, member_of
from tailorfl.deploy.messages import Packet
from tailorfl.deploy.policy import DEFAULT_POLICY, Policy, experiment_digest
from tailorfl.errors import MessageError, PolicyError, TailorflError
from tailorfl.privacy import Use
from tailorfl.settings.experiment import ExperimentConfig

ROWS = 60
DIGITS = {"name": "digits", "clients": 2, "samples": 200}
OPTIONS = {"label": "outcome", "features": ["age", "pain"]}


def write_table(path: Path) -> None:
    """Sixty patients, each with a name."""
    rng = np.random.default_rng(3)
    pd.DataFrame(
        {
            "age": rng.normal(60, 9, ROWS).round(1),
            "pain": rng.choice(["none", "some"], ROWS),
            "name": [f"patient-{number}" for number in range(ROWS)],
            "outcome": rng.choice(["ill", "well"], ROWS),
        }
    ).to_csv(path, index=False)


def of_table(**changes: Any) -> ExperimentConfig:
    """An experiment on two such tables."""
    data = {"name": "table", "normalise": "federated", "options": OPTIONS, **changes.pop("data", {})}
    deploy = {"clients": 2, **changes.pop("deploy", {})}
    return experiment("fedavg", data=data, deploy=deploy, **changes)


def table_of_the_experiment(path: Path) -> dict[str, Any]:
    """Data that every process of an experiment reads from one file."""
    return {"name": "table", "clients": 2, "options": {**OPTIONS, "features": ["age"], "path": str(path)}}


def describe(config: ExperimentConfig) -> bytes:
    """The first question about an experiment."""
    return Packet("describe", {"experiment": config.to_dict(), "seed": config.seeds[0]}).encoded()


def summarise(config: ExperimentConfig, others: tuple[int, ...] = (50,), seed: int = 5) -> bytes:
    """The question for sums, of a federation with other clients of so many rows."""
    names = ["north", *(f"o{number}" for number in range(len(others)))]
    facts = {"experiment": config.to_dict(), "seed": seed, "names": names, "rows": [ROWS, *others]}
    return Packet("summarise", facts).encoded()


def agreed(config: ExperimentConfig, sizes: dict[str, list[int]], **changes: Any) -> bytes:
    """The question to agree on a job with tables."""
    constants: dict[str, Any] = {
        "roles": {"label": ["outcome"], "features": OPTIONS["features"]},
        "columns": {"age": {"kind": "number"}, "pain": {"kind": "word", "levels": ["none", "some"]}},
        "classes": ["ill", "well"],
    }
    sample = {"outputs": 2, "x": [[3], "float32"], "y": [[], "int64"], "mean": None, "std": None}
    info = {"augment": "none", "credit": False, "info": {"classes": ["ill", "well"]}}
    source = {"name": "tables", "task": "classification", **sample, **info}
    constants |= changes.pop("constants", {})
    prepared = {"constants": constants, "features": OPTIONS["features"], "rows": [ROWS, 50]}
    facts = {"experiment": config.to_dict(), "label": "fedavg", "seed": 5, "names": ["north", "o0"]}
    facts |= {"sizes": sizes, "source": source, "prepared": {**prepared, **changes}}
    return Packet("setup", facts).encoded()


@dataclass(frozen=True)
class Heard:
    """What passed between an honest server and client 1 of an experiment with privacy, three rounds of it."""

    setup: bytes
    train: tuple[bytes, ...]
    evaluate: tuple[bytes, ...]

    def changed(self, **changes: Any) -> bytes:
        """The question to agree on a job, of an experiment with other settings."""
        settings = {**Packet.decoded(self.setup).facts["experiment"], **changes}
        return with_facts(self.setup, experiment=settings)


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Heard:
    """An honest federation, whose messages the hostile servers change."""
    with Federation(tmp_path_factory.mktemp("heard"), 2) as federation:
        federation.host(experiment("fedavg", data=DIGITS, train=NOISE, rounds=3, eval={"every": 1}))
    (setup,), train, evaluate = (
        [question for _, question, _ in federation.of_kind(kind, 101)]
        for kind in ("setup", "train", "evaluate")
    )
    return Heard(setup, tuple(train), tuple(evaluate))


@dataclass(frozen=True)
class Attack:
    """One hostile server.

    Attributes:
        words: of the refusal.
        before: what the same packets got from a client without a policy.
        packets: what it sends, in this order, made of what was heard and the path of a table; the last must be refused.
        policy: of the client.
        answers: how many of the packets are answered.
    """

    words: str
    before: str
    packets: Callable[[Heard, Path], list[bytes]]
    policy: dict[str, Any] = field(default_factory=dict)
    answers: int = 0


KEPT = "its policy does not allow it; its log has the details"
ONCE = "to a different question, and sends it only once"
OPENS = "does not open files that a server names"
HALF = {"train": [42, 30], "val": [6, 10], "test": [12, 10]}
NAMED = {"kind": "word", "levels": [f"patient-{number}" for number in range(ROWS)]}
AGE = {**OPTIONS, "features": ["age"]}
HUB = {"name": "huggingface", "options": {"path": "a/b", "label": "c"}}
TOKENS = {"name": "text_table", "options": {"label": "c", "tokenizer": "bert-base-uncased"}}
MEMORY = "as much memory, or the end of the process"


def noise(**changes: Any) -> dict[str, Any]:
    """Private training with other settings of privacy."""
    return {**NOISE, "dp": {**NOISE["dp"], **changes}}


def moved(question: bytes, value: float) -> bytes:
    """The same question with another broadcast."""
    return with_tensor(question, filled(value))


ON_A_TABLE = {
    "one row a summary": Attack(KEPT, "the row",
        lambda heard, table: [summarise(of_table(data={"split": {"train": 0.02, "test": 0.9}}))]),
    "a few rows a summary": Attack(KEPT, "the sum of eight ages",
        lambda heard, table: [summarise(of_table(data={"split": {"train": 0.13, "test": 0.8}, "options": AGE}))]),
    "sums of other rows": Attack(ONCE, "the sums of both, whose difference is single rows",
        lambda heard, table: [summarise(of_table()), summarise(of_table(), (51,))], answers=1),
    "sums of many seeds": Attack("max_seeds: 10", "sums of 900 different sets of rows",
        lambda heard, table: [summarise(of_table(seeds=list(range(900))))]),
    "a seed that is not of the experiment": Attack("for a seed that the experiment does not have", "the sums of both",
        lambda heard, table: [summarise(of_table()), summarise(of_table(), seed=6)], answers=1),
    "a column of names": Attack(KEPT, "the names of all patients",
        lambda heard, table: [summarise(of_table(data={"options": {"label": "outcome"}}))]),
    "names as classes": Attack(KEPT, "the names of all patients",
        lambda heard, table: [summarise(of_table(data={"options": {**OPTIONS, "label": "name"}}))]),
    "a column that is not listed": Attack(KEPT, "the names of all columns",
        lambda heard, table: [describe(of_table(data={"options": {"label": "outcome"}}))],
        {"columns": ["age", "pain", "outcome"]}),
    "features that were not described": Attack(
        "features that differ from those this client described", "it read the column",
        lambda heard, table: [agreed(of_table(), HALF, features=["age", "name"])]),
    "a column that the constants name": Attack(
        "columns that were not described", "it trained on the column",
        lambda heard, table: [agreed(of_table(), HALF, constants={"columns": {"name": NAMED}})]),
    "a label that the constants name": Attack(
        "for another label than the experiment's", "it trained on the column",
        lambda heard, table: [agreed(
            of_table(data={"normalise": "none", "options": AGE}), HALF, features=["age"],
            constants={"columns": {}, "roles": {"label": ["name"]}, "classes": NAMED["levels"]})]),
    "a billion rows in the preparation": Attack("max_rows: 10000000", MEMORY,
        lambda heard, table: [agreed(of_table(), HALF, rows=[ROWS, 10**12])]),
    "a billion rows elsewhere": Attack("max_rows: 10000000", MEMORY,
        lambda heard, table: [summarise(of_table(), (10**12,))]),
    "sums where noise is needed": Attack(KEPT, "exact sums, before any noise",
        lambda heard, table: [summarise(of_table(train=NOISE))], {"max_epsilon": 8.0}),
}  # fmt: skip
ON_A_SHARE = {
    "weights from a file of the client": Attack(OPENS, "it opened the file",
        lambda heard, table: [heard.changed(model={"name": "mlp", "weights": str(table)})]),
    "data from a file of the client": Attack(OPENS, "it opened the file, and told of its columns",
        lambda heard, table: [describe(experiment("fedavg", data=table_of_the_experiment(table)))]),
    "a data set of a hub": Attack(OPENS, "it tried to download it",
        lambda heard, table: [describe(experiment("fedavg", data=HUB))]),
    "a public set of a hub": Attack(OPENS, "it tried to download it",
        lambda heard, table: [describe(experiment("fedavg", data={"name": "femnist"}))]),
    "a model of a hub, without an owner": Attack(OPENS, "it tried to download it",
        lambda heard, table: [heard.changed(model={"name": "huggingface", "checkpoint": "gpt2"})]),
    "a tokenizer of a hub, without an owner": Attack(OPENS, "it tried to download it",
        lambda heard, table: [describe(experiment("fedavg", data=TOKENS))]),
    "another broadcast in the same round": Attack(ONCE, "a new reply to each, with noise anew",
        lambda heard, table: [heard.setup, heard.train[0], *(moved(heard.train[0], k / 10) for k in range(1, 5))],
        answers=2),
    "a round of a million": Attack("one of the 3 rounds", "a reply",
        lambda heard, table: [heard.setup, with_facts(heard.train[0], round=1_000_000)], answers=1),
    "another model to be measured": Attack(ONCE, "its metrics on the client's test rows",
        lambda heard, table: [heard.setup, heard.train[0], heard.evaluate[0], moved(heard.evaluate[0], 9.0)],
        answers=3),
    "metrics where none may leave": Attack("no metric leaves this client", "metrics",
        lambda heard, table: [heard.setup, heard.train[0], heard.evaluate[0]], {"metrics": False}, answers=2),
    "almost no noise": Attack(KEPT, "a reply without privacy",
        lambda heard, table: [heard.changed(train=noise(noise=1e-6)), heard.train[0]], {"min_noise": 0.5}, answers=1),
    "no noise": Attack("no train.dp of level sample", "a reply without privacy",
        lambda heard, table: [heard.changed(train={**NOISE, "dp": None})], {"min_noise": 0.5}),
    "noise by the server": Attack("no train.dp of level sample", "a reply that the server sees without noise",
        lambda heard, table: [heard.changed(train=noise(level="client"), weights="uniform")], {"max_epsilon": 8.0}),
    "more than is left of epsilon": Attack(KEPT, "all rounds",
        lambda heard, table: [heard.setup, *heard.train], {"max_epsilon": 6.5}, answers=3),
    "a second experiment": Attack(KEPT, "a reply, at a budget of its own",
        lambda heard, table: [heard.setup, *heard.train[:2], heard.changed(name="again"), heard.train[0]],
        {"max_epsilon": 6.5}, answers=4),
    "a method that is not allowed": Attack("does not allow the method 'scaffold'", "a reply",
        lambda heard, table: [heard.changed(methods=[{"name": "scaffold", "label": "fedavg"}])],
        {"methods": ["fedavg"]}),
    "a model that is not allowed": Attack("does not allow the model 'logistic'", "a reply",
        lambda heard, table: [heard.changed(model="logistic")], {"models": ["mlp"]}),
    "a federation of two": Attack("min_clients: 3", "a reply",
        lambda heard, table: [heard.setup], {"min_clients": 3}),
    "a billion parameters": Attack("max_numbers: 250000000", "3.7 GB of memory",
        lambda heard, table: [heard.changed(model={"name": "mlp", "hidden": [30_000, 30_000]})]),
    "a million million samples": Attack("max_numbers: 250000000", "the memory that they take",
        lambda heard, table: [describe(experiment("fedavg", data={**DIGITS, "clients": 10**6, "samples": 10**6}))]),
    "ten million epochs": Attack("max_steps: 100000", "work for weeks",
        lambda heard, table: [heard.changed(train={**NOISE, "epochs": 10**6})]),
    "a million rounds": Attack("max_rounds: 10000", "as many rounds",
        lambda heard, table: [heard.changed(rounds=10**6)]),
    "a flood of facts": Attack("bytes of facts; at most 8,388,608", "a hundred times as much memory",
        lambda heard, table: [packed(Packet("setup", {"names": ["n" * 8] * 10**6}))]),
    "a full disk": Attack("it cannot read or write its files", "the whole disk",
        lambda heard, table: [heard.setup, heard.train[0]], {"max_disk": 2_000}, answers=1),
}  # fmt: skip
ATTACKS = ON_A_TABLE | ON_A_SHARE


@pytest.fixture
def said() -> list[str]:
    """What the client has said to its operator."""
    return []


@pytest.fixture
def with_table(tmp_path: Path, said: list[str]) -> Callable[..., ClientSession]:
    """A client with a table of its own, whose operator has accepted some experiments."""
    write_table(tmp_path / "north.csv")

    def client(*configs: ExperimentConfig, **policy: Any) -> ClientSession:
        return member_of(
            state=tmp_path / "state",
            data=tmp_path / "north.csv",
            policy=Policy(**policy),
            accept=tuple(map(experiment_digest, configs)),
            notify=said.append,
        )

    return client


@pytest.fixture
def with_share(tmp_path: Path, said: list[str]) -> Callable[..., ClientSession]:
    """A client with its share of the experiment's data."""
    return lambda **policy: member_of(
        state=tmp_path / "state", name="1", policy=Policy(**policy), notify=said.append
    )


def experiments_of(packets: list[bytes]) -> list[ExperimentConfig]:
    """The experiments that packets are about."""
    facts = [Packet.decoded(one).facts for one in packets if len(one) < 2**23]
    return [ExperimentConfig.model_validate(found["experiment"]) for found in facts if "experiment" in found]


def threat(case: str) -> pytest.MarkDecorator:
    """What the attack got and gets, for the table of tools/attacks.py."""
    attack = ATTACKS[case]
    return pytest.mark.threat("a server", case, now=f"refused: {attack.words}", before=attack.before)


@pytest.mark.parametrize("case", [pytest.param(case, marks=threat(case)) for case in ATTACKS])
def test_a_hostile_server_is_refused(
    case: str, heard: Heard, with_table: Any, with_share: Any, said: list[str], tmp_path: Path
) -> None:
    attack = ATTACKS[case]
    packets = attack.packets(heard, tmp_path / "north.csv")
    # Of a table the operator has accepted all of it: what refuses is the policy.
    accepted = experiments_of(packets) if case in ON_A_TABLE else ()
    member = (with_table if case in ON_A_TABLE else with_share)(*accepted, **attack.policy)
    job, answers = "", list[Packet]()
    for packet in packets:
        if b'\\"kind\\": \\"setup\\"' not in packet and job:  # of the job that was agreed on last
            packet = with_facts(packet, digest=job)
        answers.append(asked(member, packet))
        job = answers[-1].facts["digest"] if answers[-1].kind == "setup" else job
    member.close()
    assert answers[-1].kind == "failure"
    assert attack.words in answers[-1].facts["reason"]
    assert sum(answer.kind != "failure" for answer in answers) == attack.answers
    assert "patient-" not in str([answer.facts for answer in answers])
    assert said[-1].startswith(("refused: ", "failed: "))


def test_an_experiment_that_nobody_accepted(with_table: Any, said: list[str]) -> None:
    """The operator is shown what it is about and what to type, and with that it is answered."""
    config, member = of_table(), with_table()
    for question in (describe(config), summarise(config), agreed(config, HALF)):
        answer = asked(member, question)
        assert answer.kind == "failure"
        assert f"--accept {experiment_digest(config)}" in answer.facts["reason"]
    assert sum("the server asks to join 'deployed'" in sentence for sentence in said) == 1
    assert any("fedavg (fedavg), 2 rounds" in sentence and "age" in sentence for sentence in said)
    # Another experiment is another digest; where it is measured and how long the server waits is not.
    member = with_table(config)
    for changes, kind in (({}, "describe"), ({"rounds": 3}, "failure"), ({"threads": 2}, "describe")):
        assert asked(member, describe(config.model_copy(update=changes))).kind == kind


def test_an_experiment_of_the_clients_own_file(tmp_path: Path) -> None:
    """It needs no consent, and nothing else has it."""
    write_table(tmp_path / "north.csv")
    config = of_table()
    member = member_of(state=tmp_path / "state", data=tmp_path / "north.csv", experiment=config)
    assert asked(member, describe(config)).kind == "describe"
    answer = asked(member, describe(config.model_copy(update={"rounds": 9})))
    assert "rounds was 2 and is 9" in answer.facts["reason"]


def test_a_summary_is_given_once_also_after_a_restart(with_table: Any, tmp_path: Path) -> None:
    """The same question gets the same answer; another one, or another file, gets none."""
    config = of_table()
    first = with_table(config).answer(summarise(config))
    assert Packet.decoded(first).kind == "summarise"
    again = with_table(config)
    patient = config.model_copy(update={"deploy": config.deploy.model_copy(update={"wait_seconds": 9.0})})
    for same in (config, patient):  # a server that is started again may wait longer
        assert again.answer(summarise(same)) == first
    assert ONCE in asked(again, summarise(config, (49,))).facts["reason"]
    frame, member = pd.read_csv(tmp_path / "north.csv"), with_table(config)
    frame.assign(age=frame["age"] + 1).to_csv(tmp_path / "north.csv", index=False)
    assert asked(member, summarise(config)).facts["reason"] == KEPT


def test_a_refused_summary_is_not_asked_for_in_another_way(with_table: Any) -> None:
    """Where it is refused would tell of rows, question by question."""
    config = of_table(data={"options": {"label": "outcome"}})
    member = with_table(config)
    assert asked(member, summarise(config)).facts["reason"] == KEPT
    assert ONCE in asked(member, summarise(config, (49,))).facts["reason"]


@pytest.mark.threat(
    "a server", "asks a client that joins late for sizes, to see what is refused", now="sizes alone, whatever the rows",
    before="a refusal for rare words among rows of its choice, any number of times",
)  # fmt: skip
def test_who_joins_late_tells_sizes_and_nothing_of_a_summary(with_table: Any) -> None:
    config = of_table()
    member = with_table(config, min_rows=1000, min_count=1000)
    question = Packet.decoded(summarise(config))
    for other in (50, 51):
        facts = {**question.facts, "rows": [ROWS, other], "joins": True}
        answer = asked(member, Packet("summarise", facts).encoded())
        assert answer.facts.keys() == {"sizes", "summary"}
        assert answer.facts["summary"] == {}
    assert asked(member, question.encoded()).kind == "failure"


def test_files_that_the_policy_lists_are_opened(tmp_path: Path) -> None:
    weights = tmp_path / "w" / "a.npz"
    config = experiment("fedavg", data=DIGITS, model={"name": "mlp", "weights": str(weights)})
    Policy(files=[str(weights)]).admitted(config, own_file=False)
    weights.parent.mkdir()
    Policy(files=["/etc", str(weights.parent)]).admitted(config, own_file=False)
    weights.symlink_to("/etc/hostname")
    with pytest.raises(MessageError, match=OPENS):
        Policy(files=[str(weights.parent)]).admitted(config, own_file=False)
    with pytest.raises(MessageError, match=OPENS):
        Policy(columns=[str(weights)]).admitted(config, own_file=True)


def test_columns_and_signs_of_a_table_are_no_files() -> None:
    reading = {"exclude": ["born/died", "c:d"], "sep": ":", "decimal": "."}
    config, empty = (
        of_table(data={"options": {**OPTIONS, **more}})
        for more in (reading, {"na_values": [-99999, 9999999]})
    )
    for table in (config, empty):
        DEFAULT_POLICY.admitted(table, own_file=True)
    DEFAULT_POLICY.admitted(empty, own_file=False)
    with pytest.raises(MessageError, match=OPENS):
        DEFAULT_POLICY.admitted(config, own_file=False)


def of_classes(*rows: int) -> Source:
    """Samples of classes with so many rows each."""
    return from_tensors(np.zeros((sum(rows), 1)), np.repeat(np.arange(len(rows)), rows))


def admit(policy: Policy) -> ExperimentConfig:
    """Let a policy look at three seeds of two methods, one of which has seven rounds and trains in 9,000 steps."""
    long = {"name": "ditto", "rounds": 7, "train": {"steps": 9000, "epochs": None}}
    config = experiment("fedavg", seeds=[1, 2, 3], methods=["fedavg", long], data=DIGITS)
    return policy.admitted(config, own_file=False)


def check_mlp(policy: Policy) -> None:
    """Let a policy look at 6 inputs, 5 hidden units and 4 outputs: 35 + 24 numbers."""
    config = experiment("fedavg", model={"name": "mlp", "hidden": [5]})
    policy.check_model(config, "fedavg", {"x": [[6], "float32"], "y": [[], "int64"], "outputs": 4})


def of_images(height: int, width: int) -> ExperimentConfig:
    """An experiment on folders of images that are brought to one size."""
    return experiment("fedavg", data={"name": "folder", "options": {"size": [height, width]}})


USES = Counter({Use(0.1, 1.5): 3, Use(1.0, 1.25): 1})
BOUNDS: list[tuple[str, float, Callable[[Policy], Any]]] = [
    ("min_rows", 12, lambda policy: policy.check_summary(of_classes(6, 6), 12)),
    ("min_count", 7, lambda policy: policy.check_summary(of_classes(9, 7, 0), 16)),
    ("max_levels", 3, lambda policy: policy.check_summary(of_classes(5, 5, 0, 5), 15)),
    ("min_clients", 3, lambda policy: policy.check_federation(["a", "b", "c"], [1, 2, 3])),
    ("max_clients", 3, lambda policy: policy.check_federation(["a", "b", "c"], [1, 2, 3])),
    ("max_rows", 15, lambda policy: policy.check_federation(["a", "b"], [4, 5], [0, 6])),
    ("max_rounds", 7, admit),
    ("max_seeds", 3, admit),
    ("max_jobs", 6, admit),
    ("max_steps", 9000, admit),
    ("max_numbers", 59, check_mlp),
    ("min_noise", 1.25, lambda policy: policy.check_noise(USES, None)),
    ("max_epsilon", 2.5, lambda policy: policy.check_noise(USES, 2.5)),
    ("max_numbers", 9000, lambda policy: policy.admitted(of_images(100, 90), own_file=True)),
]
"""(setting of a policy, the strictest value that allows a question, the question)."""


@pytest.mark.parametrize(("key", "bound", "check"), BOUNDS)
def test_a_policy_allows_just_its_bounds(key: str, bound: float, check: Callable[[Policy], Any]) -> None:
    check(Policy(**{key: bound}))
    with pytest.raises((MessageError, PolicyError), match=key):
        check(Policy(**{key: bound + (1 if key.startswith("min") else -1)}))


@pytest.mark.parametrize("rows", [10**7 + 1, 10**400])
def test_a_bound_names_what_exceeds_it(rows: int) -> None:
    with pytest.raises(MessageError, match=rf"{min(rows, 10**18)} rows.* max_rows: {10**7}"):
        Policy().check_federation(["a"], [rows])


def test_losses_stay_where_metrics_may_not_leave(heard: Heard, with_share: Any) -> None:
    member = with_share(metrics=False)
    member.answer(heard.setup)
    answer = asked(member, heard.train[0])
    assert answer.kind == "train"
    assert set(answer.facts["metrics"].values()) == {None}


def test_a_client_that_tells_no_metrics_takes_part(tmp_path: Path) -> None:
    """The losses of a round, and the evaluation, are those of the others."""
    people = {
        100 + i: member_of(state=tmp_path / f"state-{i}", name=str(i), policy=Policy(metrics=i != 1))
        for i in range(3)
    }
    with Federation(tmp_path, people) as federation:
        result = federation.replayed(small("fedavg", rounds=2))
    assert result.fates == {"accepted"}
    assert set(result.store.clients()["client"]) == {0, 2}
    told = [Packet.decoded(a).facts["metrics"]["train"] for _, _, a in federation.of_kind("train")]
    losses = [[loss for loss in told[i : i + 3] if loss is not None] for i in (0, 3)]
    assert [len(two) for two in losses] == [2, 2]
    assert result.store.rounds()["loss/train"].tolist() == pytest.approx([sum(two) / 2 for two in losses])


@pytest.mark.parametrize("tells", [1, None], ids=["one of three", "nobody"])
def test_most_clients_tell_no_metrics(tells: int | None, tmp_path: Path) -> None:
    """They have done their part, so nobody waits for them; without any metrics there is no table, but models."""
    people = {
        100 + i: member_of(state=tmp_path / f"state-{i}", name=str(i), policy=Policy(metrics=i == tells))
        for i in range(3)
    }
    config = small("fedavg", rounds=2, deploy={"wait_seconds": 0.5})
    with Federation(tmp_path, people) as federation:
        if tells is None:
            with pytest.raises(TailorflError, match="no client was evaluated"):
                federation.host(config)
        else:
            assert set(federation.host(config).store.clients()["client"]) == {tells}
    assert (place_of(config, tmp_path, 1) / "model").is_dir()


def test_noise_that_no_accountant_counts_ends_no_client(heard: Heard, with_share: Any) -> None:
    """Nothing leaves without a line in the log, and the next question is answered."""
    member = with_share()
    setup = asked(member, heard.changed(name="thin", train=noise(noise=1e-12)))
    assert asked(member, with_facts(heard.train[0], digest=setup.facts["digest"])).kind == "failure"
    assert asked(member, heard.setup).kind == "setup"


def test_an_evaluation_takes_tensors_of_the_model_alone(heard: Heard, with_share: Any) -> None:
    member = with_share()
    for question in (heard.setup, heard.train[0]):
        assert asked(member, question).kind != "failure"
    wrong = with_tensor(heard.evaluate[0], lambda tensor: tensor.repeat_interleave(2, -1))
    assert "but this model's is" in asked(member, wrong).facts["reason"]
    nan = with_tensor(heard.evaluate[0], filled(float("nan")))
    assert "NaN or infinity" in asked(member, nan).facts["reason"]
    assert asked(member, heard.evaluate[0]).kind == "evaluate"
