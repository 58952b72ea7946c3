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

from methods.settings import in_turn
from tailorfl.data.build import build
from tailorfl.data.columns import word_of
from tailorfl.data.constants import Constants, combine
from tailorfl.data.federation import Federation
from tailorfl.data.own import from_table
from tailorfl.data.preparation import own_strata
from tailorfl.data.summaries import Summary, made_roles, summarise
from tailorfl.data.table_files import read_table
from tailorfl.errors import ConfigError, DataError
from tailorfl.export.written_model import prepare_table
from tailorfl.partition.splits import own_rows, read_split
from tailorfl.settings.data import SplitShares

NUMBERS = ["age", "dose"]
WORDS = ["pain", "sex"]
LABEL = {"label": "outcome"}
OFFICIAL = SplitShares(test="official")
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


@pytest.mark.parametrize(
    ("task", "by"),
    in_turn(("federated",), ("client",), names=("classification", "regression", "survival")),
)
def test_a_client_with_its_file_alone_has_the_same_bits(folder: Path, by: str, task: str) -> None:
    split: Any = "perfed_ckt" if task == "regression" else {"test": 0.3}
    options: dict[str, Any] = {"label": "outcome", "task": task, "indicator": True}
    if task != "classification":
        options |= {"label": ["event", "days"] if task == "survival" else "days"}
        for file in folder.iterdir():
            frame = pd.read_csv(file).drop(columns="outcome")
            rng = np.random.default_rng(len(frame))
            frame = frame.assign(event=rng.integers(0, 2, len(frame)), days=rng.random(len(frame)))
            frame.to_csv(file, index=False)
        if task == "regression":
            options["features"] = [*NUMBERS, *WORDS]
    if by == "client":
        options["impute"] = "median"
    whole = build("table", path=str(folder), options=options, normalise=by, split=split, seed=5)
    names = sorted(SIZES)
    assert whole.names == tuple(names)
    # each hospital by itself: it knows its file, the sizes of all, and JSON that comes from others
    roles = made_roles(**options)
    frames = [read_table(folder / f"{name}.csv")[1] for name in names]
    rule = read_split(split if isinstance(split, str) else SplitShares(**split), official=False)
    sizes, told, parts = [len(frame) for frame in frames], [], []
    for client, (name, frame) in enumerate(zip(names, frames, strict=True)):
        parts.append(own_rows(client, sizes, own_strata(frame, roles, name), rule, seed=5))
        told.append(json.dumps(summarise(frame, roles, parts[-1][0], name).to_dict(), sort_keys=True))
    sent = json.dumps(combine([Summary.from_dict(json.loads(one)) for one in told]).to_dict(), sort_keys=True)
    start = 0
    for client, (name, frame) in enumerate(zip(names, frames, strict=True)):
        constants = Constants.from_dict(json.loads(sent))
        if by == "client":
            constants = constants.fitted_to(frame, parts[client][0])
        x, y = constants.apply(frame)
        for part, rows in zip(("train", "val", "test"), parts[client], strict=True):
            theirs = whole.part(part)[client]
            assert theirs.tolist() == (rows + start).tolist(), (name, part)
            assert torch.equal(x[rows], whole.source.x[theirs])
            assert torch.equal(y[rows], whole.source.y[theirs])
        start += len(frame)
    assert (constants.names, constants.outputs) == (whole.source.info["features"], whole.source.outputs)


@pytest.mark.parametrize(
    ("client", "split", "words"),
    [(4, "perfed_ckt", "client is 4"), (0, "perfed_ckt", "40 rows.* 18"), (3, OFFICIAL, "official")],
)
def test_a_client_that_is_none_and_rows_that_are_not_its_own(client: int, split: Any, words: str) -> None:
    sizes = [SIZES[name] for name in sorted(SIZES)]
    with pytest.raises(DataError, match=words):
        own_rows(client, sizes, np.zeros(18, dtype=np.int64), read_split(split, official=client == 3), 1)


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


