"""Random graphs: every kind of node, name and value that a text must carry."""

from hypothesis import strategies as st

from flowrl.graph.code import FunctionRef
from flowrl.graph.expressions import BINARY, Binary, Col, Expression, Literal, Where
from flowrl.graph.kinds import KINDS
from flowrl.graph.losses import Loss, Product, Scale, Sum, Term
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.operators import Locality, OperatorCall, Read
from flowrl.graph.text import WORDS
from flowrl.graph.values import Component, FrozenMap
from flowrl.schema.columns import Column
from flowrl.schema.types import DTYPES, ColumnType, Granularity

names = st.sampled_from(
    [*sorted(WORDS), "a", "rows", "reward/exact", "a.b", "x@1", "é", "2nd", "a b", "<lambda>"]
) | st.text(min_size=1)
column_names = st.sampled_from(["reward", "reward/exact", "a.b", "x@1", "or", "optional", "broadcast", "_", "k2"])
strings = st.text() | st.sampled_from(
    ['"', "\\", "'", "\n", "\r\n", "\u2028", "\x85", "\x1c", "\x00", "\ud800", "#", "; return", "é漢😀"]
)
floats = st.floats(allow_nan=False) | st.sampled_from([0.1, 1e-300, 1e22, -0.0, 5e-324])
scalars = st.none() | st.booleans() | st.integers() | floats | strings
hashes = st.text("0123456789abcdef", min_size=12, max_size=12)
paths = st.builds("{}:{}".format, st.sampled_from(["m", "pack.sub", "tests.x"]), names)
types = st.builds(
    ColumnType,
    st.sampled_from(Granularity),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 999) | st.sampled_from(["*", "k", "V", 'q"'])).map(tuple),
)
reads = st.builds(
    Read, names, column_names, st.none() | types, column_names | st.just(""), column_names | st.just(""), st.booleans()
)
localities = st.sampled_from(["row", "batch", "stateful"]).map(Locality) | column_names.map(
    lambda key: Locality("group", key)
)


def configs(values):
    return st.dictionaries(names, values, max_size=3).map(lambda d: tuple(sorted(d.items())))


def operators(values):
    return st.builds(
        OperatorCall,
        name=paths,
        hash=hashes,
        config=configs(values),
        reads=st.lists(reads, max_size=3).map(tuple),
        writes=st.lists(st.builds(Column, column_names, types), max_size=3).map(tuple),
        locality=localities,
        is_filter=st.booleans(),
        min_group=st.integers(1, 9),
        each_row=st.booleans(),
        timeout_s=st.none() | floats,
        on_error=st.sampled_from(["raise", "flag"]),
        state_param=st.just("") | names,
        replaces=st.booleans(),
    )


def terms(values):
    return st.builds(
        Term,
        name=paths,
        hash=hashes,
        config=configs(values),
        reads=st.lists(reads, max_size=3).map(tuple),
        locality=localities,
        per=st.sampled_from(["token", "sample"]),
        on_policy=st.booleans(),
        max_staleness=st.none() | st.integers(0, 9),
        corrects=st.booleans(),
        weight=st.booleans(),
    )


def losses(values) -> st.SearchStrategy[Loss]:
    return st.recursive(
        terms(values),
        lambda part: (
            st.lists(part, max_size=3).map(lambda parts: Sum(tuple(parts)))
            | st.builds(Scale, floats, part)
            | st.builds(Product, part, part)
        ),
        max_leaves=5,
    )


expressions: st.SearchStrategy[Expression] = st.recursive(
    st.builds(Col, names) | st.builds(Literal, scalars),
    lambda part: st.builds(Binary, st.sampled_from(sorted(BINARY)), part, part) | st.builds(Where, part, part, part),
    max_leaves=6,
)

functions = st.builds(FunctionRef, paths, hashes)


def _containers(inner):
    return (
        st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(strings, inner, max_size=3).map(lambda d: FrozenMap(tuple(d.items())))
        | st.builds(Component, paths, st.lists(inner, max_size=2).map(tuple), configs(inner))
        | operators(inner)
    )


values = st.recursive(scalars | functions | expressions, _containers, max_leaves=4) | losses(scalars)


@st.composite
def graphs(draw, depth: int = 2) -> Graph:
    nodes: list[Node] = []
    for name in draw(st.lists(names, min_size=1, max_size=5, unique=True)):
        kind = draw(st.sampled_from(sorted(KINDS)))
        known = [node.name for node in nodes]
        sources = draw(st.lists(st.sampled_from(known), max_size=3)) if known else []
        ports = KINDS[kind].ports
        if draw(st.booleans()) and sources and ports:
            wired = tuple(zip((*ports, *(ports[-1:] * 3)), sources, strict=False))
        else:
            wired = tuple((draw(names), source) for source in sources)
        params = draw(configs(values))
        body = draw(graphs(depth - 1)) if depth and draw(st.integers(0, 4)) == 0 else None
        nodes.append(Node(name, kind, wired, params, body))
    known = [node.name for node in nodes]
    some = st.lists(st.sampled_from(known), max_size=3).map(tuple)
    return Graph(draw(names), tuple(nodes), draw(some), draw(some))
