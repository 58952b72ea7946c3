"""FlexLoRA, HetLoRA and FLoRA: ranks by client, what travels of them, and what the server makes of factors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from methods.reductions import NO_LORA
from methods.settings import CLASSES, Card, Limit, Row, make
from methods.small import (
    NEWCOMER,
    SIZES,
    TRAIN,
    assert_close,
    assert_same,
    federation,
    personal,
    replies_of,
)
from methods.test_lora_factors import IN, OUT, RANK, WIDE, FromZero, simulation_with_lora
from tailorfl.engines.choice import make_engine
from tailorfl.methods.fedit import svd_of_products
from tailorfl.methods.lora_ranks import product_square, size_of
from tailorfl.models.functional import Model
from tailorfl.rounds.client_privacy import ClientDP
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training import tree
from tailorfl.training.sample_privacy import SampleDP

CONTRACTS = {
    "hetlora": Row(Card(whole, whole, whole, True, True), chooses=True, same=NO_LORA),
    "flexlora": Row(Card(whole, whole, whole, True, True), chooses=True, same=NO_LORA),
    "flora": Row(Card(whole, whole, whole, False, True), limit=Limit("pooled"), same=NO_LORA[:1]),
}


BOTH = ("flexlora", "hetlora")
MIXED = (2, 1)
IDS = tuple(range(len(SIZES)))
BASES = {"1.base.weight", "3.base.weight"}
SQUARES = 64 * WIDE + WIDE * CLASSES
"""Scalars of both base weights."""


def run(name: str, rounds: int = 2, engine: str = "vectorized", **options: Any) -> Simulation:
    return simulation_with_lora(name, rounds, engine=engine, options=options)


@pytest.mark.parametrize("name", BOTH)
def test_a_client_of_rank_1_reads_and_sends_the_first_row_alone(name: str) -> None:
    options = {"ranks": MIXED, **({"prune": 1.0} if name == "hetlora" else {})}
    sim = run(name, **options)
    models = personal(sim)
    for i in IDS:
        own = MIXED[i % 2]
        assert float(models["1.lora_A.weight"][i, own:].abs().sum()) == 0
        assert float(models["1.lora_B.weight"][i, :, own:].abs().sum()) == 0
    ranks = sum(MIXED[i % 2] for i in IDS)
    assert sim.traffic.up == sim.traffic.down_unicast == 2 * ranks * (IN + OUT)
    # What clients of one rank get is one payload.
    assert sim.traffic.down_multicast == 2 * sum(MIXED) * (IN + OUT)
    # What stands in the second row of the server's changes nothing for them.
    plain, other = (run(name, 1, **options) for _ in range(2))
    for n, t in other.server["w"].items():
        t[1:] += 1.0 if "lora_A" in n else 0.0
    before, after = personal(plain), personal(other)
    assert torch.equal(after["1.lora_A.weight"][1], before["1.lora_A.weight"][1])
    assert not torch.equal(after["1.lora_A.weight"][0], before["1.lora_A.weight"][0])


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_what_a_cut_loses_are_the_singular_values_left_out(rank: int) -> None:
    """Eckart and Young; nothing where the rank is at least the sum of the clients'."""
    rng = torch.Generator().manual_seed(0)
    ranks, weights = (1, 2), torch.tensor([0.3, 0.7])
    a, b = torch.zeros(2, 4, 7), torch.zeros(2, 5, 4)
    for i, own in enumerate(ranks):
        a[i, :own] = torch.randn(own, 7, generator=rng)
        b[i, :, :own] = torch.randn(5, own, generator=rng)
    exact = sum(w * (y @ x).double() for w, x, y in zip(weights, a, b, strict=True))
    us, v = svd_of_products(a, b, weights)
    lost = (exact - us[:, :rank] @ v[:rank]).square().sum()
    values = torch.linalg.svdvals(exact)
    torch.testing.assert_close(lost, values[rank:].square().sum(), atol=1e-10, rtol=1e-6)
    assert (float(lost) < 1e-10) == (rank >= sum(ranks))


