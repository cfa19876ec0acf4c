"""Properties every loss must have. torch is imported when one is tried, never before."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

import flowrl as fr
from flowrl.errors import FlowError
from flowrl.graph.losses import SEGMENTS, LossFunction, Term, is_live
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.operators import Read
from flowrl.schema.ragged import Ragged
from flowrl.schema.standard import LIVE
from flowrl.schema.types import ColumnType
from flowrl.testing._findings import Broken
from flowrl.testing._gradients import Kept, held_constant, kept_constant
from flowrl.testing._inputs import VOCABULARY, Maker, Rows, Shape, refuse_unknown, type_of
from flowrl.testing._operators import Property, must_read_back, unless_refused

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Answer = tuple["Tensor", dict[str, "Tensor"]]
"""The loss, and its gradient for each live column."""

AVERAGES: tuple[dict[str, Any], ...] = (
    {"average": "token_mean"},
    {"average": "sequence_mean"},
    {"average": "sequence_sum"},
    {"average": "constant", "average_length": 7},
)
SIZES = (1, 2, 3, 5)
FILLS = (float("nan"), float("inf"), 1e30)
STEP = 1e-6
"""Of finite differences, in float64."""

RATIO = 30.0
"""Log-ratios at the extremes."""

SYNCS = frozenset({"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__"})
"""Methods of a tensor that wait for the device."""


@fr.loss(on_policy=False, max_staleness=None)
def one(segments: Any) -> Tensor:
    """1 at each token: what a weight is multiplied with to be tried."""
    import torch

    return torch.ones(len(segments.row_index), device=segments.row_index.device)


@dataclass(frozen=True)
class Batch:
    """Padded tensors, as `fr.apply_loss` takes them. Shapes: B rows, T columns."""

    columns: dict[str, Any]
    mask: Tensor
    """[B, T] bool."""
    group: np.ndarray
    """[B] rows with equal numbers stay together."""
    live: tuple[str, ...]

    def rows(self, which: Any) -> Batch:
        import torch

        index = torch.as_tensor(np.asarray(which, np.int64))
        taken = {
            n: v[index] if isinstance(v, torch.Tensor) else [v[i] for i in index.tolist()]
            for n, v in self.columns.items()
        }
        return Batch(taken, self.mask[index], self.group[np.asarray(which)], self.live)

    def with_columns(self, columns: Mapping[str, Any]) -> Batch:
        return replace(self, columns={**self.columns, **columns})

    def without(self, name: str) -> Batch:
        return replace(self, columns={n: v for n, v in self.columns.items() if n != name})

    def to(self, dtype: torch.dtype, *, only_live: bool = False) -> Batch:
        changed = {
            n: v.to(dtype)
            for n, v in self.columns.items()
            if hasattr(v, "is_floating_point") and v.is_floating_point() and (n in self.live or not only_live)
        }
        return self.with_columns(changed)

    def leaves(self) -> dict[str, Tensor]:
        """The live columns, to be differentiated by."""
        return {name: self.columns[name].detach().clone().requires_grad_() for name in self.live}

    def shown(self) -> dict[str, Any]:
        return {**self.columns, "mask": self.mask.int()}


@dataclass(frozen=True)
class Trial:
    """A loss under one configuration, and how its inputs are made."""

    loss: LossFunction | None
    term: Term
    columns: Mapping[str, Maker] = field(default_factory=dict)
    seed: int = 0
    stop_gradient: str = ""

    def __post_init__(self) -> None:
        refuse_unknown(self.columns, (self.key(read) for read in self.reads), self.term.short_name)

    @property
    def reads(self) -> tuple[Read, ...]:
        return tuple(read for read in self.term.reads if read.param != SEGMENTS)

    @staticmethod
    def key(read: Read) -> str:
        """What `fr.apply_loss` calls a column: its name, or the parameter's where a live one has that name."""
        return read.param if read.column in LIVE and not is_live(read) else read.column

    @property
    def live(self) -> tuple[str, ...]:
        return tuple(sorted({read.column for read in self.reads if is_live(read)}))

    def batch(self, shape: Shape, seed: int) -> Batch:
        """A batch in float64."""
        import torch

        types = {self.key(read): type_of(read) for read in self.reads}
        is_paired = "pair_id" in types or self.term.locality.key == "pair_id"
        n = shape.rows + shape.rows % 2 if is_paired else shape.rows
        rows = Rows.of(replace(shape, rows=n, is_paired=is_paired), seed)
        rows.lengths = np.maximum(rows.lengths, 1)
        rows.trained = rows.rng.random(int(rows.lengths.sum())) < (0.7 if shape.masked == "some" else 0.0)
        if shape.masked == "some":
            idle = np.flatnonzero(rows.group != rows.group[-1]) if is_paired else np.arange(n - 1)
            if n > 2 and len(idle):  # a row without a token that trains, and with it what is kept together with it
                which = rows.group == rows.group[idle[0]] if is_paired else np.arange(n) == idle[0]
                rows.trained &= ~np.repeat(which, rows.lengths)
            rows.trained[-1] = True
        width = int(rows.lengths.max())
        inside = torch.as_tensor(np.arange(width)[None, :] < rows.lengths[:, None])
        made = {}
        for name, kind in types.items():
            kind = _sized(kind)
            values = rows.column(name, kind, self.columns.get(name))
            made[name] = _padded(values, kind, rows, inside)
        mask = torch.zeros(n, width, dtype=torch.bool)
        mask[inside] = torch.as_tensor(rows.trained)
        batch = Batch(_consistent(made, types), mask, rows.group, self.live)
        return batch.to(torch.float64)

    def batches(self, seeds: int = 2, **shape: Any) -> Iterator[Batch]:
        for size in SIZES:
            for seed in range(seeds):
                yield self.batch(Shape(size, **shape), self.seed + seed)

    def value(self, batch: Batch, term: Term | None = None, **how: Any) -> Answer:
        """(the loss, its gradient for each live column). Errors: Broken with the input."""
        import torch

        leaves = batch.leaves()
        try:
            value = self.forward(batch, leaves, term, **how)
            given = list(leaves.values())
            found = torch.autograd.grad(value, given, allow_unused=True) if value.requires_grad else [None] * len(given)
        except (FlowError, RuntimeError) as error:
            raise Broken(str(error), given=batch.shown()) from error
        grads = {}
        for (name, leaf), grad in zip(leaves.items(), found, strict=True):
            grads[name] = torch.zeros_like(leaf) if grad is None else grad
        return value.detach(), grads

    def forward(self, batch: Batch, leaves: dict[str, Tensor], term: Term | None = None, **how: Any) -> Tensor:
        columns = {**batch.columns, **leaves}
        loss = term or self.term
        value, _ = fr.apply_loss(one() * loss if loss.weight else loss, columns, batch.mask, **(how or AVERAGES[0]))
        return value


