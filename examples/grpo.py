"""GRPO (arXiv 2402.03300): a group of answers per prompt is its own baseline, a frozen reference holds the policy near."""

import flowrl as fr
from examples.tiny import MAX_TOKENS, make_task, tiny_model
from flowrl_operators import advantages, losses, rewards


@fr.flow
def grpo(prompts, policy, ref, *, group_size=8, beta=1e-3):
    rows = fr.rollout(policy, prompts, n=group_size)
    rows = rewards.exact(rows)
    rows = advantages.group_norm(rows)
    rows = fr.logprobs(ref, rows, out="ref_logprobs")  # left out, with its model, when beta is 0
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2) + beta * losses.kl("k3"))


def main(steps: int = 20, seed: int = 0, **options: object) -> fr.Run:
    """A few steps on a tiny model that knows nothing yet; `examples/demo.py` shows one that learns."""
    train, _ = make_task(seed)
    policy = tiny_model(seed)
    return fr.run_local(
        grpo,
        steps=steps,
        seed=seed,
        batch=16,
        max_tokens=MAX_TOKENS,
        prompts=train,
        policy=policy,
        ref=policy,
        **options,
    )


if __name__ == "__main__":
    main()
