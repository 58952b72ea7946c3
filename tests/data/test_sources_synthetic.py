"""Synthetic sources have the optimum, the heterogeneity and the label shares that they state."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tailorfl.data import storage
from tailorfl.data.build import build
from tailorfl.data.registry import load_source
from tailorfl.data.source import Source
from tailorfl.data.synthetic import closed_form, pooled_optimum, synthetic_digits
from tailorfl.errors import ConfigError


def rows_of(source: Source, client: int, test: bool = False) -> tuple[Tensor, Tensor]:
    rows = (source.groups["client"] == client) & (source.test == test)
    return source.x[rows].double(), source.y[rows].double()


def loss(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """The half mean squared loss of a linear model without bias."""
    return 0.5 * ((x @ w).unsqueeze(-1) - y).square().sum(-1).mean()


@pytest.fixture(scope="module")
def quadratics() -> tuple[Tensor, Tensor, Tensor]:
    """Curvatures, local optima and unequal client weights."""
    info = load_source("synthetic_quadratic", clients=6, dim=4, condition=30.0, seed=3).info
    p = torch.arange(1.0, 7.0, dtype=torch.float64)
    return info["H"], info["c"], p / p.sum()


@pytest.mark.parametrize("test", [False, True])
def test_the_loss_of_a_quadratic_source_is_the_stated_quadratic(test: bool) -> None:
    source = load_source("synthetic_quadratic", clients=5, samples=7, dim=4, condition=100.0, seed=1)
    assert len(torch.unique(source.x, dim=0)) == len(source)
    generator = torch.Generator().manual_seed(0)
    for client in range(5):
        x, y = rows_of(source, client, test)
        H, c = source.info["H"][client], source.info["c"][client]
        for w in torch.randn(3, 4, generator=generator, dtype=torch.float64):
            torch.testing.assert_close(loss(x, y, w), 0.5 * (w - c) @ H @ (w - c), rtol=1e-5, atol=1e-9)
        assert torch.linalg.eigvalsh(H)[[0, -1]].tolist() == pytest.approx([1.0, 100.0], rel=1e-5)


@pytest.mark.parametrize("name", ["synthetic_quadratic", "synthetic_linear"])
def test_local_and_pooled_optima_solve_the_normal_equations(name: str) -> None:
    source = load_source(name, clients=4, dim=3, samples=20, condition=10.0, seed=5)
    parts = [rows_of(source, client) for client in range(4)]
    for (x, y), c in zip(parts, source.info["c"], strict=True):
        torch.testing.assert_close(x.T @ (x @ c), (x.T @ y).squeeze(-1), rtol=1e-9, atol=1e-8)
    x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    pooled = source.info["pooled"]
    torch.testing.assert_close(x.T @ (x @ pooled), (x.T @ y).squeeze(-1), rtol=1e-9, atol=1e-5)


def test_linear_weights_have_the_stated_centre_and_spread() -> None:
    info = load_source("synthetic_linear", clients=30, dim=6, heterogeneity=0.7, seed=2).info
    weights, centre = info["weights"], info["centre"]
    torch.testing.assert_close(weights.mean(0), centre)
    assert float((weights - centre).square().sum(1).mean().sqrt()) == pytest.approx(0.7)
    assert float(centre.norm()) == pytest.approx(1.0)
    alone = load_source("synthetic_linear", clients=1, heterogeneity=0.7).info
    torch.testing.assert_close(alone["weights"][0], alone["centre"])


def test_linear_residuals_have_the_stated_noise_and_features_the_stated_condition() -> None:
    source = load_source("synthetic_linear", clients=3, samples=4000, dim=4, noise=0.5, condition=9.0, seed=4)
    for client in range(3):
        x, y = rows_of(source, client)
        residual = y.squeeze(-1) - x @ source.info["weights"][client]
        assert float(residual.std()) == pytest.approx(0.5, rel=0.05)
        variance = x.var(0)
        assert float(variance[-1] / variance[0]) == pytest.approx(9.0, rel=0.15)
    exact = load_source("synthetic_linear", noise=0.0, seed=4).info
    torch.testing.assert_close(exact["c"], exact["weights"], rtol=0, atol=1e-5)


def test_closed_form_is_a_stationary_point(quadratics: tuple[Tensor, Tensor, Tensor]) -> None:
    H, c, p = quadratics
    for lam in (0.01, 1.0, 50.0):
        w, v = closed_form(H, c, p, lam)
        gradient = torch.einsum("kij,kj->ki", H, v - c) + lam * (v - w)
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-10, rtol=0)
        torch.testing.assert_close(torch.einsum("k,ki->i", p, v), w)


def test_closed_form_limits(quadratics: tuple[Tensor, Tensor, Tensor]) -> None:
    H, c, p = quadratics
    w, v = closed_form(H, c, p, 0.0)
    torch.testing.assert_close(v, c)
    torch.testing.assert_close(w, p @ c)
    w, v = closed_form(H, c, p, 1e9)
    pooled = pooled_optimum(H, c, p)
    torch.testing.assert_close(w, pooled, rtol=0, atol=1e-6)
    torch.testing.assert_close(v, pooled.expand_as(v), rtol=0, atol=1e-6)
    with pytest.raises(ConfigError, match="lam must not be negative"):
        closed_form(H, c, p, -1.0)


def scores_of(source: Source) -> Tensor:
    """Scores of the classes by the rule of each sample's client `[samples, classes]`."""
    return torch.einsum("nd,ncd->nc", source.x.double(), source.info["weights"][source.groups["client"]])


