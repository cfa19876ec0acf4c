"""A configuration value that its annotation does not allow is refused when it is given, not when it is used."""

from typing import Any

import pytest

import flowrl as fr
from flowrl.errors import ConfigError


@fr.operator(writes={"advantage": fr.SAMPLE.f32})
def scaled(
    reward: fr.SAMPLE.f32,
    *,
    eps: float = 1e-6,
    k: int = 1,
    unbiased: bool = False,
    kind: str = "group",
    clip: tuple[float, float | None] | None = None,
    names: tuple[str, ...] = (),
    parts: dict[str, float] | None = None,
    function: Any = None,
    odd: float = None,  # type: ignore[assignment]  # noqa: RUF013 what people write
    free=0.5,
):
    return reward


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"unbiased": "False"}, r"'scaled' takes True or False as unbiased; found 'False' \(str\)"),
        ({"unbiased": 1}, "True or False as unbiased; found 1"),
        ({"eps": "nan"}, r"a number as eps; found 'nan' \(str\)"),
        ({"eps": True}, "a number as eps; found True"),
        ({"eps": None}, "a number as eps; found None"),
        ({"eps": (1.0,)}, "a number as eps"),
        ({"k": 2.5}, "a whole number as k; found 2.5"),
        ({"kind": 3}, "text as kind; found 3"),
        ({"clip": 0.2}, r"a tuple \(a number, a number or None\) or None as clip; found 0.2"),
        ({"clip": (1.0,)}, "as clip"),
        ({"clip": (1.0, "x")}, "as clip"),
        ({"names": "ab"}, "a tuple, each text, as names"),
        ({"names": (1,)}, "as names"),
        ({"parts": (1.0,)}, "a mapping or None as parts"),
    ],
)
def test_what_does_not_fit_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scaled(**config)


@pytest.mark.parametrize(
    "config",
    [
        {"eps": 1, "k": 3, "unbiased": True, "kind": ""},
        {"clip": (0, None)},
        {"clip": None},
        {"clip": [0.1, 0.2]},
        {"names": ("a", "b")},
        {"parts": {"a": 1}},
        {"function": 5},
        {"function": len},
        {"odd": None},
        {"free": "anything"},
    ],
)
def test_what_fits_is_taken(config: dict[str, Any]) -> None:
    scaled(**config)


def test_a_loss_is_as_strict() -> None:
    @fr.loss
    def clipped(logprobs, *, clip: float = 0.2, drop: bool = False):
        return -logprobs

    with pytest.raises(ConfigError, match="'clipped' takes True or False as drop; found 'yes'"):
        clipped(drop="yes")
    with pytest.raises(ConfigError, match="'clipped' takes a number as clip; found '0.2'"):
        clipped("0.2")
