"""Terms of a method's own, on private and on public samples: gradients against plain torch, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn import functional as F

from tailorfl.errors import ModelError, TailorflError
from tailorfl.methods.perfed_ckt import towards
from tailorfl.training import cohort as cohort_module
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort
from tailorfl.training.gradients import public_rows
from tailorfl.training.keys import derive
from tailorfl.training.objective import Seen, Term
from tailorfl.training.plan import Length
from tailorfl.training.sample_privacy import SampleDP
from training import cohorts
from training.cohorts import (
    SIZES,
    alone,
    assert_states,
    batches,
    cohort_of,
    engines,
    fit,
    grouped,
    in_turn,
    model_of,
    per_client,
    run,
    source,
    spread,
)

CLIENTS = len(SIZES)
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def setting(**options: Any) -> tuple[Cohort, TensorDict]:
    data = source(sum(SIZES))
    model = model_of("mlp", data, hidden=(6,), activation="tanh")
    return cohort_of(model, data, **options), model.init(1)


MEANS = torch.randn(CLIENTS, 3, 6, generator=torch.Generator().manual_seed(2))
"""Prototypes of three classes a client."""


def prototypes(seen: Seen, means: Tensor) -> Tensor:
    return 0.7 * seen.mean((seen.features - means[seen.y]).square().mean(1))


def plain_features(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["fc1.weight"].T + p["fc1.bias"])


def plain_outputs(p: Any, z: Tensor) -> Tensor:
    return z @ p["head.weight"].T + p["head.bias"]


def sgd(cohort: Cohort, i: int, p: dict[str, Tensor], loss: Any, **request: Any) -> dict[str, Tensor]:
    """State after plain steps on `loss(parameters, x, y)`."""
    for x, y in batches(cohort, i, **request):
        leaves = {n: t.detach().requires_grad_() for n, t in p.items()}
        grads = torch.autograd.grad(loss(leaves, x, y), list(leaves.values()), allow_unused=True)
        p = {n: t - 0.1 * (0.0 if g is None else g) for (n, t), g in zip(p.items(), grads, strict=True)}
    return {n: t.detach() for n, t in p.items()}


@engines
@pytest.mark.parametrize(
    ("directed", "replaces"), [(False, False), (False, True), (True, False), (True, True)]
)
def test_training_is_sgd_on_the_loss_with_the_term_or_on_the_term(engine, directed, replaces):
    cohort, start = setting()
    extra = {"direction": lambda state, grad: grad(state)} if directed else {}

    def local(client, state, received):
        term = Term(prototypes, given=(state["means"],), replaces=replaces)
        return client.fit(received, term=term, length=Length(epochs=2), **extra)

    actual = run(engine, cohort, local, per_client(means=MEANS), start)
    for i in range(CLIENTS):

        def loss(p, x, y, i=i):
            z = plain_features(p, x)
            pull = 0.7 * (z - MEANS[i][y]).square().mean(1).mean()
            return pull if replaces else F.cross_entropy(plain_outputs(p, z), y) + pull

        expected = sgd(cohort, i, tree.tensors(start), loss, epochs=2)
        assert_states(actual[i], expected, **CLOSE)
        assert max(float((t - start[n]).abs().max()) for n, t in expected.items()) > 0.01


@engines
def test_several_terms_add_up_and_take_what_they_are_given(engine):
    cohort, start = setting()
    nested = TensorDict({"a": {"b": torch.tensor(0.3)}})
    both = [
        Term(prototypes, given=(MEANS[0],)),
        Term(lambda seen, t: seen.mean(seen.outputs[:, 0]) * t["a"]["b"], given=(nested,)),
    ]
    actual = fit(engine, cohort, start, term=both)
    for i in range(CLIENTS):

        def loss(p, x, y):
            z = plain_features(p, x)
            outputs, pull = plain_outputs(p, z), (z - MEANS[0][y]).square().mean(1).mean()
            return F.cross_entropy(outputs, y) + 0.7 * pull + 0.3 * outputs[:, 0].mean()

        assert_states(actual[i], sgd(cohort, i, tree.tensors(start), loss), **CLOSE)


@engines
@pytest.mark.parametrize(
    "loss",
    [lambda seen: seen.loss, lambda seen: seen.mean(F.cross_entropy(seen.outputs, seen.y, reduction="none"))],
)
def test_a_term_sees_the_batch_and_the_runs_loss(engine, loss):
    """The loss itself as a term that replaces it is plain training."""
    cohort, start = setting(momentum=0.5)
    plain = fit(engine, cohort, start, epochs=2)
    replaced = fit(engine, cohort, start, epochs=2, term=Term(loss, replaces=True))
    assert_states(replaced, dict(plain.items()), **CLOSE)


@engines
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_tensors_that_the_model_lacks_train_along(engine, momentum):
    """A second head that only the term uses: gradients reach it, and the model none through it."""
    cohort, start = setting(momentum=momentum)
    states = per_client(
        **{"second.weight": torch.zeros(CLIENTS, 3, 6), "second.bias": MEANS[:, :, 0].contiguous()}
    )

    def second(seen: Seen) -> Tensor:
        head = seen.features.detach() @ seen.own["second.weight"].T + seen.own["second.bias"]
        outputs = seen.outputs.detach() + head
        return seen.mean(F.cross_entropy(outputs, seen.y, reduction="none"))

    def local(client, state, received):
        return client.fit(tree.merge(received, state), term=Term(second))

    def loss(p, x, y):
        z = plain_features(p, x)
        outputs = plain_outputs(p, z)
        two = outputs.detach() + z.detach() @ p["second.weight"].T + p["second.bias"]
        return F.cross_entropy(outputs, y) + F.cross_entropy(two, y)

    actual = run(engine, cohort, local, states, start)
    plain = fit(engine, cohort, start)
    assert_states(actual.select(*start.keys()), dict(plain.items()), **CLOSE)
    for i in range(CLIENTS if not momentum else 0):
        p = {**tree.tensors(start), **tree.tensors(states[i])}
        assert_states(actual[i], sgd(cohort, i, p, loss), **CLOSE)


@engines
def test_sums_over_samples_whole_and_by_class(engine):
    cohort, _ = setting()
    starts = torch.stack([cohort.model.init(i) for i in range(CLIENTS)])

    def sums(client, state, received):
        scale = received["scale"]
        return TensorDict(
            {
                "z": client.summed(state, lambda seen: seen.features),
                "by": client.summed(state, lambda seen, s: s * seen.features, given=(scale,), by_class=True),
                "loss": client.summed(
                    state, lambda seen: F.cross_entropy(seen.outputs, seen.y, reduction="none")
                ),
                "counts": client.class_counts(),
            },
            batch_size=[],
        )

    actual = run(engine, cohort, sums, starts, TensorDict({"scale": torch.tensor(2.0)}))
    for i, rows in enumerate(cohort.members):
        x, y = cohort.source.x[rows], cohort.source.y[rows]
        z = plain_features(starts[i], x)
        expected = {
            "z": z.sum(0),
            "by": torch.stack([2 * z[y == c].sum(0) for c in range(3)]),
            "loss": F.cross_entropy(plain_outputs(starts[i], z), y, reduction="sum"),
            "counts": torch.bincount(y, minlength=3).to(actual["counts"]),
        }
        assert_states(actual[i], expected, **CLOSE)


@engines
def test_privacy_clips_the_term_with_the_loss_of_every_sample(engine):
    """Without bound and noise it is plain training; one that mixes samples is refused, and so is a sum."""
    means = MEANS[0]
    cohort, start = setting(dp=SampleDP(1e9, 0.0, "shuffle"))
    private = fit(engine, cohort, start, term=Term(prototypes, given=(means,)))
    plain = fit(engine, setting()[0], start, term=Term(prototypes, given=(means,)))
    assert_states(private, dict(plain.items()), **CLOSE)
    tight = setting(dp=SampleDP(0.01, 0.0, "shuffle"))[0]
    moved = fit(engine, tight, start, term=Term(prototypes, given=(1e3 * means,)), steps=1)
    for i in range(CLIENTS):
        square = sum((moved[n][i] - t).square().sum() for n, t in start.items())
        assert float(square.sqrt()) <= 0.1 * 0.01 * (1 + 1e-4)
    with pytest.raises(ModelError, match="compares the samples of a batch"):
        fit(engine, cohort, start, term=Term(prototypes, given=(means,), mixes=True))
    for look in (lambda c: c.summed(start, lambda seen: seen.features), lambda c: c.class_counts()):
        with pytest.raises(TailorflError, match="sample-level privacy does not cover"):
            look(alone(cohort))


def test_terms_that_cannot_be_are_refused():
    cohort, start = setting()
    client = alone(cohort)
    with pytest.raises(TailorflError, match=r"\[7, \.\.\.\].* shape \[\]"):
        client.summed(start, lambda seen: seen.outputs.sum())
    with pytest.raises(TailorflError, match=r"seen\.rows needs"):
        client.fit(start, term=Term(lambda seen: seen.rows.sum() * 0.0))
    with pytest.raises(TailorflError, match=r"only tensors, .* not 0\.5"):
        client.fit(start, term=Term(lambda seen, a: seen.loss, given=(0.5,)))  # type: ignore[arg-type]
    with pytest.raises(TailorflError, match="one model at a time"):
        client.fit({"a": start, "b": start}, term=Term(prototypes), direction=lambda s, g: s)
    assert Term(lambda seen: seen.loss, public=1).public == 1
    for refused in ({"public": 0}, {"public": 1, "replaces": True}, {"public": 1, "keeps": ("kept",)}):
        with pytest.raises(TailorflError, match="public"):
            Term(lambda seen: seen.loss, **refused)


PUBLIC, LAM = 11, 3.0
TARGETS = (2 * torch.randn(CLIENTS, PUBLIC, 3, generator=torch.Generator().manual_seed(3))).softmax(-1)
"""Probabilities for every client and public sample."""
PULLED = {"rtol": 1e-4, "atol": 2e-6}


def public_setting(**options: Any) -> tuple[Cohort, TensorDict]:
    """Clients of an MLP that all see the public samples."""
    return cohorts.setting(public=source(PUBLIC, seed=7), **options)


def pulled(
    engine: Any, cohort: Cohort, start: TensorDict, targets: Tensor = TARGETS, batch: int = 4, **options: Any
) -> TensorDict:
    """Every client's model after a fit with targets of its own, and the loss that it reports."""

    def local(client, state, received):
        model = client.fit(received, term=towards(LAM, state["targets"], batch), **grouped(**options))
        return TensorDict({"model": model, "loss": client.metrics["train"]}, batch_size=[])

    return run(engine, cohort, local, per_client(targets=targets), start)


