"""rewards.code: programs that pass, fail, and do their worst."""

import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

import flowrl as fr
from flowrl.errors import ConfigError, DataError
from flowrl.runtime.operators import run_operator
from flowrl.store.rows import RowBatch
from flowrl_operators import rewards
from flowrl_operators.rewards._sandbox import Limits, Ran, run_programs
from flowrl_operators.rewards._sandbox_main import remove

ADD = "def add(a, b):\n    return a + b"
QUICK = Limits(time_s=3.0)


def said(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


def run(program: str, limits: Limits = QUICK, stdin: str = "", namespaces: bool = True) -> Ran:
    return run_programs([{"program": program, "stdin": stdin}], limits, namespaces=namespaces)[0]


# --- tests and verdicts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "tests", "share"),
    [
        (ADD, "assert add(1, 2) == 3", 1.0),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], 0.5),
        (ADD, {"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [3, "ab"]}, 1.0),
        (ADD, {"fn_name": "add", "inputs": [[0.1, 0.2]], "outputs": [0.3]}, 1.0),
        (
            "class Solution:\n    def add(self, a, b):\n        return (a, b)",
            {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[1, 2]]},
            1.0,
        ),
        ("def add(a, b):\n    return True", {"fn_name": "add", "inputs": [[0, 1]], "outputs": [1]}, 0.0),
        (ADD, {"fn_name": "sub", "inputs": [[0, 1]], "outputs": [1]}, 0.0),
        (
            "print(sum(map(int, input().split())))",
            [{"input": "1 2\n", "output": "3\n"}, {"input": "1", "output": "2"}],
            0.5,
        ),
        ("print('a  \\nb\\n\\n')", {"inputs": [""], "outputs": ["a\nb"]}, 1.0),
        ("print('3'); raise SystemExit(1)", {"inputs": [""], "outputs": ["3"]}, 0.0),
        ("if __name__ == '__main__':\n    print(7)", {"inputs": [""], "outputs": ["7"]}, 1.0),
        ("this is no Python", "assert True", 0.0),
    ],
)
def test_the_share_of_tests_that_pass(program: str, tests: object, share: float) -> None:
    text = tests if isinstance(tests, str) else json.dumps(tests)
    assert rewards.code(said(program), text) == share


def test_all_or_nothing() -> None:
    tests = json.dumps(["assert add(1, 2) == 3", "assert add(1, 2) == 4"])
    assert rewards.code(said(ADD), tests, count="all") == 0.0
    assert rewards.code(said(ADD), json.dumps(["assert add(1, 2) == 3"]), count="all") == 1.0


def test_words_compare_numbers() -> None:
    tests = json.dumps({"inputs": [""], "outputs": ["0.5 yes"]})
    assert rewards.code(said("print('0.50000000001   yes')"), tests) == 0.0
    assert rewards.code(said("print('0.50000000001   yes')"), tests, compare="words") == 1.0
    assert rewards.code(said("print('0.6 yes')"), tests, compare="words") == 0.0


def test_the_last_block_is_the_program() -> None:
    assert rewards.code_block("```python\na\n```\n```\nb\n```") == "b\n"
    assert rewards.code_block("```py\ncut off") == "cut off"
    assert rewards.code_block("```json\n{}\n```") is None
    assert rewards.code_block("no fence") is None
    assert rewards.code("no fence", "assert True") == 0.0
    assert rewards.code(ADD, "assert add(1, 1) == 2", fenced=False) == 1.0


@pytest.mark.parametrize(
    "tests", ["", "[]", "[1]", "{", '{"inputs": ["a"], "outputs": []}', '{"inputs": "a", "outputs": "b"}']
)
def test_tests_that_are_none_are_an_error_and_not_a_wrong_answer(tests: str) -> None:
    with pytest.raises(DataError, match="rewards.code"):
        rewards.code(said(ADD), tests)


@pytest.mark.parametrize(
    "answer",
    ["3", "-1/2", '"text"', "42 apples", "hello", "assert 1 ==", "not json [", "[3]", "add(1, 2) == 3", "return add(1, 2)",
     "def check(f):\n    assert f(1, 2) == 3", '["assert add(1, 2) == 3", "3"]',
     '{"fn_name": 3, "inputs": [[1]], "outputs": [1]}'],
)  # fmt: skip
def test_what_can_only_pass_or_is_no_python_is_named_with_its_column(answer: str) -> None:
    with pytest.raises(DataError) as caught:
        rewards.code(said("print(1)"), answer, column="solution")
    assert "'solution'" in str(caught.value) and "column=" in str(caught.value)
    assert "3" in str(caught.value) or repr(answer) in str(caught.value)


def test_a_test_that_calls_or_raises_is_one() -> None:
    check = "def check(f):\n    assert f(1, 2) == 3"
    assert rewards.code(said(ADD), f"{check}\ncheck(add)") == 1.0
    assert rewards.code(said(ADD), "if add(1, 2) != 3:\n    raise ValueError") == 1.0
    assert rewards.code(said("def add(a, b):\n    return a"), f"{check}\ncheck(add)") == 0.0


