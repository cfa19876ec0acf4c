"""Inputs made from what an operator or a loss declares to read: by type, and by name where a name says what is in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.graph.operators import Read
from flowrl.schema.ragged import Ragged
from flowrl.schema.standard import LIVE, STANDARD
from flowrl.schema.types import PROMPT, RAGGED, SAMPLE, TURN, ColumnType

Maker = Callable[[np.random.Generator, Any], Any]
"""`lambda rng, n: n values`, for a column with one value per row (for a PROMPT column, per prompt); `lambda rng, lengths: one
list per row` for a TOKEN or TURN column, `lengths` [N] saying how long each is."""

VOCABULARY, WIDTH = 8, 3
"""Ids are below VOCABULARY, and live logits that wide; a width that nothing decides is WIDTH."""

LONG = 4000
"""Tokens of a very long row."""

RESPONSES = (
    "The answer is {d}.",
    "#### {d}",
    r"so \boxed{{{d}}}",
    "",
    "<think>hm</think>{d}",
    "{d}",
    "(B)",
    "né {d}\n",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a made table is like."""

    rows: int
    masked: str = "some"
    """Which tokens the masks leave out: "some" or "all"."""
    lengths: str = "short"
    """"short" (0 to 6 tokens), "extreme" (none, one, LONG)."""
    is_distinct: bool = False
    """No two rows share a number or a length, so that no tie has to be broken."""
    min_group: int = 1
    is_paired: bool = False
    """Groups are pairs."""


