"""Rows: what they weigh when they travel, what becomes of one row, of shared memory, of ids and of special tokens."""

import hashlib

import numpy as np
import pyarrow as pa
import pytest

import flowrl as fr
from examples.tiny import CharTokenizer
from flowrl.engines.protocol import Stat, UpdateReport
from flowrl.errors import DataError, OperatorError
from flowrl.runtime.metrics import Tally
from flowrl.store.rows import RowBatch
from flowrl_operators import advantages, losses
from tests.scenarios.pieces import CHAT, WORDS, gpt2, policy, run, words

# --- shared and shipped memory ----------------------------------------------------------------------------------------


def test_nothing_is_split_and_no_chunk_is_empty() -> None:
    # 64-bit offsets have no limit, so neither they nor columns of fixed width are ever cut because of one
    rows = RowBatch(
        {"reward": [1.0, 2.0], "prompt": ["a", "b"], "raw": [b"", b"x"], "response_ids": [[1], []], "e": [[1.0, 2.0]] * 2},
        {
            "reward": fr.SAMPLE.f32, "prompt": fr.PROMPT.str, "raw": fr.PROMPT.bytes, "response_ids": fr.TOKEN.i32,
            "e": fr.SAMPLE.f32[2],
        },
    )  # fmt: skip
    kinds = {field.name: field.type for field in rows.to_arrow().schema}
    assert kinds == {
        "reward": pa.float32(), "prompt": pa.large_string(), "raw": pa.large_binary(),
        "response_ids": pa.large_list(pa.int32()), "e": pa.list_(pa.float32(), 2),
    }  # fmt: skip
    table = fr.ExperienceTable()
    for part in (rows, rows.take([]), rows, rows.filter([False, False])):
        table.append(part)
    for made in (rows.to_arrow(), table.to_arrow()):
        for column in made.columns:
            assert [len(chunk) for chunk in column.chunks] in ([2], [4], [2, 2])


@fr.operator(writes={"centred": fr.SAMPLE.f32})
def centred_in_place(reward: fr.SAMPLE.f32):
    reward -= reward.mean()
    return reward


@fr.flow
def in_place(rows):
    return centred_in_place(rows)


def digest(rows: RowBatch) -> str:
    return hashlib.sha256(rows.to_ipc()).hexdigest()


def test_writing_into_a_column_is_an_error_and_changes_nothing() -> None:
    data = fr.Data([{"prompt": "a", "reward": 1.0}, {"prompt": "b", "reward": 3.0}], batch="all")
    before = digest(data.rows)
    with pytest.raises(OperatorError, match=r"centred_in_place.*test_data\.py:\d+.*read-only.*work on a copy"):
        run(in_place, engine="null", rows=data)
    assert digest(data.rows) == before


@fr.loss(on_policy=False)
def spoils_its_columns(logprobs, advantages: fr.TOKEN.f32, weight: fr.SAMPLE.f32, segments):
    value = -logprobs * advantages.clone() * segments.spread(weight)
    metrics = {"advantage": advantages.clone(), "weight": weight.clone()}
    advantages.mul_(0)
    weight.add_(100)
    return value, metrics


@fr.flow
def spoiled(rows, policy):
    return fr.update(policy, fr.repeat(rows, epochs=2), loss=spoils_its_columns()), rows


@pytest.mark.filterwarnings("error:.*not writable")
def test_a_loss_that_writes_into_its_tensors_does_not_reach_the_table() -> None:
    rows = [{"prompt": "1=", "response": "23", "advantages": [1.0, 1.0, 1.0], "weight": 1.0}]
    data = fr.Data(rows, batch="all", types={"weight": fr.SAMPLE.f32})
    done = run(spoiled, rows=data, policy=policy(gpt2(), CharTokenizer()))
    assert done.rows("rows")["advantages"].to_list() == [[1.0, 1.0, 1.0]]
    assert done.rows("rows")["weight"].tolist() == [1.0]
    # and the second epoch sees what the first one saw
    assert (done.metrics[0]["update/advantage"], done.metrics[0]["update/weight"]) == (1.0, 1.0)


# --- one row ----------------------------------------------------------------------------------------------------------

shapes: list[tuple[object, ...]] = []


@fr.operator(writes={"reward": fr.SAMPLE.f32})
def looks(answer, tags, embedding, response):
    shapes.append((answer.shape, tags.lengths.tolist(), embedding.lengths.tolist(), response.shape))
    return np.ones(len(answer))


