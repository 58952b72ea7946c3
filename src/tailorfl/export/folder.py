"""Models as folders that need no tailorfl: weights as safetensors, the network as Python, and facts as JSON."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tailorfl.errors import ConfigError, ModelError, RunError
from tailorfl.export.formats import ONNX, TORCHSCRIPT, compared, several, write_onnx, write_torchscript
from tailorfl.export.model_card import CARD, FORMAT, LICENSE, card_of, facts_of
from tailorfl.export.source_code import NotWritableError, written
from tailorfl.export.transformer import code, head_of, is_transformer, merged, write_parts
from tailorfl.export.written_model import lines_for, text_of
from tailorfl.models.checkpoints import quiet_transformers
from tailorfl.models.lora import lora_layers
from tailorfl.runs.checkpoints import write_tensors
from tailorfl.runs.files import (
    MANIFEST,
    decode,
    encode,
    manifest_problems,
    replacing,
    replacing_folder,
    write_manifest,
    write_text,
)
from tailorfl.runs.trained_models import Deployed, Restored, restore
from tailorfl.settings.names import check_distinct, slug

log = logging.getLogger(__name__)

FACTS = "model.json"
TOLERANCE = 1e-6
"""Largest difference of outputs of an exported model from the run's, relative to the largest output."""
MERGED = 1e-5
"""The same if LoRA was merged into the weights, which rounds differently."""
TRIED = 4
"""Number of samples whose outputs are compared."""


@dataclass(frozen=True)
class Exported:
    """One model that was exported.

    Attributes:
        path: its folder.
        facts: the content of model.json.
        off: file written -> largest difference of its outputs from the run's model.
    """

    path: Path
    facts: dict[str, Any]
    off: dict[str, float]

    @property
    def lines(self) -> str:
        """Lines of Python that load the model without tailorfl."""
        return lines_for(str(self.path), self.facts)


def export(
    folder: str | Path,
    out: str | Path,
    *,
    clients: Sequence[str | int] | None = None,
    everyone: bool = False,
    shared: bool = False,
    method: str | None = None,
    seed: int | None = None,
    steps: int | None = None,
    merge: bool = False,
    onnx: bool = False,
    torchscript: bool = False,
    license_id: str = LICENSE,
    overwrite: bool = False,
    source: Any = None,
) -> list[Exported]:
    """Write models of a run, each into a folder with its name inside `out`, and return the exports.

    Args:
        folder: result folder of an experiment.
        out: folder for the exports.
        clients: clients whose deployable models are written, by name or number.
        everyone: write the models of all clients, including held-out ones.
        shared: write the global model.
        method, seed: of the job; by default the first.
        steps: batches that held-out clients train on first; by default the largest of `eval.adapt_steps`.
        merge: merge LoRA into the weights of its base, instead of writing a separate adapter.
        onnx, torchscript: write these forms too (the first needs the extra `export`).
        license_id: the licence in the model card, as the Hugging Face hub names it.
        overwrite: replace exports with the same names.
        source: the data of a run on your own data.

    Raises:
        ConfigError: no model is named, a client does not exist, or a folder is already in use.
        RunError: the run has no checkpoint, or a file cannot be written.
        ModelError: a model cannot be written.
    """
    if not (clients or everyone or shared):
        raise ConfigError(
            "name the models to export: clients (--client NAME), all clients (--all) or the global model (--global)"
        )
    check_steps(steps)
    run = restore(folder, method, seed, source)
    names = run.sim.federation.names
    numbers = run.everyone if everyone else list(dict.fromkeys(map(run.number, clients or ())))
    common = list(run.global_models()) if shared else []  # refused before anything is written
    written_names = [*(names[k] for k in numbers), *(model.name for model in common)]
    check_distinct(written_names, "the models to export")
    out = Path(out)
    for name in written_names:
        _check_free(out / slug(name), overwrite)
    exported = []
    for model in chain(run.models(numbers, steps), common):
        path = out / slug(model.name)
        _check_free(path, overwrite)  # again: the base of a transformer is written meanwhile
        exported.append(
            write(run, model, path, merge=merge, onnx=onnx, torchscript=torchscript, license_id=license_id)
        )
    return exported


def check_steps(steps: int | None) -> None:
    """Raise ConfigError if a number of training batches is negative."""
    if steps is not None and steps < 0:
        raise ConfigError(f"steps is {steps}, but must be at least 0; it is a number of training batches")


def _check_free(folder: Path, overwrite: bool) -> None:
    """Raise ConfigError if a folder is in use, unless it holds an export that may be replaced."""
    if not folder.exists() or not any(folder.iterdir() if folder.is_dir() else [folder]):
        return
    if not (folder / FACTS).is_file():
        raise ConfigError(
            f"'{folder}' is not an exported model, so it is not replaced; choose another folder (-o)"
        )
    if not overwrite:
        raise ConfigError(
            f"'{folder}' exists already; replace it with --overwrite, or choose another folder (-o)"
        )