@dataclass(slots=True)
class Rows:
    """The rows of a made table: which belong together, and how long they are."""

    shape: Shape
    rng: np.random.Generator
    group: np.ndarray
    """[N] number of each row's group."""
    lengths: np.ndarray
    """[N] tokens of each row."""
    turns: np.ndarray
    """[N] turns of each row."""
    trained: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    """[T] true where a token trains."""

    @classmethod
    def of(cls, shape: Shape, seed: int) -> Rows:
        rng = np.random.default_rng((seed, shape.rows))
        n = shape.rows
        lengths = rng.integers(0, 7, n)
        if shape.is_distinct:
            lengths = rng.permutation(n) + 1
        if shape.lengths == "extreme":
            lengths = np.resize([0, LONG, 1, 3], n)
        made = cls(shape, rng, _grouped(shape, rng), lengths, np.minimum(rng.integers(1, 4, n), np.maximum(lengths, 1)))
        trained = rng.random(int(lengths.sum())) < 0.7
        if shape.masked == "all":
            trained[:] = False
        elif n > 2:  # one row without a token that trains
            trained &= np.repeat(np.arange(n), lengths) != int(rng.integers(n))
        made.trained = trained
        return made

    @property
    def num_groups(self) -> int:
        return int(self.group.max(initial=-1)) + 1

    def column(self, name: str, kind: ColumnType, maker: Maker | None = None) -> Any:
        """Values of a column of this type, as a table takes them."""
        grain = kind.granularity
        count = self.num_groups if grain is PROMPT else self.shape.rows
        if grain.is_ragged:
            lengths = self.turns if grain is TURN else self.lengths
            if maker is not None:
                return maker(self.rng, lengths)
            values = self._values(name, kind, int(lengths.sum()))
            return Ragged(values, np.concatenate(([0], np.cumsum(lengths))))
        values = maker(self.rng, count) if maker is not None else self._values(name, kind, count)
        if grain is not PROMPT:
            return values
        return [values[g] for g in self.group] if isinstance(values, list) else np.asarray(values)[self.group]

    def _values(self, name: str, kind: ColumnType, count: int) -> Any:
        if RAGGED in kind.inner:
            return [self.rng.integers(0, VOCABULARY, int(k)) for k in self.rng.integers(1, 4, count)]
        shape = (count, *(length if isinstance(length, int) else WIDTH for length in kind.inner))
        match kind.dtype:
            case "str":
                return np.asarray(self._texts(name, count), dtype=object)
            case "bytes":
                return np.asarray([b"%d" % i for i in range(count)], dtype=object)
            case "bool":
                return self._booleans(name, count) if len(shape) == 1 else self.rng.random(shape) < 0.5
            case "f16" | "f32" | "f64":
                return self._floats(name, shape)
        return self._integers(name, shape)

    def _texts(self, name: str, count: int) -> list[str]:
        """[N] or [P] texts."""
        rng, per_prompt = self.rng, range(count)
        groups = per_prompt if count == self.num_groups != self.shape.rows else self.group.tolist()
        match name:
            case "sample_id":
                return [f"p{g}/{i}" for i, g in enumerate(groups)]
            case "finish_reason":
                return [str(rng.choice(["stop", "length"])) for _ in per_prompt]
            case "row_error":
                return [""] * count
            case "response":
                return [str(rng.choice(RESPONSES)).format(d=int(rng.integers(3))) for _ in per_prompt]
            case "answer":
                return [str(int(rng.integers(3))) for _ in per_prompt]
            case "role":
                return [str(rng.choice(["solver", "judge"])) for _ in per_prompt]
        if name.endswith("_id"):
            return [f"{name[0]}{g}" for g in groups]
        return [str(rng.choice(["a", "b", "c"])) for _ in per_prompt]

    def _booleans(self, name: str, count: int) -> np.ndarray:
        if count == len(self.trained) and name.endswith("mask"):
            return self.trained.copy() if name != "response_mask" else np.ones(count, bool)
        if name == "chosen":  # one of each pair
            groups = self.group.tolist()
            return np.asarray([g not in groups[:i] for i, g in enumerate(groups)], bool)
        return self.rng.random(count) < 0.5

    def _floats(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        rng = self.rng
        if "logprob" in name:
            # the columns of one row are close to each other
            base = np.random.default_rng(shape).exponential(1.0, shape)
            return -np.abs(base + 0.2 * rng.normal(size=shape)) - 1e-3
        if name == "entropy":
            return rng.exponential(1.0, shape)
        if name == "temperature":
            return np.ones(shape)
        if ("reward" in name or "score" in name) and not self.shape.is_distinct and rng.random() < 0.5:
            return rng.integers(0, 2, shape).astype(np.float64)
        return rng.normal(size=shape)

    def _integers(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        rng = self.rng
        match name:
            case "min_policy_version":
                return rng.integers(0, 4, shape)
            case "max_policy_version":
                return rng.integers(4, 7, shape)
            case "num_turns":
                return self.turns if shape == self.turns.shape else rng.integers(1, 4, shape)
            case "sample_index" if shape == self.group.shape:
                return np.asarray([int((self.group[:i] == g).sum()) for i, g in enumerate(self.group)], np.int64)
        if self.shape.is_distinct and len(shape) == 1:
            return rng.permutation(shape[0])
        return rng.integers(0, VOCABULARY, shape)


def _grouped(shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """[N] number of each row's group, every group with at least `min_group` rows where there are that many."""
    sizes: list[int] = []
    left = shape.rows
    while left > 0:
        size = 2 if shape.is_paired else shape.min_group + int(rng.integers(0, 3))
        size = left if left < size + shape.min_group else size
        sizes.append(size)
        left -= size
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    mixed = rng.permutation(numbers) if rng.random() < 0.5 else numbers  # the rows of a group need not be neighbours
    first: dict[int, int] = {}
    return np.asarray([first.setdefault(g, len(first)) for g in mixed.tolist()], np.int64)


def type_of(read: Read) -> ColumnType:
    """The type a column is made with: the standard one where it may be read so, else the one declared."""
    standard = LIVE.get(read.column) or (STANDARD[read.column].type if read.column in STANDARD else None)
    if standard is not None and (read.type is None or read.type.accepts(standard)):
        kind = standard
    else:
        kind = read.type or SAMPLE.f32
    if read.type is not None and read.type.inner:
        kind = replace(kind, inner=read.type.inner)
    return kind


def refuse_unknown(columns: Mapping[str, Maker], known: Iterable[str], name: str) -> None:
    """Errors: ConfigError for a generator of a column that is not read."""
    from flowrl.schema.columns import nearest

    names = list(known)
    for column in columns:
        if column not in names:
            raise ConfigError(f"'{name}' reads no column '{column}' to make with columns=; {nearest(column, names)}")
