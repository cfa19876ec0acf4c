"""verl: reward functions and batches both ways, and FlowRL's advantages as its estimators.

A verl batch (`DataProto`, or the TensorDict of its trainer) holds, B rows wide:

    prompts         [B, P]  padded on the left        response_mask       [B, T]  1 where a token trains
    responses       [B, T]  padded on the right       old_log_probs, ref_log_prob, rollout_log_probs, values ...   [B, T]
    input_ids       [B, P + T], with attention_mask and position_ids
    uid             group of each row, beside the tensors; so are data_source, reward_model, extra_info
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError, DataError, MissingExtra
from flowrl.graph.operators import OperatorCall
from flowrl_operators.adapters import _calls, arrays, padded, torch as tensors

__all__ = [
    "advantage_estimator",
    "compute_score",
    "data",
    "from_batch",
    "reward",
    "to_batch",
    "to_data_proto",
    "to_tensordict",
]

PER_TOKEN = {
    "rollout_log_probs": "rollout_logprobs",
    "old_log_probs": "old_logprobs",
    "ref_log_prob": "ref_logprobs",
    "values": "values",
    "returns": "returns",
    "advantages": "advantages",
    "token_level_rewards": "token_rewards",
}
"""verl's name to ours, for values per response token."""

TYPES = {
    "rollout_logprobs": fr.TOKEN.f32,
    "old_logprobs": fr.TOKEN.f32,
    "ref_logprobs": fr.TOKEN.f32,
    "values": fr.TOKEN.f32,
    "returns": fr.TOKEN.f32,
    "advantages": fr.TOKEN.f32,
    "token_rewards": fr.TOKEN.f32,
    "response_ids": fr.TOKEN.i32,
    "response_mask": fr.TOKEN.bool,
    "loss_mask": fr.TOKEN.bool,
    "reward": fr.SAMPLE.f32,
    "prompt_ids": fr.PROMPT.i32["*"],
    "prompt_id": fr.PROMPT.str,
    "sample_id": fr.SAMPLE.str,
    "answer": fr.PROMPT.str,
    "data_source": fr.PROMPT.str,
    "extra_info": fr.PROMPT.str,
}


# ------------------------------------------------------------------------------------------------------------ rewards


def _writes(*, parts: Sequence[str], out: str, **_: object) -> Mapping[str, fr.ColumnType]:
    return {out: fr.SAMPLE.f32, **dict.fromkeys(parts, fr.SAMPLE.f32)}


def _timeout(*, timeout_s: float | None, **_: object) -> float | None:
    return timeout_s


@fr.operator(writes=_writes, each_row=True, on_error="flag", timeout_s=_timeout)
def reward(
    response: fr.SAMPLE.str,
    ground_truth: fr.PROMPT.str.named_by("truth"),
    data_source: fr.PROMPT.str = None,
    extra_info: fr.PROMPT.str = None,
    *,
    function: Any,
    source: str = "",
    truth: str = "answer",
    parts: Any = (),
    out: str = "reward",
    timeout_s: float | None = 30.0,
):
    """A verl reward function (`compute_score`) as a reward of a flow.

    Example:
        rows = adapters.verl.reward(compute_score, source="openai/gsm8k")(rows)     # or reward(rows, function=compute_score)

    Args:
        function: `f(data_source, solution_str, ground_truth, extra_info=None)`; answers a number, or a dict with `score`.
            May be async.
        source: `data_source` where the rows have no such column.
        truth: the column of the ground truth. Its text is taken as it is.
        parts: other numbers of that dict to write, each as a column of its name.
        out: the column of the score.
        timeout_s: seconds per row.

    The column `extra_info` holds JSON (`adapters.verl.data` writes it so) and becomes a dict again.
    """
    info = json.loads(extra_info) if extra_info else {}
    given = {"data_source": source if data_source is None else data_source, "solution_str": response}
    given |= {"ground_truth": ground_truth, "extra_info": info}
    answer = _calls.finished(function(**_calls.accepted(function, given)))
    values = answer if isinstance(answer, Mapping) else {"score": answer}
    missing = [name for name in ("score", *parts) if name not in values]
    if missing:
        raise DataError(f"the reward function answered {', '.join(values)} and no {', '.join(missing)}")
    return {out: float(values["score"]), **{name: float(values[name]) for name in parts}}


