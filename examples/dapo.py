"""DAPO (arXiv 2503.14476): dynamic sampling, clip-higher, a punishment that grows with length, averaged over tokens."""

import flowrl as fr
from examples.tiny import MAX_TOKENS, make_task, tiny_model
from flowrl_operators import advantages, filters, losses, rewards


@fr.flow
def dapo(prompts, policy, *, group_size=8, pattern=None, soft=4096, hard=None, max_rounds=4):
    def attempt(p):
        return rewards.exact(fr.rollout(policy, p, n=group_size), pattern=pattern)

    rows = fr.refill(attempt, prompts, keep=filters.group_has_signal(), max_rounds=max_rounds)
    rows = rewards.overlong(rows, soft=soft, hard=hard)  # groups are judged without it
    return fr.update(policy, advantages.group_norm(rows), loss=losses.ppo_clip(0.2, high=0.28), average="token_mean")


def main(steps: int = 20, seed: int = 0, **options: object) -> fr.Run:
    """A few steps on a tiny model that knows nothing yet; `examples/demo.py` shows one that learns."""
    # one digit to repeat, and the first one counts: a model that knows nothing is right by chance
    train, _ = make_task(seed, num_train=8, num_heldout=2, digits=(1,))
    flow = dapo.graph(pattern=r"^\d", soft=3, hard=6)
    return fr.run_local(
        flow, steps=steps, seed=seed, batch=16, max_tokens=MAX_TOKENS, prompts=train, policy=tiny_model(seed), **options
    )


if __name__ == "__main__":
    main()
