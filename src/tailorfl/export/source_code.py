"""A network written as Python code that needs only torch: its layers, and the forward passes of its classes.

Layers of torch.nn are written as their repr. For any other class, the forward pass and the methods that it calls are
copied verbatim, and the constructor takes its parts as arguments. This covers networks built of layers whose forward
pass uses only torch; all others raise `NotWritableError`. Written code is run and compared with the original before it
is returned (`tailorfl.export.folder`).
"""

from __future__ import annotations

import ast
import builtins
import inspect
import keyword
import math
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tailorfl.models.layers import is_norm

WIDTH = 100
"""Largest width of generated lines."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class NotWritableError(Exception):
    """Explains why a network cannot be written as code."""


@dataclass
class _Class:
    """A class to be written: its methods and its constructor's arguments."""

    kind: type[nn.Module]
    takes: list[str] = field(default_factory=list)
    buffers: set[str] = field(default_factory=set)
    methods: dict[str, FunctionType] = field(default_factory=dict)


class Writer:
    """Writes one network; see `written`."""

    def __init__(self) -> None:
        self.classes: dict[str, _Class] = {}
        self.imports: set[str] = set()
        self.constants: dict[str, Any] = {}

    def text(self, network: nn.Module) -> str:
        """Return imports, classes and a function `network()`.

        Raises:
            NotWritableError: see the message.
        """
        parts_seen: set[int] = set()
        for name, part in network.named_modules(remove_duplicate=False):
            if id(part) in parts_seen:
                raise NotWritableError(f"'{name}' is used in two places")
            parts_seen.add(id(part))
            if any(getattr(part, hooks) for hooks in HOOKS):
                raise NotWritableError(f"'{name}' has hooks")
            if part._non_persistent_buffers_set:
                raise NotWritableError(f"'{name}' has tensors that are not in its state")
            if not _is_torchs(part):
                self._look_at(part)
        text = _laid_out(self._value(network), 1, len("    return "))
        lines = [*self._imports(), "", ""]
        if self.constants:
            lines[-1:] = [*(f"{name} = {value!r}" for name, value in self.constants.items()), "", ""]
        for item in self.classes.values():
            lines += [*self._class(item), "", ""]
        lines += [
            "def network():",
            '    """The network as it is before its weights are loaded."""',
            f"    return {text}",
        ]
        return "\n".join(lines) + "\n"

    def _imports(self) -> Iterator[str]:
        """Yield the imports, one line per module."""
        self.imports |= {"from torch import nn", "from torch import Tensor"}  # annotations are copied too
        yield from sorted(line for line in self.imports if line.startswith("import "))
        taken: dict[str, list[str]] = {}
        for line in sorted(self.imports):
            home, names_it, name = line.removeprefix("from ").partition(" import ")
            if names_it:
                taken.setdefault(home, []).append(name)
        yield from (f"from {home} import {', '.join(names)}" for home, names in taken.items())

    # -- classes --------------------------------------------------------------------------------------------

    def _look_at(self, part: nn.Module) -> None:
        """Collect what has to be written of a module's class."""
        kind = type(part)
        record = self.classes.setdefault(kind.__name__, _Class(kind))
        if record.kind is not kind:
            raise NotWritableError(f"two classes have the name {kind.__name__}")
        if isinstance(part, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            raise NotWritableError(f"{kind.__name__} is a subclass of a torch container")
        if not record.methods:
            for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
                if base.__module__.startswith("torch."):
                    raise NotWritableError(f"{kind.__name__} is a subclass of {base.__name__}")
            self._add_method(record, "forward")
        used = {attribute for method in record.methods.values() for attribute in _attributes(method)}
        plain = [name for name in part.__dict__ if name in used and not name.startswith("_")]
        for name in (*part._modules, *part._parameters, *part._buffers, *plain):
            if name not in record.takes and name != "training":
                record.takes.append(name)
        record.buffers |= set(part._buffers)

    def _add_method(self, record: _Class, name: str) -> None:
        """Collect a method and those that it calls, with the imports and constants that they use."""
        method = inspect.getattr_static(record.kind, name)
        if not isinstance(method, FunctionType) or method.__closure__:
            raise NotWritableError(f"{record.kind.__name__}.{name} is not a plain method")
        record.methods[name] = method
        for used in _globals(method):
            self._find(used, method)
        for attribute in _attributes(method):
            attribute_value = inspect.getattr_static(record.kind, attribute, None)
            if attribute_value is None or attribute in record.methods or hasattr(nn.Module, attribute):
                continue
            if not isinstance(attribute_value, FunctionType):
                raise NotWritableError(f"{record.kind.__name__}.{attribute} is not a plain method")
            self._add_method(record, attribute)

    def _find(self, name: str, method: FunctionType) -> None:
        """Collect the import or constant that defines a name used by a method."""
        if name not in method.__globals__:
            if hasattr(builtins, name):
                return
            raise NotWritableError(f"{method.__qualname__} uses '{name}', which is not defined")
        value = method.__globals__[name]
        if isinstance(value, ModuleType) and value.__name__.split(".")[0] in ("torch", "math"):
            above, _, last = value.__name__.rpartition(".")
            plain = f"from {above} import {last}" if above else f"import {last}"
            self.imports.add(plain if last == name else f"{plain} as {name}")
            return
        if _is_plain(value):
            if self.constants.setdefault(name, value) != value:
                raise NotWritableError(f"'{name}' has two different values")
            return
        for home in (functional, torch, nn):
            if getattr(home, name, None) is value:
                self.imports.add(f"from {home.__name__} import {name}")
                return
        raise NotWritableError(f"{method.__qualname__} uses '{name}', which is not part of torch")

    def _class(self, item: _Class) -> Iterator[str]:
        yield f"class {item.kind.__name__}(nn.Module):"
        doc = (inspect.getdoc(item.kind) or "").splitlines()
        if doc and '"""' not in doc[0]:
            yield f'    """{doc[0]}"""'
            yield ""
        yield f"    def __init__(self, {', '.join(item.takes)}):".replace("self, )", "self)")
        yield "        super().__init__()"
        for name in item.takes:
            yield (
                f'        self.register_buffer("{name}", {name})'
                if name in item.buffers
                else f"        self.{name} = {name}"
            )
        for method in item.methods.values():
            yield ""
            yield from (
                textwrap.indent(textwrap.dedent(inspect.getsource(method)), "    ").rstrip().splitlines()
            )

    # -- values ---------------------------------------------------------------------------------------------

    def _value(self, value: Any) -> Any:
        """Return a value as code: a text, or (opening, parts, closing) if it may take several lines."""
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, Tensor):
            self.imports.add("import torch")
            number = "0" if value.is_floating_point() else "False" if value.dtype == torch.bool else "0"
            zeros = f"torch.full({tuple(value.shape)}, {number}, dtype={value.dtype})"
            if isinstance(value, nn.Parameter):
                return f"nn.Parameter({zeros})"
            return zeros
        if isinstance(value, list | tuple) and all(_is_plain(item) for item in value):
            return repr(value)
        if _is_plain(value):
            return repr(value)
        raise NotWritableError(f"a {type(value).__name__} is neither a finite number nor a text of Python")

    def _module(self, module: nn.Module) -> Any:
        children = {name: self._value(part) for name, part in module._modules.items()}
        if not _is_torchs(module):
            record = self.classes[type(module).__name__]
            absent = [name for name in record.takes if not hasattr(module, name)]
            if absent:
                raise NotWritableError(f"some {type(module).__name__} have no '{absent[0]}'")
            arguments = [
                (f"{name}=", children[name] if name in children else self._value(getattr(module, name)))
                for name in record.takes
            ]
            return f"{type(module).__name__}(", arguments, ")"
        if type(module) in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
            return self._container(type(module).__name__, children)
        if children:
            raise NotWritableError(f"{type(module).__name__} has parts that its text does not show")
        # Torch's repr leaves words bare.
        text = re.sub(r"(padding|padding_mode)=([a-z]+)", r"\1='\2'", f"nn.{module!r}")
        if re.search(r"\b(inf|nan)\b", text):
            raise NotWritableError(f"{type(module).__name__} has an infinite number")
        # Norms before torch 2.13 have no argument `bias`.
        return text.replace(", bias=True", "") if is_norm(module) else text

    def _container(self, kind: str, children: dict[str, Any]) -> Any:
        if list(children) == [str(k) for k in range(len(children))]:
            inside = [("", item) for item in children.values()]
            return (f"nn.{kind}(", inside, ")") if kind == "Sequential" else (f"nn.{kind}([", inside, "])")
        if not all(name.isidentifier() and not keyword.iskeyword(name) for name in children):
            raise NotWritableError(f"a {kind} has parts whose names are not Python identifiers")
        named = [(f"{name}=", item) for name, item in children.items()]
        if kind == "ModuleDict":
            return "nn.ModuleDict(dict(", named, "))"
        self.imports.add("from collections import OrderedDict")
        return "nn.Sequential(OrderedDict(", named, "))"


