"""PPO (arXiv 1707.06347, 2203.02155): a critic, a reward shaped by the distance from a reference, several passes."""

import flowrl as fr
from examples.tiny import MAX_TOKENS, make_task, tiny_model
from flowrl_operators import advantages, losses, rewards


@fr.flow
def ppo(prompts, policy, ref, critic, *, kl=0.05, epochs=2, minibatches=4):
    rows = rewards.exact(fr.rollout(policy, prompts))
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    rows = fr.values(critic, rows)
    rows = advantages.gae(rewards.kl_shaped(rows, coefficient=kl), gamma=1.0, lam=0.95)
    passes = fr.repeat(rows, epochs=epochs, minibatches=minibatches)
    policy = fr.update(policy, passes, loss=losses.ppo_clip(0.2))
    return policy, fr.update(critic, passes, loss=losses.value_clip(0.2))


def main(steps: int = 20, seed: int = 0, **options: object) -> fr.Run:
    """A few steps on a tiny model that knows nothing yet; `examples/demo.py` shows one that learns."""
    train, _ = make_task(seed)
    policy, critic = tiny_model(seed), tiny_model(seed, head="value", lr=1e-3)
    models = {"policy": policy, "ref": policy, "critic": critic}
    return fr.run_local(
        ppo, steps=steps, seed=seed, batch=32, max_tokens=MAX_TOKENS, prompts=train, **models, **options
    )


if __name__ == "__main__":
    main()
