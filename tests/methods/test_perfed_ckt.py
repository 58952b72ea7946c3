"""PerFed-CKT: its k-means, its objective against autograd, several architectures, and the printed costs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F

from methods.reductions import drawn, in_run, local, own_start
from methods.settings import Card, Row
from methods.small import (
    CLASSES,
    NEWCOMER,
    PUBLIC,
    TRAIN,
    assert_close,
    assert_same,
    everything,
    federation,
    model,
    personal,
    simulation,
)
from tailorfl.core.messages import Replies
from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.make import make_engine
from tailorfl.errors import ConfigError
from tailorfl.methods.perfed_ckt import PerFedCKT, cluster, nearest
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training import tree
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
            ({"clusters": 1}, "without clusters", "test_perfed_ckt.py"),
            ({"clusters": 3}, "cluster of its own", "test_reduction_remarks.py"),
        ),
    ),
}


ENGINES = ("sequential", "vectorized")
EVERYTHING = TrainConfig(steps=1, batch_size=0, lr=0.3)
"""One step a round on all private samples."""


def run(engine: str = "sequential", model_name: str = "mlp", rounds: int = 3, **options: Any) -> Simulation:
    """The simulation after `rounds` rounds; `options` are those of the method and settings of the run."""
    given = {"clusters": 2, "lam": 3.0, "public_batch": 4, "weights": "uniform", **options}
    chosen = {k: given.pop(k) for k in ("data", "train", "fraction", "seed", "chunk") if k in given}
    return simulation(make_method("perfed_ckt", given), model_name, engine, rounds=rounds, **chosen)


def probabilities(sim: Simulation, ids: range | tuple[int, ...]) -> Tensor:
    """The class probabilities of the clients' models on the public set, [clients, P, C]."""
    states, public = sim.states.get(tuple(ids)), sim.federation.public
    assert public is not None
    outputs = [sim.model(tree.tensors(states[k]), public.x) for k in range(len(ids))]
    return torch.stack(outputs).softmax(-1)


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


def test_as_many_clusters_as_clients_give_the_inputs_back() -> None:
    vectors = torch.rand(7, 20, generator=torch.Generator().manual_seed(0))
    labels, centroids = cluster(vectors, uniform(7), 7, 3)
    assert torch.equal(centroids[labels], vectors)


