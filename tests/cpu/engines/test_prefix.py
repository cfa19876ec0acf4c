"""A prompt that runs once for all its responses gives the numbers and gradients of whole rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import flowrl as fr
from examples.tiny import CharTokenizer
from flowrl.engines.host_torch import TorchEngine, TorchHost
from flowrl.engines.packing import Sequences, prompt_units
from flowrl.engines.prefix import can_split, split_block
from flowrl.engines.protocol import TokenRows, UpdateJob
from flowrl.schema.ragged import Ragged
from flowrl_operators import losses

SIZES = {"vocab_size": 14, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def gpt2() -> torch.nn.Module:
    config = GPT2Config(vocab_size=14, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(config)


FAMILIES: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=4)),
    "gpt2": gpt2,
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2)),
    "mistral with a window": lambda: MistralForCausalLM(
        MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4)
    ),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=4)),
}


def rows(prompts: list[int], group: int, seed: int = 0) -> TokenRows:
    """`group` responses to each prompt; prompt i has prompts[i] tokens."""
    generator = np.random.default_rng(seed)
    made = [generator.integers(3, 14, length) for length in prompts]
    order = generator.permutation(len(prompts) * group)
    prompt_ids = Ragged.of([made[i // group] for i in order], np.int32)
    response_ids = Ragged.of([generator.integers(3, 14, generator.integers(1, 6)) for _ in order], np.int32)
    return TokenRows(prompt_ids, response_ids, np.full(len(order), 0.8, np.float32))


def opened(family: str, *, shares: bool, head: str = "lm", micro_batch_tokens: int = 16384) -> TorchHost:
    torch.manual_seed(0)
    model = fr.Model(
        FAMILIES[family](), tokenizer=CharTokenizer(), head=head, device="cpu", optimizer=fr.AdamW(lr=1e-2),
        micro_batch_tokens=micro_batch_tokens,
    )  # fmt: skip
    host = TorchEngine().open("policy", model, frozenset({"update"}), seed=0)
    assert isinstance(host, TorchHost)
    assert host.forward.shares_prompts, f"{family} could share prompts and does not"
    host.forward.shares_prompts = shares
    return host


@pytest.mark.parametrize("family", FAMILIES)
def test_scoring_gives_the_same_numbers(family: str) -> None:
    table = rows([5, 3, 7], 4)
    shared, whole = opened(family, shares=True).logprobs(table), opened(family, shares=False).logprobs(table)
    np.testing.assert_allclose(shared.values, whole.values, atol=1e-5)


@pytest.mark.parametrize("micro_batch_tokens", [16384, 60])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_ends_at_the_same_weights(family: str, micro_batch_tokens: int) -> None:
    table = rows([5, 3, 7], 4)
    generator = np.random.default_rng(1)
    count = len(table.response_ids.values)
    job = UpdateJob(
        rows=table,
        mask=Ragged.like(generator.random(count) < 0.8, table.response_ids),
        columns={"advantage": generator.normal(size=len(table)).astype(np.float32)},
        loss=losses.ppo_clip(0.2) + 0.01 * losses.entropy_bonus(),
    )

    def weights(shares: bool) -> dict[str, torch.Tensor]:
        host = opened(family, shares=shares, micro_batch_tokens=micro_batch_tokens)
        report = host.update(job)
        assert report.steps == 1
        return {name: value.detach().clone() for name, value in host.module.named_parameters()}

    shared, whole = weights(True), weights(False)
    for name, value in whole.items():
        # Adam's first step divides by the gradient's size, so only gradients far from 0 can be compared through it
        assert (shared[name] - value).abs().median() < 1e-5, name


def test_gradients_are_those_of_whole_rows() -> None:
    table = rows([6, 4], 8)
    grads = []
    for shares in (True, False):
        host = opened("llama", shares=shares)
        batch = host._batches(table)[0]
        hidden = host.forward.hidden_of(batch)
        targets = torch.from_numpy(batch.target_T)
        logprobs, _ = host.forward.stats(hidden, targets, None, with_entropy=False)
        order = torch.from_numpy(np.argsort(batch.flat_T))
        (logprobs[order] * torch.linspace(-1, 1, len(order))).sum().backward()
        grads.append({name: p.grad.clone() for name, p in host.module.named_parameters() if p.grad is not None})
    for name, grad in grads[1].items():
        torch.testing.assert_close(grads[0][name], grad, atol=1e-5, rtol=1e-4)


def test_values_share_prompts_too() -> None:
    table = rows([5, 3], 4)
    shared, whole = (opened("llama", shares=s, head="value").values(table).values for s in (True, False))
    np.testing.assert_allclose(shared, whole, atol=1e-5)


def test_the_parts_hold_every_prompt_once_and_fewer_tokens() -> None:
    ids = np.array([[1, 5, 6, 7, 8, 0], [1, 5, 6, 9, 0, 0], [1, 5, 6, 7, 3, 4]])
    split = split_block(ids, np.array([3, 3, 3]), np.array([5, 4, 6]), fill=0)
    assert split is not None
    assert split.prompt_ids.tolist() == [[1, 5]] and split.prompt_B.tolist() == [0, 0, 0]
    assert split.response_ids.tolist() == [[6, 7, 8, 0], [6, 9, 0, 0], [6, 7, 3, 4]]


def test_no_split_where_it_saves_nothing() -> None:
    different = np.arange(18).reshape(3, 6)
    assert split_block(different, np.array([3, 3, 3]), np.array([6, 6, 6]), fill=0) is None
    one_token = np.array([[1, 5, 6], [1, 7, 8]])
    assert split_block(one_token, np.array([1, 1]), np.array([3, 3]), fill=0) is None


def test_rows_of_a_prompt_come_into_one_micro_batch_unless_they_are_too_many() -> None:
    table = rows([4, 4], 3)
    sequences = Sequences.of(table, num_ids=14)
    every = np.arange(6)
    units = prompt_units(sequences, every, sequences.lengths, 1000)
    assert units is not None and sorted(np.bincount(units).tolist()) == [3, 3]
    assert prompt_units(sequences, every, sequences.lengths, 10) is None
    alone = rows([4, 5, 6], 1)
    assert prompt_units(Sequences.of(alone, num_ids=14), np.arange(3), np.array([5, 6, 7]), 1000) is None


def test_an_architecture_without_such_a_cache_runs_whole_rows() -> None:
    class Bare(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> tuple[torch.Tensor]:
            return (torch.nn.functional.one_hot(input_ids, 14).float(),)

    assert not can_split(Bare(), 14, torch.device("cpu"))


def test_the_probe_tells_rounding_from_a_wrong_architecture() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(**{**SIZES, "hidden_size": 256, "num_hidden_layers": 6}, num_key_value_heads=4)
    )
    base = model.to(torch.bfloat16).eval().base_model
    assert can_split(base, 14, torch.device("cpu"))
    base = base.to(torch.float32)
    assert can_split(base, 14, torch.device("cpu"))

    class Shifted(torch.nn.Module):
        """Loses the positions it is given, as some caches do."""

        def forward(self, position_ids: torch.Tensor | None = None, **inputs: object) -> object:
            return base(**inputs, position_ids=None if position_ids is None else position_ids * 0)

    assert not can_split(Shifted(), 14, torch.device("cpu"))
