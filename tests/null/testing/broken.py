"""Operators that each break one property, and some that break none. The key of BROKEN is `property: why`."""

import random
from typing import Any

import numpy as np

import flowrl as fr

GROUP = fr.group("prompt_id")
ADVANTAGE = {"advantage": fr.SAMPLE.f32}
TOKENS = {"advantages": fr.TOKEN.f32}


# ---------------------------------------------------------------------------------------------------- nothing wrong


@fr.operator(writes=ADVANTAGE, locality=GROUP)
def centred(reward: fr.SAMPLE.f32, *, scale: float = 1.0):
    known = np.isfinite(reward)
    mean = reward[known].mean() if known.any() else 0.0
    return np.where(known, scale * (np.where(known, reward, 0.0) - mean), 0.0)


@fr.operator(writes=ADVANTAGE, locality=GROUP, many_groups=True)
def centred_at_once(reward: fr.SAMPLE.f32, prompt_id: fr.PROMPT.str):
    answer = np.zeros(len(reward))
    for key in set(prompt_id):
        rows = np.flatnonzero(prompt_id == key)
        known = rows[np.isfinite(reward[rows])]
        answer[known] = reward[known] - (reward[known].mean() if len(known) else 0.0)
    return answer


@fr.operator(writes=TOKENS)
def masked_sum(token_rewards: fr.TOKEN.f32, loss_mask: fr.TOKEN.bool):
    inside = np.where(loss_mask.values, token_rewards.values, 0.0)
    kept = np.where(np.isfinite(inside), inside, 0.0)
    return fr.Ragged.like(loss_mask.spread(fr.Ragged.like(kept, loss_mask).sum()), loss_mask)


@fr.operator(writes=ADVANTAGE, locality="stateful")
def against_running_mean(reward: fr.SAMPLE.f32, *, decay: float = 0.9, state: fr.State):
    known = reward[np.isfinite(reward)]
    mean = state.setdefault("mean", np.zeros(1))
    if len(known):
        state["mean"] = decay * mean + (1 - decay) * known.mean()
        state["steps"] = [*state.get("steps", []), len(known)]
    return np.where(np.isfinite(reward), reward - mean, 0.0)


@fr.operator(filter=True)
def not_long(response_ids: fr.TOKEN.i32, *, most: int = 4):
    return response_ids.lengths <= most


@fr.operator(writes={"num_words": fr.SAMPLE.i32}, each_row=True)
def num_words(response, answer: fr.PROMPT.str = None):
    return len(response.split()) + (0 if answer is None else len(answer))


@fr.operator(writes={"pair_id": fr.SAMPLE.str}, filter=True, locality=GROUP, min_group=2)
def two_of_each(reward: fr.SAMPLE.f32, prompt_id: fr.PROMPT.str):
    mask = np.zeros(len(reward), bool)
    mask[np.argsort(-np.nan_to_num(reward, nan=-np.inf), kind="stable")[:2]] = True
    return fr.Keep(mask, {"pair_id": np.asarray(prompt_id, dtype=object)})


@fr.operator(
    writes=ADVANTAGE, cost=lambda *, num_rows, num_tokens, scale: scale * (1e-6 * num_rows + 1e-9 * num_tokens)
)
def costed(reward: fr.SAMPLE.f32, *, scale: float = 1.0):
    return reward


RIGHT = (
    costed, centred, centred_at_once, masked_sum, against_running_mean, not_long, num_words, two_of_each,
)  # fmt: skip


# --------------------------------------------------------------------------------------------------- something wrong


@fr.operator(writes={"advantage": fr.SAMPLE.f32, "baseline": fr.SAMPLE.f32})
def one_of_two(reward: fr.SAMPLE.f32):
    return {"advantage": reward}


@fr.operator(writes={"count": fr.SAMPLE.i32})
def text_for_numbers(reward: fr.SAMPLE.f32):
    return np.asarray(["many"] * len(reward), dtype=object)


@fr.operator(writes=ADVANTAGE)
def too_few(reward: fr.SAMPLE.f32):
    return reward[:1] if len(reward) > 2 else reward


@fr.operator(writes=TOKENS)
def other_lengths(advantages: fr.TOKEN.f32):
    return fr.Ragged.of([np.append(row, 0.0) for row in advantages], dtype=np.float32)


@fr.operator(writes=ADVANTAGE)
def needs_its_option(reward: fr.SAMPLE.f32, baseline: fr.SAMPLE.f32 = None):
    return reward - baseline.mean() * 0


@fr.operator(writes=ADVANTAGE)
def spreads_wrongly(advantages: fr.TOKEN.f32.or_broadcast("advantage"), response_ids: fr.TOKEN.i32):
    return advantages.sum() + (advantages.values.flags.owndata is False and len(advantages) > 1) * seen(advantages)


