"""Names of folders: inside the result folder, one a label, whatever the label says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tailorfl
from tailorfl.errors import ConfigError, RunError
from tailorfl.runs.build import check
from tailorfl.runs.folders import discard_jobs
from tailorfl.settings.loading import load
from tailorfl.settings.names import LONGEST, OWN_FILES, slug

ODD = [
    "..", ".", "../..", "../../x", "/etc/passwd", "a/../b", "~",
    "-rf", ".hidden", "", " ", "日本", "\x1b[31m", "a\nb",
]  # fmt: skip
TINY = {"rounds": 1, "seeds": 1, "model": "logistic", "data": {"clients": 3}, "eval": {"final": ["local"]}}


@given(st.one_of(st.text(), st.sampled_from(ODD)))
def test_a_name_is_one_harmless_component(label: str) -> None:
    name = slug(label)
    assert Path(name).name == name
    assert name not in ("", ".", "..", *OWN_FILES)
    assert not name.startswith((".", "-"))
    assert len(name.encode()) <= LONGEST
    assert slug(name) == name or name.endswith(".png") or len(label) > LONGEST


def test_what_no_folder_can_say_is_told_apart() -> None:
    assert slug("日本") != slug("中国")
    assert slug("x" * 300) != slug("x" * 299 + "y")
    assert slug("report.md") != "report.md"
    assert slug("Ditto, λ = 0.1") == "Ditto-lambda=0.1"


@pytest.mark.parametrize("label", [*ODD[:7], "x" * 300])
def test_an_experiment_writes_into_its_own_folder_alone(tmp_path: Path, label: str) -> None:
    out = tmp_path / "mine"
    neighbour = tmp_path / "seed-0"
    neighbour.mkdir()
    (neighbour / "config.json").write_text("{}")
    result = tailorfl.run({**TINY, "method": {"name": "local", "label": label or "x"}}, out=out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "seed-0"]
    assert (neighbour / "config.json").read_text() == "{}"
    (job,) = out.glob("*/seed-0/summary.json")
    assert out in job.parents
    assert result.table.index.tolist() == [label or "x"]


def test_labels_and_variants_that_would_share_a_folder_are_refused() -> None:
    for settings in (
        {"methods": [{"name": "local", "label": "a b"}, {"name": "fedavg", "label": "a/b"}]},
        {"methods": [{"name": "local", "label": "Ditto"}, {"name": "fedavg", "label": "ditto"}]},
        {"variants": {"x y": {}, "x: y": {}}},
    ):
        with pytest.raises(ConfigError, match="would share the folder"):
            check(load(settings))


def test_nothing_behind_a_link_is_deleted(tmp_path: Path) -> None:
    elsewhere = tailorfl.run({**TINY, "method": "local"}, out=tmp_path / "other").path
    out = tmp_path / "mine"
    out.mkdir()
    (out / "local").symlink_to(elsewhere / "local")
    with pytest.raises(RunError, match="local' is a link"):
        discard_jobs(out)
    assert (elsewhere / "local" / "seed-0" / "summary.json").is_file()
