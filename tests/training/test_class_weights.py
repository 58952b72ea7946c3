"""Class weights: what a class counts, and that training descends the weighed loss (every method: `references`)."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import tailorfl
from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError
from tailorfl.rounds.client_privacy import ClientDP
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.objective import balanced, class_counts
from tailorfl.training.sample_privacy import SampleDP
from training.cohorts import ENGINES, cohort_of, fit, model_of, run


def binary(samples: int = 27, positive: float = 0.2) -> Source:
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 4, generator=rng)
    return Source("rare", x, (torch.rand(samples, generator=rng) < positive).long(), "binary", 1)


def weighed(data: Source, **more: Any) -> Any:
    """A cohort of clients with their own class weights."""
    cohort = cohort_of(model_of("logistic", data), data, **more)
    return replace(cohort, class_weights=balanced(class_counts(data, cohort.members)))


def test_classes_count_what_scikit_learn_says() -> None:
    rng = np.random.default_rng(0)
    for classes in (2, 3, 7):
        y = rng.integers(0, classes, 40)
        counts = torch.from_numpy(np.bincount(y, minlength=classes)).float()
        wanted = compute_class_weight("balanced", classes=np.arange(classes), y=y)
        assert balanced(counts).numpy() == pytest.approx(wanted, rel=1e-6)


def test_classes_that_do_not_occur_leave_all_weights_finite() -> None:
    found = balanced(torch.tensor([[6.0, 2.0, 0.0], [0.0, 5.0, 0.0], [0.0, 0.0, 0.0]]))
    wanted = np.array([[8 / 12, 2.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    assert found.numpy() == pytest.approx(wanted)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_binary_task_descends_the_weighed_loss(engine: str) -> None:
    """Batches of 4 of clients with 7, 3, 12 and 5 samples, so some are padded, and some of one class."""
    data, epochs, lr = binary(), 2, 0.3
    cohort = weighed(data, batch_size=4, lr=lr, epochs=epochs)
    start = cohort.model.init(0)
    found = fit(ENGINES[engine], cohort, start)
    for k, rows in enumerate(cohort.members):
        mine = data.y[torch.from_numpy(rows)].numpy()
        there = np.unique(mine)
        counted = np.ones(2)
        counted[there] = compute_class_weight("balanced", classes=there, y=mine)
        weight, bias = (start.get(n).clone().double() for n in cohort.model.parameters)
        plan = cohort.plan((k,), "train", 4, epochs, None, 0)
        for at in range(plan.rows.shape[1]):
            batch = torch.from_numpy(plan.rows[0, at, : plan.count[0, at]])
            if not len(batch):
                continue
            p = [t.requires_grad_() for t in (weight, bias)]
            logits = data.x[batch].double() @ p[0].T + p[1]
            y = data.y[batch]
            losses = binary_cross_entropy_with_logits(
                logits[:, 0], y.double(), torch.from_numpy(counted)[y], reduction="none"
            )
            gradient = torch.autograd.grad(losses.mean(), p)
            weight, bias = (t.detach() - lr * g for t, g in zip(p, gradient, strict=True))
        for name, wanted in zip(cohort.model.parameters, (weight, bias), strict=True):
            assert found[k].get(name).double().numpy() == pytest.approx(wanted.numpy(), abs=1e-5)


def test_what_clients_say_of_their_loss_is_weighed_too() -> None:
    data = binary()
    cohort = weighed(data)
    start = cohort.model.init(0)

    def look(client: Any, _: Any, received: Any) -> Any:
        summed = client.summed(received, lambda seen: seen.loss.expand(len(seen.y)))
        return type(received)({"loss": client.loss(received), "sum": summed})

    logits = cohort.model({n: start.get(n) for n in cohort.model.sizes}, data.x)[:, 0]
    for engine in ENGINES.values():
        found = run(engine, cohort, look, received=start)
        for k, rows in enumerate(cohort.members):
            at = torch.from_numpy(rows)
            w: Tensor = cohort.class_weights[k][data.y[at]]
            wanted = binary_cross_entropy_with_logits(logits[at], data.y[at].float(), w)
            assert float(found["loss"][k]) == pytest.approx(float(wanted), rel=1e-5)
            assert float(found["sum"][k]) == pytest.approx(float(wanted) * len(rows), rel=1e-5)


def federation(data: Source) -> Federation:
    rows = np.arange(len(data), dtype=np.int64)
    parts = np.array_split(rows, 3)
    empty = (rows[:0],) * 3
    return Federation(data, tuple(parts), empty, empty, ("a", "b", "c"), 3)


def simulation(
    data: Source, wanted: Any, dp: SampleDP | None = None, of_client: ClientDP | None = None
) -> Any:
    train = TrainConfig(class_weights=wanted, dp=dp)
    method = make_method("local" if of_client is None else "fedavg", {})
    return Simulation(
        method, federation(data), model_of("logistic", data), train, client_dp=of_client, weights="uniform"
    )


def test_what_has_no_class_or_privacy_does_not_cover_is_refused() -> None:
    regression = Source("prices", torch.randn(9, 2), torch.randn(9, 1), "regression", 1)
    with pytest.raises(ConfigError, match=r"class_weights=client .* task of regression"):
        simulation(regression, "client")
    sample, client = SampleDP(1.0, 1.0, "poisson"), ClientDP(1.0, 1.0)
    for wanted in ("client", "federated"):
        with pytest.raises(ConfigError, match=r"sample-level privacy does not cover"):
            simulation(binary(), wanted, dp=sample)
    with pytest.raises(ConfigError, match=r"client-level\s+privacy does not cover"):
        simulation(binary(), "federated", of_client=client)
    simulation(binary(), "client", of_client=client).step()


def test_a_method_with_a_loss_of_its_own_says_so(tmp_path: Any) -> None:
    logging.disable(logging.CRITICAL)
    with pytest.raises(ConfigError, match=r"puts a loss of its own in its place"):
        tailorfl.run(
            method="fedrod",
            data={"clients": 2, "samples": 60},
            train={"steps": 1, "class_weights": "client"},
            rounds=1,
            seeds=1,
            out=tmp_path / "run",
        )
    logging.disable(logging.NOTSET)


def test_held_out_clients_count_their_own_classes_or_are_told() -> None:
    """`federated` counts clients that train, never those that are held out."""
    data = binary()
    parts = federation(data)
    late = replace(parts, num_clients=2)
    sim = Simulation(
        make_method("local", {}), late, model_of("logistic", data), TrainConfig(class_weights="federated")
    )
    counts = torch.bincount(data.y[torch.from_numpy(np.concatenate(parts.train[:2]))], minlength=2)
    told = sim.cohort((2,), own=True).class_weights
    assert told is not None
    assert told[0].tolist() == pytest.approx((counts.sum() / (2 * counts)).tolist())
