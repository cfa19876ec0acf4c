"""The vLLM sampler against the trainer's own Transformers module, on a tiny Llama made here."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from flowrl.engines import sampler_vllm
from flowrl.engines.protocol import SampleKey, SampleRequest, SamplingOptions
from flowrl.engines.sampler_vllm import StopStrings, VllmSampler
from flowrl.errors import ConfigError, DataError, EngineError, MissingExtra, StaleWeightsError
from flowrl.model import Model

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None,
    reason="vLLM is not installed: pip install 'flowrl[cpu]' (CPU) or 'flowrl[vllm]' (GPU)",
)

VOCAB, CONTEXT = 128, 256
PROMPTS = [[3, 4, 5 + row] + [7] * row for row in range(6)]


class Letters:
    """Token i is a letter or two; 1 ends a response."""

    vocab_size = VOCAB
    pad_id = 0
    fingerprint = "letters"

    def __init__(self, eos_ids: frozenset[int] = frozenset({1}), vocab_size: int = VOCAB) -> None:
        self.eos_ids, self.vocab_size = eos_ids, vocab_size

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    encode_continuation = encode

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + i % 26) * (1 + i // 64) for i in ids if i > 1)


def llama(seed: int, *, tied: bool = False, hidden: int = 128, **changes: Any) -> Any:
    """Two layers, two heads of 64, weights large enough to give every context a distribution of its own."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=hidden // 64,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=2,  # not the tokenizer's
        **changes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def shake(module: Any, seed: int) -> None:
    """Move every weight, so that no stale copy of any of them can go unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def logprobs(
    module: Any, prompt: Sequence[int], ids: Sequence[int], *, temperature: float = 1.0, top_p: float = 1.0
) -> Any:
    """[T] by the definition, from the module's logits. Top-p keeps the fewest likeliest ids whose mass reaches it."""
    with torch.no_grad():
        logits_TV = module(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].double() / temperature
    if top_p < 1:
        probs_TV, order_TV = logits_TV.softmax(-1).sort(-1, descending=True)
        drop_TV = torch.zeros_like(logits_TV, dtype=torch.bool).scatter(
            1, order_TV, probs_TV.cumsum(-1) - probs_TV >= top_p
        )
        logits_TV = logits_TV.masked_fill(drop_TV, -torch.inf)
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def ask(prompts: Sequence[Sequence[int]], max_tokens: int = 24, first: int = 0) -> list[SampleRequest]:
    return [
        SampleRequest(prompt, max_tokens, SampleKey(5, 0, "rollout", f"p{first + row}", 0))
        for row, prompt in enumerate(prompts)
    ]


def far(module: Any, requests: Sequence[SampleRequest], responses: Sequence[Any], **how: Any) -> float:
    """Largest distance of a response's log-probabilities to the module's."""
    worst = 0.0
    for request, response in zip(requests, responses, strict=True):
        assert len(response.ids) == len(response.logprobs)
        own = logprobs(module, request.prompt_ids, response.ids, **how).tolist()
        worst = max(worst, *(abs(a - b) for a, b in zip(own, response.logprobs, strict=True)))
    return worst


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small lose more by waiting for a second thread than they gain, the more so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def open_sampler() -> Iterator[Callable[..., Any]]:
    """Opens samplers, and closes at the end those that are open."""
    opened: list[Any] = []

    def opener(module: Any, tokenizer: Any = None, **model: Any) -> Any:
        opened.append(VllmSampler(module, tokenizer or Letters(), Model(module, sampler="vllm", **model)))
        return opened[-1]

    yield opener
    for sampler in opened:
        sampler.close()


@pytest.fixture(scope="module")
def module() -> Any:
    """Its weights change during the tests; the sampler is loaded from it whenever that matters."""
    return llama(1)


@pytest.fixture(scope="module")
def sampler(module: Any, open_sampler: Callable[..., Any]) -> Any:
    return open_sampler(module)


@pytest.fixture
def fresh(sampler: Any, module: Any) -> Any:
    """The sampler, holding the module's weights and version 0."""
    sampler.load(module.named_parameters(), 0)
    return sampler


