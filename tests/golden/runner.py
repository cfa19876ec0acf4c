"""Runs our operators on golden files: which of them answers a piece and convention, how far off it is.

A file names a piece (`policy_loss`) and a convention (`verl.gspo_token-mean`). The module `tests.golden.pieces.<piece>` maps
conventions to our operators with their options:

    CONVENTIONS = {"trl.grpo": answer, ...}                       # exact names
    PATTERNS = [(r"verl\\.rs_(?P<level>\\w+?)_(?P<kind>k\\d)_.*", answer), ...]   # families; answer(case, match)

An answer takes the case and returns {output name: value, or Where(value, mask)}. Everything the file records must be
answered, apart from what the module lists in `UNANSWERED` (name of an output -> why not: logging figures, say).
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.errors import FlowError
from tests.golden.exclusions import EXCLUDED
from tests.golden.vectors import Case, read_file, to_array


@dataclass(frozen=True)
class Where:
    """A value that is ours to answer for at some positions only: where the mask is 1."""

    value: Any
    mask: Any


@dataclass(frozen=True)
class Contract:
    """Answers a case that our contract decides otherwise than the recorded system, on purpose: its guard fires where we give a
    defined result, say. `holds` is what we promise instead, checked by the one who answers."""

    promise: str
    holds: bool


@dataclass(frozen=True)
class Verdict:
    """How one case went."""

    piece: str
    convention: str
    case: str
    output_error: float = 0.0
    """Greatest relative error of the outputs, |a - b| / (|b| + atol / rtol); at most rtol passes."""
    gradient_error: float = 0.0
    rtol: float = 0.0
    reason: str = ""
    """Why it failed; for what passed by contract or is excluded, why."""
    state: str = "pass"
    """`pass`, `FAIL`, `contract` or `excluded`."""

    def __str__(self) -> str:
        name = f"{self.piece:22} {self.convention:44} {self.case:28}"
        figures = f"outputs {self.output_error:8.1e}  gradients {self.gradient_error:8.1e}  rtol {self.rtol:7.1e}"
        return f"{name} {figures}  {self.state}{f': {self.reason}' if self.reason else ''}"


def run_file(path: Path) -> Iterator[Verdict]:
    """Every case of a file."""
    piece, convention, cases = read_file(path)
    reason = EXCLUDED.get((piece, convention))
    if reason is not None:
        yield from (Verdict(piece, convention, case.name, reason=reason, state="excluded") for case in cases)
        return
    answer = find(piece, convention)
    for case in cases:
        if answer is None:
            why = f"no operator is mapped to {piece} / {convention}; add it to tests/golden/pieces/{piece}.py"
            yield Verdict(piece, convention, case.name, reason=why, state="FAIL")
        else:
            yield run_case(piece, convention, case, answer)


def find(piece: str, convention: str) -> Callable[[Case], Any] | None:
    """What answers a convention; None when nothing does."""
    module = module_of(piece)
    if module is None:
        return None
    exact = getattr(module, "CONVENTIONS", {}).get(convention)
    if exact is not None:
        return exact
    for pattern, answer in getattr(module, "PATTERNS", ()):
        found = re.fullmatch(pattern, convention)
        if found:
            return lambda case, answer=answer, found=found: answer(case, found)
    return None


def module_of(piece: str) -> Any:
    """The module that maps a piece's conventions; None where there is none."""
    name = f"tests.golden.pieces.{piece}"
    is_name = re.fullmatch(r"\w+", piece) is not None
    return importlib.import_module(name) if is_name and importlib.util.find_spec(name) else None


