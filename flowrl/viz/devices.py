"""Where models stand: nodes by devices, with a stripe for every role that works on a device, and how full the device gets."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from flowrl.mesh import Layout
from flowrl.planner.tasks import Lane, StepKind
from flowrl.viz import units
from flowrl.viz.axis import WIDTH
from flowrl.viz.palette import category_of, hatch
from flowrl.viz.scene import GREY, Scene
from flowrl.viz.stacks import Stack
from flowrl.viz.svg import Markup, fitted, line, picture, rect, tag, text, width_of

LEFT, RIGHT = 84.0, 16.0
STRIPE, NUMBER, GAUGE = 17.0, 15.0, 7.0
GAP = 4.0
MOST_ROWS = 8
"""Nodes up to which each has a row of its own."""


@dataclass(frozen=True, slots=True)
class Stripe:
    """A role on a device."""

    role: str
    hue: int
    hatch: str
    layout: Layout | None
    first: int
    """First device of its mesh."""
    share: float
    """Of the iteration in which the role computes there."""

    @property
    def words(self) -> str:
        return f"{self.role} {self.layout}" if self.layout is not None else self.role


def stripes(scene: Scene) -> dict[int, tuple[Stripe, ...]]:
    """For every device of the cluster, the roles that compute on it, in the order of their first step."""
    found: dict[int, dict[tuple[str, Layout | None, int], float]] = defaultdict(dict)
    for bar in scene.bars:
        step = bar.step
        if step.kind is StepKind.COMPUTE and Lane.COMPUTE in step.lanes:
            key = (bar.role or step.node, step.layout, step.mesh.first)
            for device in step.mesh.devices:
                found[device][key] = found[device].get(key, 0.0) + (bar.end_s - bar.start_s)
    looks = {name: (hue, hatched) for name, hue, hatched in scene.roles}
    whole = scene.makespan_s or 1.0
    return {
        device: tuple(
            Stripe(role, *looks.get(role, (GREY, "")), layout, first, seconds / whole)
            for (role, layout, first), seconds in found[device].items()
        )
        for device in range(scene.plan.cluster.num_devices)
    }


def device_map(scene: Scene, stacks: tuple[Stack, ...]) -> Markup:
    """The cluster as SVG."""
    cluster = scene.plan.cluster
    per_node = cluster.devices_per_node
    of_device = stripes(scene)
    full = {index: stack for stack in stacks for index in stack.indices}
    cell = (WIDTH - LEFT - RIGHT) / per_node
    pieces: list[Markup] = []
    y = 8.0
    for nodes in _rows(cluster.nodes, per_node, of_device, full):
        devices = range(nodes[0] * per_node, (nodes[0] + 1) * per_node)
        rows = max([1, *(len(of_device[device]) for device in devices)])
        tall = NUMBER + rows * STRIPE + GAUGE + 6
        pieces.append(text(8, y + 14, f"node{'s' if len(nodes) > 1 else ''}", class_="tick"))
        pieces.append(text(8, y + 31, fitted(units.ranges(nodes), LEFT - 12, size=13), class_="group"))
        under, names = _stripes(of_device, devices, LEFT, y + NUMBER, cell)
        frames = [_cell(scene, device, of_device[device], full.get(device), LEFT + i * cell, y, cell, tall)
                  for i, device in enumerate(devices)]  # fmt: skip
        pieces += [*under, *frames, *names]
        y += tall + 10
    height = y
    used = sum(bool(found) for found in of_device.values())
    described = f"{cluster.num_devices} devices {cluster.device.name} in {cluster.nodes} nodes; models compute on {used} of them"
    return picture("map", WIDTH, height, "Devices and what shares them (predicted)", described, *pieces)


def _rows(
    num_nodes: int, per_node: int, of_device: dict[int, tuple[Stripe, ...]], full: dict[int, Stack]
) -> list[list[int]]:
    """The nodes of each row. In a large cluster, neighbouring nodes that look the same are one row."""
    rows: list[list[int]] = []
    last: object = None
    for node in range(num_nodes):
        devices = range(node * per_node, (node + 1) * per_node)
        look = [(of_device[device], full[device].name if device in full else "") for device in devices]
        if num_nodes > MOST_ROWS and look == last:
            rows[-1].append(node)
        else:
            rows.append([node])
        last = look
    return rows


def _stripes(
    of_device: dict[int, tuple[Stripe, ...]], devices: range, left: float, y: float, cell: float
) -> tuple[list[Markup], list[Markup]]:
    """Stripes and their names. Neighbouring devices of one mesh have one stripe, so that its name has room."""
    under, names = [], []
    for row in range(max(len(of_device[device]) for device in devices)):
        start = devices.start
        while start < devices.stop:
            stripe = of_device[start][row] if row < len(of_device[start]) else None
            end = start + 1
            while end < devices.stop and stripe is not None and of_device[end][row : row + 1] == (stripe,):
                end += 1
            if stripe is not None:
                x, width = left + (start - devices.start) * cell + GAP / 2, (end - start) * cell - GAP
                under.append(_stripe(stripe, x, y + row * STRIPE, width))
                names.append(_name(stripe, x, y + row * STRIPE, width))
            start = end
    return under, names


def _stripe(stripe: Stripe, x: float, y: float, width: float) -> Markup:
    hatched = hatch(stripe.hatch, stripe.hue)
    return tag(
        "g",
        rect(x, y, width, STRIPE - 1.5, class_=f"box f{stripe.hue}", rx=2),
        rect(x, y, width, STRIPE - 1.5, fill=hatched, class_="over", rx=2) if hatched else None,
        class_="stripe",
        data_r=stripe.role,
    )


def _name(stripe: Stripe, x: float, y: float, width: float) -> Markup:
    full = f"{stripe.words} · {units.percent(stripe.share)}"
    words = full if width_of(full, size=11) <= width - 8 else fitted(stripe.words, width - 8, size=11)
    return text(x + 6, y + 12, words, class_="label small", data_r=stripe.role)


def _cell(
    scene: Scene,
    device: int,
    found: tuple[Stripe, ...],
    stack: Stack | None,
    x: float,
    y: float,
    cell: float,
    tall: float,
) -> Markup:
    """The frame of a device, on top of the stripes: it has the tip and takes the focus."""
    capacity = scene.plan.cluster.device.memory_bytes
    peak = 0 if stack is None else stack.usage.peak_bytes
    left, width = x + GAP / 2, cell - GAP
    part = min(1.0, peak / capacity)
    gauge_y = y + tall - GAUGE - 2
    shown = [text(left + 3, y + 11, str(device), class_="tick")]
    if width > 62 and stack is not None:
        shown.append(text(left + width - 3, y + 11, units.size(peak), class_="tick", text_anchor="end"))
    if not found:
        shown.append(rect(left, y + NUMBER, width, tall - NUMBER - GAUGE - 4, class_="idle"))
    return tag(
        "g",
        tag("title", _tip(scene, device, found, stack)),
        *shown,
        rect(left + 1, gauge_y, width - 2, GAUGE - 2, class_="gauge"),
        rect(
            left + 1, gauge_y, (width - 2) * part, GAUGE - 2, class_="gauge-over" if peak > capacity else "gauge-full"
        ),
        line(left + 1, gauge_y - 1.5, left + width - 1, gauge_y - 1.5, class_="rule"),
        rect(left, y, width, tall, class_="cell", rx=3),
        class_="device",
        tabindex=0,
        role="listitem",
        data_d=device,
    )


def _tip(scene: Scene, device: int, found: tuple[Stripe, ...], stack: Stack | None) -> str:
    per_node = scene.plan.cluster.devices_per_node
    lines = [f"device {device} ({device % per_node} of node {device // per_node})"]
    if not found:
        lines.append("no model computes here")
    for stripe in found:
        lines.append(
            f"{stripe.role}: {_rank(stripe, device)}, {units.percent(stripe.share)} of the iteration (predicted)"
        )
    if stack is not None:
        capacity = scene.plan.cluster.device.memory_bytes
        lines.append(f"peak {units.size(stack.usage.peak_bytes)} of {units.size(capacity)} (predicted):")
        lines += [f"  {name} {units.size(num_bytes)}" for name, num_bytes in peak_by_category(scene, stack)]
    return "\n".join(lines)


def _rank(stripe: Stripe, device: int) -> str:
    if stripe.layout is None:
        return "no layout of weights"
    rank = device - stripe.first
    if not 0 <= rank < stripe.layout.size:
        return f"layout {stripe.layout}"
    at = stripe.layout.coordinate(rank)
    axes = [
        f"{name} {index} of {size}"
        for name, index in zip(("dp", "pp", "fsdp", "tp"), at, strict=True)
        if (size := getattr(stripe.layout, name)) > 1
    ]
    return f"layout {stripe.layout}, {', '.join(axes) or 'the only copy'}"


def peak_by_category(scene: Scene, stack: Stack) -> tuple[tuple[str, int], ...]:
    """What a stack's peak consists of, the largest first."""
    holds = [hold for step in scene.plan.steps for hold in step.predicted.holds] + list(scene.plan.predicted.resident)
    names = {hold.what: category_of(hold).name for hold in holds}
    found: dict[str, int] = {}
    for what, num_bytes in stack.usage.parts:
        found[names[what]] = found.get(names[what], 0) + num_bytes
    return tuple(sorted(found.items(), key=lambda part: (-part[1], part[0])))