# ---------------------------------------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("tied", [False, True])
def test_logprobs_are_the_trainers_before_and_after_two_updates(open_sampler: Callable[..., Any], tied: bool) -> None:
    module = llama(2, tied=tied)
    sampler = open_sampler(module)
    seen = []
    for version in range(3):
        if version:
            shake(module, version)
            sampler.load(module.named_parameters(), version)
        assert sampler.version == version
        requests = ask(PROMPTS)
        responses = sampler.generate(requests, SamplingOptions())
        assert far(module, requests, responses) < 1e-3
        seen.append([r.ids for r in responses])
    assert seen[0] != seen[1] != seen[2]
    sampler.close()


@pytest.mark.parametrize(
    ("options", "how"),
    [
        (SamplingOptions(temperature=0.7), {"temperature": 0.7}),
        (SamplingOptions(temperature=1.3, top_p=0.8), {"temperature": 1.3, "top_p": 0.8}),
        (SamplingOptions(temperature=0), {"temperature": 1.0}),
    ],
)
def test_logprobs_are_of_the_distribution_sampled_from(
    fresh: Any, module: Any, options: SamplingOptions, how: dict[str, float]
) -> None:
    requests = ask(PROMPTS)
    assert far(module, requests, fresh.generate(requests, options), **how) < 1e-3


