"""Search spaces: every method ships one, every value is accepted, defaults lie inside; what users write is checked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tailorfl.core.method import Method, methods
from tailorfl.errors import ConfigError
from tailorfl.runs.folders import value_of
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.loading import load
from tailorfl.tuning.space import RATES, Choice, Range, changed, edges, spaces, start

TRAINING = {"train.lr"}


def experiment(**settings: Any) -> ExperimentConfig:
    return load(None, {"methods": ["ditto", "fedavg"], **settings})


@pytest.mark.parametrize("method", methods().values(), ids=lambda m: m.name)
def test_every_method_ships_a_space_that_it_accepts_with_its_defaults_inside(method: type[Method]) -> None:
    numbers = {f for f, info in method.model_fields.items() if info.annotation in (int, float)}
    assert "grid" in vars(method) or numbers <= set(Method.model_fields), (
        f"{method.name} has numbers and no grid"
    )
    config = load(None, {"methods": [method.name]})
    (line,), (space,) = config.methods, spaces(config).values()
    assert set(space) == TRAINING | {f"method.{key}" for key in method.grid}
    own = start(config, line, space)
    assert own is not None
    for key, dimension in space.items():
        assert isinstance(dimension, Choice)
        shipped = method.grid.get(key.removeprefix("method."), dimension.values)
        assert len(set(map(repr, dimension.values))) == len(dimension.values) == len(shipped), (
            f"{key}: twice, or default"
        )
        for value in dimension.values:
            new = changed(config, line, {key: value})
            assert value_of(config, new, key) == value
            assert {k: value_of(config, new, k) for k in space if k != key} == {
                k: v for k, v in own.items() if k != key
            }


def test_what_the_experiment_itself_says_is_in_the_space() -> None:
    config = experiment(methods=[{"name": "ditto", "lam": 0.3, "train": {"lr": 0.2}}])
    space = spaces(config)["ditto"]
    assert space["method.lam"] == Choice((0.1, 0.3, 0.75, 1.0, 2.0))
    assert start(config, config.methods[0], space) == {"train.lr": 0.2, "method.lam": 0.3}


def test_rates_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text(encoding="utf-8")
    sgd, adamw = RATES["sgd"], RATES["adamw"]
    assert f"{', '.join(f'{rate:g}' for rate in sgd)}," in page
    assert f"{adamw[0]:g} to {adamw[-1]:g} with AdamW" in page


def test_adamw_has_rates_of_its_own_and_steps_take_the_place_of_epochs() -> None:
    lines = [{"name": "fedrep", "head_steps": 4}]
    space = spaces(experiment(methods=lines, train={"optimizer": "adamw", "lr": 0.001}))["fedrep"]
    assert set(space) == {"train.lr"}
    assert 0.0003 in space["train.lr"].ends


def test_the_users_search_has_the_last_word_for_all_and_for_one_line() -> None:
    config = experiment(
        search={
            "train.lr": [0.1, 0.01, 0.1],
            "train.momentum": [0.0, 0.9],
            "method.lam": {"low": 0.01, "high": 1, "log": True},
            "methods": {"fedavg": {"train.lr": [0.3], "train": {"momentum": None}}},
        }
    )
    found = spaces(config)
    assert found["ditto"]["train.lr"] == Choice((0.01, 0.1))
    assert found["ditto"]["method.lam"] == Range(0.01, 1, True)
    assert found["ditto"]["train.momentum"] == Choice((0.0, 0.9))
    assert found["fedavg"] == {"train.lr": Choice((0.3,))}
    assert start(config, config.methods[1], found["fedavg"]) is None


def test_what_is_said_of_a_line_that_was_left_out_is_without_effect_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As of a file's lines by methods=[...]; labels have dots of their own."""
    line = {"lam": [0.3]}
    said = {"ditto": line, "APFL α=0.5": {"alpha": [0.1, 0.2]}}
    found = spaces(experiment(search={"train.lr": [0.1], "methods": said, "methods.pFedMe.train.lr": [0.7]}))
    assert found == spaces(experiment(search={"train.lr": [0.1], "methods": {"ditto": line}}))
    (warning,) = caplog.messages
    assert "'methods.APFL α=0.5.alpha', 'methods.pFedMe.train.lr' are without effect" in warning
    assert warning.endswith("its lines are ditto, fedavg")


