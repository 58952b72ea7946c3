"""FLoRA: what a round adds to the weights, who is sent what of it, and factors that begin anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from methods.reductions import fedavg
from methods.settings import CLASSES, Card, Limit, Row, make
from methods.small import NEWCOMER, SIZES, TRAIN, assert_close, assert_same, everything, federation, shared
from methods.test_lora_factors import IN, OUT, RANK, WIDE, FromZero, network, simulation_with_lora
from tailorfl.core.client import Client
from tailorfl.core.messages import PerClient, Replies
from tailorfl.engines.make import make_engine
from tailorfl.models.functional import Model
from tailorfl.rounds.client_privacy import ClientDP
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training import tree
from tailorfl.training.sample_privacy import SampleDP

CONTRACTS = {
    "flora": Row(
        Card(whole, whole, whole, False, True),
        limit=Limit("pooled"),
        same=(fedavg("no LoRA", said=True),),
    ),
}


IDS = tuple(range(len(SIZES)))
LAYERS = ("1", "3")
BASES = {f"{k}.base.weight" for k in LAYERS}
SQUARES = 64 * WIDE + WIDE * CLASSES
"""Scalars of both base weights."""
ENGINES = ("sequential", "vectorized")
MIXED = (2, 1)


def run(rounds: int = 0, engine: str = "vectorized", **given: Any) -> Simulation:
    options = {"ranks": given.pop("ranks")} if "ranks" in given else {}
    return simulation_with_lora("flora", rounds, engine=engine, options=options, **given)


def weights(sim: Simulation) -> dict[str, Tensor]:
    """The server's W."""
    return {n: sim.server["w"][n].clone() for n in BASES}


def sent(sim: Simulation, ids: tuple[int, ...]) -> TensorDict:
    """What clients would reply in this round."""
    found = sim.run(
        ids,
        sim.states.get(ids),
        sim.method.broadcast(sim.server, ids),
        lambda c, s, r: sim.method.local(c, s, r)[1:],
    )
    return found[0]


def product(replies: TensorDict, layer: str, client: int) -> Tensor:
    """B_i A_i."""
    rows = replies["lora"].get(f"{layer}.lora_A.weight")[client]
    return rows["B"].T @ rows["A"]


def replied(sim: Simulation, stack: TensorDict, clients: tuple[int, ...] = IDS) -> Replies:
    sizes = np.array([SIZES[i] for i in clients])
    return Replies(stack, clients, sizes, "samples", sim.context)


def deployed(sim: Simulation, ids: tuple[int, ...]) -> dict[str, Tensor]:
    ((_, models),) = sim.personal_models(ids)
    return {n: models.get(n) for n in BASES}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ranks", [(), MIXED])
def test_a_round_adds_the_weighted_products_of_the_clients(engine: str, ranks: tuple[int, ...]) -> None:
    sim = run(1, engine, ranks=ranks)
    before, replies = weights(sim), sent(sim, IDS)
    share = torch.tensor([float(n) for n in SIZES]) / sum(SIZES)
    sim.step()
    for k in LAYERS:
        gain = sum(share[i] * product(replies, k, i) for i in IDS)
        assert float(torch.as_tensor(gain).abs().max()) > 1e-5
        torch.testing.assert_close(
            weights(sim)[f"{k}.base.weight"], before[f"{k}.base.weight"] + gain, atol=1e-6, rtol=0
        )
    x = sim.federation.source.x[:5]
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, WIDE), nn.Tanh(), nn.Linear(WIDE, CLASSES))
    held = sim.model.module.state_dict()
    plain.load_state_dict(
        {
            f"{k}.{end}": weights(sim).get(f"{k}.base.{end}", held[f"{k}.base.{end}"])
            for k in LAYERS
            for end in ("weight", "bias")
        }
    )
    torch.testing.assert_close(sim.model(shared(sim), x), plain(x).detach())


def test_the_order_of_clients_does_not_matter() -> None:
    sim = run(1)
    replies = sent(sim, IDS)
    turned = torch.tensor([3, 0, 4, 2, 1])
    one = sim.method.aggregate(sim.server, replied(sim, replies))
    other = sim.method.aggregate(sim.server, replied(sim, replies[turned], tuple(turned.tolist())))
    assert_close({n: one["w"][n] for n in BASES}, {n: other["w"][n] for n in BASES}, atol=1e-7)
    assert torch.equal(one["has"], other["has"])


