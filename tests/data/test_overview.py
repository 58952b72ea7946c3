"""Overviews of federations, against scipy and plain counting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp

from tailorfl.data.build import build
from tailorfl.data.overview import (
    QUANTILES,
    Figure,
    Overview,
    between,
    effective_classes,
    kolmogorov_smirnov,
    overview,
    total_variation,
)
from tailorfl.data.source import Source, Task


def made(task: Task, y: torch.Tensor, clients: list[int], outputs: int = 1) -> Source:
    ids = torch.tensor(clients)
    names = tuple(f"site {k}" for k in range(int(ids.max()) + 1))
    x = torch.randn(len(y), 3, generator=torch.Generator().manual_seed(0))
    return Source("made", x, y, task, outputs, groups={"client": ids}, group_names={"client": names})


def by_key(found: Overview) -> dict[str, Figure]:
    return {figure.key: figure for figure in found.figures}


def variation(**settings: Any) -> Figure:
    return by_key(overview(build(**settings)))["total_variation"]


def test_the_distances_of_two_clients_by_hand() -> None:
    owner, strata = np.array([0, 0, 0, 0, 1, 1]), np.array([0, 0, 0, 1, 1, 1])
    # shares (3/4, 1/4) and (0, 1) of pooled (1/2, 1/2)
    assert total_variation(owner, strata) == pytest.approx((0.25 + 0.5) / 2)
    assert effective_classes(owner, strata) == pytest.approx((1 / (9 / 16 + 1 / 16) + 1) / 2)


def test_the_kolmogorov_distance_is_scipys() -> None:
    rng = np.random.default_rng(3)
    owner, values = np.sort(rng.integers(0, 4, 90)), rng.normal(size=90).round(1)  # with ties
    wanted = np.mean([ks_2samp(values[owner == k], values, method="asymp").statistic for k in range(4)])
    assert kolmogorov_smirnov(owner, values) == pytest.approx(wanted, abs=1e-12)


def test_the_share_between_clients_is_that_of_the_analysis_of_variance() -> None:
    rng = np.random.default_rng(4)
    owner, values = rng.integers(0, 3, 50), rng.normal(size=50)
    inside = sum(((values[owner == k] - values[owner == k].mean()) ** 2).sum() for k in range(3))
    total = ((values - values.mean()) ** 2).sum()
    assert between(owner, values) == pytest.approx(1 - inside / total)
    assert between(owner, np.full(50, 0.3)) == 0


def test_counts_and_sizes_are_those_of_the_training_parts() -> None:
    federation = build("digits", clients=6, samples=400, heldout_clients=1, seed=2)
    found, y = overview(federation), federation.source.y.numpy()
    counts = np.stack([np.bincount(y[rows], minlength=10) for rows in federation.train])
    assert found.counts.tolist() == counts.tolist()
    assert list(found.classes) == (counts > 0).sum(axis=1).tolist()
    assert found.num_clients == 6
    assert found.sizes["test"].tolist() == federation.sizes("test").tolist()
    pooled, shares = counts[:6].sum(axis=0), counts[:6] / counts[:6].sum(axis=1, keepdims=True)
    wanted = np.abs(shares - pooled / pooled.sum()).sum(axis=1).mean() / 2
    assert by_key(found)["total_variation"].value == pytest.approx(wanted)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_client_that_is_left_out_changes_no_figure(task: Any) -> None:
    y = torch.arange(60) % 3 if task == "classification" else torch.arange(60.0)[:, None] ** 2
    source = made(task, y, [k % 4 for k in range(60)], 3 if task == "classification" else 1)
    excluded, absent = (
        overview(build(source=source, excluded_clients=["site 3"])),
        overview(build(source=source, heldout_clients=["site 3"])),
    )
    assert excluded.figures == absent.figures


def test_chance_is_what_samples_dealt_at_random_show() -> None:
    even, skewed = (variation(name="digits", partition=p, clients=10, samples=600) for p in ("iid", "shards"))
    assert even.value == pytest.approx(even.chance, rel=0.3)  # each part is cut class by class
    assert skewed.value > 3 * skewed.chance
    alone = variation(source=made("classification", torch.tensor([0, 1, 1, 0, 1] * 4), [0] * 20, 2))
    assert (alone.value, alone.chance) == (0, None)  # one client is at no distance to all


def test_targets_have_numpys_quantiles() -> None:
    y = torch.randn(80, 1, generator=torch.Generator().manual_seed(1))
    federation = build(source=made("regression", y, [k % 3 for k in range(80)], 1))
    found = overview(federation)
    wanted = [np.quantile(y[rows, 0].double().numpy(), QUANTILES) for rows in federation.train]
    np.testing.assert_allclose(found.quantiles, wanted, rtol=1e-12)
    assert found.classes is None
    assert found.counts.sum(axis=1).tolist() == found.sizes["train"].tolist()
    assert np.ptp(found.counts.sum(axis=0)) <= 1  # equally many of all samples in each bin


def test_survival_counts_events_and_looks_at_times() -> None:
    event, time = torch.rand(2, 60, generator=torch.Generator().manual_seed(1))
    y = torch.stack([(event < 0.4).float(), time * 9], dim=1)
    federation = build(source=made("survival", y, [k % 2 for k in range(60)]))
    found = overview(federation)
    for client, rows in enumerate(federation.train):
        assert found.events[client] == y[rows, 0].sum()
        assert found.quantiles[client, 2] == pytest.approx(np.median(y[rows, 1].double().numpy()))
    assert {"total_variation", "kolmogorov_smirnov", "between"} <= set(by_key(found))


def test_labels_are_counted_one_by_one() -> None:
    y = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]).repeat(5, 1)
    federation = build(source=made("multilabel", y, [k % 2 for k in range(20)], 2), clients=2)
    found = overview(federation)
    assert found.what == "labels"
    assert found.counts.tolist() == [y[rows].sum(dim=0).tolist() for rows in federation.train]


def test_few_clients_out_of_many_are_spread_over_their_sizes() -> None:
    found = overview(build("digits", partition="quantity", clients=30, samples=900))
    train = found.sizes["train"]
    sizes = train[found.from_large_to_small(5)].tolist()
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (train.max(), train.min())
    assert found.from_large_to_small(30).tolist() == list(range(30))
