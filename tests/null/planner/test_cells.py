"""Which options and combinations are kept: for everything left out, something kept is as good in all that counts."""

from hypothesis import given, settings, strategies as st

from flowrl.mesh import Layout
from flowrl.planner.cells import Edge, Limits, combine
from flowrl.planner.options import Option, beats, pareto

NAMES = ("gen", "policy", "critic")
EDGES = (Edge("policy", "gen", frozenset({"critic"})),)
LAYOUTS = (Layout(dp=2), Layout(tp=2))
small = st.integers(0, 4)


@st.composite
def options(draw, role: str):
    calls = 2 if role == "critic" else 1
    return Option(
        role,
        draw(st.sampled_from(LAYOUTS)),
        tuple(float(draw(small)) for _ in range(calls)),
        static_bytes=draw(small),
        dynamic_bytes=draw(small),
        host_bytes=draw(small),
        numerics=draw(st.integers(0, 1)),
        handover_bytes=draw(small) if role != "critic" else 0,
        is_on_host=draw(st.booleans()) if role == "policy" else False,
        has_context=role != "gen",
    )


def lists(role: str):
    return st.lists(options(role), min_size=1, max_size=6)


def counts(one):
    """What matters of a combination once it fits."""
    seconds = tuple(time for option in one.options for time in option.seconds)
    return (*seconds, one.host_bytes, one.numerics, float(one.options[1].is_on_host))


@settings(max_examples=150, deadline=None)
@given(lists("gen"), lists("policy"), lists("critic"), st.integers(2, 16))
def test_combinations(gen, policy, critic, capacity):
    limits = Limits(capacity, 1)
    every = combine([gen, policy, critic], EDGES, limits, prune=False)
    kept = combine([gen, policy, critic], EDGES, limits)
    assert set(kept) <= set(every)
    for one in every:
        alike = [
            other for other in kept if [o.layout for o in other.options[:2]] == [o.layout for o in one.options[:2]]
        ]
        assert any(beats(counts(other), counts(one)) for other in alike)


@given(lists("gen"), lists("policy"), lists("critic"), st.integers(2, 16))
def test_what_fits(gen, policy, critic, capacity):
    found = combine([gen, policy, critic], EDGES, Limits(capacity, 1), prune=False)
    fitting = 0
    for a in gen:
        for b in policy:
            for c in critic:
                static = 1 + a.static_bytes + b.static_bytes + c.static_bytes
                working = max(a.dynamic_bytes, b.dynamic_bytes, c.dynamic_bytes)
                waiting = a.handover_bytes + b.handover_bytes + c.dynamic_bytes  # the critic may work meanwhile
                fitting += static + max(working, waiting) <= capacity
    assert len(found) == fitting


@given(st.lists(options("policy"), min_size=1, max_size=20))
def test_options(found):
    kept = pareto(found)
    assert set(kept) <= set(found)
    for one in found:
        assert any(other.layout == one.layout and beats(other.costs, one.costs) for other in kept)
    for one in kept:
        assert not any(
            other is not one and other.layout == one.layout and beats(other.costs, one.costs) for other in kept
        )
