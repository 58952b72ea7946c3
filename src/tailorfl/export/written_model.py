"""The text of an export's model.py: the network, the preparation of raw samples and table rows, and the answers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tailorfl.data.columns import BOOLEANS, word_of
from tailorfl.data.summaries import OTHER
from tailorfl.data.table_files import NOTHING

HEAD = '''"""{title}

Needs torch and safetensors{extras}; model.json next to this file describes its inputs and its metrics.
"""

from __future__ import annotations

{imports}
'''
IMPORTS = (
    "import hashlib",
    "import json",
    "from pathlib import Path",
    "import torch",
    "from safetensors.torch import load_file",
)
CHECK = '''

def check(folder):
    """Raise RuntimeError if a file differs from its digest in manifest.json."""
    files = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["files"]
    for name in ("model.py", "{weights}", *files):
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != files[name]["sha256"]:
            raise RuntimeError(f"{{folder / name}} is damaged: restore it from a copy, or export the model again")
'''
LOAD = '''

def load(folder=Path(__file__).parent):
    """The trained network in evaluation mode."""
    folder = Path(folder)
    check(folder)
    net = network()
    net.load_state_dict(load_file(folder / "model.safetensors"))
    return net.eval()
'''
PROGRAM = '''

def load(folder=Path(__file__).parent):
    """The trained network in evaluation mode, a program of torch.export."""
    folder = Path(folder)
    check(folder)
    return torch.export.load(folder / "model.pt2").module()
'''
PREDICT = '''

@torch.no_grad()
def predict(net, raw):
    """Return the network's answers to raw samples."""
    return answers(net(prepare(raw)))
'''
ANSWERS = {
    "classification": ("probabilities of the classes, [samples, classes]", "outputs.softmax(1)"),
    "binary": ("probabilities of the two classes, [samples, 2]", "torch.cat([-outputs, outputs], 1).sigmoid()"),
    "multilabel": ("the probability of each label, [samples, labels]", "outputs.sigmoid()"),
    "regression": ("predicted numbers, [samples, targets]", "outputs"),
    "counts": ("expected counts, [samples, counts]", "outputs.exp()"),
    "survival": ("log risks, [samples, 1]: the higher, the earlier the event", "outputs"),
    "generation": ("logits of the next token at each place, [samples, length, vocabulary]", "outputs"),
}  # fmt: skip
_NUMBERS = '''

MEAN = torch.tensor({mean!r}, dtype=torch.float64)
DEVIATION = torch.tensor({deviation!r}, dtype=torch.float64)
FILL = torch.tensor({fill!r}, dtype=torch.float64)


def prepare(x):
    """Raw numbers [samples, {width}], NaN if missing -> the network's inputs.

    Columns: {names}
    """
    x = x.double()
    return ((torch.where(x.isnan(), FILL, x) - MEAN) / DEVIATION).float()
'''
_CELLS = '''

COLUMNS = {columns}
ABSENT = {absent!r}
NA_VALUES = {na_values!r}


def prepare(rows):
    """Raw rows, each a mapping from column to cell as csv.DictReader gives it -> the network's inputs.

    None, NaN, blanks, and NA_VALUES that are no levels are missing cells; rows may lack the columns in ABSENT.
    """
    rows = [{{**dict.fromkeys(ABSENT), **row}} for row in rows]
    made = [[x for name, column in COLUMNS.items() for x in _inputs(row[name], column)] for row in rows]
    return torch.tensor(made, dtype=torch.float64).float()


def _inputs(cell, column):
    word, levels = "" if cell is None or cell != cell else _word(cell), column.get("levels", ())
    missing = word == "" or (word in NA_VALUES and word not in levels)
    flag = [float(missing)] if column["indicator"] else []
    if column["kind"] == "word":
        word = word if missing or word in levels else {other!r}
        return [float(word == level and not missing) for level in levels] + flag
    number = column["fill"] if missing else float({{"True": 1, "False": 0}}.get(word, cell))
    return [(number - column["mean"]) / column["deviation"], *flag]


def _word(cell):
    """A cell as a word: 1, 1.0 and "1.0" are one, and True, "true" and "TRUE"."""
    text = str(cell).strip()
    if text in {booleans!r}:
        return text.capitalize()
    if isinstance(cell, bool) or not (isinstance(cell, float) or re.fullmatch(r"[+-]?\\d+(\\.\\d+)?", text)):
        return text
    number = float(text)
    if number.is_integer():
        return str(int(number)) if abs(number) < 2**53 else text
    return str(number)