@pytest.mark.parametrize(("by", "fill"), [("federated", "mean"), ("client", "mean"), ("client", "median")])
def test_constants_are_scikit_learns_of_training_rows(folder: Path, by: str, fill: str) -> None:
    found = build("table", path=str(folder), options={**LABEL, "impute": fill}, normalise=by, seed=2)
    frame = read_table(folder)[1]
    pooled = frame.iloc[np.concatenate(list(found.train))]
    levels = [sorted(pooled[word].dropna().unique()) for word in WORDS]
    named = [*NUMBERS, *(f"{w}={level}" for w, known in zip(WORDS, levels, strict=True) for level in known)]
    assert set(found.source.info["features"]) == set(named)
    x = columns_of(found, named)
    for client, name in enumerate(found.names):
        rows = np.concatenate([found.part(part)[client] for part in ("train", "val", "test")])
        train, other = pooled if by == "federated" else frame.iloc[found.train[client]], frame.iloc[rows]
        no_dose = name == "b-elm" and by == "client"  # then all are filled with the mean of all, which is 0
        if no_dose:
            train, other = train.assign(dose=1.0), other.assign(dose=1.0)
        wanted = expected(train, other, levels, fill)
        wanted[:, 1] *= not no_dose
        np.testing.assert_allclose(x[rows], wanted, atol=2e-6)


def test_heldout_clients_contribute_nothing_but_are_prepared(folder: Path) -> None:
    options = {"normalise": "client", "heldout_clients": ["oak"]}
    one = build("table", path=str(folder), options=LABEL, **options)
    frame = read_table(folder)[1].rename(columns={"file": "site"})
    frame.loc[frame["site"] == "oak", ["age", "sex"]] = [500.0, "other"]
    two = build(source=from_table(frame, client="site", **LABEL), **options)
    rows, oak = np.concatenate(list(one.train[:3])), two.train[3]
    assert torch.equal(one.source.x[rows], two.source.x[rows])
    assert "sex=other" not in two.source.info["features"]
    assert not columns_of(two, ["age", "sex=f", "sex=m"])[oak].any()  # its own mean; a word of no level


def test_gaps_and_missing_words_are_shown_by_indicators() -> None:
    frame = pd.DataFrame({"a": [1.0, None, 3.0], "b": ["x", "y", None], "c": [1, 2, 3], "y": [0, 1, 0]})
    whole, one_row = (
        combine([summarise(frame, made_roles("y", indicator=True), rows)]) for rows in ([0, 1, 2], [0])
    )
    assert whole.names == ("a", "a missing", "b=x", "b=y", "b missing", "c")
    assert one_row.names == ("a", "b=x", "c")  # which has no gap
    x, y = whole.apply(frame)
    assert x[:, 1:5].tolist() == [[0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]
    assert (float(x[1, 0]), y.tolist()) == (0, [0, 1, 0])


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ((0.5, "0.50", "+0.5", np.float64(0.5)), "0.5"),
        (("5e-1",), "5e-1"),
        ((True,), "True"),
        ((2**53 - 1, 2.0**53 - 1, str(2**53 - 1), f"{2**53 - 1}.0"), "9007199254740991"),
        ((2**53 + 1, " 9007199254740993"), "9007199254740993"),  # no float holds it: it keeps its digits
    ],
)
def test_a_word_is_the_same_however_it_is_written(values: tuple[Any, ...], word: str) -> None:
    assert {word_of(value) for value in values} == {word}


@pytest.mark.parametrize("empty", [["?", "-9"], ["?", -9], [" ? ", "-9.0"], ("?", -9.0)])
def test_a_word_is_the_same_whatever_else_a_file_holds(empty: Any) -> None:
    roles = made_roles("y", words=["ward"], na_values=empty)
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


def test_true_is_1_in_the_joined_table_too() -> None:
    sites = [
        pd.DataFrame({"smoker": smoker, "y": ["b", "a", "a"]}) for smoker in ([True, False, None], [0, 1, 1])
    ]
    constants = combine([summarise(site, made_roles("y"), [0, 1, 2]) for site in sites])
    joined = constants.inputs(pd.concat(sites, ignore_index=True))
    assert torch.equal(joined, torch.cat([constants.inputs(site) for site in sites]))


