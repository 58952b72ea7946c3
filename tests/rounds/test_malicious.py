"""Malicious clients: who they are, what they send and train on, what becomes of it, and whom records are of."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from methods.settings import NAMES, make, one_of
from methods.small import (
    SIZES,
    TRAIN,
    assert_close,
    assert_same,
    everything,
    federation,
    personal,
    replaced,
    simulation,
)
from rounds.helpers import server_vector
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.evaluation.selection import Selection
from tailorfl.rounds.malicious import Malicious, drawn
from tailorfl.rounds.one_round import Trained
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.experiment import CYCLIC
from tailorfl.settings.system import MaliciousConfig, RobustConfig, SystemConfig
from tailorfl.training import tree

KINDS = ("sign_flip", "scale", "noise", "label_flip", "nan")
ATTACKER = 3


def attacked(**given: Any) -> SystemConfig:
    return SystemConfig(malicious=MaliciousConfig(**given))


def run(method: Any, kind: str | None, rounds: int = 1, **settings: Any) -> Simulation:
    options = {key: settings.pop(key) for key in ("strength", "from_round") if key in settings}
    if kind is not None:
        settings["system"] = attacked(clients=(ATTACKER,), kind=kind, **options)
    return simulation(
        method, settings.pop("model", "mlp"), **{"engine": "vectorized", "rounds": rounds, **settings}
    )


def test_nobody_joins_a_run_with_attackers() -> None:
    sim = run("fedavg", "label_flip")
    with pytest.raises(ConfigError, match=r"system\.malicious"):
        sim.extend(sim.given)


# -- who -----------------------------------------------------------------------------------------------------


def test_who_is_malicious_is_drawn_by_the_seed_and_fewer_are_among_more() -> None:
    data = federation((5,) * 40)
    few, more = (
        [drawn(MaliciousConfig(share=s), data, make("fedavg"), seed).clients for seed in range(5)]
        for s in (0.1, 0.3)
    )
    assert [len(c) for c in few] == [4] * 5
    assert [len(c) for c in more] == [12] * 5
    assert all(a < b for a, b in zip(few, more, strict=True))
    assert len(set(few)) == 5
    assert all(c < set(range(40)) for c in more)
    assert len(drawn(MaliciousConfig(share=0.001), data, make("fedavg"), 0).clients) == 1
    assert drawn(MaliciousConfig(), data, make("fedavg"), 0).clients == frozenset()


@pytest.mark.parametrize(
    ("method", "malicious", "message"),
    [
        ("fedavg", {"clients": (5,)}, "names client 5, but the training clients are 0 to 4"),
        ("fedavg", {"clients": (0, 1, 2, 3, 4)}, "all 5 training clients are malicious"),
        ("centralized", {"share": 0.2}, "Centralized trains on pooled data"),
        ("ifca", {"share": 0.2, "kind": "sign_flip"}, r"system\.malicious\.kind"),
        ("flora", {"share": 0.2, "kind": "scale"}, r"system\.malicious\.kind"),
    ],
)
def test_what_cannot_be_is_refused(method: str, malicious: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulation(method, system=attacked(**malicious))


# -- what they send ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "factor"),
    [
        ("sign_flip", {}, -1.0),
        ("sign_flip", {"strength": 2.5}, -2.5),
        ("scale", {}, 10.0),
        ("scale", {"strength": 3.0}, 3.0),
    ],
)
@pytest.mark.parametrize("name", ["fedavg", "ditto", "scaffold"])
def test_an_update_is_sent_times_a_factor(
    name: str, kind: str, options: dict[str, float], factor: float
) -> None:
    """Methods that send a model, a change, and both; the server's step is linear in a client's update."""
    honest, hostile, absent = (
        run(make(name, weights="uniform"), k, rounds=0, **(options if k else {})) for k in (None, kind, None)
    )
    start = server_vector(honest)
    honest.step()
    hostile.step()
    rest = tuple(i for i in range(len(SIZES)) if i != ATTACKER)
    absent.step(rest, rest)
    others = (server_vector(absent) - start) * len(rest) / len(SIZES)
    if name == "scaffold":  # whose correction is over all clients, and not the mean of those that came
        count = sum(t.numel() for _, t in tree.leaves(honest.server["correction"]))
        others[-count:] *= len(SIZES) / len(rest)
    mine = server_vector(honest) - start - others
    assert float(mine.norm()) > 1e-3
    torch.testing.assert_close(server_vector(hostile) - start, others + factor * mine, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "unchanged"),
    [
        ("afl", {"loss"}),
        ("fednova", {"steps"}),
        ("qfedavg", {"h"}),
        ("fedpac", {"counts", "means", "moment", "variance"}),
        ("fedproto", set()),
    ],
)
def test_only_parameters_are_attacked_where_there_are_some(
    name: str, unchanged: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, sent = list[tuple[Trained, Trained]](), Malicious.sent

    def noted(self: Malicious, part: Trained, round: int) -> Trained:
        seen.append((part, sent(self, part, round)))
        return seen[-1][1]

    monkeypatch.setattr(Malicious, "sent", noted)
    run(name, "sign_flip", strength=3.0)
    ((honest, hostile),) = seen
    sends = dict(tree.leaves(hostile.replies))
    same = {path for path, t in tree.leaves(honest.replies) if torch.equal(t, sends[path])}
    assert {path for path in same if sends[path].is_floating_point()} == unchanged
    here = honest.ids.index(ATTACKER)
    for path, update in honest.updates.changes.items():
        if path not in unchanged:
            torch.testing.assert_close(hostile.updates.changes[path][here], -3 * update[here])


def test_the_update_of_a_model_is_counted_from_the_one_that_was_sent() -> None:
    """AFL takes one step of plain SGD; with a rate of 0 all updates are 0, and attackers can do nothing."""
    calm = replace(TRAIN, lr=0.0)
    assert_same(everything(run("afl", "scale", train=calm)), everything(run("afl", None, train=calm)))


def test_noise_takes_the_place_of_the_update() -> None:
    """What the attacker trains on does not matter."""
    one, two = (
        run("fedavg", "noise", strength=50.0, data=data, rounds=2)
        for data in (federation(), replaced(federation(), ATTACKER, lambda x: -3 * x))
    )
    assert_same(dict(one.server["w"].items()), dict(two.server["w"].items()))


@pytest.mark.parametrize("strength", [0.01, 50.0])
def test_noise_is_of_its_size_and_another_one_in_each_round(strength: float) -> None:
    """The others train with a rate so small that the server moves by a share of the noise alone."""
    method, train = make("fedavg", weights="uniform"), replace(TRAIN, lr=1e-8)
    sim = run(method, "noise", 0, strength=strength, model="cnn2", train=train)
    places = [server_vector(sim)]
    for _ in range(2):
        sim.step()
        places.append(server_vector(sim))
    moves = torch.stack([places[1] - places[0], places[2] - places[1]])
    assert moves.std(1).tolist() == pytest.approx([strength / len(SIZES)] * 2, rel=0.05)
    assert abs(float(torch.corrcoef(moves)[0, 1])) < 0.1


@pytest.mark.parametrize("name", one_of(6, NAMES))
def test_what_is_no_number_ends_as_a_rejected_client(name: str, caplog: pytest.LogCaptureFixture) -> None:
    if make(name).pooled:
        pytest.skip("has no malicious clients")
    sim = run(name, "nan", rounds=0)
    before = everything(sim, [ATTACKER])
    alone = (ATTACKER,) if sim.sampling in CYCLIC else None
    with caplog.at_level(logging.WARNING, logger="tailorfl"):
        result = sim.step(alone, alone)
    sends = bool(sim.traffic.up)
    assert result.rejected == ((ATTACKER,) if sends else ())
    assert not caplog.text  # the experiment asked for it
    after = everything(sim, [ATTACKER])
    for path, tensor in before.items():
        assert path.startswith("server/") or not sends or torch.equal(after[path], tensor)
        assert torch.isfinite(after[path].double()).all()


# -- what they train on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedrod"])
def test_flipped_labels_are_those_of_the_attackers_training_samples(name: str) -> None:
    base = federation()
    y = base.source.y.clone()
    rows = torch.from_numpy(base.train[ATTACKER])
    y[rows] = 3 - y[rows]
    wrong = replace(base, source=replace(base.source, y=y))
    assert_same(everything(run(name, "label_flip", rounds=2)), everything(run(name, None, 2, data=wrong)))


def test_what_an_attacker_deploys_is_tuned_on_the_true_labels() -> None:
    hostile, honest = run("fedavg_ft", "label_flip"), simulation("fedavg_ft", engine="vectorized")
    honest.load(*hostile.dump())
    assert_same(personal(hostile), personal(honest))


def two_clients(task: Any, y: list[Any], train: tuple[list[int], list[int]]) -> Federation:
    kind = torch.float32 if task in ("multilabel", "regression") else torch.int64
    labels = torch.tensor(y, dtype=kind)
    source = Source("own", torch.ones(len(y), 2), labels, task, labels.shape[1] if labels.ndim == 2 else 1)
    none = (np.array([2]),) * 2
    return Federation(source, tuple(np.array(rows) for rows in train), none, none, ("a", "b"), 2)


FLIPPING = MaliciousConfig(clients=(0,), kind="label_flip")


@pytest.mark.parametrize(
    ("task", "y", "flipped"),
    [
        ("binary", [0, 1, 1, 0], [1, 0, 1, 0]),
        ("multilabel", [[0, 1], [1, 1], [0, 0], [1, 0]], [[1, 0], [0, 0], [0, 0], [1, 0]]),
    ],
)
def test_labels_of_other_tasks_are_flipped(task: Any, y: list[Any], flipped: list[Any]) -> None:
    data = two_clients(task, y, ([0, 1], [2]))
    found = drawn(FLIPPING, data, make("fedavg"), 0).poisoned(data)
    assert found is not None
    assert (found.y.tolist(), found.y.dtype) == (flipped, data.source.y.dtype)
    assert data.source.y.tolist() == y


@pytest.mark.parametrize(
    ("task", "y", "second", "message"),
    [
        ("regression", [[1.0]] * 3, [2], "'own' is a regression task"),
        ("binary", [0, 1, 1], [1, 2], "kind=label_flip changes"),
    ],
)
def test_labels_that_cannot_be_flipped_are_refused(
    task: Any, y: list[Any], second: list[int], message: str
) -> None:
    data = two_clients(task, y, ([0, 1], second))
    with pytest.raises(ConfigError, match=message):
        drawn(FLIPPING, data, make("fedavg"), 0).poisoned(data)


# -- when, on which engine, and again ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_they_attack_from_a_round_on(kind: str) -> None:
    late, honest = (run("ditto", k, rounds=0, **({"from_round": 3} if k else {})) for k in (kind, None))
    for number in range(1, 4):
        late.step()
        honest.step()
        assert torch.equal(server_vector(late), server_vector(honest)) == (number < 3)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if (name == "ditto") == (k % 2 == 0) else [pytest.mark.slow])
        for name in ("ditto", "perfed_ckt")
        for k, kind in enumerate(KINDS)
    ],
)
def test_engines_agree_and_an_interrupted_run_goes_on(name: str, kind: str) -> None:
    whole, other = (run(name, kind, 3, engine=e, fraction=0.8) for e in ("vectorized", "sequential"))
    assert_close(everything(whole), everything(other), atol=2e-4, rtol=5e-3)
    first, resumed = run(name, kind, 1, fraction=0.8), run(name, kind, 0, fraction=0.8)
    resumed.load(*first.dump())
    for _ in range(2):
        resumed.step()
    assert_same(everything(resumed), everything(whole))


def test_refused_attackers_are_counted_by_krum() -> None:
    """Of five clients Krum stands one; where that one sent no number, four are enough."""
    sim = run("fedavg", "nan", rounds=0, robust=RobustConfig(rule="krum", f=1))
    start = server_vector(sim)
    assert sim.step().rejected == (ATTACKER,)
    assert not torch.equal(server_vector(sim), start)


# -- whom records are of -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedavg_ft"])
@pytest.mark.parametrize("select", [False, True])
def test_attackers_are_evaluated_apart(name: str, select: bool) -> None:
    sim = run(name, "sign_flip", rounds=2)
    if select and not sim.method.has_personal:
        return
    sets = ("val", "local", "participants", "global", "heldout")
    records = evaluate(sim, Protocol(sets), (0, ATTACKER), Selection(sim) if select else None)
    benign = [i for i in range(len(SIZES)) if i != ATTACKER]
    for model in ("personal",) * sim.method.has_personal + ("global",):
        clients = {
            s: [r["client"] for r in records if (r["model"], r["set"]) == (model, s)]
            for s in (*sets, "malicious")
        }
        assert clients["val"] == clients["local"] == benign
        assert clients["participants"] == [0]
        assert clients["malicious"] == [ATTACKER]
        assert clients["global"] == (benign if model == "personal" else [-1])
        assert clients["heldout"] == [len(SIZES)]
    alone = evaluate(sim, Protocol(("participants",)), (0, ATTACKER))
    assert {(r["client"], r["set"]) for r in alone} == {(0, "participants")}
    nobody = simulation(sim.method, engine="vectorized")  # the run as it stands, of which nobody is malicious
    nobody.load(*sim.dump())
    losses = [
        {r["client"]: r["loss"] for r in rs if r["set"] in ("local", "malicious") and r["model"] == "global"}
        for rs in (records, evaluate(nobody, Protocol(("local",))))
    ]
    assert losses[0] == pytest.approx(losses[1])
    shared = {r["samples"] for r in records if r["set"] == "global"}
    assert shared == {sum(len(sim.federation.test[i]) for i in benign)}