'''


def text_of(title: str, network: str, facts: Mapping[str, Any], *, program: bool = False) -> str:
    """Return model.py; `network` is the code that defines `network()`, "" for a program of torch.export."""
    extras = ", peft and transformers" if "transformers" in network else ""
    inputs = facts["inputs"]
    names = inputs.get("classes")
    says, expression = ANSWERS[inputs["task"]]
    temperature = facts.get("temperature")
    scaled = "" if temperature is None else f"    outputs = outputs / {temperature!r}  # the temperature\n"
    imports, network = _parted(f"import re\n{network}" if _has_words(inputs) else network)
    parts = [
        HEAD.format(title=title.replace("\\", "").replace('"""', ""), extras=extras, imports=imports),
        network,
        CHECK.format(weights="model.pt2" if program else "model.safetensors"),
        PROGRAM if program else "" if "def load(" in network else LOAD,
        f'\n\nLABELS = {tuple(names)!r}\n"""Names of the outputs, in order."""\n' if names else "",
        _prepare(inputs),
        f'\n\ndef answers(outputs):\n    """Outputs as {says}."""\n{scaled}    return {expression}\n',
        PREDICT,
    ]
    return "".join(parts)


def _parted(code: str) -> tuple[str, str]:
    """Return (the imports, including those of every export; the code after them)."""
    lines = code.splitlines()
    end = next((k for k, line in enumerate(lines) if not line.startswith(("import ", "from "))), len(lines))
    import_lines = sorted({*IMPORTS, *lines[:end]}, key=lambda line: (line.split()[1].split(".")[0], line))
    ours = [line for line in import_lines if line.split()[1] not in sys.stdlib_module_names]
    standard = [line for line in import_lines if line not in ours]
    return "\n".join([*standard, "", *ours]), "".join(f"{line}\n" for line in lines[end:])


def lines_for(folder: str, facts: Mapping[str, Any]) -> str:
    """Return lines of Python that load an export and predict with it, without tailorfl."""
    inputs = facts["inputs"]
    shape = ", ".join(map(str, [1, *inputs["shape"]]))
    kind = {"image": ", dtype=torch.uint8", "tokens": ", dtype=torch.int64"}.get(inputs["type"], "")
    content = {"image": "bytes of an image", "tokens": "token ids"}.get(inputs["type"])
    raw = f"torch.zeros({shape}{kind})"
    if _has_words(inputs):
        raw, content = "[dict.fromkeys(model.COLUMNS)]", "a row's columns and cells"
    comment = content or ", ".join(inputs.get("features", ())) or "numbers as they were measured"
    return "\n".join(
        [
            "import sys",
            "",
            "import torch",
            "",
            f"sys.path.insert(0, {folder!r})",
            "import model",
            "",
            "net = model.load()",
            f"raw = {raw}  # {comment if len(comment) < 40 else comment[:37] + '...'}",
            "print(model.predict(net, raw))",
        ]
    )


def _has_words(inputs: Mapping[str, Any]) -> bool:
    return "preparation" in inputs and not numbers_alone(inputs["preparation"])


def _prepare(inputs: Mapping[str, Any]) -> str:
    """Return the code of `prepare`, with the constants that it needs."""
    shape = ", ".join(map(str, inputs["shape"]))
    if inputs["type"] == "tokens":
        return _function(
            "ids", f"Token ids int64 [samples, {shape}] as they are; model.json has the tokenizer.", "ids"
        )
    if inputs["type"] == "image":
        says = f"Bytes uint8 [samples, {shape}] -> the network's inputs."
        if "image" not in inputs:
            return _function("images", says, "images.float() / 255.0")
        constants = "".join(
            f"{name} = torch.tensor({inputs['image'][key]!r}).view(-1, 1, 1)\n"
            for name, key in (("MEAN", "mean"), ("DEVIATION", "deviation"))
        )
        return f"\n\n{constants}" + _function("images", says, "(images.float() / 255.0 - MEAN) / DEVIATION")
    if "preparation" in inputs:
        return prepare_table(inputs["preparation"])
    scaling = inputs.get("scaling")
    if scaling is None:
        return _function("x", f"Numbers [samples, {shape}] as they are.", "x.float()")
    steps = [scaling]
    while "before" in steps[0]:
        steps.insert(0, steps[0]["before"])
    constants, expression = "", "x"
    for number, step in enumerate(steps):
        name = "" if len(steps) == 1 else f"_{number + 1}"
        constants += "".join(
            f"{constant}{name} = torch.tensor({step[key]!r}, dtype=torch.float64)\n"
            for constant, key in (("MEAN", "mean"), ("DEVIATION", "deviation"))
        )
        clip = step.get("clip")
        cut = "" if clip is None else f".clamp({-clip!r}, {clip!r})"
        expression = f"(({expression}.double().flatten(1) - MEAN{name}) / DEVIATION{name}){cut}.float()"
    return f"\n\n{constants}" + _function(
        "x", f"Raw numbers [samples, {shape}] -> the network's inputs.", f"{expression}.reshape(x.shape)"
    )


def _function(argument: str, says: str, expression: str) -> str:
    return f'\n\ndef prepare({argument}):\n    """{says}"""\n    return {expression}\n'


def numbers_alone(preparation: Mapping[str, Any]) -> bool:
    """Return whether a table has only numbers without indicators, so that a tensor can hold its raw rows."""
    columns = preparation["columns"].values()
    return all(column["kind"] == "number" and not column["indicator"] for column in columns)


def prepare_table(preparation: Mapping[str, Any]) -> str:
    """Return the code of `prepare` for the constants of a table (`Constants.to_dict()`)."""
    columns = preparation["columns"]
    if numbers_alone(preparation):
        constants = {
            key: [column[key] for column in columns.values()] for key in ("mean", "deviation", "fill")
        }
        names = ", ".join(columns).replace("\\", "").replace('"""', "")
        return _NUMBERS.format(**constants, width=len(columns), names=names)
    listed = ""
    for name, column in columns.items():
        levels = {"levels": [word_of(level) for level in column["levels"]]} if "levels" in column else {}
        listed += f"    {name!r}: { {**column, **levels}!r},\n"
    return _CELLS.format(
        columns=f"{{\n{listed}}}",
        absent=tuple(preparation["absent"]),
        na_values=(*preparation["roles"]["na_values"], *filter(None, NOTHING)),
        booleans=BOOLEANS,
        other=OTHER,
    )
