"""The term that pulls predictions on public data to targets: its gradient, its batches, what it leaves alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tailorfl.errors import TailorflError
from tailorfl.methods.perfed_ckt import towards
from tailorfl.training import cohort as cohort_module
from tailorfl.training.cohort import Cohort
from tailorfl.training.gradients import public_rows
from tailorfl.training.keys import derive
from tailorfl.training.plan import Length
from tailorfl.training.sample_privacy import SampleDP
from training.cohorts import (
    SIZES,
    alone,
    assert_states,
    batches,
    cohort_of,
    engines,
    fit,
    grouped,
    model_of,
    run,
    source,
    spread,
)

CLIENTS, PUBLIC, LAM = len(SIZES), 11, 3.0
CLOSE = {"rtol": 1e-4, "atol": 2e-6}


def setting(norm: str = "none", dropout: float = 0.0, **options: object) -> tuple[Cohort, TensorDict]:
    data = source(sum(SIZES))
    model = model_of("mlp", data, hidden=(8,), norm=norm, dropout=dropout)
    return cohort_of(model, data, public=source(PUBLIC, seed=7), **options), model.init(1)


def targets_of(clients: int = CLIENTS, seed: int = 3) -> Tensor:
    """Probabilities for every client and public sample, [clients, P, 3]."""
    return (2 * torch.randn(clients, PUBLIC, 3, generator=torch.Generator().manual_seed(seed))).softmax(-1)


def pulled(
    engine: object,
    cohort: Cohort,
    start: TensorDict,
    targets: Tensor,
    lam: float = LAM,
    batch: int = 4,
    **options: object,
) -> TensorDict:
    """Every client's model after a fit with targets of its own."""

    def local(client, state, received):
        return client.fit(received, term=towards(lam, state["targets"], batch), **grouped(**options))

    states = TensorDict({"targets": targets}, batch_size=[len(cohort.ids)])
    return run(engine, cohort, local, states, start)


def rows_of(cohort: Cohort, position: int, batch: int, steps: int, first: int = 0) -> Tensor:
    """The public rows of a client's steps, [steps, batch]."""
    return public_rows(cohort.keys((position,), "train/public"), PUBLIC, batch, steps, first)[0]


def term(cohort: Cohort, state: dict[str, Tensor], rows: Tensor, targets: Tensor, lam: float = LAM) -> Tensor:
    """λ · (1/b') Σ_x ‖softmax(f(x)) − target(x)‖², written out."""
    assert cohort.public is not None
    s = torch.softmax(cohort.model(state, cohort.public.x[rows]), dim=1)
    return lam / len(rows) * sum(((s[b] - targets[row]) ** 2).sum() for b, row in enumerate(rows))


