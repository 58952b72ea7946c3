"""Client-level privacy: what the server sees of replies, what one client can change, and what is accounted for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from methods.settings import NAMES, make, one_of, row
from methods.small import FACTORIES, SIZES, TRAIN, assert_same, federation, replaced, simulation
from tailorfl.core.messages import Replies
from tailorfl.core.method import Method
from tailorfl.errors import ConfigError, ModelError
from tailorfl.methods.fedavg import FedAvg
from tailorfl.models.functional import Model
from tailorfl.privacy import EVERYONE
from tailorfl.rounds.client_privacy import ClientDP, private_replies
from tailorfl.rounds.one_round import ClientUpdates
from tailorfl.rounds.planning import planned_ledger
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import tree
from tailorfl.training.keys import derive

PLAIN = replace(TRAIN, momentum=0.0, weight_decay=0.0)
NOISY = ClientDP(0.3, 1.0)
OPEN = ClientDP(math.inf, 0.0)
COVERED = [name for name in NAMES if not make(name).unprotected("client") and not make(name).pooled]


def run(method: str | Method, dp: ClientDP | None, rounds: int = 0, **settings: Any) -> Simulation:
    """`method` by name is one whose server trains nothing: Adam turns rounding errors into visible differences."""
    still = row(method).promises.get("still", {}) if isinstance(method, str) else {}
    distil = {key: value for key, value in still.items() if key == "distil"}
    made = make(method, weights="uniform", **distil) if isinstance(method, str) else method
    given = {"train": PLAIN, "engine": "vectorized", **settings}
    return simulation(made, given.pop("model", "mlp"), client_dp=dp, rounds=rounds, **given)


# -- what the server sees ------------------------------------------------------------------------------------


def stack(clients: int = 5, seed: int = 0) -> TensorDict:
    rng = torch.Generator().manual_seed(seed)
    parts = {"a": torch.randn(clients, 3, 2, generator=rng), "b/c": torch.randn(clients, generator=rng)}
    return tree.nest(parts.items(), [clients])


def flat(replies: TensorDict) -> Tensor:
    return torch.cat([t.reshape(replies.batch_size[0], -1) for _, t in tree.leaves(replies)], dim=1)


def seen(
    replies: TensorDict,
    anchor: TensorDict,
    dp: ClientDP,
    mean_only: bool,
    key: tuple[int, int, str] = (7, 0, ""),
    clients: Sequence[int] | None = None,
) -> TensorDict:
    """What the server gets of a round, whose `key` is (seed, round, architecture)."""
    ids = range(replies.batch_size[0]) if clients is None else clients
    return private_replies(ClientUpdates.of(replies, anchor, ()), dp, derive(*key), ids, mean_only)


ANCHOR = TensorDict({"a": torch.full((3, 2), 0.5)}, batch_size=[])


@pytest.mark.parametrize("clip", [0.1, 2.0, 50.0])
def test_updates_are_clipped_as_a_whole_around_what_was_received(clip: float) -> None:
    """`a` is measured from the anchor, `b/c`, which has no counterpart there, is a change itself."""
    replies = stack()
    origin = torch.cat([torch.full((6,), 0.5), torch.zeros(1)])
    updates = flat(replies) - origin
    clipped = updates * (clip / updates.norm(dim=1, keepdim=True)).clamp(max=1.0)
    torch.testing.assert_close(flat(seen(replies, ANCHOR, ClientDP(clip, 0.0), False)), origin + clipped)
    mean = flat(seen(replies, ANCHOR, ClientDP(clip, 0.0), True))
    torch.testing.assert_close(mean, (origin + clipped.mean(0)).expand_as(mean))


def test_an_entry_of_another_shape_is_no_counterpart() -> None:
    anchors = (TensorDict({"a": torch.ones(2, 3)}, batch_size=[]), tree.empty())
    other, none = (dict(tree.leaves(seen(stack(), a, ClientDP(0.5, 0.0), False))) for a in anchors)
    assert_same(other, none)


@pytest.mark.parametrize("mean_only", [True, False])
def test_clients_may_have_received_different_things(mean_only: bool) -> None:
    replies, each = stack(), TensorDict({"a": torch.randn(5, 3, 2)}, batch_size=[5])
    found = seen(replies, each, OPEN, mean_only)
    torch.testing.assert_close(flat(found).mean(0), flat(replies).mean(0))
    if not mean_only:
        torch.testing.assert_close(flat(found), flat(replies))


def test_an_update_that_is_no_number_is_none() -> None:
    replies = stack()
    replies["a"][2, 0, 0], replies["a"][4, 0, 0] = math.nan, math.inf
    found = flat(seen(replies, ANCHOR, ClientDP(1.0, 0.0), False))
    for client in (2, 4):
        assert found[client].tolist() == [*[0.5] * 6, 0.0]


def test_the_server_of_a_mean_sees_nothing_but_the_mean() -> None:
    """Two sets of updates with one mean look alike, to the last bit of every row."""
    ones = TensorDict({"a": torch.tensor([[1.0, 0.0], [0.0, 1.0]])}, batch_size=[2])
    halves = TensorDict({"a": torch.full((2, 2), 0.5)}, batch_size=[2])
    found = [seen(x, tree.empty(), ClientDP(5.0, 1.0), True, (0, 0, "")) for x in (ones, halves)]
    assert torch.equal(found[0]["a"], found[1]["a"])
    assert torch.equal(found[0]["a"][0], found[0]["a"][1])


@pytest.mark.parametrize("mean_only", [True, False])
def test_the_noise_has_its_size(mean_only: bool) -> None:
    """N(0, σ²C²) on the sum over clients, or on each; new in every round, uncorrelated between entries."""
    clients, dp = 4, ClientDP(2.0, 1.5)
    nothing = tree.nest([(p, torch.zeros_like(t)) for p, t in tree.leaves(stack(clients))], [clients])
    draws = (
        torch.stack([flat(seen(nothing, tree.empty(), dp, mean_only, (7, r, ""))) for r in range(400)]) / 3.0
    )
    if mean_only:
        z = draws.sum(1)
    else:
        assert float((torch.corrcoef(draws[:, :, 0].T) - torch.eye(clients)).abs().max()) < 0.25
        z = draws.reshape(-1, 7)
    # Five standard deviations of 400 draws each.
    assert float(z.mean(0).abs().max()) < 0.25
    assert float((z.var(0) - 1).abs().max()) < 0.36
    assert float((torch.corrcoef(z.T) - torch.eye(7)).abs().max()) < 0.25


def test_noise_is_a_function_of_seed_round_architecture_and_client() -> None:
    def noise(*key: Any, clients: tuple[int, ...] = (4, 7), mean_only: bool = True) -> Tensor:
        nothing = TensorDict({"a": torch.zeros(2, 3)}, batch_size=[2])
        drawn: Tensor = seen(nothing, tree.empty(), ClientDP(1.0, 1.0), mean_only, key, clients)["a"]
        return drawn

    assert torch.equal(noise(0, 1, ""), noise(0, 1, ""))
    one, other = (noise(0, 1, "", clients=ids, mean_only=False) for ids in ((4, 7), (7, 9)))
    assert torch.equal(one[1], other[0])
    keys = [(0, 1, ""), (1, 1, ""), (0, 2, ""), (0, 1, "mlp")]
    draws = [noise(*key, mean_only=mean)[0] for key in keys for mean in (True, False)]
    assert len({tuple(d.tolist()) for d in draws}) == 8


def test_whole_numbers_may_only_be_repeated() -> None:
    replies = TensorDict({"n": torch.tensor([[1], [2]]), "a": torch.randn(2, 3)}, batch_size=[2])
    each = TensorDict({"n": torch.tensor([[1], [2]])}, batch_size=[2])
    assert torch.equal(seen(replies, each, NOISY, False)["n"], replies["n"])
    for other in (tree.empty(), TensorDict({"n": torch.tensor([1])}, batch_size=[])):
        with pytest.raises(ConfigError, match="whole numbers \\('n'\\)"):
            seen(replies, other, NOISY, False)


@pytest.mark.parametrize(
    ("clip", "noise", "said"),
    [(math.inf, 1.0, "multiple of the clip"), (-1.0, 1.0, "positive clip"), (1.0, -1.0, "at least 0")],
)
def test_noise_needs_a_clip_and_neither_is_negative(clip: float, noise: float, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ClientDP(clip, noise)


# -- methods -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", one_of(6, COVERED, 2))
def test_what_is_accounted_is_known_beforehand(name: str) -> None:
    sim = run(make(name, weights="uniform"), NOISY, fraction=0.6)
    planned = planned_ledger(sim, 2)
    for _ in range(2):
        sim.step()
    assert sim.ledger == planned
    sampled = {c for r in range(2) for c in sim.sample(r)} if sim.ledger else set()
    assert set(sim.ledger.clients) <= sampled
    if name != "l2gd":  # whose coins send models up in some rounds only
        assert set(sim.ledger.clients) == sampled


@pytest.mark.parametrize("name", ["fedavg", "ditto", "scaffold", "mr_mtl", "fedclup", "pfedme"])
def test_a_client_changes_the_server_by_no_more_than_the_clip(name: str) -> None:
    """Two runs of a round that differ in one client, whose data explode in one of them: C/m, twice."""
    exploded = replaced(federation(), 3, lambda x: 1e4 * x)

    def apart(dp: ClientDP | None) -> float:
        data = (federation(), exploded)
        ends = [dict(tree.leaves(run(name, dp, rounds=1, data=d, model="logistic").server)) for d in data]
        return float(torch.cat([(t - ends[1][p]).double().flatten() for p, t in ends[0].items()]).norm())

    assert apart(ClientDP(0.2, 0.0)) <= 2 * 0.2 / len(SIZES) * 1.01
    assert apart(None) > 0.5


def test_a_diverged_client_does_not_show() -> None:
    """Not even in the number of clients that the mean is over."""
    broken = replaced(federation(), 3, lambda x: x * math.nan)
    sim, whole = (run("fedavg", ClientDP(1e6, 0.0), data=d) for d in (broken, federation()))
    start = {n: t.clone() for n, t in sim.server["w"].items()}
    replies = whole.run(range(5), whole.states.get(range(5)), whole.server["w"], whole.local)[1]
    assert sim.step().rejected == (3,)
    for name, tensor in sim.server["w"].items():
        others = replies[name][[0, 1, 2, 4]] - start[name]
        torch.testing.assert_close(tensor, start[name] + others.sum(0) / 5, atol=1e-6, rtol=1e-4)


def test_personal_models_are_not_touched() -> None:
    private, plain = (run("ditto", dp, rounds=1) for dp in (ClientDP(0.01, 5.0), None))
    ids = range(len(SIZES))
    assert_same(dict(tree.leaves(private.states.get(ids))), dict(tree.leaves(plain.states.get(ids))))
    assert any(not torch.equal(t, plain.server[n]) for n, t in private.server.items())


class Curious(FedAvg):
    """Says that it averages, and keeps what it sees."""

    kept: ClassVar[list[Replies]] = []

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        self.kept.append(replies)
        return super().aggregate(server, replies)


def test_a_server_that_averages_is_shown_no_single_reply_and_no_numbers_beside_it() -> None:
    run(Curious(weights="uniform"), NOISY, rounds=1)
    (replies,) = Curious.kept
    assert list(replies.metrics.keys()) == []
    assert all(torch.equal(row, tensor[0]) for tensor in replies.stack.values() for row in tensor)


# -- the account ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "rate"),
    [({}, 1.0), ({"fraction": 0.5, "sampling": "bernoulli"}, 0.5), ({"sampling": "bernoulli"}, 1.0)],
)
def test_a_mean_of_clients_drawn_each_by_itself_counts_with_their_rate(
    settings: dict[str, Any], rate: float
) -> None:
    sim = run("fedavg", NOISY, rounds=3, **settings)
    assert sim.ledger.entries(EVERYONE) == sim.ledger.entries(0) == ((rate, 1.0, 3),)
    assert sim.ledger.clients == ()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("feddf", {}),
        ("feddf", {"sampling": "bernoulli"}),
        ("fedavg", {"sampling": "proportional"}),
        ("fedavg", {"sampling": "uniform"}),
    ],
    ids=["each reply", "each reply, drawn by itself", "preferred", "fixed size"],
)
def test_where_drawing_hides_nobody_rounds_count_in_full(name: str, settings: dict[str, Any]) -> None:
    sim = run(name, NOISY, rounds=4, fraction=0.6, **settings)
    for client in range(len(SIZES)):
        took = sum(client in sim.sample(r) for r in range(4))
        assert sim.ledger.entries(client) == (((1.0, 1.0, took),) if took else ())


def test_rounds_in_which_nothing_is_sent_cost_nothing() -> None:
    """L2GD's coins send models up once, at the end of round 2; LocalTrain sends nothing at all."""
    assert run("l2gd", NOISY, rounds=5).ledger.entries(0) == ((1.0, 1.0, 1),)
    assert not run("local", NOISY, rounds=5).ledger
    some = run(make("ditto", weights="uniform", participation="all"), NOISY, fraction=0.4)
    planned = planned_ledger(some, 1)
    some.step()
    assert planned == some.ledger
    assert set(planned.clients) == set(some.sample(0))  # all have trained


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (make("fedavg"), "set weights=uniform"),
        (make("pfedme"), "set weights=uniform"),
        (make("centralized"), "pooled data"),
        (make("hypcluster"), "the number of the cluster"),
        (make("fedclup", schedule={"kind": "dynamic"}), "losses that clients report"),
    ],
)
def test_what_noise_does_not_cover_is_refused_at_the_start(method: Method, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run(method, NOISY)


def test_running_statistics_are_refused_unless_they_stay() -> None:
    with pytest.raises(ModelError, match="running statistics"):
        run("fedavg", NOISY, rounds=1, model="batch_norm")
    run("fedbn", NOISY, rounds=1, model="batch_norm")
    frozen = Model(FACTORIES["batch_norm"], trainable="head")
    Simulation(make("fedavg", weights="uniform"), federation(), frozen, PLAIN, client_dp=NOISY).step()