def test_hetlora_prunes_what_fades_never_below_the_least_and_the_server_remembers() -> None:
    pruned = run("hetlora", 4, ranks=(2,), prune=0.5, lam=5.0)
    assert 1.0 in pruned.server["ranks"].tolist()
    models, ranks = personal(pruned), pruned.server["ranks"].long()
    assert torch.equal(models["1.lora_B.kept"].count_nonzero(1), ranks)
    kept = run("hetlora", 4, ranks=(2,), prune=0.5, lam=5.0, least=2)
    assert set(kept.server["ranks"].tolist()) == {2.0}
    assert set(run("hetlora", 4, ranks=(2,), prune=1.0, lam=5.0).server["ranks"].tolist()) == {2.0}
    assert pruned.traffic.up < kept.traffic.up


def test_sizes_are_frobenius_norms_and_have_a_slope_of_0_at_0() -> None:
    a, b = torch.randn(3, 2, 7), torch.randn(3, 2, 5)
    wanted = (b.transpose(1, 2).double() @ a.double()).square().sum((1, 2))
    torch.testing.assert_close(product_square(TensorDict({"A": a, "B": b}, batch_size=[3])), wanted)
    state = {"A": a[0].requires_grad_(), "B": torch.zeros(5, 2, requires_grad=True)}
    value = size_of(state, (("A", "B"),), torch.tensor([0.0, 1.0]))
    slopes = torch.autograd.grad(value, list(state.values()))
    assert all(float(s.abs().max()) == 0 for s in slopes)


def flora(rounds: int = 0, *, ranks: tuple[int, ...] = (), **settings: Any) -> Simulation:
    return simulation_with_lora("flora", rounds, options={"ranks": ranks}, **settings)


def weights(sim: Simulation) -> dict[str, Tensor]:
    """The server's W."""
    return {n: sim.server["w"][n].clone() for n in BASES}


@pytest.mark.parametrize("ranks", [(), MIXED])
def test_the_stack_goes_to_who_was_there_and_nothing_at_first(ranks: tuple[int, ...]) -> None:
    sim = flora(ranks=ranks)
    total = sum(ranks[i % 2] if ranks else RANK for i in IDS)
    first, second = sim.step().traffic, sim.step().traffic
    assert (first.down_unicast, first.up) == (0, total * (IN + OUT))
    assert (second.down_unicast, second.up) == (len(IDS) * total * (IN + OUT), total * (IN + OUT))


def assert_deployed(sim: Simulation, atol: float) -> None:
    """All clients deploy the server's W."""
    models = personal(sim)
    for name, w in weights(sim).items():
        torch.testing.assert_close(models[name], w.expand_as(models[name]), atol=atol, rtol=0)


def test_clients_that_missed_rounds_get_the_weights_and_all_hold_the_same() -> None:
    sim = flora(ranks=MIXED, fraction=0.4)
    versions = dict.fromkeys(IDS, 0)
    kinds: set[int] = set()
    last = 0
    for version in range(6):
        ids = sim.sample(version)
        late = [min(version - versions[i], 2) for i in ids]
        kinds |= set(late)
        traffic = sim.step().traffic
        assert traffic.down_unicast == sum((0, last, SQUARES)[k] for k in late)
        last = sum(MIXED[i % 2] for i in ids) * (IN + OUT)
        versions |= dict.fromkeys(ids, version)
        assert_deployed(sim, 1e-6)
        ((_, late_one),) = sim.newcomer_models((NEWCOMER,), 0)
        assert_close({n: late_one[n][0] for n in BASES}, weights(sim), atol=1e-6)
    assert kinds == {0, 1, 2}
    assert sim.server["has"].tolist() == [versions[i] for i in IDS]