def written(network: nn.Module) -> str:
    """Return a network as the text of a Python module with a function `network()`, which does not need tailorfl.

    Raises:
        NotWritableError: its forward pass needs more than torch, or its structure cannot be written as text.
    """
    try:
        return Writer().text(network)
    except (OSError, TypeError, SyntaxError) as error:  # no source, as for classes typed into a prompt
        raise NotWritableError(f"its source cannot be read: {error}") from error


def _laid_out(value: Any, depth: int, used: int) -> str:
    """Return a value of `Writer._value` in as few lines as `WIDTH` allows; the first has `used` columns already."""
    flat = _flat(value)
    if isinstance(value, str) or used + len(flat) <= WIDTH:
        return flat
    opening, parts, closing = value
    indent = "    " * (depth + 1)
    lines = [
        f"{indent}{name}{_laid_out(item, depth + 1, len(indent) + len(name) + 1)}," for name, item in parts
    ]
    return "\n".join([opening, *lines, "    " * depth + closing])


def _flat(value: Any) -> str:
    if isinstance(value, str):
        return value
    opening, parts, closing = value
    inside = ", ".join(name + _flat(item) for name, item in parts)
    return f"{opening}{inside}{closing}"


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _is_plain(value: Any) -> bool:
    """Return whether the repr of a value is Python code for it: not of NaN, and not of numpy's numbers or an enum's."""
    return value is None or (
        type(value) in (bool, int, float, str) and (type(value) is not float or math.isfinite(value))
    )


def _tree(method: Callable[..., Any]) -> ast.FunctionDef:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list:
        raise NotWritableError(f"{method.__qualname__} is not a plain method")
    for node in ast.walk(tree):  # annotations of a written method are not evaluated when it runs
        if isinstance(node, ast.AnnAssign | ast.arg):
            node.annotation = ast.Constant(None)
    tree.returns = None
    return tree


def _attributes(method: FunctionType) -> list[str]:
    """Return the attributes of self that a method uses."""
    return [
        node.attr
        for node in ast.walk(_tree(method))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    ]


def _globals(method: FunctionType) -> list[str]:
    """Return names that a method uses but does not define."""
    code = _tree(method)
    names = [node for node in ast.walk(code) if isinstance(node, ast.Name)]
    assigned = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    assigned |= {node.arg for node in ast.walk(code) if isinstance(node, ast.arg)}
    return list(dict.fromkeys(node.id for node in names if node.id not in assigned))
