"""The evaluation contract: who is measured, with which model, on which samples, and that nothing else happens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import tailorfl
from methods.settings import NAMES, one_of
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
from tailorfl.engines.base import Inference
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


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("method", ["ditto", "fedavg_ft", "fedrep", "fedbn", "fedavg", "local"])
def test_every_number_is_of_the_one_deployable_or_the_global_model(method: str, engine: str) -> None:
    """Recomputed in plain PyTorch: every client, sampled or not, one model of its own for all its numbers."""
    data = shifted_federation()
    sim = simulation(method, "batch_norm", engine, data=data, fraction=0.4, rounds=2)
    union = samples(data, np.unique(np.concatenate(data.test[: len(CLIENTS)])))
    fog = data.shifted["fog-3"]
    expected: dict[tuple[str, str, int], tuple[dict[str, Tensor], tuple[Tensor, Tensor]]] = {}
    if sim.method.has_personal:
        models = personal(sim)
        assert_same(models, personal(sim))
        for i in CLIENTS:
            own = {name: tensor[i] for name, tensor in models.items()}
            expected["personal", "val", i] = own, samples(data, data.val[i])
            expected["personal", "local", i] = own, samples(data, data.test[i])
            expected["personal", "global", i] = own, union
            expected["personal", "fog-3", i] = own, (fog.x, fog.y)
    if sim.method.has_global:
        one = shared(sim)
        for i in CLIENTS:
            expected["global", "val", i] = one, samples(data, data.val[i])
            expected["global", "local", i] = one, samples(data, data.test[i])
        expected["global", "heldout", NEWCOMER] = one, samples(data, data.test[NEWCOMER])
        expected["global", "global", SERVER] = one, union
        expected["global", "fog-3", SERVER] = one, (fog.x, fog.y)
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


def test_means_do_not_mix_models_sets_and_clients() -> None:
    records = [
        {"model": m, "set": s, "client": c, "samples": 1, "loss": v, "accuracy": v, "balanced_accuracy": v}
        | {"macro_f1": v}
        for v, (m, s, c) in enumerate(
            [
                ("personal", "local", 0),
                ("personal", "local", 1),
                ("personal", "val", 0),
                ("global", "local", 0),
            ]
        )
    ]
    means = summaries(records)
    assert means["personal"]["local"]["accuracy"]["mean"] == 0.5
    assert means["personal"]["val"]["accuracy"]["mean"] == 2
    assert means["global"]["local"]["accuracy"]["mean"] == 3


@pytest.mark.parametrize("method", DEPLOYED)
def test_evaluation_changes_nothing(method: str) -> None:
    """Neither states, counters nor the streams of random numbers: training goes on as if nobody had looked."""
    data = shifted_federation()
    watched = simulation(method, "batch_norm", data=data, fraction=0.6, rounds=1)
    alone = simulation(method, "batch_norm", data=data, fraction=0.6, rounds=1)
    before = {name: tensor.clone() for name, tensor in everything(watched).items()}
    traffic, stored, stream = watched.traffic.as_dict(), len(watched.states), torch.get_rng_state()
    first = evaluate(watched, EVERYTHING)
    assert_same(everything(watched), before)
    assert (watched.traffic.as_dict(), len(watched.states), watched.round) == (traffic, stored, 1)
    assert torch.equal(torch.get_rng_state(), stream)
    assert repr(evaluate(watched, EVERYTHING)) == repr(first)
    watched.step()
    alone.step()
    assert_same(everything(watched), everything(alone))


@pytest.mark.parametrize("method", one_of(3, NAMES))
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
    data = federation()
    sim = simulation("fedrep", engine=engine, data=data, rounds=1)
    records = found(sim, Protocol(("heldout",), adapt_steps=(0, 1, 5)))
    losses = [records["personal", name, NEWCOMER]["loss"] for name in ("heldout", "heldout+1", "heldout+5")]
    assert len(set(losses)) == 3
    other = simulation("fedrep", engine=engine, data=replaced(data, NEWCOMER, torch.neg), rounds=1)
    changed = found(other, Protocol(("heldout",), adapt_steps=(0, 5)))
    assert changed["personal", "heldout", NEWCOMER]["loss"] == losses[0]
    assert changed["personal", "heldout+5", NEWCOMER]["loss"] != losses[2]


def test_a_test_set_that_clients_share_counts_once() -> None:
    base = federation()
    rows = np.concatenate(base.test[: len(CLIENTS)])
    common = replace(base, test=(rows,) * len(base))
    records = found(simulation("ditto", data=common, rounds=1))
    assert {r["samples"] for key, r in records.items() if key[1] == "global"} == {len(rows)}
    for i in CLIENTS:
        assert records["personal", "global", i]["loss"] == pytest.approx(
            records["personal", "local", i]["loss"]
        )


def test_a_cap_on_common_test_sets_takes_the_same_samples_always() -> None:
    """In every round, for every method and seed; a client's own parts are never cut."""
    data = shifted_federation()
    capped = Protocol(SETS, adapt_steps=(0,), max_samples=5)
    sims = [
        simulation("ditto", data=data),
        simulation("ditto", data=data, seed=7),
        simulation("fedrep", data=data, rounds=1),
    ]
    taken: dict[str, set[bytes]] = {"global": set(), "fog-3": set()}
    for sim in sims:
        real = sim.engine.predict

        def spied(asked: Inference, real: Any = real) -> list[Tensor]:
            rows = asked.rows
            if isinstance(rows, Tensor) and len(rows) == 5:
                name = "fog-3" if asked.source.name == "fog" else "global"
                taken[name].add(rows.numpy().tobytes())
                assert rows.tolist() == sorted(set(rows.tolist()))
            answer: list[Tensor] = real(asked)
            return answer

        sim.engine.predict = spied  # type: ignore[method-assign]
        records = found(sim, capped)
        for (_, name, client), record in records.items():
            common = name in ("global", "fog-3")
            assert record["samples"] == (
                5 if common else len((data.val if name == "val" else data.test)[client])
            )
    assert {name: len(sets) for name, sets in taken.items()} == {"global": 1, "fog-3": 1}


