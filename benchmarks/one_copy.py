"""Two copies of the weights, a trainer's and a sampler's, beside one: memory of each of two GPUs, and samples per second.

python -m benchmarks one_copy [--model 7B] [--samplers transformers,vllm] [--steps 3] [--save]
python -m benchmarks one_copy --tiny                     the same program on a CPU (gloo), to see that it works

Random weights in the shape of a Qwen2.5, trained in shards (FSDP of 2, bf16, fp32 masters and moments) and sampled by a copy on
each GPU. Both ways take the same prompts, responses of the same length and the same optimizer steps.

two copies    both stay on the device with the optimizer; new weights are gathered parameter by parameter and copied
one copy      while sampling, weights, masters and moments of the trainer are parked in host memory; while training, the sampler's
              weights take no memory; new weights are resharded box by box

Each way is a job of its own. A way that does not fit says so. With vLLM, the engine keeps its weights and its cache while the
trainer works; only the trainer's state leaves.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from benchmarks.common import median, report, table
from flowrl.cost.configs import known_models
from flowrl.engines.launch.spawn import run_job
from flowrl.errors import FlowError

WORLD = 2
WAYS = {"two_copies": "two copies", "one_copy": "one copy"}
TINY = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 514, "tie_word_embeddings": False,
}  # fmt: skip
HEADING = """\
Of the fuller of the two devices. peak: most that torch had allocated. taken: what the device lacks in the end, whoever has it.
sampling, training: weights, masters and moments on the device then. host: parked there. step: median; sampling, training and new
weights. In every way the sampler's weights were compared with the trainer's in the end, bit by bit."""
HEADER = ("sampler", "way", "peak GiB", "taken GiB", "sampling GiB", "training GiB", "host GiB", "step s", "samples/s")
BLOCK = 2**20
"""Numbers that weights repeat: drawing billions one by one takes minutes."""


def write_model(config: dict[str, Any], folder: Path, dtype: torch.dtype) -> int:
    """A random model in files, as any other is published; how many parameters it has."""
    torch.manual_seed(0)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    block = torch.randn(BLOCK).mul_(0.02).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                nn.init.constant_(parameter, 1.0 if "norm" in name else 0.0)
                continue
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), BLOCK):
                part = flat[start : start + BLOCK]
                part.copy_(block[: part.numel()])
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def measured(said: dict[str, Any]) -> dict[str, Any]:
    """What a way takes: of memory the fuller rank, of time the slower. `error` where it did not come to its end."""
    with tempfile.TemporaryDirectory(prefix="flowrl-one-copy-") as folder:
        try:
            run_job("benchmarks.one_copy_worker:measure", {**said, "results": folder}, WORLD)
        except FlowError as error:  # a way that does not fit is a finding, and the others are measured all the same
            return {"error": str(error)}
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(WORLD)]
    assert len({one["sum"] for one in ranks}) == 1, "ranks sample with different weights"
    found = {name: max(one[name] for one in ranks) for name in ranks[0] if name.endswith("_bytes")}
    states = {when: max(one["states"][when] for one in ranks) for when in ranks[0]["states"]}
    seconds = [max(each) for each in zip(*(one["seconds"] for one in ranks), strict=True)]
    return {**found, "states": states, "seconds": seconds, "step_s": median(seconds)}


def row(sampler: str, way: str, found: dict[str, Any], samples: int) -> list[str]:
    gib = 2.0**30
    if "error" in found:
        fits = "does not fit" if "out of memory" in found["error"].lower() else "failed"
        return [sampler, WAYS[way], f"{fits}: {found['error'].splitlines()[0][:120]}", *[""] * 6]
    cells = [
        found.get("peak_bytes"),
        found.get("taken_bytes"),
        found["states"]["sampling"],
        found["states"]["training"],
    ]
    cells.append(found["host_bytes"])
    memory = ["" if one is None else f"{one / gib:.4g}" for one in cells]
    return [sampler, WAYS[way], *memory, f"{found['step_s']:.3f}", f"{samples / found['step_s']:.2f}"]


def main(argv: Sequence[str]) -> int:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks one_copy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--model", default="7B", help="of Qwen2.5: 0.5B, 1.5B, 3B, 7B, 14B, 32B")
    options.add_argument("--samplers", default="transformers,vllm")
    options.add_argument("--prompts", type=int, default=16)
    options.add_argument("--group", type=int, default=8)
    options.add_argument("--prompt-tokens", type=int, default=256)
    options.add_argument("--response-tokens", type=int, default=256)
    options.add_argument("--micro-batch-tokens", type=int, default=8192)
    options.add_argument("--vllm-share", type=float, default=0.25, help="of a GPU's memory for vLLM: weights and cache")
    options.add_argument("--steps", type=int, default=3, help="iterations, after one that does not count")
    options.add_argument("--ways", default=",".join(WAYS))
    options.add_argument("--tiny", action="store_true", help="on a CPU")
    options.add_argument("--json", help="also write all numbers to this file")
    options.add_argument("--save", action="store_true")
    given = options.parse_args(argv)
    is_gpu = torch.cuda.device_count() >= WORLD and not given.tiny
    if not is_gpu and not given.tiny:
        print(f"one_copy needs {WORLD} CUDA devices; --tiny runs it on a CPU")
        return 2
    config = TINY if given.tiny else dict(known_models()[f"Qwen/Qwen2.5-{given.model}"])
    said: dict[str, Any] = {
        "is_gpu": is_gpu, "vocab_size": config["vocab_size"], "precision": "bf16" if is_gpu else "fp32",
        "prompts": given.prompts, "group": given.group, "prompt_tokens": given.prompt_tokens,
        "response_tokens": given.response_tokens, "micro_batch_tokens": given.micro_batch_tokens, "steps": given.steps,
    }  # fmt: skip
    if given.tiny:
        said |= {"prompts": 3, "group": 2, "prompt_tokens": 5, "response_tokens": 4, "micro_batch_tokens": 64}
    results: dict[str, dict[str, Any]] = {}
    left = []
    with tempfile.TemporaryDirectory(prefix="flowrl-one-copy-model-") as folder:
        num_params = write_model(config, Path(folder), torch.bfloat16 if is_gpu else torch.float32)
        for sampler in given.samplers.split(","):
            if sampler == "vllm" and (given.tiny or importlib.util.find_spec("vllm") is None):
                left.append("vLLM was left out: " + ("--tiny" if given.tiny else "it is not installed"))
                continue
            share = {"gpu_memory_utilization": given.vllm_share} if sampler == "vllm" else {}
            for way in given.ways.split(","):
                job = {**said, "folder": folder, "way": way, "sampler": sampler, "sampler_options": share}
                results[f"{sampler} {way}"] = measured(job)
                print(f"{sampler}, {WAYS[way]}: {results[f'{sampler} {way}']}", flush=True)
    rows = [row(*name.split(" "), found, said["prompts"] * said["group"]) for name, found in results.items()]  # type: ignore[arg-type]
    where = f"{WORLD} x {torch.cuda.get_device_name(0)}" if is_gpu else f"CPU, {WORLD} processes, gloo"
    name = "tiny" if given.tiny else f"Qwen2.5-{given.model}"
    work = "{prompts} prompts of {prompt_tokens} tokens, {group} responses of {response_tokens} each".format(**said)
    text = (
        f"{where}; {name}, {num_params:,} random parameters. {work}; {given.steps} iterations, after one that does not count.\n\n"
        f"{table(HEADER, rows)}\n\n{HEADING}"
    )
    numbers = {"params": num_params, "asked": said, "ways": results}
    if given.json:
        Path(given.json).write_text(json.dumps(numbers, indent=1))
    report("one_copy", "\n\n".join([text, *left]), numbers, save=given.save)
    return 1 if any("error" in one and "out of memory" not in one["error"].lower() for one in results.values()) else 0