def test_temperature_zero_takes_the_likeliest(fresh: Any, module: Any) -> None:
    request = ask(PROMPTS[:1], max_tokens=8)
    (response,) = fresh.generate(request, SamplingOptions(temperature=0))
    ids = list(PROMPTS[0])
    for token in response.ids:
        with torch.no_grad():
            assert token == int(module(torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)


def test_top_k_one_leaves_one_token_of_probability_one(fresh: Any) -> None:
    (response,) = fresh.generate(ask(PROMPTS[:1], 5), SamplingOptions(top_k=1))
    assert response.logprobs == pytest.approx([0.0] * 5)


def test_an_update_drops_the_prefix_cache(open_sampler: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module = llama(3)
    sampler = open_sampler(module)
    requests = ask([[2 + i % 90 for i in range(130)]], 8)  # vLLM caches blocks of 128 tokens on a CPU
    sampler.generate(requests, SamplingOptions())
    shake(module, 1)
    with monkeypatch.context() as patch:  # what happens without the reset: the test can see the difference
        patch.setattr(sampler._llm.llm_engine, "reset_prefix_cache", lambda: True)
        sampler.load(module.named_parameters(), 1)
        assert far(module, requests, sampler.generate(requests, SamplingOptions())) > 0.05
    sampler.load(module.named_parameters(), 1)
    assert far(module, requests, sampler.generate(requests, SamplingOptions())) < 1e-3
    sampler.close()


# --------------------------------------------------------------------------------------------------------- responses


def test_the_end_token_is_kept_and_only_the_tokenizers_count(fresh: Any, open_sampler: Callable[..., Any]) -> None:
    requests = ask([[3, 4, 5]] * 64, 60)
    ended = [r for r in fresh.generate(requests, SamplingOptions(temperature=1.5)) if r.finish_reason == "stop"]
    assert ended and all(r.ids[-1] == 1 and 1 not in r.ids[:-1] for r in ended)
    # the model's own end token (2 in its config) ends nothing: the tokenizer does not name it
    assert any(2 in r.ids[:-1] for r in fresh.generate(requests, SamplingOptions(temperature=1.5)))


def test_every_end_token_of_the_tokenizer_ends_a_response(open_sampler: Callable[..., Any]) -> None:
    ends = frozenset(range(1, 65))
    sampler = open_sampler(llama(1), Letters(eos_ids=ends))
    responses = sampler.generate(ask(PROMPTS, 40), SamplingOptions())
    assert all(r.finish_reason == "stop" and r.ids[-1] in ends and not ends & set(r.ids[:-1]) for r in responses)
    sampler.close()


def test_the_length_limit_and_the_context_end_a_response(fresh: Any) -> None:
    short, full = fresh.generate(
        [*ask([[3, 4]], 3), *ask([[9] * (CONTEXT - 4)], 50, first=1)], SamplingOptions(top_k=2)
    )
    assert (len(short.ids), short.finish_reason) == (3, "length")
    assert (len(full.ids), full.finish_reason) == (4, "length")


def test_a_stop_string_ends_a_response_at_the_token_that_completes_it(fresh: Any, module: Any) -> None:
    requests, decode = ask(PROMPTS, 40), Letters().decode
    free = fresh.generate(requests, SamplingOptions())
    text = decode(free[0].ids)
    stop = (text[20:23], "never this")  # in the middle, and not at a token's border in general
    stopped = fresh.generate(requests, SamplingOptions(stop=stop))
    assert far(module, requests, stopped) < 1e-3
    assert len(stopped[0].ids) < len(free[0].ids)
    for before, after in zip(free, stopped, strict=True):
        ends = [n for n in range(1, len(before.ids) + 1) if stop[0] in decode(before.ids[:n])]
        expected = before.ids[: ends[0]] if ends else before.ids
        assert after.ids == expected
        assert after.finish_reason == ("stop" if ends else before.finish_reason)


def test_a_stop_string_is_found_behind_any_number_of_tokens_without_text() -> None:
    stops = StopStrings(("ab",), Letters())
    ids = [0, 26, *[0] * 40, 27, 28]  # a, forty tokens that decode to nothing, b, c
    assert stops.length(ids) == 43
    assert not stops.reached(ids)  # too far apart for the quick look; the response only ends later
    assert stops.reached([0, 26, 27]) and stops.length([0, 26]) is None


def test_padded_vocabulary_is_never_sampled(open_sampler: Callable[..., Any]) -> None:
    module = llama(4)
    with torch.no_grad():
        module.lm_head.weight[120] = 0.0
        module.lm_head.weight[100:] *= 8  # ids the tokenizer lacks, likely in every context
    sampler = open_sampler(module, Letters(vocab_size=100))
    requests = ask(PROMPTS)
    for options in (SamplingOptions(), SamplingOptions(temperature=0), SamplingOptions(top_k=5)):
        responses = sampler.generate(requests, options)
        assert max(max(r.ids) for r in responses) < 100
    responses = sampler.generate(requests, SamplingOptions())
    for request, response in zip(
        requests, responses, strict=True
    ):  # the support is 100 ids, also in the log-probabilities
        own = sampler_vllm.module_logprobs(module, request.prompt_ids, response.ids, range(100, VOCAB))
        assert response.logprobs == pytest.approx(own, abs=1e-3)
    sampler.close()


def test_a_key_gives_the_same_tokens_in_any_batch(fresh: Any) -> None:
    def by_key(requests: Sequence[SampleRequest]) -> dict[SampleKey, list[int]]:
        responses = fresh.generate(requests, SamplingOptions())
        return {q.key: r.ids for q, r in zip(requests, responses, strict=True)}

    requests = ask(PROMPTS + PROMPTS)  # equal prompts under other keys
    together = by_key(requests)
    assert by_key(requests[::-1]) == together
    assert {k: v for request in requests for k, v in by_key([request]).items()} == together
    first, again = (together[requests[i].key] for i in (0, 6))
    assert first != again


def test_nothing_to_sample_is_fine(fresh: Any) -> None:
    assert fresh.generate([], SamplingOptions()) == []


# ------------------------------------------------------------------------------------------------------------- refusals


def test_prompts_that_cannot_be_sampled_from_are_named(fresh: Any) -> None:
    for prompt, found in (([9] * CONTEXT, "256 tokens"), ([], "0 tokens"), ([5, VOCAB], "id 128"), ([-1], "id -1")):
        with pytest.raises(DataError, match=found) as caught:
            fresh.generate([*ask([[3]]), *ask([prompt], first=7)], SamplingOptions())
        assert "p7" in str(caught.value)
    with pytest.raises(DataError, match="0 tokens"):
        fresh.generate(ask([[3]], 0), SamplingOptions())


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=0.001),
        SamplingOptions(temperature=3.0),
        SamplingOptions(top_p=0.0),
        SamplingOptions(top_k=-1),
        SamplingOptions(stop=("",)),
    ],
)
def test_options_that_vllm_would_change_are_refused(fresh: Any, options: SamplingOptions) -> None:
    with pytest.raises(ConfigError):
        fresh.generate(ask([[3]]), options)