def test_one_client_restarts_lora_and_merges_it_in_every_round() -> None:
    """By hand: in every round LoRA on W, B = 0 and A of this round, trained and added to W."""
    model = Model(network, trainable=["*lora_*"])
    sim = Simulation(make("flora"), federation((11,)), model, TRAIN, engine=make_engine("vectorized"))
    w, steps = {n: t[None].clone() for n, t in weights(sim).items()}, []

    def alone(client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict]:
        names = [f"{k}.lora_A.weight" for k in LAYERS]
        drawn = {n: (2 * t - 1) / t.shape[1] ** 0.5 for n, t in restarted(client, names).items()}
        zero = {f"{k}.lora_B.weight": torch.zeros(outs, RANK) for k, outs in (("1", WIDE), ("3", CLASSES))}
        ones = {f"{k}.lora_B.kept": torch.ones(RANK) for k in LAYERS}
        return (client.fit(tree.merge(state, TensorDict({**drawn, **zero, **ones}))),)

    def restarted(client: Client, names: list[str]) -> dict[str, Tensor]:
        pairs = [n for a in names for n in (a, a.replace("lora_A", "lora_B"))]
        return {n: t for n, t in client.drawn(client.shapes(pairs), "factors of LoRA").items() if n in names}

    for _ in range(3):
        (found,) = sim.run((0,), TensorDict(w, batch_size=[1]), tree.empty(), alone)
        for k in LAYERS:
            w[f"{k}.base.weight"] = (
                w[f"{k}.base.weight"] + found[f"{k}.lora_B.weight"] @ found[f"{k}.lora_A.weight"]
            )
        steps.append(found["1.lora_A.weight"])
        sim.step()
        assert_close(weights(sim), {n: t[0] for n, t in w.items()}, atol=1e-6)
    assert not torch.allclose(steps[0], steps[1], atol=0.05)


def test_factors_b_of_zero_leave_the_weights() -> None:
    sim = run(1)
    replies = sent(sim, IDS)
    for k in LAYERS:
        replies["lora"].get(f"{k}.lora_A.weight")["B"].zero_()
    after = sim.method.aggregate(sim.server, replied(sim, replies))
    assert_same({n: after["w"][n] for n in BASES}, weights(sim))


@pytest.mark.parametrize("alike", ["A", "B", ""])
def test_it_adds_what_fedit_adds_where_factors_are_alike(alike: str) -> None:
    """mean(B) mean(A) = Σ p_i B_i A_i if all A_i are one, or all B_i."""
    sim, it = run(0), simulation_with_lora("fedit")
    replies = sent(sim, IDS)
    if alike:
        for k in LAYERS:
            rows = replies["lora"].get(f"{k}.lora_A.weight")[alike]
            rows.copy_(rows[:1].expand_as(rows).clone())
    plain = {}
    for k in LAYERS:
        rows = replies["lora"].get(f"{k}.lora_A.weight")
        plain |= {f"{k}.lora_A.weight": rows["A"], f"{k}.lora_B.weight": rows["B"].transpose(1, 2)}
    theirs = it.method.aggregate(it.server, replied(it, TensorDict(plain, batch_size=[len(SIZES)])))["w"]
    ours = sim.method.aggregate(sim.server, replied(sim, replies))["w"]
    for k in LAYERS:
        gain = ours[f"{k}.base.weight"] - weights(sim)[f"{k}.base.weight"]
        gap = gain - theirs[f"{k}.lora_B.weight"] @ theirs[f"{k}.lora_A.weight"]
        assert (float(gap.abs().max()) < 1e-6) == bool(alike)


@pytest.mark.parametrize("ranks", [(), MIXED])
def test_the_stack_goes_to_who_was_there_and_nothing_at_first(ranks: tuple[int, ...]) -> None:
    sim = run(0, ranks=ranks)
    total = sum((ranks or (RANK,))[i % max(len(ranks), 1)] for i in IDS)
    first, second = sim.step().traffic, sim.step().traffic
    assert (first.down_unicast, first.up) == (0, total * (IN + OUT))
    assert (second.down_unicast, second.up) == (len(IDS) * total * (IN + OUT), total * (IN + OUT))


@pytest.mark.parametrize("engine", ENGINES)
def test_clients_that_missed_rounds_get_the_weights_and_all_hold_the_same(engine: str) -> None:
    sim = run(0, engine, ranks=MIXED, fraction=0.4)
    known = dict.fromkeys(IDS, 0)
    kinds: set[int] = set()
    last = 0
    for version in range(6):
        ids = sim.sample(version)
        late = [min(version - known[i], 2) for i in ids]
        kinds |= set(late)
        traffic = sim.step().traffic
        assert traffic.down_unicast == sum((0, last, SQUARES)[k] for k in late)
        last = sum(MIXED[i % 2] for i in ids) * (IN + OUT)
        known |= dict.fromkeys(ids, version)
        for name, t in deployed(sim, IDS).items():
            assert_close({name: t}, {name: weights(sim)[name].expand_as(t)}, atol=1e-6)
        ((_, late_one),) = sim.newcomer_models((NEWCOMER,), 0)
        assert_close({n: late_one[n][0] for n in BASES}, weights(sim), atol=1e-6)
    assert kinds == {0, 1, 2}
    assert sim.server["has"].tolist() == [known[i] for i in IDS]


