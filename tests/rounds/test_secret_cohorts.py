"""Client-level privacy where nobody may see who takes part: rounds of nobody, and what they cost, by other means."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from methods.settings import NAMES, make, one_of, row
from methods.small import SIZES, TRAIN, federation, replaced, simulation
from rounds.helpers import server_vector
from tailorfl import run as run_experiment
from tailorfl.core.method import Method
from tailorfl.errors import DivergenceError
from tailorfl.privacy import EVERYONE, epsilon
from tailorfl.rounds.client_privacy import ClientDP
from tailorfl.rounds.planning import planned_ledger
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.store import RunStore
from training.divergence import epsilon_of

opacus = pytest.mark.skipif(
    find_spec("opacus") is None, reason="accounting needs opacus: pip install 'tailorfl[privacy]'"
)
N = len(SIZES)
PLAIN = replace(TRAIN, momentum=0.0, weight_decay=0.0)
NOISY = ClientDP(0.3, 1.0)
AVERAGED = [
    n for n in NAMES if make(n).averages_replies and not make(n).pooled and not row(n).promises.get("in_turn")
]


def run(method: str | Method, dp: ClientDP | None = NOISY, rounds: int = 0, **settings: Any) -> Simulation:
    made = make(method, weights="uniform") if isinstance(method, str) else method
    given = {"train": PLAIN, "engine": "vectorized", "fraction": 0.2, "sampling": "bernoulli", **settings}
    return simulation(made, given.pop("model", "logistic"), client_dp=dp, rounds=rounds, **given)


def empty_first(**settings: Any) -> int:
    """A seed whose first round has nobody in it."""
    return next(s for s in range(100) if not run("fedavg", seed=s, **settings).sample(0))


# -- who takes part ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("secret", "changed"),
    [
        (True, {}),
        (False, {"fraction": 1.0}),  # everybody takes part, as everybody knows
        (False, {"sampling": "uniform"}),
        (False, {"dp": None}),
    ],
)
def test_who_takes_part_is_secret_where_each_is_drawn_by_itself(
    secret: bool, changed: dict[str, Any]
) -> None:
    assert run("fedavg", **changed).cohort_is_secret is secret


@opacus
@pytest.mark.parametrize(("clients", "q", "rounds"), [(10, 0.05, 100), (5, 0.1, 50)])
def test_the_rate_that_is_accounted_is_the_one_clients_have(clients: int, q: float, rounds: int) -> None:
    """ε of opacus at the measured rate; drawing again would have cost 8.85 for 3.51, and 12.4 for 5.16."""
    from opacus.accountants import PRVAccountant

    sim = run("fedavg", fraction=q, data=federation((3,) * clients))
    taken = [len(sim.sample(r)) for r in range(6000)]
    theirs = PRVAccountant()
    theirs.history = [(1.0, float(np.mean(taken)) / clients, rounds)]
    ours = epsilon([(q_, s, n * rounds) for q_, s, n in planned_ledger(sim, 1).entries(EVERYONE)], 1e-5)
    assert ours == pytest.approx(theirs.get_epsilon(1e-5), rel=0.06)


@opacus
def test_a_sample_of_fixed_size_is_counted_as_much_as_it_can_tell() -> None:
    """One of ten clients is drawn, σ = 1, all others send +C: by integration 3.747 where Poisson sampling has 1.69."""
    here, gone = [(0.1, -1.0), (0.9, 1.0)], [(0.1, 0.0), (0.9, 1.0)]
    possible = epsilon_of(here, gone, 1e-5)
    assert possible == pytest.approx(3.747, abs=2e-3)
    assert epsilon_of([(0.1, 1.0), (0.9, 0.0)], [(1.0, 0.0)], 1e-5) == pytest.approx(1.69, abs=1e-2)
    sim = run("fedavg", rounds=1, sampling="uniform", fraction=0.1, data=federation((3,) * 10))
    (drawn,) = sim.ledger.clients
    told = epsilon(sim.ledger.entries(drawn), 1e-5)
    assert told > possible
    assert told == pytest.approx(epsilon_of([(1.0, 1.0)], [(1.0, 0.0)], 1e-5), rel=0.02)


# -- a round of nobody ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", one_of(4, AVERAGED))
def test_a_round_of_nobody_moves_the_server_by_noise_alone_and_is_accounted(name: str) -> None:
    sim, still = (run(name, dp, seed=empty_first(), model="mlp") for dp in (NOISY, ClientDP(0.3, 0.0)))
    planned = planned_ledger(sim, 2)
    for one in (sim, still):
        result = one.step()
        assert (result.clients, result.rejected, result.traffic.up) == ((), (), 0)
        assert not result.losses or one.method.participation == "all"
    assert not sim.states.clients or sim.method.participation == "all"
    sim.step()
    assert sim.ledger == planned


def test_the_noise_of_a_round_of_nobody_is_that_of_all_rounds() -> None:
    """(σC/(qN)) Z, also where one took part whose update is nothing: the two cannot be told apart."""
    q, dp = 0.1, ClientDP(0.5, 2.0)
    scale = 0.5 * 2.0 / (q * N)
    moved: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    for seed in range(60):
        sim = run("fedavg", dp, seed=seed, fraction=q, train=replace(PLAIN, lr=1e-12))
        before, drawn = server_vector(sim), len(sim.sample(0))
        sim.step()
        moved.setdefault(drawn, []).append((server_vector(sim) - before) / scale)
    for drawn in (0, 1):
        z = torch.stack(moved[drawn])
        assert len(z) > 10
        # Variance of so many draws: five standard deviations.
        assert float(z.var()) == pytest.approx(1.0, abs=5 * math.sqrt(2 / z.numel()))
        assert float(z.mean()) == pytest.approx(0.0, abs=5 / math.sqrt(z.numel()))


def test_a_client_changes_the_server_by_the_clip_over_the_expected_number_whoever_else_is_there() -> None:
    """‖Δ‖ ≤ C/(qN): with the number that took part below the line its own presence would scale all others."""
    q, dp = 0.6, ClientDP(0.2, 0.0)
    nothing = replaced(federation(), 3, lambda x: 0.0 * x)
    for seed in range(6):
        sims = [run("fedavg", dp, seed=seed, fraction=q, data=d) for d in (federation(), nothing)]
        sampled = sims[0].sample(0)
        without = tuple(i for i in sampled if i != 3)
        sims[0].step()
        sims[1].step(without)
        apart = float((server_vector(sims[0]) - server_vector(sims[1])).norm())
        assert apart <= 0.2 / (q * N) * (1 + 1e-4)
        assert (apart > 0.5 * 0.2 / (q * N)) == (3 in sampled)


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "mr_mtl"])
def test_shares_of_clients_are_the_expected_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """|S|/N in a method's mathematics would scale noise with how many took part: it is q instead, also for nobody."""
    sim, seen = run(name, seed=empty_first()), []
    original = type(sim.method).aggregate

    def watching(self: Method, server: Any, replies: Any) -> Any:
        seen.append((replies.share, len(replies.clients), replies.stack.batch_size[0]))
        return original(self, server, replies)

    monkeypatch.setattr(type(sim.method), "aggregate", watching)
    for _ in range(5):
        sim.step()
    assert seen == [(0.2, 1, 1)] * 5
    assert bool(server_vector(sim).isfinite().all())