@pytest.mark.parametrize(
    ("response", "tests", "reason"),
    [
        (said(ADD), "assert add(1, 2) == 3", ""),
        ("I do not know.", "assert add(1, 2) == 3", "no program"),
        (said("def add(a, b:"), "assert add(1, 2) == 3", "SyntaxError"),
        (said("while True: pass"), "assert True", "timeout"),
        (said(ADD), "assert add(1, 2) == 4", "AssertionError"),
        (said(ADD), "assert sub(1, 2) == 4", "NameError: name 'sub' is not defined"),
        (said("raise SystemExit(0)"), "assert True", "it ended before the test"),
        (said("raise SystemExit(3)"), '{"inputs": [""], "outputs": ["7"]}', "exit status 3"),
        (said("print(8)"), '{"inputs": [""], "outputs": ["7"]}', "wrong output"),
        (said(ADD), '{"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [3, 5]}', "wrong value"),
    ],
)
def test_why_it_is_worth_less_can_be_a_column(response: str, tests: str, reason: str) -> None:
    answer = rewards.code(response, tests, why="why", time_s=1.0)
    assert answer["why"].startswith(reason) and (answer["reward"] == 1.0) is (not reason)


def test_the_column_that_says_why_is_empty_where_the_data_is_at_fault() -> None:
    columns = {name: np.asarray(texts, dtype=object)
               for name, texts in (("response", [said(ADD), "nothing"]), ("answer", ["3", "assert True"]))}  # fmt: skip
    rows = RowBatch(columns, {"response": fr.SAMPLE.str, "answer": fr.PROMPT.str})
    done = run_operator(rewards.code.bind(why="code/why"), rows)
    assert done.rows["code/why"].tolist() == ["", "no program"]
    assert np.isnan(done.rows["reward"][0]) and "can only pass: '3'" in done.rows["row_error"][0]


def test_options_are_checked() -> None:
    for wrong in ({"count": "most"}, {"compare": "bytes"}, {"time_s": 0.0}, {"processes": -1}):
        with pytest.raises(ConfigError, match=str(next(iter(wrong.values())))):
            rewards.code(said(ADD), "assert True", **wrong)


# --- programs that cheat ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "import os, json\nos.write(3, json.dumps({'token': '', 'value': 3}).encode())\nos._exit(0)",
        "import atexit, os\natexit.register(os._exit, 0)\nraise ValueError",
        "import sys\nsys.stdin.read()\ndef add(a, b):\n    return input()",
        "class Any:\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return Any()",
    ],
)
def test_no_way_around_a_call(program: str) -> None:
    tests = json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]})
    assert rewards.code(said(program), tests) == 0.0


def test_leaving_early_passes_no_assertion() -> None:
    assert rewards.code(said("import sys\nsys.exit(0)"), "assert False") == 0.0
    assert rewards.code(said("import os\nos._exit(0)"), "assert False") == 0.0


def test_a_program_gets_no_environment_and_an_empty_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "abc")
    ran = run("import os\nprint('SECRET_KEY' in os.environ, os.listdir('.'))")
    assert ran.stdout == "False ['program.py']\n"
    if rewards.sandbox_protects()["processes"]:  # nor that of its parents
        assert "True" not in run(PARENTS).stdout


PARENTS = """
import glob
for file in glob.glob("/proc/[0-9]*/environ"):
    try:
        print("SECRET_KEY" in open(file).read())
    except OSError:
        pass
"""


# --- programs that do their worst -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "status", "code"),
    [
        ("while True: pass", "timeout", None),
        ("import time\ntime.sleep(100)", "timeout", None),
        (
            "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\ntime.sleep(100)",
            "timeout",
            None,
        ),
        ("while True: print('x' * 1000)", "output", None),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output", None),
        ("open('big', 'wb').write(b'x' * (2 << 20))", "exit", 1),
        ("x = bytearray(4 << 30)", "exit", 1),
        ("import ctypes\nctypes.string_at(0)", "signal", -11),
        ("import os\nos.kill(os.getpid(), 9)", "signal", -9),
        ("import os\nos.close(1)\nos.close(2)", "exit", 0),
        ("print(input())", "exit", 1),
    ],
)
def test_limits_hold(program: str, status: str, code: int | None) -> None:
    began = time.monotonic()
    ran = run(program, Limits(time_s=1.5))
    assert ran.status == status
    assert code is None or ran.code == code
    assert len(ran.stdout) <= 1 << 20 and len(ran.stderr) <= 4000
    assert time.monotonic() - began < 20


FORKS = "import os, time\nfor _ in range(7): os.fork()\ntime.sleep(50)"  # 128 processes, not endlessly many: a test may fail


