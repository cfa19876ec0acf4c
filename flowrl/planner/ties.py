"""Which of two plans is simpler, for plans whose seconds the cost model cannot tell apart.

1  numerics        what the user asked for before what the user consents to
2  idle devices    fewer of each node
3  meshes          fewer
4  splitting       less tensor parallelism of trainers and frozen models
5  layout changes  fewer: layouts of one model, less one
6  offload         less: none before park before a streamed optimizer before one on the CPU before all streamed
7  device memory   less, in whole GiB
8  seconds
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from flowrl.mesh import Layout
from flowrl.planner.options import Option
from flowrl.planner.problem import GIB, Candidate, Problem, settings_changed

Simplicity = tuple[int, int, int, int, int, int, int, float]
"""Lower is simpler."""

OFFLOADS = {"none": 0, "park": 1, "sopt": 2, "opt": 3, "all": 4}
"""How much there is to go wrong: copies between calls, copies during a step, Adam on the CPU, weights from the host."""
UNKNOWN = 5


def burden(option: Option) -> int:
    """How much is offloaded: twice the class, and one for parked weights beside a class that is not parking."""
    found = 0
    for name, value in option.settings:
        if name == "offload":
            found += 2 * OFFLOADS.get(str(value), UNKNOWN)
        elif name == "park_weights":
            found += bool(value)
    return found


def splitting(option: Option) -> int:
    """How far matrices are cut that need not be: the tensor parallelism of a trainer or a frozen model, beyond 1. Engines need it
    to be quick."""
    return option.layout.tp - 1 if option.has_context else 0


def layout_changes(layouts: Iterable[tuple[str, Layout]]) -> int:
    """Of (model, layout) of each role: layouts beyond the first, of each model."""
    known = set(layouts)
    return len(known) - len({model for model, _ in known})


def whole_gib(num_bytes: float) -> int:
    """Rounded up: less than that is no difference."""
    return math.ceil(num_bytes / GIB)


def simplicity(problem: Problem, candidate: Candidate) -> Simplicity:
    """The key by which plans of equal seconds are ordered. `problem`: that of the whole cluster."""
    models: Mapping[str, str] = {role.name: role.model for role in problem.roles}
    options = [option for one in candidate.combinations for option in one.options]
    return (
        candidate.numerics,
        problem.cluster.devices_per_node - candidate.per_node,
        len(candidate.meshes),
        sum(map(splitting, options)),
        layout_changes((models[option.role], option.layout) for option in options),
        sum(map(burden, options)),
        whole_gib(candidate.peak_bytes),
        candidate.seconds,
    )


def why_simpler(problem: Problem, best: Candidate, fastest: Candidate) -> str:
    """What decided between two plans, in one line; empty when they are one."""
    if best == fastest:
        return ""
    one, other = simplicity(problem, best), simplicity(problem, fastest)
    said = (
        "numerics are those asked for",
        f"it leaves fewer devices idle ({one[1]} against {other[1]} of each node)",
        f"fewer meshes ({one[2]} against {other[2]} meshes)",
        "less tensor parallelism of trainers and frozen models",
        f"fewer layout changes ({one[4]} against {other[4]})",
        "less is offloaded",
        f"less device memory ({best.peak_bytes / GIB:.1f} against {fastest.peak_bytes / GIB:.1f} GiB)",
        "faster",
    )
    at = next((index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(said) - 1)
    slower = best.seconds / fastest.seconds - 1 if fastest.seconds else 0.0
    changed = ", ".join(settings_changed(problem.roles, best, fastest))
    name = str(fastest.placement) if fastest.placement != best.placement else f"the same placement with {changed}"
    return (
        f"a tie: {name} is predicted {slower:.1%} faster, less than the model can tell apart ({problem.tie:.1%}); this plan is "
        f"simpler: {said[at]}"
    )
