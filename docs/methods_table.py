"""Makes the tables of methods in docs/methods.md, what `tailorfl show` says of them, and the page of reductions.

    python docs/methods_table.py            prints the tables
    python docs/methods_table.py --write    puts them into docs/methods.md and tests/methods/reductions.md, and writes
                                            methods.json of the package

What a method keeps and sends is not looked up anywhere: one client trains for one round, and the names of
the tensors in its state and messages are compared with the parts of a small convolutional network.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from tailorfl.core.messages import PerArchitecture, PerClient
from tailorfl.core.method import Method, all_methods
from tailorfl.data.build import build as build_federation
from tailorfl.engines.in_process import Sequential
from tailorfl.models.functional import Model
from tailorfl.models.lora import inject_lora, lora_parts
from tailorfl.models.selectors import select
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.listing import value_text
from tailorfl.training import tree
from tailorfl.training.cohort import TrainConfig

ROOT = Path(__file__).resolve().parents[1]
FACTS = ROOT / "src" / "tailorfl" / "cli" / "methods.json"
PROOF = "tests/methods/test_method_reductions.py"
"""Runs both methods of every line of the table of reductions."""
METHODS = ROOT / "docs" / "methods.md"
REDUCTIONS = ROOT / "tests" / "methods" / "reductions.md"
BEGIN, END = "<!-- methods: made by docs/methods_table.py -->\n", "<!-- end of methods -->\n"
HEAD = ("Method", "Good for", "Paper", "Kept on the client", "Sent each way", "Evaluated")
FAMILIES = {
    "baseline": "References",
    "one model": "One model for all",
    "tuned": "One model, tuned on each client",
    "two models": "A personal model next to a global one",
    "parts": "Shared and personal parts",
    "mixture": "Mixtures and groups of clients' models",
    "knowledge": "Predictions, prototypes or neighbours instead of weights",
    "hypernet": "A network that generates models",
    "trees": "Trees for tables",
}
"""Of a method -> its heading."""
ROUNDS = 6
"""In so many rounds every method sends whatever it ever sends."""


def own() -> list[type[Method]]:
    """Return the methods of this repository."""
    return [m for m in all_methods().values() if Path(inspect.getfile(m)).is_relative_to(ROOT)]


def table() -> str:
    """Return a Markdown table for each family, one line a method."""
    parts = []
    for family, heading in FAMILIES.items():
        lines = [HEAD, ("---",) * len(HEAD), *(cells(m) for m in own() if m.family == family)]
        parts.append(f"### {heading}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines))
    return ("\n" + "\n".join(parts) + "\n").replace("](", "](../")


def cells(method: type[Method]) -> tuple[str, ...]:
    """Return a method's line in the page: its title with a link to the code, and layers without their tensors."""
    title, name, use, paper, kept, sent, evaluated, links = row(method)
    code = re.search(r"\((.*?)\)", links)
    assert code, links
    return f"[{title}]({code[1]}) {name}", use, paper, by_layer(kept), by_layer(sent), evaluated


def by_layer(names: str) -> str:
    """Return a list of tensors with one name, such as `6.gate`, for all of an added layer."""
    layers = re.sub(r"`(\d+\.\w+)\.[\w.]+`", r"`\1`", names).split(", ")
    return ", ".join(layer for layer, _ in itertools.groupby(layers))