def seen(advantages):
    seen.count += 1
    return seen.count * 1e-2


seen.count = 0  # type: ignore[attr-defined]


@fr.operator(writes=ADVANTAGE, locality="batch")
def divides(reward: fr.SAMPLE.f32):
    with np.errstate(all="ignore"):
        return reward / np.float64(len(reward) - 1)


@fr.operator(writes=ADVANTAGE)
def in_place(reward: fr.SAMPLE.f32):
    if reward.flags.writeable:
        reward -= 1.0
        return reward
    return reward - 1.0


@fr.operator(writes=ADVANTAGE)
def in_place_plainly(reward: fr.SAMPLE.f32):
    reward -= 1.0
    return reward


@fr.operator(writes=ADVANTAGE)
def global_random(reward: fr.SAMPLE.f32):
    return reward + np.random.random(len(reward))


@fr.operator(writes=ADVANTAGE)
def python_random(reward: fr.SAMPLE.f32):
    return reward * random.random()


@fr.operator(writes=ADVANTAGE)
def no_row(reward: fr.SAMPLE.f32):
    return reward - reward.mean()


@fr.operator(writes=ADVANTAGE, locality=GROUP, many_groups=True)
def no_group(reward: fr.SAMPLE.f32, prompt_id: fr.PROMPT.str):
    return reward - reward.mean()


@fr.operator(writes=ADVANTAGE, locality=GROUP)
def first_is_baseline(reward: fr.SAMPLE.f32):
    return reward - reward[0]


