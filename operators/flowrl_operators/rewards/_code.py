"""A reward for programs: run them against tests, in a sandbox."""

from __future__ import annotations

import ast
import json
import math
import re
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flowrl as fr
from flowrl.errors import DataError
from flowrl_operators._options import checked
from flowrl_operators.rewards._sandbox import Limits, Ran, run_programs

COUNTS = ("share", "all")
_FENCE = re.compile(r"```[ \t]*(?:python|python3|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)

# Reads its task (the program, a test) from standard input, so that the program finds nothing there; what it says about the test
# carries a token that the program was never given.
_HARNESS = """\
import json, os, sys

def main(task, write=os.write, dumps=json.dumps, leave=os._exit):
    token = task.pop("token")
    scope = {"__name__": "response"}
    exec(compile(task["code"], "response.py", "exec"), scope)
    value = None
    if "test" in task:
        exec(compile(task["test"], "test.py", "exec"), scope)
    else:
        target = scope.get(task["name"])
        if target is None and "Solution" in scope:
            target = getattr(scope["Solution"](), task["name"])
        if target is None:
            raise NameError("the response does not define " + task["name"])
        value = target(*task["args"])
    text = dumps({"token": token, "value": value}).encode()
    while text:
        text = text[write(3, text):]
    leave(0)

main(json.load(sys.stdin))
"""


def code_block(text: str) -> str | None:
    """The last fenced block of a text that is Python or of no named language, or None; one without an end goes to the end."""
    blocks = _FENCE.findall(text)
    return blocks[-1] if blocks else None


def _row_limit(*, total_s: float = 60.0, **_: object) -> float:
    return total_s + 30.0  # the sandbox keeps its own time; this is for one that is broken


def _writes(*, why: str | None, **_: object) -> dict[str, fr.ColumnType]:
    return {"reward": fr.SAMPLE.f32} | ({why: fr.SAMPLE.str} if why else {})


@fr.operator(writes=_writes, each_row=True, on_error="flag", processes=True, timeout_s=_row_limit)
def code(
    response: str,
    tests: fr.PROMPT.str.named_by("column"),
    *,
    column: str = "answer",
    count: str = "share",
    compare: str = "lines",
    fenced: bool = True,
    time_s: float = 5.0,
    total_s: float = 60.0,
    memory_mb: int = 1024,
    output_kb: int = 1024,
    processes: int = 32,
    why: str | None = None,
) -> float | dict[str, float | str]:
    """Code execution: share of the tests that the program in a response passes; 0.0 for a response without a program.

    The tests of a prompt are text in one of these forms (JSON, but for the last):

        [{"input": "1 2\\n", "output": "3\\n"}, ...]                       run as a program, standard input and output
        {"inputs": [...], "outputs": [...]}                               the same
        {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}            call a function (or a method of `Solution`)
        ["assert add(1, 2) == 3", ...]                                    Python, each a test
        assert add(1, 2) == 3                                             Python, all of it one test

    A test in Python must parse, and do something that can fail when it runs: assert, raise, or call. So an answer of another kind
    of task ("3", "42 apples"), or a function of asserts that nobody calls, is no test.

    Each test is a run of its own, in a sandbox: a new process in a session, a folder and an environment of its own (nothing is
    inherited, no keys), with limits of wall time, processor time, memory, output and processes; what it started is killed with
    it. Expected outputs and values are compared outside and never enter the sandbox.

    What the sandbox is not: it does not stop a program from *reading* files that the user who runs this may read. Writing outside
    its folder, the network, and reaching other processes are held back by namespaces and Landlock where the kernel gives them
    (Linux; many containers refuse namespaces): `sandbox_protects()` says what there is on a machine. Where `files` is False, a
    program may delete the user's files: use a container. An `assert` test runs in the same process as the program, so one that
    inspects the frames above it can forge a pass; input and output, or a function call, cannot be forged that way.

    Args:
        column: where the tests are.
        count: `"share"`, or `"all"`: 1.0 when every test passes, else 0.0.
        compare: of output: `"lines"`, white space at their ends left out; or `"words"`, with numbers equal to 1e-6.
        fenced: take the last fenced block of the response; False takes all of it.
        time_s, total_s: seconds of one test, and of all; tests that are left then do not pass.
        memory_mb: address space of a process.
        output_kb: size of the output and of a file.
        processes: processes and threads a test may start.
        why: a column to write beside the reward: why the first test that fails does ("no program", "timeout", "SyntaxError: ...",
            "wrong output", ...), empty where all pass.

    Errors: DataError for tests in none of these forms, or none at all: the data is at fault, so the row gets NaN and not 0.
    """
    checked("count", count, COUNTS, "rewards.code")
    checked("compare", compare, tuple(COMPARED), "rewards.code")
    try:
        wanted = _read_tests(tests)
    except DataError as error:
        raise DataError(f"{error}. The tests were read from '{column}'; say column= if they are in another") from error
    limits = Limits(
        time_s=time_s, total_s=total_s, memory_bytes=memory_mb << 20, output_bytes=output_kb << 10, processes=processes
    )
    program = code_block(response) if fenced else response
    if program is None or not program.strip():
        return 0.0 if why is None else {"reward": 0.0, why: "no program"}
    tokens = [secrets.token_hex(16) for _ in wanted]
    runs = [test.run(program, token) for test, token in zip(wanted, tokens, strict=True)]
    done = run_programs(runs, limits)
    broken = next((ran for ran in done if ran.status == "broken"), None)
    if broken is not None:
        raise RuntimeError(f"the sandbox could not run the program: {broken.stderr}")
    verdicts = [
        test.is_passed(ran, token, COMPARED[compare]) for test, ran, token in zip(wanted, done, tokens, strict=True)
    ]
    passed = sum(verdicts)
    reward = float(passed == len(wanted)) if count == "all" else passed / len(wanted)
    if why is None:
        return reward
    failed = next((pair for pair, good in zip(zip(wanted, done, strict=True), verdicts, strict=True) if not good), None)
    return {"reward": reward, why: "" if failed is None else failed[0].failure(failed[1])}


@dataclass(frozen=True, slots=True)
class _Test:
    """One test: input and output of a program, or a call, or Python to run after the program."""

    stdin: str | None = None
    name: str = ""
    args: Sequence[Any] = ()
    expected: Any = None
    source: str = ""

    def run(self, program: str, token: str) -> dict[str, str]:
        if self.stdin is not None:
            return {"program": program, "stdin": self.stdin}
        task: dict[str, Any] = {"code": program, "token": token}
        task.update({"test": self.source} if self.source else {"name": self.name, "args": list(self.args)})
        return {"command": _HARNESS, "stdin": json.dumps(task)}

    def is_passed(self, ran: Ran, token: str, is_same: Callable[[str, str], bool]) -> bool:
        if not ran.is_clean:
            return False
        if self.stdin is not None:
            return is_same(ran.stdout, str(self.expected))
        try:
            said = json.loads(ran.report)
        except ValueError:
            return False
        if not isinstance(said, dict) or said.get("token") != token:
            return False
        return bool(self.source) or _is_equal(said.get("value"), self.expected)

    def failure(self, ran: Ran) -> str:
        """Why a run did not pass, in a few words; `stderr` is the program's own and may say anything."""
        if ran.status != "exit":
            return f"signal {-ran.code}" if ran.status == "signal" and ran.code is not None else STATUS[ran.status]
        if ran.code:
            last = ran.stderr.strip().rpartition("\n")[2]
            return last[:200] if last else f"exit status {ran.code}"
        if self.stdin is not None:
            return "wrong output"
        return "wrong value" if ran.report else "it ended before the test"


STATUS = {
    "signal": "killed", "timeout": "timeout", "output": "too much output", "processes": "too many processes",
    "not run": "no time left", "broken": "not run",
}  # fmt: skip


def _read_tests(text: str) -> list[_Test]:
    stripped = str(text).strip()
    if not stripped:
        raise DataError("rewards.code needs tests; found an empty text")
    if stripped[0] not in "[{":
        return [_python(stripped)]
    try:
        given = json.loads(stripped)
    except ValueError as error:
        raise DataError(
            f"the tests of rewards.code look like JSON and are not: {error}; found {stripped[:80]!r}"
        ) from error
    tests = _paired(given) if isinstance(given, Mapping) else [_one(test) for test in given]
    if not tests:
        raise DataError("rewards.code needs at least one test; found an empty list")
    return tests


def _python(text: str) -> _Test:
    """Python as a test. Errors: DataError when it is none, or can only pass."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of how it is written
            tree = ast.parse(text, "test.py")
            compile(tree, "test.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"a test of rewards.code is Python and this is not ({error}): {text[:80]!r}") from error
    if not any(map(_may_fail, _run_at_once(tree))):
        raise DataError(
            f"a test of rewards.code asserts, raises or calls something when it runs, and this can only pass: {text[:80]!r}"
        )
    return _Test(source=text)


def _run_at_once(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run with the text itself: not what a function that is only defined would do."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Compare | ast.BoolOp | ast.Constant):
            continue  # compared, and thrown away: an assert was forgotten
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _run_at_once(node)


def _may_fail(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert | ast.Raise | ast.Call)


def _paired(given: Mapping[str, Any]) -> list[_Test]:
    inputs, outputs = given.get("inputs"), given.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise DataError(
            f"tests of rewards.code as an object have 'inputs' and 'outputs', lists of one length; found {str(given)[:80]!r}"
        )
    name = given.get("fn_name") or ""
    if not isinstance(name, str) or (name and not name.isidentifier()):
        raise DataError(f"'fn_name' of tests of rewards.code is the name of a function; found {name!r:.80}")
    if name:
        pairs = zip(inputs, outputs, strict=True)
        return [_Test(name=name, args=i if isinstance(i, list) else [i], expected=o) for i, o in pairs]
    return [_Test(stdin=_as_text(i), expected=_as_text(o)) for i, o in zip(inputs, outputs, strict=True)]


def _one(test: Any) -> _Test:
    if isinstance(test, str):
        return _python(test.strip())
    if isinstance(test, Mapping) and "input" in test and "output" in test:
        return _Test(stdin=_as_text(test["input"]), expected=_as_text(test["output"]))
    raise DataError(f"a test of rewards.code is text, or an object with 'input' and 'output'; found {str(test)[:80]!r}")


def _as_text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _same_lines(found: str, wanted: str) -> bool:
    return _lines(found) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same_words(found: str, wanted: str) -> bool:
    said, expected = found.split(), wanted.split()
    return len(said) == len(expected) and all(map(_same_word, said, expected))


def _same_word(found: str, wanted: str) -> bool:
    try:
        return found == wanted or math.isclose(float(found), float(wanted), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False


COMPARED = {"lines": _same_lines, "words": _same_words}


def _is_equal(found: Any, wanted: Any) -> bool:
    """Equality of JSON values; true and false are no numbers, floats are equal to 1e-6."""
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(_is_equal, found, wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(_is_equal(found[key], wanted[key]) for key in found)
    if isinstance(found, float) or isinstance(wanted, float):
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (found, wanted))
        return numbers and math.isclose(found, wanted, rel_tol=1e-6, abs_tol=1e-9)
    return type(found) is type(wanted) and found == wanted
