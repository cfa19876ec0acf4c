"""Every flow of `examples/flows` with a configuration and inputs of the null engine."""

from __future__ import annotations

from typing import Any

import flowrl as fr
from examples.flows import dapo, debate, grpo, judged, online_dpo, ppo, remax, replayed, supervised, tool_use, vine
from flowrl.graph.flows import Flow

PROMPTS = [{"prompt_id": str(i), "prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(12)]
TABLE = {f"{i}+1=": [str(i + 1), "7", f"\\boxed{{{i + 1}}}"] for i in range(12)}
EXAMPLES = [{"prompt_id": str(i), "prompt": f"{i}+1=", "response": str(i + 1)} for i in range(12)]
PAIRS = [
    {"prompt_id": str(i), "prompt": f"{i}+1=", "response": r, "pair_id": str(i), "chosen": c}
    for i in range(8)
    for r, c in ((str(i + 1), True), ("no", False))
]
JUDGE = fr.Model(None, head="reward")
MODEL = fr.Model(TABLE, optimizer=fr.AdamW(lr=1e-3))
CRITIC = fr.Model(None, head="value")
HELD_OUT = fr.Data(PROMPTS, batch="all")

FLOWS: dict[str, tuple[Flow, dict[str, Any], dict[str, Any]]] = {
    "grpo": (grpo.grpo, {}, {"prompts": PROMPTS, "policy": MODEL, "ref": MODEL}),
    "moving_ref": (
        grpo.grpo_moving_ref, {}, {"prompts": PROMPTS, "heldout": HELD_OUT, "policy": MODEL, "ref": MODEL},
    ),
    "ppo": (ppo.ppo, {}, {"prompts": PROMPTS, "policy": MODEL, "ref": MODEL, "critic": CRITIC, "judge": JUDGE}),
    "ppo_warm": (
        ppo.ppo_warm, {"warmup": 2},
        {"prompts": PROMPTS, "policy": MODEL, "ref": MODEL, "critic": CRITIC, "judge": JUDGE},
    ),
    "dapo": (dapo.dapo, {"group_size": 4}, {"prompts": PROMPTS, "policy": MODEL}),
    "remax": (remax.remax, {}, {"prompts": PROMPTS, "policy": MODEL}),
    "online_dpo": (online_dpo.online_dpo, {}, {"prompts": PROMPTS, "policy": MODEL, "ref": MODEL, "judge": JUDGE}),
    "raft": (supervised.raft, {}, {"prompts": PROMPTS, "policy": MODEL}),
    "distill": (supervised.distill, {"k": 4}, {"prompts": PROMPTS, "student": MODEL, "teacher": MODEL}),
    "reward_model": (supervised.reward_model, {}, {"pairs": PAIRS, "judge": JUDGE}),
    "sft": (supervised.sft, {}, {"examples": EXAMPLES, "policy": MODEL}),
    "judged": (judged.judged, {}, {"prompts": PROMPTS, "policy": MODEL, "judge": fr.Model(None)}),
    "tool_use": (tool_use.tool_use, {}, {"prompts": PROMPTS, "policy": fr.Model({"0+1=": ["hm"], **TABLE})}),
    "debate": (debate.debate, {}, {"prompts": PROMPTS, "policy": MODEL}),
    "replayed": (replayed.replayed, {}, {"prompts": PROMPTS, "policy": MODEL}),
    "vine": (vine.vine, {}, {"prompts": PROMPTS, "policy": MODEL}),
}  # fmt: skip