def run_case(piece: str, convention: str, case: Case, answer: Callable[[Case], Any]) -> Verdict:
    """Compare our answer with the recorded one."""
    try:
        ours = answer(case)
    except FlowError as error:
        if "raises" in case.outputs:
            return Verdict(piece, convention, case.name, rtol=case.rtol, reason=f"both refuse: {error}")
        return _failed(piece, convention, case, f"{type(error).__name__}: {error}")
    except Exception as error:  # whatever an operator raises fails the case and not the others
        return _failed(piece, convention, case, f"{type(error).__name__}: {error}")
    if isinstance(ours, Contract):
        state = "contract" if ours.holds else "FAIL"
        return Verdict(piece, convention, case.name, rtol=case.rtol, reason=ours.promise, state=state)
    if "raises" in case.outputs:
        return _failed(piece, convention, case, f"recorded is {case.outputs['raises']}; ours answers")
    return _compared(piece, convention, case, ours)


def _compared(piece: str, convention: str, case: Case, ours: Mapping[str, Any]) -> Verdict:
    unanswered = getattr(module_of(piece), "UNANSWERED", {})
    errors = {"output": 0.0, "gradient": 0.0}
    wrong = [name for name in case.outputs if name not in ours and name not in unanswered]
    reasons = [f"no answer for {', '.join(wrong)}"] if wrong else []
    unknown = [name for name in ours if name not in case.outputs]
    if unknown:
        reasons.append(f"not recorded: {', '.join(unknown)}")
    for name, value in ours.items():
        if name not in case.outputs:
            continue
        error, why = distance(value, case.outputs[name], case.rtol, case.atol)
        kind = "gradient" if name.startswith("grad") else "output"
        errors[kind] = max(errors[kind], error)
        if why:
            reasons.append(f"{name}: {why}")
    state = "FAIL" if reasons else "pass"
    return Verdict(
        piece, convention, case.name, errors["output"], errors["gradient"], case.rtol, "; ".join(reasons), state
    )


def distance(ours: Any, recorded: Any, rtol: float, atol: float) -> tuple[float, str]:
    """(greatest relative error, why it is too great or empty). NaN equals NaN; text and None are compared as they are."""
    where = None
    if isinstance(ours, Where):
        ours, where = ours.value, np.asarray(ours.mask, bool)
    if _is_text(recorded) or _is_text(ours):
        return (
            (0.0, "") if _plain(ours) == _plain(recorded) else (np.inf, f"{_plain(ours)!r:.120} for {recorded!r:.120}")
        )
    a, b = np.asarray(_plain(ours), np.float64), to_array(recorded)
    if a.shape != b.shape:
        return np.inf, f"shape {a.shape} for {b.shape}"
    if where is not None:
        a, b = a[where], b[where]
    if not a.size:
        return 0.0, ""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.where(same, 0.0, np.abs(a - b))
        bound = atol + rtol * np.abs(b)
        is_wrong = ~same & ~(gap <= bound)
        floor = np.abs(b) + (atol / rtol if rtol else 0.0)
        relative = np.where(gap == 0, 0.0, gap / np.where(floor > 0, floor, 1.0))
    worst = float(np.nanmax(relative, initial=0.0)) if not np.isnan(relative).all() else np.inf
    if not is_wrong.any():
        return worst, ""
    at = tuple(int(i) for i in np.argwhere(is_wrong)[0]) if is_wrong.ndim else ()
    return max(
        worst, np.inf if np.isnan(gap[at]) else worst
    ), f"{a[at]:.9g} for {b[at]:.9g} at {list(at)} of {list(a.shape)}"


def _plain(value: Any) -> Any:
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return value.tolist() if isinstance(value, np.ndarray) else value


def _is_text(value: Any) -> bool:
    """Whether it holds text or None anywhere; "nan", "inf" and "-inf" are numbers."""
    if isinstance(value, list | tuple):
        return any(_is_text(item) for item in value)
    if isinstance(value, dict):
        return True
    return value is None or (isinstance(value, str) and value not in ("nan", "inf", "-inf"))


def _failed(piece: str, convention: str, case: Case, reason: str) -> Verdict:
    return Verdict(piece, convention, case.name, np.inf, np.inf, case.rtol, reason, "FAIL")
