"""Placement algebra: which roles share devices, which stand apart, and the layout of each.

    placement = group ("|" group)*            groups have devices of their own
    group     = "(" roles ")" | roles | "..."
    roles     = role ("+" role)*              roles of a group take turns on the same devices
    role      = name [":" layout]             layout as in `Layout.parse`, or "..."

"..." leaves a choice to the planner: as a layout, the layout; as a group, the roles that are not named.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from flowrl.errors import ConfigError, TextError
from flowrl.mesh.cluster import Cluster
from flowrl.mesh.layout import Layout, parse_error
from flowrl.mesh.meshes import Mesh
from flowrl.schema.fields import shown

_TOKEN = re.compile(
    r"\s*(?:(?P<dots>\.\.\.)|(?P<op>[|+():])|(?P<word>[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*(?:@[A-Za-z]*)?))"
)
_ROLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")


@dataclass(frozen=True, slots=True)
class Role:
    """A name and how its weights lie. Example: Role("policy", Layout(fsdp=8))."""

    name: str
    layout: Layout | None = None
    """None where the planner chooses."""

    def __str__(self) -> str:
        return f"{self.name}:{'...' if self.layout is None else self.layout}"


@dataclass(frozen=True, slots=True)
class Group:
    """Roles that take turns on the same devices."""

    roles: tuple[Role, ...]

    def __post_init__(self) -> None:
        if not self.roles:
            raise ConfigError("a group of a placement has at least one role")
        sizes = {str(role): role.layout.size for role in self.roles if role.layout is not None}
        if len(set(sizes.values())) > 1:
            raise ConfigError(f"roles that share devices need layouts of one size; found {sizes}")

    @property
    def size(self) -> int | None:
        """Devices of the group; None where the planner chooses."""
        return next((role.layout.size for role in self.roles if role.layout is not None), None)

    def __str__(self) -> str:
        joined = " + ".join(str(role) for role in self.roles)
        return f"({joined})" if len(self.roles) > 1 else joined


@dataclass(frozen=True, slots=True)
class Placement:
    """Groups of roles, each with devices of its own.

    Example:
        Placement.parse("gen:d4t2 | (policy:f8 + ref:f8)")
        Placement.parse("(gen:d4t2 + policy:...) | ...")       # the planner lays out policy and places all other roles
    """

    groups: tuple[Group, ...]
    is_open: bool = False
    """Whether roles that are not named are left to the planner."""

    def __post_init__(self) -> None:
        names = [role.name for group in self.groups for role in group.roles]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"a role has one place; placed more than once: {', '.join(twice)}")

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Read the text form. Raises `TextError` that points at the place."""
        return _Reader(text).placement()

    def __str__(self) -> str:
        return " | ".join([*(str(group) for group in self.groups), *(["..."] if self.is_open else [])])

    def role(self, name: str) -> Role | None:
        """The role of a name, or None."""
        return next((role for group in self.groups for role in group.roles if role.name == name), None)

    def check_roles(self, names: frozenset[str]) -> None:
        """Raise `ConfigError` unless the placement names these roles: no others, and all of them unless it is open."""
        placed = {role.name for group in self.groups for role in group.roles}
        if placed - names:
            raise ConfigError(f"placed but not in the flow: {sorted(placed - names)}; the flow has {sorted(names)}")
        if names - placed and not self.is_open:
            raise ConfigError(f"not placed: {sorted(names - placed)}; place them or end the placement with '| ...'")

    def meshes(self, cluster: Cluster) -> tuple[Mesh, ...]:
        """A buddy slice for each group, in the order of the groups: the largest group first, each at the lowest free place.

        Raises `ConfigError` when a group has no size yet or no slice is left for it.
        """
        sizes = [group.size for group in self.groups]
        found: dict[int, Mesh] = {}
        for index in sorted(range(len(sizes)), key=lambda i: (-(sizes[i] or 0), i)):
            group, size = self.groups[index], sizes[index]
            if size is None:
                raise ConfigError(
                    f"'{group}' has no size yet: give one of its roles a layout, or let the planner choose"
                )
            candidates = cluster.slices(size)
            if not candidates:
                raise ConfigError(
                    f"'{group}' needs {size} devices in one slice; nodes have {cluster.devices_per_node} devices, and a slice is "
                    "a power of two inside a node (any number where a node has no power of two), or whole nodes, of "
                    f"{cluster.num_devices} devices at most"
                )
            free = [mesh for mesh in candidates if not any(mesh.overlaps(taken) for taken in found.values())]
            if not free:
                raise ConfigError(f"'{self}' needs {sum(s or 0 for s in sizes)} devices; no {size} are left for '{group}' of "
                                  f"the cluster's {cluster.num_devices}")  # fmt: skip
            found[index] = free[0]
        return tuple(found[index] for index in range(len(sizes)))


