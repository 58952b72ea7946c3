"""FedIT with the mean of B·A in place of the means of B and of A."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from methods.reductions import Same, fedavg, nothing_personal
from methods.settings import Card, Row
from methods.small import CLASSES, TRAIN, federation
from tailorfl.core.method import make_method
from tailorfl.errors import ConfigError
from tailorfl.methods.fedit import lora_pairs, mean_of_products
from tailorfl.models.functional import Model
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole

CONTRACTS = {
    "fedit": Row(
        Card(whole, whole, whole, False, True),
        same=(
            fedavg("T07"),
            Same("one client", {}, "centralized", said=True, data={"sizes": (11,)}),
        ),
    ),
    "fedlora": Row(
        Card(whole, whole, whole, True, True),
        {"ft_epochs": 1},
        same=(
            Same("T07", {"ft_epochs": 3}, "fedit"),
            nothing_personal("T07", "fedit", ft_epochs=0),
            Same("T07", {"ft_epochs": 0}, "fedit", said=True),
        ),
    ),
}


A, B = "lora_A.default.weight", "lora_B.default.weight"


def product(state: dict[str, Tensor]) -> Tensor:
    return state[B].double() @ state[A].double()


def test_one_product_is_kept_and_equal_ones_too() -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(1, 3, 7, generator=rng), torch.randn(1, 5, 3, generator=rng)
    for clients in (1, 4):
        new_a, new_b = mean_of_products(
            a.repeat(clients, 1, 1), b.repeat(clients, 1, 1), torch.full((clients,), 1 / clients)
        )
        torch.testing.assert_close(new_b @ new_a, b[0] @ a[0], atol=1e-5, rtol=1e-5)
        assert float(new_a.norm()) == pytest.approx(float(a.norm()), rel=1e-5)


def test_the_mean_of_products_is_not_the_product_of_means() -> None:
    """b₁a₁ = diag(2, 0) and b₂a₂ = diag(0, 2), of rank 1 each, with means whose product is ½(1 1; 1 1)."""
    a, b = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), torch.tensor([[[2.0], [0.0]], [[0.0], [2.0]]])
    one = mean_of_products(a, b, torch.tensor([0.75, 0.25]))
    torch.testing.assert_close(one[1] @ one[0], torch.tensor([[1.5, 0.0], [0.0, 0.0]]), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(b.mean(0) @ a.mean(0), torch.full((2, 2), 0.5))


def test_before_b_has_learned_a_stays_alive() -> None:
    rng = torch.Generator().manual_seed(0)
    a = torch.randn(2, 3, 7, generator=rng)
    new_a, new_b = mean_of_products(a, torch.zeros(2, 5, 3), torch.tensor([0.5, 0.5]))
    assert not new_b.any()
    assert (new_a.norm(dim=1) > 0.5 * a.norm(dim=2).mean()).all()


def test_more_rank_than_outputs() -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 6, 4, generator=rng), torch.randn(2, 3, 6, generator=rng)
    new_a, new_b = mean_of_products(a, b, torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(new_b @ new_a, (b @ a).mean(0), atol=1e-5, rtol=1e-5)


def test_what_products_need() -> None:
    assert lora_pairs(["x.lora_A.default.weight", "x.lora_B.default.weight", "head.weight"]) == (
        ("x.lora_A.default.weight", "x.lora_B.default.weight"),
    )
    with pytest.raises(ConfigError, match="can take no step of its own"):
        make_method("fedit", {"mean_of": "product", "server": {"kind": "adam"}})
    plain = Model(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES)))
    with pytest.raises(ConfigError, match="the model trains none"):
        Simulation(make_method("fedlora", {"mean_of": "product"}), federation(), plain, TRAIN)