@fr.flow
def looked_at(prompts, policy):
    return looks(fr.rollout(policy, prompts))


@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_of_one_has_the_types_of_a_larger_one(count: int) -> None:
    # every value equal, which collapsing code takes for a constant
    rows = [{"prompt": "p", "answer": "same", "tags": ["t", "u"], "embedding": [1.0, 1.0, 1.0]}] * count
    shapes.clear()
    found = run(looked_at, engine="null", prompts=rows, policy=fr.Model({"p": ["a"]})).rows()
    assert shapes == [((count,), [2] * count, [3] * count, (count,))]
    assert {name: str(found.types[name]) for name in ("answer", "tags", "embedding", "response_ids", "reward")} == {
        "answer": "PROMPT.str", "tags": "PROMPT.str['*']", "embedding": "PROMPT.f32['*']", "response_ids": "TOKEN.i32",
        "reward": "SAMPLE.f32",
    }  # fmt: skip
    assert [tag.tolist() for tag in found["tags"]] == [["t", "u"]] * count


@fr.reward
def ends_with_a_digit(response):
    return float(response[-1:].isdigit())


@fr.flow
def grpo(prompts, policy, *, n=4):
    rows = advantages.group_norm(ends_with_a_digit(fr.rollout(policy, prompts, n=n)))
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2)), rows


def test_a_data_set_of_one_row_is_drawn_again_and_again() -> None:
    inputs = {"prompts": fr.Data([{"prompt": "1+2="}]), "policy": fr.Model(None)}
    done = run(grpo, engine="null", steps=3, batch=1, max_tokens=4, **inputs)
    assert done.status == "finished"
    # a batch larger than the data set: the same prompt several times, each with a group and a stream of its own
    rows = run(grpo, engine="null", batch=3, max_tokens=4, **inputs).rows()
    assert list(dict.fromkeys(rows["prompt_id"])) == ["0", "0~2", "0~3"]
    assert [len(group) for group in rows.group_indices("prompt_id")] == [4, 4, 4]
    assert len({tuple(ids.tolist()) for ids in rows["response_ids"]}) > 4


# --- shards -----------------------------------------------------------------------------------------------------------


def test_shards_are_pooled_and_none_is_forgotten() -> None:
    shards = []
    for total, count in ((1.0, 1), (9.0, 3)):  # means 1 and 3
        shard = Tally()
        shard.add_update("update", UpdateReport({"loss": Stat(total, count)}, steps=1, tokens=count))
        shards.append(shard)
    shards[0].merge(shards[1])
    found = shards[0].metrics()
    assert found["update/loss"] == 2.5
    assert found["update/tokens"] == 4


# --- identities -------------------------------------------------------------------------------------------------------


@fr.flow
def centred(rows):
    return advantages.group_norm(rows, scale="none")


def test_large_integer_ids_stay_apart_and_missing_ones_are_refused() -> None:
    # as float64 the two ids would be one, and the advantages would not be zero
    ids = [2**53, 2**53, 2**53 + 1, 2**53 + 1]
    table = pa.table({"prompt_id": ids, "response": ["a", "b", "c", "d"], "reward": [1.0, 1.0, 0.0, 0.0]})
    found = run(centred, engine="null", rows=fr.Data(table, batch="all")).rows()
    assert found["advantage"].tolist() == [0.0] * 4
    with pytest.raises(DataError, match="'prompt_id' has no value in row 1"):
        fr.Data(pa.table({"prompt_id": pa.array([2**53, None, 2**53 + 1]), "prompt": ["a", "b", "c"]}))


@pytest.mark.parametrize("engine", ["null", "torch"])
def test_equal_texts_with_different_ids_are_different_prompts(engine: str) -> None:
    prompts = [{"prompt_id": "a", "prompt": "7="}, {"prompt_id": "b", "prompt": "7="}]
    model = policy(gpt2(), CharTokenizer()) if engine == "torch" else fr.Model(None)
    rows = run(grpo, engine=engine, batch=2, max_tokens=8, prompts=fr.Data(prompts, shuffle=False), policy=model).rows()
    assert rows["prompt_id"].tolist() == ["a"] * 4 + ["b"] * 4
    assert len({tuple(ids.tolist()) for ids in rows["response_ids"]}) == 8


