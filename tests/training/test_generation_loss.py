"""The loss of a response, of which every sample is a term of its own; tokens as inputs of an evaluation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.func import grad
from torch.nn import functional as F

from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import NO_TARGET, Source
from tailorfl.engines.make import make_engine
from tailorfl.models.functional import Model
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import cohort as cohorts
from tailorfl.training.cohort import TrainConfig, rows_at_once
from tailorfl.training.objective import LOSSES, response_losses
from tailorfl.training.sample_privacy import check_separable

BATCH, LENGTH, WORDS = 6, 7, 11
LOSS = LOSSES["generation"]


def responses(samples: int = BATCH, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(x, y): prompts of 1 to 5 tokens and the rest a response."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(0, WORDS, (samples, LENGTH), generator=rng)
    start = torch.randint(1, LENGTH - 1, (samples, 1), generator=rng)
    return x, torch.where(torch.arange(LENGTH) >= start, x, NO_TARGET)


def outputs(samples: int = BATCH, seed: int = 1) -> Tensor:
    return torch.randn(
        samples, LENGTH, WORDS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def by_hand(logits: Tensor, y: Tensor) -> list[float]:
    """Each sample's loss from torch's own cross entropy."""
    return [
        float(F.cross_entropy(o[:-1], t[1:], ignore_index=NO_TARGET)) for o, t in zip(logits, y, strict=True)
    ]


def test_it_is_the_mean_over_samples_of_the_mean_over_their_response() -> None:
    y = responses()[1]
    expected = by_hand(outputs(), y)
    assert response_losses(outputs(), y).tolist() == pytest.approx(expected)
    assert float(LOSS(outputs(), y, None)) == pytest.approx(sum(expected) / BATCH)
    weight = torch.tensor([1.0, 0, 1, 1, 0, 0], dtype=torch.float64)
    assert float(LOSS(outputs(), y, weight)) == pytest.approx((expected[0] + expected[2] + expected[3]) / 3)


def test_prompt_padding_and_last_output_do_not_enter() -> None:
    y = responses()[1]
    gradient = grad(LOSS)(outputs(), y, None)
    used = F.pad(y[:, 1:] != NO_TARGET, (0, 1))
    assert bool((gradient.abs().sum(-1) > 0).eq(used).all())


def test_samples_do_not_see_each_other() -> None:
    y = responses()[1]
    whole = grad(LOSS)(outputs(), y, None)
    alone = [grad(LOSS)(o[None], t[None], None)[0] / BATCH for o, t in zip(outputs(), y, strict=True)]
    torch.testing.assert_close(whole, torch.stack(alone))
    check_separable(LOSS, ())


class Bigram(nn.Module):
    """The logits of the next token from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


def federation() -> Federation:
    """Three clients of 4, 9 and 1 training samples, one validation sample each, and 2 test samples."""
    x, y = responses(20)
    rows = torch.arange(20).numpy()
    source = Source("bigrams", x, y, "generation", WORDS)
    return Federation(
        source,
        (rows[:4], rows[4:13], rows[13:14]),
        (rows[14:15], rows[15:16], rows[16:17]),
        (rows[17:18], rows[18:19], rows[19:20]),
        ("a", "b", "c"),
        3,
    )


def test_a_token_counts_as_wide_as_a_model_makes_it() -> None:
    x = torch.zeros(3, 64, dtype=torch.int64)
    labels = torch.zeros(3, dtype=torch.int64)
    text = Source("text", x, labels, "classification", 2)
    assert rows_at_once(text) == cohorts.INPUT_BYTES // (4 * 64 * 384)
    assert rows_at_once(text, 10) == cohorts.INPUT_BYTES // (4 * 10 * 64 * 384)
    table = Source("table", torch.zeros(3, 64), labels, "classification", 2)
    assert rows_at_once(table) == cohorts.INPUT_BYTES // (4 * 64)
    y = torch.full((3, 64), NO_TARGET)
    y[:, -1] = 0
    assert rows_at_once(Source("words", x, y, "generation", 30_000)) == 1
    assert rows_at_once(Source("words", x, y, "generation", 259)) == rows_at_once(text)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("part", ["train", "val"])
def test_a_client_s_loss_in_pieces_is_its_loss(
    engine: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = federation()
    sim = Simulation(make_method("fedavg"), data, Model(Bigram), TrainConfig(), engine=make_engine(engine))

    model = sim.global_model()
    assert model is not None

    def losses() -> Tensor:
        def own(client, state, received):
            return (TensorDict({"loss": client.loss(received, part)}, batch_size=[]),)

        return sim.run((0, 1, 2), TensorDict({}, batch_size=[3]), model, own)[0]["loss"]

    whole = losses()
    for client, rows in enumerate(data.part(part)):
        taken = torch.from_numpy(rows)
        with torch.no_grad():
            logits = model["table.weight"][data.source.x[taken]]
        assert float(whole[client]) == pytest.approx(
            float(LOSS(logits, data.source.y[taken], None)), rel=1e-5
        )
    for rows_of in (1, 2, 4):
        monkeypatch.setattr(cohorts, "INPUT_BYTES", rows_of * 4 * 3 * LENGTH * cohorts.TOKEN_WIDTH)
        assert rows_at_once(data.source, 3) == rows_of
        torch.testing.assert_close(losses(), whole)


def test_a_source_of_responses_is_checked() -> None:
    x, y = responses()
    source = Source("s", x, y, "generation", WORDS)
    assert torch.equal(source.take(torch.tensor([[3, 0]])), x[[3, 0]][None])
    assert source.strata.tolist() == [0] * BATCH
    for change in (
        {"y": torch.full_like(y, NO_TARGET)},
        {"y": x},
        {"y": torch.where(y == NO_TARGET, y, (y + 1) % WORDS)},
        {"outputs": WORDS - 1},
    ):
        with pytest.raises(Exception, match="y of a generation task repeats the tokens of the response"):
            replace(source, **change)
    with pytest.raises(Exception, match="needs int64 token ids as x"):
        replace(source, x=x.float())
    with pytest.raises(Exception, match=r"int64 x are token ids \[samples, length\] counted from 0"):
        replace(source, x=x - 1)
