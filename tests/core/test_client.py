"""The client handle: losses, gradients, sizes, names of parts, and errors that say whose they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tailorfl.errors import ClientError, TailorflError
from tailorfl.models.split import Split
from tailorfl.training.plan import Length
from training.cohorts import (
    ENGINES,
    SIZES,
    alone,
    assert_states,
    autograd,
    batches,
    cohort_of,
    engines,
    fit,
    model_of,
    run,
    setting,
    source,
    spread,
)


def test_clients_keep_their_rows_and_batches_whoever_else_is_there():
    """What is drawn for a client follows its id, not its place in the cohort."""
    cohort, _ = setting(ids=(5, 9, 2, 7))
    part = cohort.part([2, 0])
    assert part.ids == (2, 5)
    assert part.sizes.tolist() == [12, 7]
    assert all(np.array_equal(a, cohort.members[p]) for a, p in zip(part.members, (2, 0), strict=True))
    np.testing.assert_array_equal(part.keys([0, 1], "train"), cohort.keys([2, 0], "train"))
    for (x, y), (same_x, same_y) in zip(batches(part, 0), batches(cohort, 2), strict=True):
        assert torch.equal(x, same_x)
        assert torch.equal(y, same_y)


def test_rounds_and_seeds_change_the_batches():
    cohorts = [setting(seed=seed, round=round)[0] for seed in (0, 1) for round in (0, 1)]
    first = [batches(cohort, 2)[0][0] for cohort in cohorts]
    assert len({tuple(x.flatten().tolist()) for x in first}) == 4


@engines
@pytest.mark.parametrize("limit", [None, 0, 2])
def test_samples_and_steps_are_what_a_fit_uses(engine, limit):
    cohort, _ = setting(limit=limit, epochs=2)
    # 7, 3, 12 and 5 samples
    cases = [
        ({}, [4, 2, 6, 4]),
        ({"epochs": 3}, [6, 3, 9, 6]),
        ({"steps": 5}, [5, 5, 5, 5]),
        ({"batch_size": 0}, [2, 2, 2, 2]),
        ({"batch_size": 2}, [8, 4, 12, 6]),
    ]

    def local(client, *_):
        steps = torch.stack([torch.as_tensor(client.steps(Length(**length))) for length, _ in cases])
        return TensorDict({"samples": client.samples, "steps": steps}, batch_size=[])

    counted = run(engine, cohort, local)
    assert counted["samples"].tolist() == list(SIZES)
    for k, (_, expected) in enumerate(cases):
        assert counted["steps"][:, k].tolist() == [n if limit is None else min(n, limit) for n in expected]


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
    actual = run(engine, cohort, lambda c, state, _: c.gradient(state), starts)
    for i in range(len(SIZES)):
        expected = autograd(cohort, starts[i], *batches(cohort, i)[0])
        assert_states(actual[i], expected, rtol=1e-4, atol=1e-6)


def test_gradient_leaves_the_metrics_of_training_alone():
    cohort, start = setting()
    client = alone(cohort)
    client.fit(start)
    before = dict(client.metrics)
    client.gradient(start)
    assert client.metrics == before


def test_frozen_parts_are_neither_trained_nor_in_the_gradient_and_others_are_named():
    data = source(sum(SIZES))
    model = model_of("mlp", data, hidden=(8,))
    frozen = ("fc1.weight", "fc1.bias")
    split = Split.of(model.module, personal="none", frozen=lambda name, *_: name in frozen)
    cohort = cohort_of(model, data, split=split)
    start = model.init(0)
    client = alone(cohort)
    assert set(client.parameters(start).keys()) == {"head.weight", "head.bias"}
    assert set(client.gradient(start).keys()) == {"head.weight", "head.bias"}
    trained = client.fit(start)
    assert all(torch.equal(trained[n], t) == (n in frozen) for n, t in start.items())
    assert client.select("head") == ("head.weight", "head.bias")
    assert set(client.select("head")).isdisjoint(client.select("extractor"))


def test_an_error_names_the_client_its_round_and_the_stage():
    cohort, bad = setting(ids=(40, 41, 42, 43), round=6)
    bad["head.weight"] = torch.zeros(3, 99)
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
    client, models = alone(cohort), dict(spread(start, 3).items())
    with pytest.raises(TailorflError, match="loop over it"):
        torch.func.vmap(lambda t: client.fit(TensorDict(t, batch_size=[]))["head.bias"])(models)


@engines
def test_training_depends_on_no_global_state_and_leaves_it_alone(engine):
    """Neither the random numbers of torch and numpy nor whether gradients are recorded."""
    cohort, start = setting()
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    first = fit(engine, cohort, start)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert np.random.get_state()[1].tolist() == numpy_before  # noqa: NPY002
    torch.manual_seed(4)
    with torch.no_grad():
        silent = fit(engine, cohort, start)
    assert all(torch.equal(t, silent[n]) and not t.requires_grad for n, t in first.items())


@engines
def test_a_diverging_client_spoils_only_itself(engine):
    """Infinite features of one client make its own model not finite, and nobody else's."""
    cohort, start = setting()
    cohort.source.x[torch.from_numpy(cohort.members[1])] = torch.inf
    weights = fit(engine, cohort, start)["head.weight"]
    assert torch.isfinite(weights).flatten(1).all(1).tolist() == [True, False, True, True]


def test_a_proximal_centre_must_have_what_is_trained():
    cohort, start = setting()
    with pytest.raises(TailorflError, match=r"centre of prox lacks head\.weight, which is trained"):
        alone(cohort).fit(start, prox=(1.0, start.exclude("head.weight")))
