"""Private training equals opacus' per-sample machinery on the same batches, with the same noise put into it."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from tailorfl.models.dropout import fold_key
from tailorfl.training.cohort import Cohort
from tailorfl.training.plan import Length
from tailorfl.training.sample_privacy import SampleDP, normal
from training.cohorts import alone, assert_states, batches, cohort_of, model_of, module_at, source

pytestmark = pytest.mark.skipif(
    find_spec("opacus") is None, reason="compares with opacus: pip install 'tailorfl[privacy]'"
)

SIZES = (11, 6)
"""In batches of 4 the last is smaller."""


def noise(cohort: Cohort, position: int, step: int, shapes: list[torch.Size]) -> list[Tensor]:
    """The standard normal numbers of a step, in the order of parameters."""
    key = torch.from_numpy(cohort.keys((position,), "train/noise").astype(np.int64))[0] + step
    key = fold_key(fold_key(key, 0), 0)
    return [normal(key, number, shape) for number, shape in enumerate(shapes)]


def by_opacus(cohort: Cohort, position: int, start: object, epochs: int) -> dict[str, Tensor]:
    """The model after opacus' DP-SGD on the client's batches."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    dp = cohort.config.dp
    assert dp is not None
    module = GradSampleModule(module_at(cohort, start))  # type: ignore[arg-type]
    optimizer = DPOptimizer(
        torch.optim.SGD(
            module.parameters(), lr=cohort.config.lr, momentum=cohort.config.momentum,
            weight_decay=cohort.config.weight_decay,
        ),
        noise_multiplier=0.0,
        max_grad_norm=dp.clip,
        expected_batch_size=4,
    )  # fmt: skip
    for step, (x, y) in enumerate(batches(cohort, position, epochs=epochs)):
        optimizer.zero_grad()
        cohort.loss(module(x), y, None).backward()
        optimizer.expected_batch_size = len(x)
        optimizer.clip_and_accumulate()
        drawn = noise(cohort, position, step, [p.shape for p in optimizer.params])
        for p, z in zip(optimizer.params, drawn, strict=True):
            p.summed_grad += z * (dp.noise * dp.clip)
        optimizer.add_noise()
        optimizer.scale_grad()
        optimizer.original_optimizer.step()
    return {n.removeprefix("_module."): t.detach().clone() for n, t in module.state_dict().items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sigma", [0.0, 0.8])
@pytest.mark.parametrize("clip", [0.2, 1e3])
@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_private_training_is_that_of_opacus(name: str, clip: float, sigma: float) -> None:
    data = source(sum(SIZES), (1, 28, 28) if name == "lenet" else (5,))
    model = model_of(name, data, **({"hidden": (8,)} if name == "mlp" else {}))
    cohort = cohort_of(
        model, data, SIZES, dp=SampleDP(clip, sigma if clip < 1 else sigma / clip, "shuffle"), momentum=0.5,
        weight_decay=0.01, lr=0.05,
    )  # fmt: skip
    start = model.init(3)
    for position in range(len(SIZES)):
        ours = alone(cohort, position).fit(start, length=Length(epochs=3))
        theirs = by_opacus(cohort, position, start, epochs=3)
        assert_states(ours, theirs, rtol=1e-5, atol=1e-5)
        assert any(float((ours[n] - start[n]).abs().max()) > 1e-3 for n in start.keys())  # noqa: SIM118
