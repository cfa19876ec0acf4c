"""RLOO (arXiv 2402.14740): REINFORCE with the mean of the other answers to the same prompt as baseline."""

import flowrl as fr
from examples.tiny import MAX_TOKENS, make_task, tiny_model
from flowrl_operators import advantages, losses, rewards


@fr.flow
def rloo(prompts, policy, *, group_size=8):
    rows = fr.rollout(policy, prompts, n=group_size)
    rows = advantages.rloo(rewards.exact(rows))
    return fr.update(policy, rows, loss=losses.reinforce())


def main(steps: int = 20, seed: int = 0, **options: object) -> fr.Run:
    """A few steps on a tiny model that knows nothing yet; `examples/demo.py` shows one that learns."""
    train, _ = make_task(seed)
    return fr.run_local(
        rloo, steps=steps, seed=seed, batch=16, max_tokens=MAX_TOKENS, prompts=train, policy=tiny_model(seed), **options
    )


if __name__ == "__main__":
    main()
