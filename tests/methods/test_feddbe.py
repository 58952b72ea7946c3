"""FedDBE: its first round, its consensus, its private bias; and terms that keep something of a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.nn.functional import cross_entropy

from methods.plain import batches
from methods.settings import Card, Row, make, width
from methods.small import TRAIN, assert_close, assert_same, federation, personal, simulation
from tailorfl.core.client import Client
from tailorfl.errors import ConfigError, ModelError, TailorflError
from tailorfl.methods.feddbe import MEAN, FedDBE, OffsetLinear, add_offset
from tailorfl.testing.contract import whole
from tailorfl.training import tree
from tailorfl.training.plan import Length
from tailorfl.training.sample_privacy import SampleDP
from tailorfl.training.terms import Term

CONTRACTS = {
    # The first round keeps no model and sends the mean features up; those of all go down beside every model.
    "feddbe": Row(
        Card(lambda s: s.d + width(s), whole, whole, True, False, lambda s: -s.d),
        {"kappa": 2.0, "mu": 0.5},
        by_round=lambda r, s: (s.d + width(s), s.d if r else width(s)),
        proved="without pull and bias FedAvg from the second round on: test_feddbe.py",
        never="its first round keeps nothing, so it is FedAvg of a round less at most",
    ),
}


STILL = replace(TRAIN, lr=1e-30, momentum=0.0, weight_decay=0.0)


def test_after_the_first_round_w_is_as_drawn_and_the_consensus_never_moves() -> None:
    sim = simulation("feddbe")
    start = {n: t.clone() for n, t in tree.leaves(sim.server["w"])}
    sim.step()
    assert_same(dict(tree.leaves(sim.server["w"])), start)
    consensus = sim.server["mean"].clone()
    assert float(consensus.abs().max()) > 0
    for _ in range(2):
        sim.step()
        assert torch.equal(sim.server["mean"], consensus)
    assert any(not torch.equal(t, start[n]) for n, t in tree.leaves(sim.server["w"]))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_without_pull_and_bias_it_is_fedavg_from_the_second_round_on(engine: str) -> None:
    sim = simulation(make("feddbe", kappa=0.0, bias=False), engine=engine, rounds=3, fraction=0.6)
    plain = simulation("fedavg", engine=engine, fraction=0.6)
    plain.round = 1
    plain.step()
    plain.step()
    found = personal(sim)
    assert_close({n: found[n][0] for n in plain.server["w"].keys()}, dict(plain.server["w"].items()))  # noqa: SIM118
    assert float(found["head.offset"].abs().max()) == 0


@pytest.mark.parametrize(("mu", "batch"), [(1.0, 4), (0.3, 4)])
def test_r_is_a_running_mean_of_batches_and_with_mu_1_that_of_the_last(mu: float, batch: int) -> None:
    """With a rate of 0, features do not move: one client with three batches and a short one."""
    sim = simulation(make("feddbe", mu=mu), data=federation((15,)), train=replace(STILL, batch_size=batch))
    rows = batches(sim, 0)
    sim.step()
    source, wanted = sim.federation.source, torch.zeros_like(sim.server["mean"])
    for some in rows:
        _, z = sim.model.outputs_and_features(sim.init, source.take(some))
        wanted = (1 - mu) * wanted + mu * z.mean(0)
    torch.testing.assert_close(sim.server["mean"], wanted)


def test_at_the_consensus_there_is_no_pull_and_its_slope_has_the_factor_mu() -> None:
    class Batch:
        def __init__(self) -> None:
            self.own = {MEAN: torch.tensor([1.0, -1.0])}
            self.features = torch.tensor([[2.0, 0.0], [4.0, 2.0]], requires_grad=True)

        def mean(self, rows: torch.Tensor) -> torch.Tensor:
            return rows.mean(0)

    method = make("feddbe", mu=0.5)
    assert isinstance(method, FedDBE)
    r = torch.tensor([2.0, 0.0])  # half of what it was, half of (3, 1)
    for target, wanted in ((r, torch.zeros(2, 2)), (r - 1, torch.full((2, 2), 3.0 * 0.5 / 2 * 0.5))):
        batch = Batch()
        value, kept = method.held(3.0, target).function(batch, target)
        torch.testing.assert_close(kept[MEAN].detach(), r)
        (slope,) = torch.autograd.grad(value, batch.features)
        torch.testing.assert_close(slope, wanted)


def test_the_gradient_of_the_bias_is_the_heads_transpose_times_that_of_the_logits() -> None:
    head = nn.Linear(3, 4)
    add_offset(head)
    assert isinstance(head, OffsetLinear)
    z, y = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 0])
    torch.testing.assert_close(head(z), z @ head.weight.T + head.bias)
    logits = head(z)
    (slope,) = torch.autograd.grad(cross_entropy(logits, y), head.offset)
    of_logits = (logits.softmax(1) - nn.functional.one_hot(y, 4)).mean(0)
    torch.testing.assert_close(slope, head.weight.T @ of_logits)
    with pytest.raises(ModelError, match="is not there"):
        add_offset(nn.Conv2d(1, 1, 1))


def test_the_bias_is_private_and_late_clients_have_none() -> None:
    sim = simulation("feddbe", rounds=3)
    assert "head.offset" not in dict(tree.leaves(sim.server["w"]))
    own = sim.states.get(range(5))["head.offset"]
    assert len({tuple(row) for row in own.tolist()}) == 5
    ((_, models),) = sim.newcomer_models((5,), 0)
    assert float(models["head.offset"].abs().max()) == 0


def test_privacy_of_samples_does_not_cover_what_a_term_keeps() -> None:
    private = replace(STILL, dp=SampleDP(1.0, 1.0, "shuffle"))
    with pytest.raises(ConfigError, match="the running mean of a client's features"):
        simulation("feddbe", train=private)
    term = Term(lambda seen: (seen.mean(seen.outputs[:, 0]), {"kept": seen.own["kept"]}), keeps=("kept",))
    sim = simulation("fedavg", train=private)
    with pytest.raises(ModelError, match="keeps something of a batch"):
        fit(sim, term)


def fit(sim, term: Term, **more):
    start = tree.merge(sim.init, TensorDict({"kept": torch.zeros(2)}))

    def local(client: Client, state, received):
        return (client.fit(received, term=term, length=Length(epochs=2), **more),)

    (found,) = sim.run((0, 2), sim.states.get((0, 2)), start, local)
    return found


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_term_keeps_what_it_says_and_nothing_else_moves_it(engine: str) -> None:
    """It counts batches; clients of 15 and 7 samples have 4 and 2 of them an epoch. The momentum does not reach it."""

    def counting(seen):
        return seen.mean(seen.outputs[:, 0]) * 0.0, {"kept": seen.own["kept"] + 1}

    found = fit(simulation("fedavg", engine=engine), Term(counting, keeps=("kept",)))
    assert found["kept"].tolist() == [[8.0, 8.0], [4.0, 4.0]]


def test_a_term_that_does_not_return_what_it_keeps_is_told_so() -> None:
    with pytest.raises(TailorflError, match=r"returns \(value, \{name: new tensor\}\)"):
        fit(simulation("fedavg"), Term(lambda seen: seen.loss, keeps=("kept",)))
    with pytest.raises(
        TailorflError, match="which should be tensors of the start that the model does not have"
    ):
        fit(simulation("fedavg"), Term(lambda seen: (seen.loss, {}), keeps=("head.bias",)))
    with pytest.raises(TailorflError, match="a term on public samples"):
        Term(lambda seen: seen.loss, public=2, keeps=("kept",))
