"""GRPO on a tiny Llama, by hand: what a flow says in a few lines, written out top to bottom with no FlowRL in it.

    python examples/grpo_by_hand.py --seed 0

    prompts -> sample a group for each -> reward 0/1 -> advantage within the group -> one clipped step -> prompts ...

A short supervised warm-up on demonstrations, 40 % of them wrong, leaves a policy that sorts digits right about one time
in four. GRPO does the rest, from the reward alone, and prompts held out of training say so.

Left out on purpose, because a small run on one CPU does not need it:

- a reference model and a KL penalty: the task has one right answer, so there is nothing to drift away from;
- a second pass over a rollout: with one step per rollout the ratio is 1 when the step is taken, and the clip never
  binds. It stays, because it is the loss; `max |ratio - 1|` in the log shows that sampler and trainer agree;
- a value model and an entropy bonus: a modest learning rate, falling to 0, keeps the policy exploring while it matters;
- micro-batches, devices, checkpoints: everything fits, on one device, in two minutes.

Shape letters:  P prompts   G responses of one prompt   N = P * G   T tokens   V vocabulary
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from examples.tiny import MAX_TOKENS, CharTokenizer, Row, make_task, score, sft_examples, tiny_llama

TOKENIZER = CharTokenizer()


@dataclass(frozen=True)
class Rollout:
    """Sampled answers, prompt and response side by side: the prompt is padded on the left, the response on the right."""

    input_ids: Tensor  # [N, Tp + Tr]
    attention_mask: Tensor  # [N, Tp + Tr], 0 on padding
    response_ids: Tensor  # [N, Tr], padding after the end of the sequence
    response_mask: Tensor  # [N, Tr], true on sampled tokens, the end of the sequence included
    logprobs: Tensor  # [N, Tr], of the sampled tokens, at the moment of sampling

    def texts(self) -> list[str]:
        return [TOKENIZER.decode(ids) for ids in self.response_ids.tolist()]


def pad_left(sequences: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids and attention mask of sequences that all end in the last column."""
    width = max(len(sequence) for sequence in sequences)
    ids = [[TOKENIZER.pad_id] * (width - len(sequence)) + sequence for sequence in sequences]
    mask = [[0] * (width - len(sequence)) + [1] * len(sequence) for sequence in sequences]
    return torch.tensor(ids), torch.tensor(mask)


def positions(attention_mask: Tensor) -> Tensor:
    """Positions count real tokens only; without this, a prompt would mean another thing when it is padded."""
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


@torch.no_grad()
def sample(policy: LlamaForCausalLM, prompts: list[str], n: int, generator: torch.Generator | None) -> Rollout:
    """n answers to every prompt, at temperature 1; the most likely answer when there is no generator."""
    prompt_ids, mask = pad_left([TOKENIZER.encode(prompt, bos=True) for prompt in prompts])
    output = policy(input_ids=prompt_ids, attention_mask=mask, position_ids=positions(mask), use_cache=True)

    # A group shares its prompt, so the prompt runs once, and its keys and values are repeated.
    cache = output.past_key_values
    cache.batch_repeat_interleave(n)
    logits_NV = output.logits[:, -1].repeat_interleave(n, dim=0)
    prompt_ids, mask = prompt_ids.repeat_interleave(n, dim=0), mask.repeat_interleave(n, dim=0)

    alive_N = torch.ones(len(prompt_ids), dtype=torch.bool)
    ids, masks, logprobs = [], [], []
    while True:
        logprobs_NV = logits_NV.log_softmax(dim=-1)
        if generator is None:
            ids_N = logprobs_NV.argmax(dim=-1)
        else:
            ids_N = torch.multinomial(logprobs_NV.exp(), 1, generator=generator).squeeze(1)
        ids_N = ids_N.where(alive_N, TOKENIZER.pad_id)
        ids.append(ids_N)
        masks.append(alive_N)
        logprobs.append(logprobs_NV.gather(1, ids_N[:, None]).squeeze(1))
        mask = torch.cat([mask, alive_N[:, None].long()], dim=1)
        alive_N = alive_N & (ids_N != TOKENIZER.eos_id)
        if len(ids) == MAX_TOKENS or not alive_N.any():
            break
        logits_NV = policy(
            input_ids=ids_N[:, None],
            attention_mask=mask,
            position_ids=positions(mask)[:, -1:],
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]

    response_ids = torch.stack(ids, dim=1)
    return Rollout(
        input_ids=torch.cat([prompt_ids, response_ids], dim=1),
        attention_mask=mask,
        response_ids=response_ids,
        response_mask=torch.stack(masks, dim=1),
        logprobs=torch.stack(logprobs, dim=1),
    )


def response_logprobs(policy: LlamaForCausalLM, rollout: Rollout) -> Tensor:
    """[N, Tr] log-probs of the sampled tokens under the policy as it is now, with gradient."""
    num_tokens = rollout.response_ids.shape[1]
    logits_NTV = policy(
        input_ids=rollout.input_ids,
        attention_mask=rollout.attention_mask,
        position_ids=positions(rollout.attention_mask),
        logits_to_keep=num_tokens + 1,
    ).logits[:, :-1]  # the logits at one token are the prediction of the next
    return logits_NTV.log_softmax(dim=-1).gather(2, rollout.response_ids[:, :, None]).squeeze(2)


