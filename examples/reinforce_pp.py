"""REINFORCE++ (arXiv 2501.03262): no critic and no group; token returns with a KL penalty, normalised over the batch."""

import flowrl as fr
from examples.tiny import MAX_TOKENS, make_task, tiny_model
from flowrl_operators import advantages, losses, rewards


@fr.flow
def reinforce_pp(prompts, policy, ref, *, kl=0.01):
    rows = rewards.exact(fr.rollout(policy, prompts))
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    rows = advantages.reinforce_pp(rewards.kl_shaped(rows, coefficient=kl))
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2))


def main(steps: int = 20, seed: int = 0, **options: object) -> fr.Run:
    """A few steps on a tiny model that knows nothing yet; `examples/demo.py` shows one that learns."""
    train, _ = make_task(seed)
    policy = tiny_model(seed)
    return fr.run_local(
        reinforce_pp,
        steps=steps,
        seed=seed,
        batch=32,
        max_tokens=MAX_TOKENS,
        prompts=train,
        policy=policy,
        ref=policy,
        **options,
    )


if __name__ == "__main__":
    main()
