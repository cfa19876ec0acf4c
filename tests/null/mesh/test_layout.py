"""Layouts, meshes and the placement algebra."""

import re

import pytest
from hypothesis import given, strategies as st

from flowrl.errors import ConfigError, TextError
from flowrl.mesh import Cluster, Coordinate, Layout, Mesh, Placement

SIZES = st.integers(1, 4)
LAYOUTS = st.builds(Layout, dp=SIZES, fsdp=SIZES, tp=SIZES, pp=SIZES, tp_order=st.sampled_from(["mod", "div"]))


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("d4t2", Layout(dp=4, tp=2)),
        ("f8", Layout(fsdp=8)),
        ("f4t2", Layout(fsdp=4, tp=2)),
        ("t8", Layout(tp=8)),
        ("d2t4p1", Layout(dp=2, tp=4)),
        ("t2d4", Layout(dp=4, tp=2)),
        ("d1", Layout()),
        ("d4t2@div", Layout(dp=4, tp=2, tp_order="div")),
        ("f8@div", Layout(fsdp=8)),
    ],
)
def test_layouts_are_read(text: str, layout: Layout) -> None:
    assert Layout.parse(text) == layout


@given(LAYOUTS)
def test_text_and_back(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        ("", "^"),
        ("x8", "^"),
        ("d4d2", "  ^^"),
        ("d0", " ^"),
        ("d4-t2", "  ^"),
        ("d4@sum", "   ^^^"),
        ("4d", "^"),
        ("d", "^"),
    ],
)
def test_wrong_layouts_are_pointed_at(text: str, marks: str) -> None:
    with pytest.raises(TextError) as caught:
        Layout.parse(text)
    assert str(caught.value).split("\n")[1:] == ["    " + text, "    " + marks]


@given(LAYOUTS)
def test_coordinates_and_ranks_are_one_to_one(layout: Layout) -> None:
    at = [layout.coordinate(rank) for rank in range(layout.size)]
    assert [layout.rank(one) for one in at] == list(range(layout.size))
    assert len(set(at)) == layout.size
    assert sorted(rank for group in layout.tp_groups() for rank in group) == list(range(layout.size))


def test_order_of_ranks() -> None:
    assert [Layout.parse("d4t2").coordinate(rank).tp for rank in range(8)] == [0, 1] * 4
    assert [Layout.parse("d4t2@div").coordinate(rank).tp for rank in range(8)] == [0] * 4 + [1] * 4
    assert Layout.parse("d4t2").tp_groups() == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert Layout.parse("d4t2@div").tp_groups() == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert Layout.parse("d2f2t2p2").coordinate(13) == Coordinate(dp=1, pp=1, fsdp=0, tp=1)
    with pytest.raises(ConfigError, match="ranks 0 to 7; found 8"):
        Layout.parse("f8").coordinate(8)


@given(LAYOUTS, st.integers(0, 5))
def test_a_mesh_names_the_axes_of_its_layout(layout: Layout, first: int) -> None:
    mesh = Mesh.of(first, layout)
    for rank, device in enumerate(mesh.devices):
        here = layout.coordinate(rank)._asdict()
        assert {name: here[name] for name in mesh.coordinate(device) if name != "devices"} == {
            name: index for name, index in mesh.coordinate(device).items() if name != "devices"
        }


def test_meshes() -> None:
    assert Mesh(6, 4).spans_nodes(8) and not Mesh(4, 4).spans_nodes(8)
    assert Mesh(4, 4).overlaps(Mesh(7, 2)) and not Mesh(4, 4).overlaps(Mesh(8, 8))
    assert not Mesh(2, 4).is_aligned(8) and not Mesh(4, 8).is_aligned(8) and Mesh(8, 24).is_aligned(8)
    assert Mesh(0, 6).is_aligned(6) and not Mesh(4, 4).is_aligned(6)
    with pytest.raises(ConfigError, match="multiply to its 8 devices"):
        Mesh(0, 8, (("dp", 3), ("tp", 2)))
    with pytest.raises(ConfigError, match="different names"):
        Mesh(0, 4, (("dp", 2), ("dp", 2)))


ROLES = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6, unique=True)


@given(ROLES, st.data())
def test_placements_text_and_back(names: list[str], data: st.DataObject) -> None:
    groups, rest = [], list(names)
    while rest:
        here = [rest.pop() for _ in range(data.draw(st.integers(1, len(rest))))]
        layout = data.draw(st.sampled_from(["f8", "d4t2", "t8@div", "d8"]))
        groups.append(" + ".join(f"{n}:{data.draw(st.sampled_from([layout, '...']))}" for n in here))
    placement = Placement.parse(" | ".join(groups + (["..."] if data.draw(st.booleans()) else [])))
    assert Placement.parse(str(placement)) == placement
    assert {role.name for group in placement.groups for role in group.roles} == set(names)


def test_a_placement_is_read() -> None:
    placement = Placement.parse("gen:d4t2 | (policy:f8 + ref:...)|...")
    assert [group.size for group in placement.groups] == [8, 8]
    assert placement.is_open
    role = placement.role("ref")
    assert role is not None and role.layout is None
    assert placement.role("critic") is None
    assert str(placement) == "gen:d4t2 | (policy:f8 + ref:...) | ..."


@pytest.mark.parametrize(
    ("text", "marks", "message"),
    [
        ("a:f8 + b:f4", "       ^^^^", "8 before, 4 here"),
        ("a:f8 | a", "       ^", "'a' is placed twice"),
        ("(a:f8", "     ^", "expected '+' or ')'; found the end"),
        ("a:f8 )", "     ^", "expected '|', '+' or the end"),
        ("a:d2d4", "    ^^", "'d' is given twice"),
        ("a ; b", "  ^", "has names, layouts and the signs"),
        ("a:", "  ^", "a layout such as d4t2"),
        ("a | | b", "    ^", "the name of a role; found |"),
        ("... | ...", "      ^^^", "once"),
        ("... + a", "    ^", "the end"),
    ],
)
def test_wrong_placements_are_pointed_at(text: str, marks: str, message: str) -> None:
    with pytest.raises(TextError, match=re.escape(message)) as caught:
        Placement.parse(text)
    assert str(caught.value).split("\n")[1:] == ["    " + text, "    " + marks]


def test_groups_get_slices_of_their_own() -> None:
    cluster = Cluster.named("16xH100-80G")
    meshes = Placement.parse("gen:t4 | (policy:f8 + ref:f8) | rm:d2").meshes(cluster)
    assert [(mesh.first, mesh.size) for mesh in meshes] == [(8, 4), (0, 8), (12, 2)]
    assert all(mesh.is_aligned(8) for mesh in meshes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:f16 | b:f8", "no 8 are left"),
        ("a:f3", "in one slice"),
        ("a", "no size yet"),
    ],
)
def test_what_has_no_room_says_so(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Placement.parse(text).meshes(Cluster.named("16xH100-80G"))


def test_roles_are_those_of_the_flow() -> None:
    names = frozenset({"policy", "ref"})
    Placement.parse("policy:f8 | ...").check_roles(names)
    with pytest.raises(ConfigError, match="not placed"):
        Placement.parse("policy:f8").check_roles(names)
    with pytest.raises(ConfigError, match="not in the flow"):
        Placement.parse("policy:f8 | critic:f8 | ref").check_roles(names)
