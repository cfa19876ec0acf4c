"""Which options are kept, and when a set of roles fits."""

from hypothesis import given, settings, strategies as st

from flowrl.planner.cells import Edge, Limits, made, undominated
from flowrl.planner.options import beats
from flowrl.planner.ties import burden
from tests.null.planner.made_up import options

EDGES = (Edge("policy", "gen", frozenset({"critic"}), frozenset({"critic"})),)


def lists(role: str):
    return st.lists(options(role), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(lists("gen"), lists("policy"), lists("critic"), st.integers(2, 16))
def test_what_fits(gen, policy, critic, capacity):
    for a, b, c in zip(gen, policy, critic, strict=False):
        static = 1 + a.static_bytes + b.static_bytes + c.static_bytes
        working = max(a.dynamic_bytes, b.dynamic_bytes, c.dynamic_bytes)
        least = static + max(working, a.handover_bytes + b.handover_bytes)
        most = max(
            least, static + c.dynamic_bytes + max(a.handover_bytes, b.handover_bytes)
        )  # the critic works meanwhile
        one = made((a, b, c), EDGES, Limits(capacity, 1))
        assert (one is not None) == (least <= capacity)
        if one is not None:
            assert one.is_ordered == (most > capacity)
            assert one.peak_bytes == min(most, capacity)
            assert one.host_bytes == a.host_bytes + b.host_bytes + c.host_bytes
            assert one.numerics == max(a.numerics, b.numerics, c.numerics)


@settings(max_examples=150, deadline=None)
@given(lists("policy"), st.booleans())
def test_what_is_left_out_is_beaten(found, with_layout):
    def costs(one):
        return (*one.costs, burden(one))

    kept = undominated(found, costs, with_layout=with_layout)
    assert set(kept) <= set(found)
    for one in found:
        alike = [other for other in kept if not with_layout or other.layout == one.layout]
        assert any(beats(costs(other), costs(one)) for other in alike)
    for one in kept:
        alike = [other for other in kept if other is not one and (not with_layout or other.layout == one.layout)]
        assert not any(beats(costs(other), costs(one)) for other in alike)