def broken(module: Any, how: str) -> Iterator[tuple[str, Any]]:
    """The module's weights with one fault."""
    for name, tensor in module.named_parameters():
        if name == "model.layers.1.self_attn.q_proj.weight":
            if how == "missing":
                continue
            if how == "unknown":
                yield name.replace("q_proj", "q_prj"), tensor
                continue
            if how == "shape":
                yield name, tensor[:64]
                continue
            if how == "twice":
                yield name, tensor
            if how == "raises":
                raise OSError("the trainer went away")
        yield name, tensor


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("missing", "model.layers.1.self_attn.q_proj.weight"),
        ("unknown", r"q_prj.*q_proj"),
        ("shape", r"\(128, 128\).*\(64, 128\)"),
        ("twice", "twice"),
        ("raises", "went away"),
    ],
)
def test_a_failed_load_leaves_the_sampler_stale(fresh: Any, module: Any, how: str, found: str) -> None:
    with pytest.raises((EngineError, OSError), match=found):
        fresh.load(broken(module, how), 1)
    assert fresh.version == 0
    with pytest.raises(StaleWeightsError, match="version 1"):
        fresh.generate(ask([[3]]), SamplingOptions())
    fresh.load(module.named_parameters(), 1)
    assert fresh.version == 1
    requests = ask(PROMPTS)
    assert far(module, requests, fresh.generate(requests, SamplingOptions())) < 1e-3


def test_a_load_that_breaks_inside_vllm_can_be_repeated(
    fresh: Any, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sampler_vllm.Weights.checked

    def unusable(weights: Any, named: Any) -> Any:
        pairs = real(weights, named)
        pairs[5] = (pairs[5][0], pairs[5][1][:3])  # vLLM finds out in the middle of the model
        return pairs

    with monkeypatch.context() as patch:
        patch.setattr(sampler_vllm.Weights, "checked", unusable)
        with pytest.raises(EngineError, match="vLLM failed while loading version 4"):
            fresh.load(module.named_parameters(), 4)
    with pytest.raises(StaleWeightsError):
        fresh.generate(ask([[3]]), SamplingOptions())
    fresh.load(module.named_parameters(), 5)
    requests = ask(PROMPTS)
    assert far(module, requests, fresh.generate(requests, SamplingOptions())) < 1e-3


def test_a_tied_head_may_come_under_both_names_but_not_with_two_values() -> None:
    module = llama(5, tied=True)
    weights = sampler_vllm.Weights.of(module)
    assert dict(weights.aliases) == {"lm_head.weight": "model.embed_tokens.weight"}
    full = list(module.named_parameters(remove_duplicate=False))
    assert len(weights.checked(full)) == len(full) - 1
    with pytest.raises(EngineError, match="tied"):
        weights.checked([(n, t + 1 if n == "lm_head.weight" else t) for n, t in full])


def test_an_interrupted_call_leaves_nothing_behind(fresh: Any, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, steps = fresh._llm.llm_engine, []
    real = engine.step

    def step() -> Any:
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return real()

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", step)
        with pytest.raises(KeyboardInterrupt):
            fresh.generate(ask(PROMPTS, 100), SamplingOptions())
    shake(module, 9)
    fresh.load(module.named_parameters(), 1)  # would fail if requests still held cache blocks
    requests = ask(PROMPTS, 6)
    responses = fresh.generate(requests, SamplingOptions())
    assert far(module, requests, responses) < 1e-3 and all(len(r.ids) <= 6 for r in responses)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"gpu_memory_utilisation": 0.5}, "gpu_memory_utilization"),
        ({"dtype": "float16"}, "precision"),
        ({"tensor_parallel_size": 2}, "one device"),
    ],
)
def test_unknown_and_owned_options_are_refused(module: Any, options: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        VllmSampler(module, Letters(), Model(module, sampler_options=options))


def test_another_gpu_than_the_first_is_refused(module: Any) -> None:
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        VllmSampler(module, Letters(), Model(module, device="cuda:1"))


def test_what_vllm_cannot_run_is_said_in_its_words(module: Any) -> None:
    with pytest.raises(EngineError, match=r"LlamaForCausalLM.*max_model_len"):
        VllmSampler(module, Letters(), Model(module, max_context=4 * CONTEXT))


def test_a_model_that_vllm_computes_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = llama(6, tied=True)
    monkeypatch.setattr(sampler_vllm, "repack_shared", lambda model: None)  # the tied head keeps its first values
    with pytest.raises(EngineError, match="differ from the module's"):
        VllmSampler(module, Letters(), Model(module))


def test_without_vllm_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_vllm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"flowrl\[vllm\]"):
        sampler_vllm.import_vllm()


