"""Values typed in a file or on the command line."""

from typing import Any

import pytest

from flowrl.graph.schedule import Async, Schedule, Sync
from flowrl.model import AdamW, Model
from flowrl.recipe.typed import WrongType, convert, convert_text, differs, expected, fields_of, parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", 0.1),
        ("1e-3", 1e-3),
        ("8", 8),
        ("-8", -8),
        ("true", True),
        ("True", True),
        ("false", False),
        ("none", None),
        ("(1, 8)", (1, 8)),
        ("(1,8)", (1, 8)),
        ("[1, 'a']", [1, "a"]),
        ("'8'", "8"),
        ("token_mean", "token_mean"),
        ("a b", "a b"),
        ("org/name-7B", "org/name-7B"),
        ("__import__('os')", "__import__('os')"),
        ("", ""),
        ("(1,", "(1,"),
    ],
)
def test_values_are_literals_or_text(text: str, value: Any) -> None:
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("value", "kind", "result"),
    [
        (3, float, 3.0),
        (3, int, 3),
        ("none", str | None, None),
        ("none", int | None, None),
        ("none", str, "none"),
        ([0.9, 1], tuple[float, float], (0.9, 1.0)),
        (["a", "b"], tuple[str, ...], ("a", "b")),
        ([], tuple[str, ...], ()),
        ({"a": 1}, dict[str, Any], {"a": 1}),
        ("all", int | str, "all"),
        ("sync", Schedule, Sync()),
        ("async", Schedule, Async(1)),
        ("async(4)", Schedule, Async(4)),
    ],
)
def test_values_become_what_a_field_holds(value: Any, kind: Any, result: Any) -> None:
    found = convert(value, kind)
    assert found == result
    assert type(found) is type(result)


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        ("8", int, "a whole number"),
        (8.5, int, "a whole number"),
        (True, int, "a whole number"),
        (True, float, "a number"),
        ("1e-6", float, "a number"),
        (1, bool, "true or false"),
        (1, str, "a string"),
        ([0.9], tuple[float, float], "a list of 2 numbers"),
        (["a", 1], tuple[str, ...], "a list of strings"),
        ("a", tuple[str, ...], "a list of strings"),
        ("x", int | None, 'a whole number or "none"'),
        (3, dict[str, Any], "a table of keys and values"),
        ("later", Schedule, '"sync", "async" or "async(K)" with K the most versions of staleness'),
        (3, Schedule, '"sync", "async" or "async(K)" with K the most versions of staleness'),
    ],
)
def test_wrong_types_name_the_expected_one(value: Any, kind: Any, words: str) -> None:
    with pytest.raises(WrongType) as caught:
        convert(value, kind)
    assert str(caught.value) == words == expected(kind)


def test_text_for_a_field_of_strings_is_taken_as_it_is() -> None:
    assert convert_text("2024", str | None) == "2024"
    assert convert_text("none", str | None) is None
    assert convert_text("*", tuple[str, ...]) == ("*",)
    assert convert_text("rollout, length", tuple[str, ...]) == ("rollout", "length")
    assert convert_text("('a', 'b')", tuple[str, ...]) == ("a", "b")
    with pytest.raises(WrongType, match="a whole number"):
        convert_text("many", int)


@pytest.mark.parametrize("cls", [AdamW, Model])
def test_every_field_has_words_for_its_type(cls: type) -> None:
    for kind in fields_of(cls).values():
        assert expected(kind)


@pytest.mark.parametrize(
    ("value", "default", "words"),
    [
        (0.5, 8, ""),
        (8, 0.5, ""),
        ("8", 8, "a number"),
        (True, 8, "a number"),
        (1, True, "true or false"),
        (1, "k3", "a string"),
        ("k1", "k3", ""),
        (None, 8, ""),
        ("1", (1, 8), "a list"),
        ([1], (1, 8), ""),
        ("anything", None, ""),
    ],
)
def test_configuration_is_compared_with_its_default(value: Any, default: Any, words: str) -> None:
    assert differs(value, default) == words