def test_a_client_that_has_the_weights_of_now_adds_nothing_twice() -> None:
    """It trained in a round from which the server took nothing: the server thinks that it is one behind."""
    sim = flora(2)
    ids = (0, 3)
    message = sim.method.broadcast(sim.server, ids)
    new, _ = sim.run(ids, sim.states.get(ids), message, sim.method.local)
    assert new["version"].tolist() == [2, 2]
    again, _ = sim.run(ids, new, message, sim.method.local)
    assert_same(dict(tree.leaves(again)), dict(tree.leaves(new)))


def test_factors_are_drawn_anew_for_every_client_and_round() -> None:
    sim = flora(train=replace(TRAIN, lr=1e-30, weight_decay=0.0))
    factors: list[Tensor] = []
    for _ in range(2):
        factors += replies_of(sim, IDS)["lora"].get("1.lora_A.weight")["A"]
        sim.step()
    assert len({tuple(a.flatten().tolist()) for a in factors}) == 2 * len(SIZES)
    entries = torch.stack(factors).flatten()
    assert float(entries.abs().max()) < 64**-0.5
    assert abs(float(entries.mean())) < 0.02
    assert float(entries.std()) == pytest.approx((64 * 3) ** -0.5, rel=0.05)


def test_what_else_trains_is_averaged() -> None:
    sim = flora(trainable=("*lora_*", "3.base.bias"))
    share = torch.tensor(SIZES) / sum(SIZES)
    mean = torch.tensordot(share, replies_of(sim, IDS)["rest"]["3.base.bias"], dims=1)
    sim.step()
    torch.testing.assert_close(sim.server["w"]["3.base.bias"], mean)


@pytest.mark.parametrize("name", ["flexlora", "flora"])
def test_private_training_fills_no_rank_that_a_client_has_not(name: str) -> None:
    private = replace(TRAIN, dp=SampleDP(1.0, 1.0, "shuffle"))
    sim = simulation_with_lora(name, 2, options={"ranks": (1,)}, train=private)
    assert sim.traffic.up == 2 * len(SIZES) * (IN + OUT)
    if name == "flora":
        assert_deployed(sim, 1e-5)
    else:
        assert float(personal(sim)["1.lora_A.weight"][:, 1:].abs().sum()) == 0


def test_client_level_noise_is_in_every_reply() -> None:
    noisy = flora(2, client_dp=ClientDP(clip=1.0, noise=1.0), weights="uniform")
    quiet = flora(2, client_dp=ClientDP(clip=1.0, noise=0.0), weights="uniform")
    assert not torch.allclose(weights(noisy)["1.base.weight"], weights(quiet)["1.base.weight"], atol=0.01)


def test_client_level_noise_is_in_no_row_that_is_not_sent() -> None:
    dp = ClientDP(clip=1.0, noise=1.0)
    options = {"ranks": (1,), "prune": 1.0}
    sim = simulation_with_lora("hetlora", 1, options=options, client_dp=dp, weights="uniform")
    w = sim.server["w"]["1.lora_A.weight"]
    assert w[:1].abs().sum() > 0
    assert not w[1:].any()


class Scaled(FromZero):
    """With a scale s, as LoRA has it."""

    scaling = 3.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 3.0 * self.lora_B(self.lora_A(x))
        return out


def test_the_scale_of_a_layer_is_merged() -> None:
    model = Model(lambda: nn.Sequential(nn.Flatten(), Scaled(64, CLASSES)), trainable=["*lora_*"])
    method = make("flora", weights="uniform")
    sim = Simulation(method, federation(), model, TRAIN, engine=make_engine("vectorized"))
    before, factors = (
        sim.server["w"]["1.base.weight"].clone(),
        replies_of(sim, IDS)["lora", "1.lora_A.weight"],
    )
    sim.step()
    gain = 3.0 * (factors["B"].transpose(1, 2) @ factors["A"]).mean(0)
    torch.testing.assert_close(sim.server["w"]["1.base.weight"] - before, gain, atol=1e-6, rtol=1e-4)
    models = personal(sim)["1.base.weight"]
    torch.testing.assert_close(models, sim.server["w"]["1.base.weight"].expand_as(models), atol=1e-6, rtol=0)
