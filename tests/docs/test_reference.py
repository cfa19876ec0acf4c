"""The reference is complete: every code, every public name, every standard column, every option has its place."""

import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

import flowrl
from flowrl.model import Model
from flowrl.schema.standard import LIVE, STANDARD
from tests.docs.pages import ROOT, blocks

CHECKS = ROOT / "docs" / "reference" / "checks.md"
CODE = re.compile(r"FR-[A-Z]\d\d")


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_pages", ROOT / "docs" / "reference_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def codes_in_code() -> set[str]:
    files = [ROOT / "flowrl" / "graph" / "infer.py", *(ROOT / "flowrl" / "graph" / "checks").glob("*.py")]
    return {code for file in files for code in CODE.findall(file.read_text())}


def test_every_code_has_a_section_with_an_example_that_triggers_it() -> None:
    page = CHECKS.read_text()
    sections = {part.partition("\n")[0].strip(): part for part in re.split(r"^## ", page, flags=re.MULTILINE)}
    known = codes_in_code()
    assert len(known) >= 12
    assert {title for title in sections if CODE.fullmatch(title)} == known
    for code in known:
        printed = "".join(block.text for block in blocks(sections[code]) if block.is_output)
        assert f"{code} at " in printed, f"the section of {code} has no example that prints it"
        assert "**Fix:**" in sections[code]
        assert f"| [{code}](#{code.lower()}) |" in page


def test_every_public_name_is_in_the_reference(hook: ModuleType) -> None:
    page = hook.names_page()
    missing = [name for name in flowrl.__all__ if f"`{name}`" not in page]
    assert missing == []
    empty = re.findall(r"^\| \[`(\w+)`\]\([^)]*\) \|\s*\|$", page, re.MULTILINE)
    assert empty == [], "these have no docstring"


def test_every_column_is_in_the_reference(hook: ModuleType) -> None:
    page = hook.columns_page()
    for column in STANDARD:
        assert f"| `{column.name}` | `{column.type}` |" in page
        assert column.doc and column.doc in page
    for name in LIVE:
        assert f"| `{name}` |" in page


def test_the_model_page_names_fields_that_exist() -> None:
    page = (ROOT / "docs" / "how-to" / "use-a-model.md").read_text()
    table = page.partition("| field |")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if row else "")}
    assert "precision" in named and named <= {field.name for field in fields(Model)}


def test_pages_name_files_that_exist() -> None:
    written = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in written:
        for name in re.findall(r"`((?:examples|flowrl|operators|docs|tests)/[\w/.-]+)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.relative_to(ROOT)} names {name}"


def test_readme_links_to_files_that_exist() -> None:
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text()):
        assert (ROOT / link).exists(), link


def test_readme_keeps_the_place_of_the_benchmarks() -> None:
    page = (ROOT / "README.md").read_text()
    assert page.index("<!-- benchmarks -->") < page.index("<!-- /benchmarks -->")


def test_design_index_lists_every_decision() -> None:
    folder = Path(ROOT / "docs" / "design")
    index = (folder / "index.md").read_text()
    for page in sorted(folder.glob("[0-9]*.md")):
        title = page.read_text().partition("\n")[0].removeprefix("# ")
        assert f"[{title}]({page.name})" in index
        assert all(f"\n## {part}\n" in page.read_text() for part in ("Situation", "Decision", "What it costs")), (
            page.name
        )
