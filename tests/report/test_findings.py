"""The sentences that a report begins with, of made-up numbers whose differences and intervals have a closed form."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailorfl.evaluation.predictions import Predictions
from tailorfl.report import findings as module
from tailorfl.report.findings import findings
from tailorfl.report.result import ExperimentResult
from tailorfl.runs.records import save_predictions

Stored = Callable[..., Any]
E = 0.001
"""Of three differences d − E, d, d + E Student's interval is d ± 4.302653 E / √3, which is 0.002484."""
SPREAD = (-E, 0.0, E)
NAN = math.nan


def seeds(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


def near(mean: float) -> dict[int, float]:
    return seeds(*(mean + e for e in SPREAD))


LEVEL = seeds(0.5, 0.5, 0.5)
Said = tuple[str, ...]


def check(sentence: str, said: Said, unsaid: Said) -> None:
    """Fail unless a sentence has all of these parts and none of those."""
    assert [part for part in said if part not in sentence] == [], sentence
    assert [part for part in unsaid if part in sentence] == [], sentence


@pytest.mark.parametrize(
    ("means", "said", "unsaid"),
    [
        ({"ditto": seeds(0.8, 0.9)}, ("Only ditto", "accuracy 85.00 % on"), ("LocalTrain", "noise")),
        ({"ditto": seeds(0.8)}, ("Only ditto", "accuracy 80.00 %"), ("±",)),
        ({"ditto": seeds(NAN)}, ("Only ditto", "accuracy –"), ("%",)),
        ({"local": seeds(0.8), "fedavg": seeds(0.7), "ditto": seeds(0.9)},
         ("(1 seed)", "too few seeds to judge the noise", "ditto over fedavg, is 20.00 points"), ("±", "better")),
        ({"local": seeds(0.5, 0.5), "ditto": seeds(0.55, 0.65)},
         ("(2 seeds)", "too few seeds to judge the noise", "ditto over local, is 10.00 points."),
         ("±", "better", "beyond")),
        # t(0.975, 2 degrees) = 4.302653, standard error 0.05 / √3
        ({"local": LEVEL, "ditto": seeds(0.55, 0.6, 0.5)},
         ("(3 seeds)", "ditto over local, is 5.00 ± 12.42 points, which is not beyond noise"), ("better", "together")),
        ({"local": LEVEL, "fedavg": seeds(0.5, 0.44, 0.5), "ditto": seeds(0.55, 0.6, 0.5)},
         ("none of 3 differences is beyond noise" , "the largest, ditto over fedavg, is 7.00 ± 20.33 points"),
         ("better",)),
        ({"local": LEVEL, "ditto": near(0.6)}, ("ditto is better than local by 10.00 ± 0.25 points.",), ("other",)),
        ({"local": LEVEL, "fedavg": seeds(0.1, 0.5, 0.9), "ditto": near(0.6)},
         ("ditto is better than local by 10.00 ± 0.25 points", "no other difference is beyond noise"), ("fedavg",)),
        (
            {"fedavg": near(0.6), "local": LEVEL, "ditto": near(0.7)},
            ("ditto and fedavg are better than local, most ditto: by 20.00 ± 0.25 points",
             "1 of 1 other differences is beyond noise; the largest, ditto over fedavg, is 10.00 ± 0.00 points"),
            (),
        ),
        (
            {"local": LEVEL, "a": near(0.4), "b": near(0.3), "c": near(0.4), "d": near(0.4), "e": near(0.6)},
            ("e is better than local by 10.00", "b, a, c and 1 more are worse than local, most b: by 20.00 ± 0.25",
             "7 of 10 other differences are beyond noise; the largest, e over b, is 30.00 ± 0.00 points"),
            (),
        ),
        ({"fedavg": LEVEL, "ditto": near(0.6), "apfl": LEVEL},
         ("2 of 3 differences are beyond noise", "ditto over fedavg, is 10.00 ± 0.25 points"), ("other", "local")),
        ({"local": LEVEL, "ditto": LEVEL}, ("all methods are equal on average",), ("noise", "over")),
        ({"local": seeds(0.5), "ditto": {1: 0.6}}, ("No two methods",), ("points",)),
        ({"local": {0: 0.5, 1: 0.5, 2: 0.5}, "ditto": {**near(0.6), 3: 0.6}, "apfl": {3: 0.5}},
         ("(1 to 3 seeds)", "ditto is better than local by 10.00 ± 0.25 points."), ("apfl",)),
        ({"local": LEVEL, "ditto": near(0.6), "apfl": seeds(0.5, NAN, 0.5)},
         ("ditto is better than local by 10.00", "without accuracy: apfl"), ("apfl over", "apfl is")),
        ({"local": LEVEL, "fedavg": seeds(NAN, 0.1, 0.1), "apfl": seeds(0.5, NAN, 0.5)},
         ("No two methods",), ("points",)),
        # of an error the smaller is better, and it has no points
        (
            {"local": LEVEL, "fedavg": near(0.9), "ditto": near(0.4)},
            ("Mean squared error", "lower is better", "ditto is better than local by 0.1 ± 0.002484",
             "fedavg is worse than local by 0.4 ± 0.002484", "ditto over fedavg, is 0.5 ± 0"),
            ("points",),
        ),
    ],
)  # fmt: skip
def test_differences_beyond_noise_come_first_those_to_local_train_before_all(
    means: dict[str, dict[int, float]], said: Said, unsaid: Said, stored: Stored, tmp_path: Path
) -> None:
    """Of the mean of every method by seed; all clients are alike."""
    metric = "mse" if "Mean squared error" in said else "accuracy"
    jobs = [stored(m, s, [v, v], metric) for m, row in means.items() for s, v in row.items()]
    check(findings(ExperimentResult(tmp_path, jobs))[0], said, unsaid)


@pytest.fixture
def of_clients(stored: Stored, tmp_path: Path) -> Callable[..., list[str]]:
    """Findings of jobs whose clients have ten test samples: how many of them each model hits, by client's name."""

    def sentences(hits: dict[str, dict[str, int]], *, predictions: bool = True, seed: int = 0) -> list[str]:
        jobs = []
        for label, by_name in hits.items():
            values = [count / 10 for count in by_name.values()]
            summary, store = stored(label, seed, values, clients=len(by_name), names=list(by_name))
            if predictions:
                client = np.repeat(np.arange(len(values)), 10)
                right = np.concatenate([np.arange(10) < count for count in by_name.values()])
                outputs = np.stack([right, ~right], axis=1).astype(np.float32)
                y = np.zeros(len(client), dtype=np.int64)
                kept = Predictions("classification", client, np.arange(len(y)), y, outputs)
                save_predictions(store.path, kept)
            jobs.append((summary, store))
        return findings(ExperimentResult(tmp_path, jobs))

    return sentences


ALL, NO = 10, 0


@pytest.mark.parametrize(
    ("local", "ditto", "said", "unsaid"),
    [
        # Bootstrap intervals: of a gain with every sample a point; of 1 sample in 10 lost, [-0.3, 0], as the tails
        # of a binomial distribution are P(X > 3) = 0.013 and P(X > 2) = 0.07.
        (
            {"north": NO, "south": ALL, "west": 5},
            {"north": ALL, "south": NO, "west": 5},
            ("compared with local", "north gains most, 100.00 points [100.00, 100.00]",
             "1 of 3 clients loses, south beyond the noise", "by chance: about 0.075"),
            ("west",),
        ),
        (
            {"north": NO, "south": ALL, "west": ALL, "east": ALL},
            {"north": ALL, "south": NO, "west": 9, "east": NO},
            ("3 of 4 clients lose, south and east beyond the noise", "by chance: about 0.1)"),
            ("west",),
        ),
        (
            {"north": NO, "south": ALL},
            {"north": 9, "south": 9},
            ("north gains most, 90.00 points [70.00, 100.00]", "1 of 2 clients loses, not beyond the noise"),
            ("south", "chance"),
        ),
        (
            {"north": NO, "south": ALL, "west": ALL},
            {"north": ALL, "south": 9, "west": 9},
            ("2 of 3 clients lose, none beyond the noise",),
            ("south", "west"),
        ),
        (
            {"north": 5, "south": 5, "west": 5, "east": 5, "sea": ALL},
            {"north": 9, "south": 9, "west": 9, "east": 9, "sea": ALL},
            ("north, south, west and 1 more gain most, 40.00 points", "no client loses"),
            ("[", "east", "sea", "noise"),
        ),
        ({"north": 5, "south": ALL}, {"north": 5, "south": NO}, ("no client gains", "south beyond"), ("most",)),
    ],
)  # fmt: skip
def test_clients_that_gain_and_lose_are_named(
    local: dict[str, int],
    ditto: dict[str, int],
    said: Said,
    unsaid: Said,
    of_clients: Callable[..., list[str]],
) -> None:
    worse = dict.fromkeys(ditto, 0)
    methods, sentence = of_clients({"local": local, "ditto": ditto, "fedavg": worse})
    assert "1 seed" in methods
    assert sentence.startswith("With ditto")
    check(sentence, said, unsaid)


@pytest.mark.parametrize("method", ["centralized", "pooled_trees"])
def test_clients_are_compared_with_a_model_that_they_can_have(
    method: str, of_clients: Callable[..., list[str]]
) -> None:
    """Pooled data are what a federation does without; its model may be best and is no advice."""
    local, pooled = {"north": 5, "south": 5}, {"north": ALL, "south": ALL}
    sentence = of_clients({"local": local, method: pooled, "ditto": {"north": 6, "south": 6}})[1]
    assert sentence.startswith("With ditto")


def test_without_predictions_or_with_many_clients_the_noise_is_not_known(
    of_clients: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    local, ditto = {"north": NO, "south": ALL, "west": ALL}, {"north": ALL, "south": NO, "west": 9}
    unknown = of_clients({"local": local, "ditto": ditto}, predictions=False)[1]
    assert "north gains most, 100.00 points;" in unknown
    assert "2 of 3 clients lose (of 2 the noise is not known)" in unknown
    assert "beyond" not in unknown
    monkeypatch.setattr(module, "MOST_CLIENTS", 2)
    assert of_clients({"local": local, "ditto": ditto}, seed=1)[1] == unknown
    monkeypatch.setattr(module, "MOST_CLIENTS", 3)
    assert "south beyond the noise" in of_clients({"local": local, "ditto": ditto}, seed=2)[1]


def test_of_an_error_who_has_less_gains(stored: Stored, tmp_path: Path) -> None:
    values = {"local": [1.0, 1.0, 1.0], "ditto": [0.5, 1.25, 0.75], "fedavg": [2.0, 2.0, 2.0]}
    jobs = [stored(label, seed, row, "mse") for label, row in values.items() for seed in (3, 4)]
    sentence = findings(ExperimentResult(tmp_path, jobs))[1]
    assert sentence.startswith("With ditto (seed 3), compared with local, client 0 gains most, 0.5;")
    assert "1 of 3 clients loses" in sentence


def test_who_gains_needs_local_train_with_the_same_seed(stored: Stored, tmp_path: Path) -> None:
    local, ditto, apfl = (stored(m, 0, [0.5, v]) for m, v in (("local", 0.5), ("ditto", 0.9), ("apfl", 0.1)))
    assert len(findings(ExperimentResult(tmp_path, [local]))) == 1
    (_, sentence) = findings(ExperimentResult(tmp_path, [apfl, ditto]))
    assert "LocalTrain was not run" in sentence
    later = stored("ditto", 1, [0.6, 0.9])
    assert len(findings(ExperimentResult(tmp_path, [local, later]))) == 1
    undefined = stored("fedavg", 0, [NAN, NAN], metrics={"mean": None, "personal": {}})
    assert len(findings(ExperimentResult(tmp_path, [local, undefined]))) == 1
    (_, sentence) = findings(ExperimentResult(tmp_path, [apfl, ditto, local]))
    assert sentence.startswith(
        "With ditto, compared with local, client 1 gains most, 40.00 points; no client"
    )
