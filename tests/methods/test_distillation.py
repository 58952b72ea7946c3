"""Predictions on public samples: FedDF and PerFed-CKT."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from methods.reductions import NUMBERS, REMARKS, UPLOAD, drawn, fedavg, in_run, local, own_start
from methods.settings import Card, Row, make
from methods.small import (
    CLASSES,
    NEWCOMER,
    PUBLIC,
    TRAIN,
    assert_same,
    federation,
    model,
    simulation,
)
from tailorfl.core.messages import Replies
from tailorfl.core.method import make_method
from tailorfl.core.server_training import ServerDistillation
from tailorfl.methods.perfed_ckt import cluster, nearest
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training.cohort import TrainConfig

CONTRACTS = {
    "feddf": Row(
        Card(whole, whole, whole, False, True),
        {"distil": {"steps": 3, "batch_size": 4, "lr": 1e-3}},
        still={"distil": {"steps": 0}},
        same=(
            fedavg("T01", distil={"steps": 0}, said=True),
            fedavg("T01", distil={"rounds": 0}, said=True),
        ),
    ),
    # One matrix of 6 public samples and 4 classes up; two centroids down, none before the first upload.
    "perfed_ckt": Row(
        Card(lambda s: 2 * 24, lambda s: 24, whole, True, False),
        {"lam": 0.5, "public_batch": 4},
        chooses=True,
        by_round=lambda r, s: (2 * 24 * (r > 0), 24),
        alike={"own_init": False, "public_batch": 6},
        same=(
            local(lam=0.0, own_init=False),
            own_start(local(lam=0.0)),
            in_run(local(own_init=False, line="one round"), rounds=1),
            in_run(own_start(local(warm_rounds=2, line="warm rounds")), rounds=3),
            in_run(drawn("personal", own_init=False, first_round="upload"), rounds=1),
        ),
        remarks=(
            ({**UPLOAD, "warm_rounds": 1}, "in all rounds but round 2", REMARKS),
            (UPLOAD, "is LocalTrain from the second round on", REMARKS),
            ({**UPLOAD, "own_init": True}, "initial models of the clients' own", REMARKS),
            ({"clusters": 1}, "without clusters", NUMBERS),
            ({"clusters": 3}, "cluster of its own", REMARKS),
        ),
    ),
}


MODELS = {"small": model("logistic"), "middle": model("mlp"), "large": model("batch_norm")}
"""Any names will do, as long as no folder is called so."""
FEW = st.lists(st.tuples(*[st.sampled_from([0.0, 0.25, 1.0])] * 2), min_size=1, max_size=9)


def test_an_architecture_of_which_nobody_took_part_still_learns_from_the_others() -> None:
    method = make("feddf", distil={"steps": 3, "batch_size": 4, "lr": 1e-2})
    kinds = ("small", "large", "middle", "small", "large", "middle")
    sim = Simulation(method, federation(), MODELS, TRAIN, assignment=kinds, fraction=0.2)
    before = {n: sim.global_model(n) for n in MODELS}
    sim.step()
    for name, old in before.items():
        new, first = sim.global_model(name), MODELS[name].parameters[0]
        assert not torch.equal(old.get(first), new.get(first))  # type: ignore[union-attr]


def test_teachers_predict_in_slices_that_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows at once as an evaluation of so many models takes; the slices change nothing."""
    sim = simulation("feddf")
    public, models = sim.context.public, torch.stack([sim.init] * 3)
    assert public is not None
    whole = ServerDistillation().targets([(sim.model, models)], public)
    monkeypatch.setattr("tailorfl.training.cohort.INPUT_BYTES", 4 * 3 * 64 * 2)  # two rows of three clients
    sizes, take = [], type(public).take
    monkeypatch.setattr(
        type(public), "take", lambda source, rows: (sizes.append(len(rows)), take(source, rows))[1]
    )
    torch.testing.assert_close(ServerDistillation().targets([(sim.model, models)], public), whole)
    assert sizes == [2, 2, 2]


def run(rounds: int = 3, train: TrainConfig = TRAIN, **options: Any) -> Simulation:
    options = {"clusters": 2, "lam": 3.0, "public_batch": 4, "weights": "uniform", **options}
    return simulation(make_method("perfed_ckt", options), rounds=rounds, train=train)


def uniform(clients: int) -> Tensor:
    return torch.full((clients,), 1 / clients, dtype=torch.float64)


@settings(deadline=None, max_examples=60)
@given(FEW, st.integers(1, 12), st.integers(0, 2**63 - 1))
def test_clusters_are_means_of_their_members_and_none_is_empty(
    rows: list[tuple[float, float]], clusters: int, seed: int
) -> None:
    """Also with many equal vectors, and with more clusters than clients."""
    vectors = torch.tensor(rows)
    labels, centroids = cluster(vectors, uniform(len(rows)), clusters, seed)
    assert len(centroids) == min(clusters, len(set(rows)))
    assert sorted(set(labels.tolist())) == list(range(len(centroids)))
    assert torch.isfinite(centroids).all()
    for j, centroid in enumerate(centroids):
        torch.testing.assert_close(centroid, vectors[labels == j].mean(0))