def test_rows_of_a_data_set_keep_their_groups() -> None:
    # two recorded responses to one prompt are siblings, and not the prompt drawn twice
    data = fr.Data(
        [
            {"prompt_id": "x", "prompt": "1=", "response": "2", "reward": 1.0},
            {"prompt_id": "x", "prompt": "1=", "response": "3", "reward": 0.0},
        ],
        batch="all",
    )
    found = run(centred, engine="null", rows=data).rows()
    assert found["prompt_id"].tolist() == ["x", "x"]
    assert found["advantage"].tolist() == [0.5, -0.5]


@pytest.mark.parametrize("batch", [1, 4, 5, 32])
def test_no_batch_cuts_a_group_of_recorded_responses(batch: int) -> None:
    rows = [
        {"prompt_id": str(i // 2), "prompt": "1=", "response": str(i), "reward": float(i % 2)}  # siblings: 0 and 1
        for i in range(8)
    ]
    for steps in (1, 2, 3):
        data = fr.Data(rows, batch=batch)
        found = run(centred, engine="null", rows=data, steps=steps).rows()
        assert np.abs(found["advantage"]).tolist() == [0.5] * len(found)
        assert len(set(found["response"])) == len(found) == {1: 2, 4: 4, 5: 4, 32: 8}[batch]


@fr.flow
def prefers(pairs, policy):
    rows = fr.logprobs(policy, pairs, out="ref_logprobs")
    return fr.update(policy, rows, loss=losses.dpo())


def test_a_batch_larger_than_the_pairs_there_are() -> None:
    pairs = [{"prompt": "1=", "response": r, "pair_id": "a", "chosen": r == "2"} for r in ("2", "3")]
    done = run(prefers, pairs=fr.Data(pairs), batch=32, policy=policy(gpt2(), CharTokenizer()), steps=2)
    assert done.history("update/steps") == [1, 1]


def test_a_prompt_drawn_twice_gets_a_name_that_nobody_has() -> None:
    prompts = [{"prompt_id": "a", "prompt": "1="}, {"prompt_id": "a~2", "prompt": "2="}]
    rows = run(grpo, engine="null", prompts=fr.Data(prompts, batch=5, shuffle=False), policy=fr.Model(None)).rows()
    assert list(dict.fromkeys(rows["prompt_id"])) == ["a", "a~2", "a~3", "a~2~2", "a~4"]
    assert [len(group) for group in rows.group_indices("prompt_id")] == [4] * 5


def test_sampling_for_siblings_of_a_data_set_does_not_sample_the_same_twice() -> None:
    recorded = [{"prompt_id": "x", "prompt": "1=", "response": text} for text in ("2", "3")]
    data = fr.Data(recorded, batch="all")
    rows = run(grpo, engine="null", prompts=data, policy=fr.Model(None), max_tokens=12).rows()
    first, second = ([rows["response_ids"][i].tolist() for i in group] for group in rows.group_indices("prompt_id"))
    assert len(first) == len(second) == 4
    assert first != second


# --- special tokens ---------------------------------------------------------------------------------------------------


@fr.flow
def sampled(prompts, policy):
    return fr.rollout(policy, prompts)


@fr.flow
def judged(rows, judge):
    return fr.score(judge, rows), fr.update(judge, rows, loss=plain())


@fr.loss(per="sample", on_policy=False)
def plain(scores):
    return scores


@pytest.mark.parametrize("template", [CHAT, CHAT.replace("{{ bos_token }}", ""), None])
def test_one_begin_token_and_the_same_ids_wherever_text_is_encoded(template: str | None) -> None:
    # the tokenizer adds <s> by itself, and the template of the first case writes it too
    tokenizer = words(template)
    prompts = [{"prompt": "two plus two"}]
    model = gpt2(vocab=len(WORDS))
    rollout_ids = run(sampled, prompts=prompts, policy=policy(model, tokenizer), max_tokens=2).rows()["prompt_ids"]
    answered = [{"prompt": "two plus two", "response": "4"}]
    judge = policy(model, tokenizer, head="reward")
    judge_ids = run(judged, rows=answered, judge=judge).rows("score")["prompt_ids"]
    begin = WORDS.index("<s>")
    assert rollout_ids.to_list() == judge_ids.to_list()
    assert rollout_ids[0].tolist().count(begin) == 1 and rollout_ids[0][0] == begin
