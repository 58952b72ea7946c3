"""Checkpoints that are not there: refused at once, and no hub is asked for a folder or without a network."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tailorfl import errors, hub
from tailorfl.errors import ConfigError, DataError, MissingExtraError, ModelError
from tailorfl.runs.catalogue import write
from tailorfl.settings.errors import check_names
from tailorfl.settings.loading import load

pytest.importorskip("transformers", reason="pip install 'tailorfl[text]'")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What a loader was asked for, none of which exists; and no name of a host is known."""
    for variable in (*hub.OFFLINE, *hub.PROXIES):
        monkeypatch.delenv(variable, raising=False)

    def unknown_host(*address: object, **options: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown_host)
    return []


def loader(asked: list[tuple[str, Any]]) -> Any:
    def load(place: str, **options: Any) -> None:
        asked.append((place, options.get("local_files_only", False)))
        raise OSError("not found")

    return load


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", "../up", "a/b/c", "~/nowhere", "with blank"])
def test_a_folder_that_is_not_there_is_asked_of_nobody(asked: list[tuple[str, Any]], name: str) -> None:
    with pytest.raises(OSError, match="does not exist"):
        hub.loaded(loader(asked), name)
    assert asked == []


def test_a_name_is_looked_for_in_the_cache_and_then_on_a_hub_that_can_be_reached(
    asked: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match="cannot be reached from here"):
        hub.loaded(loader(asked), "owner/name")
    assert asked == [("owner/name", True)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given: [])
    with pytest.raises(OSError, match="not found"):
        hub.loaded(loader(asked), "owner/name")
    assert asked[1:] == [("owner/name", True), ("owner/name", False)]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match="HF_HUB_OFFLINE forbids access"):
        hub.loaded(loader(asked), "owner/name")
    assert asked[-1] == ("owner/name", True)


def test_a_folder_is_read_without_a_hub(asked: list[tuple[str, Any]], tmp_path: Path) -> None:
    read = hub.loaded(lambda place, **options: (place, options), str(tmp_path), a=1)
    assert read == (str(tmp_path), {"local_files_only": True, "a": 1})


@pytest.mark.usefixtures("asked")
def test_models_and_tokenizers_say_so() -> None:
    from tailorfl.data.tokenizers import load_tokenizer
    from tailorfl.models.registry import build

    with pytest.raises(ModelError, match="cannot be reached from here"):
        build("huggingface", (8,), 2, checkpoint="owner/name")
    with pytest.raises(ModelError, match="'/nowhere' does not exist"):
        build("huggingface", (8,), 2, checkpoint="/nowhere")
    with pytest.raises(DataError, match="cannot be reached from here"):
        load_tokenizer("owner/name")


def test_settings_are_refused_before_anything_is_loaded() -> None:
    config = load(None, ["data=text", "model.name=huggingface", "model.checkpoint=/nowhere/model"])
    with pytest.raises(ConfigError, match="'/nowhere/model' does not exist"):
        check_names(config)
    check_names(load(None, ["data=text", "model.name=huggingface", "model.checkpoint=owner/name"]))


@pytest.mark.parametrize(
    ("data", "model", "said"),
    [
        ("generation", {"name": "llama"}, "model.head=language"),
        ("choice", {"name": "llama", "head": "language"}, "model.head=classification or choice"),
    ],
)
def test_data_and_head_must_ask_for_the_same(tmp_path: Path, data: str, model: Any, said: str) -> None:
    from tailorfl.data.build import build as build_federation
    from tailorfl.runs.build import make_model
    from tailorfl.settings.experiment import OneModelConfig

    row = {"instruction": "What colour has grass?\nOPTIONS:\n- green\n- red", "output": "green"}
    lines = [json.dumps({**row, "client": client}) for client in "ab"] * 8
    (tmp_path / "notes.jsonl").write_text("\n".join(lines))
    options = {"form": data, "length": 96, "tokenizer": "byte"}
    source = build_federation(
        "instructions", path=str(tmp_path), options=options, split={"train": 1.0}
    ).source
    with pytest.raises(ModelError, match=said):
        make_model(OneModelConfig.model_validate(model), source, 0)


def test_a_missing_package_is_installed_by_a_command_that_needs_no_registry_entry_of_ours() -> None:
    """`pip install 'tailorfl[text]'` finds nothing where the package came from a checkout."""
    told = str(MissingExtraError("peft", "text"))
    command = told.partition("pip install ")[2].partition(" (")[0]
    assert "'peft" in command
    assert "tailorfl" not in command
    assert all(word.startswith("'") for word in command.split())
    assert "pip install 'nothing'" in str(MissingExtraError("nothing", "no_such_extra"))
    assert errors._needed("no_such_extra") == []


def test_a_wrong_folder_is_answered_before_torch_is_imported(tmp_path: Path) -> None:
    write()
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from tailorfl.cli.main import app\n"
        "result = CliRunner().invoke(app, ['run', 'model.name=huggingface', 'model.checkpoint=./none'])\n"
        "assert result.exit_code == 2 and 'does not exist' in result.output, result.output\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
