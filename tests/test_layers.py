"""The layers: imports point one way, optional packages load late, and the front door is light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import tailorfl
from imported import imported_by

ROOT = Path(tailorfl.__file__).parent
# A layer a line, from the ground up: a module imports its own layer and those above it in this list, and where several
# stand in one line they do not see each other.
LAYERS = (
    ("settings",),
    ("partition",),
    ("models", "data", "privacy"),
    ("training",),
    ("core",),
    ("theory", "engines"),
    ("methods", "rounds"),
    ("evaluation",),
    ("benchmark",),
    ("runs",),
    ("report",),
    ("tuning", "export"),
    ("deploy", "testing"),
    ("api",),
    ("cli",),
)
# Modules that every layer stands on, and that see none (but errors are raised everywhere).
GROUND = {
    "archives", "errors", "hashing", "hub", "interface", "modules", "printable",
}  # fmt: skip
BELOW_SETTINGS = {"modules": {"errors"}, "interface": {"errors", "printable"}}
OPTIONAL = {
    "transformers", "peft", "flwr", "ray", "opacus", "tensorboard", "optuna", "datasets", "torchvision",
    "timm", "imagecorruptions", "tokenizers", "accelerate", "rouge_score", "mlflow", "wandb", "onnx",
    "onnxruntime", "onnxscript", "flwr_datasets",
}  # fmt: skip


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def layer_of(path: Path) -> str:
    """`core` for tailorfl/training/plan.py, `errors` for tailorfl/errors.py, "" for the package itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return {("__init__",): "", ("__main__",): "cli"}.get(parts, parts[0])


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements in a node, at any depth: an import is one, and the expressions are most of a tree."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from statements(child)


