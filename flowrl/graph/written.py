"""Which columns a node writes, as far as the node alone tells."""

from __future__ import annotations

from flowrl.graph.nodes import Node
from flowrl.graph.operators import OperatorCall
from flowrl.schema import standard as s

ROLLOUT_WRITES = (
    s.SAMPLE_ID, s.SAMPLE_INDEX, s.RESPONSE, s.RESPONSE_IDS, s.RESPONSE_MASK, s.LOSS_MASK, s.ROLLOUT_LOGPROBS, s.FINISH_REASON,
    s.NUM_TURNS, s.TEMPERATURE, s.MIN_POLICY_VERSION, s.MAX_POLICY_VERSION,
)  # fmt: skip


def written_by(node: Node) -> tuple[str, ...]:
    """Names of the columns that a node itself writes (not those it passes on)."""
    match node.kind:
        case "apply":
            return tuple(c.name for c in node["operator"].writes)
        case "rollout":
            return tuple(c.name for c in (*ROLLOUT_WRITES, *((s.ROLE,) if node.get("role") is not None else ())))
        case "top_logprobs":
            return (f"{node['out']}_ids", f"{node['out']}_logprobs")
        case "combine":
            return ("reward", *(f"reward/{name}" for name in node["names"]))
        case "with_columns" | "copy":
            return tuple(name for name, _ in node["columns"])
        case "select":
            return tuple(name for name, _ in node["renamed"])
        case "prompts_from":
            return (s.PROMPT_ID.name, s.PROMPT_TEXT.name, s.SOURCE_ID.name)
        case "refill":
            return tuple(c.name for c in node["keep"].writes)
    out = node.get("out")
    return (out,) if isinstance(out, str) else ()


def adds_to(node: Node) -> tuple[str, ...]:
    """Names of the columns that a node adds to: what stood there before stays beside what it says."""
    if node.kind == "combine":
        return (s.ROW_ERROR.name,)
    return (s.ROW_ERROR.name,) if node.kind == "apply" and flags_rows(node["operator"]) else ()


def flags_rows(operator: OperatorCall) -> bool:
    """Whether an operator goes on where a row fails, and says why in `row_error`."""
    return operator.each_row and operator.on_error == "flag"
