"""Which public samples the server's distillation sees, when it stops early, and which of its models it keeps."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from methods.settings import make
from methods.small import CLASSES, PUBLIC, assert_close, assert_same, federation, shared, simulation
from tailorfl.core import server_training
from tailorfl.core.context import Context
from tailorfl.core.server_training import ServerDistillation
from tailorfl.data.source import Source
from tailorfl.training import tree

Rows = list[list[int]]


def context(seed: int = 0, samples: int = 12) -> Context:
    """That of FedDF on the tiny federation, with validation samples on the server."""
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.normal(size=(samples, 1, 8, 8)).astype(np.float32))
    y = torch.from_numpy(rng.integers(0, CLASSES, samples))
    held = Source("held", x, y, "classification", CLASSES)
    return replace(simulation("feddf", seed=seed).context, validation=held)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """The public rows of every step."""
    rows: Rows = []
    real = Source.take_augmented

    def take(source: Source, index: Tensor, *key: Any) -> Tensor:
        rows.append(index.tolist())
        return real(source, index, *key)

    monkeypatch.setattr(Source, "take_augmented", take)
    return rows


def targets(seed: int = 1) -> Tensor:
    return torch.randn(PUBLIC, CLASSES, generator=torch.Generator().manual_seed(seed)).softmax(1)


def run(distil: ServerDistillation, of: Context, round: int = 0) -> dict[str, Tensor]:
    return tree.tensors(distil.distil(of.init, targets(), of, round))


class TestBatches:
    def test_every_pass_goes_through_all_public_samples_once_in_an_order_of_its_own(self, seen: Rows) -> None:
        """Six samples in pairs: a pass is three steps, and the eighth step is within the third pass.

        Rounds and seeds have orders of their own, and none is that of the rows.
        """
        runs = []
        for round, seed in ((0, 0), (1, 0), (0, 1), (0, 0)):
            run(ServerDistillation(steps=8, batch_size=2), context(seed), round)
            assert [len(rows) for rows in seen] == [2] * 8
            runs.append(tuple(chain.from_iterable(seen)))
            seen.clear()
        for rows in runs:
            first, second, third = (rows[k * PUBLIC : (k + 1) * PUBLIC] for k in range(3))
            assert sorted(first) == sorted(second) == list(range(PUBLIC))
            assert len(set(third)) == 4
            assert first not in (second, tuple(range(PUBLIC)))
        assert len(set(runs[:3])) == 3
        assert runs[3] == runs[0]

    def test_a_batch_is_never_larger_than_the_public_set(self, seen: Rows) -> None:
        run(ServerDistillation(steps=2, batch_size=100), context())
        assert [sorted(rows) for rows in seen] == [list(range(PUBLIC))] * 2


def by_hand(of: Context, rows: Rows, steps: int, lr: float) -> dict[str, Tensor]:
    """Adam with its rate by cosine over `steps`, on the given batches, in plain torch."""
    params = {n: t.clone().requires_grad_() for n, t in tree.tensors(of.init).items()}
    optimizer = torch.optim.Adam(list(params.values()), lr=lr)
    assert of.public is not None
    for step, batch in enumerate(rows):
        optimizer.param_groups[0]["lr"] = lr * (1 + np.cos(np.pi * step / steps)) / 2
        optimizer.zero_grad()
        p, log_q = targets()[batch], of.model(params, of.public.x[batch]).log_softmax(1)
        (p * (p.log() - log_q)).sum(1).mean().backward()
        optimizer.step()
    return {n: t.detach() for n, t in params.items()}


class TestEarlyStopping:
    """With validation losses as given: a look before the first step, one every `check_every` steps, one at the end."""

    @staticmethod
    def losses(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> list[float]:
        left = list(values)
        fake = {**server_training.LOSSES, "classification": lambda *_: torch.tensor(left.pop(0))}
        monkeypatch.setattr(server_training, "LOSSES", fake)
        return left

    @pytest.mark.parametrize(
        ("values", "patience", "stopped", "best"),
        [
            ([3, 2, 1, 4, 4, 4, 4, 4, 4, 4, 4], 9, 15, 6),  # lowest after step 6, none better in 9 more
            ([3, 2, 1, 4, 4, 4, 4, 4, 4, 4, 4], 3, 9, 6),
            ([3, 4, 4, 4, 2, 2, 2, 2, 2, 2, 2], 6, 6, 0),  # what would have come later does not count
            ([3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3], 6, 6, 0),  # as good is not better
            ([9, 8, 7, 6, 5, 4, 3, 2, 1, 0.5, 0], 3, 30, 30),  # always better: to the end
            ([9, 1, 7, 6, 5, 4, 3, 2, 1.5, 1.5, 0.5], 30, 30, 30),  # the end is looked at, too
            ([9, 1, 7, 6, 5, 4, 3, 2, 1.5, 1.5, 1.5], 30, 30, 3),
        ],
    )
    def test_it_stops_when_no_look_within_the_patience_was_better_and_keeps_the_best(
        self, values: list[float], patience: int, stopped: int, best: int, seen: Rows,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        self.losses(monkeypatch, values)
        options: dict[str, Any] = {"select": "best", "patience": patience, "check_every": 3}
        of = context()
        model = run(ServerDistillation(steps=30, lr=0.05, batch_size=4, **options), of)
        assert len(seen) == stopped
        assert_close(model, by_hand(of, seen[:best], 30, 0.05), atol=1e-5)

    def test_without_it_nobody_looks_and_the_last_model_is_kept(
        self, seen: Rows, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.losses(monkeypatch, [])
        of = context()
        found = run(ServerDistillation(steps=6, lr=0.05, batch_size=4, patience=1, check_every=1), of)
        assert len(seen) == 6
        assert_close(found, by_hand(of, seen, 6, 0.05), atol=1e-5)

    def test_the_loss_is_that_of_the_validation_samples(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Towards the validation labels' opposite the start is the best; towards what they are, the end is."""
        of = context(samples=PUBLIC)
        assert of.public is not None
        assert of.validation is not None
        labels = torch.arange(PUBLIC) % CLASSES
        of = replace(of, validation=replace(of.validation, x=of.public.x, y=labels))
        right = torch.nn.functional.one_hot(labels, CLASSES).float() * 0.98 + 0.005
        distil = ServerDistillation(steps=20, lr=0.02, select="best", patience=20, check_every=5)
        wrong = right.roll(1, dims=1)
        assert_same(tree.tensors(distil.distil(of.init, wrong, of, 0)), tree.tensors(of.init))
        last = distil.model_copy(update={"select": "last"})
        best, end = (tree.tensors(d.distil(of.init, right, of, 0)) for d in (distil, last))
        assert_same(best, end)


