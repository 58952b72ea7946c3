"""A resumed experiment is the one that was started, or says what is different."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import tailorfl
from tailorfl.cli.main import app
from tailorfl.data.own import from_tensors
from tailorfl.engines import devices
from tailorfl.errors import ConfigError, RunError
from tailorfl.report.document import write_report
from tailorfl.runs import fingerprint
from tailorfl.runs.job import Job, Observer
from tailorfl.runs.store import RunStore

TINY: dict[str, Any] = {
    "methods": ["local", {"name": "ditto", "lam": 0.5}],
    "rounds": 2,
    "seeds": 2,
    "model": "logistic",
    "data": {"clients": 3},
    "eval": {"final": ["local"]},
}


class StopAfterFirstJob(Observer):
    def job_started(self, job: Job, position: int, total: int, rounds: int, resumed_from: int) -> None:
        if position == 2:
            raise KeyboardInterrupt


def started(out: Path, **run: Any) -> Path:
    with pytest.raises(KeyboardInterrupt):
        tailorfl.run(TINY, out=out, observer=StopAfterFirstJob(), **run)
    return out


def edit(out: Path, **groups: Any) -> None:
    file = out / "config.yaml"
    content = yaml.safe_load(file.read_text())
    for key, value in groups.items():
        content[key] = {**content[key], **value} if isinstance(value, dict) else value
    file.write_text(yaml.safe_dump(content))


@pytest.mark.slow
def test_an_untouched_experiment_goes_on(tmp_path: Path) -> None:
    out = started(tmp_path / "run")
    resumed = tailorfl.run(None, out=out, resume=True)
    whole = tailorfl.run(TINY, out=tmp_path / "whole")
    assert resumed.table.drop(columns=["seconds", "seconds_ci"]).equals(
        whole.table.drop(columns=["seconds", "seconds_ci"])
    )
    assert not (out / fingerprint.FORCED).exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"train": {"lr": 0.9}}, r"local, seed 0: train\.lr was 0\.05 and is 0\.9"),
        ({"data": {"partition_options": {"alpha": 5.0}}}, r"partition_options\.alpha was .* and is 5\.0"),
        ({"rounds": 3}, "rounds was 2 and is 3"),
        ({"methods": [{"name": "fedavg", "label": "local"}]}, r"method\.name was 'local' and is 'fedavg'"),
        ({"eval": {"max_samples": 7}}, r"eval\.max_samples was None and is 7"),
        ({"engine": {"precision": "bfloat16"}}, r"engine\.precision was 'float32' and is 'bfloat16'"),
    ],
)
def test_changed_settings_are_refused_by_name_and_nothing_is_trained(
    tmp_path: Path, change: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_processor_has_bfloat16", lambda: True)
    out = started(tmp_path / "run")
    before = sorted(p for p in out.rglob("*") if p.is_file())
    edit(out, **change)
    with pytest.raises(RunError, match=named):
        tailorfl.run(None, out=out, resume=True)
    assert sorted(p for p in out.rglob("*") if p.is_file()) == before


@pytest.mark.slow
def test_what_changes_no_number_may_change(tmp_path: Path) -> None:
    out = started(tmp_path / "run")
    edit(out, description="other", checkpoint_every=1, engine={"name": "sequential"}, seeds=[0, 1, 5])
    assert tailorfl.run(None, out=out, resume=True).table["seeds"].tolist() == [3, 3]


def test_a_folder_from_before_there_were_precisions_goes_on_in_float32(tmp_path: Path) -> None:
    out = started(tmp_path / "run")
    for file in out.rglob("config.json"):
        stored = json.loads(file.read_text())
        assert stored["experiment"]["engine"].pop("precision") == "float32"
        file.write_text(json.dumps(stored))
    assert tailorfl.run(None, out=out, resume=True).table["seeds"].tolist() == [2, 2]


def test_other_samples_and_another_deal_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y, clients = rng.normal(size=(90, 4)), rng.integers(0, 2, 90), np.arange(90) % 3
    own = from_tensors(x, y, clients)
    out = started(tmp_path / "run", source=own)
    other_x, other_y = x.copy(), y.copy()
    other_x[3, 1] += 1e-3
    other_y[5] = 1 - other_y[5]
    for source in (from_tensors(other_x, y, clients), from_tensors(x, other_y, clients)):
        with pytest.raises(RunError, match="local, seed 0: the samples were others"):
            tailorfl.run(None, out=out, resume=True, source=source)
    with pytest.raises(RunError, match="dealt to clients in another way"):
        tailorfl.run(None, out=out, resume=True, source=from_tensors(x, y, np.roll(clients, 1)))
    tailorfl.run(None, out=out, resume=True, source=own)


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = started(tmp_path / "run")
    monkeypatch.setattr(fingerprint, "environment", lambda: {"tailorfl": "9.9", "torch": "2.13"})
    with pytest.raises(RunError, match=r"version\.tailorfl was '0\.1\.0' and is '9\.9'"):
        tailorfl.run(None, out=out, resume=True)


@pytest.mark.slow
def test_force_goes_on_and_the_report_says_so(tmp_path: Path) -> None:
    out = started(tmp_path / "run")
    edit(out, train={"lr": 0.9})
    result = tailorfl.run(None, out=out, resume=True, force=True)
    for page in write_report(result):
        assert "Resumed by force" in page.read_text()
        assert "train.lr was 0.05 and is 0.9" in page.read_text()
    tailorfl.run(TINY, out=out, overwrite=True)
    assert not (out / fingerprint.FORCED).exists()
    refused = CliRunner().invoke(app, ["run", "--force", "method=local"])
    assert refused.exit_code == 2
    assert "--force is for --resume" in refused.output


def test_an_emptied_config_is_damaged_and_not_the_default_experiment(tmp_path: Path) -> None:
    out = started(tmp_path / "run")
    for text in ("", "methods: [local]\n"):
        (out / "config.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"lacks .*seeds.*restore it"):
            tailorfl.run(None, out=out, resume=True)


def test_the_folder_says_what_was_run(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = np.array(["Basel", "Bern", "Genf"])[np.arange(60) % 3]
    own = from_tensors(rng.normal(size=(60, 4)), rng.integers(0, 2, 60), names)
    result = tailorfl.run({**TINY, "methods": ["ditto"], "seeds": 1}, out=tmp_path / "run", source=own)
    (method,) = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["methods"]
    assert method["lam"] == 1.0  # the default, written out
    stored = RunStore.open(tmp_path / "run" / "ditto" / "seed-0", readonly=True).config
    assert stored["clients"] == ["Basel", "Bern", "Genf"]
    assert stored["source"] == own.name
    assert stored["environment"].keys() == {"tailorfl", "torch", "python", "processor"}
    assert len(result.jobs) == 1


@pytest.mark.slow
def test_lengths_in_steps_are_written_out_and_resumed(tmp_path: Path) -> None:
    methods = [{"name": "fedrep", "head_steps": 2}, "plgu_grep"]
    out = tailorfl.run({**TINY, "model": "mlp", "methods": methods, "seeds": 1}, out=tmp_path / "run").path
    written = yaml.safe_load((out / "config.yaml").read_text())["methods"]
    assert "head_epochs" not in written[0]
    assert written[0]["head_steps"] == 2
    assert len(tailorfl.run(None, out=out, resume=True).jobs) == 2


def test_what_was_forced_before_stays_noted(tmp_path: Path) -> None:
    for differences in (["first"], ["second", "first"], []):
        fingerprint.refuse(tmp_path, differences, force=True)
    assert fingerprint.forced(tmp_path) == ["first", "second"]
    with pytest.raises(RunError, match="third"):
        fingerprint.refuse(tmp_path, ["third"], force=False)
