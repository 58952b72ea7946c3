"""What texts earn: credit of an answer, tokens given the right ones before, and generated responses by ROUGE-1.

The stand-in for a language model is a table: the logits of the next token from the last one. It generates by following
the table, so what comes out of it can be written down.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tailorfl
from tailorfl.core.method import make_method
from tailorfl.data.build import build
from tailorfl.data.federation import Federation
from tailorfl.data.registry import load_source
from tailorfl.data.source import NO_TARGET, Source
from tailorfl.data.tokenizers import load_tokenizer
from tailorfl.engines.choice import make_engine
from tailorfl.errors import DataError, ModelError
from tailorfl.evaluation import generation, metrics
from tailorfl.evaluation.generation import earned, prompts, reference, teacher_forced
from tailorfl.evaluation.protocols import SERVER, Protocol, evaluate
from tailorfl.evaluation.summary import Record, summaries
from tailorfl.models.functional import Model
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.eval import SETS, GenerationConfig
from tailorfl.training import cohort as cohorts
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.objective import LOSSES

WORDS = load_tokenizer("byte")
SAYS = "ab c\x00"
"""What the table says after a colon; \\x00 stands for the end."""


@pytest.fixture(autouse=True)
def need_rouge() -> None:
    pytest.importorskip("rouge_score", reason="the extra 'text' is not installed")


class Follower(nn.Module):
    """After ":" it says "ab c" and ends, whatever stood before."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS.size, WORDS.size)
        with torch.no_grad():
            self.table.weight.zero_()
            path = [token(sign) for sign in ":" + SAYS]
            for before, after in pairwise(path):
                self.table.weight[before, after] = 9.0
        self.calls: list[tuple[int, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length] -> [batch, length, vocabulary]."""
        return self.table(x)

    def generate(self, ids: Tensor, max_new_tokens: int, num_beams: int = 1) -> Tensor:
        """[n, length] -> [n, length + max_new_tokens], padding after the end."""
        self.calls.append((len(ids), num_beams))
        for _ in range(max_new_tokens):
            ended = (ids == WORDS.end).any(1)
            following = torch.where(ended, WORDS.pad, self(ids)[:, -1].argmax(-1))
            ids = torch.cat([ids, following[:, None]], dim=1)
        return ids


def token(sign: str) -> int:
    return WORDS.end if sign == "\x00" else WORDS.encode(sign)[0]


ANSWERS = {"right": "ab c", "half": "ab d", "wrong": "zz"}
"""What clients expect: of "ab c" both words are right, one of two, none."""


@pytest.fixture
def data(tmp_path: Path) -> Federation:
    """Three clients, 4 training and 3 test samples each, and a fourth, whose task is held out."""
    for client, answer in {**ANSWERS, "late": "ab c"}.items():
        for part, count in (("train", 4), ("test", 3)):
            rows = [
                {"instruction": "?" * (k + 1), "output": answer, "task": "new" if client == "late" else "old"}
                for k in range(count)
            ]
            text = "\n".join(json.dumps(row) for row in rows)
            (tmp_path / f"{client}_{part}.jsonl").write_text(text, encoding="utf-8")
    options = {"form": "generation", "length": 24}
    return build(
        "instructions", path=str(tmp_path), options=options, heldout_domain="new", split={"val": 0.25}
    )


def simulation(
    data: Federation, method: str = "ditto", engine: str = "sequential", **given: Any
) -> Simulation:
    return Simulation(
        make_method(method), data, Model(Follower), TrainConfig(lr=0.1), engine=make_engine(engine), **given
    )


def found(sim: Simulation, **settings: Any) -> dict[tuple[str, str, int], Record]:
    records = evaluate(sim, Protocol(SETS, adapt_steps=(0,), generation=GenerationConfig(**settings)))
    return {(r["model"], r["set"], r["client"]): r for r in records}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_every_record_of_a_generation_task(data: Federation, engine: str) -> None:
    sim = simulation(data, engine=engine)
    records = found(sim)
    expected = {"right": 100.0, "half": 50.0, "wrong": 0.0, "new": 100.0}
    for (model, name, client), record in records.items():
        if name == "global":
            wanted, samples = 50.0, 9
        else:
            wanted = expected[name if name == "new" else data.names[client]]
            samples = 1 if name == "val" else 3
        for metric in ("rouge1", "rouge1_precision", "rouge1_recall"):
            assert record[metric] == pytest.approx(wanted), (model, name, client)
        assert record["samples"] == samples
    sets = ("val", "local", "global", "new", "heldout")
    assert {(m, s) for m, s, _ in records} == {(m, s) for m in ("personal", "global") for s in sets}
    assert ("global", "new", SERVER) in records
    # tokens of "ab d" + end given the right ones: a, b and the space are, d is not, and what follows d is the end's
    # chance among equals: 3 of 5
    right, half = (data.names.index(name) for name in ("right", "half"))
    assert records["personal", "local", half]["token_accuracy"] == pytest.approx(3 / 5)
    assert records["personal", "local", right]["token_accuracy"] == 1.0
    rows = torch.from_numpy(data.test[half])
    with torch.no_grad():
        outputs = sim.model(sim.init, data.source.take(rows))
    loss = float(LOSSES["generation"](outputs, data.source.y[rows], None))
    assert records["personal", "local", half]["loss"] == pytest.approx(loss)


def test_engines_and_block_sizes_judge_alike(data: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of one sample at a time or of all, prompts two at a time or all: the same numbers."""
    sims = [simulation(data, engine=e) for e in ("sequential", "vectorized")]
    for sim in sims:
        sim.step()
    first = found(sims[0])
    monkeypatch.setattr(cohorts, "INPUT_BYTES", 1)
    monkeypatch.setattr(generation, "PROMPTS_AT_ONCE", 2)
    for sim in sims:
        again = found(sim)
        assert again.keys() == first.keys()
        for key, record in first.items():
            assert record == pytest.approx(again[key], abs=1e-4, nan_ok=True)


def test_evaluation_of_texts_changes_nothing(data: Federation) -> None:
    sim, stream = simulation(data), torch.get_rng_state()
    first = repr(evaluate(sim, Protocol(SETS)))
    assert torch.equal(torch.get_rng_state(), stream)
    assert bool((sim.server == sim.init).all())
    assert repr(evaluate(sim, Protocol(SETS))) == first


def test_only_some_are_generated(data: Federation) -> None:
    sim = simulation(data, "fedavg")
    record = found(sim, samples=2, beams=3)["global", "local", data.names.index("right")]
    with sim.model.bound(sim.init) as bound:
        module: Any = bound
        assert {n for n, _ in module.calls} <= {1, 2}
        assert {beams for _, beams in module.calls} == {3}
    assert (record["rouge1"], record["samples"]) == (100.0, 3)


def earnings(data: Federation, client: int, table: Tensor | None = None, **settings: Any) -> Tensor:
    """What the follower, or one with another table, earns on the test samples of a client."""
    model = Model(Follower)
    state = dict(model.init(0).items()) if table is None else {"table.weight": table}
    rows = torch.from_numpy(data.test[client])
    return earned(model, state, data.source, rows, GenerationConfig(**settings))


def test_a_response_ends_where_it_is_cut(data: Federation) -> None:
    """After three tokens "ab " has one of the two words of "ab c"."""
    scores = earnings(data, data.names.index("right"), max_new_tokens=3)
    torch.testing.assert_close(scores, torch.tensor([[1.0, 0.5, 2 / 3]] * 3))


def test_a_diverged_model_earns_nothing(data: Federation) -> None:
    table = torch.full((WORDS.size, WORDS.size), math.nan)
    assert not earnings(data, 0, table).any()
    rows = torch.from_numpy(data.test[0])
    outputs = Model(Follower)({"table.weight": table}, data.source.take(rows))
    assert not teacher_forced(outputs, data.source.y[rows])[:, 1].any()


def test_prompts_end_where_responses_begin(data: Federation) -> None:
    rows = torch.from_numpy(data.test[data.names.index("wrong")])
    given = prompts(data.source, rows, WORDS.pad)
    texts = [f"{'?' * (k + 1)}\nAnswer:" for k in range(3)]
    assert [WORDS.decode(row.tolist()) for row in given] == texts
    assert given.shape == (3, len(texts[-1]))
    assert bool((given[:, -1] == token(":")).all())
    assert [reference(data.source, int(r), WORDS) for r in rows] == ["zz"] * 3


def test_tokens_are_judged_one_place_on() -> None:
    y = torch.tensor([[NO_TARGET, NO_TARGET, 2, 1], [NO_TARGET, 0, 0, 0]])
    outputs = torch.zeros(2, 4, 3)
    outputs[0, 1, 2] = outputs[0, 2, 0] = 1.0
    outputs[1, :, 0] = 1.0
    outputs[1, 2, 1] = math.nan
    scores = teacher_forced(outputs, y)
    assert scores[:, 1].tolist() == [1, 2]
    assert scores[:, 2].tolist() == [2, 3]
    assert math.isnan(float(scores[1, 0]))
    assert float(scores[0, 0]) == pytest.approx(float(LOSSES["generation"](outputs[:1], y[:1], None)))
    assert teacher_forced(torch.zeros(0, 9), torch.zeros(0, 4, dtype=torch.int64)).shape == (0, 3)


def test_metrics_of_responses() -> None:
    nan = math.nan
    scores = torch.tensor([[1.0, 2, 0.5, 0.25, 0.4], [3, 6, nan, nan, nan], [0, 0, 1.0, 0.75, 0.6]])
    found = metrics.compute_parts("generation", scores, torch.zeros(3, 5), [3])
    assert {name: float(of[0]) for name, of in found.items()} == pytest.approx(
        {"rouge1": 50.0, "rouge1_precision": 75.0, "rouge1_recall": 50.0, "token_accuracy": 0.5}
    )
    assert math.isnan(metrics.compute_parts("generation", scores[1:2], torch.zeros(1, 5), [1])["rouge1"][0])


def test_what_cannot_generate_is_named(data: Federation) -> None:
    rows = torch.from_numpy(data.test[0])
    source = data.source
    silent = Source("silent", source.x, source.y, "generation", source.outputs)
    mute = lambda: nn.Embedding(WORDS.size, WORDS.size)  # noqa: E731
    for make, of, error, message in (
        (mute, source, ModelError, "needs a model that generates, but a Embedding has no `generate`"),
        (Follower, silent, DataError, "source 'silent' does not name its tokenizer"),
    ):
        with pytest.raises(error, match=message):
            earned(Model(make), dict(Model(make).init(0).items()), of, rows, GenerationConfig())
    with pytest.raises(ValueError, match="max_new_tokens"):
        GenerationConfig(max_new_tokens=0)


# credit of a choice


def test_credit_is_the_mean_of_what_the_likeliest_answers_earn() -> None:
    outputs = torch.tensor([[1.0, 2.0, 0.0], [0.0, -1.0, -2.0], [0.0, math.nan, 1.0]])
    credit = torch.tensor([[1.0, 0.25, 0.5], [0.75, 0.0, 1.0], [1.0, 1.0, 1.0]])
    assert metrics.credited(outputs, credit) == pytest.approx(100 * (0.25 + 0.75 + 0.0) / 3)
    assert math.isnan(metrics.credited(torch.zeros(0, 3), torch.zeros(0, 3)))
    with pytest.raises(ValueError, match="outputs of shape"):
        metrics.credited(torch.zeros(2, 3), torch.zeros(2, 2))


class Slots(nn.Module):
    """Logits that look at no token."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor([0.0, 1.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.bias.expand(x.shape[0], 3)


def choices(folder: Path) -> Source:
    folder.mkdir(exist_ok=True)
    question = "{}?\nOPTIONS:\n- red car\n- red bike\n- ship"
    for client, right in (("a", "red car"), ("b", "red bike")):
        rows = [{"instruction": question.format(k), "output": right} for k in range(10)]
        (folder / f"{client}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return load_source("instructions", path=folder, options=3)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_records_of_a_choice_have_rouge_beside_accuracy(tmp_path: Path, engine: str) -> None:
    """Both clients are told "red bike": wrong and half right at a, right at b."""
    data = build(source=choices(tmp_path))
    sim = Simulation(make_method("fedavg"), data, Model(Slots), TrainConfig(), engine=make_engine(engine))
    records = {(r["set"], r["client"]): r for r in evaluate(sim, Protocol(("local", "global")))}
    assert (records["local", 0]["accuracy"], records["local", 0]["rouge1"]) == (0.0, pytest.approx(50.0))
    assert (records["local", 1]["accuracy"], records["local", 1]["rouge1"]) == (1.0, pytest.approx(100.0))
    assert records["global", SERVER]["rouge1"] == pytest.approx(75.0)
    table = summaries(records.values())["global"]["local"]
    assert list(table) == ["accuracy", "balanced_accuracy", "macro_f1", "rouge1", "loss"]
    assert table["rouge1"]["mean"] == pytest.approx(75.0)


# a whole run


def follower(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    return Follower()


def slots(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    return Slots()


def test_runs_report_rouge(data: Federation, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 1, "seeds": 1, "methods": ["fedavg", "ditto"], "train": {"lr": 0.1}}
    every = {"every": 1, "generation": {"max_new_tokens": 6, "samples": 2}}
    generated = tailorfl.run(
        **settings, source=data.source, model=f"{__name__}:follower", eval=every, out=tmp_path / "generated"
    )
    assert generated.metric == "rouge1"
    assert generated.table["mean"]["fedavg"] == pytest.approx(62.5)
    assert {"personal/val/rouge1", "personal/val/token_accuracy"} <= set(generated.rounds.columns)
    chosen = tailorfl.run(
        **settings, source=choices(tmp_path / "choices"), model=f"{__name__}:slots", out=tmp_path / "chosen"
    )
    assert chosen.metric == "accuracy"
    assert chosen.clients["rouge1"].notna().all()
    assert "personal.local.rouge1.mean" in chosen.seed_results()[1].values
    with pytest.raises(ModelError, match="'mlp' cannot read source 'instructions', whose samples are tokens"):
        tailorfl.run(**settings, model="mlp", source=choices(tmp_path / "choices"), out=tmp_path / "none")


def test_models_of_numbers_do_not_read_tokens(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 1, "seeds": 1, "methods": ["local"]}
    with pytest.raises(
        ModelError, match="model 'mlp' cannot read source 'instructions', whose samples are tokens"
    ):
        tailorfl.run(**settings, model="mlp", source=choices(tmp_path / "choices"), out=tmp_path / "out")