def write(
    run: Restored,
    model: Deployed,
    folder: Path,
    *,
    merge: bool = False,
    onnx: bool = False,
    torchscript: bool = False,
    license_id: str = LICENSE,
) -> Exported:
    """Write one model into a folder and compare the written forms with it, see `export`."""
    facts = facts_of(run, model)
    owner = "The global model" if model.kind == "global" else f"The model of {model.name}"
    title = f"{owner}, made by {run.job.method.label} in {model.round} rounds."
    module, sample = model.module, sample_for(run, model)
    if merge:
        if not lora_layers(module):
            raise ConfigError("--merge adds LoRA to the weights of its base, but this model has no LoRA")
        module = merged(module)
    with replacing_folder(folder) as part:
        try:
            network, weights = _written(model, facts, part, folder, merge), "model.safetensors"
        except NotWritableError as reason:
            network, weights = "", "model.pt2"
            _program(module, sample, part / weights, str(reason))
        facts["files"] = {"code": "model.py", "weights": weights}
        write_text(part / "model.py", text_of(title, network, facts, program=not network))
        write_text(part / FACTS, encode(facts, indent=1))
        write_text(part / CARD, card_of(facts, license_id))
        write_manifest(part, _files(part, facts))
        slack = MERGED if merge else TOLERANCE
        exported = network_of(loaded(part))
        off = {"model.py": difference(model.module, exported, sample, folder, slack)}
        if onnx:
            off[ONNX] = write_onnx(module, sample, part / ONNX)
        if torchscript:
            off[TORCHSCRIPT] = write_torchscript(module, sample, part / TORCHSCRIPT)
        shutil.rmtree(part / "__pycache__", ignore_errors=True)  # made by `loaded`
        write_manifest(part, _files(part, facts))
    return Exported(folder, facts, off)


def _files(folder: Path, facts: Mapping[str, Any]) -> list[str]:
    """Return the files of an export, including those of a base model next to it, as paths relative to its folder."""
    base = facts.get("transformer", {}).get("base", ".")
    parts = [(folder, Path()), *([(folder / base, Path(base))] if base.startswith("..") else [])]
    return sorted(
        str(name / path.relative_to(part))
        for part, name in parts
        for path in part.rglob("*")
        if path.is_file() and path.name != MANIFEST and path.parent.name != "__pycache__"
    )


def checked(folder: Path) -> dict[str, Any]:
    """Return the facts of an export after checking that its files are unchanged.

    Raises:
        RunError: a file is missing or has changed, or a newer version wrote the export.
    """
    problems = manifest_problems(folder, (FACTS, "model.py"))
    is_old = not (folder / MANIFEST).is_file()
    try:
        facts: dict[str, Any] = decode((folder / FACTS).read_bytes())
        lost = [key for key in ("format", "name", "inputs", "reading") if key not in facts]
        if lost:
            raise ValueError(f"it lacks {', '.join(lost)}")
        if is_old and facts["format"] > 1:
            problems = [f"{MANIFEST} is missing"]
        if not problems and facts["format"] > FORMAT:
            raise RunError(
                f"'{folder}' was exported by a newer tailorfl (format {facts['format']}); update it"
            )
    except (OSError, ValueError, TypeError) as error:
        problems = problems or [f"{FACTS} cannot be read ({error})"]
    if problems:
        raise RunError(
            f"the exported model '{folder}' is damaged ({', '.join(problems)}); restore it from a copy, or export it "
            "again with tailorfl export"
        )
    if is_old:
        log.warning(
            "'%s' is an older export without digests, so damage to it cannot be detected; export it again",
            folder,
        )
    return facts


def _written(model: Deployed, facts: dict[str, Any], part: Path, folder: Path, merge: bool) -> str:
    """Write the weights, and return the code of the network. Raises NotWritableError if it cannot be written."""
    if not is_transformer(model.module):
        network = written(model.module)
        tensors(model.module.state_dict(), part / "model.safetensors")
        return network
    attention = facts["architecture"].get("attention", "eager")
    facts["transformer"] = write_parts(model.module, model.live, part, folder, attention, merge=merge)
    tensors(head_of(model.module), part / "model.safetensors")
    return code(model.module)


def tensors(named: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors as safetensors, tied ones under each of their names."""
    with replacing(path) as part:
        write_tensors(part, named)


def sample_for(run: Restored, model: Deployed) -> Tensor:
    """Return some samples as model inputs: its client's own, else those of the first client that has any."""
    train = run.sim.given.train
    rows = next(train[k] for k in (model.client or 0, *range(len(train))) if len(train[k]))
    return run.sim.given.source.take(torch.as_tensor(rows[:TRIED]))


def loaded(folder: Path) -> ModuleType:
    """Return the model.py of an export as a separate module. This runs its code.

    Raises:
        ModelError: it cannot be run, for instance because a package is missing.
    """
    name = f"exported_model_{hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, folder / "model.py")
    if spec is None or spec.loader is None or not (folder / "model.py").is_file():
        raise ModelError(f"'{folder}' is not an exported model: it has no model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # data classes look up their module there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a file of code raises
        raise ModelError(f"'{folder / 'model.py'}' cannot be run: {type(error).__name__}: {error}") from error
    return module


def network_of(code: ModuleType) -> nn.Module:
    """Return the network that the model.py of an export loads; any error of its code is raised."""
    with quiet_transformers():
        network: nn.Module = code.load()
    return network


def difference(
    module: nn.Module, written: Any, sample: Tensor, folder: Path, tolerance: float = TOLERANCE
) -> float:
    """Return the largest difference of outputs, for several samples and for one.

    Raises:
        ModelError: they differ by more than rounding.
    """
    return compared(
        module,
        written,
        sample,
        tolerance,
        f"the model in '{folder}' gives different outputs than the model in the run",
        "do not use it, because the network does something that cannot be copied",
    )


def _program(module: nn.Module, sample: Tensor, path: Path, reason: str) -> None:
    """Write a module as a torch.export program, which does not need its code."""
    shapes = ({0: torch.export.Dim("batch")},)
    try:
        program = torch.export.export(module, (several(sample),), dynamic_shapes=shapes)
        with replacing(path) as part:
            file = part.with_suffix(".pt2")  # the only suffix that torch accepts
            torch.export.save(program, file)
            file.rename(part)
    except RunError:
        raise
    except Exception as error:  # tracing a user's code may raise anything
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"the network can be exported neither as code ({reason}) nor as a program of torch.export ({message}); "
            "use only torch in its forward pass"
        ) from error
