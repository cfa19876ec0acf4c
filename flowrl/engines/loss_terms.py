"""Evaluates a loss expression on packed tensors.

[Note: Two kinds of loss in one expression]
A term returns a number per trained token [T] or, declared per="sample", per row [N]. A sum keeps the two kinds apart until
each is weighed by its own weights; a product spreads the row's number over its tokens where the other factor is per token.
Weights come from counts over the whole optimizer step, so the sum over micro-batches is the loss whatever the split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from flowrl.engines.segments import Segments
from flowrl.errors import FlowError, OperatorError, SchemaError
from flowrl.graph.code import place_of
from flowrl.graph.losses import SEGMENTS, Loss, Product, Scale, Sum, Term, is_live
from flowrl.graph.operators import Read
from flowrl.schema.ragged import Ragged
from flowrl.schema.types import Granularity


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """What a loss is so far: a part per token [T], a part per row [N], or both."""

    token: Tensor | None = None
    sample: Tensor | None = None


@dataclass(slots=True, eq=False)
class Metrics:
    """What terms report beside the loss."""

    sums: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    """name -> (sum, count)."""
    owners: dict[str, Term] = field(default_factory=dict)

    def add(self, term: Term, metrics: Mapping[str, Any], num_tokens: int, num_rows: int) -> None:
        """Add what a term reports. Two terms with a metric of one name get the second one's marked with its name."""
        for name, values in metrics.items():
            owner = self.owners.setdefault(name, term)
            key = name if owner is term else f"{name}/{term.short_name}"
            if not isinstance(values, Tensor) or values.dim() != 1 or len(values) not in (num_tokens, num_rows):
                found = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
                raise OperatorError(
                    f"metric '{name}' of loss '{term.short_name}' must be a number per trained token [{num_tokens}] or per row "
                    f"[{num_rows}], so that its mean does not depend on micro-batches; found {found}"
                )
            self.sums[key] = (values.detach().double().sum(), len(values))

    def means(self) -> dict[str, float]:
        """The mean of each; 0 for one without numbers."""
        return {name: float(total) / max(count, 1) for name, (total, count) in self.sums.items()}


class Offer(Protocol):
    """What a term is evaluated on."""

    @property
    def live(self) -> Mapping[str, Tensor]:
        """Tensors that several terms share; none may be changed in place."""
        ...

    @property
    def segments(self) -> Segments: ...

    @property
    def num_tokens(self) -> int: ...

    def read(self, read: Read, term: Term) -> Any:
        """The value of one parameter of a term."""
        ...

    def log(self, term: Term, metrics: Mapping[str, Any]) -> None:
        """Take what a term reports."""
        ...


@dataclass(slots=True, eq=False)
class Scope:
    """What a micro-batch offers to loss terms. Shapes: T trained tokens of N rows."""

    live: Mapping[str, Tensor]
    """Live columns, with gradient."""
    columns: Mapping[str, np.ndarray | Ragged]
    """Stored columns of the whole job."""
    rows: np.ndarray
    """[N] int64: rows of the job in this micro-batch."""
    flat_T: np.ndarray
    """[T] int64: places of the trained tokens in a flat token column of the job."""
    token_offsets: np.ndarray
    """Row boundaries of token columns, which tell them from other lists."""
    segments: Segments
    device: torch.device
    logged: Metrics = field(default_factory=Metrics)

    def read(self, read: Read, term: Term) -> Any:
        """The value of one parameter of a term."""
        if is_live(read):
            return self.live[read.column]
        if read.column in self.columns:
            return self.stored(read.column, read)
        if read.broadcast and read.broadcast in self.columns:
            coarse = self.columns[read.broadcast]
            if isinstance(coarse, Ragged):
                return self.stored(read.broadcast, read)
            per_row = self._tensor(np.asarray(coarse)[self.rows], read.broadcast)
            return self.segments.spread(per_row)
        if read.live:
            return self.live[read.live].detach()
        if read.is_optional:
            return None
        raise SchemaError(
            f"loss '{term.short_name}' reads column '{read.column}', which the rows do not have; they have "
            f"{', '.join(sorted(self.columns)) or 'none'}"
        )

    def stored(self, name: str, read: Read) -> Any:
        """A stored column: [T, ...] for token columns, [N, ...] or a list of N for the others."""
        column = self.columns[name]
        if not isinstance(column, Ragged):
            values = np.asarray(column)[self.rows]
            return self._tensor(values, name) if values.dtype.kind in "biuf" else values.tolist()
        is_token = read.type.granularity is Granularity.TOKEN if read.type is not None else None
        same = np.array_equal(column.offsets, self.token_offsets)
        if is_token and not same:
            raise SchemaError(f"column '{name}' is per token, and its rows have other lengths than the responses")
        if is_token or (is_token is None and same):
            return self._tensor(column.values[self.flat_T], name)
        return [self._tensor(column[row], name) for row in self.rows]

    def _tensor(self, values: np.ndarray, name: str) -> Tensor:
        kind = values.dtype.kind
        if kind not in "biuf":
            raise SchemaError(f"column '{name}' holds {values.dtype} in lists; a loss can read numbers only")
        # 64-bit integers index anything; losses are computed in 32-bit floats
        wanted: Any = {"f": np.float32, "b": np.bool_}.get(kind, np.int64)
        return torch.from_numpy(np.ascontiguousarray(values.astype(wanted, copy=False))).to(self.device)

    @property
    def num_tokens(self) -> int:
        return len(self.flat_T)

    def log(self, term: Term, metrics: Mapping[str, Any]) -> None:
        self.logged.add(term, metrics, self.num_tokens, self.segments.num_rows)


