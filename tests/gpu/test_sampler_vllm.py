"""The vLLM sampler on a GPU: what its CUDA build and its other model runner could do differently from the CPU's."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'flowrl[vllm]'")

VOCAB, REAL = 1024, 1000
PROMPTS = [[3, 4, 5 + row] + [7] * row for row in range(8)]
TOLERANCE = {"fp32": 5e-3, "bf16": 0.15}
OPTIONS = {"gpu_memory_utilization": 0.1, "enforce_eager": True}


class Numbers:
    """Token i is its number and a blank; 1 ends a response, ids from 1000 on are padding of the model's embedding."""

    vocab_size, eos_ids, pad_id, fingerprint = REAL, frozenset({1}), 0, "numbers"

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    encode_continuation = encode

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"{i} " for i in ids if i > 1)


def qwen(seed: int, precision: str, tied: bool) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.08,
    )
    module = Qwen2ForCausalLM(config).eval().to("cuda", torch.bfloat16 if precision == "bf16" else torch.float32)
    with torch.no_grad():
        module.lm_head.weight[REAL:] *= 3
    return module


def shake(module: Any) -> None:
    import torch

    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


def ask(prompts: Sequence[Sequence[int]], max_tokens: int = 24) -> list[Any]:
    from flowrl.engines.protocol import SampleKey, SampleRequest

    return [SampleRequest(ids, max_tokens, SampleKey(5, 0, "r", str(row), 0)) for row, ids in enumerate(prompts)]


def far(module: Any, requests: Sequence[Any], responses: Sequence[Any], **how: float) -> float:
    """Mean distance of the responses' log-probabilities to the module's own."""
    import torch

    temperature, top_p = how.get("temperature", 1.0), how.get("top_p", 1.0)
    distances: list[float] = []
    for request, response in zip(requests, responses, strict=True):
        ids_T = torch.tensor([[*request.prompt_ids, *response.ids]], device="cuda")
        start = len(request.prompt_ids)
        with torch.no_grad():
            logits_TV = module(ids_T).logits[0, start - 1 : -1].double()[:, :REAL] / temperature
        probs_TV, order_TV = logits_TV.softmax(-1).sort(-1, descending=True)
        drop_TV = torch.zeros_like(logits_TV, dtype=torch.bool).scatter(
            1, order_TV, probs_TV.cumsum(-1) - probs_TV >= top_p
        )
        own = (
            logits_TV.masked_fill(drop_TV, -torch.inf).log_softmax(-1).gather(1, ids_T[0, start:, None])[:, 0].tolist()
        )
        distances += [abs(a - b) for a, b in zip(own, response.logprobs, strict=True)]
    return sum(distances) / len(distances)


@pytest.mark.parametrize(("precision", "tied"), [("bf16", True), ("bf16", False), ("fp32", True)])
def test_sampling_and_two_updates(precision: str, tied: bool) -> None:
    import torch

    from flowrl.engines.protocol import SamplingOptions
    from flowrl.engines.sampler_vllm import VllmSampler
    from flowrl.model import Model

    module = qwen(1, precision, tied)
    free_bytes = torch.cuda.mem_get_info()[0]
    state = torch.cuda.get_rng_state()
    sampler = VllmSampler(module, Numbers(), Model(module, precision=precision, sampler_options=OPTIONS))
    assert torch.equal(state, torch.cuda.get_rng_state())
    requests = ask(PROMPTS)
    for version in range(3):
        if version:
            shake(module)
            sampler.load(module.named_parameters(), version)
        for options, how in (
            (SamplingOptions(), {}),
            (SamplingOptions(temperature=0), {}),
            (SamplingOptions(temperature=0.7), {"temperature": 0.7}),
            (SamplingOptions(temperature=1.2, top_k=VOCAB), {"temperature": 1.2}),
        ):
            responses = sampler.generate(requests, options)
            assert far(module, requests, responses, **how) < TOLERANCE[precision]
            assert all(max(r.ids) < REAL for r in responses)
        if precision == "fp32":
            responses = sampler.generate(requests, SamplingOptions(top_p=0.9))
            assert far(module, requests, responses, top_p=0.9) < TOLERANCE[precision]
    free = sampler.generate(requests, SamplingOptions())
    assert [r.ids for r in sampler.generate(requests, SamplingOptions())] == [r.ids for r in free]
    stop = f" {free[0].ids[10]} "
    stopped = sampler.generate(requests, SamplingOptions(stop=(stop,)))
    assert stopped[0].finish_reason == "stop" and len(stopped[0].ids) <= 11
    sampler.load(module.named_parameters(), 3)  # at once: no step may be under way, no block in use
    assert far(module, requests, sampler.generate(requests, SamplingOptions())) < TOLERANCE[precision]
    sampler.close()
    del sampler
    gc.collect()
    torch.cuda.empty_cache()
    assert (
        free_bytes - torch.cuda.mem_get_info()[0] < 2 << 30
    )  # kernels may stay, the cache (a tenth of the GPU) may not


def test_two_samplers_beside_each_other() -> None:
    from flowrl.engines.protocol import SamplingOptions
    from flowrl.engines.sampler_vllm import VllmSampler
    from flowrl.model import Model

    modules = [qwen(2, "bf16", True), qwen(3, "bf16", False)]
    requests = ask(PROMPTS, 8)
    samplers = [VllmSampler(m, Numbers(), Model(m, precision="bf16", sampler_options=OPTIONS)) for m in modules]
    for module, sampler in zip(modules, samplers, strict=True):
        assert far(module, requests, sampler.generate(requests, SamplingOptions())) < TOLERANCE["bf16"]
    samplers[0].close()
    assert far(modules[1], requests, samplers[1].generate(requests, SamplingOptions())) < TOLERANCE["bf16"]
    samplers[1].close()