def _sized(kind: ColumnType) -> ColumnType:
    inner = tuple(VOCABULARY if length == "V" else length for length in kind.inner)
    return replace(kind, inner=inner)


def _padded(values: Any, kind: ColumnType, rows: Rows, inside: Tensor) -> Any:
    """[B, T, ...] for token columns, [B] for numbers per row, a list for the rest. Padding holds zeros."""
    import torch

    if not kind.granularity.is_ragged:
        array = np.asarray(values) if not isinstance(values, list) else values
        return torch.as_tensor(array) if isinstance(array, np.ndarray) and array.dtype.kind in "biuf" else list(array)
    column = values if isinstance(values, Ragged) else Ragged.of(list(values))
    flat = torch.as_tensor(column.values)
    padded = flat.new_zeros((*inside.shape, *flat.shape[1:]))
    padded[inside] = flat
    return padded


def _consistent(columns: dict[str, Any], types: Mapping[str, ColumnType]) -> dict[str, Any]:
    """A teacher's likeliest tokens are different ones, with log-probabilities of one distribution."""
    import torch

    names = [name for name in ("teacher_ids", "teacher_logprobs") if name in columns and types[name].inner]
    if not names:
        return columns
    like = columns[names[0]]
    scores = torch.randn((*like.shape[:2], VOCABULARY), generator=torch.Generator().manual_seed(int(like.numel())))
    top = scores.double().log_softmax(-1).topk(like.shape[-1], dim=-1)
    made = {"teacher_ids": top.indices, "teacher_logprobs": top.values}
    return {**columns, **{name: made[name] for name in names}}


