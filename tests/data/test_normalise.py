"""Features standardised by each client's own training statistics."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tailorfl.data.federation import Federation
from tailorfl.data.scaling import Scaling, standardised
from tailorfl.data.source import Source
from tailorfl.errors import DataError


def federation(x: torch.Tensor) -> Federation:
    """Two training clients and one held out, 6 train, 2 val and 2 test rows each, two for the server."""
    source = Source("tiny", x, torch.zeros(32, dtype=torch.int64), "binary", 1)
    train, val, test = (
        tuple(np.arange(start + low, start + high) for start in (0, 10, 20))
        for low, high in ((0, 6), (6, 8), (8, 10))
    )
    return Federation(source, train, val, test, ("a", "b", "late"), num_clients=2, server=np.array([30, 31]))


def features() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(32, 3, generator=generator) * torch.tensor([1.0, 5.0, 0.1]) + 7.0


def test_rows_are_scaled_by_their_clients_or_by_all_training_clients_training_rows() -> None:
    x = features()
    before = x.clone()
    scaled = standardised(federation(x), "client").source.x
    together = standardised(federation(x), "federated").source
    pooled = torch.cat([x[0:6], x[10:16]])
    for rows, train, numbers in (
        *((slice(start, start + 10), x[start : start + 6], scaled) for start in (0, 10, 20)),
        (slice(30, 32), pooled, scaled),
        (slice(0, 32), pooled, together.x),
    ):
        mean, deviation = train.double().mean(dim=0), train.double().std(dim=0)
        torch.testing.assert_close(
            numbers[rows].double(), (x[rows].double() - mean) / deviation, atol=1e-5, rtol=1e-5
        )
    assert together.info["scaling"].clients == ()
    assert torch.equal(x, before)


def test_a_constant_feature_is_shifted_only() -> None:
    x = features()
    x[:10, 1] = 0.1
    assert (standardised(federation(x), "client").source.x[:10, 1].abs() < 1e-6).all()


def test_refusals() -> None:
    shared = replace(federation(features()), test=(np.array([8, 9]),) * 3)
    images = federation(torch.zeros(32, 1, 2, 2, dtype=torch.uint8))
    for data, words in ((shared, "share a test set"), (images, "float features")):
        with pytest.raises(DataError, match=words):
            standardised(data, "client")


def test_a_second_scaling_keeps_the_first() -> None:
    x = features()
    first = Scaling(torch.tensor([[1.0, 2, 3], [4, 5, 6]]), torch.full((2, 3), 2.0), ("b",), clip=3.0)
    given = federation(x)
    scaled = torch.cat([first.apply(x[:10]), first.apply(x[10:20], "b"), first.apply(x[20:])])
    source = replace(given.source, x=scaled, info={"scaling": first})
    twice = standardised(replace(given, source=source), "client").source
    for name, start in {"a": 0, "b": 10, "late": 20}.items():
        raw = x[start : start + 10]
        assert torch.equal(twice.info["scaling"].apply(raw, name), twice.x[start : start + 10])
    before = twice.info["scaling"].of("b")["before"]
    assert before == {"mean": [1.0, 2.0, 3.0], "deviation": [2.0] * 3, "clip": 3.0}