def test_what_few_rows_have_is_not_told() -> None:
    """Rare words are one level for all, and a column that hardly anybody filled is an empty one."""
    pain = ["none"] * 4 + ["some"] * 3 + ["odd", "strange", "weird", None]
    frame = pd.DataFrame({"pain": pain, "vessels": [3.0, 1.0, *[None] * 9], "age": range(11), "y": [0] * 11})
    roles = made_roles("y", min_count=3)
    here = summarise(frame, roles, range(11)).columns
    assert (here["pain"].levels, here["pain"].count) == (("(other)", "none", "some"), 10)
    assert (here["vessels"].kind, here["age"].count) == ("empty", 11)
    enough = summarise(frame.assign(vessels=[3.0, 1.0, 2.0, *[None] * 8]), roles, range(11)).columns[
        "vessels"
    ]
    assert (enough.kind, enough.count, enough.total) == ("number", 3, 6.0)
    # Of two rare words the level of all others would tell that these rows are there.
    assert "(other)" not in summarise(frame, roles, range(9)).columns["pain"].levels
    # A word that is rare here and common elsewhere is a level.
    there = frame.assign(pain=["odd"] * 11, vessels=1.0)
    constants = combine([summarise(one, roles, range(11)) for one in (frame, there)])
    assert constants.names == ("pain=(other)", "pain=none", "pain=odd", "pain=some", "vessels", "age")
    x = constants.inputs(frame)[:, :4]
    assert x[6:].tolist() == [[0, 0, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    names: dict[str, Any] = {}
    exec("import re, torch" + prepare_table(constants.to_dict()), names)
    np.testing.assert_allclose(names["prepare"](frame.to_dict("records")), constants.inputs(frame), atol=1e-6)


def told(name: str = "ash", task: str = "classification", indicator: bool = False, **table: Any) -> Summary:
    """What a client tells of a table with a number and two classes."""
    frame = pd.DataFrame(table or {"age": [1.0, 2.0], "y": ["u", "v"]})
    return summarise(frame, made_roles("y", task=task, indicator=indicator), range(len(frame)), name)


@pytest.mark.parametrize(
    ("summaries", "words"),
    [
        ([told(), told(age=[1.0, "old"], y=["u", "v"], name="elm")], r"'age' .* ash .* elm \(1: old\)"),
        ([told(), told(indicator=True, name="elm")], "'elm' and 'ash'"),
        ([told(age=[None, None], y=["u", "v"])], "'age' is empty"),
        ([told(age=[f"n{k}" for k in range(200)], y=[0, 1] * 100)], "'age' has 200 different"),
        ([told(age=[1], y=[word], task="binary") for word in "uvw"], "'y' has 3: u, v, w"),
    ],
)
def test_summaries_that_do_not_fit_together(summaries: list[Summary], words: str) -> None:
    with pytest.raises(DataError, match=words):
        combine(summaries)


def test_what_does_not_fit_the_constants_or_the_settings_is_said(folder: Path) -> None:
    constants, old = combine([told()]), pd.DataFrame({"age": [1.0, "old"], "y": ["u", "v"]})

    def made(normalise: str = "none", **options: Any) -> Any:
        return lambda: build("table", path=str(folder), options={**LABEL, **options}, normalise=normalise)

    for call, words in (
        (lambda: constants.apply(old), "'age' .* 1 of 2 rows.*row 1"),
        (lambda: constants.apply(pd.DataFrame({"age": [1], "y": ["w"]})), "'w' .* u, v"),
        (lambda: Summary.from_dict({**told().to_dict(), "rows": -1}), "rows"),
        (made(features=["pain"]), "'pain' .*data.normalise"),
        (made("federated", impute="median"), "impute=median"),
        (made(features=["age"], words=["age"]), "data.normalise"),
    ):
        with pytest.raises((DataError, ConfigError), match=words):
            call()


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
    age = {"kind": "number", "mean": 50, "deviation": 10, "fill": 60}
    public = {
        "roles": {"label": ["outcome"]},
        "columns": {"age": age, "sex": {"kind": "word", "levels": ["m"]}},
    }
    file = tmp_path / "public.json"
    file.write_text(json.dumps(public))
    options: dict[str, Any] = {**LABEL, "constants": str(file)}
    found = build("table", path=str(folder), options=options).source
    frame = read_table(folder)[1]
    wanted = np.stack([(frame["age"].fillna(60) - 50) / 10, frame["sex"] == "m"], axis=1)
    np.testing.assert_allclose(found.x, wanted.astype(float), atol=1e-6)
    assert found.info["classes"] == ("ill", "well", "worst")
    assert "private scaling" not in found.info
    with pytest.raises(ConfigError, match=r"data.options.constants"):
        build("table", path=str(folder), options=options, normalise="federated")
    for other in folder.iterdir():
        pd.read_csv(other).fillna({"age": 1, "dose": 1}).to_csv(other, index=False)
    numbers = {**options, "label": ["age", "dose"], "features": ["sex"], "task": "regression"}
    with pytest.raises(ConfigError, match=r"outcome \(classification\), but the label is age, dose \(r"):
        build("table", path=str(folder), options=numbers)
    file.write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        build("table", path=str(folder), options=options)
