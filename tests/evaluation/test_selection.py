"""`eval.select: val`: each client deploys the personal model of its best validation round, and of no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from methods.settings import in_turn, make, one_of
from methods.small import SIZES, assert_same, federation, model, personal, simulation
from rounds.helpers import MODELS, two_architectures
from tailorfl.core.method import methods
from tailorfl.data.federation import Federation
from tailorfl.engines.choice import make_engine
from tailorfl.errors import ConfigError
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.evaluation.selection import RoundChoice, Selection
from tailorfl.report.experiment import run_experiment
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import check
from tailorfl.runs.job import Job, Observer
from tailorfl.settings.loading import load
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.sample_privacy import SampleDP

ROUNDS = 6
RESTLESS = TrainConfig(epochs=2, batch_size=4, lr=0.5)
"""A rate at which validation scores go up and down."""
UNWATCHED = 3
"""A client without validation samples."""


def data() -> Federation:
    """The tiny federation with half of its labels wrong, and with more validation samples, but for one client."""
    base = federation()
    rng = np.random.default_rng(5)
    wrong = torch.from_numpy(rng.random(len(base.source.y)) < 0.5)
    y = torch.where(wrong, torch.from_numpy(rng.integers(0, 4, len(wrong))), base.source.y)
    val = [np.concatenate([v, t[:2]]) for v, t in zip(base.val, base.test, strict=True)]
    val[UNWATCHED] = val[UNWATCHED][:0]
    test = tuple(t[2:] for t in base.test)
    return replace(base, source=replace(base.source, y=y), val=tuple(val), test=test)


def scored(sim: Simulation, rows: np.ndarray, state: dict[str, Tensor]) -> tuple[float, float]:
    """(accuracy, minus loss), in plain torch; (0, 0) without samples."""
    if not len(rows):
        return 0.0, 0.0
    source, index = sim.federation.source, torch.from_numpy(rows)
    outputs = torch.func.functional_call(sim.model.module.eval(), state, (source.take(index),))
    accuracy = (outputs.argmax(1) == source.y[index]).double().mean()
    return float(accuracy), -float(F.cross_entropy(outputs.double(), source.y[index]))


@pytest.mark.parametrize(
    ("name", "engine"), in_turn(("vectorized",), ("sequential",), names=("ditto", "fedrep", "local"))
)
def test_every_client_keeps_the_model_of_its_best_round(name: str, engine: str) -> None:
    sim = Simulation(make(name), data(), model("mlp"), RESTLESS, engine=make_engine(engine), fraction=0.6)
    selection = Selection(sim)
    best: dict[int, tuple[tuple[float, float], int, dict[str, Tensor]]] = {}
    for _ in range(ROUNDS):
        sim.step()
        records = evaluate(sim, Protocol(("val", "local")), selection=selection)
        losses = {r["client"]: r["loss"] for r in records if (r["set"], r["model"]) == ("local", "personal")}
        models = personal(sim)
        for i in range(len(SIZES)):
            state = {n: t[i] for n, t in models.items()}
            score = scored(sim, sim.federation.val[i], state)
            if i not in best or score > best[i][0] or i == UNWATCHED:
                best[i] = (score, sim.round, state)
            assert selection.choices[i].round == best[i][1]
            assert losses[i] == pytest.approx(-scored(sim, sim.federation.test[i], best[i][2])[1], rel=1e-4)
    rounds = [c.round for c in selection.choices.values()]
    assert selection.choices[UNWATCHED].round == ROUNDS
    chosen = {"round": np.mean(rounds), "first": min(rounds), "last": max(rounds)}
    assert chosen.items() <= selection.summary().items()
    assert len(set(rounds)) > 2, "the test says nothing where all choose alike"


def test_of_equals_the_lower_loss_and_then_the_earlier() -> None:
    nan, held = float("nan"), (0.5, 0.7)
    for value, loss, before, beats in (
        (0.6, 0.9, held, True),
        (0.5, 0.6, held, True),
        (0.5, 0.7, held, False),
        (0.4, 0.1, held, False),
        (nan, 0.6, (nan, 0.7), True),
        (nan, 0.8, (nan, 0.7), False),
        (nan, nan, (nan, nan), True),
        (0.1, 0.6, (nan, 0.7), True),
        (0.9, nan, held, False),  # a model that has diverged
        (0.5, 0.7, (0.9, nan), True),
    ):
        assert RoundChoice(2, value, loss).beats(RoundChoice(1, *before), lower_is_better=False) is beats
    assert not RoundChoice(2, 0.6, 0.9).beats(RoundChoice(1, *held), lower_is_better=True)


def test_participants_alone_are_shown_with_what_they_chose() -> None:
    sim = Simulation(make("ditto"), data(), model("mlp"), RESTLESS, fraction=0.6)
    selection = Selection(sim)
    for _ in range(ROUNDS):
        ids = sim.step().clients
        both = [evaluate(sim, Protocol(sets), ids, selection) for sets in (("participants",), ("local",))]
    shown = [{r["client"]: r["loss"] for r in rs if r["model"] == "personal"} for rs in both]
    assert shown[0] == {i: shown[1][i] for i in ids}
    later = [i for i in ids if selection.choices[i].round < ROUNDS]
    assert later, "the test says nothing if all that took part chose the last round"


@pytest.mark.parametrize(
    "name", one_of(8, sorted(n for n, method in methods().items() if method.has_personal))
)
def test_what_any_method_deploys_is_chosen_stored_and_restored(name: str, tmp_path: Path) -> None:
    """Of models with running statistics; states on disk are read back into memory."""
    sim = simulation(name, "batch_norm", fraction=0.6)
    selection, other = Selection(sim, tmp_path), Selection(sim)
    for _ in range(2):
        sim.step()
        records = evaluate(sim, Protocol(("val",)), selection=selection)
    other.load({n: t.clone() for n, t in selection.dump().items()})
    assert other.choices == selection.choices
    everyone = range(len(SIZES))
    assert_same(dict(other.models(everyone).items()), dict(selection.models(everyone).items()))
    scores = {r["client"]: r["accuracy"] for r in records if r["model"] == "personal"}
    assert scores == {i: c.value for i, c in selection.choices.items()}


def test_clients_of_several_architectures_choose_each_among_its_own() -> None:
    sim = two_architectures()
    selection, other = Selection(sim), Selection(sim)
    for _ in range(3):
        sim.step()
        evaluate(sim, Protocol(), selection=selection)
    other.load({n: t.clone() for n, t in selection.dump().items()})
    for name, ids in (("large", (0, 3)), ("small", (1, 2, 4))):
        found = dict(selection.models(ids).items())
        assert found.keys() == set(MODELS[name].init(0).keys())
        assert_same(found, dict(other.models(ids).items()))


def test_training_is_as_without() -> None:
    plain, chosen = simulation("ditto", rounds=3, train=RESTLESS), simulation("ditto", train=RESTLESS)
    selection = Selection(chosen)
    for _ in range(3):
        chosen.step()
        evaluate(chosen, Protocol(), selection=selection)
    assert_same(plain.dump()[0], chosen.dump()[0])


# -- experiments ----------------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "methods": ["ditto", "fedavg"],
    "seeds": 1,
    "rounds": 5,
    "fraction": 0.5,
    "data": {"samples": 300, "clients": 6, "heldout_clients": 1},
    "model": {"name": "mlp", "hidden": [8]},
    "train": {"lr": 0.8},
    "engine": "vectorized",
    "eval": {"every": 1, "select": "val", "adapt_steps": [0]},
    "checkpoint_every": 1,
}


class Interrupted(Observer):
    """Stops the first job after three rounds."""

    def round_done(self, job: Job, done: Any) -> None:
        """Ctrl-C."""
        if done.round == 2 and job.method.name == "ditto":
            raise KeyboardInterrupt


@pytest.mark.slow
def test_an_experiment_goes_on_with_what_was_chosen_wherever_states_lie(tmp_path: Path) -> None:
    whole = run_experiment(load(SETTINGS), tmp_path / "whole")
    for where in ("memory", "disk"):
        config = load({**SETTINGS, "engine": {"name": "vectorized", "states": where}})
        with pytest.raises(KeyboardInterrupt):
            run_experiment(config, tmp_path / where, observer=Interrupted())
        resumed = run_experiment(config, tmp_path / where, way="resume")
        pd.testing.assert_frame_equal(whole.clients, resumed.clients)
        for result in (whole, resumed):
            assert result.jobs[0][0]["selection"] == whole.jobs[0][0]["selection"]
    table = pd.read_csv(tmp_path / "whole" / "ditto" / "seed-0" / "selection.csv")
    assert list(table["client"]) == list(range(6))
    assert len(set(table["round"])) > 1
    assert set(table["round"]) - {5}, "the test says nothing if all choose the last round"
    # What is deployed is what was chosen: its validation score in the records of the last round is the best of all.
    last = whole.clients.query("label == 'ditto' and set == 'val' and model == 'personal' and round == 5")
    scores = last.sort_values("client")["accuracy"].to_numpy()
    np.testing.assert_allclose(scores, table["val/accuracy"].to_numpy())


def test_the_table_says_which_rounds_were_chosen(tmp_path: Path) -> None:
    result = run_experiment(load({**SETTINGS, "rounds": 3}), tmp_path / "out")
    listed = pd.read_csv(tmp_path / "out" / "ditto" / "seed-0" / "selection.csv")
    assert list(listed.columns) == ["client", "round", "val/accuracy", "val/loss"]
    assert result.table["selected_round"]["ditto"] == pytest.approx(listed["round"].mean())
    assert np.isnan(result.table["selected_round"]["fedavg"])
    head, _, *rows = (tmp_path / "out" / "comparison.md").read_text().splitlines()
    place = head.split("|").index(" round chosen by validation ")
    assert rows[1].split("|")[place].strip() == "–"
    last = load({**SETTINGS, "rounds": 1, "eval": {**SETTINGS["eval"], "select": "last"}})
    assert "selected_round" not in run_experiment(last, tmp_path / "last").table.columns


def test_what_cannot_be_chosen_honestly_is_refused(tmp_path: Path) -> None:
    private = {**SETTINGS, "train": {"dp": {"clip": 1.0, "noise": 1.0}}}
    with pytest.raises(ConfigError, match=r"eval.select=val.*sample-level privacy does not cover"):
        check(load(private))
    check(load({**private, "methods": ["fedavg"]}))  # has nothing to choose
    hidden = {"dp": {"clip": 1.0, "noise": 1.0, "level": "client"}}
    check(load({**SETTINGS, "methods": ["ditto"], "train": hidden, "weights": "uniform"}))
    with pytest.raises(ConfigError, match="every = 0"):
        load({**SETTINGS, "eval": {"every": 0, "select": "val"}})
    without = load({**SETTINGS, "data": {**SETTINGS["data"], "split": {"train": 0.7, "val": 0, "test": 0.3}}})
    with pytest.raises(ConfigError, match=r"no client has any.*data.split"):
        run_experiment(without, tmp_path / "none")
    base = data()
    val = (*(v[:0] for v in base.val[:-1]), base.val[-1])  # of a held-out client alone
    with pytest.raises(ConfigError, match="no client has any"):
        Selection(Simulation(make("ditto"), replace(base, val=val), model("mlp"), RESTLESS))
    noisy = TrainConfig(epochs=1, batch_size=4, lr=0.1, dp=SampleDP(1.0, 1.0, "shuffle"))
    with pytest.raises(ConfigError, match="sample-level privacy"):
        Selection(simulation("ditto", train=noisy))
