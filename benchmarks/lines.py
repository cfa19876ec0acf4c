"""How long the flows of examples/ are: lines of the body, without signature, docstring, comments and blank lines.

    python -m benchmarks lines

Limits are held by `tests/null/test_flow_lengths.py`.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import ROOT, report, table

LIMITS = {"grpo": 6, "ppo": 10}
"""Most lines of a flow's body, wherever in examples/ a flow of that name is."""
PAPER = {
    "grpo": 5, "ppo": 9, "dapo": 4, "remax": 4, "online_dpo": 4, "raft": 2, "distill": 3, "reward_model": 1, "judged": 4,
    "tool_use": 3, "debate": 4, "replayed": 3, "grpo_moving_ref": 3, "vine": 4, "ppo_warm": 2, "sft": 1,
}  # fmt: skip
"""The sixteen flows of examples/flows/: as long as they were when the language was only on paper."""
KINDS = {"operator": 3, "reward": 3, "loss": 4}
"""Most lines of what examples/ add to the language."""
NESTED = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Body:
    """One decorated function and the lines of its body."""

    file: str
    name: str
    kind: str
    """`flow`, `operator`, `reward`, `loss`."""
    lines: int


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, source: str) -> int:
    """Lines with code between the signature and the end; functions inside count, with their signatures."""
    body = function.body
    if (
        isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    ):
        body = body[1:]
    if not body:
        return 0
    lines = source.splitlines()[body[0].lineno - 1 : function.end_lineno]
    return sum(1 for line in lines if line.strip() and not line.strip().startswith("#"))


def decorated(path: Path) -> Iterator[Body]:
    """Functions of a file under a decorator of the language: `@fr.flow`, `@fr.operator(...)`, ..."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, NESTED):
            continue
        for decorator in node.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "fr":
                yield Body(str(path.relative_to(ROOT)), node.name, called.attr, body_lines(node, source))


def limit(body: Body) -> int | None:
    """Most lines a body may have; None for no limit."""
    if body.kind != "flow":
        return KINDS.get(body.kind)
    return PAPER.get(body.name) if body.file.startswith("examples/flows/") else LIMITS.get(body.name)


def all_bodies() -> list[Body]:
    paths = sorted((ROOT / "examples").rglob("*.py"))
    return sorted((body for path in paths for body in decorated(path)), key=lambda b: (b.kind, b.file, b.name))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks lines", description="how long the flows of examples/ are"
    )
    parser.add_argument("--quick", action="store_true", help="nothing is slow here; the same")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args(argv)
    bodies = all_bodies()
    rows = [[b.kind, b.name, b.file, b.lines, limit(b) or ""] for b in bodies]
    text = table(["kind", "name", "file", "lines of the body", "limit"], rows)
    report("lines", text, {"bodies": {f"{b.file}:{b.name}": b.lines for b in bodies}}, save=args.save)
    too_long = [body for body in bodies if body.lines > (limit(body) or body.lines)]
    for body in too_long:
        print(f"{body.file}: {body.name} has {body.lines} lines; the limit is {limit(body)}")
    return int(bool(too_long))