def group_norm(reward_N: Tensor, group_size: int) -> Tensor:
    """How much better an answer is than the others to the same prompt, in standard deviations of the group.

    A group that is all right or all wrong has advantage 0: it teaches nothing.
    """
    reward_PG = reward_N.view(-1, group_size)
    centred_PG = reward_PG - reward_PG.mean(dim=1, keepdim=True)
    return (centred_PG / (reward_PG.std(dim=1, keepdim=True) + 1e-6)).flatten()


def take_step(policy: LlamaForCausalLM, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


def warm_up(policy: LlamaForCausalLM, rows: list[Row], args: argparse.Namespace) -> None:
    """Imitate demonstrations for a moment, and stop long before the policy has learned the task."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.sft_lr, weight_decay=0.0)
    examples = sft_examples(rows, args.seed, num_examples=args.sft_steps * args.sft_batch)
    for step in range(args.sft_steps):
        batch = examples[step * args.sft_batch : (step + 1) * args.sft_batch]
        prompts = [TOKENIZER.encode(example["prompt"], bos=True) for example in batch]
        responses = [TOKENIZER.encode(example["response"], bos=False, eos=True) for example in batch]
        ids, mask = pad_left([prompt + response for prompt, response in zip(prompts, responses, strict=True)])
        targets = ids.clone()
        for target, response in zip(targets, responses, strict=True):
            target[: -len(response)] = -100  # cross_entropy skips -100: only the response is imitated
        logits = policy(input_ids=ids, attention_mask=mask, position_ids=positions(mask)).logits
        take_step(policy, optimizer, F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()))


def evaluate(policy: LlamaForCausalLM, rows: list[Row], seed: int | None) -> float:
    """Mean reward of one answer a prompt: sampled at temperature 1 from a seed, or the most likely one for None."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    rollout = sample(policy, [row["prompt"] for row in rows], 1, generator)
    return sum(score(text, row["answer"]) for text, row in zip(rollout.texts(), rows, strict=True)) / len(rows)


def main(argv: list[str] | None = None) -> float:
    """Runs the whole thing and returns the mean reward on held-out prompts at the end."""
    parser = argparse.ArgumentParser(description="GRPO on a tiny Llama that sorts digits, by hand")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=64, help="prompts a step")
    parser.add_argument("--group-size", type=int, default=8, help="answers a prompt")
    parser.add_argument("--lr", type=float, default=7e-4)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--sft-steps", type=int, default=60)
    parser.add_argument("--sft-batch", type=int, default=64)
    parser.add_argument("--sft-lr", type=float, default=2e-3)
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="more gain little on so small a model")
    args = parser.parse_args(argv)

    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(args.seed)
    order = random.Random(args.seed)
    train_rows, heldout_rows = make_task(args.seed)
    policy = tiny_llama(args.seed)

    start = time.perf_counter()
    warm_up(policy, train_rows, args)
    print(f"{sum(p.numel() for p in policy.parameters())} parameters, warm-up {time.perf_counter() - start:.1f} s")
    print(
        f"step   0  held-out {evaluate(policy, heldout_rows, 0):.3f}  greedy {evaluate(policy, heldout_rows, None):.3f}"
    )

    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.0)
    sample_s = train_s = 0.0
    for step in range(1, args.steps + 1):
        before = time.perf_counter()
        rows = order.sample(train_rows, args.prompts)
        rollout = sample(policy, [row["prompt"] for row in rows], args.group_size, generator)
        answers = [row["answer"] for row in rows for _ in range(args.group_size)]
        reward = torch.tensor([score(text, answer) for text, answer in zip(rollout.texts(), answers, strict=True)])
        between = time.perf_counter()

        advantage = group_norm(reward, args.group_size)[:, None]
        ratio = (response_logprobs(policy, rollout) - rollout.logprobs).exp()
        objective = torch.minimum(ratio * advantage, ratio.clamp(1 - args.clip, 1 + args.clip) * advantage)
        optimizer.param_groups[0]["lr"] = args.lr * (1 - (step - 1) / args.steps)
        take_step(policy, optimizer, -objective[rollout.response_mask].mean())  # the mean over all tokens of the step
        sample_s, train_s = sample_s + between - before, train_s + time.perf_counter() - between

        if step % args.eval_every == 0 or step == args.steps:
            sampled, greedy = evaluate(policy, heldout_rows, step), evaluate(policy, heldout_rows, None)
            off = (ratio - 1).abs()[rollout.response_mask].max().item()
            print(
                f"step {step:3d}  held-out {sampled:.3f}  greedy {greedy:.3f}  train {reward.mean():.3f}"
                f"  max |ratio - 1| {off:.0e}  sampling {sample_s:.0f} s, training {train_s:.0f} s",
                flush=True,
            )
    final = evaluate(policy, heldout_rows, 0)
    print(f"held-out reward {final:.3f} after {time.perf_counter() - start:.0f} s")
    return final


if __name__ == "__main__":
    main()
