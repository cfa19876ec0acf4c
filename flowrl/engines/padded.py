"""Evaluates a loss on padded tensors; `flowrl.engines.plain` is its front."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowrl.engines.averages import Totals, weights
from flowrl.engines.loss_terms import Metrics, evaluate
from flowrl.engines.segments import Segments
from flowrl.errors import ConfigError, SchemaError
from flowrl.graph.averages import Average
from flowrl.graph.losses import Loss, Term, is_live, refuse_lone_weights
from flowrl.graph.operators import Read
from flowrl.schema.standard import LIVE, STANDARD
from flowrl.schema.types import ColumnType, Granularity

Values = Tensor | Sequence[Any]


@dataclass(slots=True, eq=False)
class PlainScope:
    """What tensors of one batch offer to loss terms. Shapes: B rows, T columns, [n] tokens of the mask."""

    columns: Mapping[str, Values]
    mask: Tensor
    """[B, T] bool: the tokens that train."""
    segments: Segments
    logged: Metrics = field(default_factory=Metrics)

    @property
    def num_tokens(self) -> int:
        return len(self.segments.row_index)

    @property
    def live(self) -> dict[str, Tensor]:
        return {}  # every read makes a tensor of its own, so nothing can be changed for others

    def read(self, read: Read, term: Term) -> Any:
        """The value of one parameter of a term."""
        own = _key(read)
        if own in self.columns:
            return self._packed(own, read)
        if read.broadcast and read.broadcast in self.columns:
            return self.segments.spread(self._per_row(read.broadcast, instead=own))
        if read.live and read.live in self.columns:
            return self._packed(read.live, read).detach()
        if read.is_optional:
            return None
        what = "what the model computes" if is_live(read) else "a stored column"
        raise SchemaError(
            f"loss '{term.short_name}' reads '{own}' ({what}), which was not given; given are "
            f"{', '.join(sorted(self.columns)) or 'no columns'}"
        )

    def _packed(self, name: str, read: Read) -> Any:
        """[n, ...] of a column per token, [B, ...] or a list of one per row; whichever it is where its type is not declared."""
        values, kind = self.columns[name], read.type
        if not isinstance(values, Tensor):
            if len(values) != len(self.mask):
                raise SchemaError(f"column '{name}' has {len(values)} values for {len(self.mask)} rows")
            if kind is not None and kind.granularity is Granularity.TOKEN:
                raise SchemaError(
                    f"column '{name}' is per token, {self._per_token(kind)}; found {type(values).__name__}"
                )
            return list(values)
        is_token, is_row = values.shape[:2] == self.mask.shape, values.shape[:1] == self.mask.shape[:1]
        if kind is None:
            is_row = is_row and values.dim() == 1
        else:
            per_token, inner = kind.granularity is Granularity.TOKEN, len(kind.inner)
            is_token = is_token and per_token and values.dim() == 2 + inner
            is_row = is_row and not per_token and values.dim() == 1 + inner
        if is_token:
            return values[self.mask]
        if is_row:
            return values
        rows = f"[{len(self.mask)}]"
        if kind is None:
            wanted = f"{list(self.mask.shape)} (and inner dimensions) per token, or {rows} per row"
        elif kind.granularity is Granularity.TOKEN:
            wanted = f"{self._per_token(kind)}, a value at each token"
        else:
            wanted = f"{_dims(len(self.mask), *kind.inner)}, a value per row"
        raise SchemaError(
            f"column '{name}' has shape {list(values.shape)}; with a mask of shape {list(self.mask.shape)} it is {wanted}"
        )

    def _per_row(self, name: str, *, instead: str) -> Tensor:
        """[B] of a column that is spread over tokens in place of another one."""
        values = self.columns[name]
        if isinstance(values, Tensor) and values.shape == self.mask.shape[:1]:
            return values
        found = f"shape {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise SchemaError(
            f"column '{name}' is one number per row, a tensor [{len(self.mask)}]; found {found}; a number at each token, "
            f"{list(self.mask.shape)}, goes by the name '{instead}'"
        )

    def _per_token(self, kind: ColumnType) -> str:
        return f"a tensor {_dims(*self.mask.shape, *kind.inner)}"

    def log(self, term: Term, metrics: Mapping[str, Any]) -> None:
        self.logged.add(term, metrics, self.num_tokens, self.segments.num_rows)


def evaluate_padded(
    loss: Loss,
    columns: Mapping[str, Values],
    mask: Tensor,
    average: Average,
    totals: Totals | None,
) -> tuple[Tensor, dict[str, float]]:
    """See `flowrl.engines.plain.apply_loss`."""
    if not isinstance(loss, Loss):
        raise ConfigError(f"apply_loss needs a loss such as losses.ppo_clip(0.2); found {type(loss).__name__}")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        found = f"shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise SchemaError(f"the mask of apply_loss is a tensor [rows, tokens]; found {found}")
    refuse_lone_weights(loss)
    _refuse_misspelt(loss, columns)
    if mask.is_floating_point() and bool(mask.isnan().any()):
        raise SchemaError("the mask of apply_loss is 0 or not, at each token; found NaN")
    if totals is not None and not isinstance(totals, Totals):
        raise ConfigError(f"the totals of a step are fr.Totals(num_tokens, num_rows); found {type(totals).__name__}")
    chosen = mask != 0
    segments = Segments.of(chosen.nonzero()[:, 0], len(chosen))
    scope = PlainScope(columns, chosen, segments)
    counts = segments.lengths.cpu().numpy()
    if totals is not None and loss.needs_whole_batch() and totals.num_tokens != counts.sum():
        whole = ", ".join(repr(t.short_name) for t in loss.terms() if t.locality.kind == "batch")
        raise ConfigError(
            f"{whole} must see all tokens of an optimizer step ({totals.num_tokens}) at once; found {counts.sum()} of them; give "
            "the whole step without totals"
        )
    part = evaluate(loss, scope)
    token_weight, row_weight = weights(average, counts, totals=totals, prompts=_prompts(average, columns, len(mask)))
    total: Tensor | None = None
    for values, weight, is_token in ((part.token, token_weight, True), (part.sample, row_weight, False)):
        if values is not None:
            each = torch.as_tensor(weight, dtype=values.dtype, device=values.device)
            each = segments.spread(each) if is_token else each
            summed = (values * each)[each != 0].sum()
            total = summed if total is None else total + summed
    if total is None:
        raise ConfigError("every term of this loss is multiplied by 0, so there is nothing to compute")
    return total, scope.logged.means()


def _key(read: Read) -> str:
    """The name a column is given by: its own; or the parameter's, where a live column has its name (a critic's earlier
    `values`)."""
    return read.param if read.column in LIVE and not is_live(read) else read.column


def _dims(*sizes: int | str) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _refuse_misspelt(loss: Loss, columns: Mapping[str, Values]) -> None:
    """Errors: SchemaError for a column that no term reads and that is called nearly as one that a term does without.

    Names far from those, and standard ones, are for other losses.
    """
    reads = [read for term in loss.terms() for read in term.reads]
    read_names = {name for read in reads for name in (_key(read), read.broadcast, read.live)}
    absent = {_key(read) for read in reads if read.live or read.broadcast or read.is_optional} - columns.keys()
    for name in columns:
        if name in read_names or name in STANDARD or name in LIVE:
            continue
        near = difflib.get_close_matches(name, absent, n=1, cutoff=0.9)
        if near:
            raise SchemaError(
                f"no term of this loss reads the column '{name}', and '{near[0]}', which one reads where it is there, was not "
                f"given; did you mean '{near[0]}'?"
            )


def _prompts(average: Average, columns: Mapping[str, Values], num_rows: int) -> list[Any] | None:
    """The id of each row's prompt, where the average asks for it."""
    if not average.key:
        return None
    if average.key not in columns:
        raise SchemaError(f"average='{average.kind}' reads the column '{average.key}', which was not given")
    found = columns[average.key]
    listed = found.tolist() if isinstance(found, Tensor) else list(found)
    if len(listed) != num_rows:
        raise SchemaError(f"column '{average.key}' has {len(listed)} values for {num_rows} rows")
    return listed
