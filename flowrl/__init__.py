"""FlowRL: a composable dataflow language for RL post-training of language models.

    import flowrl as fr

    @fr.flow
    def grpo(prompts, policy, *, group_size=8): ...

    fr.run_local(grpo, steps=10, prompts=data, policy=fr.Model("path"))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "flowrl.schema.types": ("PROMPT", "SAMPLE", "TURN", "TOKEN", "ColumnType", "Granularity"),
    "flowrl.schema.columns": ("Column", "Provenance", "TableSchema"),
    "flowrl.schema.ragged": ("Ragged",),
    "flowrl.graph.operators": ("Keep", "Locality", "Operator", "State", "group", "operator", "reward"),
    "flowrl.graph.losses": ("Loss", "loss"),
    "flowrl.graph.flows": ("Flow", "flow"),
    "flowrl.graph.nodes": ("Graph", "Node"),
    "flowrl.graph.handles": ("Rows", "Weights"),
    "flowrl.graph.values": ("Component", "component"),
    "flowrl.graph.expressions": ("col", "where"),
    "flowrl.graph.language": (
        "after", "apply", "assign", "broadcast", "buffer", "concat", "ema", "every", "filter", "join", "log", "logprobs",
        "prompts_from", "reduce", "refill", "repeat", "rollout", "score", "select", "top_logprobs", "update", "values",
        "with_columns",
    ),
    "flowrl.graph.text": ("from_text", "to_text"),
    "flowrl.graph.checks": ("check",),
    "flowrl.graph.schedule": ("Async", "Sync"),
    "flowrl.model": ("AdamW", "Model"),
    "flowrl.store.table": ("ExperienceTable",),
    "flowrl.runtime.data": ("Data",),
    "flowrl.runtime.local": ("Run", "run_local"),
    "flowrl.runtime.replay": ("replay",),
    "flowrl.errors": ("CheckError", "FlowError", "Problem"),
}  # fmt: skip

_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted([*_MODULE_OF, "__version__"])


def __getattr__(name: str) -> Any:
    # names are loaded on first use, so that `import flowrl` stays quick and torch-free
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'flowrl' has no attribute '{name}'")
    found = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return list(__all__)


if TYPE_CHECKING:
    from flowrl.errors import CheckError, FlowError, Problem
    from flowrl.graph.checks import check
    from flowrl.graph.expressions import col, where
    from flowrl.graph.flows import Flow, flow
    from flowrl.graph.handles import Rows, Weights
    from flowrl.graph.language import (
        after, apply, assign, broadcast, buffer, concat, ema, every, filter, join, log, logprobs, prompts_from, reduce,
        refill, repeat, rollout, score, select, top_logprobs, update, values, with_columns,
    )  # fmt: skip
    from flowrl.graph.losses import Loss, loss
    from flowrl.graph.nodes import Graph, Node
    from flowrl.graph.operators import Keep, Locality, Operator, State, group, operator, reward
    from flowrl.graph.schedule import Async, Sync
    from flowrl.graph.text import from_text, to_text
    from flowrl.graph.values import Component, component
    from flowrl.model import AdamW, Model
    from flowrl.runtime.data import Data
    from flowrl.runtime.local import Run, run_local
    from flowrl.runtime.replay import replay
    from flowrl.schema.columns import Column, Provenance, TableSchema
    from flowrl.schema.ragged import Ragged
    from flowrl.schema.types import PROMPT, SAMPLE, TOKEN, TURN, ColumnType, Granularity
    from flowrl.store.table import ExperienceTable
