"""What is computed at once and how it lies in memory, of which no number depends: losses, images, channels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from methods.settings import CLASSES, make
from methods.small import assert_close, assert_same, everything, federation, simulation
from tailorfl.core.client import Client
from tailorfl.data.source import NO_TARGET, Source
from tailorfl.engines.base import Inference
from tailorfl.engines.choice import make_engine
from tailorfl.engines.devices import HOST
from tailorfl.errors import DataError
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import batches, tree
from tailorfl.training import cohort as cohorts
from tailorfl.training.cohort import TrainConfig, rows_at_once
from tailorfl.training.inference import CACHED_FLOATS
from training.cohorts import SIZES, cohort_of, deal, engines, model_of, run, source

LENGTH, WORDS = 7, 11
SIDE, IMAGES = 16, 400
TWO_PASSES = TrainConfig(epochs=2, batch_size=4, lr=0.05, momentum=0.5)

# -- tokens --------------------------------------------------------------------------------------------------


def responses(samples: int = 6) -> Source:
    """Prompts of 1 to 5 tokens, and the rest a response."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, WORDS, (samples, LENGTH), generator=rng)
    start = torch.randint(1, LENGTH - 1, (samples, 1), generator=rng)
    y = torch.where(torch.arange(LENGTH) >= start, x, NO_TARGET)
    return Source("bigrams", x, y, "generation", WORDS)


def bigram() -> nn.Module:
    """The logits of the next token from the one before it."""
    return nn.Sequential(nn.Embedding(WORDS, WORDS))


