"""Pairs of responses: which rows belong together, what a row is worth, where a pair's loss lies.

[Note: A pair's loss lies on both its rows]
A loss of pairs has one number per pair and returns one per row. Both rows of a pair get the pair's number, so that the mean
over rows is the mean over pairs whatever else is in the batch, in whatever order. The mean is over rows that have a trained
token: of a pair with an empty response (its score is 0) only the other row counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flowrl.errors import ConfigError, DataError
from flowrl_operators._options import required

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl_operators.losses._common import Output

REDUCTIONS = ("sum", "mean")
"""What a response is worth: the sum of its tokens' numbers, or their mean."""


def row_scores(per_token: Tensor, segments: Any, reduce: str) -> Tensor:
    """[T] to [N]: the sum or mean over each row's trained tokens; 0 for rows without. Half precision is summed in float32."""
    wide = per_token.float() if per_token.element_size() < 4 else per_token
    return segments.sum(wide) if reduce == "sum" else segments.mean(wide)


def find_pairs(pair_id: Sequence[str] | Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Row indices of the chosen and of the rejected responses, pair by pair."""
    import torch

    # `chosen` is brought to the host once: a pair that is none must be refused with its name, not be trained on
    winners: dict[str, int] = {}
    losers: dict[str, int] = {}
    keys = pair_id.tolist() if isinstance(pair_id, torch.Tensor) else pair_id  # no two tensors are one key
    for row, (pair, is_chosen) in enumerate(zip(keys, chosen.tolist(), strict=True)):
        side = winners if is_chosen else losers
        if pair in side:
            raise DataError(
                f"a preference loss needs one chosen and one rejected row per pair_id; pair {pair!r} has two "
                f"{'chosen' if is_chosen else 'rejected'} ones"
            )
        side[pair] = row
    torn = sorted(winners.keys() ^ losers.keys(), key=str)
    if torn:
        raise DataError(
            f"a preference loss needs one chosen and one rejected row per pair_id; {len(torn)} of "
            f"{len(winners.keys() | losers.keys())} pairs have one row, the first is {torn[0]!r}"
        )
    rows = [[winners[pair], losers[pair]] for pair in winners]
    both = torch.tensor(rows, dtype=torch.int64, device=chosen.device).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def at_both_rows(per_pair: Tensor, winners: Tensor, losers: Tensor) -> Tensor:
    """[P] to [N]: a pair's number at both its rows. See [Note: A pair's loss lies on both its rows]."""
    import torch

    return per_pair.repeat(2)[torch.cat([winners, losers]).argsort()]


def on_both_rows(loss: Tensor, rewards: tuple[Tensor, Tensor], winners: Tensor, losers: Tensor) -> Output:
    """A pair's loss [P] at both its rows [N], with the metrics that all losses of pairs report.

    `rewards` are those of the chosen and of the rejected responses, [P] each.
    """
    ours, theirs = (at_both_rows(side.detach(), winners, losers) for side in rewards)
    margin = ours - theirs
    metrics = {
        "preference_accuracy": (margin > 0).to(margin.dtype),
        "preference_margin": margin,
        "chosen_reward": ours,
        "rejected_reward": theirs,
    }
    return at_both_rows(loss, winners, losers), metrics


def check_pairs(name: str, *, beta: float = 1.0, reduce: str = "sum", label_smoothing: float = 0.0) -> None:
    """Refuse options that losses of pairs share and that make no sense. Errors: ConfigError."""
    required(f"{name} needs beta > 0", beta > 0, beta=beta)
    if reduce not in REDUCTIONS:
        raise ConfigError(
            f"{name}: a response's score is reduce='sum' or reduce='mean' over its tokens; found {reduce!r}"
        )
    required(
        f"{name}: label_smoothing is a chance, 0 <= label_smoothing < 1",
        0 <= label_smoothing < 1,
        label_smoothing=label_smoothing,
    )


def smoothed(lead: Tensor, label_smoothing: float) -> Tensor:
    """-log sigmoid(lead), or with a chance e that the pair is the wrong way round (1 - e) of it plus e of the swapped pair's."""
    from torch.nn.functional import logsigmoid

    loss = -logsigmoid(lead)
    return loss if not label_smoothing else (1 - label_smoothing) * loss - label_smoothing * logsigmoid(-lead)


def bounded_exponent(x: Tensor) -> Tensor:
    """x, held so that exp(x) times a few thousand is still finite in its dtype."""
    import torch

    return x.clamp(max=700.0 if x.dtype == torch.float64 else 80.0)
