"""Pictures of graphs, plans and what was measured of them. Everything here reads data and runs nothing.

html         the page of a plan: verdict, timeline, devices, memory, dataflow, why, measured, versions
single       one picture as a file of its own
run          a run: curves, predicted beside measured, responses with their tokens; runs over each other; one that goes on
notebook     graphs, tables and metrics as notebooks show them
mermaid, dot  the dataflow of a plan as text for other programs; mermaid also of a graph
trace_json   a plan's timeline for Perfetto
terminal     timeline and memory in letters
scene        a plan as bars on tracks; stacks: its memory by category; dataflow: what flows between its nodes
layered      places for the nodes of a drawing
svg, palette, units, axis  how things are written; frame: what every page is made of

All pictures are drawn from `scene`, `stacks` and `dataflow`, which ask the planner's simulator: so they agree.
"""

from flowrl.planner.views import VIEWS

VIEWS.update(
    html="flowrl.viz.html:plan_html",
    notebook="flowrl.viz.html:notebook_html",
    svg="flowrl.viz.single:plan_svg",
    mermaid="flowrl.viz.plan_mermaid:plan_mermaid",
    dot="flowrl.viz.dot:to_dot",
    trace="flowrl.viz.trace_json:trace_json",
    text="flowrl.viz.terminal:plan_text",
)  # the modules are imported when something is drawn
