"""Hugging Face data sets, both ways. Values stay in Arrow: no Python list is made of them on the way."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import flowrl as fr
from flowrl.errors import ConfigError, DataError, MissingExtra
from flowrl_operators.adapters import _calls

__all__ = ["data", "dataset"]


def data(
    dataset: Any,
    *,
    columns: Sequence[str] | Mapping[str, str] | None = None,
    messages: str | None = None,
    tokenizer: Any = None,
    as_json: Sequence[str] = (),
    take: int | None = None,
    **options: Any,
) -> fr.Data:
    """A Hugging Face data set as data of a flow.

    Example:
        gsm8k = load_dataset("openai/gsm8k", "main", split="train")
        adapters.datasets.data(gsm8k, columns={"prompt": "question", "answer": "answer"})

    Args:
        dataset: `datasets.Dataset`, an `IterableDataset` (streamed) together with `take`, an Arrow table, or a list of dicts.
        columns: those to keep, or new name to name in the data; None keeps all.
        messages: a column of chat messages that becomes the prompt. One user message becomes its text in `prompt`, to which the
            model's own template is applied. Longer ones need `tokenizer`.
        tokenizer: a Hugging Face tokenizer: `messages` becomes `prompt_ids` by its chat template, the assistant's turn opened,
            and `prompt` the same as text.
        as_json: columns of dicts or nested lists, as JSON text; a flow's columns hold numbers, text or a list of them.
        take: rows of a streamed data set; they are read now, since an epoch needs to know its rows.
        options: of `fr.Data`: batch, shuffle, types.

    Errors: DataError for missing values and for columns that cannot be stored; ConfigError for a streamed set without `take`.
    """
    import pyarrow as pa

    table = _arrow(dataset, take)
    made = {}
    for new, old in _sources(columns, table.schema.names).items():
        if old not in (messages, *as_json):
            made[new] = table.column(old)
        elif old != messages:
            made[new] = pa.array([json.dumps(value) for value in table.column(old).to_pylist()], pa.large_string())
    if messages is not None:
        if messages not in table.schema.names:
            raise DataError(f"the data has no column '{messages}'; it has {', '.join(table.schema.names)}")
        made.pop("prompt", None)
        made |= prompts_of(table.column(messages).to_pylist(), tokenizer)
    return fr.Data(pa.table(made), **options)


def _arrow(dataset: Any, take: int | None) -> Any:
    import pyarrow as pa

    if isinstance(dataset, list | tuple):
        dataset = pa.Table.from_pylist(list(dataset))
    if isinstance(dataset, pa.Table):
        return dataset if take is None else dataset.slice(0, take)
    if isinstance(getattr(dataset, "column_names", None), Mapping):
        raise DataError(f"this is several data sets in one ({', '.join(dataset.column_names)}); choose a split of them")
    if hasattr(dataset, "with_format") and hasattr(dataset, "__len__"):
        # the whole as one Arrow table, with the rows that select, filter and shuffle left, in their order
        return dataset.with_format("arrow")[: len(dataset) if take is None else take]
    if take is None:
        raise ConfigError(
            f"{type(dataset).__name__} is read row by row and does not say how many there are; say take=, how many to read"
        )
    rows = list(islice(iter(dataset), take))
    if not rows:
        raise DataError("the data set has no rows; a flow needs at least one")
    return pa.Table.from_pylist(rows)


def _sources(columns: Sequence[str] | Mapping[str, str] | None, known: Sequence[str]) -> dict[str, str]:
    if columns is None:
        return {name: name for name in known}
    wanted = dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}
    for old in wanted.values():
        if old not in known:
            raise DataError(f"the data has no column '{old}'; it has {', '.join(known)}")
    return wanted


def prompts_of(conversations: list[Any], tokenizer: Any) -> dict[str, Any]:
    """Chat messages of each row as `prompt`, and with a tokenizer as `prompt_ids`; see `data`."""
    import pyarrow as pa

    texts, ids = [], []
    for row, messages in enumerate(conversations):
        # a struct in Arrow has every field in every message: what is None was not there
        chat = [{k: v for k, v in dict(m).items() if v is not None} for m in messages or ()]
        if tokenizer is not None:
            texts.append(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
            # the template has written all special tokens
            ids.append(list(tokenizer(texts[-1], add_special_tokens=False)["input_ids"]))
        elif len(chat) == 1 and chat[0].get("role") == "user":
            texts.append(_calls.text_of(chat[0], f"row {row}"))
        else:
            roles = ", ".join(str(message.get("role")) for message in chat) or "no messages"
            raise DataError(
                f"row {row} is no single user message but {roles}; give tokenizer= so that its chat template makes the prompt"
            )
    made = {"prompt": pa.array(texts, pa.large_string())}
    return made | ({"prompt_ids": pa.array(ids, pa.large_list(pa.int32()))} if tokenizer is not None else {})


def dataset(rows: Any, *, columns: Sequence[str] | None = None) -> Any:
    """Rows of FlowRL as a `datasets.Dataset`, on the same Arrow buffers.

    Args:
        rows: an `fr.ExperienceTable`, the rows of a run, or an `fr.Data`.
        columns: those to take; None takes all.

    The types stay with the columns, so that `fr.ExperienceTable().append(dataset.data.table)` finds them again.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra(
            "adapters.datasets.dataset needs Hugging Face's datasets, which is not installed: pip install datasets"
        ) from error
    arrow = rows.rows.to_arrow() if isinstance(rows, fr.Data) else rows.to_arrow()
    return datasets.Dataset(arrow if columns is None else arrow.select(list(columns)))
