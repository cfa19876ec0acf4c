"""Losses that each break one property, and some that break none."""

import torch

import flowrl as fr

ADVANTAGES = fr.TOKEN.f32.or_broadcast("advantage")
OLD = fr.TOKEN.f32.or_live("logprobs")


# ---------------------------------------------------------------------------------------------------- nothing wrong


@fr.loss
def clipped(logprobs, old_logprobs: OLD, advantages: ADVANTAGES, *, clip: float = 0.2):
    ratio = (logprobs - old_logprobs).clamp(-20, 20).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return loss, {"ratio": ratio}


@fr.loss(per="sample")
def whole(logprobs, advantage: fr.SAMPLE.f32, segments):
    return torch.where(segments.lengths > 0, -advantage * segments.mean(logprobs), 0.0)


@fr.loss
def from_logits(logits, response_ids: fr.TOKEN.i32):
    return torch.nn.functional.cross_entropy(logits, response_ids, reduction="none")


@fr.loss(per="sample", locality=fr.group("pair_id"))
def pairs(scores, chosen: fr.SAMPLE.bool, pair_id: fr.SAMPLE.str):
    index = {pair: i for i, pair in enumerate(dict.fromkeys(pair_id))}
    number = torch.as_tensor([index[pair] for pair in pair_id])
    sign = torch.where(chosen, 1.0, -1.0).to(scores.dtype)
    margin = scores.new_zeros(len(index)).index_add(0, number, sign * scores)
    return -torch.nn.functional.logsigmoid(margin)[number]


@fr.loss
def weighted(logprobs, old_logprobs: OLD, advantages: ADVANTAGES):
    with torch.no_grad():
        weight = (logprobs - old_logprobs).clamp(-5, 5).exp()
    return -(weight * advantages * logprobs)


@fr.loss(corrects=True, on_policy=False)
def correction(logprobs, rollout_logprobs):
    return (logprobs.detach() - rollout_logprobs).exp().clamp(max=2.0)


@fr.loss
def straight_through(logprobs, advantages: ADVANTAGES):
    return -advantages * (logprobs + (logprobs.round() - logprobs).detach())


# --------------------------------------------------------------------------------------------------- something wrong


@fr.loss
def averages_itself(logprobs):
    return -logprobs.mean()


@fr.loss
def scalar_metric(logprobs):
    return -logprobs, {"mean": logprobs.mean()}


@fr.loss
def needs_its_option(logprobs, baseline: fr.TOKEN.f32 = None):
    return -logprobs * baseline


@fr.loss
def knows_its_fallback(logprobs, old_logprobs: OLD):
    return (logprobs - old_logprobs) * (2.0 if torch.equal(logprobs, old_logprobs) else 1.0) + (
        logprobs.sum() * 0 + (1.0 if logprobs.grad_fn is not None and old_logprobs._base is None else 0.0) * count()
    )


def count():
    count.calls += 1
    return count.calls * 1e-3


count.calls = 0


@fr.loss(per="sample")
def in_place(scores, advantage: fr.SAMPLE.f32):
    advantage -= 1.0
    return -advantage * scores


@fr.loss
def dropout(logprobs):
    return -torch.nn.functional.dropout(logprobs, 0.5)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return 2.0 * grad


@fr.loss
def wrong_backward(logprobs):
    return -_Doubled.apply(logprobs)


@fr.loss
def cut_off(logprobs, advantages: ADVANTAGES):
    return -advantages * logprobs.detach()


@fr.loss
def normalised(logprobs, advantages: ADVANTAGES):
    if len(advantages) > 1:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
    return -advantages * logprobs


@fr.loss(per="sample")
def knows_places(logprobs, segments):
    place = torch.arange(segments.num_rows, dtype=logprobs.dtype)
    return place * segments.sum(logprobs)


@fr.loss(per="sample")
def over_all_rows(logprobs, advantage: fr.SAMPLE.f32, segments):
    return -(advantage - advantage.mean()) * segments.sum(logprobs)


@fr.loss
def unbounded(logprobs, old_logprobs: OLD):
    return (3 * (logprobs - old_logprobs)).exp()


@fr.loss
def finite_but_steep(logprobs, old_logprobs: OLD):
    # the value is bounded, its gradient is inf * 0
    return torch.where(logprobs - old_logprobs > 20, 1.0, (4 * (logprobs - old_logprobs)).exp())


@fr.loss
def of_no_token(logprobs):
    return -logprobs * (logprobs.max() * 0 + 1)


@fr.loss
def doubles(logprobs):
    return -logprobs.double()


@fr.loss
def waits(logprobs):
    return -logprobs if logprobs.sum() < 0 else -2 * logprobs


@fr.loss
def to_the_host(logprobs, advantages: ADVANTAGES):
    scale = max(advantages.tolist(), default=0.0) * 0 + 1.0
    return -logprobs * scale


def made_here():
    @fr.loss
    def hidden(logprobs):
        return -logprobs

    return hidden


@fr.loss
def twice(logprobs):
    return -logprobs


first_twice = twice


@fr.loss
def twice(logprobs):  # type: ignore[no-redef]
    return -2 * logprobs


BROKEN = [
    ("columns", averages_itself, "must return one number per trained token"),
    ("columns", scalar_metric, "metric 'mean' of loss 'scalar_metric' must be a number per trained token"),
    ("columns", needs_its_option, "TypeError"),
    ("columns", knows_its_fallback, "differs when 'old_logprobs' is the live 'logprobs' without gradient"),
    ("inputs", in_place, "changes its input 'advantage' in place"),
    ("repeatable", dropout, "differs when it is computed again"),
    ("gradients", wrong_backward, "its gradient for 'logprobs' is not the derivative of its value\n"),
    ("gradients", cut_off, "give the reason: stop_gradient='...'"),
    ("gradients", weighted, "give the reason: stop_gradient='...'"),
    ("micro_batches", normalised, "depends on the split into micro-batches: rows [[0], [1]]"),
    ("order", knows_places, "depends on the order of rows"),
    ("leaks", over_all_rows, "depends on 'advantage' in rows without a token that trains (filled with nan there)"),
    ("extremes", unbounded, "is not finite at log-ratios of +-30"),
    ("extremes", finite_but_steep, "its gradient for 'logprobs' is not finite at log-ratios of +-30"),
    ("empty", of_no_token, "max()"),
    ("dtypes", doubles, "changes the dtype"),
    ("device", waits, "waits for the device (Tensor.__bool__)"),
    ("device", to_the_host, "waits for the device (Tensor.tolist)"),
    ("pickles", made_here(), "define it at the top of a module"),
    ("text", made_here(), "cannot be imported from a text form"),
    ("text", first_twice, "finds something else than this loss"),
]
"""(property, loss that breaks it, part of what is said)."""