def test_a_cap_draws_at_random_from_rows_that_are_sorted_by_class() -> None:
    """300 of 1,000 rows, 100 a class: about 30 of each, from all over the set; one draw for each set's name."""
    y = torch.arange(1000) // 100
    sets = {name: Source(name, torch.zeros(1000, 1), y, "classification", 10) for name in ("fog", "snow")}
    data = replace(federation(), shifted=sets)
    found = common_sets(data, Protocol(("shifted",), max_samples=300))
    fog, snow = (found[name][1] for name in sets)
    assert len(set(fog.tolist())) == 300
    counts = torch.bincount(y[fog], minlength=10)
    assert counts.min() >= 15  # hypergeometric: mean 30, deviation 4.4
    assert counts.max() <= 45
    assert set(fog.tolist()) != set(snow.tolist())
    assert torch.equal(common_sets(data, Protocol(("shifted",)))["fog"][1], torch.arange(1000))
    assert torch.equal(
        common_sets(data, Protocol(("shifted",), max_samples=1000))["fog"][1], torch.arange(1000)
    )


def test_the_worst_clients_have_the_largest_losses_and_the_smallest_accuracies() -> None:
    records = [
        {"round": 1, "client": c, "set": "local", "model": "global", "samples": 1, "accuracy": c, "loss": c}
        for c in range(20)
    ]
    of = summaries(records)["global"]["local"]
    assert (of["accuracy"]["worst5"], of["accuracy"]["worst10"]) == (0, 0.5)
    assert (of["accuracy"]["best5"], of["accuracy"]["best10"]) == (19, 18.5)
    assert (of["loss"]["worst5"], of["loss"]["worst10"]) == (19, 18.5)
    assert (of["loss"]["best5"], of["loss"]["best10"]) == (0, 0.5)


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
            {"seeds": 1, "rounds": 12, "method": "ditto", "model": "logistic", "eval": {"every": 1}},
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
