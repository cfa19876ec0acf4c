"""The hash of an operator: what it covers, and what it must not depend on."""

import ast
import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrl.graph import code, packs
from flowrl.graph.code import code_hash
from flowrl.graph.names import definitions, free_names

PACK = {
    "__init__.py": "",
    "_helpers.py": """
        import re
        from fake_identity import _deep
        from fake_identity._deep import LIMIT as TOP

        SCALE = 2.0
        TABLE = {"half": lambda x: x / 2, "twice": _deep.twice}
        PATTERN = re.compile(r"[0-9]+")
        CACHE = {}

        class Kind:
            '''What there is.'''
            least = 0

            def bound(self, x):
                return max(x, self.least)

        def direct(x):
            return SCALE * indirect(x)

        def indirect(x):
            return x + 1

        def unused(x):
            return x - 1
    """,
    "_deep.py": """
        BASE = 3
        LIMIT = BASE * 2

        def twice(x):
            return 2 * x
    """,
    "ops.py": """
        import math
        import flowrl as fr
        from fake_identity import _helpers
        from fake_identity._helpers import CACHE, Kind, PATTERN, TABLE, TOP, direct

        def calls(x):
            return direct(x)

        def by_module(x):
            return _helpers.direct(x)

        def by_table(x):
            return TABLE["half"](x)

        def of_class(x):
            return Kind().bound(x)

        def with_constant(x):
            return min(x, TOP)

        def with_pattern(x):
            return PATTERN.sub("", x)

        def remembers(x):
            return CACHE.setdefault(x, x)

        def in_default(x, most=TOP):
            return min(x, most)

        def shadows(x):
            direct = math.sqrt
            return direct(x)

        def recursive(x):
            return recursive(x - 1) if x else other(x)

        def other(x):
            return recursive(x)

        @fr.operator(writes={"y": fr.SAMPLE.f32})
        def operator(reward: fr.SAMPLE.f32):
            return direct(reward)
    """,
}

Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Writes the pack anew, with texts replaced, and imports its module `ops`."""
    count = 0
    path = list(sys.path)

    def made(**changes: str) -> Any:
        nonlocal count
        count += 1
        forget()
        folder = tmp_path / str(count)
        (folder / "fake_identity").mkdir(parents=True)
        for name, text in PACK.items():
            text = textwrap.dedent(text)
            for old, new in changes.items():
                text = text.replace(*new) if isinstance(new, tuple) else text.replace(old, new)
            (folder / "fake_identity" / name).write_text(text)
        sys.path[:] = [str(folder), *path]
        importlib.invalidate_caches()
        return importlib.import_module("fake_identity.ops")

    def forget() -> None:
        for name in [n for n in sys.modules if n.startswith("fake_identity")]:
            del sys.modules[name]

    yield made
    sys.path[:] = path
    forget()


def hashes(module: Any) -> dict[str, str]:
    functions = {n: v for n, v in vars(module).items() if getattr(v, "__module__", "") == "fake_identity.ops"}
    return {name: value.hash if name == "operator" else code_hash(value) for name, value in functions.items()}


def changed(make: Make, old: str, new: str) -> set[str]:
    """Names whose hash differs after a text of the pack was replaced."""
    before, after = hashes(make()), hashes(make(change=(old, new)))
    return {name for name in before if before[name] != after[name]}


EXPECTED = ["02bb4a315d8a", "be3b7f7b2a2a", "bdd5f18abb35", "689db0058534"]
USERS_OF_DIRECT = {"calls", "by_module", "operator"}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("return SCALE * indirect(x)", "return indirect(x) / SCALE", USERS_OF_DIRECT),
        ("return x + 1", "return x + 2", USERS_OF_DIRECT),  # a helper's helper
        ("SCALE = 2.0", "SCALE = 3.0", USERS_OF_DIRECT),  # a helper's constant
        ("return 2 * x", "return x + x", {"by_table"}),  # a function in a table, through a module
        ("x / 2", "x / 3", {"by_table"}),
        ("max(x, self.least)", "min(x, self.least)", {"of_class"}),
        ("least = 0", "least = 1", {"of_class"}),
        ("BASE = 3", "BASE = 4", {"with_constant", "in_default"}),  # what an imported constant is made of
        ("[0-9]+", "[0-9]", {"with_pattern"}),
        ("return x - 1", "return x - 2", set()),  # nobody uses it
        ("'''What there is.'''", "'''Another docstring.'''", set()),
        ("def unused", "# a comment\n\n\ndef unused", set()),
        ("return recursive(x)\n", "return recursive(x) + 0\n", {"recursive", "other"}),
    ],
)
def test_a_change_in_a_helper_is_a_change_of_who_uses_it(make: Make, old: str, new: str, expected: set[str]) -> None:
    assert changed(make, old, new) == expected


def test_hashes_with_helpers_are_the_same_everywhere(make: Make) -> None:
    # written down once; 3.11, 3.12 and 3.13 found the same
    found = hashes(make())
    assert [found[name] for name in ("calls", "by_table", "of_class", "with_constant")] == EXPECTED


def test_a_hash_does_not_follow_values_that_change_while_running(make: Make) -> None:
    module = make()
    module.remembers(1)
    filled = code_hash(module.remembers)
    assert filled == code_hash(make().remembers)


def test_an_operator_without_helpers_has_the_hash_of_its_own_text() -> None:
    def plain(x: int) -> int:
        return x + 1

    assert code_hash(plain) == code_hash(plain)
    assert free_names(ast.parse("lambda x: x + 1")) == set()


def test_what_a_closure_calls_counts() -> None:
    def made(how: Callable[[int], int]) -> Callable[[int], int]:
        return lambda x: how(x)

    def one(x: int) -> int:
        return x + 1

    first = code_hash(made(one))

    def one(x: int) -> int:  # type: ignore[no-redef]
        return x + 2

    assert code_hash(made(one)) != first


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(x):\n    return g(x) + a.b.c", {("g",), ("a", "b", "c")}),
        ("def f(x, y=D):\n    z = x\n    return z + y", {("D",)}),
        ("def f(x):\n    return [h(i) for i in x if i > LEAST]", {("h",), ("LEAST",)}),
        ("def f(x):\n    def inner(k):\n        return k + K\n    return inner(x)", {("K",)}),
        ("def f(x):\n    global total\n    total = total + x", {("total",)}),
        ("def f(x):\n    import torch as t\n    return t.exp(x)", set()),
        ("def f(x):\n    return (lambda k: k + x + OUT)(1)", {("OUT",)}),
        ("def f(x):\n    try:\n        g()\n    except E as e:\n        return e", {("g",), ("E",)}),
        ("def f(x: T) -> R:\n    v: V = w\n    return v", {("w",)}),
        ("def f(x):\n    return [y := x, y]", set()),
        ("def f(x):\n    return [y := k for k in x] + [y]", set()),
        ("def f(x):\n    match x:\n        case [a, *b]: return a, b\n        case P(q=c): return c", {("P",)}),
        ("@deco\ndef f(x):\n    return f'{x} {NAME!r:>{WIDTH}}'", {("NAME",), ("WIDTH",)}),
        ("class A(B):\n    x = C\n    def m(self): return D", {("B",), ("C",), ("D",)}),
    ],
)
def test_free_names(text: str, expected: set[tuple[str, ...]]) -> None:
    assert free_names(ast.parse(text).body[0]) == expected


def test_definitions_are_found_where_a_module_hides_them() -> None:
    found = definitions("try:\n    A = 1\nexcept E:\n    A = 2\nif X:\n    B, C = 1, 2\nelse:\n    def B(): pass\n")
    assert {name: len(nodes) for name, nodes in found.items()} == {"A": 2, "B": 2, "C": 1}
    assert definitions("def broken(") == {}


def test_a_function_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = packs.find("core.gae")
    first = operator.hash
    monkeypatch.setattr(code, "_tree", None)
    assert operator.hash == first