def compute_score(
    operator: fr.Operator | OperatorCall, *, unknown: float = 0.0, **config: Any
) -> Callable[..., float | dict[str, float]]:
    """A reward of FlowRL as verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`.

    Example, in the file that verl's `reward.custom_reward_function.path` names:
        compute_score = adapters.verl.compute_score(rewards.math)

    Args:
        operator: reads `response`, `answer` (the ground truth), `prompt` or anything in `extra_info`, by its key there.
        unknown: score of a response that it cannot judge (NaN, or it raised): verl has no way to leave a row out.
        config: of the operator, unless it is bound already.

    Answers a number; an operator that writes more than `reward` answers a dict with `score` and the others.
    """
    call = arrays.bound(operator, config)
    names = [column.name for column in call.writes]
    if not names:
        raise ConfigError(f"'{call.short_name}' writes nothing, so it is no reward")
    score = "reward" if "reward" in names else names[0]

    def compute_score(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **_: Any
    ) -> float | dict[str, float]:
        info = dict(extra_info or {})
        given = {"prompt": info.get("question", info.get("prompt", "")), **info}
        given |= {"data_source": data_source, "response": solution_str, "answer": ground_truth}
        wanted = {read.column for read in call.reads} | {"response"}
        found = arrays.apply(call, {n: [v] for n, v in given.items() if n in wanted})
        values = found if isinstance(found, Mapping) else {score: found}
        numbers = {name: float(np.asarray(value)[0]) for name, value in values.items()}
        known = numbers[score] if np.isfinite(numbers[score]) else unknown
        return known if len(numbers) == 1 else {"score": known, **{n: v for n, v in numbers.items() if n != score}}

    return compute_score


def data(dataset: Any, **options: Any) -> fr.Data:
    """A data set in verl's form as data of a flow: `prompt`, `answer`, `data_source` and `extra_info` (JSON).

    Args:
        dataset: Hugging Face data set or list of dicts with `prompt` (chat messages), `reward_model` (with `ground_truth`),
            `data_source` and `extra_info`.
        options: of `fr.Data`.

    A prompt of one user message becomes its text; longer ones need a tokenizer, see `adapters.datasets.data`.
    """
    rows = []
    for row in dataset:
        truth = (row.get("reward_model") or {}).get("ground_truth", row.get("ground_truth", ""))
        info = row.get("extra_info") or {}
        made = {"prompt": _only_message(row["prompt"]), "data_source": str(row.get("data_source", ""))}
        made |= {"answer": truth if isinstance(truth, str) else json.dumps(truth), "extra_info": json.dumps(info)}
        rows.append(made)
    return fr.Data(rows, **options)