def _close(one: Tensor, other: Tensor, relative: float = 1e-9, absolute: float = 1e-10) -> bool:
    import torch

    return torch.allclose(one.double(), other.double(), rtol=relative, atol=absolute, equal_nan=True)


# ------------------------------------------------------------------------------------------------------ properties


def columns(trial: Trial) -> None:
    for batch in trial.batches():
        value, grads = trial.value(batch)
        _finite(batch, value, grads, "although every input is")
        for read in trial.reads:
            key = trial.key(read)
            if read.is_optional and not read.broadcast and not read.live:
                unless_refused(trial.value, batch.without(key))
            if read.broadcast:
                coarse = _ramp(len(batch.mask))
                fine = coarse[:, None].expand(batch.mask.shape)
                text = f"differs when '{read.broadcast}' is spread over the tokens of '{key}'"
                spread = batch.without(key).with_columns({read.broadcast: coarse})
                _must_agree(batch, trial.value(batch.with_columns({key: fine})), trial.value(spread), text)
            if read.live and read.live in batch.live:
                stored = batch.with_columns({key: batch.columns[read.live]})
                text = f"differs when '{key}' is the live '{read.live}' without gradient"
                _must_agree(batch, trial.value(stored), trial.value(batch.without(key)), text)


def _ramp(count: int) -> Tensor:
    import torch

    return torch.linspace(-1.0, 1.0, count, dtype=torch.float64)


def inputs(trial: Trial) -> None:
    changed: list[str] = []

    def look(function: Callable[..., Any], given: dict[str, Any]) -> Any:
        before = {name: value._version for name, value in given.items() if hasattr(value, "_version")}
        answer = function(**given)
        changed.extend(name for name, version in before.items() if given[name]._version != version)
        return answer

    for batch in trial.batches(seeds=1):
        trial.value(batch, _watched(trial.term, look))
        if changed:
            raise Broken(f"changes its input '{changed[0]}' in place", given=batch.shown())


def repeatable(trial: Trial) -> None:
    import torch

    with torch.random.fork_rng(devices=[]):
        for batch in trial.batches():
            torch.manual_seed(1)
            first = trial.value(batch)
            torch.manual_seed(2)
            _must_agree(
                batch, first, trial.value(batch), "differs when it is computed again", relative=0.0, absolute=0.0
            )


def gradients(trial: Trial) -> None:
    import torch

    for batch in trial.batches(seeds=1):
        _, grads = trial.value(batch)
        for name in batch.live:
            places = _places(batch, name)
            found = torch.stack([grads[name][place] for place in places]) if places else torch.zeros(0)
            is_held = bool(trial.stop_gradient) or trial.term.corrects or trial.term.weight
            kept = kept_constant(_forward(trial, batch)) if is_held else None
            plain = _differences(trial, batch, name, places, found, kept)
            if _agree(found, plain):
                continue
            text = f"its gradient for '{name}' is not the derivative of its value"
            if not is_held:
                held = _differences(trial, batch, name, places, found, kept_constant(_forward(trial, batch)))
                if _agree(found, held):
                    text += (
                        "; it is, where all that it computes without gradient (detach, no_grad) is held constant. If that is "
                        "meant, give the reason: stop_gradient='...'"
                    )
            raise Broken(text, given=batch.shown(), expected=plain, found=found)


