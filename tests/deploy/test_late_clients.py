"""A client joins a federation that has begun. Real clients, a real server, in one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from deploy.federation import (
    After,
    Deployed,
    Federation,
    experiment,
    place_of,
    private_state,
    records_are_equal,
    same,
)
from deploy.owned import BERT, WARDS, of_files, of_samples, owners, write_images, write_tables, write_texts
from tailorfl.deploy.client_session import ClientSession, member_of
from tailorfl.deploy.membership import ALLOWED, let_in, take_off
from tailorfl.deploy.membership import NAME as MEMBERSHIP
from tailorfl.deploy.release_log import verified
from tailorfl.errors import ConfigError, RunError
from tailorfl.rounds.participation import Trace
from tailorfl.settings.experiment import ExperimentConfig

LATE = "1"
"""The share of the client that joins: number 1 of the data, and 3 of the federation."""


def joined(
    config: ExperimentConfig, federation: Federation, newcomer: ClientSession, after: int = 2
) -> Deployed:
    """Deploy an experiment that another client joins after a round."""

    def join() -> None:
        let_in(federation.folder / "out", newcomer.data.name)
        federation.join(newcomer)

    return federation.host(config, observer=After({after: join}))


def three(method: str | Mapping[str, Any], **changes: Any) -> ExperimentConfig:
    """Four shares, of which three begin."""
    return experiment(method, rounds=6, deploy={"clients": 3}, **changes)


@pytest.fixture
def founders(federation: Federation) -> Federation:
    """The clients that begin."""
    federation.people.pop(101).close()
    del federation.members[101]
    federation.join(federation.client("3"), 103)
    return federation


@pytest.mark.parametrize("method", [pytest.param("fedavg", marks=pytest.mark.slow), "fedrep"])
def test_a_client_joins_and_the_replay_is_equal(method: str, founders: Federation, tmp_path: Path) -> None:
    """Those who are there are asked nothing new, and keep what they agreed on."""
    config = three(method)
    result = joined(config, founders, founders.client(LATE))
    trace = list(result.trace)
    assert [one.joined for one in trace] == [(("0", "2", "3"),), (), ((LATE,),), (), (), ()]
    assert [one.asked for one in trace] == [(0, 1, 2)] * 2 + [(0, 1, 2, 3)] * 4
    assert result.fates == {"accepted"}
    assert (place_of(config, tmp_path, LATE) / "model" / "model.safetensors").is_file()
    again = result.played_again()
    same(again.server_state, result.server_state)
    records_are_equal(result, again)
    agreements = {n: list((tmp_path / f"state-{n}" / "agreements").iterdir()) for n in ("0", "2", "3", LATE)}
    (first, *_), *founding, (late, *_) = agreements.values()
    assert [[path.name for path in paths] for paths in founding] == [[first.name]] * 2
    assert late.name != first.name
    kinds = [line["kind"] for line in verified(tmp_path / "state-0")]
    assert kinds.count("describe") == kinds.count("setup") == 1


def joins_with_a_file(config: ExperimentConfig, folder: Path, files: Path) -> None:
    """Let north join the other wards after a round; assert that the replay is equal, and that north told no sum."""
    config = config.model_copy(update={"rounds": 4})
    nodes = owners(folder, files, config)
    newcomer = nodes.pop(7)
    with Federation(folder, nodes) as federation:
        result = joined(config, federation, newcomer, after=1)
    others = tuple(sorted(WARDS[1 : len(nodes) + 1]))
    assert [one.joined for one in result.trace][:2] == [(others,), (("north",),)]
    assert result.fates == {"accepted"}
    same(result.played_again().server_state, result.server_state)
    told = [line for line in verified(folder / "state-north") if line["kind"] == "summarise"]
    assert [line["facts"]["summary"] for line in told] == [{}]


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        pytest.param(None, {}, marks=pytest.mark.slow),
        (["outcome", "pressure", "pain", "age"], {"indicator": True}),
    ],
    ids=["", "another order"],
)
def test_a_client_with_a_table_joins(
    columns: list[str] | None, options: dict[str, Any], tmp_path: Path
) -> None:
    """Its rows are prepared by what the others agreed on, in whichever order its file has the columns."""
    files = tmp_path / "files"
    write_tables(files)
    if columns:
        pd.read_csv(files / "north.csv")[columns].to_csv(files / "north.csv", index=False)
    data = {"normalise": "federated", "options": {"label": "outcome", **options}}
    joins_with_a_file(of_files(files, clients=3, data=data), tmp_path, files)


@pytest.mark.parametrize("kind", ["folder", pytest.param("text_table", marks=pytest.mark.slow)])
def test_a_client_with_images_or_texts_joins(kind: str, tmp_path: Path) -> None:
    """Images are coloured, and scaled by what the others told of theirs."""
    files, two = tmp_path / "files", {"clients": 2}
    if kind == "folder":
        write_images(files)
        config = of_samples("folder", files, "logistic", {}, deploy=two)
    else:
        write_texts(files)
        options = {"label": "state", "text": "note", "length": 24}
        config = of_samples("text_table", files, BERT, options, deploy=two)
    joins_with_a_file(config, tmp_path, files)
    assert private_state(tmp_path, config, "north")


def test_a_client_with_a_class_of_its_own_is_turned_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = tmp_path / "files"
    write_tables(files)
    odd = pd.read_csv(files / "north.csv")
    odd.loc[0, "outcome"] = "dead"
    odd.to_csv(files / "north.csv", index=False)
    config = of_files(files, "fedavg", clients=3, data={"normalise": "federated"}, rounds=3)
    nodes = owners(tmp_path, files, config)
    newcomer = nodes.pop(7)
    with Federation(tmp_path, nodes) as federation:
        result = joined(config, federation, newcomer, after=1)
    assert all(one.asked == (0, 1, 2) for one in result.trace)
    assert "'north' cannot join: its data cannot be used" in caplog.text
    assert newcomer.turned_away


def test_who_is_not_on_the_list_is_turned_away(founders: Federation) -> None:
    newcomer = founders.client(LATE)
    result = founders.host(three("fedavg"), observer=After({1: lambda: founders.join(newcomer)}))
    assert all(one.asked == (0, 1, 2) for one in result.trace)
    assert "began without '1'" in newcomer.turned_away


DP: dict[str, Any] = {"clip": 1.0, "noise": 1.0}


UNIFORM = {"name": "fedavg", "weights": "uniform"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("fedamp", "model of every client"),
        ({**UNIFORM, "train": {"dp": {"level": "client", "clip": 1.0, "noise": 1.0}}}, "client-level"),
        ({"name": "fedavg", "train": {"dp": {"clip": 1.0, "epsilon": 8.0}}}, "epsilon"),
    ],
)
def test_a_method_that_needs_all_clients(method: Any, why: str, founders: Federation, tmp_path: Path) -> None:
    """The server says so before it begins; so does the operator's command; a list written by hand changes nothing."""
    data = {"name": "digits", "clients": 4, "samples": 400}
    with pytest.raises(ConfigError, match=f"4 clients, but 3 are connected.*{why}"):
        founders.host(three(method, data=data))
    out = tmp_path / "all" / "out"
    refused = member_of(state=tmp_path / "fifth", name="eve")

    def by_hand() -> None:
        with pytest.raises(ConfigError, match=why):
            let_in(out, "eve")
        (out / ALLOWED).write_text("eve\n", encoding="utf-8")
        federation.join(refused)

    with Federation(tmp_path / "all", 4) as federation:
        federation.host(experiment(method, rounds=3, data=data), observer=After({1: by_hand}))
    assert why in refused.turned_away


