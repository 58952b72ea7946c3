"""Unlearning of a deployment: the remaining clients end where a simulation does that never had the client."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cli.commands import invoke
from deploy.federation import TRAIN, After, Deployed, Federation, deployed, experiment, simulated
from deploy.owned import WARDS, of_files, owners, write_tables
from deploy.running import Field
from deploy.test_late_clients import joined, three
from deploy.test_processes_faults import ENOUGH
from tailorfl.deploy.client_session import ClientSession, member_of
from tailorfl.deploy.experiment import plan_unlearning
from tailorfl.deploy.membership import NAME as MEMBERSHIP
from tailorfl.deploy.membership import take_off
from tailorfl.deploy.policy import Policy
from tailorfl.errors import ConfigError, RunError
from tailorfl.report.result import ExperimentResult
from tailorfl.runs.trained_models import restore
from tailorfl.runs.unlearning import NAME
from tailorfl.settings.loading import load

LEFT = "2"
PRIVATE = {**TRAIN, "dp": {"level": "client", "clip": 1.0, "noise": 0.5}}
HALF = {"fraction": 0.5, "rounds": 4}
SLOW: dict[str, Any] = {"marks": pytest.mark.slow}


def unlearn(folder: Path, client: str, code: int = 0) -> str:
    """Send the command for the deployment in `folder`/out, and return what it writes."""
    return invoke("unlearn", folder / "out", "--client", client, "--out", folder / "fewer", code=code).output


def retrained(folder: Path, people: Sequence[ClientSession]) -> tuple[Deployed, list[str]]:
    """Run the experiment of the remaining clients, and return the result and what the server said."""
    with Federation(folder, {200 + node: client for node, client in enumerate(people)}) as federation:
        return federation.host(load(folder / "fewer.yaml"), out="fewer"), federation.said


def certificate(folder: Path) -> dict[str, Any]:
    """The certificate of the remaining clients' results."""
    facts: dict[str, Any] = json.loads((folder / "fewer" / NAME).read_text())
    return facts


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("scaffold", HALF),
        pytest.param("ditto", {}, **SLOW),
        pytest.param("fedavg", {**HALF, "weights": "uniform", "train": PRIVATE}, **SLOW),
    ],
)
def test_they_end_where_the_simulation_does(method: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Which never had the client, see `tests/runs/test_unlearning.py`; the client itself is turned away."""
    first = deployed(experiment(method, **changes), tmp_path).config
    assert "tailorfl server" in unlearn(tmp_path, LEFT)
    config = load(tmp_path / "fewer.yaml")
    assert config.name != first.name  # the clients keep their states of both apart
    assert len((tmp_path / "fewer.yaml").read_text().splitlines()) < 80  # they have to read it
    people = [member_of(state=tmp_path / f"state-{name}", name=name) for name in ("2", "3", "0", "1")]
    result, said = retrained(tmp_path, people)
    sim = result.is_simulated(("0", "1", "nobody", "3"))
    assert sim.federation.members == (0, 1, 3)
    assert any("turned away: '2'" in sentence for sentence in said)
    unlearn(tmp_path, LEFT)
    facts = certificate(tmp_path)
    assert "trained anew" in facts["statement"]
    assert facts["client"] == {"name": LEFT, "number": 2}
    (job,) = facts["jobs"]
    assert job["is_same_trace"]
    assert job["rounds_with_client"]
    assert all(job[key]["with"] != job[key]["without"] for key in ("trace", "data", "state"))


@pytest.mark.parametrize("normalise", ["federated", pytest.param("client", **SLOW)])
def test_own_tables_are_split_as_before_and_scaled_anew(normalise: str, tmp_path: Path) -> None:
    write_tables(tmp_path / "files")
    config = of_files(tmp_path / "files", data={"normalise": normalise, "split": {"train": 0.8, "test": 0.2}})
    first = deployed(config, tmp_path, owners(tmp_path, tmp_path / "files", config))
    before = simulated(first.config)
    unlearn(tmp_path, "east")
    again = load(tmp_path / "fewer.yaml")
    rows = len((tmp_path / "files" / "east.csv").read_text().split()) - 1
    assert again.deploy.excluded_rows == {"east": rows}
    nodes = owners(tmp_path, tmp_path / "files", again)
    result, _ = retrained(tmp_path, [client for client in nodes.values() if client.data.name != "east"])
    after = result.is_simulated(sorted(WARDS))
    for client in after.federation.members:
        assert after.federation.train[client].tolist() == before.federation.train[client].tolist()
    unlearn(tmp_path, "east")
    assert any("constants" in sentence for sentence in certificate(tmp_path)["recomputed"])


def test_who_has_left_is_not_waited_for_and_another_experiment_is_not_certified(tmp_path: Path) -> None:
    deployed(experiment("fedavg"), tmp_path)
    take_off(tmp_path / "out", "1")
    with (tmp_path / "out" / "left").open("a") as left:
        left.write("who left before the start\n")
    unlearn(tmp_path, LEFT)
    assert load(tmp_path / "fewer.yaml").data.excluded_clients == (LEFT, "1")
    invoke("run", "demo", "seeds=1", "rounds=1", "methods=[fedavg]", "--out", tmp_path / "fewer", "--quiet")
    assert "another experiment" in unlearn(tmp_path, LEFT, code=1)
    assert not (tmp_path / "fewer" / NAME).exists()
    assert "client" in unlearn(tmp_path, "9", code=2)
    with pytest.raises(RunError, match="--state"):  # where the models are
        restore(tmp_path / "out")
    (tmp_path / "out" / MEMBERSHIP).unlink()
    assert MEMBERSHIP in unlearn(tmp_path, LEFT, code=2)


def test_a_method_with_other_options_is_not_certified(tmp_path: Path) -> None:
    deployed(experiment("ditto"), tmp_path)
    unlearn(tmp_path, LEFT)
    config = load(tmp_path / "fewer.yaml")
    other = config.methods[0].model_copy(update={"options": {**config.methods[0].options, "lam": 7.0}})
    (tmp_path / "fewer.yaml").write_text(config.model_copy(update={"methods": (other,)}).to_yaml())
    retrained(tmp_path, [member_of(state=tmp_path / f"state-{name}", name=name) for name in ("3", "0", "1")])
    assert "another experiment" in unlearn(tmp_path, LEFT, code=1)


def test_who_was_left_out_of_a_later_seed_is_left_out(tmp_path: Path) -> None:
    """Its rows are known from the first seed."""
    files = tmp_path / "files"
    write_tables(files)
    config = of_files(files, "fedavg", rounds=1, seeds=[5, 6], data={"normalise": "federated"})
    nodes = owners(tmp_path, files, config)
    (west,) = (node for node, client in nodes.items() if client.data.name == "west")
    nodes[west].policy = Policy(min_rows=1000)
    nodes[west].data.policy = nodes[west].policy  # type: ignore[union-attr]
    deployed(config, tmp_path, nodes)
    unlearn(tmp_path, "east")
    assert load(tmp_path / "fewer.yaml").deploy.excluded_rows.keys() == {"east", "west"}


def test_who_left_before_a_later_seed_is_unlearned(tmp_path: Path) -> None:
    config = experiment("fedavg", rounds=2, seeds=[5, 6], eval={"every": 0})
    deployed(config, tmp_path, observer=After({1: lambda: take_off(tmp_path / "out", "1")}))
    first, second = plan_unlearning(tmp_path / "out", "1").replays
    assert (first.asked, second.asked) == ([1], [])
    unlearn(tmp_path, "1")
    assert load(tmp_path / "fewer.yaml").data.excluded_clients == ("1",)


def test_a_federation_that_somebody_joined_later_is_not_begun_again(tmp_path: Path) -> None:
    with Federation(tmp_path) as federation:
        joined(three("fedavg"), federation, federation.client("3"))
    assert "joined" in unlearn(tmp_path, LEFT, code=2)


def test_rows_of_an_excluded_file_must_be_known(tmp_path: Path) -> None:
    write_tables(tmp_path / "files")
    config = of_files(tmp_path / "files", data={"excluded_clients": ["east"]})
    people = owners(tmp_path, tmp_path / "files", config)
    with pytest.raises(ConfigError, match="excluded_rows"):
        deployed(config, tmp_path, {n: c for n, c in people.items() if c.data.name != "east"})


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_four_processes(tmp_path: Path) -> None:
    """A server and three clients; then the server and the two that remain."""
    pytest.importorskip("flwr")
    data = {"name": "digits", "clients": 3, "samples": 400}
    with Field(tmp_path, experiment("ditto", data=data, eval={"every": 0})) as field:
        server, clients = field.server(), field.clients(3)
        assert server.wait(2 * ENOUGH) == 0
        assert [client.wait(60) for client in clients] == [0, 0, 0]
        unlearn(tmp_path, "1")
        listen = f"{field.host}:{field.port}"
        server = field.start(
            "server-again", "server", "fewer.yaml", "--listen", listen, "--out", "fewer", "--insecure"
        )
        clients = [field.client(name, label=f"again-{name}") for name in ("0", "2")]
        assert server.wait(2 * ENOUGH) == 0
        assert [client.wait(60) for client in clients] == [0, 0]
    Deployed(ExperimentResult.load(tmp_path / "fewer"), tmp_path).is_simulated(("0", "nobody", "2"))
    unlearn(tmp_path, "1")
    (job,) = certificate(tmp_path)["jobs"]
    assert job["is_same_trace"]
