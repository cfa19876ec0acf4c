"""The exception tree. Each error says what was needed, what was found and what to do about it.

Every class is also the standard-library type a caller would expect, so `except ValueError` keeps working.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class FlowError(Exception):
    """Root of everything FlowRL raises on purpose."""


class SchemaError(FlowError, TypeError):
    """A column, dtype or granularity is not what a table or an operator needs."""


class TraceError(FlowError, TypeError):
    """A flow was written in a way that cannot become a graph."""


class TextError(FlowError, ValueError):
    """A text form does not parse."""


class PackError(FlowError, ImportError):
    """A pack cannot be found, imported, or shares its name with another one."""


class ConfigError(FlowError, ValueError):
    """An option is unknown, missing or has a value that makes no sense."""


class PlanError(FlowError, ValueError):
    """No plan fits; the message begins with `FR-P01` and says which memory is short and what would fit."""


class DataError(FlowError, ValueError):
    """A data set or a row is not what the flow needs."""


class OperatorError(FlowError, RuntimeError):
    """An operator raised, or returned something other than what it declares."""


class EngineError(FlowError, RuntimeError):
    """A sampler or trainer could not do what was asked."""


class StaleWeightsError(EngineError):
    """An engine was asked to work although its last weight update did not finish."""


class WaitTimeout(FlowError, TimeoutError):
    """A wait ended without the thing waited for; the message names it."""


class MissingExtra(FlowError, ImportError):
    """An optional package is needed; the message says which extra brings it."""


class StoreError(FlowError, OSError):
    """A table's memory or files cannot be made, grown, written or read back."""


class RunError(FlowError, RuntimeError):
    """A run cannot start, go on or be read back."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding of a check.

    Example:
        Problem(code="FR-C01", node="update", where="my_flow.py:14", source="return fr.update(...)",
                found="reads 'rollout_logprob', which nothing before it writes",
                fix="did you mean 'rollout_logprobs'?")
    """

    code: str
    """Stable code, e.g. `FR-C01`; `docs/reference/checks.md` explains each."""
    node: str
    """Name of the node the problem is reported at."""
    where: str
    """`file:line` where that node was written."""
    source: str
    """The source line there, stripped; empty when it cannot be read."""
    found: str
    """What was found, in one sentence."""
    fix: str
    """What to write instead."""

    def __str__(self) -> str:
        shown = f"\n    | {self.source}" if self.source else ""
        return f"{self.code} at {self.where}, node '{self.node}'{shown}\n    {self.found}\n    fix: {self.fix}"


class CheckError(FlowError, ValueError):
    """A graph has problems; `problems` lists all of them."""

    def __init__(self, name: str, problems: Sequence[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        count = len(self.problems)
        listed = "\n".join(str(problem) for problem in self.problems)
        super().__init__(f"flow '{name}' has {count} problem{'s' if count != 1 else ''}:\n{listed}")

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_check_error, (self.args[0], self.problems))


def _rebuild_check_error(text: str, problems: tuple[Problem, ...]) -> CheckError:
    error = CheckError.__new__(CheckError)
    error.problems = problems
    error.args = (text,)
    return error
