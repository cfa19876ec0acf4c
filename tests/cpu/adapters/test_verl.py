"""verl: reward functions and batches both ways, advantages as its estimators; against verl itself where it is installed."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import flowrl as fr
from flowrl.errors import ConfigError, DataError, SchemaError
from flowrl.runtime.operators import run_operator
from flowrl.store.rows import RowBatch
from flowrl.testing import operator_cases
from flowrl_operators import adapters, advantages, rewards

# --- reward functions ---------------------------------------------------------------------------------------------------


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "boom":
        raise ValueError("no")
    right = float(solution_str.strip() == ground_truth)
    return {"score": right + 0.5 * (extra_info or {}).get("bonus", 0), "acc": right, "source_is": len(data_source)}


async def later(data_source, solution_str, ground_truth, **kwargs):
    await asyncio.sleep(0)
    return len(solution_str) if data_source == "words" else -1.0


def table(*responses: str, **more: object) -> RowBatch:
    types = {"prompt": fr.PROMPT.str, "answer": fr.PROMPT.str, "response": fr.SAMPLE.str}
    rows = RowBatch.from_rows([{"prompt": "p", "answer": "4", "response": r} for r in responses], types)
    for name, values in more.items():
        rows = rows.with_column(name, values, fr.PROMPT.str)
    return rows


def test_compute_score_is_a_reward() -> None:
    call = adapters.verl.reward.bind(compute_score, source="math", parts=("acc", "source_is"))
    done = run_operator(call, table(" 4", "5", "boom", extra_info=[json.dumps({"bonus": 1}), "{}", ""]))
    np.testing.assert_allclose(done.rows["reward"], [1.5, 0, np.nan])
    np.testing.assert_allclose(done.rows["acc"], [1, 0, np.nan])
    assert done.rows["source_is"][0] == 4
    assert "ValueError: no" in done.rows["row_error"][2]


def test_the_data_source_may_be_a_column_and_functions_may_wait() -> None:
    call = adapters.verl.reward.bind(later, out="length")
    assert run_operator(call, table("abc", "ab", data_source=["words", "x"])).rows["length"].tolist() == [3, -1]


def test_its_node_is_called_after_the_function() -> None:
    @fr.flow
    def flow(prompts, policy):
        rows = fr.rollout(policy, prompts, n=2)
        first = adapters.verl.reward(compute_score, source="x")(rows)
        return first + adapters.verl.reward(rows, function=later, source="x")

    assert flow.graph()["reward"]["names"] == ("compute_score", "later")


def test_a_missing_part_is_told() -> None:
    done = run_operator(adapters.verl.reward.bind(compute_score, parts=("f1",)), table("4"))
    assert "answered score, acc, source_is and no f1" in done.rows["row_error"][0]


@fr.operator(writes={"reward": fr.SAMPLE.f32, "length": fr.SAMPLE.f32})
def two(response: fr.SAMPLE.str, level: fr.PROMPT.i64):
    return {"reward": np.asarray(level, float), "length": np.asarray([len(r) for r in response], float)}


@fr.reward
def breaks(response: str) -> float:
    raise ValueError(response)


def test_an_operator_is_a_compute_score() -> None:
    score = adapters.verl.compute_score(rewards.exact)
    assert score("gsm8k", " 4 ", "4", {"index": 3}) == 1.0
    assert score(data_source="gsm8k", solution_str="5", ground_truth="4", extra_info=None, more=1) == 0.0
    assert adapters.verl.compute_score(two)("x", "abc", "", {"level": 2}) == {"score": 2.0, "length": 3.0}
    assert adapters.verl.compute_score(breaks, unknown=-1.0)("x", "abc", "") == -1.0


@pytest.mark.parametrize("name", ["gsm8k", "math_dapo"])
def test_verls_own_functions(name: str) -> None:
    module = pytest.importorskip(f"verl.utils.reward_score.{name}")

    call = adapters.verl.reward.bind(module.compute_score)
    found = run_operator(call, table("so the answer is #### 4\nAnswer: 4", "#### 5\nAnswer: 5")).rows["reward"]
    assert found[0] > found[1]


def test_data_in_verls_form() -> None:
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": "2+2?"}],
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"index": 0, "bonus": 1},
        }
    ]
    data = adapters.verl.data(rows, batch=1)
    (row,) = data.next().rows()
    assert (row["prompt"], row["answer"], row["data_source"]) == ("2+2?", "4", "openai/gsm8k")
    assert json.loads(row["extra_info"]) == {"index": 0, "bonus": 1}
    rows[0]["prompt"] = [{"role": "system", "content": "x"}, *rows[0]["prompt"]]  # type: ignore[misc]
    with pytest.raises(DataError, match=r"2 messages \(system, user\)"):
        adapters.verl.data(rows)


def anything(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) + (extra_info or {}).get("bonus", 0)


CASES = operator_cases(
    adapters.verl.reward,
    config=[{"function": anything}],
    columns={"extra_info": lambda rng, n: [json.dumps({"bonus": int(rng.integers(3))}) for _ in range(n)]},
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_conformance(case) -> None:
    case.check()


# --- batches ------------------------------------------------------------------------------------------------------------


def sampled() -> fr.ExperienceTable:
    """Three rows of one to four tokens, with a tool's word inside the first."""
    rows = fr.ExperienceTable()
    rows.append(
        [
            {
                "prompt_id": p, "sample_id": f"{p}/{i}", "prompt_ids": prompt, "answer": "4", "response_ids": ids,
                "response_mask": [True] * len(ids), "loss_mask": mask, "rollout_logprobs": [-0.5 * t for t in ids],
                "reward": reward,
            }
            for p, i, prompt, ids, mask, reward in [
                ("a", 0, [11, 12, 13], [1, 2, 3, 4], [True, False, True, True], 1.0),
                ("a", 1, [11, 12, 13], [5], [True], 0.0),
                ("b", 0, [14], [6, 7], [True, True], -2.0),
            ]
        ]
    )  # fmt: skip
    return rows


