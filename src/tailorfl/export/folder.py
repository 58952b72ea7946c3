"""Models as folders that need no tailorfl: weights as safetensors, the network as Python, and what is known as JSON."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tailorfl.errors import ConfigError, ModelError, RunError
from tailorfl.export.facts import FORMAT, facts_of
from tailorfl.export.formats import ONNX, TORCHSCRIPT, write_onnx, write_torchscript
from tailorfl.export.source_code import NotWritableError, written
from tailorfl.export.transformer import code, head_of, is_transformer, merged, write_parts
from tailorfl.export.written_model import lines_for, text_of
from tailorfl.models.lora import lora_layers
from tailorfl.runs import manifest
from tailorfl.runs.checkpoints import write_tensors
from tailorfl.runs.files import decode, encode, replacing, replacing_folder, write_text
from tailorfl.runs.trained_models import GLOBAL, Deployed, Restored, restore
from tailorfl.settings.names import check_distinct, slug

log = logging.getLogger(__name__)

FACTS = "model.json"
TOLERANCE = 1e-6
"""Outputs of an exported model may differ by this from those of the one in the run, relative to the largest output."""
MERGED = 1e-5
"""The same where LoRA was added to the weights, which rounds in another way."""
TRIED = 4
"""Samples that are tried."""


@dataclass(frozen=True)
class Exported:
    """One model that was exported.

    Attributes:
        path: its folder.
        facts: what model.json says.
        off: the largest difference of outputs of what was written and of the model in the run, by what was written.
    """

    path: Path
    facts: dict[str, Any]
    off: dict[str, float]

    @property
    def lines(self) -> str:
        """The lines of Python with which somebody without tailorfl loads it."""
        return lines_for(str(self.path), self.facts)


def export(
    folder: str | Path,
    out: str | Path,
    *,
    clients: Sequence[str] | None = None,
    everyone: bool = False,
    shared: bool = False,
    method: str | None = None,
    seed: int | None = None,
    steps: int | None = None,
    merge: bool = False,
    onnx: bool = False,
    torchscript: bool = False,
    overwrite: bool = False,
    source: Any = None,
) -> list[Exported]:
    """Write models of a run, each into the folder of its name below `out`, and return what was written.

    Args:
        folder: result folder of an experiment.
        out: where to.
        clients: whose deployable models, by name or number.
        everyone: those of all clients, held-out ones too.
        shared: the global model.
        method, seed: which job; by default the first.
        steps: batches that held-out clients train on before; by default the most of `eval.adapt_steps`.
        merge: LoRA is added to the weights of its base, instead of an adapter beside it.
        onnx, torchscript: write these forms too (the first needs the extra `export`).
        overwrite: replace exports of these names.
        source: the data of a run on data of your own.

    Raises:
        ConfigError: nothing, or somebody who is not there, is asked for; or a folder is taken.
        RunError: the run has no checkpoint, or a file cannot be written.
        ModelError: a model cannot be written.
    """
    if not (clients or everyone or shared):
        raise ConfigError(
            "name the models to export: clients (--client NAME), all clients (--all) or the global model (--global)"
        )
    if steps is not None and steps < 0:
        raise ConfigError(f"steps are batches of training and must be at least 0, but are {steps}")
    run = restore(folder, method, seed, source)
    names = run.sim.federation.names
    numbers = list(range(len(names))) if everyone else [run.number(name) for name in clients or ()]
    check_distinct([*(names[k] for k in numbers), *([GLOBAL] if shared else [])], "the models to export")
    out = Path(out)
    for k in numbers:
        _check_free(out / slug(names[k]), overwrite)
    found = []
    for model in _models(run, list(dict.fromkeys(numbers)), shared, steps):
        place = out / slug(model.name)
        _check_free(place, overwrite)
        found.append(write(run, model, place, merge=merge, onnx=onnx, torchscript=torchscript))
    return found


def _models(run: Restored, clients: Sequence[int], shared: bool, steps: int | None) -> Iterator[Deployed]:
    yield from run.models(clients, steps)
    if shared:
        yield from run.global_models()


def _check_free(place: Path, overwrite: bool) -> None:
    """Raise ConfigError where something else lies than an export that may be replaced."""
    if not place.exists() or not any(place.iterdir() if place.is_dir() else [place]):
        return
    if not (place / FACTS).is_file():
        raise ConfigError(f"'{place}' is no exported model and is not replaced; choose another folder (-o)")
    if not overwrite:
        raise ConfigError(
            f"'{place}' is there already; replace it with --overwrite, or choose another folder (-o)"
        )


def write(
    run: Restored,
    model: Deployed,
    place: Path,
    *,
    merge: bool = False,
    onnx: bool = False,
    torchscript: bool = False,
) -> Exported:
    """Write one model into a folder and compares what was written with it, see `export`."""
    with replacing_folder(place) as part:
        facts, off = _write_into(part, place, run, model, merge, onnx, torchscript)
    return Exported(place, facts, off)


def _write_into(
    part: Path, place: Path, run: Restored, model: Deployed, merge: bool, onnx: bool, torchscript: bool
) -> tuple[dict[str, Any], dict[str, float]]:
    """Write one model into a folder that will be called `place`; returns its facts and by how much outputs differ."""
    facts = facts_of(run, model)
    who = "the global model" if model.client is None else f"the model of {model.name}"
    title = f"{who[0].upper()}{who[1:]}, made by {run.job.method.label} in {model.round} rounds."
    module, sample = model.module, sample_for(run, model)
    if merge:
        if not lora_layers(module):
            raise ConfigError("--merge adds LoRA to the weights of its base, but this model has no LoRA")
        module = merged(module)
    try:
        network, program = _written(model, facts, part, place, merge), False
        facts["files"] = {"code": "model.py", "weights": "model.safetensors"}
    except NotWritableError as reason:
        network, program = "", True
        _program(module, sample, part / "model.pt2", str(reason))
        facts["files"] = {"code": "model.py", "weights": "model.pt2"}
    write_text(part / "model.py", text_of(title, network, facts, program=program))
    write_text(part / FACTS, encode(facts, indent=1))
    manifest.write(part, _files(part, facts))
    slack = MERGED if merge else TOLERANCE
    off = {"model.py": difference(model.module, loaded(part).load(), sample, place, slack)}
    if onnx:
        off[ONNX] = write_onnx(module, sample, part / ONNX)
    if torchscript:
        off[TORCHSCRIPT] = write_torchscript(module, sample, part / TORCHSCRIPT)
    shutil.rmtree(part / "__pycache__", ignore_errors=True)  # of `loaded`
    manifest.write(part, _files(part, facts))
    return facts, off


def _files(folder: Path, facts: Mapping[str, Any]) -> list[str]:
    """Return the files of an export, those of a base model beside it too, as a path from its folder names them."""
    base = facts.get("transformer", {}).get("base", ".")
    found = [(folder, Path()), *([(folder / base, Path(base))] if base.startswith("..") else [])]
    return sorted(
        str(name / path.relative_to(place))
        for place, name in found
        for path in place.rglob("*")
        if path.is_file() and path.name != manifest.NAME and path.parent.name != "__pycache__"
    )


def checked(folder: Path) -> dict[str, Any]:
    """Return the facts of an export, all of whose files are as they were written.

    Raises:
        RunError: they are not, or a newer version wrote them.
    """
    problems = manifest.problems(folder, (FACTS, "model.py"))
    is_old = not (folder / manifest.NAME).is_file()
    try:
        facts: dict[str, Any] = decode((folder / FACTS).read_bytes())
        lost = [key for key in ("format", "name", "inputs", "reading") if key not in facts]
        if lost:
            raise ValueError(f"it lacks {', '.join(lost)}")
        if is_old and facts["format"] > 1:
            problems = [f"{manifest.NAME} is missing"]
        if not problems and facts["format"] > FORMAT:
            raise RunError(
                f"'{folder}' was exported by a newer tailorfl (format {facts['format']}); update it"
            )
    except (OSError, ValueError, TypeError) as error:
        problems = problems or [f"{FACTS} cannot be read ({error})"]
    if problems:
        raise RunError(
            f"the exported model '{folder}' is damaged ({', '.join(problems)}); restore it from a copy, or write it "
            "again with tailorfl export"
        )
    if is_old:
        log.warning(
            "'%s' was exported before exports had digests, so damage to it cannot be noticed; export it again",
            folder,
        )
    return facts


def _written(model: Deployed, facts: dict[str, Any], part: Path, place: Path, merge: bool) -> str:
    """Write the weights, and return the code of the network; NotWritableError where there is none."""
    if not is_transformer(model.module):
        network = written(model.module)
        tensors(model.module.state_dict(), part / "model.safetensors")
        return network
    attention = facts["architecture"].get("attention", "eager")
    facts["transformer"] = write_parts(model.module, model.live, part, place, attention, merge=merge)
    tensors(head_of(model.module), part / "model.safetensors")
    return code(model.module)


def tensors(named: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors as safetensors, tied ones under every name."""
    with replacing(path) as part:
        write_tensors(part, named)


