"""Whether the sequences of a plan are longer than its models were made for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowrl.planner.steps import Plan


def context_lines(plan: Plan) -> list[str]:
    """That the longest sequence is beyond the positions that models have in their configs, a line for models of one length."""
    if plan.workload is None:
        return []
    asked, answered = plan.workload.prompt_lengths.longest, plan.workload.response_lengths.longest
    short: dict[int, list[str]] = {}
    for name, shape in plan.models:
        if 0 < shape.context < asked + answered:
            short.setdefault(shape.context, []).append(f"'{name}'")
    return [
        f"sequences of up to {asked + answered:,} tokens (a prompt of {asked:,} and a response of {answered:,}) are longer than "
        f"{', '.join(names)} {'was' if len(names) == 1 else 'were'} made for: max_position_embeddings is {context:,}"
        for context, names in sorted(short.items())
    ]
