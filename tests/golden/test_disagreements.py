"""The page "Where systems disagree" is what its sections say, and a section that is not true is an error."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.golden.disagreements.__main__ import CHAPTERS, page
from tests.golden.disagreements.index import anchor, by_system, contents, heading
from tests.golden.disagreements.responses import DEVIATION, LONELY, OPERATORS, call
from tests.golden.disagreements.tables import Row, checked, shown

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "where-systems-disagree.md"


def test_the_page_is_what_is_computed() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.golden.disagreements > the page"


def test_titles_are_distinct() -> None:
    titles = [section.title for sections in CHAPTERS.values() for section in sections]
    assert len(titles) == len(set(titles))


def test_every_convention_of_the_page_is_in_the_table_of_its_system() -> None:
    text = by_system(CHAPTERS)
    for section in (section for sections in CHAPTERS.values() for section in sections):
        for row in section.rows:
            for name in row.systems.split():
                system, _, convention = name.partition(".")
                table = text.partition(f"### {heading(system)}\n")[2].partition("\n### ")[0]
                call = f"`{row.option}`" if row.option else row.instead
                lines = [line for line in table.splitlines() if f"`{convention}`" in line]
                assert any(line.endswith(f" {call.replace('|', chr(92) + '|')} |") for line in lines), name


def test_the_contents_have_every_section() -> None:
    text = contents(CHAPTERS)
    for section in (section for sections in CHAPTERS.values() for section in sections):
        assert f"[{section.title}](#{anchor(section.title)})" in text


def test_a_system_without_a_name_is_an_error() -> None:
    with pytest.raises(AssertionError, match="'other' is no system of verl"):
        by_system({"Advantages": (replace(DEVIATION, rows=(Row("other.grpo", "group_norm()"),)),)})


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (Row("verl.grpo_std", "group_norm()"), "gives"),
        (Row("verl.grpo_std trl.grpo_scale_group", "group_norm(unbiased=True)"), "do not agree"),
        (Row("verl.grpo_std"), "needs an option"),
        (Row("verl.grpo_std", instead="none", stated=(1.5, 1.5)), "beyond"),
    ],
)
def test_a_line_that_is_not_true_is_an_error(row: Row, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        checked(replace(DEVIATION, rows=(row,)))


def test_saying_that_no_call_of_ours_does_what_the_default_does_is_an_error() -> None:
    row = Row("verl.grpo_std", instead="none")
    with pytest.raises(AssertionError, match="by default"):
        checked(replace(DEVIATION, rows=(row,), default="group_norm(unbiased=True)"))


def test_our_operators_give_a_group_of_one_nothing() -> None:
    assert [call(f"{name}()", LONELY).item() for name in OPERATORS] == [0.0] * len(OPERATORS)


def test_a_convention_without_vectors_is_an_error() -> None:
    with pytest.raises((LookupError, FileNotFoundError)):
        checked(replace(DEVIATION, rows=(Row("trl.grpo_scale_other", "group_norm()"),)))


def test_numbers_as_shown() -> None:
    assert shown([1.0, -0.00075, 1.7272742e9, float("nan"), float("-inf"), -0.0]) == "1, −0.00075, 1.727e9, NaN, −∞, 0"
