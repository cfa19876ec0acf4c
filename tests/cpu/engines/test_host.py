"""Values, scores, top tokens, blending, and the sampler's version."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

import flowrl as fr
from flowrl.engines import host_torch
from flowrl.engines.protocol import SamplingOptions
from flowrl.errors import ConfigError, EngineError
from flowrl.model import AdamW


@fr.loss
def nll(logprobs):
    return -logprobs


@fr.loss
def value_mse(values, returns: fr.TOKEN.f32):
    return (values - returns) ** 2


@fr.loss(locality=fr.group("pair"), per="sample", on_policy=False)
def bradley_terry(scores, pair: fr.SAMPLE.str, chosen: fr.SAMPLE.bool):
    best = {p: scores[i] for i, p in enumerate(pair) if chosen[i]}
    worst = {p: scores[i] for i, p in enumerate(pair) if not chosen[i]}
    return torch.stack([-torch.nn.functional.logsigmoid(best[p] - worst[p]) for p in pair])


# --- forward passes ---------------------------------------------------------------------------------------------------


def test_logprobs_equal_row_by_row(kit, family):
    rows = kit.random_rows(9, seed=2)
    for budget in (1, 20, 1000):
        host = kit.open(family(), "logprobs", sample_batch_tokens=budget)
        found = host.logprobs(rows)
        assert found.dtype == np.float32
        for i, row in enumerate(found):
            plain = kit.plain_logprobs(
                host.module, rows.prompt_ids[i], rows.response_ids[i], float(rows.temperature[i])
            )
            np.testing.assert_allclose(row, plain.detach(), atol=1e-5)


def test_empty_responses_and_tables(kit):
    host = kit.open(kit.families["llama"](), "logprobs")
    assert host.logprobs(kit.rows([[3], [4, 5], [6]], [[], [7], []])).lengths.tolist() == [0, 1, 0]
    assert len(host.logprobs(kit.rows([], []))) == 0
    ids, nats = host.top_logprobs(kit.rows([[3]], [[]]), 4)
    assert ids.values.shape == nats.values.shape == (0, 4)


def test_top_logprobs(kit, family):
    host = kit.open(family(), "top_logprobs", "logprobs")
    rows = kit.random_rows(5, seed=3)
    ids, nats = host.top_logprobs(rows, 20)
    assert (ids.dtype, nats.dtype) == (np.int32, np.float32)
    assert (np.diff(nats.values, axis=1) <= 0).all()
    np.testing.assert_allclose(np.exp(nats.values).sum(1), 1, atol=1e-5)
    chosen = ids.values == rows.response_ids.values[:, None]
    np.testing.assert_allclose(nats.values[chosen], host.logprobs(rows).values, atol=1e-5)
    few = host.top_logprobs(rows, 3)
    np.testing.assert_array_equal(few[0].values, ids.values[:, :3])
    with pytest.raises(ConfigError, match="k from 1 to 20; found 21"):
        host.top_logprobs(rows, 21)


def test_a_value_is_read_before_its_token(kit, family):
    # what comes after the position read must not matter; what stands there must
    module = family()
    host = kit.open(module, "values", "update", head="value")
    rows = kit.rows([[3, 4], [3, 4]], [[5, 6, 7], [5, 6, 9]])
    assert host.values(rows).values.tolist() == [0.0] * 6  # a new head predicts 0
    with torch.no_grad():
        for parameter in host.forward.output.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    first, second = host.values(rows)
    np.testing.assert_allclose(first, second, atol=1e-6)
    states = module.base_model(torch.tensor([[3, 4, 5, 6, 7]]))[0]
    np.testing.assert_allclose(first, host.forward.output(states)[0, 1:4, 0].detach(), atol=1e-5)
    assert not np.allclose(first[0], first[1])


def test_a_critic_learns(kit, family):
    host = kit.open(family(), "values", "update", head="value", optimizer=AdamW(lr=1e-2))
    rows = kit.random_rows(6, seed=4)
    returns = kit.random_rows(6, seed=4).response_ids.astype(np.float32) * 0.1
    job = kit.job(rows, value_mse(), columns={"returns": returns})
    losses = [host.update(job).metrics["loss"].mean for _ in range(40)]
    assert losses[-1] < 0.2 * losses[0]
    with pytest.raises(EngineError, match="live column 'logprobs'.*head='lm'.*head='value'"):
        host.update(kit.job(rows, nll()))


def test_a_score_is_read_at_the_last_token(kit, family):
    module = family()
    host = kit.open(module, "score", "update", head="reward")
    rows = kit.rows([[3, 4], [5], [6]], [[5, 6, 7], [8], []])
    found = host.score(rows)
    assert found.shape == (3,) and found.dtype == np.float32
    for i, ids in enumerate(([3, 4, 5, 6, 7], [5, 8], [6])):
        states = module.base_model(torch.tensor([ids]))[0]
        np.testing.assert_allclose(found[i], host.forward.output(states)[0, -1, 0].detach(), atol=1e-5)


def test_a_reward_model_learns(kit, family):
    host = kit.open(family(), "score", "update", head="reward", optimizer=AdamW(lr=3e-3), micro_batch_tokens=30)
    rows = kit.random_rows(12, seed=4)
    pair = np.array([f"p{i // 2}" for i in range(12)], dtype=object)
    columns = {"pair": pair, "chosen": np.arange(12) % 2 == 0}
    job = kit.job(rows, bradley_terry(), columns=columns, group_by=pair)
    for _ in range(30):
        host.update(job)
    scores = host.score(rows)
    assert (scores[::2] > scores[1::2]).all()


@pytest.mark.parametrize("family_name", ["llama", "gpt2"])
def test_heads_save_and_load_with_transformers(kit, family_name, tmp_path):
    rows = kit.random_rows(4, seed=1)
    for head, use, auto in (
        ("value", "values", AutoModelForTokenClassification),
        ("reward", "score", AutoModelForSequenceClassification),
    ):
        host = kit.open(kit.families[family_name](), use, "update", head=head)
        with torch.no_grad():
            host.forward.output.weight.copy_(torch.randn(1, 32, generator=torch.Generator().manual_seed(2)))
        path = str(tmp_path / head)
        host.save(path)
        assert auto.from_pretrained(path).config.num_labels == 1
        again = kit.open(path, use, head=head)  # a trained head, so it may be used without training
        before, after = getattr(host, use)(rows), getattr(again, use)(rows)
        np.testing.assert_allclose(getattr(before, "values", before), getattr(after, "values", after), atol=1e-5)


def test_a_head_needs_the_states_it_reads(kit):
    class Headed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.score = torch.nn.Linear(4, 1)

    with pytest.raises(EngineError, match="Headed has no base_model"):
        kit.open(Headed(), "score", head="reward")


def test_an_untrained_head_is_not_used_for_scoring(kit):
    with pytest.raises(EngineError, match="no trained reward head"):
        kit.open(kit.families["llama"](), "score", head="reward")


# --- weights ----------------------------------------------------------------------------------------------------------


def test_blend(kit):
    build = kit.families["llama"]
    target, source = kit.open(build(seed=0), "logprobs", name="ref"), kit.open(build(seed=1), "update")
    before, theirs = target.weights.export(), source.weights.export()
    pointers = [p.data_ptr() for p in target.module.parameters()]
    target.blend(source, 0.75)
    for name, array in target.weights.export().items():
        np.testing.assert_allclose(array, 0.75 * before[name] + 0.25 * theirs[name], atol=1e-6, err_msg=name)
    target.blend(source, 0.0)
    for name, array in target.weights.export().items():
        np.testing.assert_array_equal(array, theirs[name])
    assert target.version == 2
    assert pointers == [p.data_ptr() for p in target.module.parameters()]


def test_blend_names_what_does_not_fit(kit):
    target = kit.open(kit.families["llama"](), "logprobs", name="ref")
    with pytest.raises(EngineError, match=r"'policy' has no parameter 'model\.embed_tokens\.weight'"):
        target.blend(kit.open(kit.families["gpt2"](), "source"), 0.5)
    with pytest.raises(EngineError, match=r"layers\.2.*'ref' lacks"):
        target.blend(kit.open(kit.families["llama"](num_hidden_layers=3), "source"), 0.5)
    with pytest.raises(EngineError, match="shape"):
        target.blend(kit.open(kit.families["llama"](intermediate_size=40), "source"), 0.5)
    assert target.version == 0


def test_a_slow_average_moves_in_bf16(kit):
    # steps of a thousandth of the difference are below bf16's resolution; the masters keep them
    ones = kit.chain(size=4)
    with torch.no_grad():
        ones.table.fill_(1.0)
    target = kit.open(ones, "logprobs", precision="bf16", tokenizer=kit.letters(vocab_size=4))
    with torch.no_grad():
        ones.table.fill_(0.0)
    source = kit.open(ones, "source", precision="bf16", tokenizer=kit.letters(vocab_size=4))
    for _ in range(500):
        target.blend(source, 0.999)
    np.testing.assert_allclose(target.weights.export()["table"], 0.999**500, atol=1e-4)
    np.testing.assert_allclose(target.module.table.float(), 0.999**500, atol=3e-3)
    resumed = kit.open(ones, "logprobs", precision="bf16", tokenizer=kit.letters(vocab_size=4))
    resumed.restore(target.state())
    for host in (target, resumed):
        host.blend(source, 0.999)
    np.testing.assert_array_equal(resumed.weights.export()["table"], target.weights.export()["table"])


def test_the_sampler_uses_the_newest_weights(kit):
    host = kit.open(kit.families["llama"](), "generate", "update", "logprobs", optimizer=AdamW(lr=1e-1))
    requests = kit.requests([[5, 6, 7]], n=4)
    before = host.generate(requests, SamplingOptions())
    host.update(kit.job(kit.rows([r.prompt_ids for r in requests], [s.ids for s in before]), nll()))
    assert host.version == 1
    after = host.generate(requests, SamplingOptions())
    rows = kit.rows([r.prompt_ids for r in requests], [s.ids for s in after])
    np.testing.assert_allclose(np.concatenate([s.logprobs for s in after]), host.logprobs(rows).values, atol=1e-5)
    assert before != after


class FakeVllm:
    """Takes weights as the vLLM sampler does; module:VllmSampler of the real one is imported only when used."""

    def __init__(self, module, tokenizer, model, team):
        self.version, self.loads, self.closed = 0, [], False

    def load(self, named, version):
        self.loads.append(sorted(name for name, _ in named))
        self.version = version

    def generate(self, requests, options):
        return []

    def close(self):
        self.closed = True


def test_another_sampler_is_loaded_when_weights_have_changed(kit, monkeypatch):
    monkeypatch.setattr(host_torch, "VLLM_SAMPLER", f"{__name__}:FakeVllm")
    monkeypatch.setitem(__import__("sys").modules, __name__, __import__("types").SimpleNamespace(FakeVllm=FakeVllm))
    host = kit.open(kit.families["llama"](), "generate", "update", sampler="vllm", sampler_options={"max_model_len": 9})
    host.generate([], SamplingOptions())
    sampler = host._sampler
    assert sampler.loads == []  # it was built from the module's weights of this version
    job = kit.job(kit.rows([[3]], [[4, 5]]), nll())
    host.update(job)
    host.update(job)
    assert sampler.loads == []
    host.generate([], SamplingOptions())
    host.generate([], SamplingOptions())
    assert sampler.loads == [sorted(n for n, _ in host.module.named_parameters())]
    assert sampler.version == 2
    host.close()
    assert sampler.closed