def test_a_range_is_of_whole_numbers_where_the_setting_is() -> None:
    ends = {"low": 1, "high": 9}
    search = {"method.head_epochs": ends, "train.lr": ends, "train.batch_size": ends}
    space = spaces(experiment(methods=["fedrep"], search=search))["fedrep"]
    assert {key: space[key] for key in search} == {
        "method.head_epochs": Range(1, 9, False, True),
        "train.lr": Range(1, 9, False, False),
        "train.batch_size": Range(1, 9, False, True),
    }


def test_a_range_of_a_null_setting_is_of_whole_numbers_where_it_refuses_others() -> None:
    ends = {"low": 1, "high": 9}
    search = {"train.steps": ends, "method.personal_layers": ends}
    space = spaces(experiment(methods=["plgu_lf"], search=search))["plgu_lf"]
    assert {key: space[key] for key in search} == dict.fromkeys(search, Range(1, 9, False, True))


@pytest.mark.parametrize(
    ("search", "told"),
    [
        ({"train.lr": 0.1}, "should be a list of values"),
        ({"train.lr": []}, "should be a list of values"),
        ({"train.lr": [[0.1]]}, "should be a list of values"),
        ({"train.lr": [0.1, math.inf]}, "should be a list of values"),
        ({"train.lr": {"low": 1, "high": 0.1}}, "is not a range"),
        ({"train.lr": {"low": 0.1, "high": 0.1}}, "is not a range"),
        ({"train.lr": {"low": 0.1, "high": math.inf}}, "is not a range"),
        ({"train.lr": {"low": 0, "high": 0.1, "log": True}}, "is not a range"),
        ({"train.lr": {"low": 0.1}}, "should be a list of values"),
        ({"train.lr": [0.1, -1.0]}, "ditto cannot be tuned with train.lr = -1.0"),
        ({"train.lr": [0.1, "fast"]}, "'fast'"),
        ({"method.lam": [-1.0]}, "ditto cannot be tuned with method.lam = -1.0"),
        ({"method.lamm": [0.1]}, "'method.lamm' is not a setting"),
        ({"lam": [0.1]}, "as train.lr, method.lam"),
        ({"methods": {"ditto": {"alpha": [0.1]}}}, "'methods.ditto.alpha' is not a setting"),
        ({"methods": {"lam": [0.1]}}, "'methods.lam' is not a setting"),
        ({"rounds": [1, 2]}, "'rounds' is not a setting"),
    ],
)
def test_a_bad_space_is_refused_with_its_place(search: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match="search") as error:
        spaces(experiment(search=search))
    assert told in str(error.value)


def test_an_edge_is_where_the_method_takes_values_beyond() -> None:
    config = experiment(methods=["apfl"], search={"method.alpha": [0.0, 0.5, 1.0]})
    words = experiment(methods=["fedbabu"])
    for of, chosen, found in (
        (config, {"method.alpha": 1.0, "train.lr": 0.5}, {"train.lr": 1}),
        (config, {"method.alpha": 0.0, "train.lr": 0.001}, {"train.lr": -1}),
        (config, {"method.alpha": 0.5, "train.lr": 0.1}, {}),
        (words, {"method.ft_scope": "head"}, {}),  # which have no edges
    ):
        (space,) = spaces(of).values()
        assert edges(of, of.methods[0], space, chosen) == found


