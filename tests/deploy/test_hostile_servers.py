"""Servers that ask for more than a client agreed to: each gets a refusal, before samples are looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from deploy.federation import PRIVATE as NOISE
from deploy.federation import Federation, experiment, filled, packed, with_facts, with_tensor
from tailorfl.deploy.client_session import ClientSession, member_of
from tailorfl.deploy.codec import Packet
from tailorfl.deploy.policy import Policy, experiment_digest
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
    federation = Federation(tmp_path_factory.mktemp("heard"), 2)
    federation.host(experiment("fedavg", data=DIGITS, train=NOISE, rounds=3, eval={"every": 1}))
    federation.close()
    (setup,), train, evaluate = (
        [question for _, question, _ in federation.of_kind(kind, 101)]
        for kind in ("setup", "train", "evaluate")
    )
    return Heard(setup, tuple(train), tuple(evaluate))


@dataclass(frozen=True)
class Attack:
    """One hostile server.

    Attributes:
        packets: what it sends, in this order; the last one must be refused.
        words: of the refusal.
        policy: of the client.
        file: whether the client has a table of its own; else its share of the experiment's data.
        before: what the same packets got from a client without a policy.
        answers: how many of the packets are answered.
    """

    packets: Callable[[Heard, Path], list[bytes]]
    words: str
    before: str
    policy: dict[str, Any] = field(default_factory=dict)
    file: bool = False
    answers: int = 0


KEPT = "its policy does not allow it; its own log says more"
ONCE = "to another question already, and answers each once"
OPENS = "opens no file that a server names"
HALF = {"train": [42, 30], "val": [6, 10], "test": [12, 10]}


NAMED = {"kind": "word", "levels": [f"patient-{number}" for number in range(ROWS)]}


def moved(question: bytes, value: float) -> bytes:
    """The same question with another broadcast."""
    return with_tensor(question, filled(value))


ATTACKS = {
    "one row a summary": Attack(
        lambda heard, table: [summarise(of_table(data={"split": {"train": 0.02, "test": 0.9}}))],
        KEPT, "the row", file=True,
    ),
    "a few rows a summary": Attack(
        lambda heard, table: [
            summarise(
                of_table(
                    data={"split": {"train": 0.13, "test": 0.8}, "options": {**OPTIONS, "features": ["age"]}}
                )
            )
        ],
        KEPT, "the sum of eight ages", file=True,
    ),
    "sums of other rows": Attack(
        lambda heard, table: [summarise(of_table()), summarise(of_table(), (51,))],
        ONCE, "the sums of both, whose difference is single rows", file=True, answers=1,
    ),
    "sums of many seeds": Attack(
        lambda heard, table: [summarise(of_table(seeds=list(range(900))))],
        "max_seeds: 10", "sums of 900 different sets of rows", file=True,
    ),
    "a seed that is not of the experiment": Attack(
        lambda heard, table: [summarise(of_table()), summarise(of_table(), seed=6)],
        "with a seed of the experiment", "the sums of both", file=True, answers=1,
    ),
    "a column of names": Attack(
        lambda heard, table: [summarise(of_table(data={"options": {"label": "outcome"}}))],
        KEPT, "the names of all patients", file=True,
    ),
    "names as classes": Attack(
        lambda heard, table: [summarise(of_table(data={"options": {**OPTIONS, "label": "name"}}))],
        KEPT, "the names of all patients", file=True,
    ),
    "a column that is not listed": Attack(
        lambda heard, table: [describe(of_table(data={"options": {"label": "outcome"}}))],
        KEPT, "the names of all columns", {"columns": ["age", "pain", "outcome"]}, file=True,
    ),
    "features that were not described": Attack(
        lambda heard, table: [agreed(of_table(), HALF, features=["age", "name"])],
        "other features than this client has described", "it read the column", file=True,
    ),
    "a column that the constants name": Attack(
        lambda heard, table: [agreed(of_table(), HALF, constants={"columns": {"name": NAMED}})],
        "of other columns than were described", "it trained on the column", file=True,
    ),
    "a label that the constants name": Attack(
        lambda heard, table: [
            agreed(
                of_table(data={"normalise": "none", "options": {"label": "outcome", "features": ["age"]}}),
                HALF,
                features=["age"],
                constants={"columns": {}, "roles": {"label": ["name"]}, "classes": NAMED["levels"]},
            )
        ],
        "for another label than the experiment's", "it trained on the column", file=True,
    ),
    "a billion rows in the preparation": Attack(
        lambda heard, table: [agreed(of_table(), HALF, rows=[ROWS, 10**12])],
        "max_rows: 10000000", "as much memory, or the end of the process", file=True,
    ),
    "sums where noise is needed": Attack(
        lambda heard, table: [summarise(of_table(train=NOISE))],
        KEPT, "exact sums, before any noise", {"max_epsilon": 8.0}, file=True,
    ),
    "weights from a file of the client": Attack(
        lambda heard, table: [heard.changed(model={"name": "mlp", "weights": str(table)})],
        OPENS, "it opened the file",
    ),
    "data from a file of the client": Attack(
        lambda heard, table: [
            describe(experiment("fedavg", data=table_of_the_experiment(table)))
        ],
        OPENS, "it opened the file, and told of its columns",
    ),
    "a data set of a hub": Attack(
        lambda heard, table: [
            describe(experiment("fedavg", data={"name": "huggingface", "options": {"path": "a/b", "label": "c"}}))
        ],
        OPENS, "it tried to download it",
    ),
    "a public set of a hub": Attack(
        lambda heard, table: [describe(experiment("fedavg", data={"name": "femnist"}))],
        OPENS, "it tried to download it",
    ),
    "another broadcast in the same round": Attack(
        lambda heard, table: [heard.setup, heard.train[0], *(moved(heard.train[0], k / 10) for k in range(1, 5))],
        ONCE, "a new reply to each, with noise anew", answers=2,
    ),
    "a round of a million": Attack(
        lambda heard, table: [heard.setup, with_facts(heard.train[0], round=1_000_000)],
        "none of the 3 that were agreed on", "a reply", answers=1,
    ),
    "another model to be measured": Attack(
        lambda heard, table: [heard.setup, heard.train[0], heard.evaluate[0], moved(heard.evaluate[0], 9.0)],
        ONCE, "its metrics on the client's test rows", answers=3,
    ),
    "metrics where none may leave": Attack(
        lambda heard, table: [heard.setup, heard.train[0], heard.evaluate[0]],
        "no metric leaves this client", "metrics", {"metrics": False}, answers=2,
    ),
    "almost no noise": Attack(
        lambda heard, table: [
            heard.changed(train={**NOISE, "dp": {"clip": 1.0, "noise": 1e-6}}),
            heard.train[0],
        ],
        KEPT, "a reply without privacy", {"min_noise": 0.5}, answers=1,
    ),
    "no noise": Attack(
        lambda heard, table: [heard.changed(train={**NOISE, "dp": None})],
        "no train.dp of level sample", "a reply without privacy", {"min_noise": 0.5},
    ),
    "noise by the server": Attack(
        lambda heard, table: [
            heard.changed(train={**NOISE, "dp": {**NOISE["dp"], "level": "client"}}, weights="uniform")
        ],
        "no train.dp of level sample", "a reply that the server sees without noise", {"max_epsilon": 8.0},
    ),
    "more than is left of epsilon": Attack(
        lambda heard, table: [heard.setup, *heard.train],
        KEPT, "all rounds", {"max_epsilon": 6.5}, answers=3,
    ),
    "a second experiment": Attack(
        lambda heard, table: [heard.setup, *heard.train[:2], heard.changed(name="again"), heard.train[0]],
        KEPT, "a reply, at a budget of its own", {"max_epsilon": 6.5}, answers=4,
    ),
    "a method that is not allowed": Attack(
        lambda heard, table: [heard.changed(methods=[{"name": "scaffold", "label": "fedavg"}])],
        "does not train the method 'scaffold'", "a reply", {"methods": ["fedavg"]},
    ),
    "a model that is not allowed": Attack(
        lambda heard, table: [heard.changed(model="logistic")],
        "does not train the model 'logistic'", "a reply", {"models": ["mlp"]},
    ),
    "a federation of two": Attack(
        lambda heard, table: [heard.setup], "this client wants 3", "a reply", {"min_clients": 3},
    ),
    "a billion rows elsewhere": Attack(
        lambda heard, table: [summarise(of_table(), (10**12,))],
        "max_rows: 10000000", "as much memory, or the end of the process", file=True,
    ),
    "a billion parameters": Attack(
        lambda heard, table: [heard.changed(model={"name": "mlp", "hidden": [30_000, 30_000]})],
        "max_numbers: 250000000", "3.7 GB of memory",
    ),
    "a million million samples": Attack(
        lambda heard, table: [describe(experiment("fedavg", data={**DIGITS, "clients": 10**6, "samples": 10**6}))],
        "max_numbers: 250000000", "the memory that they take",
    ),
    "ten million epochs": Attack(
        lambda heard, table: [heard.changed(train={**NOISE, "epochs": 10**6})],
        "max_steps: 100000", "work for weeks",
    ),
    "a million rounds": Attack(
        lambda heard, table: [heard.changed(rounds=10**6)],
        "max_rounds: 10000", "as many rounds",
    ),
    "a flood of facts": Attack(
        lambda heard, table: [packed(Packet("setup", {"names": ["n" * 8] * 10**6}))],
        "bytes of facts; at most 8,388,608", "a hundred times as much memory",
    ),
    "a full disk": Attack(
        lambda heard, table: [heard.setup, heard.train[0]],
        "it cannot read or write its files", "the whole disk", {"max_disk": 2_000}, answers=1,
    ),
}  # fmt: skip


def client_of(
    attack: Attack, folder: Path, configs: list[ExperimentConfig], said: list[str]
) -> ClientSession:
    """A client whose operator has accepted these experiments."""
    table = folder / "north.csv"
    write_table(table)
    return member_of(
        state=folder / "state",
        data=table if attack.file else None,
        name=None if attack.file else "1",
        policy=Policy(**attack.policy),
        accept=tuple(experiment_digest(config) for config in configs),
        notify=said.append,
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
def test_a_hostile_server_is_refused(case: str, heard: Heard, tmp_path: Path) -> None:
    attack = ATTACKS[case]
    packets = attack.packets(heard, tmp_path / "north.csv")
    said: list[str] = []
    # The operator has accepted all of it: what refuses is the policy.
    member = client_of(attack, tmp_path, experiments_of(packets), said)
    job = ""
    answers = []
    for packet in packets:
        if b'\\"kind\\": \\"setup\\"' not in packet and job:  # of the job that was agreed on last
            packet = with_facts(packet, digest=job)
        answers.append(Packet.decoded(member.answer(packet)))
        job = answers[-1].facts["digest"] if answers[-1].kind == "setup" else job
    member.close()
    good = [answer for answer in answers if answer.kind != "failure"]
    assert answers[-1].kind == "failure"
    assert attack.words in answers[-1].facts["reason"]
    assert len(good) == attack.answers
    assert "patient-" not in str([answer.facts for answer in answers])
    assert said[-1].startswith(("refused: ", "failed: "))


def test_an_experiment_that_nobody_accepted(tmp_path: Path) -> None:
    """The operator is shown what it is about and what to type, and with that it is answered."""
    attack, config, said = Attack(lambda heard, table: [], "", "", file=True), of_table(), list[str]()
    member = client_of(attack, tmp_path, [], said)
    for question in (describe(config), summarise(config), agreed(config, HALF)):
        answer = Packet.decoded(member.answer(question))
        assert answer.kind == "failure"
        assert f"--accept {experiment_digest(config)}" in answer.facts["reason"]
    assert sum("the server asks to join 'deployed'" in sentence for sentence in said) == 1
    assert any("fedavg (fedavg), 2 rounds" in sentence and "age" in sentence for sentence in said)
    member = client_of(attack, tmp_path, [config], said)
    assert Packet.decoded(member.answer(describe(config))).kind == "describe"
    # Another experiment is another digest; where it is measured and how long the server waits is not.
    other = config.model_copy(update={"rounds": 3})
    assert Packet.decoded(member.answer(describe(other))).kind == "failure"
    same = config.model_copy(update={"threads": 2, "description": "for all"})
    assert Packet.decoded(member.answer(describe(same))).kind == "describe"


def test_an_experiment_of_the_clients_own_file(tmp_path: Path) -> None:
    write_table(tmp_path / "north.csv")
    config = of_table()
    member = member_of(state=tmp_path / "state", data=tmp_path / "north.csv", experiment=config)
    assert Packet.decoded(member.answer(describe(config))).kind == "describe"
    answer = Packet.decoded(member.answer(describe(config.model_copy(update={"rounds": 9}))))
    assert "rounds was 2 and is 9" in answer.facts["reason"]


def test_a_summary_is_given_once_also_after_a_restart(tmp_path: Path) -> None:
    """The same question gets the same answer; another one, or another file, gets none."""
    attack, config = Attack(lambda heard, table: [], "", "", file=True), of_table()
    first = client_of(attack, tmp_path, [config], []).answer(summarise(config))
    assert Packet.decoded(first).kind == "summarise"
    again = client_of(attack, tmp_path, [config], [])
    assert again.answer(summarise(config)) == first
    assert ONCE in Packet.decoded(again.answer(summarise(config, (49,)))).facts["reason"]
    frame = pd.read_csv(tmp_path / "north.csv")
    member = client_of(attack, tmp_path, [config], [])
    frame.assign(age=frame["age"] + 1).to_csv(tmp_path / "north.csv", index=False)
    assert Packet.decoded(member.answer(summarise(config))).facts["reason"] == KEPT


def test_a_refused_summary_is_not_asked_for_in_another_way(tmp_path: Path) -> None:
    """Where it is refused would tell of rows, question by question."""
    config = of_table(data={"options": {"label": "outcome"}})
    member = client_of(Attack(lambda heard, table: [], "", "", file=True), tmp_path, [config], [])
    assert Packet.decoded(member.answer(summarise(config))).facts["reason"] == KEPT
    assert ONCE in Packet.decoded(member.answer(summarise(config, (49,)))).facts["reason"]


def test_files_that_the_policy_lists_are_opened(tmp_path: Path) -> None:
    config = experiment(
        "fedavg", data=DIGITS, model={"name": "mlp", "weights": str(tmp_path / "w" / "a.npz")}
    )
    Policy(files=[str(tmp_path / "w" / "a.npz")]).admitted(config, own_file=False)
    (tmp_path / "w").mkdir()
    Policy(files=[str(tmp_path / "w")]).admitted(config, own_file=False)
    (tmp_path / "w" / "a.npz").symlink_to("/etc/hostname")
    with pytest.raises(Exception, match=OPENS):
        Policy(files=[str(tmp_path / "w")]).admitted(config, own_file=False)


def test_losses_stay_where_metrics_may_not_leave(heard: Heard, tmp_path: Path) -> None:
    member = client_of(ATTACKS["metrics where none may leave"], tmp_path, [], [])
    member.answer(heard.setup)
    answer = Packet.decoded(member.answer(heard.train[0]))
    assert answer.kind == "train"
    assert set(answer.facts["metrics"].values()) == {None}


def test_an_evaluation_takes_tensors_of_the_model_alone(heard: Heard, tmp_path: Path) -> None:
    member = client_of(Attack(lambda heard, table: [], "", ""), tmp_path, [], [])
    for question in (heard.setup, heard.train[0]):
        assert Packet.decoded(member.answer(question)).kind != "failure"
    wrong = with_tensor(heard.evaluate[0], lambda tensor: tensor.repeat_interleave(2, -1))
    assert "but this model's is" in Packet.decoded(member.answer(wrong)).facts["reason"]
    nan = with_tensor(heard.evaluate[0], filled(float("nan")))
    assert "NaN or infinity" in Packet.decoded(member.answer(nan)).facts["reason"]
    assert Packet.decoded(member.answer(heard.evaluate[0])).kind == "evaluate"