def gradient(cohort: Cohort, state: TensorDict, rows: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The gradient of the term by ordinary autograd."""
    leaves = {n: state[n].detach().clone().requires_grad_() for n in cohort.model.parameters}
    term(cohort, {**dict(state.items()), **leaves}, rows, targets).backward()
    return {n: p.grad for n, p in leaves.items()}


@engines
@pytest.mark.parametrize("batch", [1, 4, PUBLIC, 50])
@pytest.mark.parametrize("how", ["plain", "direction"])
def test_training_is_sgd_on_the_loss_with_the_term(engine, batch, how):
    """Three steps of unequal clients, with everything else that a step may have."""
    cohort, start = setting(momentum=0.6, weight_decay=0.02, clip=0.4)
    targets = targets_of()
    options = {"direction": lambda w, g: g(w)} if how == "direction" else {}
    found = pulled(engine, cohort, start, targets, batch=batch, epochs=2, prox=(0.3, start), **options)
    for i in range(CLIENTS):
        steps = batches(cohort, i, epochs=2)
        rows = rows_of(cohort, i, batch, len(steps))
        leaves = {n: start[n].clone().requires_grad_() for n in cohort.model.parameters}
        optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.6, weight_decay=0.02)
        for (x, y), public in zip(steps, rows, strict=True):
            optimizer.zero_grad()
            loss = cohort.loss(cohort.model(leaves, x), y, None) + term(cohort, leaves, public, targets[i])
            loss = loss + 0.15 * sum((p - start[n]).square().sum() for n, p in leaves.items())
            loss.backward()
            nn.utils.clip_grad_norm_(leaves.values(), 0.4)
            optimizer.step()
        assert_states(found[i], {n: p.detach() for n, p in leaves.items()}, **CLOSE)


@engines
@pytest.mark.parametrize("dp", [None, SampleDP(0.1, 1.0, "shuffle")], ids=["not private", "private"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_term_is_added_exact_beside_dropout_clipping_and_noise(engine, dp, dropout):
    """A first step with and without it differ by its own gradient: without masks, not clipped by sample, no noise."""
    cohort, start = setting(dropout=dropout, dp=dp)
    targets = targets_of()
    found, plain = pulled(engine, cohort, start, targets, steps=1), fit(engine, cohort, start, steps=1)
    for i in range(CLIENTS):
        g = gradient(cohort, start, rows_of(cohort, i, 4, 1)[0], targets[i])
        assert max(t.abs().max() for t in g.values()) > 0.05
        for n, expected in g.items():
            torch.testing.assert_close(plain[n][i] - found[n][i], 0.1 * expected, rtol=1e-3, atol=1e-6)


@engines
def test_running_statistics_are_used_and_see_no_public_data(engine):
    """Evaluation mode, with the statistics as the private batch of the step has left them."""
    cohort, start = setting("batch", lr=0.02)
    targets = targets_of()
    found, plain = pulled(engine, cohort, start, targets, steps=1), fit(engine, cohort, start, steps=1)
    for n in cohort.model.buffers:
        assert torch.equal(found[n], plain[n])
    for i in range(CLIENTS):
        at = TensorDict({n: plain[n][i] if n in cohort.model.buffers else t for n, t in start.items()})
        g = gradient(cohort, at, rows_of(cohort, i, 4, 1)[0], targets[i])
        for n, expected in g.items():
            torch.testing.assert_close(plain[n][i] - found[n][i], 0.02 * expected, rtol=1e-3, atol=1e-6)


@engines
def test_a_fit_by_pieces_has_the_public_batches_of_the_whole(engine):
    cohort, start = setting()
    targets = targets_of()
    whole = pulled(engine, cohort, start, targets, steps=5)

    def by_pieces(client, state, received):
        pull = towards(LAM, state["targets"], 4)
        half = client.fit(received, term=pull, length=Length(steps=2))
        return client.fit(half, term=pull, length=Length(steps=3, first=2))

    found = run(engine, cohort, by_pieces, TensorDict({"targets": targets}, batch_size=[CLIENTS]), start)
    assert_states(found, dict(whole.items()))


@engines
@pytest.mark.parametrize("count", [1, 2])
def test_a_step_has_one_public_batch_also_where_it_repeats_or_has_several_private_ones(engine, count):
    cohort, start = setting()
    targets = targets_of()
    still = {"direction": lambda w, g: w * 0.0, "batches": count}
    found = pulled(engine, cohort, start, targets, steps=2, repeat=2, first=count, **still)
    for i in range(CLIENTS):
        at = start.clone()
        for rows in rows_of(cohort, i, 4, 2, first=1):
            for _ in range(2):
                g = gradient(cohort, at, rows, targets[i])
                at = TensorDict({n: t - 0.1 * g[n] for n, t in at.items()})
        assert_states(found[i], dict(at.items()))


@engines
def test_the_reported_loss_is_that_of_private_data(engine):
    cohort, start = setting()

    def local(client, state, received):
        client.fit(received, term=towards(LAM, state["targets"], 4), length=Length(steps=1))
        return TensorDict({"loss": client.metrics["train"]}, batch_size=[])

    found = run(engine, cohort, local, TensorDict({"targets": targets_of()}, batch_size=[CLIENTS]), start)[
        "loss"
    ]
    for i in range(CLIENTS):
        x, y = batches(cohort, i)[0]
        assert float(found[i]) == pytest.approx(float(cohort.loss(cohort.model(start, x), y, None)), rel=1e-5)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 7, 10])
def test_public_batches_are_full_and_passes_have_no_sample_twice(batch):
    keys, per_pass = derive(0, np.arange(5, dtype=np.uint64)), PUBLIC // batch
    rows = public_rows(keys, PUBLIC, batch, 3 * per_pass)
    assert rows.shape == (5, 3 * per_pass, batch)
    for client in rows:
        passes = client.reshape(3, -1)
        assert all(len(set(p.tolist())) == per_pass * batch for p in passes)
    assert torch.equal(
        public_rows(keys, PUBLIC, batch, 2, first=2), public_rows(keys, PUBLIC, batch, 4)[:, 2:]
    )


def test_a_batch_of_everything_needs_no_order():
    keys = derive(0, np.arange(2, dtype=np.uint64))
    for batch in (PUBLIC, 100):
        assert torch.equal(public_rows(keys, PUBLIC, batch, 3), torch.arange(PUBLIC).expand(2, 3, PUBLIC))


@engines
@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize("rows", [3, 10**6])
def test_predictions_are_the_models_outputs_in_evaluation_mode(engine, norm, rows, monkeypatch):
    """Of each client's model, of one that all share, and of one with a layer of its own, in slices of any length."""
    cohort, start = setting(norm, dropout=0.5)
    last = cohort.model.parameters[-1]
    assert cohort.public is not None
    monkeypatch.setattr(cohort_module, "INPUT_BYTES", 4 * 5 * rows)
    starts = spread(start, CLIENTS, scale=0.5)

    def local(client, state, received):
        own, shared = client.predict_public(state), client.predict_public(received)
        mixed = client.predict_public(TensorDict({**received, last: state[last]}, batch_size=[]))
        return TensorDict({"own": own, "shared": shared, "mixed": mixed}, batch_size=[])

    found = run(engine, cohort, local, starts, start)
    module = cohort.model._factory()
    for i in range(CLIENTS):
        mixed = {**start, last: starts[i][last]}
        for name, state in (("own", starts[i]), ("shared", start), ("mixed", mixed)):
            module.load_state_dict(dict(state.items()))
            expected = module.eval()(cohort.public.x).detach()
            torch.testing.assert_close(found[name][i], expected, rtol=1e-4, atol=1e-5)


def test_without_a_public_set_it_says_so():
    cohort, start = setting()
    client = alone(replace(cohort, public=None))
    with pytest.raises(TailorflError, match="needs a public set"):
        client.fit(start, term=towards(LAM, targets_of()[0], 4))
    with pytest.raises(TailorflError, match="needs a public set"):
        client.predict_public(start)


@engines
def test_targets_of_another_shape_are_refused(engine):
    cohort, start = setting()
    with pytest.raises(TailorflError, match="index"):
        pulled(engine, cohort, start, targets_of()[:, :2])
    with pytest.raises(TailorflError, match="have 1 classes, but the model has 3 outputs"):
        pulled(engine, cohort, start, targets_of()[..., :1])