# -- engines, resuming, records ------------------------------------------------------------------------------


def test_all_may_train_where_nobody_is_asked() -> None:
    sim = run(make("pfedme", weights="uniform", participation="all"), seed=empty_first())
    before = server_vector(sim)
    assert set(sim.step().losses) == {"train"}
    assert sim.states.clients == tuple(range(N))
    assert not torch.equal(before, server_vector(sim))


def test_a_client_whose_update_is_no_number_does_not_stop_the_run() -> None:
    """It would tell that it was there; without privacy the run does stop."""
    data = federation()
    for client in range(N):
        data = replaced(data, client, lambda x: x * math.nan)
    run("fedavg", data=data, fraction=0.9).step()
    with pytest.raises(DivergenceError):
        simulation(make("fedavg"), "logistic", data=data, rounds=1)


@opacus
@pytest.mark.parametrize("sampling", ["bernoulli", "uniform"])
def test_records_do_not_say_who_took_part_where_epsilon_counts_on_it(sampling: str, tmp_path: Path) -> None:
    run_experiment(
        data={"name": "digits", "clients": 4, "samples": 100},
        model="logistic",
        methods=[{"name": "fedavg", "weights": "uniform"}],
        train={"dp": {"level": "client", "clip": 1.0, "noise": 1.0}},
        eval={"every": 1},
        rounds=3,
        seeds=1,
        fraction=0.25,
        sampling=sampling,
        out=tmp_path / "out",
    )
    folder = tmp_path / "out/fedavg/seed-0"
    rounds = RunStore.open(folder, readonly=True).rounds()
    assert len(rounds) == 3
    summary = json.loads((folder / "summary.json").read_text())
    for name, shown in (("clients", rounds.columns), ("rejected", rounds.columns), ("rejected", summary)):
        assert (name in shown) == (sampling == "uniform")
    assert ("who took part" in json.dumps(summary["privacy"])) == (sampling == "bernoulli")
