"""The plan: a frozen, serialisable list of steps on meshes, with what was predicted for each.

A step says where and when a node of the graph, or a move that the planner inserted, is done. What was predicted is no part of a
plan's identity: two plans that do the same have the same hash, whatever they were expected to take.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowrl.cost.shapes import ModelShape
from flowrl.cost.text import size_text, time_text
from flowrl.errors import ConfigError
from flowrl.graph.code import digest
from flowrl.graph.schedule import check_staleness
from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.mesh.placement import Placement
from flowrl.planner.codec import decode, encode
from flowrl.planner.placed import placement_of, time_line
from flowrl.planner.report import Searched
from flowrl.planner.simulate import Memory, Schedule, lower_bound, memory, period, schedule
from flowrl.planner.table import table
from flowrl.planner.tasks import Hold, Lane, StepKind, Task
from flowrl.planner.views import Viewed
from flowrl.planner.workload import Workload
from flowrl.schema.columns import nearest
from flowrl.schema.files import read_file, read_json, write_file

FORMAT = "flowrl plan"
VERSION = 1
"""Of the file format. A file of a newer one is refused."""

MOST_S = 1e12
"""Longest time that a plan in a file may predict, some 30,000 years."""
MOST_BYTES = 2**60
ROUNDING = 1e-6
"""Part by which sums of seconds may differ that were taken in another order."""
LEAST_S = 1e-9

Setting = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the planner expects of a step. Not part of the plan's identity."""

    seconds: float
    start_s: float = 0.0
    """Since the beginning of the iteration."""
    num_bytes: int = 0
    """Moved by the step, over all devices."""
    memory_bytes: int = 0
    """The most that one of its devices holds while it runs."""
    holds: tuple[Hold, ...] = field(default=(), repr=False)
    slot_utilization: float | None = None
    """Of sampling: the part of its slots' steps that sample a token."""


@dataclass(frozen=True, slots=True)
class Step:
    """One row of a plan.

    Example:
        Step("update", "update", StepKind.COMPUTE, Mesh(0, 8), (Lane.COMPUTE,), Predicted(seconds=97.1), after=("ref",),
             layout=Layout.parse("f8"), reads=("response", "old_logprobs"),
             settings=(("micro_batch_tokens", 8192), ("offload", "park")))
    """

    name: str
    node: str
    """Of the graph: the one it does, or for which it was inserted."""
    kind: StepKind
    mesh: Mesh
    """Where it runs; of a move, where it ends."""
    lanes: tuple[Lane, ...]
    predicted: Predicted
    after: tuple[str, ...] = ()
    source: Mesh | None = None
    """Of a move between meshes: where it begins."""
    layout: Layout | None = None
    """Of the weights that it uses; of a reshard, the new one."""
    reads: tuple[str, ...] = ()
    """Columns it reads or moves; of moves of weights, the models or states."""
    settings: tuple[tuple[str, Setting], ...] = ()
    """How it is done: tokens of a micro-batch, class of offload, ..."""

    def __post_init__(self) -> None:
        if self.layout is not None and self.layout.size != self.mesh.size:
            raise ConfigError(
                f"step '{self.name}' has the layout {self.layout}, which is for {self.layout.size} devices, on a {self.mesh}"
            )

    def __str__(self) -> str:
        layout = "" if self.layout is None else f", layout {self.layout}"
        source = "" if self.source is None or self.source == self.mesh else f"{_devices(self.source)} to "
        return (
            f"{self.name}: {self.kind} on {source}{_devices(self.mesh)}{layout}; predicted {time_text(self.predicted.seconds)} "
            f"from {time_text(self.predicted.start_s)}, at most {size_text(self.predicted.memory_bytes)} per device"
        )

    @property
    def devices(self) -> tuple[int, ...]:
        """Of its mesh and of the mesh it moves from, rising."""
        source = () if self.source is None else self.source.devices
        return tuple(sorted({*self.mesh.devices, *source}))

    @property
    def task(self) -> Task:
        """What the simulator runs for it."""
        predicted = self.predicted
        return Task(
            self.name, self.kind, self.devices, self.lanes, predicted.seconds, self.after, self.node, predicted.holds
        )


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the planner expects of the whole. Not part of the plan's identity."""

    seconds: float = 0.0
    """Of one iteration; where iterations overlap, from one version of the weights to the next."""
    latency_s: float = 0.0
    """Of one iteration alone."""
    bound_s: float = 0.0
    """No order of these steps makes the latency less."""
    device_bytes: int = 0
    """Peak of the device that holds most."""
    host_bytes: int = 0
    """Peak of the host that holds most."""
    critical_path: tuple[str, ...] = ()
    resident: tuple[Hold, ...] = field(default=(), repr=False)
    """Memory that no single step holds: taken all the time, or from one step to another."""

    def __str__(self) -> str:
        return (
            f"predicted: {time_text(self.seconds)} per iteration, {time_text(self.latency_s)} from its first step to its last; "
            f"at most {size_text(self.device_bytes)} per device and {size_text(self.host_bytes)} per host"
        )