def sample_for(run: Restored, model: Deployed) -> Tensor:
    """Return some samples as the model sees them: its client's own, else the first client's."""
    rows = run.sim.given.train[model.client or 0][:TRIED]
    return run.sim.given.source.take(torch.as_tensor(rows))


def loaded(place: Path) -> ModuleType:
    """Return the model.py of an export as a module of its own. It is code, and it is run.

    Raises:
        ModelError: it cannot be run, as where a package is missing.
    """
    name = f"exported_model_{hashlib.blake2b(str(place.resolve()).encode(), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, place / "model.py")
    if spec is None or spec.loader is None or not (place / "model.py").is_file():
        raise ModelError(f"'{place}' holds no exported model: it has no model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where data classes look for their own module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a file of code raises
        raise ModelError(f"'{place / 'model.py'}' cannot be run: {type(error).__name__}: {error}") from error
    return module


@torch.no_grad()
def difference(
    module: nn.Module, other: Any, sample: Tensor, place: Path, tolerance: float = TOLERANCE
) -> float:
    """Return by how much outputs differ at most, for several samples and for one.

    Raises:
        ModelError: by more than rounding.
    """
    worst = 0.0
    for part in (sample, sample[:1]):
        ours, theirs = module(part), other(part)
        off = float((ours - theirs).abs().max())
        if not off <= tolerance * max(1.0, float(ours.abs().max())):
            raise ModelError(
                f"what was written to '{place}' gives other outputs than the model in the run (by {off:.3g}); do not "
                "use it: the network does something that cannot be copied"
            )
        worst = max(worst, off)
    return worst


def _program(module: nn.Module, sample: Tensor, path: Path, reason: str) -> None:
    """Write a module as a program of torch.export, which needs none of its code."""
    batch = torch.export.Dim("batch", min=1)
    try:
        several = torch.cat([sample, sample])[: max(2, len(sample))]
        made = torch.export.export(module, (several,), dynamic_shapes=({0: batch},))
        with replacing(path) as part:
            whole = part.with_suffix(".pt2")  # the one ending that is taken
            torch.export.save(made, whole)
            whole.rename(part)
    except RunError:
        raise
    except Exception as error:  # tracing a stranger's code raises anything
        told = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"the network can be exported neither as code ({reason}) nor as a program of torch.export ({told}); write "
            "its forward pass in torch alone"
        ) from error