def _only_message(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    messages = list(prompt)
    if len(messages) != 1:
        raise DataError(
            f"a prompt has {len(messages)} messages ({', '.join(str(m.get('role')) for m in messages)}); apply the chat template "
            "with adapters.datasets.data(..., tokenizer=...)"
        )
    return _calls.text_of(messages[0])


# ------------------------------------------------------------------------------------------------------------ batches


def from_batch(batch: Any, non_tensors: Mapping[str, Any] | None = None) -> fr.ExperienceTable:
    """A verl batch as rows: a `DataProto`, a TensorDict, or a dict of tensors.

    Args:
        batch: see the module's text. `responses` and `attention_mask` (or `response_mask` alone) are needed.
        non_tensors: the arrays beside a TensorDict or dict; a `DataProto` brings its own.

    `loss_mask` is verl's `response_mask`; a row's tokens are those its attention mask shows, so that what a tool said stays,
    with `loss_mask` false. `reward` is the sum of `token_level_scores` (or of `rm_scores`) over the row. `uid` is `prompt_id`.
    Columns that verl does not name are left out.
    """
    held = dict(getattr(batch, "non_tensor_batch", {}) or {}) | dict(non_tensors or {})
    held_tensors = getattr(batch, "batch", batch)
    given = {name: _calls.numpy_of(held_tensors[name]) for name in list(held_tensors.keys())}
    if "responses" not in given:
        raise DataError(f"a verl batch has 'responses'; found {', '.join(given) or 'nothing'}")
    responses = np.asarray(given["responses"])
    width, count = responses.shape[1], len(responses)
    inside = _inside(given, width)
    lengths = padded.lengths_of(inside)
    made: dict[str, Any] = {"response_ids": padded.cut(responses.astype(np.int32), lengths)}
    trains = given.get("response_mask", inside)
    made["response_mask"] = padded.cut(np.ones_like(inside), lengths)
    made["loss_mask"] = padded.cut(np.asarray(trains) != 0, lengths)
    for theirs, ours in PER_TOKEN.items():
        if theirs in given:
            made[ours] = padded.cut(np.asarray(given[theirs], np.float32), lengths)
    scores = given.get("token_level_scores", given.get("rm_scores"))
    if scores is not None:
        made["reward"] = np.asarray(scores, np.float64).sum(axis=1)
    if "prompts" in given:
        prompts = np.asarray(given["prompts"], np.int32)
        mask = given["attention_mask"][:, : -width or None] if "attention_mask" in given else np.ones_like(prompts)
        made["prompt_ids"] = padded.ragged(prompts, mask)
    ids = [str(u) for u in held["uid"]] if "uid" in held else [str(number) for number in range(count)]
    siblings: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    made |= {"prompt_id": ids, "sample_id": [f"{u}/{next(siblings[u])}" for u in ids]}
    if "data_source" in held:
        made["data_source"] = [str(value) for value in held["data_source"]]
    if "reward_model" in held:
        truths = [model.get("ground_truth", "") for model in held["reward_model"]]
        made["answer"] = [t if isinstance(t, str) else json.dumps(t) for t in truths]
    if "extra_info" in held:
        made["extra_info"] = [json.dumps(value) for value in held["extra_info"]]
    return _table(made)


def _inside(given: Mapping[str, np.ndarray], width: int) -> np.ndarray:
    """[B, T] true at the tokens of a response, whether they train or not."""
    if "attention_mask" in given:
        attention = np.asarray(given["attention_mask"])
        return attention[:, attention.shape[1] - width :] != 0
    if "response_mask" in given:
        mask = np.asarray(given["response_mask"]) != 0
        return np.arange(width) < padded.lengths_of(mask)[:, None]
    raise DataError("a verl batch needs 'attention_mask' or 'response_mask' to tell padding from tokens")


def _table(columns: Mapping[str, Any]) -> fr.ExperienceTable:
    import pyarrow as pa

    def arrow(name: str, values: Any) -> Any:
        kind = TYPES[name].to_arrow()
        if isinstance(values, fr.Ragged):
            flat = pa.array(values.values, kind.value_type)
            return pa.LargeListArray.from_arrays(pa.array(values.offsets, pa.int64()), flat)
        return pa.array(values, kind)

    table = fr.ExperienceTable()
    types = {name: kind for name, kind in TYPES.items() if name in columns}
    table.append(pa.table({name: arrow(name, values) for name, values in columns.items()}), types=types)
    return table


def to_batch(
    rows: Any, *, pad_id: int = 0, prompt_width: int | None = None, response_width: int | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rows as (tensors, arrays beside them) of a verl batch.

    Example:
        tensors, non_tensors = adapters.verl.to_batch(run.rows())
        DataProto.from_dict(tensors=tensors, non_tensors=non_tensors)

    Args:
        rows: an `fr.ExperienceTable`, or the rows of a run; with `response_ids`.
        pad_id: fills `prompts` on the left and `responses` on the right.
        prompt_width, response_width: columns of the matrices; None takes the longest row.

    Errors: SchemaError for a row longer than its matrix; DataError without `response_ids`.
    """
    import torch

    has = rows.columns if hasattr(rows, "columns") else rows.names
    if "response_ids" not in has:
        raise DataError(f"a verl batch is made from 'response_ids'; the rows have {', '.join(has)}")
    ids = rows["response_ids"]
    responses = padded.matrix(fr.Ragged.like(ids.values.astype(np.int64), ids), fill=pad_id, width=response_width)
    inside = padded.mask_of(ids, width=response_width)
    made: dict[str, Any] = {"responses": responses, "attention_mask": inside}
    trains = rows["loss_mask"] if "loss_mask" in has else fr.Ragged.like(np.ones(len(ids.values), bool), ids)
    made["response_mask"] = padded.matrix(trains, width=inside.shape[1])
    for theirs, ours in PER_TOKEN.items():
        if ours in has:
            made[theirs] = padded.matrix(rows[ours], width=inside.shape[1])
    if "reward" in has:
        made["token_level_scores"] = _at_last(np.asarray(rows["reward"], np.float32), inside)
        made.setdefault("token_level_rewards", made["token_level_scores"])
    if "prompt_ids" in has:
        prompt = rows["prompt_ids"]
        prompt = fr.Ragged.like(prompt.values.astype(np.int64), prompt)
        made["prompts"] = padded.matrix(prompt, fill=pad_id, side="left", width=prompt_width)
        shown = padded.mask_of(prompt, side="left", width=prompt_width)
        made["attention_mask"] = np.concatenate([shown, inside], axis=1)
        made["input_ids"] = np.concatenate([made["prompts"], responses], axis=1)
        made["position_ids"] = np.maximum(np.cumsum(made["attention_mask"], axis=1) - 1, 0)
    for name in ("attention_mask", "response_mask"):
        made[name] = made[name].astype(np.int64)
    beside = {"uid": np.asarray(rows["prompt_id"], object)} if "prompt_id" in has else {}
    if "data_source" in has:
        beside["data_source"] = np.asarray(rows["data_source"], object)
    if "answer" in has:
        beside["reward_model"] = _objects([{"ground_truth": truth} for truth in rows["answer"]])
    if "extra_info" in has:
        beside["extra_info"] = _objects([json.loads(text) for text in rows["extra_info"]])
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in made.items()}, beside


def _objects(values: list[Any]) -> np.ndarray:
    made = np.empty(len(values), object)
    made[:] = values
    return made


def _at_last(reward: np.ndarray, inside: np.ndarray) -> np.ndarray:
    lengths = padded.lengths_of(inside)
    scores = np.zeros(inside.shape, np.float32)
    some = np.flatnonzero(lengths)
    scores[some, lengths[some] - 1] = reward[some]
    return scores


def to_data_proto(rows: Any, **options: Any) -> Any:
    """Rows as verl's `DataProto`. Options as in `to_batch`."""
    try:
        from verl import DataProto
    except ImportError as error:
        raise MissingExtra(
            "adapters.verl.to_data_proto needs verl, which is not installed; adapters.verl.to_batch does without"
        ) from error
    made, beside = to_batch(rows, **options)
    return DataProto.from_dict(tensors=made, non_tensors=beside)


def to_tensordict(rows: Any, **options: Any) -> Any:
    """The tensors of `to_batch` as a TensorDict; what is beside them is left out."""
    try:
        from tensordict import TensorDict
    except ImportError as error:
        raise MissingExtra(
            "adapters.verl.to_tensordict needs tensordict, which is not installed: pip install tensordict"
        ) from error
    made, _ = to_batch(rows, **options)
    return TensorDict(made, batch_size=[len(made["responses"])])


# --------------------------------------------------------------------------------------------------------- advantages


def advantage_estimator(
    operator: fr.Operator | OperatorCall, *, state: fr.State | None = None, **config: Any
) -> Callable[..., tuple[Any, Any]]:
    """An advantage of FlowRL as one of verl's estimators: `f(token_level_rewards, response_mask, index, ...)`.

    Example:
        register_adv_est("maxrl")(adapters.verl.advantage_estimator(advantages.maxrl))

    Args:
        operator: writes `advantage` per row (repeated over the row's tokens) or `advantages` per token, perhaps `returns`.
            It reads `reward` (the sum of the row's token rewards), `token_rewards`, `prompt_id` (verl's index),
            `loss_mask` (its response mask), `baseline`, `values`, `old_logprobs` and what else verl passes.
        config: of the operator, unless it is bound already. Its options belong here: `advantage_estimator(operator, gamma=0.99)`.

    Returns (advantages, returns), both [B, T] with 0 outside the mask; without returns of its own, both are the advantages. A
    reward outside the mask counts if it is finite, as in verl, whose last token may be a tool's; what is not finite there is
    padding.

    Errors, when it is called: DataError without `index` for an operator that compares the responses of a prompt; ConfigError for
    a number of verl's (`gamma`, `lam` in its `config`, or any other that is passed) that the operator does not use.
    """
    call = arrays.bound(operator, config)
    written = [column.name for column in call.writes]
    if not {"advantage", "advantages"} & set(written):
        raise ConfigError(f"'{call.short_name}' writes {', '.join(written) or 'nothing'} and no advantage")
    compares = "prompt_id" in {call.locality.key, *(read.column for read in call.reads if not read.is_optional)}

    def estimate(
        token_level_rewards: Any, response_mask: Any, index: Any = None, config: Any = None, **more: Any
    ) -> tuple[Any, Any]:
        _refuse_unused(call, config, more)
        is_there = (response_mask != 0) | token_level_rewards.isfinite()
        paid = token_level_rewards.where(is_there, token_level_rewards.new_zeros(()))
        given: dict[str, Any] = {"token_rewards": token_level_rewards, "reward": paid.sum(dim=-1)}
        if index is not None:
            given["prompt_id"] = np.asarray([str(i) for i in index], object)
        elif compares:
            raise DataError(
                f"'{call.short_name}' compares the responses of a prompt, and verl gave no 'index' (its batch needs 'uid')"
            )
        names = {**PER_TOKEN, "reward_baselines": "baseline"}
        given |= {names.get(name, name): value for name, value in more.items() if hasattr(value, "detach")}
        found = tensors.apply(call, given, response_mask, state=state)
        found = found if isinstance(found, Mapping) else {written[0]: found}
        advantages = found.get("advantages")
        if advantages is None:
            advantages = found["advantage"].unsqueeze(-1) * response_mask
        advantages = advantages.to(token_level_rewards.dtype)
        return advantages, found.get("returns", advantages)

    estimate.__name__ = estimate.__qualname__ = call.short_name
    return estimate


FACTORS = ("gamma", "lam")
"""Numbers that every configuration of verl holds, 1.0 where nobody set them."""


def _refuse_unused(call: OperatorCall, config: Any, more: Mapping[str, Any]) -> None:
    """Errors: ConfigError for a number that verl was told and that the operator would not use."""
    own = dict(call.config)
    read = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)
    told = {name: value for name in FACTORS if (value := read(name)) not in (None, 1.0)}
    if read("norm_adv_by_std_in_grpo") is False and own.get("scale", "none") != "none":
        raise ConfigError(
            f"verl's norm_adv_by_std_in_grpo is False and '{call.short_name}' divides by a deviation: "
            'advantage_estimator(..., scale="none"), or set it to True'
        )
    told |= {name: value for name, value in more.items() if isinstance(value, bool | int | float | str)}
    for name, value in told.items():
        used = own.get(name, 1.0 if name in FACTORS else None)
        if value != used:
            has = f"'{call.short_name}' has {name}={used!r}" if name in own else f"'{call.short_name}' has no '{name}'"
            fix = f"advantage_estimator(..., {name}={value!r})" if name in own else "choose an operator that has it"
            raise ConfigError(
                f"verl was told {name}={value!r}, and {has}; {fix}, or leave it out of verl's configuration"
            )
