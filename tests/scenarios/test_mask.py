"""Which tokens there are, which of them train, and where they stand: padding, ends, turns, templates, boundaries."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend, decoders, models
from transformers import PreTrainedTokenizerFast

import flowrl as fr
from examples.tiny import CharTokenizer
from flowrl.engines.tokenizers import HuggingFaceTokenizer
from flowrl.errors import DataError
from flowrl.runtime.rundir import RunDir
from flowrl.store.loader import Loader, packed
from flowrl.store.rows import RowBatch
from flowrl_operators import advantages, losses, rewards
from tests.scenarios.pieces import WORDS, ScriptEngine, chain, gpt2, policy, run, words

# --- positions --------------------------------------------------------------------------------------------------------


@fr.flow
def sampled_and_scored(prompts, policy):
    return fr.logprobs(policy, fr.rollout(policy, prompts, n=3), out="old_logprobs")


SHORT = {"prompt_id": "short", "prompt": "12="}


@pytest.mark.parametrize("pads", [0, 3, 8])
def test_left_padding_shifts_nothing(pads: int) -> None:
    # absolute positions: with rotary ones this could not fail
    model = policy(gpt2(), CharTokenizer())
    alone = run(sampled_and_scored, prompts=[SHORT], policy=model, max_tokens=10).rows()
    company = [SHORT, {"prompt_id": "long", "prompt": "9" * pads + "12="}]
    rows = run(sampled_and_scored, prompts=company, policy=model, max_tokens=10).rows().slice(0, 3)
    assert rows["prompt_id"].tolist() == ["short"] * 3
    assert rows["response_ids"] == alone["response_ids"]
    for column in ("rollout_logprobs", "old_logprobs"):
        np.testing.assert_allclose(rows[column].values, alone[column].values, atol=1e-5)
    np.testing.assert_allclose(rows["rollout_logprobs"].values, rows["old_logprobs"].values, atol=1e-5)


def test_bounds_of_packed_rows_are_their_own() -> None:
    rows = RowBatch(
        {"response_ids": [[1] * 3, [2] * 4, [3] * 1], "loss_mask": [[True] * 3, [True] * 4, [True]]},
        {"response_ids": fr.TOKEN.i32, "loss_mask": fr.TOKEN.bool},
    )
    # a mask of ones does not turn three rows into one
    assert packed(rows)["cu_seqlens"].tolist() == [0, 3, 7, 8]
    # a shard counts from its own beginning, and not from that of the rows before it
    assert packed(rows.slice(1, 2))["cu_seqlens"].tolist() == [0, 4]
    found = [part["cu_seqlens"].tolist() for part in Loader(rows, batch_rows=1, layout="packed")]  # type: ignore[index]
    assert found == [[0, 3], [0, 4], [0, 1]]


# --- ends -------------------------------------------------------------------------------------------------------------


@fr.operator(writes={"loss_mask": fr.TOKEN.bool}, replaces=True)
def without_truncated(loss_mask, finish_reason):
    return loss_mask & (finish_reason != "length")


@fr.flow
def not_truncated(prompts, policy):
    return without_truncated(fr.rollout(policy, prompts))


@pytest.mark.parametrize(
    ("max_tokens", "ids", "reason", "mask"),
    [(6, [9, 7], "stop", [True, True]), (2, [9, 7], "stop", [True, True]), (1, [9], "length", [False])],
)
def test_any_end_token_is_an_end(max_tokens: int, ids: list[int], reason: str, mask: list[bool]) -> None:
    # the tokenizer's own end is </s> (2); the model may also end with x (7)
    module = chain([(8, 9), (9, 7), (7, 9)])
    module.generation_config = SimpleNamespace(eos_token_id=[2, 7])
    found = run(not_truncated, prompts=[{"prompt": "4"}], policy=policy(module, words()), max_tokens=max_tokens).rows()
    assert found["response_ids"].to_list() == [ids]
    assert found["finish_reason"].tolist() == [reason]
    assert found["loss_mask"].to_list() == [mask]


@fr.flow
def stopped(prompts, policy):
    rows = fr.rollout(policy, prompts, n=16, temperature=2.0, stop=("1", "22"))
    return fr.logprobs(policy, rows, out="old_logprobs")


def test_a_stop_string_adds_no_token() -> None:
    tokenizer = CharTokenizer()
    rows = run(stopped, prompts=[SHORT], policy=policy(gpt2(), tokenizer), max_tokens=12).rows()
    ended = [row for row in rows.rows() if "1" in row["response"] or "22" in row["response"]]
    assert len(ended) > 3
    for row in ended:
        assert row["finish_reason"] == "stop"
        assert row["response"].endswith(("1", "22"))
        assert tokenizer.eos_id not in row["response_ids"]
        assert len(row["response_ids"]) == len(row["rollout_logprobs"]) == len(row["loss_mask"])
    assert rows["loss_mask"].values.all()
    assert (rows["rollout_logprobs"].values < 0).all()  # none is made up
    np.testing.assert_allclose(rows["rollout_logprobs"].values, rows["old_logprobs"].values, atol=1e-5)


# --- turns ------------------------------------------------------------------------------------------------------------


def merging() -> HuggingFaceTokenizer:
    """BPE in which `he` and `llo` merge to `hello`."""
    vocab = ["<e>", "h", "e", "l", "o", "?", "!", "he", "ll", "llo", "hello"]
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    backend = Backend(models.BPE({token: i for i, token in enumerate(vocab)}, merges))
    backend.decoder = decoders.Fuse()  # no spaces between tokens
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>"))


@fr.component
class Tool:
    """Answers `!` once."""

    def reset(self, row):
        return {"turns": 0}

    def step(self, state, response):
        state["turns"] += 1
        state.setdefault("heard", []).append(response)
        return "hello!" if state["turns"] == 1 else None


@fr.flow
def talk(prompts, policy):
    return fr.rollout(policy, prompts, environment=Tool(), max_turns=3)


def test_sampled_ids_go_into_the_next_turn_as_they_were(script: type[ScriptEngine]) -> None:
    tokenizer = merging()
    end, ell, o, ask, bang, he, llo, hello = 0, 3, 4, 5, 6, 7, 9, 10
    assert tokenizer.encode_continuation("hello") == [hello]  # so text that went there and back has other ids
    first, reply, second = [he, llo, end], [hello, bang], [ell, o, end]
    answers = {(ask,): first, (ask, *first, *reply): second}
    rows = run(talk, engine="script", prompts=[{"prompt": "?"}], policy=fr.Model(answers, tokenizer)).rows()
    assert script.asked == [[ask], [ask, *first, *reply]]
    (row,) = rows.rows()
    assert row["response_ids"] == [*first, *reply, *second]
    assert row["loss_mask"] == [True] * 3 + [False] * 2 + [True] * 3
    assert row["response_mask"] == [True] * 8
    assert row["rollout_logprobs"] == [-1 / 8, -2 / 8, -3 / 8, 0, 0, -1 / 8, -2 / 8, -3 / 8]
    assert (row["finish_reason"], row["num_turns"]) == ("stop", 2)
    assert row["response"] == "hellohello!lo"


@fr.flow
def talk_and_train(prompts, policy):
    rows = fr.rollout(policy, prompts, n=4, environment=Tool(), max_turns=3)
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    rows = with_advantages(rows)
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2)), rows


@fr.flow
def train(prompts, policy):
    rows = with_advantages(fr.rollout(policy, prompts, n=4))
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2)), rows


@fr.operator(writes={"advantage": fr.SAMPLE.f32})
def with_advantages(num_turns):
    return np.linspace(-1, 1, len(num_turns))


def test_turns_on_a_real_model_are_scored_as_they_were_sampled() -> None:
    model = policy(gpt2(vocab=11), merging())
    done = run(talk_and_train, prompts=[{"prompt": "?"}, {"prompt": "hello?"}], policy=model, max_tokens=20)
    rows = done.rows()
    trains = rows["loss_mask"].values
    assert rows["num_turns"].max() > 1 and not trains.all()
    np.testing.assert_allclose(rows["rollout_logprobs"].values[trains], rows["old_logprobs"].values[trains], atol=1e-5)
    assert done.metrics[0]["update/tokens"] == trains.sum()
    assert done.metrics[0]["update/ratio"] == pytest.approx(1, abs=1e-5)


# --- templates --------------------------------------------------------------------------------------------------------

THINKING = "{{ bos_token }}{% for m in messages %}<user> {{ m['content'] }} {% endfor %}<bot> <think>\n"


@fr.flow
def thinks(prompts, policy, *, prefilled=""):
    return rewards.format(fr.rollout(policy, prompts), prefilled=prefilled)


@pytest.mark.parametrize(("prefilled", "reward"), [("<think>\n", 1.0), ("", 0.0)])
def test_a_reward_sees_what_the_template_began(prefilled: str, reward: float) -> None:
    think, x, unthink, four, end = (WORDS.index(word) for word in ("<think>", "x", "</think>", "4", "</s>"))
    module = chain([(think, x), (x, unthink), (unthink, four), (four, end)])
    model = policy(module, words(THINKING))
    rows = run(thinks.graph(prefilled=prefilled), prompts=[{"prompt": "two plus two"}], policy=model).rows()
    assert rows["prompt_ids"][0][-1] == think  # and the prompt's ids say so too
    assert rows["response"].tolist() == ["x </think> 4"]
    assert rows["reward"].tolist() == [reward]


# --- groups -----------------------------------------------------------------------------------------------------------


@fr.flow
def centred(rows):
    return advantages.group_norm(rows, scale="none")


def test_a_sibling_without_trained_tokens_moves_nobody() -> None:
    siblings = [
        {"prompt_id": "p", "response_ids": [3, 4], "loss_mask": [False, False], "reward": 100.0},
        {"prompt_id": "p", "response_ids": [5, 6], "loss_mask": [True, True], "reward": 1.0},
    ]
    found = run(centred, engine="null", rows=siblings).rows()
    assert found["advantage"].tolist() == [0.0, 0.0]  # with the masked sibling in the mean: -49.5


# --- short, empty, long -----------------------------------------------------------------------------------------------


@fr.loss(on_policy=False)
def weighted(logprobs, advantages: fr.TOKEN.f32):
    return -advantages * logprobs


@fr.flow
def recorded(rows, policy):
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    return fr.update(policy, rows, loss=weighted()), rows


def responses(*ids: list[int], masked: tuple[int, ...] = ()) -> list[dict[str, object]]:
    return [
        {
            "prompt_ids": [1, 4 + i], "response_ids": part, "advantages": [1.0] * len(part),
            "loss_mask": [i not in masked] * len(part),
        }
        for i, part in enumerate(ids)
    ]  # fmt: skip


def trained(rows: list[dict[str, object]], **options: object) -> tuple[fr.Run, dict[str, np.ndarray]]:
    done = run(recorded, rows=rows, policy=policy(gpt2(), CharTokenizer(), **options))
    return done, done.hosts["policy"].state()["optimizer"]


@pytest.mark.parametrize("budget", [1, 10_000])
def test_empty_and_masked_rows_are_as_if_they_were_not_there(budget: int) -> None:
    # in micro-batches of one row, one has no token at all and another none that trains
    whole = responses([5, 6, 7], [], [8], [9, 9, 9], masked=(3,))
    done, state = trained(whole, micro_batch_tokens=budget)
    _, expected = trained([whole[0], whole[2]])
    assert done.metrics[0]["update/tokens"] == 4
    assert done.rows()["old_logprobs"].lengths.tolist() == [3, 0, 1, 3]
    scale = max(float(np.abs(entry["exp_avg"]).max()) for entry in expected.values())
    for name, entry in expected.items():
        np.testing.assert_allclose(state[name]["exp_avg"], entry["exp_avg"], atol=2e-6 * scale, rtol=1e-5)


@fr.flow
def of_reward(rows, policy, *, least=0.0):
    kept = fr.filter(rows, rows["reward"] > least)
    return fr.update(policy, kept, loss=losses.sft()), kept


@pytest.mark.parametrize(
    ("least", "masked", "says"),
    [(9.0, False, "update: no rows, so"), (0.0, True, "update: no token of 2 rows trains, so")],
)
@pytest.mark.parametrize("engine", ["null", "torch"])
def test_nothing_to_train_on_is_no_step_and_is_said(
    engine: str, least: float, masked: bool, says: str, tmp_path: Path
) -> None:
    rows = [{"prompt": "1=", "response": text, "reward": 1.0, "loss_mask": [not masked] * 2} for text in "23"]
    model = policy(gpt2(), CharTokenizer(), optimizer=fr.AdamW(weight_decay=0.5))
    done = run(of_reward.graph(least=least), engine=engine, rows=rows, policy=model, steps=2, out=tmp_path)
    assert done.history("update/steps") == done.history("update/tokens") == [0, 0]
    assert done.hosts["policy"].version == 0
    notes = RunDir.open(str(done.path)).notes()
    assert [step for step, _ in notes] == [0, 1] and all(note.startswith(says) for _, note in notes)


def test_one_token_is_a_response() -> None:
    model = policy(gpt2(), CharTokenizer())
    done = run(train, prompts=[SHORT], policy=model, max_tokens=1)
    rows = done.rows()
    assert rows["response_ids"].lengths.tolist() == [1] * 4
    assert set(rows["finish_reason"]) <= {"length", "stop"}
    assert done.metrics[0]["update/tokens"] == 4


def test_a_prompt_that_fills_the_context_is_named_and_a_shorter_one_gets_what_is_left() -> None:
    prompts = [{"prompt_id": "fits", "prompt": "1" * 8}, {"prompt_id": "too long", "prompt": "1" * 9}]
    model = policy(gpt2(), CharTokenizer(), max_context=10)  # the begin token counts
    rows = run(sampled_and_scored, prompts=prompts[:1], policy=model).rows()
    assert rows["response_ids"].lengths.max() == 1
    with pytest.raises(DataError, match=r"prompt 'too long' has 10 tokens.*holds 10.*test_mask\.py:\d+.*max_context"):
        run(sampled_and_scored, prompts=prompts, policy=model)


def test_the_tiny_model_could_tell_positions_apart() -> None:
    ids = torch.tensor([[1, 4, 5]])
    module = gpt2()
    shifted = module(ids, position_ids=torch.tensor([[3, 4, 5]])).logits
    assert (module(ids).logits - shifted).abs().max() > 1e-2
