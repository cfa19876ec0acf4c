"""Limits that keep the code readable. To raise one, argue for it in the change that does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*(ROOT / "flowrl").rglob("*.py"), *(ROOT / "operators" / "flowrl_operators").rglob("*.py")])

MOST_LINES_OF_A_FUNCTION = 80
MOST_LINES_OF_A_FILE = 700
MOST_METHODS_OF_A_CLASS = 40


def definitions(kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[tuple[Path, ast.AST]]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kind):
                yield path, node


def _code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body
    is_doc = isinstance(body[0], ast.Expr) and isinstance(getattr(body[0], "value", None), ast.Constant)
    start = body[1].lineno if is_doc and len(body) > 1 else body[0].lineno
    return (node.end_lineno or start) - start + 1


def test_functions_fit_on_a_screen():
    for path, node in definitions((ast.FunctionDef, ast.AsyncFunctionDef)):
        lines = _code_lines(node)  # type: ignore[arg-type]
        where = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"  # type: ignore[attr-defined]
        assert lines <= MOST_LINES_OF_A_FUNCTION, f"{where} has {lines} lines; split it"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_small(path: Path):
    lines = len(path.read_text().splitlines())
    assert lines <= MOST_LINES_OF_A_FILE, f"{path.name} has {lines} lines; split it"


def test_no_god_class_grows():
    for path, node in definitions(ast.ClassDef):
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef) and not item.name.startswith("__")]  # type: ignore[attr-defined]
        assert len(methods) <= MOST_METHODS_OF_A_CLASS, f"{path.name}: {node.name} has {len(methods)} methods"  # type: ignore[attr-defined]


def test_the_runtime_never_asks_for_a_role():
    for path in sorted((ROOT / "flowrl" / "runtime").rglob("*.py")):
        text = path.read_text()
        for word in ("policy", "critic", "teacher", "judge"):
            assert f'== "{word}"' not in text and f'["{word}"]' not in text, f"{path.name} treats '{word}' by name"