@dataclass(frozen=True, slots=True)
class Plan(Viewed):
    """How one iteration of a flow is computed on a cluster. Every device walks its own steps, in the order of the list.

    `Plan.of` makes one from steps that have no times yet.
    """

    name: str
    graph_hash: str
    cluster: Cluster
    steps: tuple[Step, ...]
    """Each behind those it waits for."""
    operator_hashes: tuple[tuple[str, str], ...] = ()
    """Name of each operator, and the hash of its code."""
    max_staleness: int = 0
    meshes: tuple[tuple[str, Mesh], ...] = ()
    """Names of meshes, for reading."""
    workload: Workload | None = None
    """What the predictions assume about prompts and responses."""
    models: tuple[tuple[str, ModelShape], ...] = ()
    """What they assume about each model of the flow."""
    predicted: Outlook = field(default_factory=Outlook)
    searched: Searched | None = None
    """How it was found; None for a plan that was written by hand."""

    def __post_init__(self) -> None:
        seen: set[str] = set()
        names = {step.name for step in self.steps}
        for step in self.steps:
            if step.name in seen:
                raise ConfigError(f"two steps of the plan are named '{step.name}'; each needs a name of its own")
            for name in step.after:
                if name not in seen:
                    why = "which comes behind it in the plan" if name in names else "which is no step"
                    raise ConfigError(f"step '{step.name}' waits for '{name}', {why}")
            if step.devices[-1] >= self.cluster.num_devices:
                raise ConfigError(
                    f"step '{step.name}' uses device {step.devices[-1]}; the cluster has devices 0 to "
                    f"{self.cluster.num_devices - 1}"
                )
            seen.add(step.name)
        check_staleness(self.max_staleness)

    @classmethod
    def of(
        cls,
        name: str,
        graph_hash: str,
        cluster: Cluster,
        steps: Sequence[Step],
        *,
        resident: Sequence[Hold] = (),
        order: Sequence[str] | None = None,
        **others: Any,
    ) -> Plan:
        """Order the steps and predict starts, memory and the whole, with the simulator.

        Args:
            order: names of all steps, as `schedule` takes it; left out, a list schedule finds one.
            others: further fields of the plan.

        Raises `ConfigError` for steps that contradict each other. Whether they fit is `plan.simulated()[1].excess(cluster)`.
        """
        tasks = [step.task for step in steps]
        found = schedule(tasks, devices_per_node=cluster.devices_per_node, order=order)
        used = memory(tasks, found, resident=resident, devices_per_node=cluster.devices_per_node)
        by_name = {step.name: step for step in steps}
        ordered = tuple(_timed(by_name[step], found, used) for step in found.starts)
        plan = cls(name, graph_hash, cluster, ordered, **others)
        pace = period(tasks, max_staleness=plan.max_staleness, devices_per_node=cluster.devices_per_node, order=order)
        outlook = Outlook(
            seconds=pace.seconds,
            latency_s=found.makespan_s,
            bound_s=lower_bound(tasks, devices_per_node=cluster.devices_per_node),
            device_bytes=max((one.peak_bytes for one in used.devices.values()), default=0),
            host_bytes=max((one.peak_bytes for one in used.hosts.values()), default=0),
            critical_path=found.critical_path,
            resident=tuple(resident),
        )
        return replace(plan, predicted=outlook)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """For the simulator, in the order of the steps."""
        return tuple(step.task for step in self.steps)

    def simulated(self) -> tuple[Schedule, Memory]:
        """Times and memory of the plan as it stands, in its own order."""
        tasks, per_node = self.tasks, self.cluster.devices_per_node
        found = schedule(tasks, devices_per_node=per_node, order=[task.name for task in tasks])
        return found, memory(tasks, found, resident=self.predicted.resident, devices_per_node=per_node)

    @property
    def placement(self) -> Placement:
        """What goes where, in the notation in which a placement is asked for."""
        return placement_of(self)

    @property
    def bottleneck(self) -> str:
        """The mesh that takes the time, predicted, and its longest steps."""
        return time_line(self)

    @property
    def seconds(self) -> float:
        """Predicted, of one iteration; where iterations overlap, from one version of the weights to the next."""
        return self.predicted.seconds

    @property
    def peak_bytes(self) -> int:
        """Predicted, of the device that holds most."""
        return self.predicted.device_bytes

    def column(self, device: int) -> tuple[Step, ...]:
        """The steps of one device, in the order in which it walks them."""
        return tuple(step for step in self.steps if device in step.devices)

    @property
    def hash(self) -> str:
        """Names what is done and where: graph, operators, devices, staleness and steps. Not how long it is expected to take, nor
        what that was predicted from, nor names that are there for reading."""
        cluster = self.cluster
        steps = [{key: value for key, value in encode(step).items() if key != "predicted"} for step in self.steps]
        devices = [cluster.nodes, cluster.devices_per_node, cluster.device.name]
        said = [VERSION, self.graph_hash, encode(self.operator_hashes), devices, self.max_staleness, steps]
        return digest(json.dumps(said, sort_keys=True, separators=(",", ":")))

    # ---------------------------------------------------------------------------------------------------------- files

    def to_json(self, path: str | Path | None = None) -> str:
        """The plan as JSON, written to `path` if given. Reading it back gives an equal plan."""
        values = {"format": FORMAT, "version": VERSION, "hash": self.hash, **encode(self)}
        text = json.dumps(values, indent=1, allow_nan=False) + "\n"
        if path is not None:
            write_file(path, text)
        return text

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` writes.

        Raises `ConfigError` for what is not a plan, a newer version, a plan that contradicts itself or was changed by hand (its
        hash is another one).
        """
        values = read_json(text, "a plan")
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise ConfigError(f'a plan is a JSON object with "format": "{FORMAT}"; this is none')
        version = values.pop("version", None)
        if type(version) is not int or version < 1:
            raise ConfigError(f"a plan says the version of its format, a whole number from 1; found {version!r}")
        if version > VERSION:
            raise ConfigError(
                f"the plan has version {version} of the format, and this FlowRL reads up to {VERSION}; update FlowRL, or plan "
                "again"
            )
        then = values.pop("hash", None)
        plan = decode(cls, values, "plan")
        plan._check_predicted()
        if then != plan.hash:
            raise ConfigError(
                f"the plan's steps have the hash {plan.hash}, and the file says {then}: it was changed after it was written; "
                "plan again"
            )
        return plan

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """`from_json` of a file. Raises `ConfigError` for a file that cannot be read, too."""
        text = read_file(path, "the plan")
        try:
            return cls.from_json(text)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def _check_predicted(self) -> None:
        """Raise `ConfigError` for predictions that no planner makes: what draws and prints them counts with them."""
        outlook = self.predicted
        if (
            self.steps
            and not (outlook.seconds > 0 and outlook.latency_s > 0)
            and any(s.predicted.seconds for s in self.steps)
        ):
            raise ConfigError(
                "the plan's steps take time, and 'predicted.seconds' and 'predicted.latency_s' say that the whole takes none"
            )
        numbers = {
            "predicted.seconds": outlook.seconds,
            "predicted.latency_s": outlook.latency_s,
            "predicted.bound_s": outlook.bound_s,
            "predicted.device_bytes": outlook.device_bytes,
            "predicted.host_bytes": outlook.host_bytes,
        }
        for step in self.steps:
            for name in ("seconds", "start_s", "num_bytes", "memory_bytes"):
                numbers[f"predicted.{name} of step '{step.name}'"] = getattr(step.predicted, name)
        for name, value in numbers.items():
            most, what = (MOST_BYTES, "bytes") if name.split()[0].endswith("_bytes") else (MOST_S, "seconds")
            if not 0 <= value <= most:
                raise ConfigError(f"the plan's {name} is {what} from 0 to {most:.3g}; found {value!r}")
        self._check_times()
        if self.searched is not None:
            self.searched.check()

    def _check_times(self) -> None:
        """Raise `ConfigError` for steps that begin before what they wait for has ended, or end after the whole has."""
        whole_s = self.predicted.latency_s * (1 + ROUNDING) + LEAST_S
        ends: dict[str, float] = {}
        for step in self.steps:
            start_s, seconds, used = step.predicted.start_s, step.predicted.seconds, step.predicted.slot_utilization
            ends[step.name] = start_s + seconds
            late = next((name for name in step.after if ends[name] > start_s * (1 + ROUNDING) + LEAST_S), None)
            if late is not None:
                raise ConfigError(
                    f"the plan's step '{step.name}' begins at {time_text(start_s)}, and '{late}', which it waits for, ends at "
                    f"{time_text(ends[late])}"
                )
            if ends[step.name] > whole_s:
                raise ConfigError(
                    f"the plan's step '{step.name}' ends at {time_text(ends[step.name])}, and the whole, 'predicted.latency_s', "
                    f"at {time_text(self.predicted.latency_s)}"
                )
            if used is not None and not 0 <= used <= 1 + ROUNDING:
                raise ConfigError(
                    f"the plan's predicted.slot_utilization of step '{step.name}' is a part, 0 to 1; found {used!r}"
                )
        if self.predicted.bound_s > whole_s:
            raise ConfigError(
                f"no order of the plan's steps takes less than 'predicted.bound_s', {time_text(self.predicted.bound_s)}, and "
                f"'predicted.latency_s' is {time_text(self.predicted.latency_s)}"
            )
        unknown = next((name for name in self.predicted.critical_path if name not in ends), None)
        if unknown is not None:
            raise ConfigError(
                f"the plan's predicted.critical_path names '{unknown}', which is no step; {nearest(unknown, ends)}"
            )

    # ---------------------------------------------------------------------------------------------------------- print

    def __str__(self) -> str:
        """The table of steps."""
        return table(self)

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """IPython where it shows no pages: the table; `repr` has every field and is many screens long."""
        printer.text(str(self))


def _devices(mesh: Mesh) -> str:
    return f"device {mesh.first}" if mesh.size == 1 else f"devices {mesh.first}-{mesh.first + mesh.size - 1}"


def _timed(step: Step, found: Schedule, used: Memory) -> Step:
    start_s, end_s = found.starts[step.name], found.ends[step.name]
    most = max((used.devices[device].between(start_s, end_s) for device in step.devices), default=0)
    return replace(step, predicted=replace(step.predicted, start_s=start_s, memory_bytes=most))
