"""Tables with words and gaps: what one client makes of its file alone is what the whole federation makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from tailorfl.data.build import build
from tailorfl.data.columns import word_of
from tailorfl.data.constants import Constants, combine
from tailorfl.data.federation import Federation
from tailorfl.data.own import from_table
from tailorfl.data.preparation import own_strata
from tailorfl.data.summaries import Summary, made_roles, summarise
from tailorfl.data.table_files import read_table
from tailorfl.errors import ConfigError, DataError
from tailorfl.export.written_table import prepare_table
from tailorfl.partition.splits import own_rows, read_split
from tailorfl.settings.data import SplitShares

NUMBERS = ["age", "dose"]
WORDS = ["pain", "sex"]
SIZES = {"ash": 40, "b-elm": 25, "b": 31, "oak": 18}


def hospital(name: str, rows: int) -> pd.DataFrame:
    """Patients of a hospital with gaps; oak has neither class "worst" nor the pain "dull", and elm has never a dose."""
    rng = np.random.default_rng(sum(map(ord, name)))
    frame = pd.DataFrame(
        {
            "pain": rng.choice(["dull", "sharp", "none at all"], rows),
            "age": rng.normal(60 + rows, 10, rows).round(1),
            "sex": rng.choice(["f", "m"], rows),
            "dose": rng.exponential(3, rows),
            "outcome": rng.choice(["well", "ill", "worst"], rows),
        }
    )
    for column in (*NUMBERS, *WORDS):
        frame.loc[rng.random(rows) < 0.2, column] = None
    if name == "oak":
        frame = frame.replace({"pain": {"dull": "sharp"}, "outcome": {"worst": "ill"}})
    if name == "b-elm":
        frame["dose"] = np.nan
    return frame


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sites").mkdir()
    for name, rows in SIZES.items():
        hospital(name, rows).to_csv(tmp_path / "sites" / f"{name}.csv", index=False)
    return tmp_path / "sites"


def rows_of(federation: Federation, client: int) -> np.ndarray:
    return np.sort(np.concatenate([federation.part(part)[client] for part in ("train", "val", "test")]))


@pytest.mark.parametrize("by", ["federated", "client"])
@pytest.mark.parametrize("task", ["classification", "regression", "survival"])
def test_a_client_with_its_own_file_alone_has_the_same_bits(folder: Path, by: str, task: str) -> None:
    options: dict[str, object] = {"label": "outcome", "task": task, "indicator": True}
    if task != "classification":
        options |= {"label": ["event", "days"] if task == "survival" else "days"}
        for file in folder.iterdir():
            frame = pd.read_csv(file).drop(columns="outcome")
            rng = np.random.default_rng(len(frame))
            frame.assign(event=rng.integers(0, 2, len(frame)), days=rng.random(len(frame))).to_csv(
                file, index=False
            )
        if task == "regression":
            options["features"] = [*NUMBERS, *WORDS]
    if by == "client":
        options["impute"] = "median"
    whole = build("table", path=str(folder), options=options, normalise=by, split={"test": 0.3}, seed=5)  # type: ignore[arg-type]
    names = sorted(SIZES)
    assert whole.names == tuple(names)
    # each hospital by itself: it knows its file, the sizes of all, and JSON that comes from others
    roles = made_roles(**options)  # type: ignore[arg-type]
    frames = {name: read_table(folder / f"{name}.csv")[1] for name in names}
    rule, sizes = read_split(SplitShares(test=0.3), official=False), [len(frames[name]) for name in names]
    told, parts = [], {}
    for client, name in enumerate(names):
        parts[name] = own_rows(client, sizes, own_strata(frames[name], roles, name), rule, seed=5)
        told.append(
            json.dumps(summarise(frames[name], roles, parts[name][0], name).to_dict(), sort_keys=True)
        )
    sent = json.dumps(combine([Summary.from_dict(json.loads(one)) for one in told]).to_dict(), sort_keys=True)
    start = 0
    for client, name in enumerate(names):
        constants = Constants.from_dict(json.loads(sent))
        if by == "client":
            constants = constants.fitted_to(frames[name], parts[name][0], name)
        x, y = constants.apply(frames[name])
        for part, rows in zip(("train", "val", "test"), parts[name], strict=True):
            theirs = whole.part(part)[client]  # type: ignore[arg-type]
            assert theirs.tolist() == (rows + start).tolist(), (name, part)
            assert torch.equal(x[rows], whole.source.x[theirs])
            assert torch.equal(y[rows], whole.source.y[theirs])
        start += len(frames[name])
    assert constants.names == whole.source.info["features"]
    assert constants.outputs == whole.source.outputs


def test_a_cut_with_drawn_training_shares_is_every_clients_own(folder: Path) -> None:
    whole = build(
        "table",
        path=str(folder),
        options={"label": "outcome"},
        normalise="federated",
        split="perfed_ckt",
        seed=1,
    )
    rule, names = read_split("perfed_ckt", official=False), sorted(SIZES)
    sizes, start = [SIZES[name] for name in names], 0
    for client, size in enumerate(sizes):
        strata = whole.source.y[start : start + size].numpy()
        for part, rows in zip(
            ("train", "val", "test"), own_rows(client, sizes, strata, rule, seed=1), strict=True
        ):
            assert (whole.part(part)[client] - start).tolist() == rows.tolist()  # type: ignore[arg-type]
        start += size
    for client, rule_of_test, words in (
        (4, rule, "client 4 "),
        (0, rule, "40 rows.* 18"),
        (3, read_split(SplitShares(test="official"), official=True), "official"),
    ):
        with pytest.raises(DataError, match=words):
            own_rows(client, sizes, strata, rule_of_test, 1)


def expected(train: pd.DataFrame, other: pd.DataFrame, levels: list[list[str]], strategy: str) -> np.ndarray:
    """The columns age, dose, one of each level of pain and sex, by scikit-learn."""
    imputer = SimpleImputer(strategy=strategy, keep_empty_features=True).fit(train[NUMBERS])
    scaler = StandardScaler().fit(train[NUMBERS])  # which leaves gaps out
    held = train[NUMBERS].notna().sum().to_numpy()
    numbers = scaler.transform(pd.DataFrame(imputer.transform(other[NUMBERS]), columns=NUMBERS))
    coder = OneHotEncoder(categories=levels, handle_unknown="ignore", sparse_output=False)
    coder.fit(pd.DataFrame({"pain": pd.Series(["sharp"]), "sex": pd.Series(["f"])}, dtype=object))
    words = coder.transform(other[WORDS].astype(object).where(other[WORDS].notna(), "?"))
    return np.concatenate([numbers * np.sqrt((held - 1) / held), words], axis=1)


def columns_of(found: Federation, wanted: list[str]) -> np.ndarray:
    names = list(found.source.info["features"])
    return found.source.x[:, [names.index(name) for name in wanted]].double().numpy()


@pytest.mark.parametrize(
    ("by", "strategy"), [("federated", "mean"), ("client", "mean"), ("client", "median")]
)
def test_constants_are_scikit_learns_of_training_rows(folder: Path, by: str, strategy: str) -> None:
    options = {"label": "outcome", "impute": strategy}
    found = build("table", path=str(folder), options=options, normalise=by, seed=2)  # type: ignore[arg-type]
    frame = read_table(folder)[1]
    pooled = frame.iloc[np.concatenate(list(found.train))]
    levels = [sorted(pooled[word].dropna().unique()) for word in WORDS]
    named = [*NUMBERS, *(f"{w}={level}" for w, known in zip(WORDS, levels, strict=True) for level in known)]
    assert set(found.source.info["features"]) == set(named)
    x = columns_of(found, named)
    for client, name in enumerate(found.names):
        rows = rows_of(found, client)
        train = pooled if by == "federated" else frame.iloc[found.train[client]]
        if (
            name == "b-elm" and by == "client"
        ):  # it has no dose at all: all doses are filled with the mean of all
            assert (x[rows, 1] == 0).all()
            train = train.assign(dose=1.0)
            wanted = expected(train, frame.iloc[rows].assign(dose=1.0), levels, strategy)
            wanted[:, 1] = 0
        else:
            wanted = expected(train, frame.iloc[rows], levels, strategy)
        np.testing.assert_allclose(x[rows], wanted, atol=2e-6)


def test_no_row_but_training_rows_moves_a_constant(folder: Path) -> None:
    options = {"label": "outcome", "indicator": True}
    one = build("table", path=str(folder), options=options, normalise="federated", seed=2)
    frame = read_table(folder)[1].rename(columns={"file": "site"})
    others = np.setdiff1d(np.arange(len(frame)), np.concatenate(list(one.train)))
    frame.loc[others, "age"] = 1e6
    frame.loc[others, "pain"] = "quite new"
    two = build(source=from_table(frame, client="site", **options), normalise="federated", seed=2)  # type: ignore[arg-type]
    rows = np.concatenate(list(one.train))
    assert torch.equal(one.source.x[rows], two.source.x[rows])
    new = [n.startswith("pain=") for n in two.source.info["features"]]
    assert not two.source.x[others][:, new].any()  # a word that no training row has is 0 in all levels


def test_heldout_clients_contribute_nothing_but_are_prepared(folder: Path) -> None:
    options = {"label": "outcome"}
    one = build("table", path=str(folder), options=options, normalise="client", heldout_clients=["oak"])
    frame = read_table(folder)[1].rename(columns={"file": "site"})
    frame.loc[frame["site"] == "oak", ["age", "sex"]] = [500.0, "other"]
    two = build(
        source=from_table(frame, label="outcome", client="site"), normalise="client", heldout_clients=["oak"]
    )
    rows = np.concatenate(list(one.train[:3]))
    assert torch.equal(one.source.x[rows], two.source.x[rows])
    assert "sex=other" not in two.source.info["features"]
    assert not columns_of(two, ["age"])[two.train[3]].any()  # shifted by its own mean


def test_gaps_and_missing_words_are_shown_by_indicators() -> None:
    frame = pd.DataFrame({"a": [1.0, None, 3.0], "b": ["x", "y", None], "c": [1, 2, 3], "y": [0, 1, 0]})
    constants = combine([summarise(frame, made_roles("y", indicator=True), [0, 1, 2])])
    assert constants.names == ("a", "a missing", "b=x", "b=y", "b missing", "c")
    x, y = constants.apply(frame)
    assert x[:, 1].tolist() == [0, 1, 0]
    assert x[:, 2:5].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert x[1, 0] == 0
    assert y.tolist() == [0, 1, 0]
    none = combine([summarise(frame, made_roles("y", indicator=True), [0])])
    assert none.names == ("a", "b=x", "c")


def test_a_word_is_the_same_whatever_else_a_file_holds() -> None:
    roles = made_roles("y", words=["ward"], na_values=["?", "-9"])
    assert [word_of(value) for value in (0.5, "0.50", "+0.5", np.float64(0.5), "5e-1", True)] == [
        *["0.5"] * 4,
        "5e-1",
        "True",
    ]
    # Whole numbers that a float cannot hold keep their digits.
    assert [word_of(value) for value in (2**53 - 1, str(2**53 - 1), 2**53 + 1, " 9007199254740993")] == [
        *["9007199254740991"] * 2,
        *["9007199254740993"] * 2,
    ]
    a = pd.DataFrame({"ward": [1, 2, 2], "t": ["36.5", "?", "37"], "y": ["b", "a", "a"]})
    b = pd.DataFrame({"ward": [1.0, None, 10.0], "t": [-9, 38.0, 37.5], "y": ["c", "a", "a"]})
    constants = combine([summarise(one, roles, [0, 1, 2]) for one in (a, b)])
    assert constants.names == ("ward=1", "ward=2", "ward=10", "t")
    assert constants.classes == ("a", "b", "c")
    x = constants.inputs(b)
    assert x[:, :3].tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 1]]
    held = np.array([36.5, 37, 38, 37.5])
    filled = np.array([held.mean(), 38, 37.5])
    np.testing.assert_allclose(x[:, 3], (filled - held.mean()) / held.std(ddof=1), atol=1e-6)


def test_what_few_rows_have_is_not_told() -> None:
    """Rare words are one level for all, and a column that hardly anybody filled is an empty one."""
    frame = pd.DataFrame(
        {
            "pain": ["none"] * 4 + ["some"] * 3 + ["odd", "strange", "weird", None],
            "vessels": [3.0, 1.0, *[None] * 9],
            "age": range(11),
            "y": [0, 1] * 5 + [0],
        }
    )
    told = summarise(frame, made_roles("y", min_count=3), range(11))
    assert told.columns["pain"].levels == ("(other)", "none", "some")
    assert told.columns["pain"].count == 10
    assert told.columns["vessels"].kind == "empty"
    assert told.columns["age"].count == 11
    # Of two rare words the level of all others would tell that these rows are there.
    assert "(other)" not in summarise(frame, made_roles("y", min_count=3), range(9)).columns["pain"].levels
    # A word that is rare here and common elsewhere is a level.
    there = frame.assign(pain=["odd"] * 11, vessels=1.0)
    constants = combine([told, summarise(there, made_roles("y", min_count=3), range(11))])
    assert constants.names == ("pain=(other)", "pain=none", "pain=odd", "pain=some", "vessels", "age")
    x = constants.inputs(frame)[:, :4]
    assert x[6:].tolist() == [[0, 0, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    names: dict[str, Any] = {}
    exec("import re, torch" + prepare_table(constants.to_dict()), names)
    np.testing.assert_allclose(names["prepare"](frame.to_dict("records")), constants.inputs(frame), atol=1e-6)


def told(label: str = "y", rows: int = 2, name: str = "ash", **table: Any) -> Summary:
    """What a client tells of a table with numbers, words and two classes."""
    frame = pd.DataFrame({"age": [1.0, 2.0], "y": ["u", "v"]} if "age" not in table and rows == 2 else {})
    options = {key: table.pop(key) for key in ("task", "indicator") if key in table}
    return summarise(frame.assign(**table), made_roles(label, **options), range(rows), name)


@pytest.mark.parametrize(
    ("summaries", "words"),
    [
        ([told(), told(age=[1.0, "old"], y=["u", "v"], name="elm")], r"'age' .* ash .* elm \(1: old\)"),
        ([told(), told(indicator=True, name="elm")], "'elm' and 'ash'"),
        ([told(age=[None, None], y=["u", "v"])], "'age' is empty"),
        ([told(age=[f"n{k}" for k in range(200)], y=[0, 1] * 100, rows=200)], "'age' has 200 different"),
        ([told(age=[1], y=[word], rows=1, task="binary") for word in "uvw"], "'y' has 3: u, v, w"),
    ],
)
def test_summaries_that_do_not_fit_together(summaries: list[Summary], words: str) -> None:
    with pytest.raises(DataError, match=words):
        combine(summaries)


def test_what_does_not_fit_the_constants_or_the_settings_is_said(folder: Path) -> None:
    constants = combine([told()])
    for frame, words in (
        ({"age": [1.0, "old"], "y": ["u", "v"]}, "'age' .* 1 of 2 rows.*row 1"),
        ({"age": [1], "y": ["w"]}, "'w' .* u, v"),
    ):
        with pytest.raises(DataError, match=words):
            constants.apply(pd.DataFrame(frame))
    with pytest.raises(DataError, match=r"rows"):
        Summary.from_dict({**told().to_dict(), "rows": -1})
    for options, normalise, words in (
        ({"features": ["pain"]}, "none", "'pain' .*data.normalise"),
        ({"impute": "median"}, "federated", "medians"),
        ({"features": ["age"], "words": ["age"]}, "none", "data.normalise"),
    ):
        with pytest.raises((DataError, ConfigError), match=words):
            build("table", path=str(folder), options={"label": "outcome", **options}, normalise=normalise)  # type: ignore[arg-type]


def test_a_summary_has_no_row_of_its_client(folder: Path) -> None:
    frame = read_table(folder / "ash.csv")[1]
    told = summarise(frame, made_roles("outcome"), np.arange(30), "ash").to_dict()
    age = frame["age"][:30]
    squares = ((age - age.mean()) ** 2).sum()
    numbers = {"total": pytest.approx(age.sum()), "squares": pytest.approx(squares), "levels": []}
    assert told["columns"]["age"] == {"kind": "number", "count": int(age.notna().sum()), **numbers}
    words = {"total": 0.0, "squares": 0.0, "levels": ["f", "m"]}
    assert told["columns"]["sex"] == {"kind": "word", "count": int(frame["sex"][:30].notna().sum()), **words}
    assert (told["rows"], told["classes"]) == (30, ["ill", "well", "worst"])


def test_constants_of_a_file_are_used_as_they_are(tmp_path: Path, folder: Path) -> None:
    public = {
        "roles": {"label": ["outcome"]},
        "columns": {
            "age": {"kind": "number", "mean": 50, "deviation": 10, "fill": 60},
            "sex": {"kind": "word", "levels": ["m"]},
        },
    }
    (tmp_path / "public.json").write_text(json.dumps(public))
    options = {"label": "outcome", "constants": str(tmp_path / "public.json")}
    found = build("table", path=str(folder), options=options)
    frame = read_table(folder)[1]
    wanted = np.stack([(frame["age"].fillna(60) - 50) / 10, frame["sex"] == "m"], axis=1)
    np.testing.assert_allclose(found.source.x, wanted.astype(float), atol=1e-6)
    assert found.source.info["classes"] == ("ill", "well", "worst")
    assert "private scaling" not in found.source.info
    with pytest.raises(ConfigError, match="constants of 'sites' were given"):
        build("table", path=str(folder), options=options, normalise="federated")
    other = {**options, "label": ["age", "dose"], "features": ["sex"], "task": "regression"}
    for file in folder.iterdir():
        pd.read_csv(file).fillna({"age": 1, "dose": 1}).to_csv(file, index=False)
    with pytest.raises(
        ConfigError, match=r"label outcome \(classification\), but the label is age, dose \(reg"
    ):
        build("table", path=str(folder), options=other)
    (tmp_path / "public.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        build("table", path=str(folder), options=options)


def test_test_sets_of_ones_own_are_prepared_by_the_constants_of_all(folder: Path) -> None:
    older = hospital("older", 12)
    found = build(
        "table", path=str(folder), options={"label": "outcome"}, normalise="client", shifts={"older": older}
    )
    everyone = found.source.info["preparation"].everyone
    assert torch.equal(found.shifted["older"].x, everyone.inputs(older))
    assert found.shifted["older"].y.tolist() == [("ill", "well", "worst").index(o) for o in older["outcome"]]