def rows_of(cohort: Cohort, position: int, batch: int, steps: int, first: int = 0) -> Tensor:
    """The public rows of a client's steps, [steps, batch]."""
    return public_rows(cohort.keys((position,), "train/public"), PUBLIC, batch, steps, first)[0]


def term(cohort: Cohort, state: Mapping[str, Tensor], rows: Tensor, targets: Tensor) -> Tensor:
    """λ · (1/b') Σ_x ‖softmax(f(x)) − target(x)‖², written out."""
    assert cohort.public is not None
    s = torch.softmax(cohort.model(state, cohort.public.x[rows]), dim=1)
    return LAM / len(rows) * sum(((s[b] - targets[row]) ** 2).sum() for b, row in enumerate(rows))


def gradient(cohort: Cohort, state: TensorDict, rows: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The gradient of the term by ordinary autograd."""
    leaves = {n: state[n].detach().clone().requires_grad_() for n in cohort.model.parameters}
    term(cohort, {**dict(state.items()), **leaves}, rows, targets).backward()
    return {n: p.grad for n, p in leaves.items()}


@in_turn("batch", [1, 4, PUBLIC, 50])
@pytest.mark.parametrize("how", ["plain", "direction"])
def test_training_is_sgd_on_the_loss_with_the_term(engine, batch, how):
    """Three steps of unequal clients, with everything else that a step may have."""
    cohort, start = public_setting(momentum=0.6, weight_decay=0.02, clip=0.4)
    options = {"direction": lambda w, g: g(w)} if how == "direction" else {}
    actual = pulled(engine, cohort, start, batch=batch, epochs=2, prox=(0.3, start), **options)["model"]
    for i in range(CLIENTS):
        steps = batches(cohort, i, epochs=2)
        leaves = {n: start[n].clone().requires_grad_() for n in cohort.model.parameters}
        optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.6, weight_decay=0.02)
        for (x, y), public in zip(steps, rows_of(cohort, i, batch, len(steps)), strict=True):
            optimizer.zero_grad()
            loss = cohort.loss(cohort.model(leaves, x), y, None) + term(cohort, leaves, public, TARGETS[i])
            loss = loss + 0.15 * sum((p - start[n]).square().sum() for n, p in leaves.items())
            loss.backward()
            nn.utils.clip_grad_norm_(leaves.values(), 0.4)
            optimizer.step()
        assert_states(actual[i], {n: p.detach() for n, p in leaves.items()}, **PULLED)


@engines
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dropout": 0.5},
        {"dp": SampleDP(0.1, 1.0, "shuffle")},
        {"dp": SampleDP(0.1, 1.0, "shuffle"), "dropout": 0.5},
        {"norm": "batch", "lr": 0.02},
    ],
)
def test_the_term_is_added_exact_beside_dropout_clipping_and_noise(engine, options):
    """A first step with and without it differ by its own gradient: without masks, not clipped by sample, no noise.

    The model is in evaluation mode, with the running statistics as the private batch of the step has left them.
    """
    cohort, start = public_setting(**options)
    actual = pulled(engine, cohort, start, steps=1)["model"]
    plain = fit(engine, cohort, start, steps=1)
    buffers = cohort.model.buffers
    assert all(torch.equal(actual[n], plain[n]) for n in buffers)
    for i in range(CLIENTS):
        at = TensorDict({n: plain[n][i] if n in buffers else t for n, t in start.items()})
        expected = gradient(cohort, at, rows_of(cohort, i, 4, 1)[0], TARGETS[i])
        assert max(t.abs().max() for t in expected.values()) > 0.05
        for n, t in expected.items():
            torch.testing.assert_close(plain[n][i] - actual[n][i], cohort.config.lr * t, rtol=1e-3, atol=1e-6)


@engines
def test_a_fit_by_pieces_has_the_public_batches_of_the_whole(engine):
    cohort, start = public_setting()
    whole = pulled(engine, cohort, start, steps=5)["model"]

    def by_pieces(client, state, received):
        pull = towards(LAM, state["targets"], 4)
        half = client.fit(received, term=pull, length=Length(steps=2))
        return client.fit(half, term=pull, length=Length(steps=3, first=2))

    pieces = run(engine, cohort, by_pieces, per_client(targets=TARGETS), start)
    assert_states(pieces, dict(whole.items()))


@engines
@pytest.mark.parametrize("count", [1, 2])
def test_a_step_has_one_public_batch_also_where_it_repeats_or_has_several_private_ones(engine, count):
    cohort, start = public_setting()
    still = {"direction": lambda w, g: w * 0.0, "batches": count}
    actual = pulled(engine, cohort, start, steps=2, repeat=2, first=count, **still)["model"]
    for i in range(CLIENTS):
        at = start.clone()
        for rows in rows_of(cohort, i, 4, 2, first=1).repeat_interleave(2, 0):
            at = at - TensorDict(gradient(cohort, at, rows, TARGETS[i])) * 0.1
        assert_states(actual[i], dict(at.items()))


@engines
def test_the_reported_loss_is_that_of_private_data(engine):
    cohort, start = public_setting()
    losses = pulled(engine, cohort, start, steps=1)["loss"]
    for i in range(CLIENTS):
        x, y = batches(cohort, i)[0]
        expected = float(cohort.loss(cohort.model(start, x), y, None))
        assert float(losses[i]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 7, 10])
def test_public_batches_are_full_and_passes_have_no_sample_twice(batch):
    keys, per_pass = derive(0, np.arange(5, dtype=np.uint64)), PUBLIC // batch
    rows = public_rows(keys, PUBLIC, batch, 3 * per_pass)
    assert rows.shape == (5, 3 * per_pass, batch)
    for one_pass in rows.reshape(5 * 3, -1).tolist():
        assert len(set(one_pass)) == per_pass * batch
    later = public_rows(keys, PUBLIC, batch, 2, first=2)
    assert torch.equal(later, public_rows(keys, PUBLIC, batch, 4)[:, 2:])


def test_a_batch_of_everything_needs_no_order():
    keys = derive(0, np.arange(2, dtype=np.uint64))
    for batch in (PUBLIC, 100):
        assert torch.equal(public_rows(keys, PUBLIC, batch, 3), torch.arange(PUBLIC).expand(2, 3, PUBLIC))


@engines
@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize("rows", [3, 10**6])
def test_predictions_are_the_models_outputs_in_evaluation_mode(engine, norm, rows, monkeypatch):
    """Of each client's model, of one that all share, and of one with a layer of its own, in slices of any length."""
    cohort, start = public_setting(norm=norm, dropout=0.5)
    last = cohort.model.parameters[-1]
    assert cohort.public is not None
    monkeypatch.setattr(cohort_module, "INPUT_BYTES", 4 * 5 * rows)
    starts = spread(start, CLIENTS, scale=0.5)

    def local(client, state, received):
        own, shared = client.predict_public(state), client.predict_public(received)
        mixed = client.predict_public(TensorDict({**received, last: state[last]}, batch_size=[]))
        return TensorDict({"own": own, "shared": shared, "mixed": mixed}, batch_size=[])

    actual = run(engine, cohort, local, starts, start)
    module = cohort.model._factory()
    for i in range(CLIENTS):
        mixed = {**start, last: starts[i][last]}
        for name, state in (("own", starts[i]), ("shared", start), ("mixed", mixed)):
            module.load_state_dict(dict(state.items()))
            expected = module.eval()(cohort.public.x).detach()
            torch.testing.assert_close(actual[name][i], expected, rtol=1e-4, atol=1e-5)


@engines
def test_a_missing_public_set_or_targets_of_fewer_samples_are_refused(engine):
    cohort, start = public_setting()
    client = alone(replace(cohort, public=None))
    for call in (
        lambda: client.fit(start, term=towards(LAM, TARGETS[0], 4)),
        lambda: client.predict_public(start),
    ):
        with pytest.raises(TailorflError, match="needs a public set"):
            call()
    with pytest.raises(TailorflError, match="index"):
        pulled(engine, cohort, start, TARGETS[:, :2])