def test_teachers_are_of_the_public_samples_in_their_order() -> None:
    public = federation().public
    assert public is not None
    of = context()
    found = ServerDistillation().targets([(of.model, of.init.unsqueeze(0))], public)
    torch.testing.assert_close(found, of.model(of.init, public.x).softmax(1))


@pytest.mark.parametrize(
    ("rounds", "active"), [(None, [True] * 3), (2, [True, True, False]), (0, [False] * 3)]
)
def test_it_is_active_in_so_many_first_rounds(rounds: int | None, active: list[bool]) -> None:
    assert [ServerDistillation(rounds=rounds).active(k) for k in range(3)] == active
    assert not ServerDistillation(steps=0, rounds=rounds).active(0)


def test_a_single_output_is_distilled_as_two_classes() -> None:
    """The softmax of one output would always be 1, and nothing would be learnt."""
    output, teacher = torch.tensor([[0.3], [-1.2]]), torch.tensor([[0.9], [0.4]])
    distil = ServerDistillation(temperature=2.0)
    both = distil.loss(torch.cat([torch.zeros_like(output), output], 1), torch.cat([1 - teacher, teacher], 1))
    torch.testing.assert_close(distil.loss(output, teacher), both)
    assert float(both) > 0.01
    data, public = federation(), federation().public
    assert public is not None
    data = replace(
        data,
        source=replace(data.source, y=data.source.y % 2, task="binary", outputs=1),
        public=replace(public, task="binary", outputs=1),
    )
    learnt, averaged = (
        shared(simulation(make("feddf", distil={"steps": steps, "lr": 0.1}), "logistic", data=data, rounds=1))
        for steps in (3, 0)
    )
    assert any(not torch.allclose(t, averaged[n], atol=1e-3) for n, t in learnt.items())
