"""What the ranks of a test do with state: GRPO whose state leaves its devices, and runs that stop and go on."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import flowrl as fr
from flowrl.engines.mesh.host import MeshHost
from flowrl.mesh import Mesh
from flowrl.planner.steps import Plan, Predicted, Step
from flowrl.planner.tasks import Lane, StepKind
from flowrl.runtime import planned
from flowrl.runtime.ranks import run_ranks
from tests.distributed.rank_flows import OPTIONS, grpo, inputs, numbers, plan_of

STEPS = 4
TIMEOUT_S = 500.0
TWO = Mesh(0, 2)


def places(layout: str, mesh: Mesh = TWO) -> dict[str, tuple[Mesh, str]]:
    calls = ("old_logprobs", "ref_logprobs", "update")
    return {"rollout": (mesh, f"d{mesh.size}"), **dict.fromkeys(calls, (mesh, layout))}


def move(kind: StepKind, name: str, node: str, mesh: Mesh, after: tuple[str, ...] = (), **settings: Any) -> Step:
    lane = Lane.D2H if kind is StepKind.OFFLOAD else Lane.H2D
    return Step(name, node, kind, mesh, (lane,), Predicted(0.01), after, settings=tuple(settings.items()))


def planned_on(layout: str, mesh: Mesh = TWO, *, parks: bool = False, offload: str = "none") -> Plan:
    """GRPO on a mesh; `parks`: all state leaves after its last use, also that of the samplers."""
    plan = plan_of(grpo.graph(), places(layout, mesh))
    use = {step.name: step for step in plan.steps}
    for before, name in pairwise(use):
        use[name] = replace(use[name], after=(before,))
    use["update"] = replace(use["update"], settings=(("offload", offload),))
    into, out, moves = StepKind.ONLOAD, StepKind.OFFLOAD, []
    if parks:
        for name, first, last, writes in (
            ("gen", "rollout", "rollout", False), ("ref", "ref_logprobs", "ref_logprobs", False),
            ("policy", "old_logprobs", "update", True),
        ):  # fmt: skip
            moves += [
                move(into, f"{name}.in", first, mesh),
                move(out, f"{name}.out", last, mesh, (last,), writes=writes),
            ]
            use[first] = replace(use[first], after=(*use[first].after, f"{name}.in"))
    # from shards that are parked, into copies that are
    after = ("update", "policy.out") if parks else ("update",)
    reshard = Step(
        "gen.weights", "policy", StepKind.RESHARD, mesh, (Lane.COMPUTE, Lane.NVLINK), Predicted(0.01), after, source=mesh,
        reads=("policy",),
    )  # fmt: skip
    steps = [*use.values(), *moves, reshard]
    return Plan.of(
        plan.name, plan.graph_hash, plan.cluster, steps, order=_order(steps), operator_hashes=dict(plan.operator_hashes)
    )


def _order(steps: list[Step]) -> list[str]:
    """Each step behind those that it is after."""
    found: list[str] = []
    while len(found) < len(steps):
        found.append(next(s.name for s in steps if s.name not in found and set(s.after) <= set(found)))
    return found


def here(run: fr.Run) -> dict[str, Any]:
    """What comes of a run on this rank."""
    held = {name: host.state()["weights"] for name, host in run.hosts.items() if host.has_main}  # type: ignore[attr-defined]
    return {"numbers": numbers(run), "weights": held}


def offloaded(said: dict[str, Any]) -> None:
    """On each rank, as if the CPU were a device apart from the host."""
    rank, found = os.environ["RANK"], {}
    for layout in (said["layout"],):
        for name, options in (
            ("none", {}), ("parks", {"parks": True}), ("opt", {"offload": "opt"}), ("sopt", {"offload": "sopt", "parks": True}),
        ):  # fmt: skip
            plan = planned_on(layout, **options)
            apart = mock.patch.object(planned, "IN_HOST_MEMORY", frozenset({""}))
            with apart, run_ranks(
                grpo.graph(), plan=plan, steps=STEPS, timeout_s=TIMEOUT_S, **OPTIONS, **inputs()
            ) as run:  # fmt: skip
                main = run.hosts["policy"]._main_host()  # type: ignore[attr-defined]
                made = {"store": type(main.trainer.store).__name__, "is_parked": main.is_parked, **here(run)}
                made["memory"] = str(run.compare())
                made["moves"] = [
                    (event.step, event.attributes["plan_step"], event.bytes, event.attributes["did"])
                    for event in run.events
                    if event.what in ("offload", "onload") and event.attributes["rank"] == int(rank)
                ]
                made["on_host"] = [
                    event.attributes.get("host_bytes", 0)
                    for event in run.events
                    if event.attributes["rank"] == int(rank)
                ]
            found[f"{layout} {name}"] = made
    torch.save(found, Path(said["folder"]) / f"offloaded.{rank}.pt")


# --------------------------------------------------------------------------------------------------------- checkpoints


def run_of(said: dict[str, Any], steps: int, **options: Any) -> fr.Run:
    mesh = Mesh(0, int(os.environ.get("WORLD_SIZE", "1")))
    plan = planned_on(said["layout"], mesh, offload=said.get("offload", "none"))
    settings = {**OPTIONS, "out": said["folder"], **options}
    return run_ranks(grpo.graph(), plan=plan, steps=steps, timeout_s=TIMEOUT_S, **settings, **inputs())


def whole_and_in_parts(said: dict[str, Any]) -> None:
    """On each rank: a run, and one that ends early and goes on."""
    with run_of(said, STEPS, name="whole") as run:
        whole = here(run)
    with run_of(said, 2, name="parts", checkpoint_every=2) as run:
        pass
    with run_of(said, STEPS, name="parts", resume=f"{said['folder']}/parts-1", checkpoint_every=1) as run:
        parts = here(run)
    torch.save({"whole": whole, "parts": parts}, Path(said["folder"]) / f"runs.{os.environ['RANK']}.pt")


def state_on_two(said: dict[str, Any]) -> None:
    """On each rank: all that needs no other job."""
    whole_and_in_parts(said)
    offloaded(said)


def goes_on(said: dict[str, Any]) -> None:
    """On each rank: from checkpoints that other jobs have written."""
    found = []
    for path in said["resume"]:
        with run_of(said, STEPS, resume=path) as run:
            found.append(here(run))
    torch.save(found, Path(said["folder"]) / f"on.{os.environ['RANK']}.pt")


def killed(said: dict[str, Any]) -> None:
    """On each rank: one of them ends without a word, in a step or while it writes its part of a checkpoint."""
    what, count = said["kill"]
    kept, seen = getattr(MeshHost, what), []

    def counted(*args: Any, **options: Any) -> Any:
        seen.append(None)
        if os.environ["RANK"] == "1" and len(seen) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return kept(*args, **options)

    with mock.patch.object(MeshHost, what, counted):
        run_of(said, STEPS, name=f"killed_{what}", checkpoint_every=1)
