"""A plan on its way from a placement to steps: what the passes of `flowrl.planner.passes` take and give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from flowrl.graph.nodes import Graph
from flowrl.mesh import Mesh
from flowrl.planner.holds import State
from flowrl.planner.options import Option
from flowrl.planner.problem import Candidate, Problem
from flowrl.planner.rows import RowWork
from flowrl.planner.steps import Step
from flowrl.planner.tasks import Hold, Lane


@dataclass(frozen=True, slots=True)
class Parked:
    """State that may leave the devices between its uses."""

    state: State
    mesh: Mesh
    uses: tuple[str, ...]
    """Steps that need it on the devices."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Steps without times. Each pass gives a new one."""

    problem: Problem
    candidate: Candidate
    graph: Graph
    is_exact: bool = True
    """Whether handovers are counted box by box; False for plans that are only compared."""
    steps: tuple[Step, ...] = ()
    """Those on the compute lane of a mesh in the order in which the mesh does them."""
    resident: tuple[Hold, ...] = ()
    """Holds of no single step."""
    parked: tuple[Parked, ...] = ()
    rows: tuple[RowWork, ...] = ()
    """What each node reads."""

    @property
    def placed(self) -> dict[str, tuple[Mesh, Option]]:
        """Of each role."""
        return {
            option.role: (mesh, option)
            for mesh, one in zip(self.candidate.meshes, self.candidate.combinations, strict=True)
            for option in one.options
        }

    def step(self, name: str) -> Step:
        """Raises `KeyError` for a name that no step has."""
        for step in self.steps:
            if step.name == name:
                return step
        raise KeyError(name)

    def slots(self, mesh: Mesh) -> tuple[Step, ...]:
        """The steps that occupy a mesh, in their order."""
        return tuple(step for step in self.steps if Lane.COMPUTE in step.lanes and mesh.first in step.devices)

    def with_steps(self, steps: Iterable[Step], after: Mapping[str, Iterable[str]] | None = None) -> Draft:
        """The draft with steps added, and further steps for which others wait (by their names)."""
        waits = {name: tuple(more) for name, more in (after or {}).items()}
        every = [
            replace(step, after=tuple(dict.fromkeys((*step.after, *waits[step.name])))) if step.name in waits else step
            for step in (*self.steps, *steps)
        ]
        return replace(self, steps=tuple(every))
