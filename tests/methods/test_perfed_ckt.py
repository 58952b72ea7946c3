"""PerFed-CKT: its k-means, and the rounds before and in which predictions first go up."""

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

from methods.reductions import drawn, in_run, local, own_start
from methods.settings import Card, Row
from methods.small import (
    CLASSES,
    NEWCOMER,
    PUBLIC,
    TRAIN,
    assert_close,
    assert_same,
    federation,
    personal,
    simulation,
)
from tailorfl.core.messages import Replies
from tailorfl.core.method import make_method
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError
from tailorfl.methods.perfed_ckt import cluster, nearest
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training.cohort import TrainConfig

CONTRACTS = {
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
            (
                {"lam": 0.0, "own_init": False, "first_round": "upload", "warm_rounds": 1},
                "in all rounds but round 2",
                "test_reduction_remarks.py",
            ),
            (
                {"lam": 0.0, "own_init": False, "first_round": "upload"},
                "from the second round on",
                "test_reduction_remarks.py",
            ),
            ({"clusters": 1}, "without clusters", "../references/test_references.py"),
            ({"clusters": 3}, "cluster of its own", "test_reduction_remarks.py"),
        ),
    ),
}


ENGINES = ("sequential", "vectorized")
EVERYTHING = TrainConfig(steps=1, batch_size=0, lr=0.3)
"""One step a round on all private samples."""


def run(engine: str = "sequential", rounds: int = 3, **options: Any) -> Simulation:
    """The simulation after `rounds` rounds; `options` are those of the method and settings of the run."""
    settings = {k: options.pop(k) for k in ("data", "train") if k in options}
    options = {"clusters": 2, "lam": 3.0, "public_batch": 4, "weights": "uniform", **options}
    return simulation(make_method("perfed_ckt", options), "mlp", engine, rounds=rounds, **settings)


# -- k-means ------------------------------------------------------------------------------------------------


def uniform(clients: int) -> Tensor:
    return torch.full((clients,), 1 / clients, dtype=torch.float64)


few_values = st.lists(
    st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=2), min_size=1, max_size=9
)


@settings(deadline=None, max_examples=60)
@given(few_values, st.integers(1, 12), st.integers(0, 2**63 - 1))
def test_clusters_are_means_of_their_members_and_none_is_empty(
    rows: list[list[float]], clusters: int, seed: int
) -> None:
    """Also with many equal vectors, and with more clusters than clients."""
    vectors = torch.tensor(rows)
    labels, centroids = cluster(vectors, uniform(len(rows)), clusters, seed)
    assert len(centroids) == min(clusters, len({tuple(r) for r in rows}))
    assert sorted(set(labels.tolist())) == list(range(len(centroids)))
    assert torch.isfinite(centroids).all()
    for j, centroid in enumerate(centroids):
        torch.testing.assert_close(centroid, vectors[labels == j].mean(0))


def test_weights_count_in_the_centroid() -> None:
    vectors, weights = torch.tensor([[0.0], [1.0], [9.0]]), torch.tensor([0.6, 0.2, 0.2]).double()
    assert sorted(cluster(vectors, weights, 2, 0)[1][:, 0].tolist()) == pytest.approx([0.25, 9.0])


def grouped(members: int = 4) -> Tensor:
    """Members of three groups that lie far apart."""
    noise = 0.1 * torch.rand(3 * members, 8, generator=torch.Generator().manual_seed(1))
    return noise + torch.eye(3, 8).repeat(members, 1)


def test_groups_are_found_whatever_the_order_of_clients() -> None:
    vectors = grouped()
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
    near = torch.rand(1, 200, generator=torch.Generator().manual_seed(0)) + 1e-7 * torch.rand(
        8, 200, generator=torch.Generator().manual_seed(1)
    )
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


# -- the method ---------------------------------------------------------------------------------------------


def test_the_starts_of_k_means_depend_on_seed_and_round_alone() -> None:
    """Sixty clients without groups, of which k-means finds something else from every start."""
    sim = run(rounds=0, clusters=12)
    s = torch.rand(60, PUBLIC, CLASSES, generator=torch.Generator().manual_seed(0))
    stack = TensorDict({"predictions": s}, batch_size=[60])

    def centroids(round: int, seed: int = 0) -> Tensor:
        context = replace(sim.context, seed=seed)
        sizes = np.ones(60, dtype=np.int64)
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


def test_tasks_without_classes_and_runs_without_a_public_set_are_refused() -> None:
    base, public = federation(), federation().public
    assert public is not None
    binary = replace(
        base,
        source=Source("two classes", base.source.x, base.source.y % 2, "binary", 1),
        public=Source("public", public.x, public.y, "binary", 1),
    )
    for data, named in ((replace(base, public=None), "public"), (binary, "binary")):
        with pytest.raises(ConfigError, match=named):
            run(data=data)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("first_round", ["train", "upload"])
def test_in_warm_rounds_clients_train_alone_and_nothing_is_sent(engine: str, first_round: str) -> None:
    """All begins after them as it else does in the first round, from the models that they have by then."""
    warm, options = 2, {"first_round": first_round, "train": EVERYTHING, "public_batch": PUBLIC}
    sim = run(engine, rounds=0, warm_rounds=warm, **options)
    for _ in range(warm):
        sent = sim.step().traffic
        assert (sent.bytes_up, sent.bytes_down, len(sim.server["centroids"])) == (0, 0, 0)
    alone = simulation(make_method("local", {"own_init": True}), "mlp", engine, train=EVERYTHING, rounds=warm)
    assert_same(personal(sim), personal(alone))
    late = run(engine, rounds=0, **options)
    ids = tuple(range(sim.federation.num_clients))
    late.states.put(ids, sim.states.get(ids))
    late.states.commit(ids)
    for _ in range(3):
        sim.step()
        late.step()
        assert len(sim.server["centroids"]) == 2
        torch.testing.assert_close(*(s.server["centroids"].sort(0)[0] for s in (sim, late)))
    assert_close(personal(sim), personal(late))