def micro_batches(trial: Trial) -> None:
    import torch

    for batch in trial.batches(seeds=1):
        counts = batch.mask.sum(1).numpy()
        totals = fr.Totals.of(counts)
        for average in AVERAGES:
            whole, grads = trial.value(batch, **average)
            for parts in _splits(trial.term, batch):
                some = [trial.value(batch.rows(part), **average, totals=totals) for part in parts]
                summed = torch.stack([value for value, _ in some]).sum()
                moved = np.argsort(np.concatenate(parts), kind="stable")
                joined = {name: torch.cat([g[name] for _, g in some])[moved] for name in grads}
                text = (
                    f"depends on the split into micro-batches: rows {[p.tolist() for p in parts]} under "
                    f"average={average['average']!r}; average over rows is the update's business, and rows that belong "
                    "together are declared (locality=fr.group(...))"
                )
                _must_agree(batch, (whole, grads), (summed, joined), text)


def order(trial: Trial) -> None:
    for batch in trial.batches():
        whole, grads = trial.value(batch)
        moved = np.random.default_rng(len(batch.mask)).permutation(len(batch.mask))
        value, theirs = trial.value(batch.rows(moved))
        back = {name: grad[np.argsort(moved)] for name, grad in theirs.items()}
        _must_agree(batch, (whole, grads), (value, back), f"depends on the order of rows: {moved.tolist()}")


def leaks(trial: Trial) -> None:
    import torch

    for batch in trial.batches():
        clean = trial.value(batch)
        idle = ~batch.mask.any(1)
        for name, values in batch.columns.items():
            if not isinstance(values, torch.Tensor) or not values.is_floating_point():
                continue
            outside = ~batch.mask if values.dim() > 1 else idle
            # a model's number per row takes part in its own gradient, and 0 * NaN is NaN; its token numbers are cut out
            fills = FILLS if values.dim() > 1 or name not in batch.live else (1e30, -1e30)
            for fill in fills if outside.any() else ():
                filled = values.clone()
                filled[outside] = fill
                other = batch.with_columns({name: filled})
                value, grads = trial.value(other)
                where = "outside the mask" if values.dim() > 1 else "in rows without a token that trains"
                text = f"depends on '{name}' {where} (filled with {fill:g} there)"
                for key, grad in grads.items():
                    if not torch.isfinite(grad).all():
                        raise Broken(f"its gradient for '{key}' {text}", given=other.shown(), found=grad)
                _must_agree(other, clean, (value, grads), text)


def extremes(trial: Trial) -> None:
    import torch

    for batch in trial.batches(seeds=3):
        rng = np.random.default_rng(len(batch.mask))
        changed = {}
        for name, values in batch.columns.items():
            if isinstance(values, torch.Tensor) and values.is_floating_point() and name not in trial.columns:
                ends = (-5.0 - RATIO, -5.0) if "logprob" in name else (-RATIO, RATIO)
                ends = (0.0, 10.0) if name == "entropy" else ends
                changed[name] = torch.as_tensor(rng.choice(ends, tuple(values.shape)))
        far = batch.with_columns(changed).to(torch.float32)
        value, grads = trial.value(far)
        _finite(far, value, grads, f"at log-ratios of +-{RATIO:g}")


def empty(trial: Trial) -> None:
    import torch

    for batch in (*trial.batches(masked="all"), trial.batch(Shape(1), trial.seed)):
        value, grads = trial.value(batch.to(torch.float32))
        _finite(batch, value, grads, "with no token that trains, or few")
        if not batch.mask.any() and (float(value) != 0.0 or any(grad.any() for grad in grads.values())):
            raise Broken("is not 0 when no token trains", given=batch.shown(), found=value)
    one = trial.batch(Shape(2), trial.seed)
    mask = torch.zeros_like(one.mask)
    mask[tuple(one.mask.nonzero()[-1])] = True
    alone = replace(one, mask=mask)
    value, grads = trial.value(alone)
    _finite(alone, value, grads, "with a single token that trains")


