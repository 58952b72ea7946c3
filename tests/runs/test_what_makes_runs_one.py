"""What tells runs apart: each part of a federation in its digest, samples of one's own, variants, new settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tailorfl
from tailorfl.data.build import build
from tailorfl.data.federation import Federation
from tailorfl.data.own import from_tensors
from tailorfl.data.source import Source
from tailorfl.errors import RunError
from tailorfl.report.result import ExperimentResult
from tailorfl.runs.extension import extended
from tailorfl.runs.fingerprint import changes, decisive, digests
from tailorfl.settings.loading import load

TINY: dict[str, Any] = {
    "methods": ["local"],
    "rounds": 1,
    "seeds": 1,
    "data": {"clients": 2},
    "model": "logistic",
    "engine": "sequential",
    "eval": {"every": 0},
}


def own(shift: float = 0.0) -> Source:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    return from_tensors(x + shift, (x[:, 0] > 0).long())


def with_public(found: Federation, **changed: Any) -> Federation:
    assert found.public is not None
    return replace(found, public=replace(found.public, **changed))


DEALT: dict[str, Callable[[Federation], Federation]] = {
    "other training rows": lambda f: replace(f, train=f.val, val=f.train),
    "other test rows": lambda f: replace(f, test=f.val),
    "another name": lambda f: replace(f, names=("somebody", *f.names[1:])),
    "a client that is held out": lambda f: replace(f, num_clients=2),
    "rows of the server": lambda f: replace(f, server=np.array([3])),
    "no public samples": lambda f: replace(f, public=None),
    "other public samples": lambda f: with_public(f, x=f.public.x.flip(0)),  # type: ignore[union-attr]
    "a shifted set": lambda f: replace(f, shifted={"late": f.source}),
}


@pytest.mark.parametrize("what", DEALT)
def test_what_clients_have_is_in_the_digest_of_the_deal(what: str) -> None:
    found = build(samples=150, clients=3, public="digits", public_samples=9, seed=0)
    first, other = digests(found), digests(DEALT[what](found))
    assert other["given"] == first["given"]
    assert other["dealt"] != first["dealt"]
    assert {len(digest) for digest in first.values()} == {32}, "folders that exist have digests of 128 bits"


def test_shifted_sets_differ_by_their_samples_and_their_names() -> None:
    found = build(samples=150, clients=3, seed=0)
    sets: list[dict[str, Source]] = [{"a": own()}, {"b": own()}, {"a": own(1.0)}]
    assert len({digests(replace(found, shifted=shifted))["dealt"] for shifted in sets}) == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"x": own().x + 1},
        {"y": 1 - own().y},
        {"test": torch.ones(60, dtype=torch.bool)},
        {"credit": torch.ones(60, 2)},
        {"name": "other"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_samples_are_is_in_their_digest(changed: dict[str, Any]) -> None:
    found = build(source=own(), clients=2, seed=0)
    other = replace(found, source=replace(found.source, **changed))
    assert digests(other)["given"] != digests(found)["given"]


def test_results_on_other_samples_of_ones_own_stand_apart(tmp_path: Path) -> None:
    """With the same settings to the letter."""
    for name, shift, seed in (("a", 0.0, 0), ("b", 1.0, 0), ("c", 0.0, 1)):
        tailorfl.run({**TINY, "seeds": [seed]}, source=own(shift), out=tmp_path / name)
    merged = tailorfl.merge([tmp_path / name for name in "ab"], tmp_path / "out")[""]
    assert list(merged.table.index) == ["local (a)", "local (b)"]
    assert len(merged.unlike) == 1
    alike = tailorfl.merge([tmp_path / name for name in "ac"], tmp_path / "out")[""]
    assert alike.table["seeds"].to_dict() == {"local": 2}


def test_results_of_several_folders_are_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExperimentResult, "plot", lambda result: [])
    for name, seed in (("a", 0), ("b", 1)):
        tailorfl.run({**TINY, "seeds": [seed]}, out=tmp_path / name)
    merged = tailorfl.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")[""]
    tailorfl.run(out=tmp_path / "b", extend=True, seeds=[5])
    assert merged.table["seeds"].tolist() == [2]
    again = merged.again()
    assert (again.table["seeds"].tolist(), again.path) == ([3], merged.path)


def test_a_variant_stays_what_it_was_and_others_come_beside_it(tmp_path: Path) -> None:
    one, two = {"train": {"lr": 0.1}}, {"train": {"lr": 0.2}}
    kept = load(None, {**TINY, "variants": {"one": one}})
    both = extended(tmp_path, kept, load(None, {**TINY, "variants": {"one": one, "two": two}}))
    assert both.variants == {"one": one, "two": two}
    with pytest.raises(RunError, match="'one'"):
        extended(tmp_path, kept, load(None, {**TINY, "variants": {"one": two}}))


def test_a_setting_that_did_not_exist_is_a_change_where_it_is_not_its_default() -> None:
    rounds, kept = tailorfl.ExperimentConfig().rounds, {"name": "old"}
    assert list(changes(kept, {**kept, "rounds": rounds})) == []
    assert len(list(changes(kept, {**kept, "rounds": rounds + 1}))) == 1
    assert len(list(changes({**kept, "rounds": rounds}, kept))) == 1
    assert len(list(changes(kept, {**kept, "method": {"lam": 1.0}}))) == 1


def test_what_decides_the_numbers_of_a_job_are_the_settings_of_its_own_method() -> None:
    lines = [
        "local",
        {"name": "ditto", "label": "one", "lam": 0.1},
        {"name": "ditto", "label": "two", "lam": 0.2},
    ]
    written = load(None, {**TINY, "methods": lines}).to_dict()
    for label, lam in (("one", 0.1), ("two", 0.2)):
        assert decisive(written, label)["method"]["lam"] == lam
    assert decisive(written, "three")["method"] == {}
    assert "rounds" in decisive(written, "one")
    assert "rounds" not in decisive(written, "one", longer=True)
