"""AdamW and decaying rates in `Client.fit` are torch's own, for one client and for a cohort of unequal ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tensordict import TensorDict
from torch import Tensor, nn

from tailorfl.errors import ConfigError
from tailorfl.models.functional import Model
from tailorfl.runs.build import check
from tailorfl.settings.loading import load
from tailorfl.settings.train import TrainSettings
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort, TrainConfig
from tailorfl.training.plan import Length
from tailorfl.training.update import PLAIN, Optimizer
from training.cohorts import (
    SIZES,
    alone,
    assert_states,
    batches,
    cohort_of,
    engines,
    fit,
    model_of,
    module_at,
    run,
    source,
    spread,
)

# AdamW divides by the root of a mean square, which magnifies the rounding of small gradients.
CLOSE = {"rtol": 1e-3, "atol": 2e-5}
RATE = 3e-3


def setting(**train: object) -> tuple[Cohort, TensorDict]:
    data = source(sum(SIZES))
    model = model_of("mlp", data, hidden=(8, 6))
    return cohort_of(model, data, **{"optimizer": "adamw", "lr": RATE, **train}), model.init(1)


def by_torch(
    cohort: Cohort,
    start: TensorDict,
    steps: Sequence[tuple[Tensor, Tensor]],
    *,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    linear: bool = False,
    clip: float | None = None,
    prox: tuple[float, TensorDict] | None = None,
    lr: float = RATE,
    **options: Any,
) -> dict[str, Tensor]:
    """State after a plain loop with an optimizer of torch, and LambdaLR where the rate decays."""
    module = module_at(cohort, start)
    rule = optimizer(module.parameters(), lr=lr, **{"weight_decay": 0.0, **options})  # type: ignore[call-arg]
    schedule = torch.optim.lr_scheduler.LambdaLR(rule, lambda k: 1 - k / len(steps) if linear else 1.0)
    for x, y in steps:
        rule.zero_grad()
        loss = cohort.loss(module(x), y, None)
        if prox is not None:
            way = (p - prox[1][n] for n, p in module.named_parameters())
            loss = loss + 0.5 * prox[0] * sum(w.square().sum() for w in way)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        rule.step()
        schedule.step()
    return {n: t.detach().clone() for n, t in module.state_dict().items()}


@engines
@pytest.mark.parametrize("linear", [False, True], ids=["constant", "linear"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_fit_is_torch_adamw_over_many_steps(engine, linear, decay):
    """Clients of 7, 3, 12 and 5 samples take 12, 6, 18 and 12 steps, each with the decay of its own number."""
    cohort, start = setting(weight_decay=decay, schedule="linear" if linear else "constant")
    found = fit(engine, cohort, start, epochs=6)
    for i in range(len(SIZES)):
        steps = batches(cohort, i, epochs=6)
        expected = by_torch(cohort, start, steps, linear=linear, weight_decay=decay)
        assert_states(found[i], expected, **CLOSE)


@engines
def test_pull_and_clipping_come_before_the_optimizer(engine):
    cohort, start = setting(clip=0.2, weight_decay=0.1, schedule="linear")
    starts = spread(start, len(SIZES))
    lams = torch.tensor([0.5, 2.0, 0.0, 1.0])
    states = TensorDict({"v": starts, "lam": lams}, batch_size=[len(SIZES)])

    def local(client, state, received):
        return client.fit(state["v"], prox=(state["lam"], received), length=Length(epochs=2))

    found = run(engine, cohort, local, states, start)
    for i, lam in enumerate(lams.tolist()):
        expected = by_torch(
            cohort, starts[i], batches(cohort, i, epochs=2),
            linear=True, clip=0.2, weight_decay=0.1, prox=(lam, start),
        )  # fmt: skip
        assert_states(found[i], expected, **CLOSE)


class Normed(nn.Module):
    """Batch norm behind layers without a bias, whose gradient would be nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 5] -> [batch, 3]."""
        return self.head(torch.tanh(self.norm(self.first(x))))


@engines
def test_batch_norm_with_uneven_batches(engine):
    """Clients whose batches differ in size step one after another, each with its own memory."""
    data = source(sum(SIZES))
    cohort = cohort_of(Model(Normed), data, optimizer="adamw", lr=RATE, schedule="linear", weight_decay=0.1)
    start = cohort.model.init(1)
    found = fit(engine, cohort, start, epochs=4)
    for i in range(len(SIZES)):
        expected = by_torch(cohort, start, batches(cohort, i, epochs=4), linear=True, weight_decay=0.1)
        assert_states(found[i], expected, rtol=5e-3, atol=5e-4)


@engines
@pytest.mark.parametrize("extra", [{}, {"momentum": 0.8, "weight_decay": 0.05}], ids=["plain", "momentum"])
def test_sgd_decays_too(engine, extra):
    cohort, start = setting(optimizer="sgd", schedule="linear", lr=0.1, **extra)
    found = fit(engine, cohort, start, epochs=3)
    for i in range(len(SIZES)):
        steps = batches(cohort, i, epochs=3)
        expected = by_torch(cohort, start, steps, optimizer=torch.optim.SGD, linear=True, lr=0.1, **extra)
        assert_states(found[i], expected)


@engines
def test_repeated_steps_count_for_the_decay(engine):
    cohort, start = setting(schedule="linear")
    found = fit(engine, cohort, start, repeat=3)
    for i in range(len(SIZES)):
        steps = [batch for batch in batches(cohort, i) for _ in range(3)]
        assert_states(found[i], by_torch(cohort, start, steps, linear=True), **CLOSE)


@engines
def test_a_limit_shortens_the_decay(engine):
    """A newcomer that may take 2 steps decays over 2, a client with one batch over 1."""
    cohort, start = setting(schedule="linear")
    limited = cohort_of(cohort.model, cohort.source, limit=2, optimizer="adamw", lr=RATE, schedule="linear")
    found = fit(engine, limited, start, epochs=1)
    for i in range(len(SIZES)):
        steps = batches(cohort, i)[:2]
        assert_states(found[i], by_torch(cohort, start, steps, linear=True), **CLOSE)


@engines
def test_a_rate_of_each_clients_own_decays(engine):
    cohort, start = setting(schedule="linear", weight_decay=0.1)
    rates = torch.tensor([3e-3, 1e-3, 5e-3, 2e-3])
    states = TensorDict({"rate": rates}, batch_size=[len(SIZES)])
    found = run(
        engine,
        cohort,
        lambda c, state, w: c.fit(w, length=Length(epochs=2), optimizer=Optimizer(lr=state["rate"])),
        states,
        start,
    )
    for i, rate in enumerate(rates.tolist()):
        steps = batches(cohort, i, epochs=2)
        assert_states(
            found[i], by_torch(cohort, start, steps, linear=True, lr=rate, weight_decay=0.1), **CLOSE
        )


@engines
def test_every_fit_starts_a_fresh_optimizer_and_schedule(engine):
    cohort, start = setting(schedule="linear")

    def by_pieces(client, _, w):
        return client.fit(client.fit(w, length=Length(steps=1)), length=Length(steps=2, first=1))

    found = run(engine, cohort, by_pieces, received=start)
    for i in range(len(SIZES)):
        steps = batches(cohort, i, epochs=None, steps=3)
        halfway = TensorDict(by_torch(cohort, start, steps[:1], linear=True))
        assert_states(found[i], by_torch(cohort, halfway, steps[1:], linear=True), **CLOSE)


@engines
def test_plain_steps_are_plain_under_every_rule(engine):
    cohort, start = setting(schedule="linear", weight_decay=0.3)
    plain = cohort_of(cohort.model, cohort.source, lr=RATE)
    assert_states(fit(engine, cohort, start, **PLAIN), dict(tree.leaves(fit(engine, plain, start))))


def test_momentum_belongs_to_sgd():
    cohort, start = setting()
    with pytest.raises(ConfigError, match="beside optimizer adamw"):
        TrainConfig(optimizer="adamw", momentum=0.9)
    with pytest.raises(ConfigError, match="beside optimizer adamw"):
        alone(cohort).fit(start, optimizer=Optimizer(momentum=0.9))
    with pytest.raises(ConfigError, match="Did you mean 'adamw'"):
        TrainConfig(optimizer="adam")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="constant, linear"):
        TrainConfig(schedule="cosine")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match=r"momentum = 0\.5 beside optimizer adamw"):
        TrainSettings(optimizer="adamw", momentum=0.5)


def test_settings_of_experiment_and_method_are_checked_together():
    config = load(None, ["train.momentum=0.9", "method=fedavg", "method.train.optimizer=adamw"])
    with pytest.raises(ConfigError, match="beside optimizer adamw"):
        check(config)
    check(load(config, ["method.train.momentum=0"]))
