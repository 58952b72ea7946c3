"""FedIT with the mean of B·A in place of the means of B and of A."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from methods.plain import batches
from methods.reductions import Same, fedavg, nothing_personal
from methods.settings import Card, Row
from methods.small import CLASSES, SIZES, TRAIN, assert_close, federation
from tailorfl.core.method import make_method
from tailorfl.engines.make import make_engine
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
RANK = 2


class Adapted(nn.Module):
    """A frozen linear layer with LoRA: W x + B A x."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, CLASSES)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(64, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, CLASSES, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        out: Tensor = self.base(x) + self.lora_B["default"](self.lora_A["default"](x))
        return out


def product(state: dict[str, Tensor]) -> Tensor:
    return state[B].double() @ state[A].double()


def adapted() -> Model:
    return Model(Adapted, trainable=("lora_A*", "lora_B*"))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_rounds_are_those_of_plain_torch(engine: str, weights: str) -> None:
    """B·A is the best approximation of rank r of the mean product, and clients train on from it."""
    train = replace(TRAIN, momentum=0.0, weight_decay=0.0)
    method = make_method("fedit", {"mean_of": "product", "weights": weights})
    sim = Simulation(method, federation(), adapted(), train, engine=make_engine(engine), fraction=0.6)
    source = sim.federation.source
    base = {n: t for n, t in sim.model.module.state_dict().items() if n.startswith("base")}
    for _ in range(2):
        w = {n: sim.server["w"].get(n).clone() for n in (A, B)}
        ids, mean = sim.sample(sim.round), torch.zeros(CLASSES, 64, dtype=torch.float64)
        total = sum(SIZES[i] for i in ids) if weights == "samples" else len(ids)
        for i in ids:
            own = {n: t.clone().requires_grad_() for n, t in w.items()}
            for rows in batches(sim, i):
                x = source.take(rows).flatten(1)
                outputs = F.linear(x, base["base.weight"] + own[B] @ own[A], base["base.bias"])
                g = torch.autograd.grad(F.cross_entropy(outputs, source.y[rows]), list(own.values()))
                own = {
                    n: (t - train.lr * d).detach().requires_grad_()
                    for (n, t), d in zip(own.items(), g, strict=True)
                }
            share = (SIZES[i] if weights == "samples" else 1) / total
            mean += share * product({n: t.detach() for n, t in own.items()})
        u, s, vt = torch.linalg.svd(mean)
        assert s[RANK] > 1e-6 * s[0], "the test says nothing where the mean has no more than the rank"
        sim.step()
        found = {n: sim.server["w"].get(n) for n in (A, B)}
        nearest = u[:, :RANK] * s[:RANK] @ vt[:RANK]
        torch.testing.assert_close(product(found), nearest, atol=1e-6, rtol=1e-4)
        factors = found[A].double() @ found[A].double().T
        torch.testing.assert_close(
            factors, factors[0, 0] * torch.eye(RANK, dtype=torch.float64), atol=1e-5, rtol=1e-5
        )


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


def test_by_default_factors_are_averaged() -> None:
    sims = [
        Simulation(make_method(name, {"weights": "uniform"}), federation(), adapted(), TRAIN)
        for name in ("fedit", "fedavg")
    ]
    for sim in sims:
        sim.step()
    assert_close(dict(sims[0].server["w"].items()), dict(sims[1].server["w"].items()))