def dtypes(trial: Trial) -> None:
    import torch

    seen: list[Any] = []

    def look(function: Callable[..., Any], given: dict[str, Any]) -> Any:
        answer = function(**given)
        seen.append((answer[0] if isinstance(answer, tuple) else answer).dtype)
        return answer

    watched = _watched(trial.term, look)
    for batch in trial.batches(seeds=1):
        for dtype in (torch.float32, torch.float64):
            trial.value(batch.to(dtype), watched)
            if seen[-1] != dtype:
                raise Broken(
                    "changes the dtype", given=batch.to(dtype).shown(), expected=str(dtype), found=str(seen[-1])
                )
        for half in (batch.to(torch.bfloat16), batch.to(torch.float32).to(torch.bfloat16, only_live=True)):
            value, grads = trial.value(half, watched)
            _finite(half, value, grads, "in bfloat16")


def device(trial: Trial) -> None:
    from torch.overrides import TorchFunctionMode

    waits: list[str] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            if name in SYNCS:
                waits.append(name)
            return func(*args, **(kwargs or {}))

    def look(function: Callable[..., Any], given: dict[str, Any]) -> Any:
        with Watch():
            return function(**given)

    for batch in trial.batches(seeds=1):
        trial.value(batch, _watched(trial.term, look))
        if waits:
            raise Broken(
                f"waits for the device (Tensor.{waits[0]}); compute with tensors, on whatever device they are",
                given=batch.shown(),
            )


def pickles(trial: Trial) -> None:
    try:
        again = pickle.loads(pickle.dumps(trial.term))
        same = trial.loss is None or pickle.loads(pickle.dumps(trial.loss)) is trial.loss
    except Exception as error:  # pickling may raise anything
        raise Broken(
            f"cannot be pickled ({type(error).__name__}: {error}); define it at the top of a module"
        ) from error
    if again != trial.term or not same:
        raise Broken("is another loss after pickling", expected=trial.term, found=again)


def text(trial: Trial) -> None:
    term = trial.term
    nodes = (
        Node("policy", "input", params=(("kind", "weights"),)),
        Node("rows", "input", params=(("kind", "rows"),)),
        Node("update", "update", (("model", "policy"), ("rows", "rows")), (("average", "token_mean"), ("loss", term))),
    )
    graph = Graph("conformance", nodes, ("update",))
    must_read_back(graph, term, LossFunction, "loss")


PROPERTIES: dict[str, Property] = {
    "columns": Property("must return a number per token or row, finite, with and without optional columns", columns),
    "inputs": Property("must change none of its inputs", inputs),
    "repeatable": Property("must give the same answer again", repeatable),
    "gradients": Property("must have the derivative of its value as gradient", gradients, lambda t: bool(t.live)),
    "micro_batches": Property(
        "must sum over micro-batches to the same loss, whatever the split",
        micro_batches,
        lambda t: t.term.locality.kind != "batch",  # that one is never split
    ),
    "order": Property("must not depend on the order of rows", order),
    "leaks": Property("must not see what does not train", leaks),
    "extremes": Property("must have a finite value and gradient at log-ratios of +-30", extremes),
    "empty": Property("must take batches of no token or one", empty),
    "dtypes": Property("must keep float32 and float64, and take bfloat16", dtypes),
    "device": Property("must never wait for the device", device),
    "pickles": Property("must pickle", pickles),
    "text": Property("must have a text form that reads back, and a hash that is the same again", text),
}


# --------------------------------------------------------------------------------------------------------- helpers


