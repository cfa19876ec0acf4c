"""Workloads as people write them: lengths as text, a TOML file, and parts that together make a whole.

    fixed:1024                      every one has 1024 tokens
    lognormal:1024:0.6:4096         mean 1024, spread 0.6 of the logarithm, cut at 4096
    512*3,1024*1                    a histogram: three in four have 512 tokens

A file, in which a table of lengths may stand instead of such a text:

    prompts = 128
    group_size = 8                  # left out: as the rollout says
    prompt_tokens = "fixed:512"
    response_tokens = { tokens = [512, 1024, 4096], weights = [5, 3, 1] }
    rounds = 1.5                    # of a refill, on average
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.planner.workload import Lengths, Workload
from flowrl.schema.columns import nearest
from flowrl.schema.fields import is_int, is_number, shown
from flowrl.schema.files import read_toml

FORMS = "fixed:N, lognormal:MEAN:SIGMA:CAP, or a histogram N*WEIGHT,N*WEIGHT"
KEYS = ("prompts", "group_size", "prompt_tokens", "response_tokens", "rounds")


def parse_lengths(text: str, what: str, *, is_fixed: bool = False) -> Lengths:
    """Lengths from their text form.

    Args:
        what: they are of, for errors: `--response-tokens`.
        is_fixed: whether a bare number may stand for `fixed:N`. For responses it may not: it would be read as a mean, and what
            sampling takes is not decided by the mean.

    Errors: ConfigError with the forms there are.
    """
    kind, _, rest = text.strip().partition(":")
    try:
        if kind.isascii() and kind.isdecimal() and not rest:
            if is_fixed:
                return Lengths.fixed(int(kind))
            raise ConfigError(
                f"{what} takes a distribution, because a mean alone says little of sampling: fixed:{kind} if every response "
                f"has {kind} tokens (padded data, benchmarks), else lognormal:{kind}:0.6:{4 * int(kind)} (mean {kind}, spread "
                f"0.6, cut at {4 * int(kind)}), or a run folder or file with --workload"
            )
        if kind == "fixed":
            return Lengths.fixed(int(rest))
        if kind == "lognormal":
            mean, sigma, cap = rest.split(":")
            return Lengths.lognormal(float(mean), float(sigma), int(cap))
        if "*" in text:
            pairs = sorted((int(n), float(weight)) for n, weight in (one.split("*") for one in text.split(",")))
            return Lengths(tuple(n for n, _ in pairs), tuple(weight for _, weight in pairs))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise error if str(error).startswith(what) else ConfigError(f"{what} {text}: {error}") from error
        raise ConfigError(f"{what} is {FORMS}; found {shown(text)}") from error
    known = nearest(kind[:100], ("fixed", "lognormal"))
    raise ConfigError(f"{what} is {FORMS}; found {shown(text)}; {known}")


@dataclass(frozen=True, slots=True)
class Parts:
    """As much of a workload as was said in one place."""

    prompts: int | None = None
    prompt_lengths: Lengths | None = None
    response_lengths: Lengths | None = None
    group_size: int | None = None
    rounds: float | None = None

    @classmethod
    def of(cls, workload: Workload) -> Parts:
        return cls(*(getattr(workload, one.name) for one in fields(cls)))

    def over(self, base: Parts) -> Parts:
        """These laid over `base`: what is said here wins, the rest stays."""
        both = ((getattr(self, one.name), getattr(base, one.name)) for one in fields(self))
        return Parts(*(base_value if value is None else value for value, base_value in both))

    def whole(self) -> Workload:
        """The workload. Errors: ConfigError with everything that is missing, and where it can be said."""
        prompts, asked, answered = self.prompts, self.prompt_lengths, self.response_lengths
        if prompts is None or asked is None or answered is None:
            options = (
                ("--prompts N (of one iteration)", prompts),
                ("--prompt-tokens N or a distribution", asked),
                ("--response-tokens lognormal:MEAN:SIGMA:CAP (or fixed:N)", answered),
            )
            missing = [text for text, value in options if value is None]
            raise ConfigError(
                f"the workload: {', '.join(missing)}; or --workload with a FILE.toml or the folder of a run"
            )
        return Workload(prompts, asked, answered, self.group_size, 1.0 if self.rounds is None else self.rounds)


def read_parts(path: str | Path) -> Parts:
    """What a TOML file says of a workload, whole or in part.

    Errors: ConfigError for a file that cannot be read, a key that is not known and a value of another type.
    """
    found = read_toml(path, "the workload")
    for key in found:
        if key not in KEYS:
            raise ConfigError(f"{path}: a workload has no '{key}'; {nearest(key, KEYS)}")
    return Parts(
        prompts=_number(found, "prompts", path, int),
        prompt_lengths=_lengths(found, "prompt_tokens", path, is_fixed=True),
        response_lengths=_lengths(found, "response_tokens", path, is_fixed=False),
        group_size=_number(found, "group_size", path, int),
        rounds=_number(found, "rounds", path, float),
    )


def _number(found: dict[str, Any], key: str, path: str | Path, kind: type) -> Any:
    value = found.get(key)
    if value is None:
        return None
    if not (is_int(value) if kind is int else is_number(value)):
        raise ConfigError(f"{path}: '{key}' is a {'whole ' if kind is int else ''}number; found {shown(value)}")
    return kind(value)


def _lengths(found: dict[str, Any], key: str, path: str | Path, *, is_fixed: bool) -> Lengths | None:
    value = found.get(key)
    what = f"{path}: '{key}'"
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str):
        return parse_lengths(value, what, is_fixed=is_fixed)
    if isinstance(value, dict) and set(value) == {"tokens", "weights"}:
        try:
            tokens, weights = value["tokens"], value["weights"]
            if not isinstance(tokens, list) or not isinstance(weights, list):
                raise ConfigError(f"tokens and weights are lists; found {shown(tokens)} and {shown(weights)}")
            return Lengths(tuple(tokens), tuple(weights))
        except ConfigError as error:
            raise ConfigError(f"{what}: {error}") from error
    raise ConfigError(f"{what} is {FORMS}, or a table with tokens and weights; found {shown(value)}")
