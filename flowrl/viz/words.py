"""What short texts of a plan mean: letters of layouts, kinds of offload. Only those that the plan has are explained."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flowrl.cost.offload import Offload
from flowrl.planner.steps import Plan

LETTERS = {
    "d": "dN is N copies",
    "f": "fN is N shards of everything, gathered layer by layer (FSDP)",
    "t": "tN is N parts of each matrix (tensor parallel)",
    "p": "pN is N stages of layers (pipeline)",
}
DIV = "@div: parts of a matrix are on devices far apart, not on neighbours"
OFFLOADS = {
    Offload.PARK: "what is not in use waits on the host",
    Offload.STREAM_ALL: "weights, gradients and optimizer are on the host, and Adam runs there",
    Offload.CPU_OPTIMIZER: "the optimizer is on the host, and Adam runs there",
    Offload.STREAM_OPTIMIZER: "optimizer state is on the host and is streamed through the device",
}
_LAYOUT = re.compile(r"(?<![\w-])((?:[dftp]\d+)+)(@div)?(?!\w)")
_OFFLOAD = re.compile(r"offload '?(\w+)'? -> '?(\w+)'?")


def layout_words(plan: Plan) -> str:
    """What the letters in layouts of the plan and of those it was compared with mean; empty without a layout."""
    found = [match for text in _layouts(plan) for match in _LAYOUT.finditer(text)]
    letters = {letter for match in found for letter in match[1] if letter in LETTERS}
    said = [words for letter, words in LETTERS.items() if letter in letters]
    if not said:
        return ""
    said += [DIV] * any(match[2] for match in found)
    return f"In layouts {', '.join(said)}."


def _layouts(plan: Plan) -> Iterator[str]:
    yield from (str(step.layout) for step in plan.steps if step.layout is not None)
    if plan.searched is not None:
        # ":d2t4" of a placement: names of roles may look like a layout
        for one in plan.searched.alternatives:
            yield from (part.partition(":")[2] for part in re.split(r"[\s()]+", one.placement))


def offload_words(plan: Plan) -> str:
    """What the kinds of offload mean that the plan has, or lost plans; empty where all state stays on the device."""
    found = {str(value) for step in plan.steps for name, value in step.settings if name == "offload"}
    if plan.searched is not None:
        found |= {name for one in plan.searched.alternatives for match in _OFFLOAD.findall(one.why) for name in match}
    said = [f"{kind.value}: {words}" for kind, words in OFFLOADS.items() if kind.value in found]
    return f"Offload: {'; '.join(said)}." if said else ""
