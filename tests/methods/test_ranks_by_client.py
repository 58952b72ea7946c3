"""FlexLoRA and HetLoRA: ranks by client, what travels of them, and what the server makes of factors of several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from methods.reductions import fedavg, nothing_personal
from methods.settings import Card, Row, make
from methods.small import SIZES, TRAIN, assert_close, federation, personal, shared
from methods.test_lora_factors import IN, OUT, network, simulation_with_lora
from tailorfl.core.messages import PerClient, count_down
from tailorfl.engines.make import make_engine
from tailorfl.errors import ConfigError
from tailorfl.methods.fedit import svd_of_products
from tailorfl.methods.hetlora import product_square, size_of
from tailorfl.models.functional import Model
from tailorfl.rounds.client_privacy import ClientDP
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training.sample_privacy import SampleDP

CONTRACTS = {
    # On a model without LoRA there is nothing to freeze, and no B to keep; see tests/methods/test_lora_factors.py.
    "hetlora": Row(
        Card(whole, whole, whole, True, True),
        chooses=True,
        same=(fedavg("no LoRA", said=True), nothing_personal("no LoRA")),
    ),
    "flexlora": Row(
        Card(whole, whole, whole, True, True),
        chooses=True,
        same=(fedavg("no LoRA", said=True), nothing_personal("no LoRA")),
    ),
}


BOTH = ("flexlora", "hetlora")
MIXED = (2, 1)


def run(name: str, rounds: int = 2, engine: str = "vectorized", **options: Any) -> Simulation:
    return simulation_with_lora(name, rounds, engine=engine, options=options)


@pytest.mark.parametrize("name", BOTH)
def test_a_client_of_rank_1_reads_and_sends_the_first_row_alone(name: str) -> None:
    sim = run(name, ranks=MIXED, **({"prune": 1.0} if name == "hetlora" else {}))
    models = personal(sim)
    for i in range(len(SIZES)):
        own = MIXED[i % 2]
        assert float(models["1.lora_A.weight"][i, own:].abs().sum()) == 0
        assert float(models["1.lora_B.weight"][i, :, own:].abs().sum()) == 0
    ranks = sum(MIXED[i % 2] for i in range(len(SIZES)))
    assert sim.traffic.up == sim.traffic.down_unicast == 2 * ranks * (IN + OUT)
    assert sim.traffic.down_multicast == 2 * sum(MIXED) * (
        IN + OUT
    )  # what clients of one rank get is one payload
    # What stands in the second row of the server's changes nothing for them.
    other = run(name, 1, ranks=MIXED, **({"prune": 1.0} if name == "hetlora" else {}))
    for n, t in other.server["w"].items():
        t[1:] += 1.0 if "lora_A" in n else 0.0
    before = personal(run(name, 1, ranks=MIXED, **({"prune": 1.0} if name == "hetlora" else {})))
    after = personal(other)
    assert torch.equal(after["1.lora_A.weight"][1], before["1.lora_A.weight"][1])
    assert not torch.equal(after["1.lora_A.weight"][0], before["1.lora_A.weight"][0])


def test_hetlora_of_equal_ranks_and_sizes_is_fedit_with_equal_weights() -> None:
    """All clients have the same samples and full batches, so all send the same S_i."""
    base = federation((9,))
    data = replace(
        base,
        train=(base.train[0],) * 3,
        val=(base.val[0],) * 3,
        test=(base.test[0],) * 3,
        names=("a", "b", "c"),
        num_clients=3,
    )
    full = replace(TRAIN, batch_size=0, epochs=2)
    model = Model(network, trainable=["*lora_*"])
    methods = (make("hetlora", lam=0.0, prune=1.0, weights="uniform"), make("fedit", weights="uniform"))
    runs = [Simulation(m, data, model, full, engine=make_engine("vectorized")) for m in methods]
    for sim in runs:
        for _ in range(3):
            sim.step()
    ours = {n: t for n, t in shared(runs[0]).items() if not n.endswith("kept")}
    assert_close(ours, shared(runs[1]), atol=1e-6)


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


def test_rows_that_are_present_are_counted_for_each_receiver() -> None:
    present = torch.tensor([[True, False], [True, True]])
    table = TensorDict({"x": TensorDict({"A": torch.zeros(2, 2, 5), "present": present})}, batch_size=[2])
    cost = count_down(PerClient(table, torch.tensor([0, 0, 1])), 3, ())
    assert (cost.down_unicast, cost.down_multicast) == (5 + 5 + 10, 5 + 10)


def test_private_training_fills_no_rank_that_a_client_has_not() -> None:
    private = replace(TRAIN, dp=SampleDP(1.0, 1.0, "shuffle"))
    sim = simulation_with_lora("flexlora", 1, options={"ranks": (1,)}, train=private)
    models = personal(sim)
    assert float(models["1.lora_A.weight"][:, 1:].abs().sum()) == 0
    assert sim.traffic.up == len(SIZES) * (IN + OUT)


def test_what_it_cannot_do_is_said() -> None:
    with pytest.raises(ConfigError, match="ranks of clients are from 1 to that of the model's LoRA, 2"):
        run("flexlora", 0, ranks=(3,))
    for name in BOTH:
        with pytest.raises(ConfigError, match="the rank of a client's adapter"):
            simulation_with_lora(
                name, options={"ranks": MIXED}, client_dp=ClientDP(clip=1.0, noise=1.0), weights="uniform"
            )
