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
    starts = (0, 10, 20)
    return Federation(
        source,
        tuple(np.arange(s, s + 6) for s in starts),
        tuple(np.arange(s + 6, s + 8) for s in starts),
        tuple(np.arange(s + 8, s + 10) for s in starts),
        ("a", "b", "late"),
        num_clients=2,
        server=np.array([30, 31]),
    )


def features() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(32, 3, generator=generator) * torch.tensor([1.0, 5.0, 0.1]) + 7.0


def test_every_client_uses_its_own_training_statistics() -> None:
    x = features()
    scaled = standardised(federation(x), "client").source.x
    for start in (0, 10, 20):
        train = x[start : start + 6].double()
        mean, deviation = train.mean(dim=0), train.std(dim=0)
        expected = (x[start : start + 10].double() - mean) / deviation
        torch.testing.assert_close(scaled[start : start + 10].double(), expected, atol=1e-5, rtol=1e-5)


def test_the_servers_rows_use_the_training_clients_together() -> None:
    x = features()
    pooled = torch.cat([x[0:6], x[10:16]]).double()
    expected = (x[30:].double() - pooled.mean(dim=0)) / pooled.std(dim=0)
    torch.testing.assert_close(
        standardised(federation(x), "client").source.x[30:].double(), expected, atol=1e-5, rtol=1e-5
    )


def test_test_rows_do_not_influence_the_statistics() -> None:
    x = features()
    changed = x.clone()
    changed[[8, 9, 18, 19, 28, 29]] = 1e6
    one, two = (
        standardised(federation(x), "client").source.x,
        standardised(federation(changed), "client").source.x,
    )
    kept = [row for row in range(32) if row % 10 < 8 or row >= 30]
    assert torch.equal(one[kept], two[kept])


def test_a_constant_feature_is_shifted_only() -> None:
    x = features()
    x[:10, 1] = 0.1
    assert (standardised(federation(x), "client").source.x[:10, 1].abs() < 1e-6).all()


def test_the_original_is_left_alone() -> None:
    x = features()
    kept = x.clone()
    standardised(federation(x), "client")
    assert torch.equal(x, kept)


def test_refusals() -> None:
    shared = federation(features())
    test = (np.array([8, 9]),) * 3
    with pytest.raises(DataError, match="clients share a test set"):
        standardised(
            Federation(shared.source, shared.train, shared.val, test, shared.names, num_clients=2), "client"
        )
    images = federation(torch.zeros(32, 1, 2, 2, dtype=torch.uint8))
    with pytest.raises(DataError, match="is for float features"):
        standardised(images, "client")


def test_federated_statistics_are_those_of_all_training_clients() -> None:
    x = features()
    pooled = torch.cat([x[0:6], x[10:16]]).double()
    expected = (x.double() - pooled.mean(dim=0)) / pooled.std(dim=0)
    found = standardised(federation(x), "federated").source
    torch.testing.assert_close(found.x.double(), expected, atol=1e-5, rtol=1e-5)
    assert found.info["scaling"].clients == ()


def test_a_second_scaling_keeps_the_first() -> None:
    x = features()
    first = Scaling(torch.tensor([[1.0, 2, 3], [4, 5, 6]]), torch.full((2, 3), 2.0), ("b",), clip=3.0)
    given = federation(x)
    scaled = torch.cat([first.apply(x[:10]), first.apply(x[10:20], "b"), first.apply(x[20:])])
    source = replace(given.source, x=scaled, info={"scaling": first})
    found = standardised(replace(given, source=source), "client").source
    for name, start in {"a": 0, "b": 10, "late": 20}.items():
        raw = x[start : start + 10]
        assert torch.equal(found.info["scaling"].apply(raw, name), found.x[start : start + 10])
    assert found.info["scaling"].of("b")["before"] == {
        "mean": [1.0, 2.0, 3.0], "deviation": [2.0, 2.0, 2.0], "clip": 3.0,
    }  # fmt: skip