def test_a_token_counts_as_wide_as_a_model_makes_it() -> None:
    x, labels = torch.zeros(3, 64, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    text = Source("text", x, labels, "classification", 2)
    assert rows_at_once(text) == cohorts.INPUT_BYTES // (4 * 64 * 384)
    assert rows_at_once(text, 10) == cohorts.INPUT_BYTES // (4 * 10 * 64 * 384)
    table = Source("table", torch.zeros(3, 64), labels, "classification", 2)
    assert rows_at_once(table) == cohorts.INPUT_BYTES // (4 * 64)
    y = torch.full((3, 64), NO_TARGET)
    y[:, -1] = 0
    assert rows_at_once(Source("words", x, y, "generation", 30_000)) == 1
    assert rows_at_once(Source("words", x, y, "generation", 259)) == rows_at_once(text)


@engines
@pytest.mark.parametrize("part", ["train", "val"])
def test_a_clients_loss_in_pieces_is_its_loss(
    engine: Any, part: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, rows = responses(20), torch.arange(20).numpy()
    train, val = (rows[:4], rows[4:13], rows[13:14]), (rows[14:15], rows[15:16], rows[16:17])
    cohort = cohort_of(Model(bigram), data, members=train, val=val)
    start = cohort.model.init(0)

    def losses() -> Tensor:
        def local(client: Client, _: Any, received: TensorDict) -> TensorDict:
            return TensorDict({"loss": client.loss(received, part)}, batch_size=[])

        return run(engine, cohort, local, received=start)["loss"]

    whole = losses()
    for client, of_client in enumerate(train if part == "train" else val):
        taken = torch.from_numpy(of_client)
        logits = start["0.weight"][data.x[taken]]
        each = [
            F.cross_entropy(o[:-1], t[1:], ignore_index=NO_TARGET)
            for o, t in zip(logits, data.y[taken], strict=True)
        ]
        assert float(whole[client]) == pytest.approx(float(torch.stack(each).mean()), rel=1e-5)
    for number in (1, 2, 4):
        monkeypatch.setattr(cohorts, "INPUT_BYTES", number * 4 * 3 * LENGTH * cohorts.TOKEN_WIDTH)
        assert rows_at_once(data, 3) == number
        torch.testing.assert_close(losses(), whole)


class PerSample(nn.Module):
    """A network that cannot read an empty batch, as attention cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).view(len(x), -1, 3).mean(1)


@engines
def test_a_loss_without_samples_is_zero(engine: Any) -> None:
    data, none = source(sum(SIZES)), [torch.arange(0).numpy()] * len(SIZES)
    cohort = cohort_of(Model(PerSample), data, val=none)

    def local(client: Client, _: Any, received: TensorDict) -> TensorDict:
        return TensorDict({"loss": client.loss(received, "val")}, batch_size=[])

    assert run(engine, cohort, local, received=cohort.model.init(0))["loss"].tolist() == [0.0] * len(SIZES)


@engines
def test_a_sample_of_no_client_is_in_no_result(engine: Any) -> None:
    """Features of such samples are not computed, and not numbers, where a front is computed on a GPU."""
    data = source(1 + sum(SIZES))
    data.x[0] = torch.nan
    rows = [r + 1 for r in deal(SIZES)]
    cohort = cohort_of(model_of("mlp", data), data, members=rows, val=[r[:-3] for r in rows])

    def local(client: Client, _: Any, received: TensorDict) -> TensorDict:
        total = client.summed(received, lambda seen: seen.outputs)
        return TensorDict({"loss": client.loss(received, "val"), "sum": total}, batch_size=[])

    found = run(engine, cohort, local, received=cohort.model.init(0))
    assert all(t.isfinite().all() for t in found.values())


def test_a_source_of_responses_is_checked() -> None:
    source = responses()
    x, y = source.x, source.y
    assert torch.equal(source.take(torch.tensor([[3, 0]])), x[[3, 0]][None])
    assert source.strata.tolist() == [0] * len(x)
    no_repetition = "y of a generation task must equal x in the response"
    changes: list[tuple[dict[str, Any], str]] = [
        ({"y": torch.full_like(y, NO_TARGET)}, no_repetition),
        ({"y": x}, no_repetition),
        ({"y": torch.where(y == NO_TARGET, y, (y + 1) % WORDS)}, no_repetition),
        ({"outputs": WORDS - 1}, no_repetition),
        ({"x": x.float()}, "needs int64 token ids as x"),
        ({"x": x - 1}, r"int64 x are token ids \[samples, length\] counted from 0"),
    ]
    for change, message in changes:
        with pytest.raises(DataError, match=message):
            replace(source, **change)


# -- images --------------------------------------------------------------------------------------------------


class Convolutions(TorchDispatchMode):
    """Notes of every convolution (images at once, whether channels come last in memory)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, bool]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.convolution.default:
            x = args[0]
            self.seen.append((len(x), x.stride(1) == 1 and x.stride(3) == x.shape[1]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_convolutions_look_at_few_images_with_channels_last(engine: str) -> None:
    x = torch.randn(IMAGES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    source = Source("random", x, torch.zeros(IMAGES, dtype=torch.int64), "classification", 3)
    model = Model(lambda: build("cnn2", source.input_shape, 3))
    states = [model.init(seed) for seed in range(3)]
    request = Inference(model, torch.stack(states), source, torch.arange(IMAGES))
    with torch.no_grad(), Convolutions() as noted:
        outputs = make_engine(engine).predict(request)
    few = CACHED_FLOATS // SIDE**2
    assert few < IMAGES  # or nothing is cut here
    assert {last for _, last in noted.seen} == {True}
    assert max(images for images, _ in noted.seen) == few
    # Two layers, three models, all images once.
    assert sum(images for images, _ in noted.seen) == 2 * 3 * IMAGES
    for of_model, state in zip(outputs, states, strict=True):
        module = build("cnn2", source.input_shape, 3).eval()
        module.load_state_dict(dict(tree.leaves(state)))
        with torch.no_grad():
            torch.testing.assert_close(of_model, module(source.x), atol=1e-5, rtol=1e-4)


class Viewing(nn.Module):
    """A network that relies on the usual order of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 3), nn.Linear(3 * 36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 1, 8, 8] -> [batch, classes]."""
        return self.head(self.conv(x).relu().view(len(x), -1))


def chain(*between: nn.Module) -> nn.Module:
    """A network of torch's layers."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), *between, nn.Flatten(), nn.Linear(4 * 36, CLASSES))


def test_channels_are_last_where_every_layer_is_known_and_nothing_normalises() -> None:
    assert Model(chain).channels_last(HOST)
    assert not Model(chain).channels_last(torch.device("cuda"))
    assert not Model(lambda: chain(nn.GroupNorm(2, 4))).channels_last(HOST)
    assert not Model(Viewing).channels_last(HOST)
    assert not Model(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))).channels_last(HOST)


def test_client_code_sees_the_usual_order_of_memory() -> None:
    sim = simulation("fedavg", "cnn2", "sequential")
    start = sim.server["w"]
    trained = tree.tensors(Client(sim.cohort((0, 1)), torch.tensor(0)).fit(start))
    assert all(t.is_contiguous() and not torch.equal(t, start[name]) for name, t in trained.items())


@pytest.mark.parametrize("network", [chain, Viewing])
def test_models_of_one_client_equal_those_of_a_cohort(network: Any) -> None:
    outcomes = []
    for name in ("sequential", "vectorized"):
        sim = Simulation(make("ditto"), federation(), Model(network), TWO_PASSES, engine=make_engine(name))
        sim.step()
        sim.step()
        outcomes.append(everything(sim))
    assert_close(*outcomes, atol=1e-5, rtol=1e-4)


def test_what_is_gathered_at_once_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> dict[str, Tensor]:
        return everything(simulation("fedavg", "cnn2", "sequential", train=TWO_PASSES, rounds=1))

    whole = trained()
    monkeypatch.setattr(batches, "GATHERED_BYTES", 2 * 4 * 64 * 4)  # two batches of four
    assert_same(trained(), whole)
