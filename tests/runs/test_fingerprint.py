"""What tells runs apart: a resumed experiment is the one that was started, or says what is different."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import tailorfl
from report.tiny import invoke
from runs.small import StopAt, contents, facts
from tailorfl.data.build import build
from tailorfl.data.federation import Federation
from tailorfl.data.own import from_tensors
from tailorfl.data.source import Source
from tailorfl.engines import devices
from tailorfl.errors import ConfigError, RunError
from tailorfl.models.registry import build as build_model
from tailorfl.models.weights import save_weights
from tailorfl.report.document import write_report
from tailorfl.runs import fingerprint
from tailorfl.runs.extension import extended, other_experiment
from tailorfl.runs.fingerprint import changes, decisive, digests
from tailorfl.runs.trained_models import restore
from tailorfl.settings.loading import load

TINY: dict[str, Any] = {
    "methods": ["local", {"name": "ditto", "lam": 0.5}],
    "rounds": 2,
    "seeds": 2,
    "model": "logistic",
    "data": {"clients": 3},
    "eval": {"final": ["local"]},
}


def started(out: Path, **run: Any) -> Path:
    """The folder of a run that was stopped after its first job."""
    with pytest.raises(KeyboardInterrupt):
        tailorfl.run(TINY, out=out, observer=StopAt("ditto, seed 0"), **run)
    return out


def edit(out: Path, **groups: Any) -> None:
    file = out / "config.yaml"
    content = yaml.safe_load(file.read_text())
    for key, value in groups.items():
        content[key] = {**content[key], **value} if isinstance(value, dict) else value
    file.write_text(yaml.safe_dump(content))


# -- settings and versions -----------------------------------------------------------------------------------


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
    edit(out, **change)
    before = contents(out)
    with pytest.raises(RunError, match=named):
        tailorfl.run(None, out=out, resume=True)
    assert contents(out).keys() == before.keys()


@pytest.mark.slow
def test_what_changes_no_number_may_change(tmp_path: Path) -> None:
    out = started(tmp_path / "run")
    edit(out, description="other", checkpoint_every=1, engine={"name": "sequential"}, seeds=[0, 1, 5])
    assert tailorfl.run(None, out=out, resume=True).table["seeds"].tolist() == [3, 3]
    assert not (out / fingerprint.FORCED).exists()


def test_a_folder_from_before_there_were_precisions_goes_on_in_float32(tmp_path: Path) -> None:
    out = started(tmp_path / "run")
    for file in out.rglob("config.json"):
        stored = facts(file)
        assert stored["experiment"]["engine"].pop("precision") == "float32"
        file.write_text(json.dumps(stored))
    assert tailorfl.run(None, out=out, resume=True).table["seeds"].tolist() == [2, 2]


def test_a_file_with_another_content_is_refused_unless_models_do_not_depend_on_it(tmp_path: Path) -> None:
    speed, weights = tmp_path / "speed.csv", tmp_path / "start.safetensors"
    speed.write_text("client,per_second\n0,5\n1,6\n2,7\n")
    module = build_model("logistic", (1, 8, 8), 10)
    save_weights(module.state_dict(), weights)
    system, model = (
        {"speed": {"kind": "file", "file": str(speed)}},
        {"name": "logistic", "weights": str(weights)},
    )
    out = started(tmp_path / "run", system=system, model=model)
    before = speed.read_text(), weights.read_bytes()
    speed.write_text(before[0].replace("7", "8"))
    with pytest.raises(RunError, match=r"system\.speed\.file"):
        tailorfl.run(None, out=out, resume=True)
    assert restore(out).store.status == "finished"
    speed.write_text(before[0])
    save_weights({name: tensor + 1 for name, tensor in module.state_dict().items()}, weights)
    for again in (
        lambda: tailorfl.run(None, out=out, resume=True),
        lambda: restore(out),
    ):
        with pytest.raises(RunError, match="weights of model logistic"):
            again()
    weights.write_bytes(before[1])
    assert len(tailorfl.run(None, out=out, resume=True).jobs) == 4


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = started(tmp_path / "run")
    monkeypatch.setattr(fingerprint, "environment", lambda: {"tailorfl": "9.9", "torch": "2.13"})
    with pytest.raises(RunError, match=r"version\.tailorfl was '0\.1\.0' and is '9\.9'"):
        tailorfl.run(None, out=out, resume=True)


@pytest.mark.slow
def test_force_goes_on_and_the_report_says_so(tmp_path: Path) -> None:
    out = started(tmp_path / "run")
    edit(out, train={"lr": 0.9})
    for page in write_report(tailorfl.run(None, out=out, resume=True, force=True)):
        assert "Resumed by force" in page.read_text()
        assert "train.lr was 0.05 and is 0.9" in page.read_text()
    tailorfl.run(TINY, out=out, overwrite=True)
    assert not (out / fingerprint.FORCED).exists()
    assert "--force is only for --resume" in invoke("run", "--force", "method=local", code=2)


def test_what_was_forced_before_stays_noted(tmp_path: Path) -> None:
    for differences in (["first"], ["second", "first"], []):
        fingerprint.refuse(tmp_path, differences, force=True)
    assert fingerprint.forced(tmp_path) == ["first", "second"]
    with pytest.raises(RunError, match="third"):
        fingerprint.refuse(tmp_path, ["third"], force=False)


@pytest.mark.parametrize("text", ["", "methods: [local]\n"])
def test_an_emptied_config_is_damaged_and_not_the_default_experiment(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"lacks .*seeds.*restore it"):
        tailorfl.run(None, out=tmp_path, resume=True)


@pytest.mark.slow
def test_lengths_in_steps_are_written_out_and_resumed(tmp_path: Path) -> None:
    methods = [{"name": "fedrep", "head_steps": 2}, "plgu_grep"]
    out = tailorfl.run({**TINY, "model": "mlp", "methods": methods, "seeds": 1}, out=tmp_path / "run").path
    fedrep, _ = yaml.safe_load((out / "config.yaml").read_text())["methods"]
    assert "head_epochs" not in fedrep
    assert fedrep["head_steps"] == 2
    assert len(tailorfl.run(None, out=out, resume=True).jobs) == 2


def test_a_variant_stays_what_it_was_and_others_come_beside_it(tmp_path: Path) -> None:
    one, two = {"train": {"lr": 0.1}}, {"train": {"lr": 0.2}}
    kept = load(None, {**TINY, "variants": {"one": one}})
    both = extended(tmp_path, kept, load(None, {**TINY, "variants": {"one": one, "two": two}}))
    assert both.variants == {"one": one, "two": two}
    changed = load(None, {**TINY, "variants": {"one": two}})
    with pytest.raises(RunError, match="'one'"):
        extended(tmp_path, kept, changed)
    assert [("'one'" in line) for line in other_experiment(kept, changed, tmp_path)] == [True]
    assert not other_experiment(kept, kept, tmp_path)


def test_a_setting_that_did_not_exist_is_a_change_where_it_is_not_its_default() -> None:
    rounds, kept = tailorfl.ExperimentConfig().rounds, {"name": "old"}
    cases: list[tuple[dict[str, Any], dict[str, Any], int]] = [
        (kept, {**kept, "rounds": rounds}, 0),
        (kept, {**kept, "rounds": rounds + 1}, 1),
        ({**kept, "rounds": rounds}, kept, 1),
        (kept, {**kept, "method": {"lam": 1.0}}, 1),
    ]
    for before, after, number in cases:
        assert len(list(changes(before, after))) == number


def test_what_decides_the_numbers_of_a_job_are_the_settings_of_its_own_method() -> None:
    lams = {"one": 0.1, "two": 0.2}
    lines = ["local", *({"name": "ditto", "label": label, "lam": lam} for label, lam in lams.items())]
    written = load(None, {**TINY, "methods": lines}).to_dict()
    for label, lam in lams.items():
        assert decisive(written, label)["method"]["lam"] == lam
    assert decisive(written, "three")["method"] == {}
    assert "rounds" in decisive(written, "one")
    assert "rounds" not in decisive(written, "one", longer=True)


# -- data ----------------------------------------------------------------------------------------------------


def own(shift: float = 0.0) -> Source:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    return from_tensors(x + shift, (x[:, 0] > 0).long())


def test_other_samples_and_another_deal_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 4)), rng.integers(0, 2, 90)
    clients = np.array(["Basel", "Bern", "Genf"])[np.arange(90) % 3]
    given = from_tensors(x, y, clients)
    out = started(tmp_path / "run", source=given)
    other_x, other_y = x.copy(), y.copy()
    other_x[3, 1] += 1e-3
    other_y[5] = 1 - other_y[5]
    others = {
        "local, seed 0: the samples were different": [(other_x, y, clients), (x, other_y, clients)],
        "distributed to clients differently": [(x, y, np.roll(clients, 1))],
    }
    for said, arrays in others.items():
        for array in arrays:
            with pytest.raises(RunError, match=said):
                tailorfl.run(None, out=out, resume=True, source=from_tensors(*array))
    with pytest.raises(ConfigError, match="source="):
        tailorfl.run(None, out=out, resume=True)
    assert len(tailorfl.run(None, out=out, resume=True, source=given).jobs) == 4
    local = yaml.safe_load((out / "config.yaml").read_text())["train"]
    assert local["momentum"] == 0.0  # a default, written out
    stored = facts(out / "ditto" / "seed-0" / "config.json")
    assert (stored["clients"], stored["source"]) == (["Basel", "Bern", "Genf"], given.name)
    assert stored["environment"].keys() == {"tailorfl", "torch", "python", "processor"}


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
