"""The evaluation contract: who is measured, with which model, on which samples, and that nothing else happens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import tailorfl
from methods.settings import NAMES, in_turn, one_of
from methods.small import (
    CLASSES,
    NEWCOMER,
    SIZES,
    assert_same,
    everything,
    federation,
    model,
    personal,
    replaced,
    shared,
    simulation,
)
from tailorfl.data.federation import Federation
from tailorfl.data.own import from_tensors
from tailorfl.data.source import Source
from tailorfl.evaluation.protocols import SERVER, Protocol, common_sets, evaluate, headline
from tailorfl.evaluation.summary import Record, summaries
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.eval import SETS

CLIENTS = tuple(range(len(SIZES)))
EVERYTHING = Protocol(SETS, adapt_steps=(0, 2))
DEPLOYED = ("fedavg", "fedavg_ft", "ditto", "fedrep", "fedala", "fedfomo", "knn_per", "pfedhn", "perfed_ckt")
"""One method for each way to make the models that are evaluated; of all of them `test_method_contract` asks it."""


def shifted_federation() -> Federation:
    """The tiny federation with a shifted set of 12 samples."""
    base = federation()
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.normal(size=(12, 1, 8, 8)).astype(np.float32))
    y = torch.from_numpy(rng.integers(0, CLASSES, 12))
    return replace(base, shifted={"fog-3": Source("fog", x, y, "classification", CLASSES)})


def found(sim: Simulation, protocol: Protocol = EVERYTHING) -> dict[tuple[str, str, int], Record]:
    """Records by (model, set, client)."""
    records = evaluate(sim, protocol)
    by_key = {(r["model"], r["set"], r["client"]): r for r in records}
    assert len(by_key) == len(records)
    return by_key


def plain(state: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[float, float]:
    """(accuracy, loss) of a state in the module itself, in evaluation mode."""
    with torch.no_grad():
        outputs = functional_call(model("batch_norm").module.eval(), state, (x,))
    right = (outputs.argmax(1) == y).double().mean()
    return float(right), float(torch.nn.functional.cross_entropy(outputs, y))


def samples(data: Federation, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    index = torch.from_numpy(rows)
    return data.source.take(index), data.source.y[index]


@pytest.mark.parametrize(
    ("method", "engine"),
    in_turn(
        ("sequential",), ("vectorized",), names=("ditto", "fedavg_ft", "fedrep", "fedbn", "fedavg", "local")
    ),
)
def test_every_number_is_of_the_one_deployable_or_the_global_model(method: str, engine: str) -> None:
    """Recomputed in plain PyTorch: every client, sampled or not, one model of its own for all its numbers."""
    data = shifted_federation()
    sim = simulation(method, "batch_norm", engine, data=data, fraction=0.4, rounds=2)
    union = samples(data, np.unique(np.concatenate(data.test[: len(CLIENTS)])))
    common = {"global": union, "fog-3": (data.shifted["fog-3"].x, data.shifted["fog-3"].y)}
    own = {i: {"val": samples(data, data.val[i]), "local": samples(data, data.test[i])} for i in CLIENTS}
    expected: dict[tuple[str, str, int], tuple[dict[str, Tensor], tuple[Tensor, Tensor]]] = {}
    if sim.method.has_personal:
        models = personal(sim)
        assert_same(models, personal(sim))
        for i in CLIENTS:
            state = {name: tensor[i] for name, tensor in models.items()}
            expected |= {("personal", name, i): (state, part) for name, part in {**own[i], **common}.items()}
    if sim.method.has_global:
        state = shared(sim)
        for i in CLIENTS:
            expected |= {("global", name, i): (state, part) for name, part in own[i].items()}
        expected |= {("global", name, SERVER): (state, part) for name, part in common.items()}
        expected["global", "heldout", NEWCOMER] = state, samples(data, data.test[NEWCOMER])
    records = found(sim)
    newcomers = {("personal", name, NEWCOMER) for name in ("heldout", "heldout+2")}
    assert records.keys() - newcomers == expected.keys()
    assert (newcomers <= records.keys()) == sim.method.has_personal
    for key, (state, (x, y)) in expected.items():
        accuracy, loss = plain(state, x, y)
        assert records[key]["accuracy"] == pytest.approx(accuracy), key
        assert records[key]["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-5), key
        assert records[key]["samples"] == len(y)
        assert records[key]["round"] == 2


def test_the_method_is_judged_by_what_its_clients_deploy() -> None:
    assert headline(simulation("ditto")) == ("personal", "accuracy")
    assert headline(simulation("fedavg")) == ("global", "accuracy")


@pytest.mark.parametrize("method", one_of(2, DEPLOYED))
def test_evaluation_changes_nothing(method: str) -> None:
    """Neither states, counters nor the streams of random numbers: training goes on as if nobody had looked."""
    watched, alone = (
        simulation(method, "batch_norm", data=shifted_federation(), fraction=0.6, rounds=1) for _ in range(2)
    )
    stream = torch.get_rng_state()
    first = repr(evaluate(watched, EVERYTHING))
    assert torch.equal(torch.get_rng_state(), stream)
    assert_same(watched.dump()[0], alone.dump()[0])
    assert (watched.dump()[1], len(watched.states)) == (alone.dump()[1], len(alone.states))
    assert repr(evaluate(watched, EVERYTHING)) == first
    watched.step()
    alone.step()
    assert_same(everything(watched), everything(alone))


@pytest.mark.parametrize("method", one_of(11, NAMES))
def test_held_out_clients_contribute_nothing(method: str) -> None:
    """Other data of the held-out client: training and all other numbers stay as they are to the last bit."""
    data = shifted_federation()
    other = replace(replaced(data, NEWCOMER, lambda x: 5 - 3 * x), shifted=data.shifted)
    sims = [simulation(method, "batch_norm", data=d, fraction=0.6) for d in (data, other)]
    numbers = []
    for sim in sims:
        sim.step()
        records = found(sim)  # adapts the newcomer in between
        sim.step()
        numbers.append({key: repr(r) for key, r in records.items() if not key[1].startswith("heldout")})
    assert_same(everything(sims[0]), everything(sims[1]))
    assert numbers[0] == numbers[1]
    assert all(key[2] != NEWCOMER for key in numbers[0])


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_newcomers_adapt_on_their_own_training_samples(engine: str) -> None:
    def losses(data: Federation) -> list[float]:
        sim = simulation("fedrep", engine=engine, data=data, rounds=1)
        records = found(sim, Protocol(("heldout",), adapt_steps=(0, 1, 5)))
        return [records["personal", "heldout" + more, NEWCOMER]["loss"] for more in ("", "+1", "+5")]

    one, other = losses(federation()), losses(replaced(federation(), NEWCOMER, torch.neg))
    assert len(set(one)) == 3
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, False]


def test_a_cap_on_common_test_sets_cuts_no_part_of_a_client() -> None:
    """And takes the same samples in every round, for every method and seed."""
    data = shifted_federation()
    capped = Protocol(SETS, adapt_steps=(0,), max_samples=5)
    chosen = common_sets(data, capped)
    for method, seed, rounds in (("ditto", 0, 0), ("ditto", 7, 0), ("fedrep", 0, 1)):
        sim = simulation(method, "batch_norm", data=data, seed=seed, rounds=rounds)
        records = evaluate(sim, capped)
        for record in records:
            name = str(record["set"])
            part = data.val if name == "val" else data.test
            assert record["samples"] == (5 if name in chosen else len(part[int(record["client"])]))
        models = personal(sim)
        for name, (source, rows) in chosen.items():
            state = {n: t[3] for n, t in models.items()}
            expected = plain(state, source.take(rows), source.y[rows])[1]
            [loss] = [
                r["loss"] for r in records if (r["model"], r["set"], r["client"]) == ("personal", name, 3)
            ]
            assert loss == pytest.approx(expected, rel=1e-4, abs=1e-5)
            assert rows.tolist() == sorted(set(rows.tolist()))


def test_a_cap_draws_at_random_from_rows_that_are_sorted_by_class() -> None:
    """300 of 1,000 rows, 100 a class: about 30 of each, from all over the set; one draw for each set's name."""
    y = torch.arange(1000) // 100
    sets = {name: Source(name, torch.zeros(1000, 1), y, "classification", 10) for name in ("fog", "snow")}
    data = replace(federation(), shifted=sets)
    capped, whole, same = (
        common_sets(data, Protocol(("shifted",), max_samples=n)) for n in (300, 1000, None)
    )
    fog, snow = (capped[name][1] for name in sets)
    assert len(set(fog.tolist())) == 300
    counts = torch.bincount(y[fog], minlength=10)
    assert counts.min() >= 15  # hypergeometric: mean 30, deviation 4.4
    assert counts.max() <= 45
    assert set(fog.tolist()) != set(snow.tolist())
    for uncut in (whole, same):
        assert torch.equal(uncut["fog"][1], torch.arange(1000))