def test_rows_become_a_padded_batch() -> None:
    tensors, beside = adapters.verl.to_batch(sampled(), pad_id=99)
    assert tensors["prompts"].tolist() == [[11, 12, 13], [11, 12, 13], [99, 99, 14]]
    assert tensors["responses"].tolist() == [[1, 2, 3, 4], [5, 99, 99, 99], [6, 7, 99, 99]]
    assert tensors["response_mask"].tolist() == [[1, 0, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert tensors["attention_mask"].tolist() == [[1] * 7, [1] * 4 + [0] * 3, [0, 0, 1, 1, 1, 0, 0]]
    assert tensors["position_ids"].tolist()[2] == [0, 0, 0, 1, 2, 2, 2]
    assert tensors["input_ids"].shape == (3, 7)
    assert tensors["token_level_scores"].tolist() == [[0, 0, 0, 1], [0, 0, 0, 0], [0, -2, 0, 0]]
    assert tensors["rollout_log_probs"][0].tolist() == [-0.5, -1.0, -1.5, -2.0]
    assert beside["uid"].tolist() == ["a", "a", "b"]
    assert beside["reward_model"][0] == {"ground_truth": "4"}
    wide, _ = adapters.verl.to_batch(sampled(), response_width=6, prompt_width=4)
    assert wide["input_ids"].shape == (3, 10)
    with pytest.raises(SchemaError, match="row 0 has 4 tokens and the matrix 3 columns"):
        adapters.verl.to_batch(sampled(), response_width=3)


def same_rows(found: fr.ExperienceTable, wanted: fr.ExperienceTable) -> None:
    assert set(wanted.columns) <= set(found.columns)
    for name in wanted.columns:
        a, b = found[name], wanted[name]
        assert a == b if isinstance(b, fr.Ragged) else np.asarray(a).tolist() == np.asarray(b).tolist(), name


def test_a_batch_becomes_rows_again() -> None:
    tensors, beside = adapters.verl.to_batch(sampled(), pad_id=99, response_width=5, prompt_width=6)
    same_rows(adapters.verl.from_batch(tensors, beside), sampled())
    same_rows(adapters.verl.from_batch(SimpleNamespace(batch=tensors, non_tensor_batch=beside)), sampled())


def test_padding_may_hold_anything() -> None:
    tensors, beside = adapters.verl.to_batch(sampled())
    mask = tensors["attention_mask"][:, -4:] == 0
    tensors["rollout_log_probs"][mask] = torch.nan
    tensors["responses"][mask] = 12345
    same_rows(adapters.verl.from_batch(tensors, beside), sampled())


def test_a_batch_without_attention_mask_ends_rows_at_their_last_token() -> None:
    tensors, _ = adapters.verl.to_batch(sampled())
    rows = adapters.verl.from_batch({name: tensors[name] for name in ("responses", "response_mask")})
    assert rows["response_ids"] == sampled()["response_ids"]
    assert rows["prompt_id"].tolist() == ["0", "1", "2"]
    with pytest.raises(DataError, match="'attention_mask' or 'response_mask'"):
        adapters.verl.from_batch({"responses": tensors["responses"]})
    with pytest.raises(DataError, match="'responses'"):
        adapters.verl.from_batch({})


def test_real_tensordict_both_ways() -> None:
    pytest.importorskip("tensordict")
    made = adapters.verl.to_tensordict(sampled())
    assert made.batch_size == torch.Size([3])
    _, beside = adapters.verl.to_batch(sampled())
    same_rows(adapters.verl.from_batch(made, beside), sampled())


def test_real_data_proto_both_ways() -> None:
    verl = pytest.importorskip("verl")
    proto = adapters.verl.to_data_proto(sampled())
    assert isinstance(proto, verl.DataProto)
    assert len(proto) == 3
    same_rows(adapters.verl.from_batch(proto), sampled())
    reordered = proto[[2, 0, 1]]
    assert adapters.verl.from_batch(reordered)["prompt_id"].tolist() == ["b", "a", "a"]


# --- advantages ---------------------------------------------------------------------------------------------------------


def batch_of_verl() -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([3, 5, 1, 4, 2, 5])
    mask = (torch.arange(5) < lengths[:, None]).to(torch.int64)
    rewards = torch.zeros(6, 5)
    rewards[torch.arange(6), lengths - 1] = torch.randn(6, generator=generator)
    return rewards, mask, np.asarray(["u1", "u2", "u1", "u2", "u1", "u2"], object)


def test_an_advantage_is_an_estimator() -> None:
    token_rewards, mask, index = batch_of_verl()
    estimate = adapters.verl.advantage_estimator(advantages.rloo)
    found, returns = estimate(token_level_rewards=token_rewards, response_mask=mask, index=index, config=object())
    scores = token_rewards.sum(-1)
    for row in range(6):
        others = [j for j in range(6) if index[j] == index[row] and j != row]
        wanted = (scores[row] - scores[others].mean()) * mask[row]
        torch.testing.assert_close(found[row], wanted)
    assert found is returns
    assert found.dtype == torch.float32


def test_token_advantages_get_values_and_answer_returns() -> None:
    token_rewards, mask, _ = batch_of_verl()
    values = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    estimate = adapters.verl.advantage_estimator(advantages.gae)
    found, returns = estimate(token_rewards, mask, values=values)
    garbage = torch.where(mask == 1, values, torch.nan)
    again, _ = estimate(token_rewards, mask, values=garbage)
    torch.testing.assert_close(again, found)
    assert found.shape == returns.shape == (6, 5)
    assert not found[mask == 0].any()


def test_an_estimator_that_compares_responses_needs_the_index() -> None:
    token_rewards, mask, _ = batch_of_verl()
    for operator in (advantages.rloo, advantages.group_norm, advantages.maxrl):
        with pytest.raises(
            DataError, match=f"'{operator.__name__}' compares the responses of a prompt, and verl gave no"
        ):
            adapters.verl.advantage_estimator(operator)(token_level_rewards=token_rewards, response_mask=mask)
    found, _ = adapters.verl.advantage_estimator(advantages.batch_norm)(token_rewards, mask)
    assert found.abs().sum() > 0


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
def test_what_is_not_finite_outside_the_mask_is_padding(garbage: float) -> None:
    token_rewards, mask, index = batch_of_verl()
    for operator in (advantages.rloo, advantages.reinforce):
        estimate = adapters.verl.advantage_estimator(operator)
        wanted, _ = estimate(token_rewards, mask, index)
        found, _ = estimate(token_rewards.masked_fill(mask == 0, garbage), mask, index)
        torch.testing.assert_close(found, wanted)
    assert wanted.abs().sum() > 0


def test_a_reward_at_a_tools_last_token_counts() -> None:
    token_rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    found, _ = adapters.verl.advantage_estimator(advantages.rloo)(token_rewards, mask, ["a", "a"])
    assert found.tolist() == [[1, 1, 0], [-1, -1, 0]]


@pytest.mark.parametrize("where", ["argument", "attribute", "key"])
def test_numbers_of_verl_are_used_or_refused(where: str) -> None:
    token_rewards, mask, index = batch_of_verl()

    def told(operator: object, **numbers: object) -> None:
        config = {"attribute": SimpleNamespace(**numbers), "key": numbers}.get(where)
        more = numbers if where == "argument" else {"config": config}
        adapters.verl.advantage_estimator(operator)(token_rewards, mask, index, **more)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="verl was told gamma=0.5, and 'rloo' has no 'gamma'"):
        told(advantages.rloo, gamma=0.5)
    with pytest.raises(ConfigError, match=r"'reinforce' has gamma=1.0; advantage_estimator\(..., gamma=0.5\)"):
        told(advantages.reinforce, gamma=0.5)
    told(advantages.reinforce.bind(gamma=0.5), gamma=0.5)
    told(advantages.rloo, gamma=1.0, lam=1.0)
    if where == "argument":
        with pytest.raises(ConfigError, match="told epsilon=0.1, and 'rloo' has no 'epsilon'"):
            told(advantages.rloo, epsilon=0.1)
    else:
        with pytest.raises(ConfigError, match="norm_adv_by_std_in_grpo is False and 'group_norm' divides"):
            told(advantages.group_norm, norm_adv_by_std_in_grpo=False)
        told(advantages.group_norm.bind(scale="none"), norm_adv_by_std_in_grpo=False)
        told(advantages.group_norm, norm_adv_by_std_in_grpo=True)


def test_what_writes_no_advantage_is_refused() -> None:
    with pytest.raises(ConfigError, match="writes reward and no advantage"):
        adapters.verl.advantage_estimator(rewards.exact)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("grpo", advantages.group_norm.bind(unbiased=True, eps=1e-6)),
        ("rloo", advantages.rloo.bind()),
    ],
)
def test_the_same_numbers_as_verls_estimators(theirs: str, ours: object) -> None:
    core = pytest.importorskip("verl.trainer.ppo.core_algos")
    token_rewards, mask, index = batch_of_verl()
    name = f"flowrl_{theirs}"
    core.register_adv_est(name)(adapters.verl.advantage_estimator(ours))  # type: ignore[arg-type]
    arguments = {"token_level_rewards": token_rewards, "response_mask": mask, "index": index}
    found, _ = core.get_adv_estimator_fn(name)(**arguments, config=None)
    wanted, _ = core.get_adv_estimator_fn(theirs)(**arguments)
    torch.testing.assert_close(found, wanted * mask, rtol=1e-5, atol=1e-6)
