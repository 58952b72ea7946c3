"""Dropout in local training: masks follow keys, so engines, chunks and the order of calls change nothing."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tailorfl.training.ascent import sam
from tailorfl.training.cohort import Cohort
from tailorfl.training.plan import Length
from tailorfl.training.sample_privacy import SampleDP, private_gradient
from training.cohorts import (
    ENGINES,
    FLOAT,
    SIZES,
    assert_states,
    cohort_of,
    engines,
    fit,
    model_of,
    run,
    source,
)

FITS = {
    "plain": {},
    "repeat": {"repeat": 2},
    "sam": {"direction": sam(0.1)},
    "steps": {"steps": 5, "first": 2},
}


def setting(name: str = "mlp", norm: str = "none", **options: object) -> tuple[Cohort, TensorDict]:
    data = source(sum(SIZES), (5,) if name == "mlp" else (1, 8, 8))
    extra = {"hidden": (16, 12)} if name == "mlp" else {}
    model = model_of(name, data, dropout=0.4, norm=norm, **extra)
    return cohort_of(model, data, **options), model.init(1)


@pytest.mark.parametrize("name", ["mlp", "cnn2"])
@pytest.mark.parametrize("options", FITS.values(), ids=FITS.keys())
def test_masks_are_equal_across_engines_and_chunk_sizes(name, options):
    cohort, start = setting(name)
    reference = fit(ENGINES["sequential"], cohort, start, **options)
    for engine in ENGINES.values():
        found = fit(engine, cohort, start, **options)
        assert_states(found, dict(reference.items()), **FLOAT)


@engines
def test_masks_are_equal_where_batch_norm_trains_unequal_batches_apart(engine):
    """Clients with batches of different sizes then take the same step one group after the other."""
    cohort, start = setting(norm="batch", lr=0.02)
    reference, found = (
        fit(ENGINES["sequential"], cohort, start, epochs=2),
        fit(engine, cohort, start, epochs=2),
    )
    assert_states(found, dict(reference.items()), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_private_masks_are_equal_across_engines(noise):
    cohort, start = setting(dp=SampleDP(0.5, noise, "shuffle"))
    reference = fit(ENGINES["sequential"], cohort, start)
    for engine in ENGINES.values():
        found = fit(engine, cohort, start)
        assert_states(found, dict(reference.items()), rtol=1e-3, atol=1e-5)


@engines
def test_masks_do_not_depend_on_who_trains_along(engine):
    cohort, start = setting()
    together, fewer = fit(engine, cohort, start), fit(engine, cohort.part([1, 2]), start)
    for n in start.keys():  # noqa: SIM118
        torch.testing.assert_close(fewer[n], together[n][[1, 2]], **FLOAT)


@engines
def test_a_fit_by_pieces_has_the_masks_of_the_whole(engine):
    cohort, start = setting()
    whole = fit(engine, cohort, start, steps=5)

    def by_pieces(client, _, w):
        return client.fit(client.fit(w, length=Length(steps=2)), length=Length(steps=3, first=2))

    pieces = run(engine, cohort, by_pieces, received=start)
    assert_states(pieces, dict(whole.items()), **FLOAT)


def test_every_step_and_repetition_has_new_masks():
    """With equal samples, steps of equal masks would have equal gradients."""
    cohort, start = setting()
    cohort.source.x[:] = cohort.source.x[0]
    cohort.source.y[:] = 0

    def moves(**options):
        return fit(ENGINES["sequential"], cohort.part([2]), start, lr=1e-4, **options) - start

    one, two, again = moves(steps=1), moves(steps=2), moves(steps=1, repeat=2)
    for longer in (two, again):
        second = longer["head.weight"] - one["head.weight"]
        assert not torch.allclose(second, one["head.weight"], rtol=0.05)
    later = moves(steps=1, first=1)
    assert not torch.allclose(later["head.weight"], one["head.weight"], rtol=0.05)


def test_every_sample_of_a_private_gradient_has_a_dropout_key_of_its_own():
    """Otherwise one mask would serve the whole batch. Samples are unit vectors: the gradient shows keys."""

    def loss(values, x, y, weight, key):
        return (values["w"] * x[0]).sum() * ((key >> 8) & 0xFFFF).float(), {}

    x = torch.eye(8)
    found, _ = private_gradient(
        loss,
        {"w": torch.zeros(8)},
        x,
        x[0],
        None,
        SampleDP(1e9, 0.0, "shuffle"),
        torch.tensor(1),
        torch.tensor(2),
    )
    assert len(set(found["w"].tolist())) == 8


@engines
def test_evaluation_drops_nothing(engine):
    cohort, start = setting()

    def local(client, _, received):
        return TensorDict({"loss": client.loss(received)}, batch_size=[])

    found = run(engine, cohort, local, received=start)["loss"]
    for i, rows in enumerate(cohort.members):
        x, y = cohort.source.x[rows], cohort.source.y[rows]
        assert float(found[i]) == pytest.approx(float(cohort.loss(cohort.model(start, x), y, None)), rel=1e-5)