def test_a_client_without_test_samples_gets_no_number_and_spoils_none() -> None:
    base = federation()
    test = (np.empty(0, dtype=np.int64), *base.test[1:])
    records = found(simulation("ditto", data=replace(base, test=test), rounds=1))
    assert records["personal", "local", 0]["samples"] == 0
    assert np.isnan(records["personal", "local", 0]["accuracy"])
    mean = summaries(records.values())["personal"]["local"]["accuracy"]["mean"]
    others = [records["personal", "local", i]["accuracy"] for i in CLIENTS[1:]]
    assert mean == pytest.approx(np.mean(others))


def test_selection_looks_at_validation_samples_only(tmp_path: Path) -> None:
    """Other labels of all test samples change the test numbers and nothing about the choice."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 240)
    x = rng.normal(size=(3, 6))[y] + 1.5 * rng.normal(size=(240, 6))
    clients, test = np.arange(240) % 6, np.arange(240) % 5 == 0
    chosen = []
    for name, labels in (("true", y), ("other", np.where(test, (y + 1) % 3, y))):
        result = tailorfl.run(
            {"seeds": 1, "rounds": 6, "method": "ditto", "model": "logistic", "eval": {"every": 1}},
            source=from_tensors(x, labels, clients, test=test),
            out=tmp_path / name,
        )
        chosen.append((result.jobs[0][0]["best_by_validation"], result.rounds))
    (best, rounds), (other, others) = chosen
    assert best["round"] == other["round"]
    assert best["val"] == other["val"]
    assert best["local"] != other["local"]
    for metric in ("accuracy", "loss"):
        assert rounds[f"personal/val/{metric}"].equals(others[f"personal/val/{metric}"])
        assert not rounds[f"personal/local/{metric}"].equals(others[f"personal/local/{metric}"])
    means = rounds.set_index("round")["personal/val/accuracy"]
    assert best["round"] == means.idxmax()
    assert best["local"] == rounds.set_index("round")["personal/local/accuracy"][best["round"]]


def test_participants_alone_have_their_models_made_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    sim, made = simulation("ditto", fraction=0.4), []
    every = sim.personal_models
    monkeypatch.setattr(sim, "personal_models", lambda ids, *rest: [made.extend(ids), *every(ids, *rest)][1:])
    done = sim.step()
    evaluate(sim, Protocol(("participants",)), done.clients)
    assert made == list(done.clients)
