"""Evaluates a loss on padded tensors; `flowrl.engines.plain` is its front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.engines.averages import Totals, weights
from flowrl.engines.loss_terms import Metrics, evaluate
from flowrl.engines.segments import Segments
from flowrl.errors import ConfigError, SchemaError
from flowrl.graph.averages import Average
from flowrl.graph.losses import Loss, Term, is_live
from flowrl.graph.operators import Read
from flowrl.schema.standard import LIVE

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
        if read.column in LIVE and not is_live(read):
            # stored under the name of a live column (a critic's earlier `values`); here it goes by the parameter's name
            read = replace(read, column=read.param)
        if read.column in self.columns:
            return self._packed(read.column, read)
        if read.broadcast and read.broadcast in self.columns:
            return self.segments.spread(self._packed(read.broadcast, read))
        if read.live and read.live in self.columns:
            return self._packed(read.live, read).detach()
        if read.is_optional:
            return None
        what = "what the model computes" if is_live(read) else "a stored column"
        raise SchemaError(
            f"loss '{term.short_name}' reads '{read.column}' ({what}), which was not given; given are "
            f"{', '.join(sorted(self.columns)) or 'no columns'}"
        )

    def _packed(self, name: str, read: Read) -> Any:
        values = self.columns[name]
        if not isinstance(values, Tensor):
            if len(values) != len(self.mask):
                raise SchemaError(f"column '{name}' has {len(values)} values for {len(self.mask)} rows")
            return list(values)
        if values.shape[:2] == self.mask.shape:
            return values[self.mask]
        if values.shape == self.mask.shape[:1]:
            return values
        raise SchemaError(
            f"column '{name}' has shape {list(values.shape)}; with a mask of shape {list(self.mask.shape)} it is "
            f"{list(self.mask.shape)} (and inner dimensions) per token, or [{len(self.mask)}] per row"
        )

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
