"""Where a file can be changed at one point, and how.

Left out: docstrings, annotations, decorators, texts of errors, warnings and logs, `raise` and `assert` themselves,
`__all__`, blocks for type checking, strings, and `strict=True`, which states what always holds. What is changed:

| kind | change |
|---|---|
| operator | + with −, * with /, // and ** to *, % to //; also in +=; and with or |
| comparison | < with <=, > with >=, < with > (and so on), == with !=, is, in and their opposites |
| condition | `not` dropped or put before the condition of an if, while or comprehension; −x to x |
| branch | `a if c else b` to a or to b |
| constant | a whole number one larger or smaller, a float doubled, 0.0 to 1.0, True with False |
| call | min with max, any with all, sum with mean, argmin with argmax, floor with ceil; an argument dropped |
| slice | [:n] with [n:], [::-1] to [:] |
| statement | an assignment to an attribute or item, an augmented one or a call is dropped |
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BINARY = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
COMPARE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.GtE), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
_PAIRS = (
    "min max",
    "any all",
    "sum mean",
    "argmin argmax",
    "floor ceil",
    "minimum maximum",
    "amin amax",
    "idxmin idxmax",
)
CALLS = {a: b for pair in _PAIRS for a, b in (pair.split(), pair.split()[::-1])}
SPOKEN = {"warning", "info", "debug", "warn", "error", "print", "unknown"}
"""Calls whose arguments are for people."""
WORDS = {"description", "title", "message", "match", "help", "alias", "examples", "stacklevel", "strict"}
TYPES = {"Literal", "ClassVar", "TypeVar", "cast", "NewType", "TypeAlias"}


@dataclass(frozen=True)
class Point:
    """One change of one file."""

    file: str  # relative to the repository
    line: int
    end: int
    statement: int  # the line on which the statement begins
    kind: str
    before: str
    after: str
    place: tuple[int, int]  # of what is replaced: bytes of the file

    @property
    def name(self) -> tuple[str, str, str, str]:
        """What it is called whatever lines were added above it."""
        return self.file, self.kind, self.before, self.after

    def text(self, root: Path) -> str | None:
        """The whole changed file; None where that is no other program."""
        raw = (root / self.file).read_bytes()
        begin, end = self.place
        text = (raw[:begin] + self.after.encode() + raw[end:]).decode()
        try:
            return None if ast.dump(ast.parse(text)) == ast.dump(ast.parse(raw)) else text
        except SyntaxError:
            return None


def points(root: Path, file: Path) -> list[Point]:
    """All single changes of a file, in its order."""
    source = file.read_text()
    tree = ast.parse(source)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    raw, found = source.encode(), []
    for node, new, kind, statement in _Walk().changes(tree):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[operator]
        after = "pass" if isinstance(new, ast.Pass) else ast.unparse(new)
        if isinstance(new, ast.expr) and not isinstance(new, ast.Constant | ast.Name):
            after = f"({after})"
        before = " ".join(raw[begin:end].decode().split())
        last = node.end_lineno or node.lineno
        name = str(file.relative_to(root))
        found.append(Point(name, node.lineno, last, statement, kind, before, after, (begin, end)))
    return found


Change = tuple[ast.expr | ast.stmt, ast.expr | ast.stmt, str, int]


class _Walk:
    """Goes through a tree and yields (node, what takes its place, kind, line of its statement)."""

    def changes(self, tree: ast.Module) -> Iterator[Change]:
        yield from self._block(tree.body)

    def _block(self, body: list[ast.stmt]) -> Iterator[Change]:
        for statement in body:
            yield from self._statement(statement, len(body) > 1)

    def _statement(self, s: ast.stmt, others: bool) -> Iterator[Change]:
        if isinstance(s, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.Global) or _docstring(s):
            return
        if isinstance(s, ast.If) and "TYPE_CHECKING" in ast.unparse(s.test):
            return
        if isinstance(s, ast.Assign | ast.AnnAssign) and _is_a_type(s):
            return
        if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call):
            if _called(s.value) in SPOKEN:
                return
            yield s, ast.Pass(), "statement", s.lineno
        if isinstance(s, ast.AugAssign):
            yield s, ast.Pass(), "statement", s.lineno
            if type(s.op) in BINARY and not _texts(s.value):
                yield s, ast.AugAssign(s.target, BINARY[type(s.op)](), s.value), "operator", s.lineno
        if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Attribute | ast.Subscript):
            yield s, ast.Pass(), "statement", s.lineno
        if isinstance(s, ast.If | ast.While):
            yield s.test, _negated(s.test), "condition", s.lineno
        for field, value in ast.iter_fields(s):
            if field in (
                "annotation",
                "returns",
                "decorator_list",
                "bases",
                "type_comment",
                "targets",
                "target",
            ):
                continue
            if isinstance(value, ast.arguments):
                for default in [*value.defaults, *value.kw_defaults]:
                    if default is not None:
                        yield from self._expression(default, s.lineno)
                continue
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.stmt):
                    yield from self._statement(part, True)
                elif isinstance(part, ast.expr):
                    yield from self._expression(part, s.lineno)
                elif isinstance(part, ast.ExceptHandler | ast.match_case):
                    yield from self._block(part.body)
                elif isinstance(part, ast.withitem):
                    yield from self._expression(part.context_expr, s.lineno)

    def _expression(self, e: ast.expr, line: int) -> Iterator[Change]:
        if isinstance(e, ast.JoinedStr) or (isinstance(e, ast.Call) and _called(e) in SPOKEN | TYPES):
            return
        if isinstance(e, ast.Subscript) and isinstance(e.value, ast.Name) and e.value.id in TYPES:
            return
        yield from ((e, new, kind, line) for new, kind in _alternatives(e))
        for child in ast.iter_child_nodes(e):
            if isinstance(child, ast.expr):
                yield from self._expression(child, line)
            elif isinstance(child, ast.keyword):
                if child.arg not in WORDS:
                    yield from self._expression(child.value, line)
            elif isinstance(child, ast.comprehension):
                yield from self._expression(child.iter, line)
                for test in child.ifs:
                    yield test, _negated(test), "condition", line
                    yield from self._expression(test, line)


def _alternatives(e: ast.expr) -> Iterator[tuple[ast.expr, str]]:
    """Everything that may take the place of an expression itself, its parts left as they are."""
    if isinstance(e, ast.BinOp) and type(e.op) in BINARY and not _texts(e.left) and not _texts(e.right):
        yield ast.BinOp(e.left, BINARY[type(e.op)](), e.right), "operator"
    elif isinstance(e, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(e.op, ast.And) else ast.And(), e.values), "operator"
    elif isinstance(e, ast.Compare):
        for k, op in enumerate(e.ops):
            for other in COMPARE[type(op)]:
                yield ast.Compare(e.left, [*e.ops[:k], other(), *e.ops[k + 1 :]], e.comparators), "comparison"
    elif isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.Not | ast.USub):
        yield e.operand, "condition"
    elif isinstance(e, ast.IfExp):
        yield e.body, "branch"
        yield e.orelse, "branch"
    elif isinstance(e, ast.Constant):
        yield from ((ast.Constant(value), "constant") for value in _other(e.value))
    elif isinstance(e, ast.Call):
        yield from _other_calls(e)
    elif isinstance(e, ast.Subscript) and isinstance(e.slice, ast.Slice):
        part = e.slice
        if part.step is not None:
            yield ast.Subscript(e.value, ast.Slice(part.lower, part.upper), e.ctx), "slice"
        elif (part.lower is None) != (part.upper is None):
            yield ast.Subscript(e.value, ast.Slice(part.upper, part.lower), e.ctx), "slice"


def _other(value: object) -> list[object]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1] if value > 0 else [value + 1]
    if isinstance(value, float):
        return [value * 2 if value else 1.0]
    return []


def _other_calls(e: ast.Call) -> Iterator[tuple[ast.expr, str]]:
    name = _called(e)
    if name in CALLS:
        if isinstance(e.func, ast.Attribute):
            yield ast.Call(ast.Attribute(e.func.value, CALLS[name], ast.Load()), e.args, e.keywords), "call"
        elif name not in ("sum", "mean", "floor", "ceil"):
            yield ast.Call(ast.Name(CALLS[name], ast.Load()), e.args, e.keywords), "call"
    if len(e.args) >= 2 and not isinstance(e.args[-1], ast.Starred):
        yield ast.Call(e.func, e.args[:-1], e.keywords), "call"
    for k, word in enumerate(e.keywords):
        if word.arg is not None and word.arg not in WORDS:
            yield ast.Call(e.func, e.args, [*e.keywords[:k], *e.keywords[k + 1 :]]), "call"


def _called(e: ast.Call) -> str:
    return (
        e.func.attr
        if isinstance(e.func, ast.Attribute)
        else e.func.id
        if isinstance(e.func, ast.Name)
        else ""
    )


def _negated(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)


def _texts(e: ast.expr) -> bool:
    return isinstance(e, ast.JoinedStr) or (isinstance(e, ast.Constant) and isinstance(e.value, str | bytes))


def _docstring(s: ast.stmt) -> bool:
    return isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)


def _is_a_type(s: ast.Assign | ast.AnnAssign) -> bool:
    """`__all__ = ...`, or a name for a type."""
    if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name):
        name, v = s.targets[0].id, s.value
        alias = isinstance(v, ast.Subscript | ast.BinOp) and name[:1].isupper() and not name.isupper()
        return name == "__all__" or alias
    return False
