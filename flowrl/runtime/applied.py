"""A plan's settings on the models of a run: which fields they become, and which say nothing to this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flowrl.errors import ConfigError
from flowrl.graph.kinds import KINDS
from flowrl.graph.nodes import Graph, Node
from flowrl.model import Model
from flowrl.planner.steps import Plan, Setting, Step
from flowrl.planner.tasks import Lane, StepKind

OPTIMIZERS = ("adam_fp32", "adam_master")
"""States of the optimizer that the engines have: moments and master weights in fp32."""
SILENT = frozenset({"role", "offload", "park_weights", "optimizer"})
"""Settings that become no field of a model: for reading, or checked elsewhere."""

IN_MODEL = ("opt", "sopt")
"""Values of the setting `offload` that say how a model is opened; the others are done, or not, by steps that move."""

CPU = "cpu"
"""Name of the device that is a process on CPUs: its memory is the machine's, of which nobody takes a share."""
LEAST_SHARE = 0.05
"""Of a device, below which opening vLLM is not tried."""


@dataclass(frozen=True, slots=True)
class Applied:
    """Models as the plan wants them."""

    models: dict[str, Model]
    settings: dict[str, dict[str, Any]]
    """Model -> field -> value that the plan set."""
    left: tuple[str, ...]
    """Settings that nothing here reads, each with the reason."""
    notes: tuple[str, ...]
    """Where the plan's value is not the one that the model was given."""


def apply_settings(plan: Plan, graph: Graph, models: Mapping[str, Model]) -> Applied:
    """Fields of models from the settings of the plan's steps.

    micro_batch_tokens   of a training step: `micro_batch_tokens`; of a forward pass of a model that does not sample:
                         `sample_batch_tokens`
    recompute            `gradient_checkpointing`
    utilization          of a vLLM sampler `gpu_memory_utilization`, no more than the other steps leave free: it keeps its memory

    Errors: ConfigError for an optimizer state that no engine has.
    """
    found = _Settings(plan, dict(models))
    calls = {name: (node, model) for name, node, model in calls_of(graph)}
    sampled = {model for node, model in calls.values() if _work(node) == "sample"}
    for step in plan.steps:
        if step.kind is not StepKind.COMPUTE or step.node not in calls:
            continue
        node, model = calls[step.node]
        for name, value in step.settings:
            if name == "optimizer" and value not in OPTIMIZERS:
                raise ConfigError(
                    f"step '{step.name}' of the plan has the optimizer state '{value}'; the engines have "
                    f"{', '.join(OPTIMIZERS)}: plan with the optimizers that Choices has by itself"
                )
            if name not in SILENT:
                found.take(step, _work(node), model, name, value, samples=model in sampled)
    return Applied(found.models, found.settings, tuple(dict.fromkeys(found.left)), tuple(dict.fromkeys(found.notes)))


def _work(node: Node) -> str:
    kind = KINDS[node.kind]
    return "train" if kind.changes_model else "forward" if kind.is_forward else "sample"


def apply_offload(plan: Plan, graph: Graph, applied: Applied) -> Applied:
    """The models with the places that training steps give to the optimizer's state: `opt` and `sopt` become `Model.offload`.

    Parked state (`park`, `park_weights`) is moved by steps of its own, so that such a model is opened with all on its device.
    """
    calls = {name: model for name, node, model in calls_of(graph) if _work(node) == "train"}
    found = _Settings(plan, dict(applied.models))
    found.settings = {name: dict(fields) for name, fields in applied.settings.items()}
    for step in plan.steps:
        if step.kind is StepKind.COMPUTE and step.node in calls:
            asked = dict(step.settings).get("offload")
            place = str(asked) if asked in IN_MODEL else "none"
            if asked is not None and (place != "none" or found.models[calls[step.node]].offload != "none"):
                found.set(calls[step.node], "offload", place)
    return replace(
        applied, models=found.models, settings=found.settings, notes=(*applied.notes, *dict.fromkeys(found.notes))
    )


