"""What each algorithm of the gallery runs on: ten prompts of one digit, and a policy of 15,000 parameters that must learn to
say it again. A run takes one to three seconds on a CPU.

    python -m examples.gallery grpo
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import flowrl as fr
from examples.tiny import CharTokenizer, tiny_llama
from flowrl.graph.flows import Flow

PROMPTS = [{"prompt_id": digit, "prompt": f"{digit}=", "answer": digit} for digit in "0123456789"]
EXAMPLES = [{"prompt": f"{digit}=", "response": digit} for digit in "0123456789"]
PAIRS = [
    {"prompt": f"{digit}=", "response": response, "pair_id": digit, "chosen": response == digit}
    for digit in "0123456789"
    for response in (digit, str((int(digit) + 3) % 10))
]


@dataclass(frozen=True)
class TinyRun:
    """How one algorithm is run, and what must come of it."""

    name: str
    inputs: tuple[str, ...] = ("prompts", "policy")
    config: dict[str, Any] = field(default_factory=dict)
    steps: int = 40
    lr: float = 1e-2
    metric: str = "reward/mean"
    """Rises by `by`, or falls if that is negative, from the first five steps to the last five."""
    by: float = 0.3
    max_tokens: int = 1
    batch: int = 10
    """Prompts a step; algorithms that sample one answer per prompt see each prompt several times instead."""

    @property
    def flow(self) -> Flow:
        found: Flow = getattr(importlib.import_module(f"examples.gallery.{self.name}"), self.name)
        return found

    def run(self, **options: Any) -> fr.Run:
        """Run it; `options` go to `fr.run_local`."""
        makers = {**MAKERS, **options.pop("makers", {})}
        given = {name: makers[name](self) for name in self.inputs}
        settings = {
            "steps": self.steps,
            "batch": self.batch,
            "max_tokens": self.max_tokens,
            "out": None,
            "progress": "off",
        }
        return fr.run_local(self.flow.graph(**self.config), **{**settings, **given, **options})

    def curve(self, run: fr.Run) -> list[float]:
        """The metric at each step."""
        return [row[self.metric] for row in run.metrics if self.metric in row]


def tiny(seed: int, *, head: str = "lm", lr: float = 1e-2, trained: bool = False) -> fr.Model:
    """A Llama of one layer; `trained` has seen the answers."""
    model = tiny_llama(seed, hidden_size=32, num_layers=1, num_heads=2, max_length=8)
    if trained:
        teach(model)
    optimizer = fr.AdamW(lr=lr)
    return fr.Model(
        model, tokenizer=CharTokenizer(), head=head, optimizer=optimizer, device="cpu", micro_batch_tokens=65536
    )


def teach(model: Any, steps: int = 60) -> None:
    """Plain supervised training on the answers, for a teacher."""
    import torch

    tokenizer = CharTokenizer()
    ids = torch.tensor([tokenizer.encode(row["prompt"] + row["response"]) for row in EXAMPLES])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        logits = model(ids).logits[:, -2]
        torch.nn.functional.cross_entropy(logits, ids[:, -1]).backward()
        optimizer.step()
        optimizer.zero_grad()


MAKERS: dict[str, Callable[[TinyRun], Any]] = {
    "prompts": lambda run: PROMPTS,
    "examples": lambda run: EXAMPLES,
    "pairs": lambda run: fr.Data(PAIRS, batch="all"),
    "policy": lambda run: tiny(0, lr=run.lr),
    "student": lambda run: tiny(0, lr=run.lr),
    "ref": lambda run: tiny(0),
    "teacher": lambda run: tiny(1, trained=True),
    "critic": lambda run: tiny(2, head="value", lr=run.lr),
    "judge": lambda run: tiny(3, head="reward", lr=run.lr),
}
"""How each input of a flow is made."""

RUNS = {
    run.name: run
    for run in (
        TinyRun("grpo", ("prompts", "policy", "ref"), {"group_size": 16}),
        TinyRun("dr_grpo", config={"group_size": 16, "length": 1}),
        TinyRun("dapo", config={"group_size": 16}),
        TinyRun("ppo", ("prompts", "policy", "ref", "critic"), batch=160),
        TinyRun("rloo", config={"group_size": 16}),
        TinyRun("reinforce_pp", ("prompts", "policy", "ref"), batch=160),
        TinyRun("remax", batch=160),
        TinyRun("gspo", config={"group_size": 16}),
        TinyRun("cispo", config={"group_size": 16}),
        TinyRun("gmpo", config={"group_size": 16}),
        TinyRun("opo", config={"group_size": 16}),
        TinyRun("gpg", config={"group_size": 16}),
        TinyRun("maxrl", config={"group_size": 16}),
        TinyRun("gdpo", config={"group_size": 16}, metric="right/mean"),
        TinyRun("online_dpo", ("prompts", "policy", "ref"), {"group_size": 16}),
        TinyRun("raft", config={"group_size": 16}),
        TinyRun("distill", ("prompts", "student", "teacher"), {"k": 8}, metric="update/loss", by=-0.5),
        TinyRun("sft", ("examples", "policy"), metric="update/loss", by=-1.0),
        TinyRun("dpo", ("pairs", "policy", "ref"), metric="update/loss", by=-0.3),
        TinyRun("reward_model", ("pairs", "judge"), metric="update/loss", by=-0.3),
    )
}
"""Every algorithm of the gallery, in the order of the page."""
