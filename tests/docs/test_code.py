"""Every code block of README and docs runs, and prints what the page says it prints."""

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, matches, pages, run_page


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_code_of_a_page_runs(page: Path) -> None:
    differing = run_page(page)
    told = [f"line {m.block.line} says\n{m.block.text}\nprinted is\n{m.found}" for m in differing]
    assert not told, "\n\n".join(told)


def test_few_blocks_are_left_alone() -> None:
    every = [block for page in pages() for block in blocks(page.read_text()) if block.language == "python"]
    skipped = [block for block in every if block.skipped]
    assert len(every) > 40
    assert len(skipped) <= len(every) // 10, [f"{b.line}: {b.skipped}" for b in skipped]


def test_a_page_that_is_wrong_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\nprint(x + 1)\n```\n\n<!-- output -->\n```text\n3\n```\n")
    assert [m.found for m in run_page(page)] == ["2\n"]
    page.write_text("```python\nx = 1\n```\n\nand then\n\n```python\nprint(y)\n```\n")
    with pytest.raises(NameError, match="'y'"):
        run_page(page)
    page.write_text("```console\n$ flowrl check nothing.py\n```\n")
    with pytest.raises(AssertionError, match=r"nothing\.py"):
        run_page(page)


@pytest.mark.parametrize(
    ("expected", "found", "is_equal"),
    [("a ... c\n", "a b\nb c", True), ("a", "ab", False), ("a.c", "abc", False), ("...\nend", "x\ny\nend\n", True)],
)
def test_matches(expected: str, found: str, is_equal: bool) -> None:
    assert matches(expected, found) is is_equal
