"""Values against declared types of fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from flowrl.errors import ConfigError
from flowrl.schema.fields import check_fields, fits, shown


@dataclass(frozen=True)
class Inner:
    size: int = 1


@dataclass(frozen=True)
class Outer:
    count: int = 1
    part: float = 0.5
    name: str = "x"
    is_on: bool = False
    most: int | None = None
    kind: Literal["a", "b"] = "a"
    inner: Inner = Inner()
    sizes: tuple[int, ...] = ()
    pairs: tuple[tuple[str, float], ...] = ()


BAD: dict[str, list[Any]] = {
    "count": [None, 1.5, True, "1", 10**30, 10**5000, [1]],
    "part": [None, float("nan"), float("inf"), 1e300, 10**400, "0.5", False],
    "name": [None, 1, b"x", "\ud800"],
    "is_on": [0, 1, None, "yes"],
    "most": [1.5, "1", False],
    "kind": ["c", None, 1, ["a"]],
    "inner": [None, Outer, Inner, {"size": 1}],
    "sizes": [None, [1], 1, (1, "2"), (1.5,), "12"],
    "pairs": [(("a",),), (("a", "b"),), (["a", 1.0],), {"a": 1.0}],
}


CASES = [(name, value) for name, values in BAD.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)])
def test_a_field_of_another_type_is_named_with_what_it_needs(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^Outer needs .* for {name}; found "):
        check_fields(Outer(**{name: value}))


def test_declared_values_are_taken() -> None:
    check_fields(Outer(2, 1, "é", True, 3, "b", Inner(2), (1, 2), (("a", 1.0), ("b", 2))))


def test_only_named_fields_are_checked() -> None:
    check_fields(Outer(count="x", part=1.0), "part")  # type: ignore[arg-type]


def test_an_object_of_a_subclass_is_taken() -> None:
    class More(Inner):
        pass

    assert fits(Inner, More())


@pytest.mark.parametrize("value", [10**5000, [10**5000], "x" * 10**6], ids=["int", "list", "text"])
def test_what_is_shown_is_short(value: Any) -> None:
    assert len(shown(value)) <= 60
