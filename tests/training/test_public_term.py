"""The term that pulls predictions on public data to targets: its gradient, its batches, what it leaves alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tailorfl.core.client import Client
from tailorfl.errors import TailorflError
from tailorfl.methods.perfed_ckt import towards
from tailorfl.training import cohort as cohort_module
from tailorfl.training.cohort import Cohort
from tailorfl.training.gradients import public_rows
from tailorfl.training.keys import derive
from tailorfl.training.plan import Length
from tailorfl.training.sample_privacy import SampleDP
from tailorfl.training.terms import Term
from training.cohorts import (
    ENGINES,
    SIZES,
    alone,
    assert_states,
    batches,
    cohort_of,
    fit,
    grouped,
    model_of,
    run,
    source,
    spread,
)

engines = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
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
def test_targets_may_be_the_same_for_all(engine):
    cohort, start = setting()
    targets = targets_of(1)[0]

    def local(client, _, received):
        return client.fit(received["w"], term=towards(LAM, received["targets"], 4))

    both = TensorDict({"w": start, "targets": targets}, batch_size=[])
    found = run(engine, cohort, local, received=both)
    own = pulled(engine, cohort, start, targets.expand(CLIENTS, -1, -1))
    for n in start.keys():  # noqa: SIM118
        torch.testing.assert_close(found[n], own[n])


@engines
@pytest.mark.parametrize("options", [{}, {"momentum": 0.5, "repeat": 2}, {"prox": True}], ids=str)
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_strength_zero_is_bit_for_bit_no_term(engine, norm, options):
    cohort, start = setting(norm, lr=0.02)
    options = {**options, **({"prox": (0.3, start)} if "prox" in options else {})}
    found, plain = (
        pulled(engine, cohort, start, targets_of(), 0.0, **options),
        fit(engine, cohort, start, **options),
    )
    assert all(torch.equal(t, plain[n]) for n, t in found.items())


@engines
def test_nothing_pulls_where_the_predictions_are_the_targets(engine):
    cohort, start = setting()
    assert cohort.public is not None
    reached = cohort.model(start, cohort.public.x).softmax(-1).expand(CLIENTS, -1, -1)
    found = pulled(engine, cohort, start, reached, 1e3, batch=PUBLIC, steps=1)
    plain = fit(engine, cohort, start, steps=1)
    for n in start.keys():  # noqa: SIM118
        torch.testing.assert_close(found[n], plain[n], rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_engines_agree(norm):
    cohort, start = setting(norm, dropout=0.3, lr=0.02)
    targets = targets_of()
    reference = pulled(ENGINES["sequential"], cohort, start, targets, epochs=3)
    for engine in ENGINES.values():
        found = pulled(engine, cohort, start, targets, epochs=3)
        for n in start.keys():  # noqa: SIM118
            torch.testing.assert_close(found[n], reference[n], rtol=2e-3, atol=2e-4)


@engines
def test_training_does_not_depend_on_who_trains_along(engine):
    cohort, start = setting()
    targets, chosen = targets_of(), [3, 0]
    together = pulled(engine, cohort, start, targets)
    fewer = pulled(engine, cohort.part(chosen), start, targets[chosen])
    for n in start.keys():  # noqa: SIM118
        torch.testing.assert_close(fewer[n], together[n][chosen])


def test_clients_need_not_come_in_the_order_of_their_steps():
    """Mapped as they are; the engines sort clients by their data first."""
    cohort, start = setting()
    targets = targets_of()

    def one(position: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return dict(Client(cohort, position).fit(start, term=towards(LAM, targets, 4)).items())

    found = torch.func.vmap(one)(torch.arange(CLIENTS), targets)
    expected = pulled(ENGINES["sequential"], cohort, start, targets)
    for n in start.keys():  # noqa: SIM118
        torch.testing.assert_close(found[n], expected[n], rtol=1e-4, atol=1e-6)


@engines
def test_every_client_has_a_start_of_its_own(engine):
    cohort, start = setting()
    starts, targets = spread(start, CLIENTS), targets_of()

    def local(client, state, _):
        return client.fit(state["w"], term=towards(LAM, state["targets"], PUBLIC), length=Length(steps=1))

    states = TensorDict({"w": starts, "targets": targets}, batch_size=[CLIENTS])
    found = run(engine, cohort, local, states)
    plain = run(engine, cohort, lambda c, state, _: c.fit(state["w"], length=Length(steps=1)), states)
    for i in range(CLIENTS):
        g = gradient(cohort, starts[i], torch.arange(PUBLIC), targets[i])
        for n, expected in g.items():
            torch.testing.assert_close(plain[n][i] - found[n][i], 0.1 * expected, rtol=1e-3, atol=1e-6)


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
    for n in start.keys():  # noqa: SIM118
        torch.testing.assert_close(found[n], whole[n])


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
def test_only_what_is_trained_is_pulled(engine):
    cohort, start = setting()
    targets, head = targets_of(), ("head.weight", "head.bias")
    found = pulled(engine, cohort, start, targets, train=head, steps=1)
    plain = fit(engine, cohort, start, train=head, steps=1)
    for i in range(CLIENTS):
        g = gradient(cohort, start, rows_of(cohort, i, 4, 1)[0], targets[i])
        for n in start.keys():  # noqa: SIM118
            expected = 0.1 * g[n] if n in head else torch.zeros_like(g[n])
            torch.testing.assert_close(plain[n][i] - found[n][i], expected, rtol=1e-3, atol=1e-6)


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


def test_public_batches_are_uniform():
    """Every sample is as often in a batch as every other, also those that a pass leaves out."""
    rows = public_rows(derive(0, np.arange(400, dtype=np.uint64)), PUBLIC, 4, 10)
    share = torch.bincount(rows.flatten(), minlength=PUBLIC) / rows.numel()
    torch.testing.assert_close(share, torch.full((PUBLIC,), 1 / PUBLIC), rtol=0.05, atol=0)
    last = torch.bincount(rows[:, 1].flatten(), minlength=PUBLIC) / rows[:, 1].numel()
    torch.testing.assert_close(last, torch.full((PUBLIC,), 1 / PUBLIC), rtol=0.2, atol=0)


def test_a_batch_of_everything_needs_no_order():
    keys = derive(0, np.arange(2, dtype=np.uint64))
    for batch in (PUBLIC, 100):
        assert torch.equal(public_rows(keys, PUBLIC, batch, 3), torch.arange(PUBLIC).expand(2, 3, PUBLIC))


def test_clients_rounds_and_seeds_have_public_batches_of_their_own():
    seen = set()
    for seed in (0, 1):
        for round in (0, 1):
            cohort, _ = setting(seed=seed, round=round)
            seen |= {tuple(rows_of(cohort, i, 5, 2).flatten().tolist()) for i in range(CLIENTS)}
    assert len(seen) == 4 * CLIENTS


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


@pytest.mark.parametrize("wrong", [{"public": 0}, {"public": 4, "replaces": True}], ids=str)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(TailorflError, match="at least one of them"):
        Term(lambda seen: seen.loss, **wrong)


def test_one_model_at_a_time():
    cohort, start = setting()
    with pytest.raises(TailorflError, match="one model at a time"):
        alone(cohort).fit(
            {"a": start, "b": start}, direction=lambda w, g: w, term=towards(LAM, targets_of()[0], 4)
        )