def evaluate(loss: Loss, scope: Offer) -> Packed:
    """The loss per token and per row."""
    return EVALUATE[type(loss)](loss, scope)


def _term(term: Term, scope: Offer) -> Packed:
    function = term.resolve()
    given = {read.param: scope.read(read, term) for read in term.reads}
    if takes_segments(function):
        given[SEGMENTS] = scope.segments
    before = {
        name: value._version for name, value in scope.live.items()
    }  # stored columns are copies, each term its own
    try:
        answer = function(**given, **dict(term.config))
    except (Exception, SystemExit) as error:  # whatever a user's loss raises is reported with its place, and chained
        raise OperatorError(
            f"loss '{term.short_name}' ({place_of(function)}) failed: {type(error).__name__}: {error} "
            f"(its columns: {_shapes(given)}){_per_row_hint(error, given, term, scope)}"
        ) from error
    changed = [name for name, version in before.items() if scope.live[name]._version != version]
    if changed:
        raise OperatorError(
            f"loss '{term.short_name}' ({place_of(function)}) changes '{changed[0]}' in place, which all terms share: "
            "compute a new tensor"
        )
    metrics: Mapping[str, Any] = {}
    if isinstance(answer, tuple):
        if len(answer) != 2 or not isinstance(answer[1], Mapping):
            raise OperatorError(
                f"loss '{term.short_name}' ({place_of(function)}) returns the loss, or (loss, {{name: numbers to log}}); found "
                f"{len(answer)} values"
            )
        answer, metrics = answer
    num_tokens, num_rows = scope.num_tokens, scope.segments.num_rows
    expected = num_tokens if term.per == "token" else num_rows
    if not isinstance(answer, Tensor) or answer.shape != (expected,) or answer.is_complex():
        found = f"{answer.dtype}, shape {tuple(answer.shape)}" if isinstance(answer, Tensor) else type(answer).__name__
        fix = "averaging is the update's business (average=)"
        if term.per == "token" and isinstance(answer, Tensor) and answer.shape == (num_rows,):
            fix = 'a loss that gives one number per row is declared @fr.loss(per="sample")'
        raise OperatorError(
            f"loss '{term.short_name}' must return one number per {'trained token' if term.per == 'token' else 'row'} "
            f"[{expected}]; found {found}; {fix}"
        )
    scope.log(term, metrics)
    return Packed(token=answer) if term.per == "token" else Packed(sample=answer)


def _per_row_hint(error: BaseException, given: Mapping[str, Any], term: Term, scope: Offer) -> str:
    """What to write when a term per token reads a column that has one number per row, and the shapes do not fit."""
    rows = (scope.segments.num_rows,)
    if isinstance(error, FlowError) or term.per != "token" or scope.segments.num_rows == scope.num_tokens:
        return ""  # it says itself what is wrong; all shapes fit
    coarse = [
        read
        for read in term.reads
        if not is_live(read)
        and (read.type is None or read.type.granularity is not Granularity.TOKEN)
        and isinstance(given[read.param], Tensor)
        and given[read.param].shape == rows
    ]
    if not coarse:
        return ""
    read = coarse[0]
    return (
        f"; '{read.column}' has one number per row: to have it at every token, declare "
        f'{read.param}s: fr.TOKEN.f32.or_broadcast("{read.column}")'
    )


def _shapes(given: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {list(value.shape) if isinstance(value, Tensor) else type(value).__name__}"
        for name, value in given.items()
    )


def takes_segments(function: Callable[..., Any]) -> bool:
    """Whether a loss function has a parameter named `segments`."""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    return SEGMENTS in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _sum(loss: Sum, scope: Offer) -> Packed:
    parts = [evaluate(part, scope) for part in loss.parts]
    return Packed(_total([p.token for p in parts]), _total([p.sample for p in parts]))


def _total(parts: list[Tensor | None]) -> Tensor | None:
    found = [part for part in parts if part is not None]
    return None if not found else torch.stack(found).sum(0) if len(found) > 1 else found[0]


def _scale(loss: Scale, scope: Offer) -> Packed:
    part = evaluate(loss.part, scope)
    return Packed(
        None if part.token is None else loss.factor * part.token,
        None if part.sample is None else loss.factor * part.sample,
    )


def _product(loss: Product, scope: Offer) -> Packed:
    left, right = evaluate(loss.left, scope), evaluate(loss.right, scope)
    spread = scope.segments.spread
    tokens: list[Tensor | None] = []
    if left.token is not None and right.token is not None:
        tokens.append(left.token * right.token)
    if left.token is not None and right.sample is not None:
        tokens.append(left.token * spread(right.sample))
    if left.sample is not None and right.token is not None:
        tokens.append(spread(left.sample) * right.token)
    both = left.sample is not None and right.sample is not None
    return Packed(_total(tokens), left.sample * right.sample if both else None)  # type: ignore[operator]


EVALUATE: dict[type[Loss], Callable[..., Packed]] = {Term: _term, Sum: _sum, Scale: _scale, Product: _product}
"""Exact type of loss to its evaluation."""
