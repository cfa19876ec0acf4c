"""Options with small whole numbers: many ties, and every cost in the way of every other one."""

from hypothesis import strategies as st

from flowrl.mesh import Layout
from flowrl.planner.options import Option

LAYOUTS = (Layout(dp=2), Layout(tp=2))
CALLS = {"gen": 1, "policy": 2, "critic": 2, "ref": 1}
small = st.integers(0, 4)


@st.composite
def options(draw, role: str):
    return Option(
        role,
        draw(st.sampled_from(LAYOUTS)),
        tuple(float(draw(small)) for _ in range(CALLS[role])),
        static_bytes=draw(small),
        dynamic_bytes=draw(small),
        host_bytes=draw(small),
        numerics=draw(st.integers(0, 1)),
        handover_bytes=draw(small) if role in ("gen", "policy") else 0,
        is_on_host=draw(st.booleans()) if role == "policy" else False,
        has_context=role != "gen",
        settings=(("offload", draw(st.sampled_from(["none", "park", "sopt"]))),),
    )