@pytest.mark.parametrize("content", ["{", "[]", '{"clients": {"5": {}}}'])
def test_a_damaged_list_of_the_clients_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / MEMBERSHIP).write_text(content)
    for command in (let_in, take_off):
        with pytest.raises(RunError, match=rf"{MEMBERSHIP}'.* is damaged"):
            command(tmp_path, "1")


def test_nobody_leaves_a_folder_without_a_federation(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no federation"):
        take_off(tmp_path / "misspelt", "1")


def test_a_client_that_is_let_in_between_two_seeds_joins_in_the_second(
    founders: Federation, tmp_path: Path
) -> None:
    newcomer = founders.client(LATE)

    def join() -> None:
        let_in(tmp_path / "out", LATE)
        founders.join(newcomer)

    deploy = {"clients": 3, "wait_seconds": 1.0}
    config = experiment("fedavg", rounds=2, seeds=[5, 6], eval={"every": 0}, deploy=deploy)
    result = founders.host(config, observer=After({2: join}))
    traces = [Trace.read(result.result.path / "fedavg" / f"seed-{seed}" / "trace.jsonl") for seed in (5, 6)]
    assert [[one.asked for one in trace] for trace in traces] == [[(0, 1, 2)] * 2, [(0, 1, 2, 3)] * 2]
    assert not newcomer.turned_away


def test_the_power_is_cut_while_a_client_joins(
    founders: Federation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The list of the clients has it, and the folders of the jobs have not."""
    newcomer = founders.client(LATE)

    def join() -> None:
        let_in(tmp_path / "out", LATE)
        founders.join(newcomer)

    def cut(*given: Any) -> None:
        raise RunError("the power is cut")

    with monkeypatch.context() as patch:
        patch.setattr("tailorfl.deploy.serving.note_data", cut)
        with pytest.raises(RunError, match="power"):
            founders.host(three("fedavg"), observer=After({2: join}))
    result = founders.host(three("fedavg"))
    assert [one.joined for one in result.trace] == [(("0", "2", "3"),), (), ((LATE,),), (), (), ()]
    same(result.played_again().server_state, result.server_state)


@pytest.mark.slow
def test_a_server_that_begins_again_after_a_client_joined(founders: Federation, tmp_path: Path) -> None:
    config, newcomer = three("ditto"), founders.client(LATE)

    def join() -> None:
        let_in(tmp_path / "out", LATE)
        founders.join(newcomer)

    def end() -> None:
        raise RunError("the power is cut")

    with pytest.raises(RunError, match="power"):
        founders.host(config, observer=After({2: join, 4: end}))
    result = founders.host(config)
    assert [one.joined for one in result.trace] == [(("0", "2", "3"),), (), ((LATE,),), (), (), ()]
    same(result.played_again().server_state, result.server_state)
    assert private_state(tmp_path, config, LATE)