def facts() -> str:
    """Return the JSON file: method -> what is kept and sent, when it is another one, and the tests that prove that."""
    found = {}
    for method in own():
        *_, kept, sent, _, links = row(method)
        cases = list(reductions(method.name))
        tests = [PROOF] if cases else []
        tests += [
            f"tests/{name}"
            for name in re.findall(r"[\w/]*test_\w+\.py", proofs().ELSEWHERE.get(method.name, ""))
        ]
        tests += re.findall(r"\(((?:tests)/[^)]*)\)", links)
        at_home = [t if (ROOT / t).is_file() else t.replace("tests/", "tests/methods/", 1) for t in tests]
        found[method.name] = {
            "kept": kept.replace("`", ""),
            "sent": sent.replace("`", ""),
            "reductions": cases,
            "tests": list(dict.fromkeys(at_home)),
        }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def reductions(name: str) -> Iterator[dict[str, str]]:
    """Yield the lines of the table that the tests run: {with: settings, is: the other one, case: id of the test}."""
    seen = set()
    for same in proofs().REDUCTIONS.get(name, ()):
        other = f"{same.other_which} model of {same.other}" if same.other else "the initial model"
        others = ", ".join(
            filter(None, (settings(same.other_options, ""), settings(same.other_train, "train.")))
        )
        line = {
            "with": f"{same.which} model, {conditions(same) or 'whatever the settings'}",
            "is": other + (f" with {others}" if others else ""),
            "case": f'{PROOF} -k "{same.line} {name} {dict(same.options)} is {same.other}"',
        }
        if (line["with"], line["is"]) not in seen:
            seen.add((line["with"], line["is"]))
            yield line


def reductions_table(known: str) -> str:
    """Return a Markdown table of when a method is another one, from the text of methods.json."""
    titles = {m.name: m.title for m in own()}
    lines = [("Method", "Its model", "With", "Is", "Test"), ("---",) * 5]
    for name, described in json.loads(known).items():
        for line in described["reductions"]:
            which, _, given = line["with"].partition(" model, ")
            case = re.search(r'-k "(.*?) {', line["case"])
            assert case, line["case"]
            shown = given if given == "whatever the settings" else f"`{given}`"
            lines.append((titles[name], which, shown, line["is"], f"`{case[1]}`"))
    return (
        "\n"
        + "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)
        + "\n"
    )


def conditions(same: Any) -> str:
    """Return under which settings a line of the table holds."""
    parts = [settings(same.options, ""), settings(same.train, "train."), settings(same.run, "")]
    if sizes := same.data.get("sizes"):
        parts.append("one client" if len(sizes) == 1 else f"{len(sizes)} clients")
    if same.data.get("validation") is False:
        parts.append("no validation samples")
    return ", ".join(part for part in parts if part)


def settings(given: Mapping[str, Any], prefix: str) -> str:
    """Return settings as they are written on the command line."""
    return ", ".join(f"{prefix}{key}={value_text(value)}" for key, value in given.items())


@functools.cache
def proofs() -> ModuleType:
    """Return the module of what the tests of methods declare."""
    sys.path.insert(0, str(ROOT / "tests"))
    return importlib.import_module("methods.settings")


@functools.cache
def row(method: type[Method]) -> tuple[str, ...]:
    """Return the cells of one method."""
    federation = build_federation("digits", samples=60, clients=2, public="digits", public_samples=6)
    model = Model(adapted, trainable="lora") if method.of_adapters else Model(network)
    sim = Simulation(method(), federation, model, TrainConfig(steps=1, epochs=None), engine=Sequential())
    down, up, states = fullest(sim)
    evaluated = [
        w for w, there in (("personal", method.has_personal), ("global", method.has_global)) if there
    ]

    def parts_of(payload: TensorDict) -> str:
        if method.of_networks:
            return contents(payload, model)
        return "trees" if list(tree.leaves(payload)) else "nothing"

    return (
        method.title,
        f"`{method.name}`",
        method.use,
        method.paper,
        parts_of(states),
        "nothing: all data in one place" if method.pooled else sent(parts_of(down), parts_of(up)),
        ", ".join(evaluated),
        files(method),
    )


