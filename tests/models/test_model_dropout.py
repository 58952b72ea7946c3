"""Keyed dropout: a mask is a function of its key alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from tailorfl.errors import ModelError
from tailorfl.models import Dropout, dropout_key, fold_key, replace_dropout
from tailorfl.models.dropout import ChannelDropout, plain_dropout


def key(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.int64)


def mask(k: Tensor, *shape: int, p: float = 0.3) -> Tensor:
    with dropout_key(k):
        return Dropout(p)(torch.ones(shape))


def run(layer: nn.Module, k: Tensor, rows: Tensor) -> Tensor:
    with dropout_key(k):
        return layer(rows)


@pytest.mark.parametrize(
    ("layer", "shape", "exact"),
    [
        (nn.Sequential(Dropout(0.3), nn.Linear(6, 6), Dropout(0.5)), (9, 6), False),
        (Dropout(0.4), (4, 5), True),
        (ChannelDropout(0.4), (4, 6, 2, 3), True),
    ],
)
def test_vmap_over_keys_equals_the_loop(layer: nn.Module, shape: tuple[int, ...], exact: bool):
    keys, x = torch.tensor([-5, 0, 1, 2**62]), torch.randn(4, *shape)
    looped = torch.stack([run(layer, k, rows) for k, rows in zip(keys, x, strict=True)])
    mapped = vmap(partial(run, layer))(keys, x)
    torch.testing.assert_close(mapped, looped, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-6)
    assert torch.equal(mapped == 0, looped == 0)
    only_keys = vmap(partial(run, layer), in_dims=(0, None))(keys, x[0])
    assert torch.equal(only_keys == 0, torch.stack([run(layer, k, x[0]) for k in keys]) == 0)


def test_mask_does_not_depend_on_what_was_drawn_before():
    first = mask(key(3), 50)
    torch.rand(100)
    mask(key(4), 10)
    assert torch.equal(first, mask(key(3), 50))
    assert not torch.equal(first, mask(key(4), 50))
    assert 0 < int((mask(key(0), 50) == 0).sum()) < 50


def test_calls_of_one_pass_differ_and_a_nested_key_does_not_disturb_the_outer_one():
    layer, x = Dropout(0.5), torch.ones(64)
    with dropout_key(key(1)):
        first, second, *more = (layer(x) for _ in range(6))
    assert len({tuple(m.tolist()) for m in (first, second, *more)}) == 6
    with dropout_key(key(1)):
        assert torch.equal(layer(x), first)
        with dropout_key(key(9)):
            layer(x)
        assert torch.equal(layer(x), second)


def test_padding_rows_at_the_end_leave_the_masks_of_the_others():
    assert torch.equal(mask(key(5), 8, 13), mask(key(5), 20, 13)[:8])


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_keep_rate_and_scale(p):
    count = 200_000
    values = mask(key(11), count, p=p)
    kept = values != 0
    assert torch.allclose(values[kept], torch.tensor(1 / (1 - p)))
    # five standard deviations of a binomial share
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * (p * (1 - p) / count) ** 0.5


def test_masks_of_neighbouring_keys_positions_and_calls_are_uncorrelated():
    rows = torch.stack([mask(key(k), 4000, p=0.5) - 1 for k in range(40)]).double()
    between_keys = rows @ rows.T / 4000 - torch.eye(40)
    assert between_keys.abs().max() < 5.5 / 4000**0.5
    along = (rows[:, 1:] * rows[:, :-1]).mean()
    assert along.abs() < 5 / (40 * 3999) ** 0.5
    assert rows.mean().abs() < 5 / (40 * 4000) ** 0.5
    per_position = (rows.mean(0) * 40**0.5).square().mean()
    assert abs(per_position - 1) < 5 * (2 / 4000) ** 0.5


def test_fold_key_gives_distinct_keys_also_under_vmap():
    folded = fold_key(key(2), torch.arange(1000))
    assert folded.dtype == torch.int64
    assert len(set(folded.tolist())) == 1000
    assert torch.equal(folded, vmap(fold_key, in_dims=(None, 0))(key(2), torch.arange(1000)))
    assert fold_key(key(2), 7) == folded[7]
    assert not set(folded.tolist()) & set(fold_key(key(3), torch.arange(1000)).tolist())


def test_gradient_is_the_scaled_mask():
    with dropout_key(key(1)):
        gradient = grad(lambda x: Dropout(0.25)(x).sum())(torch.randn(30))
    assert torch.equal(gradient, mask(key(1), 30, p=0.25))


def test_special_cases_need_no_randomness_and_do_not_write_to_their_input():
    x = torch.randn(50)
    before = x.clone()
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)
    assert torch.equal(mask(key(0), 5, p=1.0), torch.zeros(5))
    run(Dropout(0.5, inplace=True), key(1), x)
    assert torch.equal(x, before)
    with pytest.raises(ModelError, match="no key"):  # the block has ended
        Dropout(0.5)(x)


@pytest.mark.parametrize("bad", [3, torch.tensor(3.0), torch.tensor([3])])
def test_keys_are_int64_scalars(bad):
    with pytest.raises(ModelError, match="int64 tensor"), dropout_key(bad):
        pass


def test_replace_dropout_keeps_names_probabilities_modes_and_repetitions():
    twice, kept = nn.Dropout(0.2), Dropout(0.1)
    sequence = nn.Sequential(nn.Linear(2, 2), twice)
    module = nn.ModuleDict({"a": twice, "b": sequence, "c": nn.Dropout(0.7).eval(), "d": kept})
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    assert replace_dropout(module) is module
    assert [name for name, _ in module.named_modules(remove_duplicate=False)] == names
    assert all(type(module[name]) is Dropout for name in "acd")
    assert module["a"] is module["b"][1]
    assert [(module[name].p, module[name].training) for name in "ac"] == [(0.2, True), (0.7, False)]
    assert module["d"] is kept
    assert isinstance(replace_dropout(nn.Dropout(0.4)), Dropout)


@pytest.mark.parametrize(
    "layer", [nn.Dropout2d(0.5), nn.AlphaDropout(0.5), nn.MultiheadAttention(4, 2, dropout=0.1)]
)
def test_layers_that_no_key_controls_are_refused(layer):
    with pytest.raises(ModelError, match="dropout key: 1"):
        replace_dropout(nn.Sequential(nn.Linear(2, 2), layer))


def test_whole_channels_are_dropped():
    x = torch.ones(400, 20, 3, 5)
    with dropout_key(key(0)):
        masked = ChannelDropout(0.25)(x)
    assert torch.equal(masked, masked[:, :, :1, :1].expand_as(x))
    assert sorted(masked.unique().tolist()) == pytest.approx([0, 4 / 3])
    assert (masked[:, :, 0, 0] == 0).float().mean() == pytest.approx(0.25, abs=0.02)
    assert type(plain_dropout(ChannelDropout(0.25))) is nn.Dropout2d
