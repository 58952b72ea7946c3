"""Settings: short forms, overrides, round trips, and what mistakes are told."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tailorfl.errors import ConfigError
from tailorfl.settings.experiment import COMPARED, ExperimentConfig
from tailorfl.settings.loading import expand, load, recipes

VARIED = [
    "methods=[local, {name: fedclup, lam: 0.5}, {name: fedclup, lam: 1.5, rounds: 7, train: {steps: 3}},"
    " {name: fedavg, train: {dp: {clip: .inf, noise: 0}}}]",
    "model={name: cnn2, norm: batch, weights: start.npz, skip_head: 1}",
    "data={name: digits, split: {train: 0.6, test: 0.4}, corruptions: {kinds: [fog]}, heldout_clients: 3}",
    "train.dp={clip: 1, noise: 0.5}",
    "train.round_schedule={kind: step, milestones: [0.3, 20], factor: 0.5}",
    "engine=vectorized",
    "published={source: a paper, local: {mean: 0.5}}",
]


def mistake(*overrides: str) -> str:
    """The message of the error that overrides of the default experiment give."""
    with pytest.raises(ConfigError) as caught:
        load(None, overrides)
    return str(caught.value)


def test_methods_to_compare_apply_only_where_none_are_named() -> None:
    assert [m.name for m in load(None, methods=COMPARED).methods] == list(COMPARED)
    assert [m.name for m in load(None, ["method=fedrep"], methods=COMPARED).methods] == ["fedrep"]
    with pytest.raises(ValueError, match="frozen"):
        load().rounds = 3  # type: ignore[misc]


@pytest.mark.parametrize("count", range(len(VARIED) + 1))
def test_yaml_and_plain_values_give_an_equal_experiment(count: int, tmp_path: Path) -> None:
    config = load(None, VARIED[:count])
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    assert load(file) == load(config) == config == load(config.to_dict())
    for changes in ([], ["model=logistic"], ["model=mlp"]):  # the last without the default's options
        config = load(None, [*VARIED[:count], *changes])
        file.write_text(config.to_yaml(brief=True))
        assert load(file) == config


@pytest.mark.parametrize("text", ["1e-05", "1e-3", "12e4", ".5E3", "1.e5", "yes", "010", "1:30"])
def test_a_text_that_looks_like_a_number_is_read_back_as_a_text(text: str, tmp_path: Path) -> None:
    line = {"name": "ditto", "label": text}
    config = load(
        {"methods": [line], "data": {"excluded_clients": [text]}, "variants": {text: {"description": text}}}
    )
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    assert load(file) == config


def test_numbers_of_numpy_are_settings_like_those_of_python(tmp_path: Path) -> None:
    methods = [{"name": "ditto", "lam": np.float32(0.5)}]
    model = {"name": "mlp", "hidden": (np.int64(16), np.int64(8))}
    config = load(
        {"model": model}, {"methods": methods, "data": {"partition_options": {"alpha": np.float64(1)}}}
    )
    assert config.to_dict()["model"] == {"name": "mlp", "hidden": [16, 8]}
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    assert load(file) == config


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_recipe_loads_and_says_what_it_is(name: str) -> None:
    assert load(name).description.strip()


def test_option_named_like_a_setting_survives() -> None:
    config = load(None, ["model={name: 'own:make', options: {weights: uniform}}"])
    assert config.model.weights is None
    assert load(yaml.safe_load(config.to_yaml())).model.options == {"weights": "uniform"}


CLUPS = "methods=[{name: fedclup, label: low}, {name: fedclup, label: high}, {name: ditto, label: Ditto}]"


def at(config: ExperimentConfig, path: str) -> Any:
    """The value at a dotted path."""
    value: Any = config
    for step in path.split("."):
        value = value[int(step)] if step.isdigit() else getattr(value, step)
    return dict(**value) if path.endswith(".train") and path != "train" else value


@pytest.mark.parametrize(
    ("base", "overrides", "expected"),
    [
        # names stand for groups, options beside the name
        ({"model": "cnn2", "data": "mnist", "engine": "sequential", "method": "ditto", "seeds": 2}, [],
         {"model.name": "cnn2", "data.name": "mnist", "engine.name": "sequential", "methods.0.name": "ditto",
          "seeds": (0, 1)}),
        ({"model": {"name": "mlp", "hidden": [8]}, "methods": [{"name": "ditto", "lam": 2}]}, [],
         {"model.options": {"hidden": [8]}, "methods.0.options": {"lam": 2}}),
        (None, VARIED,
         {"methods.0.label": "local", "methods.1.label": "fedclup lam=0.5", "methods.2.label": "fedclup lam=1.5"}),
        # a length replaces the other
        (None, ["train.steps=5"], {"train.epochs": None, "train.steps": 5}),
        (None, ["train.steps=3", "train.epochs=2"], {"train.epochs": 2, "train.steps": None}),
        ({"train": {"epochs": 4}}, ["train.steps=null"], {"train.epochs": 4}),
        (None, ["train.steps=5", "train.momentum=0.9", "method={name: ditto, train: {epochs: 2}}"],
         {"methods.0.train": {"epochs": 2, "steps": None}, "train.steps": 5}),
        # values are YAML, and later ones win
        (None, ["train.lr=1e-3", "train.clip=null", "seeds=[4, 5]", "data.heldout_clients=[a, b]"],
         {"train.lr": 0.001, "train.clip": None, "seeds": (4, 5), "data.heldout_clients": ("a", "b")}),
        (None, ["rounds=3", "rounds=4"], {"rounds": 4}),
        # one method is `method`; several are chosen by label, number, or a name that only one has
        (None, ["method=fedclup", "method.lam=0.7", "method.train.lr=0.3"],
         {"methods.0.options": {"lam": 0.7}, "methods.0.train": {"lr": 0.3}}),
        (None, ["methods=[local, ditto]", "methods.ditto.lam=2", "methods.0.rounds=4"],
         {"methods.1.options": {"lam": 2}, "methods.0.rounds": 4}),
        (None, [CLUPS, "methods.ditto.lam=2", "methods.Ditto.rounds=3", "methods.high.lam=9"],
         {"methods.2.options": {"lam": 2}, "methods.2.rounds": 3, "methods.0.options": {},
          "methods.1.options": {"lam": 9}}),
        (None, ["methods=[{name: ditto, label: Ditto 0.5}, {name: ditto, label: Ditto}]", "methods.Ditto 0.5.lam=0.5",
                "methods.Ditto 0.5.train.lr=0.3", "methods.Ditto.rounds=7"],
         {"methods.0.options": {"lam": 0.5}, "methods.0.train": {"lr": 0.3}, "methods.1.rounds": 7}),
        (None, ["method={name: fedavg, train: {gamma: 2}}", "train.objective=balanced_softmax"],
         {"methods.0.train": {"gamma": 2.0}}),
        # the default model's options can be added to; another model starts from its own defaults
        (None, ["model.norm=batch"], {"model.options": {"hidden": [64], "norm": "batch"}}),
        (None, ["model.name=cnn2", "model.norm=batch"], {"model.options": {"norm": "batch"}}),
        # short forms can be entered
        ({"engine": "vectorized", "method": "ditto", "data": "mnist"},
         ["engine.chunk=4", "method.lam=3", "data.clients=7"],
         {"engine.name": "vectorized", "engine.chunk": 4, "data.name": "mnist", "data.clients": 7,
          "methods.0.options": {"lam": 3}}),
        ({"server": {"robust": "krum"}, "methods": [{"name": "local", "train": {"round_schedule": "cosine"}}]},
         ["server.robust.f=2", "method.train.round_schedule.floor=0.5", "train.round_schedule=step",
          "train.round_schedule.factor=0.2"],
         {"server.robust.rule": "krum", "server.robust.f": 2, "methods.0.train.round_schedule.kind": "cosine",
          "methods.0.train.round_schedule.floor": 0.5, "train.round_schedule.kind": "step",
          "train.round_schedule.factor": 0.2}),
        # Python values merge groups
        ({"train": {"lr": 0.3, "momentum": 0.5}, "method": "ditto"},
         {"train": {"lr": 0.1}, "methods": ["local"], "rounds": 2},
         {"train.lr": 0.1, "train.momentum": 0.5, "rounds": 2, "methods.0.name": "local"}),
        # averages: one rule for all, and a line's own
        (None, ["methods=[fedavg, {name: scaffold, weights: samples}]", "weights=uniform"],
         {"weights": "uniform", "methods.0.options": {}, "methods.1.options": {"weights": "samples"}}),
        (None, [], {"weights": "samples"}),
        # numbers name clients, as YAML reads them, where names are expected
        (None, ["data.excluded_clients=3", "data.heldout_clients=2"],
         {"data.excluded_clients": ("3",), "data.heldout_clients": 2}),
        (None, ["data.excluded_clients=3,b", "data.heldout_clients=[0, 12]"],
         {"data.excluded_clients": ("3", "b"), "data.heldout_clients": ("0", "12")}),
        # published numbers of lines that are left out go with them
        ({"methods": ["local", {"name": "fedavg", "label": "Avg"}],
          "published": {"source": "a paper", "local": {"mean": 0.5}, "Avg": {"mean": 0.6}, "Agv": {"mean": 0.7}}},
         ["methods=local"],
         {"published": {"source": "a paper", "local": {"mean": 0.5}, "Agv": {"mean": 0.7}}}),
        (None, ["train.dp={clip: .inf, noise: 0}"], {"train.dp.clip": math.inf}),
        # a mapping changes the settings that it names, and no others of their group
        ({"system": {"speed": 20, "deadline": 6}, "server": {"robust": "median"}, "deploy": {"clients": 3}},
         {"system": {"dropout": 0.3}, "server": {}, "deploy": {"min_replies": 2}},
         {"system.speed.median": 20.0, "system.deadline": 6.0, "system.dropout": 0.3, "server.robust.rule": "median",
          "deploy.clients": 3, "deploy.min_replies": 2}),
    ],
)  # fmt: skip
def test_short_forms_and_overrides(base: Any, overrides: Any, expected: dict[str, Any]) -> None:
    before = deepcopy(base)
    config = load(base, overrides)
    assert {path: at(config, path) for path in expected} == expected
    assert base == before, "the caller's settings were changed"


@pytest.mark.parametrize(("train", "dropped"), [({}, 0), ({"lr": 0.2}, 1)])
def test_a_variant_that_replaces_a_line_tells_which_of_its_settings_are_dropped(
    train: dict[str, float], dropped: int, caplog: pytest.LogCaptureFixture
) -> None:
    line = {"name": "ditto", "train": train}
    expand(load({"methods": [line], "variants": {"stronger": {"methods": [{"name": "ditto", "lam": 2.0}]}}}))
    assert len(caplog.records) == dropped
    assert all("methods.ditto.train=" in message for message in caplog.messages)


def test_options_of_a_methods_model_replace_the_experiments_wherever_they_are_written() -> None:
    model = {"name": "mlp", "hidden": [8], "norm": "batch", "options": {"weights": "mine"}}
    for changes in ({"hidden": [32]}, {"options": {"hidden": [32]}}):
        config = load({"model": model, "methods": [{"name": "ditto", "model": changes}]})
        found = config.model_of(config.methods[0])
        assert found.options == {"hidden": [32], "norm": "batch", "weights": "mine"}
        assert load(config.to_dict()) == config


def test_split_is_given_to_the_data_as_it_was_written() -> None:
    assert load(None, ["data.split.train=0.6"]).data.model_dump()["split"] == {"train": 0.6}


def test_a_name_that_two_have_is_no_choice() -> None:
    assert "Valid: 0, 1, 2, Ditto, high, low" in mistake(CLUPS, "methods.fedclup.lam=1")


@pytest.mark.parametrize("length", ["steps", "epochs"])
@pytest.mark.parametrize("null_first", [True, False])
@pytest.mark.parametrize("before", [{}, {"epochs": 4}, {"steps": 4}])
@pytest.mark.parametrize("written_as", ["texts", "group", "method", "file"])
def test_a_length_and_null_for_the_other_have_no_order(
    length: str, null_first: bool, before: dict[str, int], written_as: str, tmp_path: Path
) -> None:
    other = "epochs" if length == "steps" else "steps"
    items = [(other, None), (length, 3)] if null_first else [(length, 3), (other, None)]
    texts = [f"train.{key}={'null' if value is None else value}" for key, value in items]
    start: dict[str, Any] = {"methods": [{"name": "local"}], "train": dict(before)}
    if written_as == "texts":
        config = load(start, texts)
    elif written_as == "group":
        config = load(start, {"train": dict(items)})
    elif written_as == "method":
        config = load(start, [f"method.{text}" for text in texts])
    else:
        file = tmp_path / "experiment.yaml"
        file.write_text(yaml.safe_dump({"train": dict(items)}, sort_keys=False), encoding="utf-8")
        config = load(file)
    train = {**config.train.model_dump(), **config.methods[0].train}
    assert (train[length], train[other]) == (3, None)


UNKNOWN_KEYS = [
    ("trian.lr=1", "trian", "train"),
    ("train.lrr=1", "train.lrr", "train.lr"),
    ("data.cleints=3", "data.cleints", "data.clients"),
    ("data.split.tets=0.2", "data.split.tets", "data.split.test"),
    ("data.corruptions.kind=fog", "data.corruptions.kind", "data.corruptions.kinds"),
    ("eval.evry=3", "eval.evry", "eval.every"),
    ("engine.chunks=3", "engine.chunks", "engine.chunk"),
    ("train.dp={clip: 1, noise: 1, nois: 1}", "train.dp.nois", "train.dp.noise"),
    ("method={name: ditto, train: {lrr: 1}}", "methods.0.train.lrr", "methods.0.train.lr"),
]
MISTAKES = [
    ("train.lr=fast", "train.lr = 'fast': should be a number"),
    ("train.lr=true", "train.lr = True: should be a number"),
    ("train.lr=.nan", "train.lr = nan: should be a finite number"),
    ("rounds=2.5", "rounds = 2.5: should be a whole number"),
    ("rounds='3'", "rounds = '3': should be a whole number"),
    ("rounds=0", "rounds = 0: should be greater than or equal to 1"),
    ("fraction=1.5", "fraction = 1.5: should be less than or equal to 1"),
    ("train=5", "train = 5: should be a group of settings"),
    ("methods=3", "methods = 3: should be a list"),
    ("methods=[]", "methods = []: should not be empty"),
    ("name=3", "name = 3: should be text"),
    ("seeds=[1, 1]", "seeds = [1, 1]: has a seed twice"),
    ("data.heldout_clients=-2", "data.heldout_clients = -2: should be a number of at least 0"),
    (
        "data.corruptions.severities=[6]",
        "data.corruptions.severities.0 = 6: should be less than or equal to 5",
    ),
    ("train={epochs: 1, steps: 2}", "train needs either epochs or steps"),
    ("train.dp.clip=1", "train.dp needs either noise or epsilon"),
    ("train.dp.noise=1", "train.dp.clip is missing"),
    ("train.dp={clip: 1, noise: 1, epsilon: 3}", "train.dp needs either noise or epsilon"),
    ("train.dp={clip: .inf, noise: 1}", "train.dp has no bound (clip: .inf)"),
    ("train.dp={clip: .inf, epsilon: 1}", "train.dp has no bound (clip: .inf)"),
    ("train.dp={clip: .nan, noise: 0}", "train.dp.clip = nan: should be greater than 0"),
    ("train.dp={clip: 1, noise: .inf}", "train.dp.noise = inf: should be a finite number"),
    ("train.dp={clip: 1, noise: 1, delta: 1}", "train.dp.delta = 1: should be less than 1"),
    ("train.dp={clip: 1, noise: 1, level: user}", "should be one of sample, client"),
    ("train.dp={clip: 1, noise: 1, sampling: poison}", "should be one of poisson, shuffle"),
    ("train.dp={clip: 1, noise: 1, calibrate: client}", "has calibrate"),
    ("train.dp={clip: 1, epsilon: 1, calibrate: client, level: client}", "has calibrate: client"),
    ("methods=[{lam: 1}]", "methods.0.name is missing"),
    ("methods=[ditto, ditto]", "has 'ditto' twice; give one of them another label"),
    ("model={name: mlp, norm: a, options: {norm: b}}", "gives 'norm' twice"),
    ("track.mlflow=http://me@there", "should not contain a password"),
    ("track.mlflow=postgresql+psycopg://me:secret@there/runs", "should not contain a password"),
    (
        "track.mlflow=postgresql+psycopg://me@there/runs?sslmode=prefer&password=secret",
        "should not contain a password",
    ),
    ("data.excluded_clients=true", "should be a name, or a list of names"),
    ("method={name: fedavg, train: {gamma: 2}}", "has methods.fedavg.train.gamma, which needs objective="),
    ("sampling=uniformly", "Did you mean 'uniform'?"),
    ("eval.sets=[lokal]", "Did you mean 'local'?"),
    ("data.normalise=clients", "Did you mean 'client'?"),
    ("lr", "'lr' is not a setting; write key=value"),
    ("=3", "'=3' is not a setting"),
    ("rounds=[1", "not valid YAML"),
    ("name.first=a", "name"),
    ("methods.dito.lam=1", "Did you mean 'ditto'?"),
]


@pytest.mark.parametrize(("override", "place", "nearest"), UNKNOWN_KEYS)
def test_unknown_key_has_its_place_and_the_nearest_key(override: str, place: str, nearest: str) -> None:
    message = mistake(override)
    assert f"{place}: unknown key" in message
    assert f"Did you mean '{nearest}'?" in message


@pytest.mark.parametrize(("override", "expected"), MISTAKES)
def test_a_mistake_is_shown_with_what_was_expected(override: str, expected: str) -> None:
    assert expected in mistake(override)


def test_every_mistake_is_told_at_once() -> None:
    message = mistake("train.lr=-1", "rounds=0", "nonsense=1")
    assert "3 mistakes" in message
    assert all(place in message for place in ("train.lr", "rounds", "nonsense"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rounds: soon", "mine.yaml"),
        ("a: [1", "not valid YAML"),
        ("- a\n- b\n", "is a list"),
        ("rounds: 1\nrounds: 2\n", "'rounds' is given twice"),
        ("train:\n  lr: 1\n  lr: 2\n", "'lr' is given twice"),
    ],
)
def test_files_that_are_no_settings(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        load(file)
    file.write_text(
        "train: &base {lr: 0.3, momentum: 0.5}\nmethods: [{name: local, train: {<<: *base, lr: 0.1}}]\n"
    )
    assert dict(**load(file).methods[0].train) == {"lr": 0.1, "momentum": 0.5}
    file.write_text("# nothing\n")
    assert load(file) == ExperimentConfig()


def test_the_recipe_of_all_methods_has_all_methods() -> None:
    from tailorfl.core.method import methods

    own = {name for name, method in methods().items() if method.__module__.startswith("tailorfl.")}
    assert {method.name for method in load("all_methods").methods} == own


def test_off_is_a_word_though_yaml_reads_it_as_false(tmp_path: Path) -> None:
    """In a file and on the command line alike."""
    (tmp_path / "one.yaml").write_text("engine: {features: off}\n")
    for given in (load(tmp_path / "one.yaml"), load("demo", ["engine.features=off"])):
        assert given.engine.features == "off"
