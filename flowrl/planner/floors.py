"""Seconds that no option of a role goes below, known before any option is made.

Making the options of an engine simulates its sampling, which takes longer than all of the rest of a search. Most meshes can be
left out without it: arithmetic alone, spread over all devices at the efficiency that is reached, already takes too long there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flowrl.cost.flops import forward_flops, train_flops
from flowrl.mesh import Cluster
from flowrl.planner.options import Choices
from flowrl.planner.roles import Call, Role
from flowrl.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class Floor:
    """Of one call: `max(device_s / devices, fixed_s)`."""

    device_s: float
    """Seconds of its arithmetic on one device."""
    fixed_s: float = 0.0
    """What more devices do not shorten: each token of the longest response is a step of the engine."""

    def seconds(self, devices: int) -> float:
        """On a mesh of that many devices."""
        return max(self.device_s / devices, self.fixed_s)


def floors(role: Role, cluster: Cluster, workload: Workload, choices: Choices) -> tuple[Floor, ...]:
    """Of each call of a role. Whatever the options are, they do the products of the model's matrices and of its attention:

    forward    C_f / (F·eta_fwd)
    train      C_train / (F·eta_train), without recomputed activations when that is offered
    generate   C_f(prompts) / (F·eta_fwd) + 2·N_mm·(response tokens) / (F·eta_decode)
    """
    return tuple(_floor(role, call, cluster, workload, choices) for call in role.calls)


def _floor(role: Role, call: Call, cluster: Cluster, workload: Workload, choices: Choices) -> Floor:
    peak, part, shape = cluster.device.peak_flops, cluster.efficiency, role.shape
    if call.work == "generate":
        prompts, responses = workload.sequences(call.sequences)
        reading = forward_flops(shape, prompts).total / (peak * part.forward)
        writing = 2.0 * shape.matmul_params() * sum(responses) / (peak * part.decode_flops)
        steps_s = max(responses) * choices.engine.step_overhead_s
        return Floor(call.share * (reading + writing), call.share * steps_s)
    if call.work == "train":
        lengths = workload.totals(max(1, math.ceil(call.sequences / call.steps)))
        flops = train_flops(shape, lengths, recompute=False not in choices.recompute)
        return Floor(call.share * call.steps * flops / (peak * part.train))
    return Floor(call.share * forward_flops(shape, workload.totals(call.sequences)).total / (peak * part.forward))
