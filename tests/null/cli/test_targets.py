"""What FILE:NAME names, and what is said when it names nothing."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from flowrl.errors import ConfigError, TraceError
from flowrl.graph.flows import Flow
from flowrl.recipe import Recipe, load
from flowrl.recipe.targets import find


def test_the_only_flow_needs_no_name(folder: Path) -> None:
    assert isinstance(find("flow.py"), Flow)
    assert find("flow.py").name == "grpo"
    assert find("flow.py:grpo") is find("flow.py")
    assert find("flow:grpo") is find("flow.py")
    assert find(str(folder / "flow.py:grpo")) is find("flow.py")


def test_a_file_below_the_working_directory_has_its_dotted_name(folder: Path) -> None:
    (folder / "below").mkdir()
    (folder / "below" / "inner.py").write_text((folder / "flow.py").read_text())
    flow = find("below/inner.py")
    assert flow.path == "below.inner:grpo"
    assert getattr(importlib.import_module("below.inner"), "grpo") is flow  # noqa: B009


def test_a_file_may_import_its_neighbours_wherever_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert find(f"{folder}/mine.py:grpo").name == "grpo"


def test_a_file_named_like_an_installed_module_hides_nothing(folder: Path) -> None:
    (folder / "json.py").write_text((folder / "flow.py").read_text())
    flow = find("json.py")
    assert re.fullmatch(r"json_\w{6}:grpo", flow.path)
    assert hasattr(sys.modules["json"], "dumps")
    assert find("json.py") is flow


def test_imported_flows_are_found_by_name_only(folder: Path) -> None:
    assert find("mine.py:grpo").name == "grpo"
    with pytest.raises(ConfigError, match=r"mine\.py defines no flow"):
        find("mine.py")


def test_several_flows_are_listed(folder: Path) -> None:
    text = (folder / "flow.py").read_text()
    (folder / "two.py").write_text(text + text[text.index("@fr.flow") :].replace("def grpo", "def other"))
    with pytest.raises(ConfigError, match=r"two\.py defines 2 flows; name one of them: two\.py:grpo, two\.py:other"):
        find("two.py")


def test_an_unknown_name_gives_the_nearest_and_the_flows(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"flow\.py has no 'gpro'; did you mean 'grpo'\?; flows there: flow\.py:grpo"):
        find("flow.py:gpro")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("flw.py", r"no file 'flw\.py'; did you mean 'flow\.py'"),
        ("no/such/flow.py", r"no file 'no/such/flow\.py'"),
        ("flwo:grpo", r"no module 'flwo'"),
        ("flow.text", r"no module 'flow\.text'|no module 'flow'"),
        ("what is this", r"neither a Python file \(FILE\.py\), a graph \(FILE\.txt\) nor the name of a module"),
        ("flow.py:", r"a target is FILE\.py:NAME"),
        (":grpo", r"a target is FILE\.py:NAME"),
    ],
)
def test_a_target_that_is_not_there(folder: Path, target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find(target)


def test_what_a_file_raises_is_one_error_with_its_line(folder: Path) -> None:
    (folder / "raises.py").write_text("x = 1\ny = x / 0\n")
    with pytest.raises(
        TraceError, match=r"importing raises\.py raised ZeroDivisionError: division by zero, at raises\.py:2"
    ):
        find("raises.py:x")
    (folder / "syntax.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(TraceError, match=r"SyntaxError: invalid syntax, at syntax\.py:2"):
        find("syntax.py:x")
    (folder / "needs.py").write_text("import no_such_module_here\n")
    with pytest.raises(TraceError, match=r"ModuleNotFoundError: No module named 'no_such_module_here', at needs\.py:1"):
        find("needs.py:x")
    (folder / "exits.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(TraceError, match=r"SystemExit: 3, at exits\.py:1"):
        find("exits.py:x")


def test_a_failed_import_leaves_nothing_behind(folder: Path) -> None:
    file = folder / "heapq.py"  # imported apart, because the name is taken
    file.write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(TraceError, match="ZeroDivisionError"):
            find("heapq.py:x")


def test_a_recipe_is_a_function_or_a_value(folder: Path) -> None:
    assert load("flow.py:small").steps == 2
    assert load("flow.py:ready").steps == 3
    assert load("flow:small") == load("flow.py:small")
    assert load("flow.py") == Recipe(find("flow.py"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flow.py:needs_an_argument", "takes arguments, so it is no recipe"),
        ("flow.py:Recipe", "is a type"),
        ("mine.py:number", "is a int; it should be a flow"),
        ("flow.py:grpo.graph", "returned Graph; a recipe function returns a flowrl.recipe.Recipe"),
    ],
)
def test_what_is_no_recipe_is_refused(folder: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(name)


def test_a_text_graph(folder: Path) -> None:
    graph = find("flow.py").graph(group_size=2)
    (folder / "graph.txt").write_text(str(graph))
    assert find("graph.txt") == graph
    assert load("graph.txt").graph == graph
    with pytest.raises(ConfigError, match="holds the graph 'grpo'; found the name 'other'"):
        find("graph.txt:other")