def _watched(term: Term, look: Callable[[Callable[..., Any], dict[str, Any]], Any]) -> Term:
    """The term with its function called by `look(function, arguments)`."""
    function = term.resolve()
    code = function.__code__

    # whether a loss takes segments is read from its parameters
    def with_segments(*, segments: Any, **given: Any) -> Any:
        return look(function, {**given, SEGMENTS: segments})

    def plain(**given: Any) -> Any:
        return look(function, given)

    takes = SEGMENTS in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return replace(term, function=with_segments if takes else plain)


def _finite(batch: Batch, value: Tensor, grads: Mapping[str, Tensor], when: str) -> None:
    import torch

    if not torch.isfinite(value).all():
        raise Broken(f"is not finite {when}", given=batch.shown(), found=value)
    for name, grad in grads.items():
        if not torch.isfinite(grad).all():
            raise Broken(f"its gradient for '{name}' is not finite {when}", given=batch.shown(), found=grad)


def _must_agree(batch: Batch, expected: Answer, found: Answer, text: str, **how: float) -> None:
    """Errors: Broken when two pairs (value, gradients) differ."""
    if not _close(expected[0], found[0], **how):
        raise Broken(f"its value {text}", given=batch.shown(), expected=expected[0], found=found[0])
    for name, grad in expected[1].items():
        if not _close(grad, found[1][name], **how):
            raise Broken(f"its gradient for '{name}' {text}", given=batch.shown(), expected=grad, found=found[1][name])


def _splits(term: Term, batch: Batch) -> Iterator[list[np.ndarray]]:
    """Ways to give the rows in micro-batches; the rows of a group that a term keeps together stay so."""
    n = len(batch.mask)
    if term.locality.kind == "group":
        parts = [np.flatnonzero(batch.group == g) for g in range(int(batch.group.max()) + 1)]
    else:
        parts = [np.asarray([i]) for i in range(n)]
    if len(parts) > 1:
        yield parts
        yield [np.concatenate(parts[::2]), np.concatenate(parts[1::2])]


def _places(batch: Batch, name: str) -> list[tuple[int, ...]]:
    """Some elements of a live column that train, at most eight."""
    values = batch.columns[name]
    where = (batch.mask if values.dim() > 1 else batch.mask.any(1)).nonzero().tolist()
    places = [(*place, *inner) for place in where for inner in np.ndindex(*values.shape[len(place) :])]
    return places[:: max(1, len(places) // 8)]


def _differences(
    trial: Trial, batch: Batch, name: str, places: list[tuple[int, ...]], expected: Tensor, kept: Kept | None
) -> Tensor:
    """Central differences of the value at each place, with what is `kept` held constant.

    Where one is not as expected a narrower step is tried; NaN where the two disagree, which is beside a kink.
    """
    import torch

    def slope(place: tuple[int, ...], step: float) -> float:
        ends = []
        for by in (step, -step):
            moved = batch.columns[name].clone()
            moved[place] += by
            run = _forward(trial, batch.with_columns({name: moved}))
            ends.append(float((run() if kept is None else held_constant(kept, run)).detach()))
        return (ends[0] - ends[1]) / (2 * step)

    found = []
    for place, gradient in zip(places, expected.tolist(), strict=True):
        wide = slope(place, STEP)
        if not _near(wide, gradient):
            narrow = slope(place, STEP / 8)
            wide = narrow if _near(wide, narrow) else float("nan")
        found.append(wide)
    return torch.tensor(found, dtype=torch.float64)


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-5 + 1e-4 * abs(other)


def _forward(trial: Trial, batch: Batch) -> Callable[[], Tensor]:
    leaves = batch.leaves()
    return lambda: trial.forward(batch, leaves)


def _agree(found: Tensor, differences: Tensor) -> bool:
    import torch

    known = torch.isfinite(differences)
    return bool(known.sum() * 2 >= len(known)) and _close(differences[known], found[known], 1e-4, 1e-5)
