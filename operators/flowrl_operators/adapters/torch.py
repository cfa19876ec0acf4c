"""Operators in a plain PyTorch loop: tensors in, tensors out. For losses there is `fr.apply_loss`.

advantage = apply(advantages.group_norm, {"reward": rewards, "prompt_id": uids})          # [B]
advantages = apply(advantages.gae, {"token_rewards": r, "values": v}, mask=mask)          # [B, T]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

import flowrl as fr
from flowrl.errors import SchemaError
from flowrl.graph.operators import OperatorCall
from flowrl_operators.adapters import _calls, arrays, padded

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["apply"]


def apply(
    operator: fr.Operator | OperatorCall,
    columns: Mapping[str, Any],
    mask: Tensor | None = None,
    *,
    state: fr.State | None = None,
    **config: Any,
) -> Any:
    """What an operator writes, as tensors: one, or a dict by column. No gradient flows through an operator.

    Args:
        columns: by the names the operator reads: [B] for a value per row (or a list of text), [B, T] for a value per token.
        mask: [B, T], not 0 at the tokens that train; needed for values per token. Rows end at their last such token and
            holes inside them stay holes. It is the column `loss_mask`, and `response_mask` where there is none.
        state: of an operator that remembers between calls.
        config: of the operator, unless it is bound already.

    Errors: SchemaError for a matrix where a value per row is read, the other way round, and for shapes that are not the mask's.

    Returns [B] for columns per row, [B, T] with 0 outside the mask for columns per token, in the dtype and on the device of the
    first floating-point column (else of the mask, in float32).
    """
    import torch

    call = arrays.bound(operator, config)
    given = {name: _calls.numpy_of(values) for name, values in columns.items()}
    lengths = inside = None
    if mask is not None:
        inside = _calls.numpy_of(mask) != 0
        lengths = padded.lengths_of(inside)
        given = {name: _rows(name, values, inside, lengths) for name, values in given.items()}
        rows = padded.cut(inside, lengths)
        given.setdefault("loss_mask", rows)
        given.setdefault("response_mask", fr.Ragged.like(np.ones(len(rows.values), bool), rows))
        given.setdefault("response_ids", fr.Ragged.like(np.zeros(len(rows.values), np.int32), rows))
    like = next((c for c in columns.values() if _is_float(c)), None)
    device = like.device if like is not None else mask.device if mask is not None else "cpu"
    dtype = like.dtype if like is not None else torch.float32

    def back(values: Any) -> Any:
        if isinstance(values, fr.Ragged):
            if lengths is None or inside is None:
                return values
            # one list per token (the teacher's k likeliest) keeps its inner length
            whole = padded.matrix(values, width=inside.shape[1])
            whole[~inside] = 0
            values = whole
        values = np.asarray(values)
        if values.dtype.kind not in "fbiu":
            return values
        return torch.as_tensor(values, device=device, dtype=dtype if values.dtype.kind == "f" else None)

    _refuse_matrices(call, given)
    answer = arrays.apply(call, given, state=state)
    if isinstance(answer, fr.Keep):
        return fr.Keep(back(answer.mask), {name: back(values) for name, values in answer.columns.items()})
    return {n: back(v) for n, v in answer.items()} if isinstance(answer, Mapping) else back(answer)


def _refuse_matrices(call: OperatorCall, given: Mapping[str, Any]) -> None:
    """Errors: SchemaError for values per token where an operator reads one number per row."""
    for read in call.reads:
        values: Any = given.get(read.column)
        is_per_row = read.type is not None and not read.type.granularity.is_ragged and not read.type.inner
        if is_per_row and (isinstance(values, fr.Ragged) or getattr(values, "ndim", 1) > 1):
            found = "values per token" if isinstance(values, fr.Ragged) else f"shape {list(values.shape)}"
            raise SchemaError(
                f"'{call.short_name}' reads '{read.column}' as one value per row, [B]; found {found}. Reduce it first, e.g. "
                "(values * mask).sum(-1) for token rewards, or name it as the operator names its values per token"
            )
        if read.type is not None and read.type.granularity.is_ragged and isinstance(values, np.ndarray):
            raise SchemaError(
                f"'{call.short_name}' reads '{read.column}' per token: give it as [B, T], with mask=; found shape "
                f"{list(values.shape)}"
            )


def _is_float(values: Any) -> bool:
    return hasattr(values, "is_floating_point") and bool(values.is_floating_point())


def _rows(name: str, values: Any, inside: np.ndarray, lengths: np.ndarray) -> Any:
    if not isinstance(values, np.ndarray) or values.ndim < 2:
        return values
    if values.shape[:2] != inside.shape:
        raise SchemaError(f"'{name}' has shape {values.shape} and the mask {inside.shape}; both are [B, T]")
    return padded.cut(values, lengths)
