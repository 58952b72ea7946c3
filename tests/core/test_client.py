"""The client handle: losses, gradients, sizes, names of parts, and errors that say whose they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tailorfl.errors import ClientError, TailorflError
from tailorfl.models.split import Split
from tailorfl.training.cohort import Cohort
from tailorfl.training.plan import Length, make_plan
from training.cohorts import (
    ENGINES,
    SIZES,
    alone,
    batches,
    cohort_of,
    fit,
    model_of,
    regression,
    run,
    source,
    spread,
)

engines = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())


def setting(**options: object) -> tuple[Cohort, TensorDict]:
    data = source(sum(SIZES))
    model = model_of("mlp", data, hidden=(8,))
    return cohort_of(model, data, **options), model.init(1)


def test_a_cohort_of_some_positions_keeps_each_clients_things_together():
    cohort, _ = setting(ids=(5, 9, 2, 7))
    part = cohort.part([2, 0])
    assert part.ids == (2, 5)
    assert part.sizes.tolist() == [12, 7]
    assert all(np.array_equal(a, cohort.members[p]) for a, p in zip(part.members, (2, 0), strict=True))
    np.testing.assert_array_equal(part.keys([0, 1], "train"), cohort.keys([2, 0], "train"))


def test_plans_follow_the_id_and_not_the_position_of_a_client():
    cohort, _ = setting(ids=(5, 9, 2, 7))
    whole = cohort.plan((0, 1, 2, 3), "train", 4, 2, None, 0)
    part = cohort.part([2]).plan((0,), "train", 4, 2, None, 0)
    steps = int(part.steps[0])
    np.testing.assert_array_equal(part.count[0], whole.count[2][:steps])
    for mine, same, count in zip(part.rows[0], whole.rows[2], part.count[0], strict=False):
        np.testing.assert_array_equal(mine[:count], same[:count])


def test_rounds_and_seeds_change_the_batches():
    seen = set()
    for seed in (0, 1):
        for round in (0, 1):
            cohort, _ = setting(seed=seed, round=round)
            seen.add(tuple(cohort.plan((2,), "train", 4, 1, None, 0).rows.flatten().tolist()))
    assert len(seen) == 4


@engines
@pytest.mark.parametrize("limit", [None, 0, 2])
def test_samples_and_steps_are_what_a_fit_uses(engine, limit):
    cohort, _ = setting(limit=limit, epochs=2, batch_size=4)
    cases = {
        "default": {},
        "epochs": {"epochs": 3},
        "steps": {"steps": 5},
        "full": {"batch_size": 0},
        "two": {"batch_size": 2},
    }

    def local(client, *_):
        out = {name: client.steps(Length(**asked)) for name, asked in cases.items()}
        return TensorDict({"samples": client.samples, **out}, batch_size=[])

    found = run(engine, cohort, local)
    assert found["samples"].tolist() == list(SIZES)
    for name, asked in cases.items():
        epochs = None if "steps" in asked else asked.get("epochs", 2)
        length = {"epochs": epochs, "steps": asked.get("steps"), "limit": limit}
        keys = cohort.keys(range(len(SIZES)), "train")
        plan = make_plan(cohort.members, keys, asked.get("batch_size", 4), **length)
        assert found[name].tolist() == plan.steps.tolist(), name


@engines
@pytest.mark.parametrize("part", ["train", "val"])
def test_loss_is_the_mean_over_a_clients_own_rows(engine, part):
    val = [np.arange(n, dtype=np.int64) for n in (4, 9, 0, 1)]
    cohort, start = setting(val=val)
    starts = spread(start, len(SIZES))

    def local(client, state, received):
        return TensorDict(
            {"own": client.loss(state, part), "shared": client.loss(received, part)}, batch_size=[]
        )

    found = run(engine, cohort, local, starts, start)
    for i, rows in enumerate(val if part == "val" else cohort.members):
        x, y = cohort.source.x[rows], cohort.source.y[rows]
        for name, state in (("own", starts[i]), ("shared", start)):
            expected = float(cohort.loss(cohort.model(state, x), y, None)) if len(rows) else 0.0
            assert float(found[name][i]) == pytest.approx(expected, rel=1e-5)


@engines
def test_gradient_is_autograds_on_the_first_training_batch(engine):
    cohort, start = setting(momentum=0.9, weight_decay=0.1, lr=0.3)
    starts = spread(start, len(SIZES))
    found = run(engine, cohort, lambda c, state, _: c.gradient(state), starts)
    assert set(found.keys()) == set(cohort.model.parameters)
    for i in range(len(SIZES)):
        x, y = batches(cohort, i)[0]
        leaves = {n: starts[n][i].clone().requires_grad_() for n in cohort.model.parameters}
        cohort.loss(cohort.model(leaves, x), y, None).backward()
        for n, p in leaves.items():
            torch.testing.assert_close(found[n][i], p.grad, rtol=1e-4, atol=1e-6)


def test_gradient_leaves_the_metrics_of_training_alone():
    cohort, start = setting()
    client = alone(cohort)
    client.fit(start)
    kept = dict(client.metrics)
    client.gradient(start)
    assert client.metrics == kept


def test_frozen_parts_are_neither_trained_nor_in_the_gradient():
    data = source(sum(SIZES))
    model = model_of("mlp", data, hidden=(8,))
    frozen = ("fc1.weight", "fc1.bias")
    split = Split.of(model.module, personal="none", frozen=lambda name, *_: name in frozen)
    cohort = cohort_of(model, data, split=split)
    start = model.init(0)
    client = alone(cohort)
    assert set(client.parameters(start).keys()) == {"head.weight", "head.bias"}
    assert set(client.gradient(start).keys()) == {"head.weight", "head.bias"}
    found = client.fit(start)
    assert all(torch.equal(found[n], start[n]) == (n in frozen) for n in start.keys())  # noqa: SIM118


def test_parts_of_the_model_are_named_by_the_split():
    cohort, _ = setting()
    client = alone(cohort)
    assert client.select("head") == ("head.weight", "head.bias")
    assert set(client.select("head")).isdisjoint(client.select("extractor"))


def test_an_error_names_the_client_its_round_and_the_stage():
    data = source(sum(SIZES), classes=3)
    model = model_of("mlp", data, hidden=(8,))
    bad = TensorDict({**dict(model.init(0).items()), "head.weight": torch.zeros(3, 99)}, batch_size=[])
    cohort = cohort_of(model, data, ids=(40, 41, 42, 43), round=6)
    with pytest.raises(ClientError, match=r"client 42, round 7, stage 'train': RuntimeError"):
        alone(cohort, 2).fit(bad)
    with pytest.raises(ClientError, match=r"client 42, round 7, stage 'loss on train'"):
        alone(cohort, 2).loss(bad)
    with pytest.raises(ClientError, match=r"clients (\d+, )*42.*, round 7, stage 'finetune'") as found:
        fit(ENGINES["vectorized"], cohort, bad, purpose="finetune")
    assert all(str(i) in str(found.value) for i in cohort.ids)
    assert isinstance(found.value.__cause__, RuntimeError)


def test_a_client_operation_maps_over_clients_only():
    cohort, start = setting()
    client, stacked = alone(cohort), spread(start, 3)
    with pytest.raises(TailorflError, match="loop over it"):
        torch.func.vmap(lambda t: client.fit(TensorDict(t, batch_size=[]))["head.bias"])(
            dict(stacked.items())
        )


@engines
def test_training_is_the_same_with_and_without_recording_of_gradients(engine):
    cohort, start = setting()
    recorded = fit(engine, cohort, start)
    with torch.no_grad():
        silent = fit(engine, cohort, start)
    assert all(torch.equal(t, silent[n]) and not t.requires_grad for n, t in recorded.items())


@engines
def test_training_neither_uses_nor_moves_the_global_random_state(engine):
    cohort, start = setting()
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    first = fit(engine, cohort, start)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert np.random.get_state()[1].tolist() == numpy_before  # noqa: NPY002
    torch.manual_seed(4)
    assert all(torch.equal(t, first[n]) for n, t in fit(engine, cohort, start).items())


@engines
def test_a_diverging_client_spoils_only_itself(engine):
    """Infinite features of one client make its own model not finite, and nobody else's."""
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    x[:4] = torch.inf
    data = regression(x, torch.zeros(12))
    rows = np.split(np.arange(12, dtype=np.int64), 3)
    cohort = cohort_of(model_of("linear", data), data, members=rows)
    found = fit(engine, cohort, cohort.model.init(0))["head.weight"]
    assert torch.isfinite(found).flatten(1).all(1).tolist() == [False, True, True]


def test_a_proximal_centre_must_have_what_is_trained():
    cohort, start = setting()
    with pytest.raises(TailorflError, match=r"centre of prox lacks head\.weight, which is trained"):
        alone(cohort).fit(start, prox=(1.0, start.exclude("head.weight")))
