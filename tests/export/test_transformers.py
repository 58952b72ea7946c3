"""Transformers leave as a base and a PEFT adapter; every model also as ONNX and TorchScript where that can be."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tailorfl
from export.exporting import assert_apart, assert_gives, note
from methods.settings import one_of
from tailorfl.errors import ConfigError, MissingExtraError, ModelError, RunError
from tailorfl.export.folder import checked, export, loaded, network_of
from tailorfl.runs.trained_models import restore

QUICK: dict[str, Any] = {
    "seeds": [0], "rounds": 1, "engine": "sequential", "eval": {"every": 0, "final": ["local"]},
    "train": {"lr": 0.5, "batch_size": 4},
}  # fmt: skip


def notes(folder: Path) -> Path:
    """Choices in two clinics, as JSON lines."""
    folder.mkdir()
    line = '{{"instruction": "Pain {}? OPTIONS:\\n- yes\\n- no", "output": "{}"}}'
    for clinic in ("ash", "elm"):
        texts = [line.format(k, "yes" if k % 3 else "no") for k in range(12)]
        (folder / f"{clinic}.jsonl").write_text("\n".join(texts))
    return folder


DATA = {"bert": {"form": "choice", "options": 2, "length": 20}, "llama": {"form": "generation", "length": 32}}
MODELS: dict[str, dict[str, Any]] = {
    "bert": {"name": "bert", "head": "choice", "lora": 2, "vocabulary": 259},
    "llama": {"name": "llama", "head": "language", "lora": 2},
}


def run_on_texts(tmp_path: Path, kind: str, method: Any = "fedlora", **settings: Any) -> Path:
    data = {"name": "instructions", "path": str(notes(tmp_path / "notes")), "options": DATA[kind]}
    evaluation = {"every": 0, "final": ["local"], "generation": {"max_new_tokens": 1, "samples": 1}}
    settings = {
        **QUICK,
        "eval": evaluation,
        "data": data,
        "model": MODELS[kind],
        "method": method,
        **settings,
    }
    tailorfl.run(settings, out=tmp_path / "run")
    return tmp_path / "run"


def run_on_digits(folder: Path, method: str, model: Any) -> Path:
    tailorfl.run(QUICK, method=method, data={"samples": 60, "clients": 2}, model=model, out=folder)
    return folder


@pytest.mark.parametrize("kind", one_of(2, sorted(MODELS), 1))
def test_lora_leaves_in_the_format_of_peft(kind: str, tmp_path: Path) -> None:
    """`PeftModel.from_pretrained` makes the hidden states and logits that the model in the run has."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    folder = run_on_texts(tmp_path, kind)
    ash, elm = export(folder, tmp_path / "out", everyone=True)
    assert (tmp_path / "out" / "base" / "config.json").is_file()  # one for both
    auto = transformers.AutoModelForCausalLM if kind == "llama" else transformers.AutoModel
    base = auto.from_pretrained(tmp_path / "out" / "base", attn_implementation="eager")
    adapted = peft.PeftModel.from_pretrained(base, ash.path / "adapter").eval()
    module: Any = next(restore(folder).models([0])).module
    inside = module.__dict__["_causal"] if kind == "llama" else module.base
    ids = torch.randint(3, 259, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = inside(input_ids=ids)[0], adapted(input_ids=ids)[0]
        plain = auto.from_pretrained(tmp_path / "out" / "base", attn_implementation="eager").eval()(
            input_ids=ids
        )[0]
    torch.testing.assert_close(theirs, ours, atol=1e-6, rtol=1e-6)
    assert (plain - ours).abs().max() > 1e-5  # the adapter does something
    mine, others = (load_file(one.path / "adapter" / "adapter_model.safetensors") for one in (ash, elm))
    assert any(not torch.equal(mine[name], others[name]) for name in mine)
    run = restore(folder)
    note_tokens(run, ash.path, 0)
    if kind == "bert":
        assert_apart([ash.path])
    else:
        assert_gives(ash.path)
    for file in (tmp_path / "out" / "base" / "config.json", ash.path / "adapter" / "adapter_config.json"):
        content = file.read_bytes()
        file.write_bytes(content.replace(b"}", b" }", 1))
        with pytest.raises(RuntimeError, match=rf"{file.name} is damaged"):
            loaded(ash.path).load()
        with pytest.raises(RunError, match=rf"{file.name} was changed after"):
            checked(ash.path)
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("method", "merge"),
    [("flora", False), pytest.param("flexlora", False, marks=pytest.mark.slow), ("flexlora", True)],
)
def test_lora_of_ranks_by_client_leaves_with_what_it_does(method: str, merge: bool, tmp_path: Path) -> None:
    """Weights that FLoRA merged into leave as the base; ranks that FlexLoRA scales and cuts leave in the factors."""
    folder = run_on_texts(tmp_path, "bert", {"name": method, "ranks": [1, 2]}, rounds=2)
    (ash,) = export(folder, tmp_path / "out", clients=["ash"], merge=merge)
    note(restore(folder), ash.path, 0)
    assert_gives(ash.path)


