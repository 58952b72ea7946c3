"""Which changes of a file are tried, and that a changed file is imported in place of the real one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forks import SOURCE, Replaced
from points import points
from selection import Recorded, in_turn, within

CASES = [
    ("x = a + 2", {("a + 2", "(a - 2)"), ("2", "3"), ("2", "1")}),
    ("x = a < b", {("a < b", "(a <= b)"), ("a < b", "(a > b)")}),
    ("x = not a and b", {("not a and b", "(not a or b)"), ("not a", "a")}),
    ("x = a if c else b", {("a if c else b", "a"), ("a if c else b", "b")}),
    ("x = max(a, b)", {("max(a, b)", "(min(a, b))"), ("max(a, b)", "(max(a))")}),
    ("x = f(a, rate=r)", {("f(a, rate=r)", "(f(a))")}),
    ("x = zip(a, b, strict=True)", {("zip(a, b, strict=True)", "(zip(a, strict=True))")}),
    ("x = a[:n]", {("a[:n]", "(a[n:])")}),
    ("x = a[::-1]", {("a[::-1]", "(a[:])"), ("-1", "1"), ("1", "2"), ("1", "0")}),
    ("a.b = c", {("a.b = c", "pass")}),
    ("a += c", {("a += c", "pass"), ("a += c", "a -= c")}),
    ("f(a)", {("f(a)", "pass")}),
    ("if a:\n    b = 0.0", {("a", "(not a)"), ("0.0", "1.0")}),
    ("def f(a: 'int | 3' = 4) -> 'x[5]':\n    '''6'''", {("4", "5"), ("4", "3")}),
    ("x: 'tuple[1]' = True", {("True", "False")}),
    ("__all__ = [a + b]", set()),
    ("if TYPE_CHECKING:\n    x = 1", set()),
    ("raise E(a + b)", set()),
    ("assert a < b", set()),
    ("log.warning('%s', a + b)", set()),
    ("x = f'{a + b}' + 'c'", set()),
    ("Kind = Literal[1, 2]", set()),
]


@pytest.mark.parametrize(("source", "expected"), CASES, ids=[source for source, _ in CASES])
def test_all_changes_of_a_line(source: str, expected: set[tuple[str, str]], tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(f"'''Text.'''\nß = 'ü'\n{source}\n")
    found = points(tmp_path, file)
    assert {(point.before, point.after) for point in found} == expected
    for point in found:
        text = point.text(tmp_path)
        assert text is not None
        assert text != file.read_text()
        compile(text, "file.py", "exec")
        assert text.splitlines()[:2] == ["'''Text.'''", "ß = 'ü'"]


def test_what_is_no_other_program_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text("def f():\n    g()\n")
    (point,) = points(tmp_path, file)
    assert point.text(tmp_path) == "def f():\n    pass\n"
    assert replace(point, after="g( )").text(tmp_path) is None
    assert replace(point, after=") (").text(tmp_path) is None


def test_a_changed_module_is_found_in_place_of_the_file() -> None:
    finder = Replaced(SOURCE / "hashing.py", "changed = 1\n")
    assert finder.find_spec("tailorfl.errors") is None
    spec = finder.find_spec("tailorfl.hashing")
    assert spec is not None
    assert spec.loader is not None
    held: dict[str, object] = {}
    exec(spec.loader.get_code("tailorfl.hashing"), held)  # type: ignore[attr-defined]
    assert held["changed"] == 1
    assert Replaced(SOURCE / "core" / "__init__.py", "").name == "tailorfl.core"


def test_the_fastest_test_of_every_function_comes_first() -> None:
    tests = [Recorded("f[1]", 3.0), Recorded("f[2]", 1.0), Recorded("g", 2.0), Recorded("h", 9.0)]
    assert [t.id for t in in_turn(tests)] == ["f[2]", "g", "h", "f[1]"]
    assert [t.id for t in within(in_turn(tests), 6.5, 10)] == ["f[2]", "g", "f[1]"]
    assert [t.id for t in within(in_turn(tests), 100, 2)] == ["f[2]", "g"]
    assert [t.id for t in within([Recorded("slow", 9.0)], 1.0, 2)] == ["slow"]
