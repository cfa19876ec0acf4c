"""FlowRL: a composable dataflow language for RL post-training of language models.

Example:

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
    "flowrl.graph.values": ("Component", "Environment", "component"),
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
    "flowrl.engines.averages": ("Totals",),
    "flowrl.engines.plain": ("apply_loss",),
    "flowrl.store.table": ("ExperienceTable",),
    "flowrl.store.remote": ("RemoteTable",),
    "flowrl.store.flight": ("serve_table",),
    "flowrl.runtime.data": ("Data",),
    "flowrl.runtime.local": ("Run", "run_local"),
    "flowrl.runtime.replay": ("replay",),
    "flowrl.mesh": ("Cluster", "Layout", "Placement"),
    "flowrl.planner.choices": ("Choices",),
    "flowrl.planner.planning": ("plan",),
    "flowrl.planner.problem": ("Effort",),
    "flowrl.planner.steps": ("Plan",),
    "flowrl.planner.workload": ("Lengths", "Workload"),
    "flowrl.errors": ("CheckError", "FlowError", "PlanError", "Problem"),
}  # fmt: skip

_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted([*_MODULE_OF, "__version__"])


def __getattr__(name: str) -> Any:
    # names are loaded on first use, so that `import flowrl` stays quick and torch-free
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'flowrl' has no attribute '{name}'")
    found = getattr(importlib.import_module(_MODULE_OF[name]), name)
    if _MODULE_OF[name].startswith("flowrl.planner"):
        importlib.import_module("flowrl.viz")  # only names of pictures, so that what is handed out here can be drawn
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return list(__all__)


if TYPE_CHECKING:
    # spelled `name as name` so that type checkers take each as exported
    from flowrl.engines.averages import Totals as Totals
    from flowrl.engines.plain import apply_loss as apply_loss
    from flowrl.errors import (
        CheckError as CheckError,
        FlowError as FlowError,
        PlanError as PlanError,
        Problem as Problem,
    )
    from flowrl.graph.checks import check as check
    from flowrl.graph.expressions import (
        col as col,
        where as where,
    )
    from flowrl.graph.flows import (
        Flow as Flow,
        flow as flow,
    )
    from flowrl.graph.handles import (
        Rows as Rows,
        Weights as Weights,
    )
    from flowrl.graph.language import (
        after as after,
        apply as apply,
        assign as assign,
        broadcast as broadcast,
        buffer as buffer,
        concat as concat,
        ema as ema,
        every as every,
        filter as filter,
        join as join,
        log as log,
        logprobs as logprobs,
        prompts_from as prompts_from,
        reduce as reduce,
        refill as refill,
        repeat as repeat,
        rollout as rollout,
        score as score,
        select as select,
        top_logprobs as top_logprobs,
        update as update,
        values as values,
        with_columns as with_columns,
    )
    from flowrl.graph.losses import (
        Loss as Loss,
        loss as loss,
    )
    from flowrl.graph.nodes import (
        Graph as Graph,
        Node as Node,
    )
    from flowrl.graph.operators import (
        Keep as Keep,
        Locality as Locality,
        Operator as Operator,
        State as State,
        group as group,
        operator as operator,
        reward as reward,
    )
    from flowrl.graph.schedule import (
        Async as Async,
        Sync as Sync,
    )
    from flowrl.graph.text import (
        from_text as from_text,
        to_text as to_text,
    )
    from flowrl.graph.values import (
        Component as Component,
        Environment as Environment,
        component as component,
    )
    from flowrl.mesh import (
        Cluster as Cluster,
        Layout as Layout,
        Placement as Placement,
    )
    from flowrl.model import (
        AdamW as AdamW,
        Model as Model,
    )
    from flowrl.planner.choices import Choices as Choices
    from flowrl.planner.planning import plan as plan
    from flowrl.planner.problem import Effort as Effort
    from flowrl.planner.steps import Plan as Plan
    from flowrl.planner.workload import (
        Lengths as Lengths,
        Workload as Workload,
    )
    from flowrl.runtime.data import Data as Data
    from flowrl.runtime.local import (
        Run as Run,
        run_local as run_local,
    )
    from flowrl.runtime.replay import replay as replay
    from flowrl.schema.columns import (
        Column as Column,
        Provenance as Provenance,
        TableSchema as TableSchema,
    )
    from flowrl.schema.ragged import Ragged as Ragged
    from flowrl.schema.types import (
        PROMPT as PROMPT,
        SAMPLE as SAMPLE,
        TOKEN as TOKEN,
        TURN as TURN,
        ColumnType as ColumnType,
        Granularity as Granularity,
    )
    from flowrl.store.flight import serve_table as serve_table
    from flowrl.store.remote import RemoteTable as RemoteTable
    from flowrl.store.table import ExperienceTable as ExperienceTable
