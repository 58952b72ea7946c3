"""The layers: imports point one way, optional packages load late, and the front door is light."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tailorfl

ROOT = Path(tailorfl.__file__).parent
# A module imports its own layer and what is listed for it: what stands to its right in
# cli -> experiments -> runs, evaluation -> engines -> methods -> core -> models, data.
RIGHT = ["cli", "experiments", "runs", "evaluation", "engines", "methods", "core", "models", "data"]
BESIDE = [{"runs", "evaluation"}, {"models", "data"}]
FREE = {"errors", "py"}
# Added where the picture has a layer that the arrow does not name.
OPTIONAL = {
    "transformers", "peft", "flwr", "ray", "opacus", "tensorboard", "optuna", "datasets", "torchvision", "timm",
    "imagecorruptions", "google", "tokenizers", "accelerate", "scipy_optional",
}  # fmt: skip


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def layer_of(path: Path) -> str:
    """`core` for tailorfl/core/plan.py, `errors` for tailorfl/errors.py, "" for the package itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(absolute dotted name, line) of every import anywhere in the file, those for type checking included."""
    package = ("tailorfl", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base, node.lineno
            if base == "tailorfl":
                for name in node.names:
                    yield f"tailorfl.{name.name}", node.lineno


def allowed(layer: str) -> set[str]:
    """The layers that a module of `layer` may import."""
    if layer in ("", "errors"):
        return {"errors"}
    beside = next((pair for pair in BESIDE if layer in pair), {layer})
    first = min(RIGHT.index(one) for one in beside)
    return {layer, "errors", *(other for other in RIGHT[first:] if other not in beside)}


def top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported: not those in functions or under TYPE_CHECKING."""
    stack: list[ast.stmt] = list(tree.body)
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            stack += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            stack += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            stack += [s for handler in getattr(node, "handlers", []) for s in handler.body]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_to_the_right(path):
    layer = layer_of(path)
    if layer and layer not in (*RIGHT, "errors"):
        pytest.fail(f"{path.relative_to(ROOT)} is in no layer; place '{layer}' in the arrow of this test")
    wrong = []
    for name, line in imports(path):
        parts = name.split(".")
        if parts[0] == "tailorfl" and len(parts) > 1 and (ROOT / parts[1]).exists() | (ROOT / f"{parts[1]}.py").exists():
            if parts[1] not in allowed(layer):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_optional_packages_are_imported_where_they_are_needed(path):
    early = []
    for node in top_level(ast.parse(path.read_text(), str(path))):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        early += [f"{path.relative_to(ROOT)}:{node.lineno} {n}" for n in names if n.split(".")[0] in OPTIONAL]
    assert not early, "\n".join(early)


def test_the_rules_themselves():
    assert allowed("core") == {"core", "models", "data", "errors"}
    assert allowed("models") == {"models", "errors"}
    assert allowed("data") == {"data", "errors"}
    assert allowed("methods") == {"methods", "core", "models", "data", "errors"}
    assert "evaluation" not in allowed("runs")
    assert "engines" in allowed("runs")
    assert "cli" not in allowed("experiments")
    assert allowed("errors") == {"errors"}


@pytest.mark.parametrize("module", ["tailorfl", "tailorfl.errors", "tailorfl.cli.main", "tailorfl.experiments.config"])
def test_the_front_door_is_light(module):
    """Help, errors and the validation of settings must not wait for the numerical packages."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} does not exist yet")
    heavy = ("torch", "pandas", "matplotlib", "sklearn", "tensordict")
    code = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
