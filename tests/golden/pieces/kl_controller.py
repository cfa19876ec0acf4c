"""Controllers of the KL coefficient."""

from __future__ import annotations

from typing import Any

from flowrl_operators import rewards
from tests.golden.vectors import Case


def controller(case: Case) -> dict[str, Any]:
    """The coefficient before the first step and after each."""
    p = case.params
    values = [float(p["init_kl_coef"] if "init_kl_coef" in p else p["kl_coef"])]
    steps = zip(case.array("current_kl").tolist(), case.inputs["n_steps"], strict=True)
    for kl, rows in steps:
        values.append(
            rewards.next_kl_coefficient(values[-1], kl, rows, target=p.get("target_kl"), horizon=p.get("horizon", 1))
        )
    return {"values": values}


PATTERNS = [(r"\w+\.(adaptive|fixed)", lambda case, _: controller(case))]