def network() -> nn.Module:
    """Return a small network with all the parts that methods tell apart."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 16),
        nn.ReLU(),
        nn.Linear(16, 10),
    )


def adapted() -> nn.Module:
    """Return the network with LoRA on its two linear layers, all else frozen."""
    module = network()
    inject_lora(module, 2, 4, 0.0, ["4", "6"])
    return module


def fullest(sim: Simulation) -> tuple[TensorDict, TensorDict, TensorDict]:
    """Return the messages down and up with most in them, and a client's state.

    Some methods send nothing in the first round, or only in some.
    """
    down, up = tree.empty(), tree.empty()
    for _ in range(ROUNDS):
        message = sim.method.broadcast(sim.server, (0,))
        states, reply = sim.run((0,), sim.states.get((0,)), message, sim.method.local)
        if isinstance(message, PerClient):
            message = message.payloads
        elif isinstance(message, PerArchitecture):
            message = message[""]
        down, up = (
            max(pair, key=lambda m: len(list(tree.leaves(m)))) for pair in ((down, message), (up, reply))
        )
        sim.step()
    return down, up, states


def sent(down: str, up: str) -> str:
    """Return what travels, said once where both directions carry the same."""
    return down if down == up else f"down {down}, up {up}"


def contents(payload: TensorDict, model: Model) -> str:
    """Return the tensors of a state or message in words."""
    groups: dict[str, set[str]] = {}
    for path, _ in tree.leaves(payload):
        group, _, name = path.rpartition("/")
        if several := re.match(r"(networks\.\d+)\.(.+)", name):  # one of the networks of a mixture
            group, name = f"{group}/{several[1]}", several[2]
        if beside := re.match(r"network\.(.+)\.(own|shared)(\..+)", name):  # two adapters on one network
            name = beside[1] + beside[3]
        if name.endswith(".base_layer.weight"):  # frozen elsewhere
            name = "weights other than LoRA"
        groups.setdefault(group, set()).add(name)
    known = {*model.parameters, *model.buffers}
    parts = [part_of(names & known, model) for names in groups.values() if names & known]
    others = dict.fromkeys(sorted(name for names in groups.values() for name in names - known))
    counted = [f"{parts.count(p)} × {p}" if parts.count(p) > 1 else p for p in dict.fromkeys(parts)]
    return ", ".join([*counted, *(f"`{name}`" for name in others)]) or "nothing"


def part_of(names: Iterable[str], model: Model) -> str:
    """Return the words for a set of tensor names of the model."""

    def matches(word: str) -> bool:
        picked, wanted = select(model.module, word), set(names)
        return wanted in (set(picked), picked & set(model.parameters))  # with or without running statistics

    words = {
        "all": "whole model",
        "head": "head",
        "body": "body",
        "norm": "norm layers",
        "input": "input layer",
    }
    if lora_parts(model.module):
        words = {"lora": "factors A and B", "lora_A": "factors A", "lora_B": "factors B"}
    for word, text in words.items():
        if matches(word):
            return text
    left_out = {*model.parameters, *model.buffers} - set(names)
    for word, text in words.items():
        if left_out == set(select(model.module, word)):
            return f"all but the {text}"
    return f"{len(set(names))} tensors"


def files(method: type[Method]) -> str:
    """Return links to the method's file and to the test file that declares it, or is named after it."""
    code = Path(inspect.getfile(method))
    test = proofs().DECLARED_IN.get(method.name, ROOT / "tests" / "methods" / f"test_{code.name}")
    return ", ".join(
        f"[{text}]({f.relative_to(ROOT).as_posix()})" for text, f in (("code", code), ("tests", test))
    )


def insert(page: str, made: str) -> str:
    """Return the page of methods, or of reductions, with its table replaced by `made`."""
    found = re.sub(f"(?<={re.escape(BEGIN)}).*?(?={re.escape(END)})", lambda _: made, page, flags=re.DOTALL)
    assert BEGIN in found, f"docs/methods.md or tests/methods/reductions.md has lost the line {BEGIN!r}"
    return found


def main() -> None:
    """Print the tables, or write them where they stand."""
    torch.set_num_threads(1)  # many small operations: a second thread only waits
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put them where they stand")
    if not parser.parse_args().write:
        print(table(), end="")
        print(reductions_table(facts()), end="")
        return
    known = facts()
    FACTS.write_text(known, encoding="utf-8")
    for page, made in ((METHODS, table()), (REDUCTIONS, reductions_table(known))):
        page.write_text(insert(page.read_text(encoding="utf-8"), made), encoding="utf-8")


if __name__ == "__main__":
    main()