def imported(path: Path) -> Iterator[tuple[str, list[str], int]]:
    """(absolute dotted name, names taken from it, line) of every import anywhere in a file, for type checking too."""
    package = ("tailorfl", *path.relative_to(ROOT).parts[:-1])
    for node in statements(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((name.name, [], node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base, [name.name for name in node.names], node.lineno


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(absolute dotted name, line) of every import anywhere in the file; of the package, those of what it exports."""
    for base, names, line in imported(path):
        if base == "tailorfl" and names:
            yield from ((f"tailorfl.{name}", line) for name in names)
        else:
            yield base, line


def imported_modules(path: Path) -> set[str]:
    """The modules of the package that a file imports anywhere, for type checking too."""
    found = set()
    for base, names, _ in imported(path):
        found |= {f"{base}.{name}" if _is_module(f"{base}.{name}") else base for name in names} or {base}
    return {name for name in found if _is_module(name)}


def _is_module(name: str) -> bool:
    top, *parts = name.split(".")
    place = ROOT.joinpath(*parts)
    return top == "tailorfl" and (place.with_suffix(".py").is_file() or (place / "__init__.py").is_file())


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which leads to every other of its group."""
    reach = {name: set(graph[name]) for name in graph}
    for middle in graph:  # Warshall's closure
        for name in graph:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    rings = {tuple(sorted({b for b in reach[a] if a in reach.get(b, ())})) for a in graph if a in reach[a]}
    return [list(ring) for ring in sorted(rings) if len(ring) > 1]


def allowed(layer: str) -> set[str]:
    """The layers that a module of `layer` may import; "" is the package itself, the door to all but `cli`."""
    if layer in GROUND:
        return {layer, *BELOW_SETTINGS.get(layer, ())}
    if layer == "":
        return {*GROUND, *(name for row in LAYERS for name in row)} - {"cli"}
    place = next(number for number, row in enumerate(LAYERS) if layer in row)
    below = {name for row in LAYERS[:place] for name in row}
    return {layer, *below, *GROUND, *([""] if layer == "cli" else [])}


def target_of(name: str) -> str | None:
    """The layer that an absolute import reaches; "" for the package and its re-exports, None for others."""
    parts = name.split(".")
    if parts[0] != "tailorfl":
        return None
    inside = len(parts) > 1 and ((ROOT / parts[1]).is_dir() or (ROOT / f"{parts[1]}.py").exists())
    return parts[1] if inside else ""


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


def test_imports_point_down():
    known = {"", *GROUND, *(name for row in LAYERS for name in row)}
    layers = {layer_of(path) for path in modules()}
    assert layers <= known, f"{layers - known} are in no layer; place them in the list of this test"
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules()
        for name, line in imports(path)
        if target_of(name) is not None and target_of(name) not in allowed(layer_of(path))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_package_imports_no_study():
    """Studies use the package, which is installed without them."""
    assert not [
        path for path in modules() if any(name.split(".")[0] == "studies" for name, _ in imports(path))
    ]


ADAPTERS = {ROOT / "deploy" / f"{name}.py" for name in ("flower_client", "flower_server")}
"""Modules that are nothing but the way to an optional package, and are imported in functions themselves."""


def test_optional_packages_are_imported_where_they_are_needed():
    early = []
    statements = [
        (path, node) for path in sorted({*modules()} - ADAPTERS) for node in top_level(parsed(path))
    ]
    for path, node in statements:
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        early += [f"{path.relative_to(ROOT)}:{node.lineno} {n}" for n in names if n.split(".")[0] in OPTIONAL]
    assert not early, "\n".join(early)


def test_no_modules_import_each_other():
    """Not in a circle of any length either, and not for type checking only."""
    graph = {}
    for path in modules():
        parts = path.relative_to(ROOT).with_suffix("").parts
        graph[".".join(("tailorfl", *parts)).removesuffix(".__init__")] = imported_modules(path)
    del graph["tailorfl"]  # the door, which leads to everything and is entered by nobody inside
    assert circles(graph) == []


@pytest.mark.parametrize("late", ["", "if TYPE_CHECKING:\n    ", "def f():\n    "])
def test_a_circle_is_found_wherever_it_hides(late, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "rounds").mkdir()
    texts = {
        "one": "from tailorfl.rounds.two import x\n",
        "two": "from .three import y\nimport tailorfl.rounds.four\n",
        "three": f"{late}from tailorfl.rounds import one\n",
        "four": "import ast\n",
    }
    for name, text in texts.items():
        (tmp_path / "rounds" / f"{name}.py").write_text(text)
    (tmp_path / "rounds" / "__init__.py").touch()
    graph = {f"tailorfl.rounds.{n}": imported_modules(tmp_path / "rounds" / f"{n}.py") for n in texts}
    assert circles(graph) == [[f"tailorfl.rounds.{n}" for n in ("one", "three", "two")]]


def bound(path: Path) -> set[str]:
    """The names that a module of the package has once it is imported, as far as its text says."""
    found = set()
    for node in top_level(parsed(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(name.asname or name.name).split(".")[0] for name in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        else:
            found |= {
                n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
    return found


FROM = re.compile(r"^ *from (tailorfl\.[\w.]+) import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)
"""An import from a module of the package: the module, and the names in brackets or in the line."""


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "studies", "tests"])
def test_scripts_import_what_there_is(folder):
    """Also those that no test runs: a name that has moved is found here. Parsing all of them would take seconds."""
    absent, names = [], {}
    for path in sorted((ROOT.parents[1] / folder).rglob("*.py")):
        for module, in_brackets, in_line in FROM.findall(path.read_text()):
            place = ROOT.joinpath(*module.split(".")[1:])
            file = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
            if file not in names:
                names[file] = bound(file) if file.is_file() else set()
            for name in re.findall(r"(\w+)(?: as \w+)?", re.sub("#.*", "", in_brackets or in_line)):
                if name not in names[file] and not _is_module(f"{module}.{name}"):
                    absent.append(f"{path.name}: {module}.{name}")
    assert not absent, "\n".join(absent)


@pytest.mark.parametrize("layer", ["rounds", "engines"])
def test_files_and_functions_are_small(layer):
    """So that a file has one subject, and a function is seen at once."""
    large = []
    for path in modules():
        if layer_of(path) != layer:
            continue
        text, name = path.read_text(), path.relative_to(ROOT)
        large += [f"{name}: {text.count(chr(10))} lines"] * (text.count("\n") > 400)
        for node in statements(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                large += [f"{name}: {node.name} has {lines} lines"] * (lines > 80)
    assert not large, "\n".join(large)


def test_the_rules_themselves():
    assert allowed("settings") == {"settings", *GROUND}
    assert allowed("models") == {"models", "partition", "settings", *GROUND}
    assert allowed("data") == {"data", "partition", "settings", *GROUND}
    assert allowed("privacy") == {"privacy", "partition", "settings", *GROUND}
    assert allowed("training") == {"training", "privacy", "models", "data", "partition", "settings", *GROUND}
    assert allowed("core") == allowed("training") | {"core"}
    assert allowed("theory") == allowed("core") | {"theory"}
    assert allowed("methods") == allowed("core") | {"methods", "theory", "engines"}
    assert "methods" not in allowed("rounds")
    assert allowed("modules") == {"modules", "errors"}
    assert "runs" not in allowed("evaluation")
    assert "report" not in allowed("runs")
    assert not {"tuning", "export"} & allowed("report")
    assert not {"cli", "api"} & allowed("deploy")
    assert "cli" not in allowed("api") | allowed("")
    assert "" not in allowed("api")
    assert allowed("errors") == {"errors"}
    assert allowed("hashing") == {"hashing"}
    assert allowed("printable") == {"printable"}
    assert target_of("tailorfl.training.plan") == "training"
    assert target_of("tailorfl.run") == target_of("tailorfl") == ""
    assert target_of("torch.nn") is None


def test_imports_are_found_wherever_they_hide(tmp_path, monkeypatch):
    file = tmp_path / "core" / "sample.py"
    file.parent.mkdir()
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from tailorfl.engines import base\n"
        "def f():\n    import tailorfl.cli.main\n    from ..methods import apfl\n"
        "from tailorfl import runs, Client\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    names = {name for name, _ in imports(file)}
    assert names == {
        "typing", "tailorfl.engines", "tailorfl.cli.main", "tailorfl.methods", "tailorfl.runs",
        "tailorfl.Client",
    }  # fmt: skip


LIGHT = """
import sys
from importlib import import_module
modules = "", ".errors", ".cli.main", ".settings.experiment", ".theory.fedclup_statistics", ".theory.perfed_ckt"
heavy = "torch", "pandas", "matplotlib", "sklearn", "tensordict"
for module in modules:
    import_module(f"tailorfl{module}")
    assert not [name for name in heavy if name in sys.modules], module
from tailorfl.settings.loading import load
load(None, ["train.lr=0.1"])
assert not [name for name in heavy if name in sys.modules], "settings that are validated"
"""


def test_the_front_door_is_light():
    """Help, errors and the validation of settings must not wait for the numerical packages."""
    subprocess.run([sys.executable, "-c", LIGHT], check=True)


NUMERICAL = {"torch", "tensordict", "numpy", "scipy", "pandas", "pyarrow", "sklearn", "PIL", "safetensors"}
SEEN = {"matplotlib", "jinja2", "optuna", "flwr", "cryptography", "opacus", "transformers"}
FEDERATION = """
import tailorfl
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.job import Job
config = tailorfl.load_config({"data": {"name": "digits", "clients": 4}, "methods": ["ditto"], "rounds": 1})
make_simulation(Job(config, config.methods[0], 0), make_federation(config, 0)).step()
"""


@pytest.mark.parametrize(
    ("words", "late"),
    [
        (("-c", "import tailorfl"), {*NUMERICAL, *SEEN, "pydantic", "yaml", "rich", "typer"}),
        (("-m", "tailorfl", "--help"), {*NUMERICAL, *SEEN, "pydantic", "yaml"}),
        pytest.param(
            ("-c", FEDERATION),
            {*SEEN, "pandas", "pyarrow", "sklearn", "scipy", "rich", "typer"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["import", "help", "simulation"],
)
def test_libraries_load_where_they_are_used(words, late):
    """Not before: together they take seconds and hundreds of megabytes of every process."""
    assert not imported_by(*words) & late


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by name: of two that share it, the second is not collected."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