@fr.operator(filter=True, locality="batch")
def first_half(reward: fr.SAMPLE.f32):
    return np.arange(len(reward)) < max(1, len(reward) // 2)


@fr.operator(writes=ADVANTAGE, locality="batch")
def greatest(reward: fr.SAMPLE.f32):
    return reward - reward.max()


@fr.operator(writes=ADVANTAGE, locality="batch")
def spread_of_one(reward: fr.SAMPLE.f32):
    return reward / (np.std(reward) if len(reward) != 1 else np.nan)


@fr.operator(writes=ADVANTAGE)
def mean_of_mask(token_rewards: fr.TOKEN.f32, loss_mask: fr.TOKEN.bool):
    with np.errstate(all="ignore"):
        inside = np.where(loss_mask.values, token_rewards.values, 0.0)
        total = fr.Ragged.like(inside, loss_mask).sum()
        count = loss_mask.sum()
        return np.where(count.sum() > 0, total / np.maximum(count, 1), total / count)


@fr.operator(writes=ADVANTAGE)
def first_token(values: fr.TOKEN.f32):
    return np.asarray([row[0] if len(values.values) else 0.0 for row in values])


@fr.operator(writes=ADVANTAGE)
def times_mask(values: fr.TOKEN.f32, loss_mask: fr.TOKEN.bool):
    return (values * loss_mask.astype(np.float32)).sum()


@fr.operator(writes=TOKENS)
def neighbours(values: fr.TOKEN.f32, loss_mask: fr.TOKEN.bool):
    """Reads the token after, which may be another row's or masked."""
    moved = np.append(values.values[1:], 0.0) if len(values.values) else values.values
    return fr.Ragged.like(np.where(loss_mask.values, np.nan_to_num(moved), 0.0), values)


@fr.operator(writes=ADVANTAGE, locality="batch")
def batch_mean(reward: fr.SAMPLE.f32):
    return reward - (reward.mean() if len(reward) else 0.0)


@fr.operator(writes=ADVANTAGE, locality=GROUP)
def group_mean(reward: fr.SAMPLE.f32):
    return reward - reward.mean()


@fr.operator(writes=ADVANTAGE, locality=GROUP, min_group=2)
def best_of_those_known(reward: fr.SAMPLE.f32):
    """Forgets that of a group nothing may be known."""
    known = np.isfinite(reward)
    return np.where(known, reward - reward[known].max(), 0.0)


@fr.operator(writes=ADVANTAGE, locality="batch")
def best_of_batch(reward: fr.SAMPLE.f32):
    """Forgets that of a step nothing may be known."""
    known = np.isfinite(reward)
    best = reward[known].max() if len(reward) > 1 else 0.0
    return np.where(known, np.where(known, reward, 0.0) - best, 0.0)


@fr.operator(writes=ADVANTAGE, locality=GROUP)
def fourth_is_baseline(reward: fr.SAMPLE.f32):
    return reward - reward[3]


@fr.operator(writes=ADVANTAGE, locality="stateful")
def poisoned_for_ever(reward: fr.SAMPLE.f32, *, state: fr.State):
    mean = state.setdefault("mean", 0.0)
    state["mean"] = 0.9 * mean + 0.1 * float(reward.mean() if len(reward) else 0.0)
    return np.where(np.isfinite(reward), reward, 0.0) - mean


@fr.operator(writes=ADVANTAGE, locality="stateful")
def keeps_outside(reward: fr.SAMPLE.f32, *, state: fr.State):
    calls = state.setdefault("calls", Counter())
    calls.count += 1
    return np.where(np.isfinite(reward), reward, 0.0) + calls.count


class Counter:
    count = 0


@fr.operator(writes=ADVANTAGE, locality="stateful")
def keys_are_numbers(reward: fr.SAMPLE.f32, *, state: fr.State):
    seen = state.setdefault("seen", {})
    seen[len(reward)] = seen.get(len(reward), 0) + 1
    return np.where(np.isfinite(reward), reward, 0.0) + seen[len(reward)]


@fr.operator(writes=ADVANTAGE, cost=lambda *, num_rows, num_tokens: 1.0 / (1 + num_rows))
def cheaper_by_the_dozen(reward: fr.SAMPLE.f32):
    return reward


@fr.operator(writes=ADVANTAGE, cost=lambda *, num_rows, num_tokens: -1.0)
def costs_nothing_and_less(reward: fr.SAMPLE.f32):
    return reward


def made_here() -> Any:
    @fr.operator(writes=ADVANTAGE)
    def hidden(reward: fr.SAMPLE.f32):
        return reward

    return hidden


@fr.operator(writes=ADVANTAGE)
def twice(reward: fr.SAMPLE.f32):
    return reward


first_twice = twice


@fr.operator(writes=ADVANTAGE)
def twice(reward: fr.SAMPLE.f32):  # type: ignore[no-redef]
    return 2 * reward


BROKEN: list[tuple[str, Any, str]] = [
    ("columns", one_of_two, "declares advantage, baseline and returned advantage"),
    ("columns", text_for_numbers, "it returned 'count' wrongly"),
    ("columns", too_few, "needs one value per row (3); found 1"),
    ("columns", other_lengths, "'advantages' has other lengths than its rows"),
    ("columns", needs_its_option, "'NoneType' object has no attribute 'mean'"),
    ("columns", spreads_wrongly, "differs when 'advantage' is spread over the tokens of 'advantages'"),
    ("columns", divides, "'advantage' is not finite although every input is"),
    ("inputs", in_place, "changes its input 'reward'"),
    ("inputs", in_place_plainly, "changes its input 'reward'"),
    ("columns", in_place_plainly, "columns are shared by all their readers and read-only"),
    ("repeatable", global_random, "'advantage' differs when it is computed again"),
    ("repeatable", python_random, "'advantage' differs when it is computed again"),
    ("chunks", no_row, "depends on which rows are given together: rows [[0], [1]]"),
    ("chunks", no_group, "depends on which rows are given together"),
    ("order", first_is_baseline, "depends on the order of rows"),
    ("order", first_half, "'is_kept' depends on the order of rows"),
    ("empty", greatest, "zero-size array to reduction operation maximum"),
    ("one_row", spread_of_one, "'advantage' is not finite for one row"),
    ("masked", mean_of_mask, "'advantage' is not finite when no token trains"),
    ("ragged", first_token, "index 0 is out of bounds"),
    ("leaks", times_mask, "depends on 'values' where 'loss_mask' is false (filled with nan there)"),
    ("leaks", neighbours, "depends on 'values' where 'loss_mask' is false"),
    ("poison", batch_mean, "is not finite in another row, because 'reward' of row"),
    ("poison", group_mean, "is not finite in another row, because 'reward' of row"),
    ("poison", best_of_those_known, "failed on the group prompt_id='p0' (2 rows): ValueError: zero-size array"),
    ("poison", best_of_batch, "failed on all rows: ValueError: zero-size array"),
    ("poison", poisoned_for_ever, "a step later"),
    ("state", keeps_outside, "its state holds a Counter"),
    ("state", keys_are_numbers, "after its state was saved by JSON"),
    ("cost", cheaper_by_the_dozen, "costs less for num_rows=1, num_tokens=0 than for num_rows=0, num_tokens=0"),
    ("cost", costs_nothing_and_less, "its cost is no number of seconds for num_rows=0, num_tokens=0"),
    ("pickles", made_here(), "define it at the top of a module"),
    ("text", made_here(), "cannot be imported from a text form"),
    ("text", first_twice, "finds something else than this operator"),
]
"""(property, operator that breaks it, part of what is said)."""