def test_a_client_that_has_the_weights_of_now_adds_nothing_twice() -> None:
    """It trained in a round from which the server took nothing: the server thinks that it is one behind."""
    sim = run(2)
    ids = (0, 3)
    message = sim.method.broadcast(sim.server, ids)
    new, _ = sim.run(ids, sim.states.get(ids), message, sim.method.local)
    assert new["version"].tolist() == [2, 2]
    again, _ = sim.run(ids, new, message, sim.method.local)
    assert_same(dict(tree.leaves(again)), dict(tree.leaves(new)))


@pytest.mark.parametrize("engine", ENGINES)
def test_factors_are_drawn_anew_for_every_client_and_round(engine: str) -> None:
    sim = run(0, engine, train=replace(TRAIN, lr=1e-30, weight_decay=0.0))
    seen = []
    for _ in range(2):
        rows = sent(sim, IDS)["lora"].get("1.lora_A.weight")["A"]
        seen += list(rows)
        sim.step()
    assert len({tuple(a.flatten().tolist()) for a in seen}) == 2 * len(SIZES)
    every = torch.stack(seen).flatten()
    assert float(every.abs().max()) < 64**-0.5
    assert abs(float(every.mean())) < 0.02
    assert float(every.std()) == pytest.approx((64 * 3) ** -0.5, rel=0.05)


def test_engines_chunks_and_workers_agree() -> None:
    ends = [everything(run(3, e, ranks=MIXED, fraction=0.6)) for e in ENGINES]
    assert_close(*ends, atol=1e-5)
    model = Model(network, trainable=["*lora_*"])
    for engine in (make_engine("vectorized", 1), make_engine("sequential", None, workers=2)):
        sim = Simulation(make("flora", ranks=MIXED), federation(), model, TRAIN, engine=engine, fraction=0.6)
        for _ in range(3):
            sim.step()
        assert_close(everything(sim), ends[0], atol=1e-5)


def test_a_resumed_run_goes_on_exactly() -> None:
    whole, first, second = (run(r, ranks=MIXED, fraction=0.6) for r in (4, 2, 0))
    second.load(*first.dump())
    for _ in range(2):
        second.step()
    assert_same(everything(whole), everything(second))
    assert whole.traffic == second.traffic


def test_what_else_trains_is_averaged() -> None:
    sim = run(0, trainable=("*lora_*", "3.base.bias"))
    replies = sent(sim, IDS)
    sim.step()
    share = torch.tensor([float(n) for n in SIZES]) / sum(SIZES)
    wanted = torch.tensordot(share, replies["rest"]["3.base.bias"], dims=1)
    torch.testing.assert_close(sim.server["w"]["3.base.bias"], wanted)


def test_private_training_fills_no_rank_and_client_level_noise_is_in_every_reply() -> None:
    private = run(2, ranks=(1,), train=replace(TRAIN, dp=SampleDP(1.0, 1.0, "shuffle")))
    assert private.traffic.up == 2 * len(SIZES) * (IN + OUT)
    for n, t in deployed(private, IDS).items():
        assert_close({n: t}, {n: weights(private)[n].expand_as(t)}, atol=1e-5)
    noisy = run(2, client_dp=ClientDP(clip=1.0, noise=1.0), weights="uniform")
    quiet = run(2, client_dp=ClientDP(clip=1.0, noise=0.0), weights="uniform")
    assert not torch.allclose(weights(noisy)["1.base.weight"], weights(quiet)["1.base.weight"], atol=0.01)


class Scaled(FromZero):
    """With a scale s, as LoRA has it."""

    scaling = 3.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 3.0 * self.lora_B(self.lora_A(x))
        return out


def test_the_scale_of_a_layer_is_merged() -> None:
    model = Model(lambda: nn.Sequential(nn.Flatten(), Scaled(64, CLASSES)), trainable=["*lora_*"])
    sim = Simulation(
        make("flora", weights="uniform"), federation(), model, TRAIN, engine=make_engine("vectorized")
    )
    before, replies = sim.server["w"]["1.base.weight"].clone(), sent(sim, IDS)
    sim.step()
    gain = 3.0 * torch.stack([product(replies, "1", i) for i in IDS]).mean(0)
    torch.testing.assert_close(sim.server["w"]["1.base.weight"] - before, gain, atol=1e-6, rtol=1e-4)
    message = sim.method.broadcast(sim.server, IDS)
    assert isinstance(message, PerClient)
    for n, t in deployed_of(sim, "1.base.weight").items():
        assert_close({n: t}, {n: sim.server["w"][n].expand_as(t)}, atol=1e-6)


def deployed_of(sim: Simulation, name: str) -> dict[str, Tensor]:
    ((_, models),) = sim.personal_models(IDS)
    return {name: models.get(name)}