def test_logistic_labels_follow_each_clients_own_rule() -> None:
    source = load_source("synthetic_logistic", clients=4, samples=50, test_samples=30, seed=7)
    assert (scores_of(source).argmax(1) == source.y).float().mean() > 0.99
    deviation = source.x[~source.test].double().std(0, correction=0)
    torch.testing.assert_close(deviation, torch.ones_like(deviation), rtol=1e-4, atol=0)


def test_sampled_labels_are_calibrated() -> None:
    source = load_source("synthetic_logistic", clients=20, samples=2000, label_noise="sample", seed=7)
    share = scores_of(source).softmax(1)[:, 1]
    for low in (0.1, 0.3, 0.5, 0.7):
        band = (share > low) & (share < low + 0.2)
        assert float(source.y[band].double().mean()) == pytest.approx(float(share[band].mean()), abs=0.03)


def test_heterogeneity_of_logistic_rules_is_a_standard_deviation() -> None:
    sizes = {"clients": 500, "samples": 5, "test_samples": 1}
    narrow, wide = (load_source("synthetic_logistic", **sizes, heterogeneity=h).info for h in (0.1, 3.0))
    torch.testing.assert_close(wide["weights"], 30 * narrow["weights"])


def test_ten_thousand_clients_are_made_at_once() -> None:
    start = time.process_time()
    source = load_source("synthetic_digits", clients=10_000, samples=20, test_samples=5, alpha=0.5)
    assert time.process_time() - start < 10
    assert source.x.shape == (250_000, 1, 8, 8)
    assert torch.bincount(source.groups["client"]).tolist() == [25] * 10_000
    assert torch.bincount(source.groups["client"][source.test]).tolist() == [5] * 10_000


def test_digits_lie_around_their_prototypes_and_the_offset_of_their_client() -> None:
    sizes = {"clients": 50, "samples": 200, "shape": (12,), "seed": 2}
    noisy, moved = (
        load_source("synthetic_digits", **sizes, **more)
        for more in ({"noise": 0.3}, {"noise": 0.0, "shift": 2.0})
    )
    residual, offset = (source.x - source.info["prototypes"][source.y] for source in (noisy, moved))
    assert float(residual.std()) == pytest.approx(0.3, rel=0.02)
    assert float(residual.mean()) == pytest.approx(0.0, abs=0.01)
    offset = offset.reshape(50, -1, 12)
    torch.testing.assert_close(offset, offset[:, :1].expand_as(offset), rtol=0, atol=1e-5)
    assert float(offset.std()) == pytest.approx(2.0, rel=0.15)


