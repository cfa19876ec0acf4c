"""A loss on plain tensors, without a graph, a table or a run: `fr.apply_loss`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowrl.engines.averages import Totals
from flowrl.graph.averages import Average
from flowrl.graph.losses import Loss

if TYPE_CHECKING:
    from torch import Tensor


def apply_loss(
    loss: Loss,
    columns: Mapping[str, Tensor | Sequence[Any]],
    mask: Tensor,
    *,
    average: str = "token_mean",
    average_length: int | None = None,
    average_rows: str | int = "trained",
    average_eps: float = 0.0,
    totals: Totals | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """A loss expression on padded tensors, as any PyTorch training loop has them.

    Example:
        loss, metrics = fr.apply_loss(
            losses.ppo_clip(0.2) + 1e-3 * losses.kl("k3"),
            {"logprobs": logprobs, "old_logprobs": old, "ref_logprobs": ref, "advantage": advantage},
            mask,
        )
        loss.backward()

    Args:
        columns: per token [B, T] (or [B, T, ...]), per row [B] (or a list of B, e.g. of pair ids), as the terms declare them:
            `advantage` is [B] and `advantages` [B, T]. Names are those the terms read; `logprobs`, `values`, `logits`, `entropy`
            and `scores` are the model's, with gradient. Further columns, for other losses, may be there.
        mask: [B, T], true (not 0) at the tokens that train. Nothing outside it is looked at: padding may hold anything.
        average, average_length, average_rows, average_eps: as in `fr.update`. `prompt_mean` takes the prompts of the rows from
            a column `prompt_id` (a list, or a tensor [B]).
        totals: counts of the whole optimizer step when this is one micro-batch, or one rank, of it: the sum of all parts is
            then the loss, whatever the split. None takes this batch as the whole. A term that must see the whole step
            (locality `"batch"`) cannot be computed from a part.

    Returns the scalar to minimise and the mean of each metric. The dtype is the tensors' own. 0 when no token trains.

    Errors: SchemaError for a missing column, one of a wrong shape, or one that is called nearly as a column that a term would
    read; ConfigError for an average that cannot be, or a part of a step where the whole is needed; OperatorError for a term
    that fails.
    """
    from flowrl.engines.padded import evaluate_padded  # torch is imported when a loss is computed, never before

    chosen = Average(average, average_length, average_rows, average_eps)
    return evaluate_padded(loss, columns, mask, chosen, totals)