def test_one_cluster_is_the_mean() -> None:
    vectors = torch.rand(7, 20, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(cluster(vectors, uniform(7), 1, 3)[1], vectors.mean(0, keepdim=True))


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
    assert torch.equal(torch.stack([nearest(centroids, one) for one in s]), expected)
    assert torch.equal(torch.func.vmap(lambda one: nearest(centroids, one))(s), expected)


# -- the method ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model_name", ["mlp", "batch_norm", "dropout"])
@pytest.mark.parametrize("lam", [0.0, 1e-30])
def test_without_pull_it_is_local_training(engine: str, model_name: str, lam: float) -> None:
    alone = personal(simulation("local", model_name, engine, rounds=4, fraction=0.6))
    found = personal(run(engine, model_name, 4, lam=lam, own_init=False, fraction=0.6))
    (assert_same if lam == 0 else assert_close)(found, alone)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("clusters", [1, 2])
def test_rounds_are_gradient_steps_on_the_objective(engine: str, clusters: int) -> None:
    """Three rounds of one full step each, against autograd; c = 1 is co-distillation to everybody's mean."""
    lam, rounds = 3.0, 3
    sim = run(engine, rounds=0, lam=lam, clusters=clusters, public_batch=PUBLIC, train=EVERYTHING)
    public, source = federation().public, federation().source
    assert public is not None
    models = [{n: t[i].clone() for n, t in sim.states.get(range(5)).items()} for i in range(5)]
    centroids = None
    for number in range(rounds):
        sim.step()
        for i, w in enumerate(models):
            w = {n: t.requires_grad_() for n, t in w.items()}
            rows = torch.from_numpy(federation().train[i])
            loss = F.cross_entropy(sim.model(w, source.x[rows]), source.y[rows])
            s = sim.model(w, public.x).softmax(-1)
            if centroids is not None:
                gaps = ((centroids - s) ** 2).sum((1, 2)).detach()
                target = centroids[int(gaps.argmin())]
                loss = loss + lam * ((target - s) ** 2).sum(-1).mean()
            grads = torch.autograd.grad(loss, list(w.values()))
            models[i] = {n: (t - 0.3 * g).detach() for (n, t), g in zip(w.items(), grads, strict=True)}
        s = torch.stack([sim.model(w, public.x).softmax(-1).detach() for w in models])
        labels = cluster(s.flatten(1), uniform(5), clusters, 0)[0]
        centroids = torch.stack([s[labels == j].mean(0) for j in range(clusters)])
        got = sim.server["centroids"]
        assert got.shape == (clusters, PUBLIC, CLASSES), number
        torch.testing.assert_close(got.sort(0)[0], centroids.sort(0)[0], atol=1e-5, rtol=1e-4)
    stacked = {n: torch.stack([w[n] for w in models]) for n in models[0]}
    assert_close(personal(sim), stacked)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_target_equal_to_the_own_predictions_pulls_nowhere(engine: str) -> None:
    """A single client is its own centroid: with one step a round it trains as if alone."""
    one = federation((11,))
    found = run(engine, lam=500.0, own_init=False, data=one, train=EVERYTHING)
    alone = simulation("local", data=one, train=EVERYTHING, rounds=3)
    assert_close(personal(found), personal(alone), atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_server_keeps_means_of_what_the_clients_predict(engine: str) -> None:
    sim = run(engine, clusters=5, rounds=2)
    s = probabilities(sim, range(5))
    order = torch.cdist(s.flatten(1), sim.server["centroids"].flatten(1)).argmin(1)
    torch.testing.assert_close(sim.server["centroids"][order], s, atol=1e-6, rtol=1e-5)
    sim = run(engine, clusters=1, rounds=2, fraction=0.6)
    mean = probabilities(sim, sim.sample(1)).mean(0, keepdim=True)
    torch.testing.assert_close(sim.server["centroids"], mean, atol=1e-6, rtol=1e-5)


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


def test_centroids_are_probabilities() -> None:
    centroids = run(clusters=3, rounds=3).server["centroids"]
    assert (centroids >= 0).all()
    torch.testing.assert_close(centroids.sum(-1), torch.ones(len(centroids), PUBLIC))


@pytest.mark.parametrize("own_init", [True, False])
def test_equal_predictions_are_one_centroid(own_init: bool) -> None:
    """Clients that start alike and have not learned anything yet; by default each starts somewhere else."""
    idle = replace(TRAIN, lr=1e-30, momentum=0.0, weight_decay=0.0)
    sim = run(clusters=3, rounds=3, own_init=own_init, train=idle)
    assert len(sim.server["centroids"]) == (3 if own_init else 1)
    starts = sim.states.starts((0, 1, NEWCOMER))
    assert all(torch.equal(t[0], t[2]) != own_init for n, t in starts.items() if "weight" in n)


@pytest.mark.parametrize("model_name", ["mlp", "batch_norm", "dropout"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_engines_agree(model_name: str, chunk: int | None) -> None:
    a, b = (run(engine, model_name, 4, fraction=0.6, chunk=chunk) for engine in ENGINES)
    assert_close(everything(a), everything(b))


@pytest.mark.parametrize("engine", ENGINES)
def test_reruns_are_bit_identical_and_idle_clients_untouched(engine: str) -> None:
    first, again = (run(engine, rounds=0, fraction=0.6, seed=4) for _ in range(2))
    for _ in range(4):
        idle = tuple(i for i in range(5) if i not in first.sample(first.round))
        before = dict(tree.leaves(first.states.get(idle)))
        first.step()
        assert_same(before, dict(tree.leaves(first.states.get(idle))))
        again.step()
    assert_same(everything(first), everything(again))


def test_a_newcomer_starts_with_a_model_of_its_own_and_learns_from_the_centroids() -> None:
    sim = run(rounds=3, public_batch=PUBLIC)
    ((_, at_once),) = sim.newcomer_models((NEWCOMER,), 0)
    assert_same(dict(at_once.items()), sim.states.starts((NEWCOMER,)))
    ((_, taught),) = sim.newcomer_models((NEWCOMER,), 2)
    sim.server["centroids"] = sim.server["centroids"][:0]
    ((_, alone),) = sim.newcomer_models((NEWCOMER,), 2)
    assert any(not torch.equal(t, alone.get(n)) for n, t in taught.items())


def test_tasks_without_classes_and_runs_without_a_public_set_are_refused() -> None:
    with pytest.raises(ConfigError, match="PerFed-CKT needs a public set"):
        run(data=replace(federation(), public=None))
    with pytest.raises(ConfigError, match="a task of binary does not have"):
        run(data=binary())
    with pytest.raises(ConfigError, match="clusters"):
        make_method("perfed_ckt", {"clusters": 0})


def binary() -> Federation:
    base, public = federation(), federation().public
    assert public is not None
    s = base.source
    return replace(
        base,
        source=Source("two classes", s.x, s.y % 2, "binary", 1),
        public=Source("public", public.x, public.y, "binary", 1),
    )


# -- several architectures ----------------------------------------------------------------------------------

ASSIGNED = ("small", "large", "cnn", "small", "cnn", "large")
"""The architecture of every client, the held-out one included."""


@cache
def architectures() -> dict[str, Model]:
    def mlp(hidden: int) -> Model:
        return Model(lambda: build("mlp", (1, 8, 8), CLASSES, hidden=(hidden,), activation="tanh"))

    return {"small": mlp(4), "large": mlp(9), "cnn": model("cnn2")}


def mixed(engine: str = "sequential", rounds: int = 0, **settings: Any) -> Simulation:
    sim = Simulation(
        PerFedCKT(clusters=2, lam=3.0, public_batch=4),
        federation(),
        architectures(),
        TRAIN,
        assignment=ASSIGNED,
        engine=make_engine(engine),
        **settings,
    )
    for _ in range(rounds):
        sim.step()
    return sim


def private(sim: Simulation) -> dict[str, Tensor]:
    """Everything a checkpoint holds, copied."""
    return {name: t.clone() for name, t in sim.dump()[0].items()}


@pytest.mark.parametrize("engine", ENGINES)
def test_architectures_may_differ_and_checkpoints_continue_exactly(engine: str) -> None:
    whole, first = mixed(engine, 4, fraction=0.6), mixed(engine, 2, fraction=0.6)
    second = mixed(engine, fraction=0.6)
    second.load(private(first), first.dump()[1])
    second.step()
    second.step()
    assert_same(private(whole), private(second))
    assert whole.traffic == second.traffic
    models = dict(whole.personal_models(range(6)))
    assert set(models) == {(0, 3), (1, 5), (2, 4)}
    assert all(torch.isfinite(t).all() for parts in models.values() for t in parts.values())


def test_engines_agree_on_several_architectures() -> None:
    assert_close(*(private(mixed(engine, 3, fraction=0.6)) for engine in ENGINES))


@pytest.mark.parametrize("engine", ENGINES)
def test_architectures_teach_each_other(engine: str) -> None:
    """Another start of the convolutional network's clients reaches the perceptrons, by predictions alone."""
    a, b = mixed(engine), mixed(engine)
    (cnn,) = (g for g in b.groups if g.name == "cnn")
    cnn.states.put((2, 4), cnn.states.get((2, 4)).apply(lambda t: 2 * t))
    for sim in (a, b):
        sim.step()
    small = {n: t for n, t in private(a).items() if "small" in n}
    assert_same(small, {n: t for n, t in private(b).items() if "small" in n})
    for sim in (a, b):
        sim.step()
    assert any(not torch.equal(t, private(b)[n]) for n, t in private(a).items() if "small/state" in n)


def test_messages_are_predictions_whatever_the_architecture() -> None:
    sim, m, matrix = mixed(fraction=0.6), 3, PUBLIC * CLASSES
    first = sim.step().traffic
    assert (first.up, first.down_unicast, first.down_multicast) == (m * matrix, 0, 0)
    for _ in range(2):
        cost = sim.step().traffic
        assert (cost.up, cost.down_unicast, cost.down_multicast) == (m * matrix, m * 2 * matrix, 2 * matrix)
        assert (cost.bytes_up, cost.bytes_down, cost.buffers_up) == (4 * cost.up, 4 * cost.down_unicast, 0)


# -- the printed costs --------------------------------------------------------------------------------------

PRINTED = {1: (4.4, 6.4), 2: (4.8, 6.8), 3: (5.2, 7.2), 4: (5.6, 7.6)}
"""By c: scalars of 200 rounds in units of 1e7 with 10 and 15 of 100 clients a round (multicast)."""


@cache
def hundred() -> Federation:
    """100 clients of two samples with three features, 2000 public samples, ten classes."""
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(200, 3)).astype(np.float32)), torch.arange(200) % 10
    p = torch.from_numpy(rng.normal(size=(2000, 3)).astype(np.float32))
    rows = tuple(np.array([2 * i, 2 * i + 1]) for i in range(100))
    return Federation(
        Source("ten classes", x, y, "classification", 10),
        rows,
        rows,
        rows,
        tuple(map(str, range(100))),
        100,
        public=Source("public", p, torch.zeros(2000, dtype=torch.int64), "classification", 10),
    )


@pytest.mark.parametrize("clusters", PRINTED)
@pytest.mark.parametrize(("column", "m"), [(0, 10), (1, 15)])
def test_counters_give_the_printed_costs(clusters: int, column: int, m: int) -> None:
    sim = Simulation(
        PerFedCKT(clusters=clusters),
        hundred(),
        Model(lambda: build("logistic", (3,), 10)),
        TrainConfig(steps=2, batch_size=2),
        engine=make_engine("vectorized"),
        fraction=m / 100,
        sampling="proportional",
    )
    sim.step()  # stands for the paper's first upload
    initial = replace(sim.traffic)
    assert (initial.up, initial.down_multicast) == (m * 20_000, 0)
    for _ in range(2):
        cost = sim.step().traffic
        assert cost.up + cost.down_multicast == (m + clusters) * 20_000
        assert cost.up == m * 20_000
        assert 200 * (cost.up + cost.down_multicast) / 1e7 == pytest.approx(PRINTED[clusters][column])


@pytest.mark.parametrize("engine", ENGINES)
def test_the_papers_order_uploads_before_it_trains_and_distils_in_all_training(engine: str) -> None:
    """Against a loop: centroids of initial predictions, then one step of F + λ‖s − s̄‖²/|P| towards the nearest."""
    sim = run(engine, rounds=1, first_round="upload", train=EVERYTHING, public_batch=PUBLIC)
    ids = range(sim.federation.num_clients)
    start = [tree.tensors(sim.states.get((i,))[0]) for i in ids]
    s = probabilities(sim, ids)
    centroids = tree.tensors(sim.server)["centroids"]
    assert len(centroids) == 2
    torch.testing.assert_close(
        centroids, cluster(s.flatten(1), uniform(len(ids)), 2, 0)[1].reshape_as(centroids)
    )
    sim.step()
    public = sim.federation.public
    assert public is not None
    for i in ids:
        rows = torch.from_numpy(sim.federation.train[i])
        w = {n: t.clone().requires_grad_() for n, t in start[i].items()}
        x, y = sim.federation.source.x[rows], sim.federation.source.y[rows]
        pull = (sim.model(w, public.x).softmax(-1) - nearest(centroids, s[i])).square().sum() / PUBLIC
        loss = F.cross_entropy(sim.model(w, x), y) + 3.0 * pull
        grads = torch.autograd.grad(loss, list(w.values()))
        expected = {n: p - EVERYTHING.lr * g for (n, p), g in zip(w.items(), grads, strict=True)}
        assert_close(tree.tensors(sim.states.get((i,))[0]), {n: t.detach() for n, t in expected.items()})


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
