"""SFT: supervised fine-tuning is a flow like any other."""

import flowrl as fr
from examples.tiny import make_task, sft_examples, tiny_model
from flowrl_operators import losses


@fr.flow
def sft(examples, policy):
    return fr.update(policy, examples, loss=losses.sft())


def main(steps: int = 20, seed: int = 0, **options: object) -> fr.Run:
    """A few steps on a tiny model that knows nothing yet; `examples/demo.py` shows one that learns."""
    train, _ = make_task(seed)
    examples = sft_examples(train, seed, num_examples=steps * 64)
    return fr.run_local(
        sft, steps=steps, seed=seed, batch=64, examples=examples, policy=tiny_model(seed, lr=2e-3), **options
    )


if __name__ == "__main__":
    main()
