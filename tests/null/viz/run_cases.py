"""Folders of runs to draw: a plain one, one whose every text is hostile, a big one, and one that had a plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flowrl.runtime.rundir import RunDir
from flowrl.schema.standard import STANDARD
from flowrl.store.rows import RowBatch

SCRIPT = "</script><img src=x onerror=alert(1)><svg onload=alert(2)>"
ARABIC = "مرحبا بالعالم"
HEBREW = "שלום עולם"
EMOJI = "👩‍👩‍👧‍👦🏳️‍🌈🇩🇪"
TURNED = "a\u202egnp.exe\u2066b"
LONG_TOKENS = 100_000
HOSTILE = (
    SCRIPT, f"{ARABIC} <b>{HEBREW}</b> {EMOJI}", f"{TURNED} \x00\x07\x1b[31m \u2028 \ufeff", "&lt;&amp;&#x41;${1}`'\"",
    "]]><!--<script>alert(3)</script>-->", "javascript:alert(4)",
)  # fmt: skip
BROKEN_BYTES = bytes([0xF0, 0x9F, 0x98, 0x80, 0xFF, 0xC3, 0x28, 0xE2, 0x82, 0x41, 0xED, 0xA0, 0x80])
"""An emoji over four tokens, then bytes that are no UTF-8."""


def as_bytes(ids: Sequence[int]) -> list[bytes | None]:
    """Tokens that are bytes; 256 ends a response."""
    return [bytes([one]) if one < 256 else None for one in ids]


def rows_of(
    prompts: Sequence[str], responses: Sequence[Sequence[str | bytes]], seed: int = 0, version: int = 0
) -> RowBatch:
    """A response's tokens are its bytes and an end token; their numbers are drawn.

    Args:
        responses: of each prompt.
        version: of the weights that sampled them; the last of each prompt began two versions before.
    """
    draw = np.random.default_rng(seed)
    flat = [(place, one) for place, group in enumerate(responses) for one in group]
    raw = [one if isinstance(one, bytes) else one.encode() for _, one in flat]
    ids = [[*one, 256] for one in raw]
    lengths = [len(one) for one in ids]
    rewards = draw.integers(0, 2, len(flat)).astype(np.float32)
    logprobs = [-draw.exponential(0.8, n).astype(np.float32) for n in lengths]
    begun = [max(0, version - 2 * (one is responses[place][-1])) for place, one in flat]
    columns = {
        "prompt_id": [f"p{place}" for place, _ in flat],
        "prompt": [prompts[place] for place, _ in flat],
        "sample_id": [f"p{place}/{index}" for index, (place, _) in enumerate(flat)],
        "response": [one.decode(errors="replace") for one in raw],
        "response_ids": ids,
        "response_mask": [[True] * n for n in lengths],
        "loss_mask": [[True] * (n - 1) + [False] for n in lengths],
        "rollout_logprobs": logprobs,
        "old_logprobs": [one + draw.normal(0, 0.05, len(one)).astype(np.float32) for one in logprobs],
        "finish_reason": ["stop"] * len(flat),
        "reward": rewards,
        "advantage": rewards - rewards.mean(),
        "min_policy_version": begun,
        "max_policy_version": [version] * len(flat),
        "row_error": ["" if index % 5 else SCRIPT for index in range(len(flat))],
    }
    types = {name: STANDARD[name].type for name in columns}
    style = draw.random(len(flat)).astype(np.float32)  # a part of a reward, known after the versions
    return RowBatch({**columns, "style": style}, {**types, "style": STANDARD["reward"].type})


def hostile_run(root: Path) -> RunDir:
    """Whatever a text can be: markup, code, other directions, 100,000 tokens, broken bytes."""
    folder = RunDir.create(root, "hostile")
    folder.write_info(
        {"flow": SCRIPT, "engine": "null", "seed": 0, "note": SCRIPT, "models": {SCRIPT: {"source": SCRIPT}}}
    )
    folder.write_graph(f"flow x\n  {SCRIPT}\n")
    folder.write_metrics(0, {"reward/mean": 0.5, "<b>odd</b>/loss": 1.0}, notes=[SCRIPT])
    folder.write_metrics(1, {"reward/mean": 0.75, "<b>odd</b>/loss": float("nan")})
    samples = [{"prompt_id": "p", "prompt": text, "response": text, "reward": 0.5} for text in HOSTILE]
    folder.write_samples(0, [*samples, {"prompt": "half a pair: \ud83d", "response": "\udfff\ud800", "reward": None}])
    long = "word " * (LONG_TOKENS // 5)
    folder.write_edge(0, "rollout", rows_of(HOSTILE, [HOSTILE for _ in HOSTILE]))
    folder.write_edge(1, "<i>advantage</i>", rows_of(["broken", "long"], [[BROKEN_BYTES, "whole"], [long]]))
    folder.finish("failed", SCRIPT)
    return folder


def plain_run(root: Path, *, steps: int = 6, name: str = "plain", seed: int = 0, shift: float = 0.0) -> RunDir:
    """A run of a few steps with two prompts and four responses each."""
    folder = RunDir.create(root, name)
    folder.write_info({"flow": "grpo", "engine": "torch", "seed": seed, "steps": steps, "options": {"batch": 2},
                       "models": {"policy": {"source": "org/model"}}})  # fmt: skip
    folder.write_graph("flow grpo\n")
    for step in range(steps):
        rows = rows_of(
            [f"what is {step}+1?", f"what is {step}+2?"],
            [[f"it is {step + 1}", "I do not know", "seven", f"needle {step}"], ["a", "bb", "ccc", "dddd"]],
            seed=seed * 1000 + step,
            version=step,
        )
        folder.write_edge(step, "group_norm", rows)
        numbers = {"reward/mean": 0.1 * step + shift, "reward/std": 0.2, "update/kl": 0.01 * step, "time/step_s": 1.5}
        folder.write_metrics(step, numbers | {"custom_thing": 3.0})
        folder.write_samples(step, [{"prompt": f"what is {step}+1?", "response": "seven", "reward": 0.0}])
    folder.finish()
    return folder


def large_run(root: Path, *, steps: int, rows: int) -> RunDir:
    """Eight responses of 16 words to a prompt; one response of each step has a word that no other has."""
    folder = RunDir.create(root, "large")
    folder.write_info({"flow": "grpo", "engine": "torch", "steps": steps})
    draw = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "so", "the", "answer", "is", "therefore", "wait"]
    for step in range(steps):
        texts = [" ".join(draw.choice(words, 16)) for _ in range(rows)]
        texts[7] = f"needle{step} {texts[7]}"
        groups = [texts[place : place + 8] for place in range(0, rows, 8)]
        prompts = [f"prompt {step}.{place}" for place in range(len(groups))]
        folder.write_edge(step, "group_norm", rows_of(prompts, groups, seed=step))
        folder.write_metrics(step, {"reward/mean": float(draw.random()), "update/kl": step * 1e-4})
    folder.finish()
    return folder