@pytest.mark.parametrize("namespaces", [True, False])
def test_a_fork_bomb_is_ended(namespaces: bool) -> None:
    ran = run(FORKS, Limits(time_s=5.0, processes=16), namespaces=namespaces)
    assert ran.status in ("processes", "exit")  # the kernel's limit may come first: fork fails
    assert not running("range(7)") and not leftovers()


DAEMON = "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n        time.sleep(50)\n"


@pytest.mark.parametrize("namespaces", [True, False])
def test_nothing_survives_its_program(namespaces: bool) -> None:
    ran = run(DAEMON, namespaces=namespaces)
    assert ran.status == "exit"
    assert not leftovers()


@pytest.mark.parametrize("namespaces", [True, False])
def test_a_program_ends_with_the_process_that_runs_it(namespaces: bool) -> None:
    command = (
        "from flowrl_operators.rewards._sandbox import *; "
        f"run_programs([{{'program': 'while True: pass', 'stdin': ''}}], Limits(), namespaces={namespaces})"
    )
    before = folders()
    process = subprocess.Popen([sys.executable, "-c", command])
    end = time.monotonic() + 30
    while not (leftovers() and folders() - before) and time.monotonic() < end:
        time.sleep(0.02)
    made = folders() - before
    assert leftovers() and made
    process.kill()
    process.wait()
    while (leftovers() or made & folders()) and time.monotonic() < end:
        time.sleep(0.02)
    assert not leftovers() and not made & folders()


@pytest.mark.parametrize("namespaces", [True, False])
def test_a_folder_too_deep_to_walk_is_removed(namespaces: bool) -> None:
    program = "import os\nprint(os.getcwd())\nfor i in range(1500):\n    os.mkdir('d'); os.chdir('d')"
    ran = run(program, Limits(time_s=20.0), namespaces=namespaces)
    assert ran.status == "exit" and ran.code == 0
    assert "flowrl-code-" in ran.stdout and not Path(ran.stdout.strip()).exists()


def test_a_folder_is_removed_whatever_is_in_it(tmp_path: Path) -> None:
    inside = tmp_path / "folder"
    (inside / ".flattened-1" / "x" / "y").mkdir(parents=True)
    (inside / ".flattened-1" / "x" / "file").write_text("1")
    (inside / "link").symlink_to(tmp_path)
    (inside / ".flattened-1" / "x").chmod(0)
    remove(str(inside))
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_is_no_utf8_fails_like_any_other() -> None:
    assert rewards.code(said("print('\ud800')"), '[{"input": "", "output": "1"}]') == 0.0


def folders() -> set[Path]:
    """Folders of the sandbox."""
    return set(Path(tempfile.gettempdir()).glob("flowrl-code-*"))


def leftovers() -> list[str]:
    """Programs of the sandbox that run."""
    return running("program.py")


def running(word: str) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if word in line and "pytest" not in line and "run_programs" not in line:
            found.append(line)
    return found


@pytest.mark.parametrize("namespaces", [True, False])
def test_files_outside_its_folder_stay(tmp_path: Path, namespaces: bool) -> None:
    mine = tmp_path / "precious"
    mine.write_text("1")
    ran = run(f"import os\nopen('own', 'w').write('1')\nos.remove({str(mine)!r})", namespaces=namespaces)
    if not (ran.cage or {})["files"]:
        pytest.skip("this kernel holds nothing back")
    assert mine.read_text() == "1" and ran.code == 1 and "own" not in ran.stderr
    ran = run(f"open({str(tmp_path / 'new')!r}, 'w')", namespaces=namespaces)
    assert ran.code == 1 and not (tmp_path / "new").exists()


@pytest.mark.parametrize("namespaces", [True, False])
def test_it_reaches_no_server(namespaces: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ran = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)", namespaces=namespaces)
        if not (ran.cage or {})["tcp"]:
            pytest.skip("this kernel holds nothing back")
        assert ran.code == 1


def test_time_of_all_tests_is_limited() -> None:
    tests = json.dumps(["import time; time.sleep(1.5)"] * 20)
    began = time.monotonic()
    assert rewards.code(said(ADD), tests, time_s=5.0, total_s=2.0) <= 0.1
    assert time.monotonic() - began < 15


def test_rows_run_side_by_side_and_a_hanging_one_only_loses_its_own_reward() -> None:
    responses = [said(ADD), said("while True: pass"), said("import os\nos._exit(0)"), "no program"]
    columns = {
        "response": np.asarray(responses, dtype=object),
        "tests": np.asarray(["assert add(1, 2) == 3"] * 4, dtype=object),
    }
    rows = RowBatch(columns, {"response": fr.SAMPLE.str, "tests": fr.PROMPT.str})
    done = run_operator(rewards.code.bind(column="tests", time_s=2.0), rows, workers=2)
    assert done.rows["reward"].tolist() == [1.0, 0.0, 0.0, 0.0] and done.failed == 0
