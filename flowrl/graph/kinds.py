"""The kinds of node and the properties that passes, checks, planner and runtime ask for. Nobody asks for a node's role."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """Properties of a kind of node."""

    gives: str
    """"rows" or "weights"."""
    ports: tuple[str, ...]
    """Ports in order; the last may repeat when `is_variadic`."""
    is_variadic: bool = False
    uses_model: bool = False
    """Runs the model on port `model`."""
    samples: bool = False
    """Makes responses: it gives rows with `prompt_ids` and `response_ids`."""
    changes_model: bool = False
    """Returns the next version of the model on port `model`."""
    is_forward: bool = False
    """A deterministic function of weights and token columns: equal ones may be merged."""
    is_pure: bool = False
    """A deterministic function of its inputs that may be merged or left out."""
    adds_columns: bool = False
    """Gives the rows of its first `rows` port with columns added: may be skipped when nobody reads them."""
    has_state: bool = False
    """Remembers something from step to step."""


KINDS: dict[str, Kind] = {
    "input": Kind("rows", ()),
    "rollout": Kind("rows", ("model", "rows"), uses_model=True, samples=True),
    "logprobs": Kind("rows", ("model", "rows"), uses_model=True, is_forward=True, adds_columns=True),
    "top_logprobs": Kind("rows", ("model", "rows"), uses_model=True, is_forward=True, adds_columns=True),
    "values": Kind("rows", ("model", "rows"), uses_model=True, is_forward=True, adds_columns=True),
    "score": Kind("rows", ("model", "rows"), uses_model=True, is_forward=True, adds_columns=True),
    "update": Kind("weights", ("model", "rows"), uses_model=True, changes_model=True),
    "assign": Kind("weights", ("model", "source"), changes_model=True),
    "ema": Kind("weights", ("model", "source"), changes_model=True),
    "after": Kind("weights", ("then", "otherwise")),
    "apply": Kind("rows", ("rows",), adds_columns=True),
    "combine": Kind("rows", ("rows",), is_variadic=True, is_pure=True),
    "select": Kind("rows", ("rows",), is_pure=True),
    "with_columns": Kind("rows", ("rows",), is_pure=True, adds_columns=True),
    "join": Kind("rows", ("rows", "right"), is_pure=True),
    "concat": Kind("rows", ("rows",), is_variadic=True, is_pure=True),
    "filter": Kind("rows", ("rows",), is_pure=True),
    "broadcast": Kind("rows", ("rows",), is_pure=True, adds_columns=True),
    "reduce": Kind("rows", ("rows",), is_pure=True),
    "copy": Kind("rows", ("rows",), is_pure=True, adds_columns=True),
    "prompts_from": Kind("rows", ("rows",), is_pure=True),
    "buffer": Kind("rows", ("rows",), has_state=True),
    "refill": Kind("rows", ("rows", "model"), is_variadic=True, uses_model=True),
    "repeat": Kind("rows", ("rows",), is_pure=True),
    "every": Kind("rows", ("rows",)),
    "log": Kind("rows", ("rows",)),
}
"""`copy` is made by a pass: when two equal forwards are merged, the second becomes a copy of the first's column.

An `input` gives what its parameter `kind` says: "rows", "weights" or "unused".
"""


def gives_weights(kind: str, params: dict[str, object]) -> bool:
    """Whether a node of this kind gives weights."""
    return params.get("kind") == "weights" if kind == "input" else KINDS[kind].gives == "weights"