class _Reader:
    """A cursor over the tokens of one placement."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TextError(
                f"a placement is text such as 'gen:d4t2 | ...'; found {shown(text)} ({type(text).__name__})"
            )
        self.text = text
        self.tokens: list[tuple[str, str, int]] = []
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                bad = at + len(text[at:]) - len(text[at:].lstrip())
                raise parse_error(text, bad, 1, "a placement has names, layouts and the signs | + ( ) : ...")
            kind = str(match.lastgroup)
            self.tokens.append((kind, match[kind], match.start(kind)))
            at = match.end()
        self.tokens.append(("end", "the end", len(text.rstrip())))
        self.index = 0

    def fail(self, wanted: str) -> TextError:
        _, found, at = self.tokens[self.index]
        length = len(found) if self.tokens[self.index][0] != "end" else 1
        return parse_error(self.text, at, length, f"expected {wanted}; found {found}")

    def take(self, text: str) -> bool:
        if self.tokens[self.index][1] != text or self.tokens[self.index][0] in ("end", "word"):
            return False
        self.index += 1
        return True

    def placement(self) -> Placement:
        groups: list[Group] = []
        seen: set[str] = set()
        is_open = False
        while True:
            if self.tokens[self.index][0] == "dots":
                if is_open:
                    raise self.fail("'...' once: it already stands for all roles that are not named")
                is_open = True
                self.index += 1
            else:
                groups.append(self.group(seen))
            if not self.take("|"):
                break
        if self.tokens[self.index][0] != "end":
            raise self.fail("'|', '+' or the end")
        return Placement(tuple(groups), is_open)

    def group(self, seen: set[str]) -> Group:
        enclosed = self.take("(")
        group = Group((self.role(seen),))
        while self.take("+"):
            _, _, at = self.tokens[self.index]
            role = self.role(seen)
            size = group.size
            if role.layout is not None and size is not None and role.layout.size != size:
                _, last, end = self.tokens[self.index - 1]
                message = f"roles that share devices need layouts of one size: {size} before, {role.layout.size} here"
                raise parse_error(self.text, at, end + len(last) - at, message)
            group = replace(group, roles=(*group.roles, role))
        if enclosed and not self.take(")"):
            raise self.fail("'+' or ')'")
        return group

    def role(self, seen: set[str]) -> Role:
        kind, name, at = self.tokens[self.index]
        if kind != "word" or not _ROLE.fullmatch(name):
            raise self.fail("the name of a role")
        if name in seen:
            raise parse_error(self.text, at, len(name), f"'{name}' is placed twice; a role has one place")
        seen.add(name)
        self.index += 1
        if not self.take(":") or self.take("..."):
            return Role(name)
        kind, word, at = self.tokens[self.index]
        if kind != "word":
            raise self.fail("a layout such as d4t2, or ...")
        try:
            layout = Layout.parse(word)
        except TextError as error:
            message, _, marks = str(error).split("\n")
            offset = marks.index("^") - 4
            raise parse_error(self.text, at + offset, marks.count("^"), message) from None
        self.index += 1
        return Role(name, layout)