def calls_of(graph: Graph, prefix: str = "", outer: Mapping[str, str] | None = None) -> list[tuple[str, Node, str]]:
    """(what a plan calls it, node, model) of every node that runs a model."""
    model: dict[str, str] = dict(outer or {})
    found: list[tuple[str, Node, str]] = []
    for node in graph:
        ports = dict(node.inputs)
        source = ports.get("model", ports.get("then", ""))
        if node.kind == "input":
            model.setdefault(node.name, node.name)
        elif source in model:
            model[node.name] = model[source]
        if node.body is not None:
            found += calls_of(node.body, f"{prefix}{node.name}.", model)
        elif KINDS[node.kind].uses_model:
            found.append((prefix + node.name, node, model[source]))
    return found


class _Settings:
    """Collects fields, model by model."""

    def __init__(self, plan: Plan, models: dict[str, Model]) -> None:
        self.plan = plan
        self.models = models
        self.settings: dict[str, dict[str, Any]] = {}
        self.left: list[str] = []
        self.notes: list[str] = []

    def take(self, step: Step, work: str, name: str, setting: str, value: Setting, *, samples: bool) -> None:
        model = self.models[name]
        match work, setting:
            case "train", "micro_batch_tokens":
                self.set(name, "micro_batch_tokens", int(value))
            case "train", "recompute":
                self.set(name, "gradient_checkpointing", bool(value))
            case "forward", "micro_batch_tokens" if not samples:
                self.set(name, "sample_batch_tokens", int(value))
            case "forward", "micro_batch_tokens":
                self.left.append(f"{step.name}: {setting}={value} (forward passes of '{name}' share sample_batch_tokens with its "
                                 "sampler)")  # fmt: skip
            case "train" | "forward", "sequence_parallel" if value:
                pass  # a mesh with tensor parallelism does so by itself
            case "train" | "forward", "sequence_parallel":
                self.left.append(
                    f"{step.name}: {setting}={value} (ranks of a tensor-parallel group always share the tokens)"
                )
            case "forward", "recompute":
                pass  # a forward pass keeps nothing that could be computed again; its model's training step has the same setting
            case "sample", "utilization" if model.sampler == "vllm" and self.plan.cluster.device.name != CPU:
                self._share(step, name, float(value))
            case "sample", "utilization" if model.sampler == "vllm":
                self.left.append(
                    f"{step.name}: {setting}={value} (on a CPU the vLLM sampler takes what its cache needs)"
                )
            case "sample", "utilization":
                self.left.append(f"{step.name}: {setting}={value} (the {model.sampler} sampler takes what it needs)")
            case _:
                self.left.append(f"{step.name}: {setting}={value} (no engine reads it)")

    def set(self, name: str, field: str, value: Any) -> None:
        given = getattr(self.models[name], field)
        self.settings.setdefault(name, {})[field] = value
        if given != value:
            self.notes.append(f"plan: model '{name}' has {field}={value} instead of {given}")
            self.models[name] = replace(self.models[name], **{field: value})

    def _share(self, step: Step, name: str, share: float) -> None:
        """The plan gives an engine's memory to others between its calls. This one keeps it, so it gets what they leave."""
        capacity = self.plan.cluster.device.memory_bytes
        others = max(
            (s.predicted.memory_bytes for s in self.plan.steps if s.node != step.node and Lane.COMPUTE in s.lanes),
            default=0,
        )
        free = max(0.0, 1 - others / capacity)
        if free < LEAST_SHARE:
            raise ConfigError(
                f"the other steps of the plan leave {free:.0%} of the device to the vLLM sampler of '{name}', which keeps its "
                "memory while they work; use sampler='transformers', or a device with more memory"
            )
        if free < share:
            self.notes.append(
                f"plan: the vLLM sampler of '{name}' gets {free:.2f} of the device instead of {share}: it keeps its memory while "
                "other steps work"
            )
        options = {**self.models[name].sampler_options, "gpu_memory_utilization": round(min(share, free), 3)}
        self.settings.setdefault(name, {})["gpu_memory_utilization"] = options["gpu_memory_utilization"]
        self.models[name] = replace(self.models[name], sampler_options=options)
