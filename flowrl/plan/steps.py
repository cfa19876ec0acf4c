"""The plan: a frozen, serialisable list of steps on meshes, with what was predicted for each.

A step says where and when a node of the graph, or a move that the planner inserted, is done. What is marked as predicted is
no part of a plan's identity: two plans that do the same have the same hash, whatever they were expected to take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.plan.tasks import Hold, Lane, StepKind, Task

FORMAT = 1
"""Version of the file format. A file of a newer one is refused."""

Option = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the planner expects of a step. Not part of the plan's identity."""

    start_s: float
    seconds: float
    num_bytes: int = 0
    """Moved by the step, over all devices."""
    memory_bytes: int = 0
    """The most that one of its devices holds while it runs."""
    holds: tuple[Hold, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One row of a plan.

    Example:
        Step("update.train", "update", StepKind.COMPUTE, Mesh(0, 8), (Lane.COMPUTE,), after=("reference",),
             layout=Layout.parse("f8"), options={"micro_batch_tokens": 8192, "offload": "park"},
             reads=("response", "old_logprobs"), predicted=Predicted(start_s=51.0, seconds=97.1))
    """

    name: str
    node: str
    """Of the graph: the one it does, or for which it was inserted."""
    kind: StepKind
    mesh: Mesh
    """Where it runs; for a move, where it ends."""
    lanes: tuple[Lane, ...]
    predicted: Predicted
    after: tuple[str, ...] = ()
    source: Mesh | None = None
    """Of a move between meshes: where it begins."""
    layout: Layout | None = None
    """Of the weights that it uses; of a reshard, the new one."""
    reads: tuple[str, ...] = ()
    """Columns it reads or moves; of moves of weights, the models or states."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """How it is done: tokens of a micro-batch, class of offload, ... Read only."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Of its mesh and of the mesh it moves from, rising."""
        raise NotImplementedError

    @property
    def task(self) -> Task:
        """What the simulator runs for it."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Plan:
    """How one iteration of a flow is computed on a cluster."""

    name: str
    graph_hash: str
    operator_hashes: Mapping[str, str]
    """Name of each operator, and the hash of its code."""
    cluster: Cluster
    steps: tuple[Step, ...]
    """In the order of starting."""
    meshes: Mapping[str, Mesh] = field(default_factory=dict)
    """Names of meshes, for reading."""
    max_staleness: int = 0
    workload: Mapping[str, Any] = field(default_factory=dict)
    """What the predictions assume about prompts and responses, as JSON values."""
    predicted: Mapping[str, Any] = field(default_factory=dict)
    """Of the whole: `makespan_s`, `period_s`, `lower_bound_s`, `gap`, ... as JSON values."""
    resident: tuple[Hold, ...] = ()
    """Memory that is taken all the time (predicted)."""

    @property
    def hash(self) -> str:
        """Names what is done, not how long it takes: everything but predictions and what they were made from."""
        raise NotImplementedError

    @property
    def tasks(self) -> tuple[Task, ...]:
        """For the simulator, in the order of the steps."""
        raise NotImplementedError

    def to_json(self, path: str | Path | None = None) -> str:
        """Canonical JSON, written to `path` if given. Equal plans have equal texts."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` writes. Raises `ConfigError` for another format, a newer version, a plan that contradicts
        itself."""
        raise NotImplementedError

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """`from_json` of a file."""
        raise NotImplementedError

    def __str__(self) -> str:
        """The table of steps."""
        raise NotImplementedError