def test_transformers_is_silent_while_an_export_is_loaded_but_errors_and_other_warnings_are_not() -> None:
    logging = pytest.importorskip("transformers").utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    during: list[tuple[int, bool]] = []
    code = ModuleType("exported")

    def load() -> None:
        during.append((logging.get_verbosity(), logging.is_progress_bar_enabled()))
        warnings.warn_explicit("a", FutureWarning, "modeling_utils.py", 1, "transformers.modeling_utils")
        warnings.warn("of other code", FutureWarning, stacklevel=1)
        raise OSError("no weights")

    vars(code)["load"] = load
    with pytest.warns(FutureWarning) as caught, pytest.raises(OSError, match="no weights"):
        network_of(code)
    assert [str(warning.message) for warning in caught] == ["of other code"]
    assert during == [(logging.ERROR, False)]
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def note_tokens(run: Any, place: Path, client: int) -> None:
    """As `note`; of a generation task by the module, whose judge keeps no logits."""
    if run.sim.federation.source.task != "generation":
        note(run, place, client)
        return
    from safetensors.torch import save_file

    rows = torch.as_tensor(run.sim.federation.test[client])[:2]
    x = run.sim.federation.source.x[rows]
    ((_, models),) = run.sim.personal_models((client,))
    save_file({"raw": x, "outputs": run.sim.model(models[0], x).detach()}, place / "seen.safetensors")


def test_merged_weights_need_no_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_on_texts(tmp_path, "bert")
    (ash,) = export(folder, tmp_path / "out", clients=["ash"], merge=True, torchscript=True)
    assert not (ash.path / "adapter").exists()
    assert ash.off["model.ts"] < 1e-4
    run = restore(folder)
    note(run, ash.path, 0)
    monkeypatch.setitem(sys.modules, "peft", None)
    seen, code = load_file(ash.path / "seen.safetensors"), loaded(ash.path)
    with torch.no_grad():
        torch.testing.assert_close(code.load()(seen["raw"]), seen["outputs"], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("hidden", [16, 32])
def test_the_base_of_another_model_is_neither_used_nor_replaced(hidden: int, tmp_path: Path) -> None:
    """Two seeds have other frozen weights, as have other backbones."""
    model = {"name": "vit", "layers": 1, "lora": 2}
    first = run_on_digits(tmp_path / "first", "local", {**model, "hidden": 16})
    other = tmp_path / "other"
    settings = {**QUICK, "seeds": [1], "model": {**model, "hidden": hidden}}
    tailorfl.run(settings, method="local", data={"samples": 60, "clients": 2}, out=other)
    (one,) = export(first, tmp_path / "models", clients=["0"])
    with pytest.raises(ConfigError, match="another folder"):
        export(other, tmp_path / "models", clients=["0"], overwrite=True)
    checked(one.path)  # raises if a file of it or of its base has changed
    export(first, tmp_path / "models", clients=["0", "1"], overwrite=True)


@pytest.mark.slow
def test_a_classifier_on_a_vision_transformer_leaves_with_its_head(tmp_path: Path) -> None:
    for name, model in (("lora", {"lora": 2}), ("adapters", {"adapter_size": 2}), ("whole", {})):
        run = run_on_digits(tmp_path / name, "local", {"name": "vit", **model})
        (one,) = export(run, tmp_path / f"{name}-out", clients=["0"])
        assert one.facts["files"]["weights"] == ("model.pt2" if name == "adapters" else "model.safetensors")
        note(restore(run), one.path, 0)
        assert_gives(one.path)


@pytest.mark.slow
def test_onnx_and_torchscript_give_the_same_outputs(tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    (one,) = export(
        run_on_digits(tmp_path / "run", "ditto", "mlp"), tmp_path, clients=["0"], onnx=True, torchscript=True
    )
    assert set(one.off) == {"model.py", "model.onnx", "model.ts"}
    run = restore(tmp_path / "run")
    note(run, one.path, 0)
    seen = load_file(one.path / "seen.safetensors")
    import onnxruntime

    session = onnxruntime.InferenceSession(one.path / "model.onnx")
    (found,) = session.run(None, {"x": seen["raw"].numpy()})
    torch.testing.assert_close(torch.from_numpy(found), seen["outputs"], atol=1e-4, rtol=1e-4)
    traced = torch.jit.load(one.path / "model.ts")
    torch.testing.assert_close(traced(seen["raw"]), seen["outputs"], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_vote_of_neighbours_leaves_as_torchscript_and_onnx_says_that_it_has_no_words_for_it(
    tmp_path: Path,
) -> None:
    pytest.importorskip("onnxscript")
    run = run_on_digits(tmp_path / "run", "knn_per", "mlp")
    (one,) = export(run, tmp_path, clients=["0"], torchscript=True)
    assert one.off["model.ts"] <= 1e-6
    with pytest.raises(ModelError, match=r"as ONNX: (?!Failed).+; leave that form out"):
        export(run, tmp_path / "onnx", clients=["0"], onnx=True)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_on_digits(tmp_path / "run", "local", "logistic")
    with pytest.raises(ConfigError, match="has no LoRA"):
        export(run, tmp_path / "a", clients=["0"], merge=True)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"'onnx(runtime)?'.*extra 'export'"):
        export(run, tmp_path / "b", clients=["0"], onnx=True)
