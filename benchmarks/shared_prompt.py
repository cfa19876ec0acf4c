"""An update whose responses share their prompts' forward pass, against the same update on whole rows.

    python -m benchmarks shared_prompt [--device cuda] [--prompt 512] [--response 128]

Same weights, rows and loss both ways; seconds and peak device memory of an update, and how far the log-probabilities are apart.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from benchmarks.common import table


class Ids:
    """Ids only; nothing is decoded here."""

    eos_ids, pad_id, fingerprint = frozenset({2}), 0, "ids"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    encode_continuation = encode

    def decode(self, ids: object) -> str:
        raise NotImplementedError


def measure(a: argparse.Namespace, precision: str, shares: bool) -> tuple[float, float, np.ndarray]:
    """(median seconds of an update, peak GiB, log-probabilities before it)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import flowrl as fr
    from flowrl.engines.host_torch import TorchEngine
    from flowrl.engines.protocol import TokenRows, UpdateJob
    from flowrl_operators import losses

    draw = np.random.default_rng(0)
    count = a.prompts * a.group_size
    prompts = [draw.integers(3, a.vocab, a.prompt) for _ in range(a.prompts)]
    responses = fr.Ragged.of([draw.integers(3, a.vocab, a.response) for _ in range(count)], np.int32)
    prompt_ids = fr.Ragged.of([prompts[i // a.group_size] for i in range(count)], np.int32)
    rows = TokenRows(prompt_ids, responses, np.ones(count, np.float32))
    job = UpdateJob(
        rows=rows,
        mask=fr.Ragged.like(np.ones(len(responses.values), bool), responses),
        columns={"advantage": draw.normal(size=count).astype(np.float32)},
        loss=losses.ppo_clip(0.2),
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=a.vocab, hidden_size=a.hidden, intermediate_size=a.hidden * 11 // 4, num_hidden_layers=a.layers,
        num_attention_heads=a.hidden // 64, num_key_value_heads=a.hidden // 128, max_position_embeddings=a.prompt + a.response,
    )  # fmt: skip
    model = fr.Model(
        LlamaForCausalLM(config), tokenizer=Ids(a.vocab), device=a.device, precision=precision,
        optimizer=fr.AdamW(lr=1e-5), micro_batch_tokens=a.micro_batch_tokens,
    )  # fmt: skip
    host = TorchEngine().open("policy", model, frozenset({"update", "logprobs"}), seed=0)
    host.forward.shares_prompts = host.forward.shares_prompts and shares  # type: ignore[attr-defined]
    logprobs = host.logprobs(rows).values
    on_gpu = a.device.startswith("cuda")
    host.update(job)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(a.repeats):
        start = time.perf_counter()
        host.update(job)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan")
    return float(np.median(seconds)), peak, logprobs


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks shared_prompt", description=__doc__)
    for name, default in (
        ("prompts", 16), ("group-size", 8), ("prompt", 512), ("response", 128), ("hidden", 1024), ("layers", 8), ("vocab", 1000),
        ("micro-batch-tokens", 32768), ("repeats", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    a = parser.parse_args(argv)
    found = []
    for precision in a.precision:
        shared, whole = measure(a, precision, True), measure(a, precision, False)
        apart = float(np.abs(shared[2] - whole[2]).max())
        speeds = [f"{whole[0]:.3f}", f"{shared[0]:.3f}", f"{whole[0] / shared[0]:.2f}x"]
        found.append([precision, *speeds, f"{whole[1]:.2f}", f"{shared[1]:.2f}", f"{apart:.1e}"])
    header = ["precision", "whole rows, s", "shared, s", "ratio", "GiB whole", "GiB shared", "max |d logprob|"]
    print(table(header, found))
    return 0
