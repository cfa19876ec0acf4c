"""Seconds that no option of a role goes below, known before any option is made.

Making the options of an engine simulates its sampling, which takes longer than all of the rest of a search. Most meshes can be
left out without it: arithmetic alone, spread over all devices at the efficiency that is reached, already takes too long there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flowrl.cost.flops import forward_flops, train_flops
from flowrl.cost.generation import weights_read
from flowrl.cost.train import can_split
from flowrl.mesh import Cluster, Layout
from flowrl.planner.options import Choices
from flowrl.planner.roles import Call, Role
from flowrl.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class Floor:
    """Of one call: `first_s / devices + max(device_s / devices, fixed_s + read_s / degree)`."""

    device_s: float
    """Seconds of its arithmetic on one device."""
    fixed_s: float = 0.0
    """What more devices do not shorten: each token of the longest response is a step of the engine."""
    first_s: float = 0.0
    """Seconds on one device of what comes before: prompts are read."""
    read_s: float = 0.0
    """Seconds in which one device reads the weights as often as the longest response has tokens. Only tensor parallelism shortens
    them: copies each read their own, and stages read one after the other."""
    degrees: tuple[int, ...] = (1,)
    """Of tensor parallelism, those that may be chosen."""
    per_node: int = 0
    """Devices of a node, which a degree divides; 0 where it need not."""

    def seconds(self, devices: int) -> float:
        """On a mesh of that many devices."""
        steps_s = self.fixed_s + (self.read_s / self._degree(devices) if self.read_s else 0.0)
        return self.first_s / devices + max(self.device_s / devices, steps_s)

    def _degree(self, devices: int) -> int:
        """The highest on a mesh; where it has none, the highest of all."""
        inside = min(devices, self.per_node) if self.per_node else 0
        return max((one for one in self.degrees if inside % one == 0), default=max(self.degrees))


def floors(
    role: Role, cluster: Cluster, workload: Workload, choices: Choices, asked: Layout | None = None
) -> tuple[Floor, ...]:
    """Of each call of a role. Whatever the options are, they do the products of the model's matrices and of its attention:

    forward    C_f / (F·eta_fwd)
    train      C_train / (F·eta_train), without recomputed activations when that is offered
    generate   C_f(prompts) / (F·eta_fwd) + max(2·N_mm·(response tokens) / (F·eta_decode),
                                                longest response·(2·N_read / (tp·B_hbm·eta_read) + 1.5 ms))

    `asked`: the layout that the role is to have.
    """
    return tuple(_floor(role, call, cluster, workload, choices, asked) for call in role.calls)


def _floor(
    role: Role, call: Call, cluster: Cluster, workload: Workload, choices: Choices, asked: Layout | None
) -> Floor:
    peak, part, shape = cluster.device.peak_flops, cluster.efficiency, role.shape
    if call.work == "generate":
        prompts, responses = workload.sequences(call.sequences)
        reading = forward_flops(shape, prompts).total / (peak * part.forward)
        writing = 2.0 * shape.matmul_params() * sum(responses) / (peak * part.decode_flops)
        engine, steps = choices.engine, call.share * max(responses)
        weights_s = engine.weight_bytes * float(weights_read(shape, 1)) / (cluster.device.hbm_bytes_s * part.decode_hbm)
        possible = tuple(tp for tp in choices.tensor_parallel if can_split(shape, tp, repeats_kv=True)) or (1,)
        return Floor(
            call.share * writing,
            steps * engine.step_overhead_s,
            call.share * reading,
            steps * weights_s,
            possible if asked is None else (asked.tp,),
            cluster.devices_per_node if asked is None else 0,
        )
    if call.work == "train":
        lengths = workload.totals(max(1, math.ceil(call.sequences / call.steps)))
        flops = train_flops(shape, lengths, recompute=False not in choices.recompute)
        return Floor(call.share * call.steps * flops / (peak * part.train))
    return Floor(call.share * forward_flops(shape, workload.totals(call.sequences)).total / (peak * part.forward))
