"""Settings as they are typed first, help, and the list of what there is to set."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tailorfl
from cli.commands import invoke
from tailorfl.errors import ConfigError
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.listing import settings
from tailorfl.settings.loading import load


def test_keyword_arguments_are_answered_in_python() -> None:
    with pytest.raises(ConfigError, match=re.escape("in Python 'train={\"lr\": 0.2}'")):
        tailorfl.run(lr=0.2)
    with pytest.raises(ConfigError, match=re.escape('data={"partition_options": {"alpha": 0.1}}')):
        tailorfl.run(alpha=0.1)
    with pytest.raises(ConfigError, match="in Python") as caught:
        tailorfl.run(clients=[[4711.5, 1], [4711.5, 2]])
    assert "4711" not in str(caught.value)  # nobody's rows are shown


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ("methods=local,fedavg", lambda c: [m.name for m in c.methods], ["local", "fedavg"]),
        ("method=local,ditto", lambda c: [m.name for m in c.methods], ["local", "ditto"]),
        ("seeds=3,5", lambda c: c.seeds, (3, 5)),
        ("seeds=4,", lambda c: c.seeds, (4,)),
        ("model.hidden=16,8", lambda c: c.model.options["hidden"], [16, 8]),
        ("eval.sets=val,local", lambda c: c.eval.sets, ("val", "local")),
        ("data.heldout_clients=a,b", lambda c: c.data.heldout_clients, ("a", "b")),
        ("description=first, then second", lambda c: c.description, "first, then second"),
        ("data.path=a,b", lambda c: c.data.path, "a,b"),
        ("data.options.path=a,b", lambda c: c.data.options["path"], "a,b"),
        ("model.lora_targets='q,v'", lambda c: c.model.options["lora_targets"], "q,v"),
    ],
)
def test_lists_need_no_brackets_where_a_list_may_stand(
    text: str, value: Callable[[ExperimentConfig], Any], expected: Any
) -> None:
    assert value(load(None, [text])) == expected


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("command", [[], ["run"], ["theory"], ["theory", "moreau"]])
def test_short_help(command: list[str], option: str) -> None:
    assert "Usage" in invoke(*command, option).output


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "tailorfl", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"tailorfl {tailorfl.__version__}"


def test_list_of_one_name_shows_it_alone() -> None:
    output = invoke("list", "methods", "ditto").output
    assert re.search(r"lam +│ number \(≥ 0\) +│ 1.0", output)
    assert output == invoke("show", "ditto").output


def test_every_setting_is_listed_with_type_default_and_meaning() -> None:
    found = {setting.key: setting for setting in settings()}
    for group, schema in (("", ExperimentConfig()), ("train.", ExperimentConfig().train)):
        assert {f"{group}{key}" for key in type(schema).model_fields} <= found.keys()
    assert [s.key for s in found.values() if not s.meaning or not s.type] == []
    lr = found["train.lr"]
    assert (lr.type, lr.default, lr.meaning) == ("number (> 0)", "0.05", "learning rate")
    assert found["methods"].type == "list of group"
    assert found["data.split.test"].type == "number (≥ 0, < 1) or official or classes or global or null"
    assert found["server.robust.rule"].type.startswith("none or median or ")
    output = invoke("list", "settings", "train").output
    assert "train.dp.epsilon" in output
    assert "engine" not in output.split("train.dp")[0]
    assert output == invoke("show", "train").output
    misspelt = invoke("show", "train.lrr", code=ConfigError.exit_code)
    assert "'train.lr'" in misspelt.stderr
    assert "fedavg" not in misspelt.stderr  # of two hundred names, only the nearest


def test_another_model_says_what_of_the_file_it_drops(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model: {name: bert, lora: 8, layers: 3}\nmethods: [{name: ditto, lam: 0.3}, fedavg]\n")
    config = load(file, ["model.name=huggingface", "model.layers=2"])
    assert config.model.options == {"layers": 2}
    assert "model.lora=8" in caplog.text
    assert "model.layers" not in caplog.text
    caplog.clear()
    load(file, ["method=ditto"])
    assert "methods.ditto.lam=0.3" in caplog.text
    caplog.clear()
    load(file, ["model.lora=4", "method=fedavg", "model.name=bert"])
    load(None, ["model=cnn2"])
    assert not caplog.text


def test_options_typed_before_the_name_of_their_model_stay() -> None:
    config = load(None, ["model.norm=batch", "model.name=cnn2", "method.lam=3", "method=ditto"])
    assert config.model.options == {"norm": "batch"}
    assert config.methods[0].options == {"lam": 3}