@pytest.mark.parametrize(
    ("dimension", "low", "middle", "high"),
    [
        (Choice((0.1, 0.3, 1.0)), (0.1,), (0.3,), (1.0,)),
        (Choice((0.1,)), (), (0.1,), ()),
        (Choice(("body", "head")), (), ("body", "head"), ()),
        (Choice((False, True)), (), (False, True), ()),
        (Range(0.0, 20.0), (0.0, 1.0), (1.1, 18.9), (19.0, 20.0)),  # a twentieth of its width
        (Range(1.0, 1e20, True), (1.0, 9.0), (11.0, 0.9e19), (1.1e19, 1e20)),
    ],
)
def test_values_lie_at_an_edge_or_between(
    dimension: Choice | Range, low: tuple[Any, ...], middle: tuple[Any, ...], high: tuple[Any, ...]
) -> None:
    for side, values in ((-1, low), (0, middle), (1, high)):
        assert [(dimension.has(value), dimension.side(value)) for value in values] == [(True, side)] * len(
            values
        )
    assert not any(map(dimension.has, (-0.1, 1e21, "other")))
    assert dimension.has(True) is (dimension == Choice((False, True)))


@pytest.mark.parametrize(
    ("before", "side", "after"),
    [
        (Choice((0.1, 1.0)), 1, Choice((0.1, 1.0, 10.0))),
        (Choice((0.1, 1.0)), -1, Choice((0.01, 0.1, 1.0))),
        (Choice((0.0, 0.5, 0.75)), -1, Choice((-0.5, 0.0, 0.5, 0.75))),
        (Choice((1021.0, 1022.0)), 1, Choice((1021.0, 1022.0, 1022.0**2 / 1021))),  # 1020 is not beyond
        (Choice((1020.0, 1021.0)), -1, Choice((1020.0**2 / 1021, 1020.0, 1021.0))),
        (Choice((5, 10)), 1, Choice((5, 10, 20))),
        (Choice((1, 2)), -1, Choice((0, 1, 2))),
        (Choice((1, 10)), -1, Choice((0, 1, 10))),
        (Range(0.01, 1.0, True), 1, Range(0.01, 10.0, True)),
        (Range(0.25, 0.5), -1, Range(0.125, 0.5)),
        (Range(1000.0, 1002.0), 1, Range(1000.0, 1003.0)),
        (Range(2, 6, False, True), -1, Range(0, 6, False, True)),
        (Range(2, 3, False, True), -1, Range(1, 3, False, True)),
    ],
)
def test_beyond_goes_on_as_the_values_do(before: Choice | Range, side: int, after: Choice | Range) -> None:
    assert before.beyond(side) == after


def test_one_setting_of_a_group_of_training_is_searched_beside_the_experiments_others() -> None:
    train = {"round_schedule": {"kind": "step", "milestones": [3]}, "dp": {"clip": 1, "noise": 2}}
    line = {"name": "fedavg", "train": {"round_schedule": {"kind": "step", "milestones": [5]}}}
    keys = {"train.round_schedule.factor": [0.2, 0.5], "train.dp.clip": [3.0]}
    config = experiment(methods=[line], train=train, search=keys)
    space = spaces(config)["fedavg"]
    assert {key: space[key].ends for key in keys} == {key: tuple(values) for key, values in keys.items()}
    new = changed(config, config.methods[0], {"train.round_schedule.factor": 0.5, "train.dp.clip": 3.0})
    assert value_of(config, new, "train.round_schedule.milestones") == [5]
    assert (new.train["round_schedule"]["factor"], value_of(config, new, "train.dp.noise")) == (0.5, 2)
    assert new.train["dp"]["clip"] == 3.0


def test_nested_options_are_set_beside_the_others() -> None:
    config = experiment(methods=[{"name": "feddf", "distil": {"steps": 7}}])
    new = changed(config, config.methods[0], {"method.distil.lr": 0.01, "train.lr": 0.3})
    assert new.options["distil"] == {"steps": 7, "lr": 0.01}
    assert new.train["lr"] == 0.3
    assert config.methods[0].options["distil"] == {"steps": 7}