def test_an_engine_in_another_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(EngineError, match="VLLM_ENABLE_V1_MULTIPROCESSING=1"):
        sampler_vllm.import_vllm()


# -------------------------------------------------------------------------------------------------------- process


def test_several_samplers_live_and_close_apart(open_sampler: Callable[..., Any]) -> None:
    policy, judge = llama(7), llama(8, tied=True, hidden=192)
    requests = ask(PROMPTS, 8)
    first, second = open_sampler(policy), open_sampler(judge)
    assert far(policy, requests, first.generate(requests, SamplingOptions())) < 1e-3
    assert far(judge, requests, second.generate(requests, SamplingOptions())) < 1e-3
    first.close()
    first.close()
    with pytest.raises(EngineError, match="closed"):
        first.generate(requests, SamplingOptions())
    shake(judge, 1)
    second.load(judge.named_parameters(), 1)
    assert far(judge, requests, second.generate(requests, SamplingOptions())) < 1e-3
    second.close()
    third = open_sampler(policy)
    assert far(policy, requests, third.generate(requests, SamplingOptions())) < 1e-3
    third.close()


def test_bf16_samples_from_rounded_weights(open_sampler: Callable[..., Any]) -> None:
    module = llama(1)
    sampler = open_sampler(module, precision="bf16", max_context=64)
    requests = ask(PROMPTS, 8)
    assert far(module, requests, sampler.generate(requests, SamplingOptions())) < 0.5
    with pytest.raises(DataError, match="context of 64"):
        sampler.generate(ask([[3] * 64]), SamplingOptions())
    sampler.close()


def test_it_opens_where_numba_is_loaded(open_sampler: Callable[..., Any]) -> None:
    """The kernels of experience tables load numba, and vLLM's look into every module stumbles over it."""
    numba = pytest.importorskip("numba")
    assert numba.njit(lambda number: number + 1)(1) == 2
    sampler = open_sampler(llama(1))
    sampler.close()
    assert numba.njit(lambda number: number + 2)(1) == 3, "numba still compiles"


def test_opening_leaves_the_process_as_it_was(open_sampler: Callable[..., Any]) -> None:
    def state() -> tuple[Any, ...]:
        inherited = {name: os.environ.get(name) for name in sampler_vllm.INHERITED}
        return (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate(), inherited)

    module, threads = llama(1), torch.set_num_threads
    before = state()
    sampler = open_sampler(module)
    assert state() == before and torch.set_num_threads is threads
    assert module.training is False
    folder = sampler._folder.name
    caches = sampler._llm.llm_engine.collective_rpc(lambda worker: list(worker.model_runner.kv_caches))[0]
    assert all(cache.untyped_storage().nbytes() for cache in caches)
    sampler.close()
    assert not any(cache.untyped_storage().nbytes() for cache in caches)
    assert not os.path.exists(folder)


def test_samples_beside_process_groups_of_the_job() -> None:
    module = llama(4)
    options = SamplingOptions()
    alone = VllmSampler(module, Letters(), Model(module))
    expected = alone.generate(ask(PROMPTS), options)
    alone.close()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = dist.new_group([0])
        sampler = VllmSampler(module, Letters(), Model(module))
        assert sampler.generate(ask(PROMPTS), options) == expected
        after = dist.new_group([0])
        names = [int(group.group_name) for group in (before, after)]
        assert names[1] == names[0] + 1  # torch numbers groups, alike on ranks that sample and on those that do not
        sampler.close()
        one = torch.ones(1)
        for group in (None, before, after):
            dist.all_reduce(one, group=group)
            assert dist.get_world_size(group) == 1
    finally:
        dist.destroy_process_group()