def test_a_small_alpha_gives_clients_few_classes() -> None:
    def classes_seen(alpha: float | None) -> float:
        source = load_source("synthetic_digits", clients=200, samples=20, alpha=alpha, seed=3)
        pairs = torch.stack([source.groups["client"], source.y], dim=1)
        return len(torch.unique(pairs, dim=0)) / 200

    assert classes_seen(0.01) < 2
    assert classes_seen(0.01) < classes_seen(1.0) < classes_seen(None)


@pytest.mark.parametrize("kind", ["linear", "quadratic", "logistic", "digits"])
def test_the_seed_alone_decides_the_draw(kind: str) -> None:
    first, again, other = (load_source(f"synthetic_{kind}", clients=3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.y, again.y)
    assert not torch.equal(first.x, other.x)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("synthetic_linear", {"clients": 0}),
        ("synthetic_linear", {"noise": -1.0}),
        ("synthetic_linear", {"heterogeneity": -1.0}),
        ("synthetic_quadratic", {"condition": 0.5}),
        ("synthetic_quadratic", {"samples": 3, "dim": 4}),
        ("synthetic_logistic", {"label_noise": "some"}),
        ("synthetic_digits", {"alpha": 0.0}),
    ],
)
def test_impossible_settings_are_refused(name: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        load_source(name, **options)


class TestDigitsOnDisk:
    OPTIONS: ClassVar[dict[str, Any]] = {"clients": 3_000, "samples": 8, "test_samples": 2, "shift": 0.3}

    @pytest.fixture(autouse=True)
    def _cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(storage.CACHE_VARIABLE, str(tmp_path))

    def test_they_are_those_in_memory(self) -> None:
        """Also where others were drawn into the cache before."""
        for change in ({}, {"noise": 0.1}, {"shift": 0.0}, {"alpha": 0.5}, {"classes": 3}, {"seed": 1}):
            options = {**self.OPTIONS, "clients": 300, **change}  # several blocks
            held, first, later = (synthetic_digits(**options, on_disk=disk) for disk in (False, True, True))
            for found in (first, later):
                assert torch.equal(found.x, held.x), change
                assert torch.equal(found.y, held.y)

    @pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no measure of resident memory")
    def test_a_federation_of_them_reads_no_samples(self) -> None:
        federation = build("synthetic_digits", options={**self.OPTIONS, "on_disk": True})
        assert self.resident() < 0.1 * federation.source.x.nbytes
        federation.source.take(torch.arange(len(federation.source)))
        assert self.resident() > 0.9 * federation.source.x.nbytes  # the measure sees what is read

    def test_a_cut_file_is_drawn_again(self, tmp_path: Path) -> None:
        whole = synthetic_digits(**self.OPTIONS, on_disk=True).x.clone()
        (file,) = tmp_path.rglob("samples.bin")
        os.truncate(file, file.stat().st_size - 4)
        assert torch.equal(synthetic_digits(**self.OPTIONS, on_disk=True).x, whole)

    def test_numbers_that_are_none_are_never_kept(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"float32.*1e.39"):
            synthetic_digits(**{**self.OPTIONS, "noise": 1e39}, on_disk=True)
        assert not list(tmp_path.rglob("samples.bin"))

    @staticmethod
    def resident() -> int:
        """Bytes of the file's mapping that are in memory."""
        maps = re.findall(r"samples\.bin\n.*?^Rss: +(\d+)", Path("/proc/self/smaps").read_text(), re.S | re.M)
        return sum(map(int, maps)) * 1024
