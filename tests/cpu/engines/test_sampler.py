"""Sampling with Transformers modules: right distributions, right ends, and draws that belong to their keys."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from flowrl.engines.protocol import SampleKey, SampleRequest, SamplingOptions
from flowrl.engines.sampler_transformers import TransformersSampler, draw, uniforms
from flowrl.errors import ConfigError, DataError, EngineError, StaleWeightsError
from flowrl.model import Model

SHORT, LONGER, LONGEST = [5, 6, 7], [3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]


def test_padding_changes_nothing(kit, family):
    # the short prompt gets 0, 3 and 8 pads
    host = kit.open(family(), "generate")
    wanted = kit.requests([SHORT])[0]
    found = []
    for company in ([], [LONGER], [LONGEST]):
        others = [SampleRequest(p, 8, SampleKey(9, 9, "other", str(i), 0)) for i, p in enumerate(company)]
        found.append(host.generate([wanted, *others], SamplingOptions())[0])
    assert found[0].ids == found[1].ids == found[2].ids
    for padded in found[1:]:
        np.testing.assert_allclose(padded.logprobs, found[0].logprobs, atol=1e-5)


def test_the_padding_test_could_fail(kit):
    # with absolute positions a shift by three is visible, so equal numbers above mean right positions
    module = kit.families["gpt2"]()
    ids = torch.tensor([SHORT])
    shifted = module(input_ids=ids, position_ids=torch.tensor([[3, 4, 5]])).logits
    assert (module(input_ids=ids).logits - shifted).abs().max() > 1e-2


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_logprobs_are_those_of_the_trainer(kit, family, temperature):
    host = kit.open(family(), "generate", "logprobs")
    requests = kit.requests([SHORT, LONGER, LONGEST], n=3, max_tokens=12)
    sampled = host.generate(requests, SamplingOptions(temperature=temperature))
    rows = kit.rows([r.prompt_ids for r in requests], [s.ids for s in sampled], temperature)
    ours = host.logprobs(rows)
    for request, answer, found in zip(requests, sampled, ours, strict=True):
        np.testing.assert_allclose(answer.logprobs, found, atol=1e-5)
        plain = kit.plain_logprobs(host.module, request.prompt_ids, answer.ids, temperature).detach()
        np.testing.assert_allclose(found, plain, atol=1e-5)


def test_a_draw_belongs_to_its_key(kit, family):
    requests = kit.requests([SHORT, LONGER, LONGEST, [4]], n=4, max_tokens=10)
    options = SamplingOptions(temperature=1.2)
    whole = kit.open(family(), "generate").generate(requests, options)
    backwards = kit.open(family(), "generate").generate(requests[::-1], options)[::-1]
    tight = kit.open(family(), "generate", sample_batch_tokens=40).generate(requests, options)
    alone = [kit.open(family(), "generate").generate([r], options)[0] for r in requests[:3]]
    assert [s.ids for s in whole] == [s.ids for s in backwards] == [s.ids for s in tight]
    assert [s.ids for s in whole[:3]] == [s.ids for s in alone]


def test_streams_are_distinct_and_follow_the_seed(kit):
    host = kit.open(kit.families["llama"](), "generate")
    options = SamplingOptions()

    def ids(seed, parts=1):
        requests = kit.requests([SHORT], n=4, max_tokens=12, seed=seed)
        split = np.array_split(np.arange(4), parts)
        return [s.ids for part in split for s in host.generate([requests[i] for i in part], options)]

    assert len({tuple(i) for i in ids(0)}) == 4
    assert ids(0) == ids(0) == ids(0, parts=2)
    assert ids(0) != ids(1)


def test_fewer_tokens_is_a_prefix(kit):
    host = kit.open(kit.families["llama"](), "generate", tokenizer=kit.letters(eos_ids=frozenset()))
    short = host.generate(kit.requests([SHORT], n=3, max_tokens=4), SamplingOptions())
    full = host.generate(kit.requests([SHORT], n=3, max_tokens=9), SamplingOptions())
    assert [s.ids for s in short] == [s.ids[:4] for s in full]
    assert [len(s.ids) for s in full] == [9, 9, 9]


def test_rows_that_end_leave_the_batch(kit):
    # many rows of very different lengths: what is left must go on with its own cache, positions and stream
    tokenizer = kit.letters(eos_ids=frozenset({2, 5, 9}))
    host = kit.open(kit.families["gpt2"](), "generate", "logprobs", tokenizer=tokenizer)
    requests = [replace(r, max_tokens=3 + i % 11) for i, r in enumerate(kit.requests([SHORT, LONGEST, [4, 4]], n=9))]
    together = host.generate(requests, SamplingOptions())
    rows = kit.rows([r.prompt_ids for r in requests], [s.ids for s in together])
    np.testing.assert_allclose(np.concatenate([s.logprobs for s in together]), host.logprobs(rows).values, atol=1e-5)
    assert [s.ids for s in together] == [host.generate([r], SamplingOptions())[0].ids for r in requests]
    for request, answer in zip(requests, together, strict=True):
        ends = [i for i in answer.ids if i in tokenizer.eos_ids]
        assert (answer.finish_reason == "stop") == bool(ends)
        assert ends == answer.ids[-1:] if ends else len(answer.ids) == request.max_tokens


def test_recurrent_models_sample_what_they_score(kit):
    # their state would carry padding on, and their cache has other methods
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=20, hidden_size=32, state_size=4, num_hidden_layers=2, initializer_range=0.3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        host = kit.open(MambaForCausalLM(config), "generate", "logprobs")
    requests = kit.requests([SHORT, LONGER, LONGEST, [4, 5, 6]], n=5, max_tokens=9)
    sampled = host.generate(requests, SamplingOptions())
    rows = kit.rows([r.prompt_ids for r in requests], [s.ids for s in sampled])
    found = host.logprobs(rows)
    np.testing.assert_allclose(np.concatenate([s.logprobs for s in sampled]), found.values, atol=1e-5)
    for request, answer, row in zip(requests, sampled, found, strict=True):
        np.testing.assert_allclose(
            row, kit.plain_logprobs(host.module, request.prompt_ids, answer.ids).detach(), atol=1e-5
        )


# --- distributions ----------------------------------------------------------------------------------------------------


def test_temperature_scales_the_distribution_reported():
    logits = torch.tensor([[0.7, 0.2, 0.1]]).log()
    # cumulative probabilities at temperature 0.5 are 0.907, 0.981, 1: a draw of 0.95 takes token 1
    token, logprob = draw(logits, torch.tensor([0.95], dtype=torch.float64), SamplingOptions(temperature=0.5))
    assert token.item() == 1
    assert logprob.item() == pytest.approx(-2.6027, abs=1e-4)


def test_greedy_reports_logprobs_at_temperature_one():
    logits = torch.tensor([[0.2, 0.7, 0.1]]).log()
    token, logprob = draw(logits, torch.tensor([0.0], dtype=torch.float64), SamplingOptions(temperature=0.0))
    assert token.item() == 1
    assert logprob.item() == pytest.approx(math.log(0.7), abs=1e-6)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (SamplingOptions(top_k=2), [1, 3]),
        (SamplingOptions(top_p=0.65), [1, 3]),  # 0.4 is not enough, 0.7 is
        (SamplingOptions(top_p=0.4), [1]),
        (SamplingOptions(top_k=3, top_p=0.7), [1, 3]),  # of 0.4, 0.3, 0.2 renormalised
        (SamplingOptions(top_p=1e-9), [1]),
        (SamplingOptions(top_k=99), [0, 1, 2, 3]),
    ],
)
def test_restricted_sampling(options, kept):
    p = torch.tensor([0.1, 0.4, 0.2, 0.3])
    uniform = torch.linspace(0, 1 - 1e-9, 400, dtype=torch.float64)
    tokens, logprobs = draw(p.log().repeat(400, 1), uniform, options)
    assert sorted(set(tokens.tolist())) == kept
    expected = (p / p[kept].sum()).log()[tokens]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_top_p_stops_when_it_is_reached():
    p = torch.tensor([0.125, 0.5, 0.25, 0.125])  # sums are exact
    uniform = torch.linspace(0, 1 - 1e-9, 100, dtype=torch.float64)
    for top_p, kept in ((0.5, {1}), (0.75, {1, 2})):
        tokens, _ = draw(p.log().repeat(100, 1), uniform, SamplingOptions(top_p=top_p))
        assert set(tokens.tolist()) == kept


def test_frequencies_are_the_probabilities():
    p = torch.tensor([0.5, 0.0, 0.25, 0.125, 0.125])
    u = torch.from_numpy(uniforms(range(20_000), 1)[:, 0])
    tokens, _ = draw(p.log().repeat(len(u), 1), u, SamplingOptions())
    counts = np.bincount(tokens, minlength=5)
    assert counts[1] == 0
    expected = p.numpy() * len(u)
    chi2 = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert chi2 < 16.3  # 3 degrees of freedom, 99.9 %


def test_uniform_streams():
    numbers = uniforms([1, 2, 2**63 - 1], 4096)
    assert numbers.min() >= 0 and numbers.max() < 1
    np.testing.assert_array_equal(uniforms([2], 7)[0], numbers[1, :7])
    np.testing.assert_allclose(numbers.mean(1), 0.5, atol=0.02)
    assert abs(np.corrcoef(numbers)[np.triu_indices(3, 1)]).max() < 0.05
    assert abs(np.corrcoef(numbers[0, :-1], numbers[0, 1:])[0, 1]) < 0.05


def test_ids_beyond_the_tokenizer_are_never_sampled(kit):
    # an embedding padded from 100 to 128 rows, with one of the padding rows by far the likeliest
    module = kit.families["llama"](vocab_size=128)
    with torch.no_grad():
        module.lm_head.weight[120] = module.lm_head.weight[:100].mean(0) + 20 * torch.randn(
            32, generator=torch.Generator().manual_seed(0)
        )
        module.lm_head.weight[121] = -module.lm_head.weight[120]
    host = kit.open(module, "generate", "logprobs", "top_logprobs", tokenizer=kit.letters(vocab_size=100))
    requests = kit.requests([SHORT, [4]], n=20, max_tokens=10)
    for temperature in (0.0, 1.0):
        sampled = host.generate(requests, SamplingOptions(temperature=temperature))
        assert max(i for s in sampled for i in s.ids) < 100
        rows = kit.rows([r.prompt_ids for r in requests], [s.ids for s in sampled])
        np.testing.assert_allclose(host.logprobs(rows).values, np.concatenate([s.logprobs for s in sampled]), atol=1e-5)
    ids, nats = host.top_logprobs(rows, 100)
    assert ids.values.max() < 100
    np.testing.assert_allclose(np.exp(nats.values).sum(1), 1, atol=1e-4)


# --- ends -------------------------------------------------------------------------------------------------------------


def test_any_end_token_ends_a_response(kit):
    # 7 and 9 end a response: "e" leads to "h", which is 7
    tokenizer = kit.letters(eos_ids=frozenset({7, 9}))
    host = kit.open(kit.chain("de", "eh", "hh"), "generate", tokenizer=tokenizer)
    (answer,) = host.generate(kit.requests([[3]], max_tokens=6), SamplingOptions())
    assert (answer.ids, answer.finish_reason) == ([4, 7], "stop")
    (cut,) = host.generate(kit.requests([[3]], max_tokens=1), SamplingOptions())
    assert (cut.ids, cut.finish_reason) == ([4], "length")


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (("ef",), "def", "stop"),
        (("zz", "g"), "defg", "stop"),
        (("xx",), "defgdefg", "length"),
        (("gde",), "defgde", "stop"),
    ],
)
def test_a_stop_string_ends_a_response_and_nothing_is_added(kit, stop, text, reason):
    host = kit.open(kit.chain("bd", "de", "ef", "fg", "gd"), "generate")
    (answer,) = host.generate(kit.requests([[1]], max_tokens=8), SamplingOptions(stop=stop))
    assert host.tokenizer.decode(answer.ids) == text
    assert answer.finish_reason == reason
    assert len(answer.ids) == len(answer.logprobs) == len(text)


def test_stop_strings_across_many_tokens_and_rows(kit):
    host = kit.open(kit.families["llama"](), "generate", tokenizer=kit.letters(eos_ids=frozenset()))
    requests = kit.requests([SHORT, LONGER], n=10, max_tokens=40)
    free = host.generate(requests, SamplingOptions())
    stop = ("dd", "fk", "o")
    for answer, before in zip(host.generate(requests, SamplingOptions(stop=stop)), free, strict=True):
        text = host.tokenizer.decode(before.ids)
        first = min((i for i in range(1, len(text) + 1) if any(s in text[:i] for s in stop)), default=None)
        assert answer.ids == before.ids[:first]
        assert answer.finish_reason == ("length" if first is None else "stop")


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_prompts_that_do_not_fit_are_named(kit):
    host = kit.open(kit.families["llama"](), "generate", max_context=12)
    with pytest.raises(DataError, match=r"prompt '1'.*has 12 tokens.*holds 12"):
        host.generate(kit.requests([SHORT, [4] * 12]), SamplingOptions())
    (answer,) = host.generate(kit.requests([[4] * 11]), SamplingOptions())
    assert len(answer.ids) == 1
    with pytest.raises(DataError, match="prompt '0'.*is empty"):
        host.generate(kit.requests([[]]), SamplingOptions())
    with pytest.raises(DataError, match="token id 77.*ids 0 to 19"):
        host.generate(kit.requests([[4, 77]]), SamplingOptions())


def test_weights_that_are_not_finite_are_reported(kit):
    module = kit.families["llama"]()
    with torch.no_grad():
        module.model.norm.weight[0] = torch.nan
    host = kit.open(module, "generate")
    with pytest.raises(EngineError, match="not finite"):
        host.generate(kit.requests([SHORT]), SamplingOptions())


def test_unknown_sampler_options_are_refused(kit):
    with pytest.raises(ConfigError, match="gpu_memory"):
        kit.open(kit.families["llama"](), "generate", sampler_options={"gpu_memory": 1})


def test_no_requests(kit):
    assert kit.open(kit.families["llama"](), "generate").generate([], SamplingOptions()) == []


# --- weights of a sampler with a module of its own --------------------------------------------------------------------


@pytest.fixture
def sampler(kit):
    return TransformersSampler(kit.families["llama"](seed=1), kit.letters(), Model("own", tokenizer=kit.letters()))


def test_load_writes_everything_in_place(kit, sampler):
    trained = kit.families["llama"](seed=0)
    places = {n: p.data_ptr() for n, p in sampler.module.named_parameters()}
    with torch.no_grad():
        for parameter in sampler.module.parameters():
            parameter.fill_(torch.nan)
    sampler.load(trained.named_parameters(), 3)
    assert sampler.version == 3
    assert {n: p.data_ptr() for n, p in sampler.module.named_parameters()} == places
    for (name, ours), (_, theirs) in zip(sampler.module.named_parameters(), trained.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    requests = kit.requests([SHORT, LONGER])
    assert [s.ids for s in sampler.generate(requests, SamplingOptions())] == [
        s.ids for s in kit.open(trained, "generate").generate(requests, SamplingOptions())
    ]


def test_an_incomplete_load_leaves_it_stale(kit, sampler):
    full = dict(kit.families["llama"](seed=0).named_parameters())
    name = "model.layers.1.mlp.up_proj.weight"
    wrong_loads = {
        "missing": [(n, t) for n, t in full.items() if n != name],
        "unknown": [(n if n != name else name.replace("up", "upp"), t) for n, t in full.items()],
        "shape": [(n, t if n != name else t[:3]) for n, t in full.items()],
    }
    for pairs in wrong_loads.values():
        with pytest.raises(EngineError, match="up"):
            sampler.load(pairs, 1)
        with pytest.raises(StaleWeightsError):
            sampler.generate(kit.requests([SHORT]), SamplingOptions())

    def breaks():
        yield from list(full.items())[:2]
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        sampler.load(breaks(), 1)
    with pytest.raises(StaleWeightsError):
        sampler.generate(kit.requests([SHORT]), SamplingOptions())
    assert sampler.version == 0
    sampler.load(full.items(), 2)
    assert len(sampler.generate(kit.requests([SHORT]), SamplingOptions())) == 1


def test_a_tied_head_may_come_under_both_names(kit):
    build = kit.families["llama"]
    own = TransformersSampler(build(seed=1, tie_word_embeddings=True), kit.letters(), Model("own"))
    trained = build(seed=0, tie_word_embeddings=True)
    own.load(trained.named_parameters(remove_duplicate=False), 1)
    own.load(trained.named_parameters(), 2)
    assert own.module.lm_head.weight.data_ptr() == own.module.model.embed_tokens.weight.data_ptr()
    assert torch.equal(own.module.lm_head.weight, trained.lm_head.weight)