def test_weights_count_in_the_centroid() -> None:
    vectors, weights = torch.tensor([[0.0], [1.0], [9.0]]), torch.tensor([0.6, 0.2, 0.2]).double()
    assert sorted(cluster(vectors, weights, 2, 0)[1][:, 0].tolist()) == pytest.approx([0.25, 9.0])


def test_groups_are_found_whatever_the_order_of_clients() -> None:
    """Members of three groups that lie far apart."""
    noise = 0.1 * torch.rand(12, 8, generator=torch.Generator().manual_seed(1))
    vectors = noise + torch.eye(3, 8).repeat(4, 1)
    order = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(2))
    labels, centroids = cluster(vectors, uniform(12), 3, 0)
    assert all(len(set(labels[g::3])) == 1 for g in range(3))
    other_labels, other = cluster(vectors[order], uniform(12), 3, 0)
    torch.testing.assert_close(centroids[labels][order], other[other_labels])


def test_k_means_is_repeatable_and_leaves_random_streams_alone() -> None:
    vectors = torch.rand(30, 5, generator=torch.Generator().manual_seed(3))
    stream = str(np.random.get_state(legacy=False))  # noqa: NPY002  (the stream that must not be touched)
    first = cluster(vectors, uniform(30), 5, 8)[1]
    assert torch.equal(first, cluster(vectors, uniform(30), 5, 8)[1])
    assert stream == str(np.random.get_state(legacy=False))  # noqa: NPY002


@pytest.mark.filterwarnings("error")
def test_vectors_that_differ_by_rounding_are_fewer_clusters_and_no_warning() -> None:
    rng = torch.Generator().manual_seed(0)
    near = torch.rand(1, 200, generator=rng) + 1e-7 * torch.rand(8, 200, generator=rng)
    vectors = torch.cat([1000 * near[:4], near])
    labels, centroids = cluster(vectors, uniform(12), 12, 0)
    assert len(centroids) < len(vectors.unique(dim=0)) == 12
    assert sorted(set(labels.tolist())) == list(range(len(centroids)))
    torch.testing.assert_close(centroids[labels], vectors, rtol=1e-5, atol=1e-6)


def test_the_nearest_centroid_is_the_first_of_equals_for_one_and_for_all() -> None:
    centroids = torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]], [[1.0, 0.0]]])
    s = torch.tensor([[[0.2, 0.8]], [[0.9, 0.1]], [[0.5, 0.5]]])
    expected = centroids[[0, 1, 0]]
    assert torch.equal(torch.stack([nearest(centroids, row) for row in s]), expected)
    assert torch.equal(torch.func.vmap(lambda row: nearest(centroids, row))(s), expected)


def test_the_starts_of_k_means_depend_on_seed_and_round_alone() -> None:
    """Sixty clients without groups, of which k-means finds something else from every start."""
    sim = run(rounds=0, clusters=12)
    s = torch.rand(60, PUBLIC, CLASSES, generator=torch.Generator().manual_seed(0))
    stack = TensorDict({"predictions": s}, batch_size=[60])

    def centroids(round: int, seed: int = 0) -> Tensor:
        context, sizes = replace(sim.context, seed=seed), np.ones(60, dtype=np.int64)
        replies = Replies(stack, tuple(range(60)), sizes, "uniform", context, round)
        return sim.method.aggregate(sim.server, replies)["centroids"]

    first = centroids(1)
    torch.manual_seed(99)
    assert torch.equal(first, centroids(1))
    assert not torch.equal(first, centroids(2))
    assert not torch.equal(first, centroids(1, seed=1))


@pytest.mark.parametrize("own_init", [True, False])
def test_equal_predictions_are_one_centroid(own_init: bool) -> None:
    """Clients that start alike and have not learned anything yet; by default each starts somewhere else."""
    idle = replace(TRAIN, lr=1e-30, momentum=0.0, weight_decay=0.0)
    sim = run(clusters=3, rounds=3, own_init=own_init, train=idle)
    assert len(sim.server["centroids"]) == (3 if own_init else 1)
    starts = sim.states.starts((0, 1, NEWCOMER))
    assert all(torch.equal(t[0], t[2]) != own_init for n, t in starts.items() if "weight" in n)


def test_a_newcomer_starts_with_a_model_of_its_own_and_learns_from_the_centroids() -> None:
    sim = run(rounds=3, public_batch=PUBLIC)
    ((_, at_once),) = sim.newcomer_models((NEWCOMER,), 0)
    assert_same(dict(at_once.items()), sim.states.starts((NEWCOMER,)))
    ((_, taught),) = sim.newcomer_models((NEWCOMER,), 2)
    sim.server["centroids"] = sim.server["centroids"][:0]
    ((_, alone),) = sim.newcomer_models((NEWCOMER,), 2)
    assert any(not torch.equal(t, alone.get(n)) for n, t in taught.items())


def test_in_warm_rounds_nothing_is_sent() -> None:
    sim = run(0, warm_rounds=2)
    for _ in range(2):
        sent = sim.step().traffic
        assert (sent.bytes_up, sent.bytes_down, len(sim.server["centroids"])) == (0, 0, 0)
    assert sim.step().traffic.bytes_up > 0
