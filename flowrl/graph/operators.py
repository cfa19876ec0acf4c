"""Operators: a function, the columns it reads and writes, and how far it must see.

    @fr.operator(writes={"advantage": fr.SAMPLE.f32}, locality=fr.group("prompt_id"))
    def rloo(reward: fr.SAMPLE.f32):
        n = len(reward)
        return (reward - reward.mean()) * n / (n - 1)

Positional parameters are the columns read (`*part: fr.SAMPLE.f32.named_by("parts")` those a configuration value lists),
keyword-only parameters the configuration. Called with rows of a flow it
adds a node; called with configuration alone it is bound for later (`filters.has_signal(eps=0)`); called with
arrays it is the plain function.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, overload

import numpy as np

from flowrl.errors import ConfigError, DataError, SchemaError
from flowrl.graph.annotations import refuse_misfit
from flowrl.graph.code import Decorated, code_hash, digest, reduced, refuse_changed, resolve
from flowrl.graph.values import EMPTY_MAP, FrozenMap, Scalar, freeze, freeze_config, frozen_defaults
from flowrl.schema.columns import Column, nearest
from flowrl.schema.ragged import Ragged
from flowrl.schema.standard import STANDARD
from flowrl.schema.types import TOKEN, Asked, ColumnType


@dataclass(frozen=True, slots=True)
class Locality:
    """How many rows an operator must see together.

    `row`: any chunk of rows gives the same answer. `group(key)`: all rows with equal `key`. `batch`: all rows of the step.
    `stateful`: all rows, plus what it remembers from earlier steps.
    """

    kind: str
    key: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("row", "group", "batch", "stateful"):
            raise ConfigError(
                f"locality is 'row', fr.group(key), 'batch' or 'stateful'; found '{self.kind}'; "
                f"{nearest(self.kind, ('row', 'group', 'batch', 'stateful'))}"
            )
        if (self.kind == "group") != bool(self.key):
            raise ConfigError("a group needs the column that makes it: locality=fr.group('prompt_id')")

    def __str__(self) -> str:
        return f"group({self.key})" if self.key else self.kind


def group(key: str = "prompt_id") -> Locality:
    """Locality of an operator that must see all rows with equal `key` together."""
    return Locality("group", key)


class State(dict[str, Any]):
    """What a stateful operator remembers between steps; saved with checkpoints.

    An operator asks for it with a keyword-only parameter annotated `fr.State`; `state.setdefault("beta", 0.1)` starts it.
    Values must be numbers, strings, lists, dicts or NumPy arrays.
    """


@dataclass(frozen=True, slots=True)
class Keep:
    """What a filter that also writes columns returns: `mask` [N] of rows to keep, and columns of all N rows."""

    mask: Any
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Read:
    """One column an operator or a loss reads."""

    param: str
    column: str
    type: ColumnType | None = None
    """None: any type."""
    broadcast: str = ""
    """Coarser column used, repeated, when `column` is not there."""
    live: str = ""
    """In a loss: live column used without gradient when `column` is not there."""
    is_optional: bool = False
    is_many: bool = False
    """Before binding: one column for each name that a configuration value lists (`*part: type.named_by("parts")`)."""

    def __str__(self) -> str:
        name = self.param if self.param == self.column else f"{self.param}={self.column}"
        name = f"*{name}" if self.is_many else name
        kind = f": {self.type}" if self.type is not None else ""
        more = f" or broadcast({self.broadcast})" if self.broadcast else f" or live({self.live})" if self.live else ""
        return f"{name}{kind}{more}{' optional' if self.is_optional else ''}"


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """An operator with its configuration: what a node holds. Compared by name, spec hash and configuration."""

    name: str
    """`module:qualname`."""
    hash: str
    """Spec hash: columns, locality, configuration names and defaults, normalised code."""
    config: tuple[tuple[str, Any], ...]
    """Every configuration value, defaults included, sorted by name."""
    reads: tuple[Read, ...]
    writes: tuple[Column, ...]
    locality: Locality
    is_filter: bool = False
    """True when it returns which rows to keep."""
    min_group: int = 1
    """Fewest rows of a group its answer makes sense for."""
    each_row: bool = False
    """True when the function takes one row's values and returns one row's answer."""
    timeout_s: float | None = None
    on_error: str = "raise"
    state_param: str = ""
    replaces: bool = False
    """True when it may write a column that is there already."""
    many_groups: bool = False
    """True when one call may be given several whole groups, which the function separates itself."""
    processes: bool = False
    """True when the function of one row is better run in worker processes: it is heavy, or what it runs may die."""
    threads: int = 1
    """How many rows are under way at once, each in a thread: for a function that mostly waits."""
    narrows: str = ""
    """Mask it reads; the masks it writes are true only where that one is."""
    defaults: FrozenMap = EMPTY_MAP
    """Configuration values that were not asked for unless they differ; the text form leaves them out of the call."""
    function: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    @property
    def short_name(self) -> str:
        return self.name.rpartition(":")[2].rpartition(".")[2]

    def __call__(self, rows: Any) -> Any:
        """Apply to rows of a flow."""
        from flowrl.graph.language import apply

        return apply(rows, self)

    def __reduce__(self) -> tuple[object, ...]:
        return reduced(self)

    def resolve(self) -> Callable[..., Any]:
        """The plain function; imported by name when the graph came from text."""
        if self.function is not None:
            return self.function
        found = resolve(self.name)
        if isinstance(found, Operator):
            refuse_changed(self.name, self.hash, found.hash)
            return found.function
        raise ConfigError(f"'{self.name}' is not an operator any more; found {type(found).__name__}")


class Operator(Decorated):
    """A function with its declaration. Made by `@fr.operator`."""

    def __init__(self, function: Callable[..., Any], declared: _Declared, names: Mapping[str, Any]) -> None:
        super().__init__(function)
        self.declared = declared
        self.reads, self.defaults, self.state_param, self.asked = read_signature(function, names, kind="operator")
        _check_declared(self)

    @property
    def hash(self) -> str:
        """Identity of the operator: what it reads, writes, how far it sees, its configuration and its code."""
        writes = self.declared.writes
        spec = (
            [str(read) for read in self.reads],
            code_hash(writes) if callable(writes) else sorted((n, str(t)) for n, t in writes.items()),
            code_hash(self.declared.locality) if callable(self.declared.locality) else str(self.declared.locality),
            sorted((name, repr(value)) for name, value in self.defaults.items()),
            self.declared.is_filter,
            self.declared.each_row,
            code_hash(self.function),
        )
        return digest(repr(spec))

    def bind(self, *args: Any, **config: Any) -> OperatorCall:
        """The operator with its configuration fixed; unknown or missing values are refused.

        Every operator also takes `replace=True`: it may then write columns that are there already; and, when it writes one
        column, `out="name"`: the column gets that name.
        """
        replaces = bool(config.pop("replace", False)) if "replace" not in self.defaults else False
        out = config.pop("out", None) if "out" not in self.defaults else None
        full = freeze_config(self.__name__, self.defaults, args, config)
        refuse_misfit(self.__name__, full, self.asked, self.defaults)
        d = self.declared
        writes = d.writes(**full) if callable(d.writes) else d.writes
        if out is not None:
            writes = _renamed(writes, out, self.__name__)
        locality = d.locality(**full) if callable(d.locality) else d.locality
        return OperatorCall(
            name=self.name,
            hash=self.hash,
            config=tuple(sorted(full.items())),
            reads=tuple(bound for read in self.reads for bound in resolve_reads(read, full, self.__name__)),
            writes=tuple(Column(name, kind.resolve(full)) for name, kind in writes.items()),
            locality=locality if isinstance(locality, Locality) else Locality(locality),
            is_filter=d.is_filter,
            min_group=d.min_group(**full) if callable(d.min_group) else d.min_group,
            each_row=d.each_row,
            timeout_s=d.timeout_s(**full) if callable(d.timeout_s) else d.timeout_s,
            on_error=d.on_error,
            state_param=self.state_param,
            replaces=replaces or d.replaces or full.get("replace") is True,
            many_groups=d.many_groups,
            processes=d.processes,
            threads=d.threads(**full) if callable(d.threads) else d.threads,
            narrows=d.narrows,
            defaults=frozen_defaults(self.defaults),
            function=self.function,
        )

    def cost_s(self, *, num_rows: int, num_tokens: int, **config: Any) -> float | None:
        """Seconds it says to need for rows with that many tokens, under a configuration; None when it declares no cost."""
        if self.declared.cost is None:
            return None
        full = freeze_config(self.__name__, self.defaults, (), config)
        return float(self.declared.cost(num_rows=num_rows, num_tokens=num_tokens, **full))

    def __call__(self, *args: Any, **config: Any) -> Any:
        from flowrl.graph.handles import Parts, Rows

        if args and isinstance(args[0], Rows | Parts):
            return self.bind(*args[1:], **config)(args[0])
        needed = [read.param for read in self.reads if not read.is_optional]
        if len(args) >= len(needed) and args:
            if not self.declared.each_row:
                _refuse_uneven(self, args, config)
            return self.function(*args, **config)
        if any(map(_is_array, (*args, *config.values()))):
            raise ConfigError(
                f"'{self.__name__}' on arrays needs the columns {', '.join(needed)}, first and in this order; found "
                f"{len(args)} value{'' if len(args) == 1 else 's'}"
                + (f" and {', '.join(config)} by name" if config else "")
            )
        return self.bind(*args, **config)

    def __repr__(self) -> str:
        return f"<operator {self.name} ({', '.join(map(str, self.reads))})>"


def _refuse_uneven(op: Operator, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    """Columns of a call on arrays belong together, as in a table they do. Errors: DataError."""
    last = op.reads[-1]  # the one that takes any number, where there is such
    named = [(read, args[place]) for place, read in enumerate(op.reads) if place < len(args)]
    named += [(last, value) for value in args[len(op.reads) :]]
    named += [(read, given[read.param]) for read in op.reads if read.param in given]
    columns = [(read, value) for read, value in named if _is_array(value)]
    counts = [len(value) for _, value in columns]
    if len(set(counts)) > 1:
        found = ", ".join(f"{read.param} {count}" for (read, _), count in zip(columns, counts, strict=True))
        raise DataError(f"'{op.__name__}' needs columns of equally many rows; found {found}")
    tokens = [
        (r, v) for r, v in columns if isinstance(v, Ragged) and r.type is not None and r.type.granularity is TOKEN
    ]
    for read, value in tokens[1:]:
        first, like = tokens[0]
        if value.offsets is not like.offsets and not np.array_equal(value.offsets, like.offsets):
            row = int(np.flatnonzero(value.lengths != like.lengths)[0])
            raise DataError(
                f"'{op.__name__}' needs one value per token in every column; in row {row}, {first.param} has "
                f"{like.lengths[row]} and {read.param} {value.lengths[row]}"
            )


def _is_array(value: Any) -> bool:
    """Whether it holds values of rows: an array, a tensor, a ragged column."""
    return isinstance(value, Ragged) or bool(getattr(value, "shape", ()))


@dataclass(frozen=True, slots=True)
class _Declared:
    writes: Mapping[str, ColumnType] | Callable[..., Mapping[str, ColumnType]]
    locality: Locality | Callable[..., Locality | str] = Locality("row")
    is_filter: bool = False
    min_group: int | Callable[..., int] = 1
    each_row: bool = False
    timeout_s: float | Callable[..., float | None] | None = None
    on_error: str = "raise"
    replaces: bool = False
    many_groups: bool = False
    processes: bool = False
    threads: int | Callable[..., int] = 1
    narrows: str = ""
    cost: Callable[..., float] | None = None


@overload
def operator(
    *,
    writes: Mapping[str, ColumnType] | Callable[..., Mapping[str, ColumnType]] = ...,
    locality: Locality | str | Callable[..., Locality | str] = ...,
    filter: bool = ...,
    min_group: int | Callable[..., int] = ...,
    each_row: bool = ...,
    timeout_s: float | Callable[..., float | None] | None = ...,
    on_error: str = ...,
    replaces: bool = ...,
    many_groups: bool = ...,
    processes: bool = ...,
    threads: int | Callable[..., int] = ...,
    narrows: str = ...,
    cost: Callable[..., float] | None = ...,
) -> Callable[[Callable[..., Any]], Operator]: ...
@overload
def operator(function: Callable[..., Any], /) -> Operator: ...


def operator(
    function: Callable[..., Any] | None = None,
    /,
    *,
    writes: Mapping[str, ColumnType] | Callable[..., Mapping[str, ColumnType]] | None = None,
    locality: Locality | str | Callable[..., Locality | str] = "row",
    filter: bool = False,
    min_group: int | Callable[..., int] = 1,
    each_row: bool = False,
    timeout_s: float | Callable[..., float | None] | None = None,
    on_error: str = "raise",
    replaces: bool = False,
    many_groups: bool = False,
    processes: bool = False,
    threads: int | Callable[..., int] = 1,
    narrows: str = "",
    cost: Callable[..., float] | None = None,
) -> Any:
    """Declare a function as an operator.

    Args:
        writes: column name to type, or a function of the configuration that returns that.
        locality: `"row"` (default), `fr.group(key)`, `"batch"`, `"stateful"`, or a function of the configuration.
        filter: the function returns a boolean per row (true keeps it), or `fr.Keep(mask, columns)`.
        min_group: fewest rows of a group for which the answer makes sense (checked where the size is known: FR-G02).
        each_row: the function takes the values of one row and returns one row's answer; it may be slow or fail.
        timeout_s: seconds one row (each_row) or one call may take. None waits for ever only if you do.
        on_error: `"raise"`, or `"flag"`: the row's numbers become NaN and `row_error` says why.
        replaces: it is meant to change a column that is there already (otherwise that is FR-C03).
        many_groups: one call may be given several whole groups, which the function tells apart by the key it reads; saves a
            call per group.
        processes: each_row only: run it in worker processes unless a run says otherwise (option `reward_workers`). A row that
            takes too long is killed, one that takes its process with it is flagged, and rows run side by side.
        threads: each_row only: rows under way at once, in threads; for a function that waits for a server.
        narrows: a TOKEN.bool column it reads; the masks it writes are true only where that one is (held when it runs), so that
            tokens of tools stay out of a loss (FR-M01).
        cost: seconds that `num_rows` rows with `num_tokens` tokens take on one core, as a function of these two and of the
            configuration (`lambda *, num_rows, num_tokens, **config: 1e-8 * num_tokens`). An estimate for planning, and no part
            of what the operator is; so far nothing but `flowrl.testing` reads it.

    The function gets NumPy arrays: [N] for PROMPT and SAMPLE columns, `fr.Ragged` for TURN and TOKEN columns.
    It returns the written column, or a dict of them when it writes several. Its inputs are read-only.

    Errors: ConfigError for a declaration that makes no sense; SchemaError for annotations that are not column types.
    """
    if function is not None:
        raise ConfigError(
            f"@fr.operator needs to know what '{function.__name__}' writes: "
            '@fr.operator(writes={"column": fr.SAMPLE.f32})'
        )
    frame = sys._getframe(1)
    names = {**frame.f_globals, **frame.f_locals}
    declared = _Declared(
        writes=writes if writes is not None else {},
        locality=locality if isinstance(locality, Locality) or callable(locality) else Locality(locality),
        is_filter=filter,
        min_group=min_group,
        each_row=each_row,
        timeout_s=timeout_s,
        on_error=on_error,
        replaces=replaces,
        many_groups=many_groups,
        processes=processes,
        threads=threads,
        narrows=narrows,
        cost=cost,
    )
    return lambda f: Operator(f, declared, names)


def reward(
    function: Callable[..., Any] | None = None,
    /,
    *,
    timeout_s: float | Callable[..., float | None] | None = 30.0,
    on_error: str = "flag",
    processes: bool = False,
    threads: int | Callable[..., int] = 1,
) -> Any:
    """Declare a function of one row's values that returns its reward.

    Example:
        @fr.reward
        def exact(response, answer):
            return float(response.strip() == answer)

    Writes `reward`. A row whose call raises or takes longer than `timeout_s` seconds gets NaN and a `row_error`
    (`on_error="flag"`), or ends the run (`on_error="raise"`). `processes` and `threads` as for `fr.operator`.
    """
    frame = sys._getframe(1)
    names = {**frame.f_globals, **frame.f_locals}
    from flowrl.schema.standard import REWARD

    declared = _Declared(
        writes={"reward": REWARD.type},
        each_row=True,
        timeout_s=timeout_s,
        on_error=on_error,
        processes=processes,
        threads=threads,
    )
    if function is not None:
        return Operator(function, declared, names)
    return lambda f: Operator(f, declared, names)


def _renamed(writes: Mapping[str, ColumnType], out: Any, name: str) -> dict[str, ColumnType]:
    """The only column an operator writes, under the name that `out=` gives it."""
    if not isinstance(out, str) or not out:
        raise ConfigError(f"'{name}' needs the name of a column in 'out'; found {out!r}")
    if len(writes) != 1:
        raise ConfigError(
            f"'{name}' writes {', '.join(writes) or 'no column'}; 'out' names the column of an operator that writes one"
        )
    return dict(zip((out,), writes.values(), strict=True))


def read_signature(
    function: Callable[..., Any], names: Mapping[str, Any], *, kind: str
) -> tuple[tuple[Read, ...], dict[str, Any], str, dict[str, Any]]:
    """(columns read, configuration with defaults, name of the State parameter, annotations of the configuration) of a declared
    function."""
    reads: list[Read] = []
    defaults: dict[str, Any] = {}
    asked: dict[str, Any] = {}
    state_param = ""
    for param in inspect.signature(function).parameters.values():
        annotation = _annotation(param.annotation, names, function)
        is_many = param.kind is param.VAR_POSITIONAL and isinstance(annotation, Asked) and bool(annotation.named_by)
        if param.kind is param.VAR_KEYWORD or (param.kind is param.VAR_POSITIONAL and (not is_many or kind == "loss")):
            raise SchemaError(
                f"{kind} '{function.__name__}' has '*{param.name}'; its parameters are the columns it reads, "
                "so each must be named"
                + ("" if kind == "loss" else f"; a list of names: *{param.name}: fr.SAMPLE.f32.named_by('names')")
            )
        if param.kind is param.KEYWORD_ONLY:
            if annotation is State:
                state_param = param.name
            else:
                defaults[param.name] = REQUIRED if param.default is param.empty else freeze(param.default)
                if param.annotation is not param.empty:
                    asked[param.name] = annotation
            continue
        read = _read(param, annotation, function, kind)
        reads.append(replace(read, is_many=True) if is_many else read)
    for read in reads:  # names of columns are looked at where they are read
        asked.pop(read.column.removeprefix("$"), None)
    return tuple(reads), defaults, state_param, asked


class _Required:
    def __repr__(self) -> str:
        return "<required>"


REQUIRED = _Required()


def _annotation(annotation: Any, names: Mapping[str, Any], function: Callable[..., Any]) -> Any:
    if annotation is inspect.Parameter.empty:
        return None
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, {**names, **getattr(function, "__globals__", {})})
    except Exception as error:  # an annotation is arbitrary code; whatever it raises is reported with its text
        raise SchemaError(f"annotation '{annotation}' of '{function.__name__}' cannot be read: {error}") from error


def _read(param: inspect.Parameter, annotation: Any, function: Callable[..., Any], kind: str) -> Read:
    standard = STANDARD[param.name].type if param.name in STANDARD else None
    if isinstance(annotation, Asked):
        column = "" if annotation.named_by else annotation.column or param.name
        return Read(
            param.name,
            column or f"${annotation.named_by}",
            annotation.type,
            annotation.broadcast,
            annotation.live,
            annotation.is_optional or param.default is None,
        )
    if isinstance(annotation, ColumnType):
        return Read(param.name, param.name, annotation, is_optional=param.default is None)
    # plain Python annotations (str, float, Any, torch.Tensor) document the function and say nothing of granularity
    return Read(param.name, param.name, standard, is_optional=param.default is None)


def resolve_reads(read: Read, config: Mapping[str, Any], name: str) -> tuple[Read, ...]:
    """The columns a parameter of an operator reads: one, or those that a configuration value lists."""
    if not read.is_many:
        return (resolve_read(read, config, name),)
    columns = config.get(read.column[1:])
    if isinstance(columns, FrozenMap):  # a column to a value each: weights, say
        columns = tuple(column for column, _ in columns.items)
    is_list = isinstance(columns, tuple) and all(isinstance(column, str) for column in columns)
    if not is_list or not columns or len(set(columns)) < len(columns):
        raise ConfigError(
            f"'{name}' needs the names of one or more columns in '{read.column[1:]}', each once; found {columns!r}"
        )
    return tuple(
        replace(read, param=f"{read.param}_{i}", column=column, is_many=False) for i, column in enumerate(columns)
    )


def resolve_read(read: Read, config: Mapping[str, Any], name: str) -> Read:
    """Fill in the column name that a configuration value holds."""
    if not read.column.startswith("$"):
        kind = read.type.resolve(dict(config)) if read.type is not None else None
        return Read(read.param, read.column, kind, read.broadcast, read.live, read.is_optional)
    column = config.get(read.column[1:])
    if column is None and read.is_optional:
        return Read(read.param, read.param, read.type, is_optional=True)
    if not isinstance(column, str):
        raise ConfigError(f"'{name}' needs the name of a column in '{read.column[1:]}'; found {column!r}")
    return Read(read.param, column, read.type, read.broadcast, read.live, read.is_optional)


def _check_declared(op: Operator) -> None:
    d = op.declared
    if d.on_error not in ("raise", "flag"):
        raise ConfigError(f"on_error of '{op.__name__}' is 'raise' or 'flag'; found {d.on_error!r}")
    if not callable(d.writes):
        for column, kind in d.writes.items():
            if not isinstance(kind, ColumnType):
                raise SchemaError(
                    f"'{op.__name__}' writes '{column}' with {kind!r}; a column type looks like fr.SAMPLE.f32"
                )
        if not d.writes and not d.is_filter:
            raise ConfigError(f"'{op.__name__}' writes nothing and is no filter; declare writes= or filter=True")
    if (d.processes or d.threads != 1) and not d.each_row:
        raise ConfigError(
            f"'{op.__name__}' declares processes or threads, which are for a function of one row: each_row=True"
        )
    if d.narrows and d.narrows not in {read.column for read in op.reads}:
        raise ConfigError(f"'{op.__name__}' narrows '{d.narrows}', which it does not read; name a mask that it reads")
    if d.processes and d.threads != 1:
        raise ConfigError(f"'{op.__name__}' declares processes and threads; it runs in one of them")
    if op.state_param and str(d.locality) != "stateful":
        raise ConfigError(f"'{op.__name__}' asks for fr.State; declare locality='stateful'")


__all__ = ["Keep", "Locality", "Operator", "OperatorCall", "Read", "Scalar", "State", "group", "operator", "reward"]
