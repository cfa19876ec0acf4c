"""Loss terms: functions of live and stored columns that add, scale and multiply.

    @fr.loss
    def ppo_clip(logprobs, old_logprobs: fr.TOKEN.f32.or_live("logprobs"),
                 advantages: fr.TOKEN.f32.or_broadcast("advantage"), *, clip=0.2):
        ratio = (logprobs - old_logprobs).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)

    loss = ppo_clip(0.2) + 1e-3 * kl("k3")

[Note: A loss sees only the tokens that train]
Tensors are packed: TOKEN columns are [T] over the tokens of the micro-batch whose loss mask is true, all rows after each
other; PROMPT and SAMPLE columns are [N]. Masked tokens are not there at all, so a term cannot leak them. A term returns
[T] per token or, declared `per="sample"`, [N] per row; averaging is the update's business.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowrl.errors import ConfigError, TraceError
from flowrl.graph.annotations import refuse_misfit
from flowrl.graph.code import Decorated, code_hash, digest, reduced, refuse_changed, resolve
from flowrl.graph.operators import REQUIRED, Locality, OperatorCall, Read, read_signature, resolve_read
from flowrl.graph.values import EMPTY_MAP, FrozenMap, freeze_config, frozen_defaults
from flowrl.schema.standard import LIVE

ROW = Locality("row")

SEGMENTS = "segments"
"""Name of the parameter through which a loss gets the row boundaries of its packed tokens."""


class Loss:
    """An expression of terms. `a + b`, `2.0 * a`, `a / 2`, `a * b`; `0 * a` vanishes, with all it would have read."""

    __slots__ = ()

    def __add__(self, other: Any) -> Loss:
        if not isinstance(other, Loss):
            if other == 0:
                return self
            raise TraceError(f"a loss adds to another loss; found {other!r}")
        return Sum(tuple(p for p in (*_parts(self), *_parts(other)) if p is not ZERO))._simple()

    def __radd__(self, other: Any) -> Loss:
        return self.__add__(other)

    def __mul__(self, other: Any) -> Loss:
        if isinstance(other, Loss):
            return ZERO if ZERO in (self, other) else Product(self, other)
        if isinstance(other, bool) or not isinstance(other, int | float):
            raise TraceError(f"a loss is scaled by a number or multiplied by another loss; found {other!r}")
        if other == 0 or self is ZERO:
            return ZERO
        return self if other == 1 else Scale(float(other), self)

    def __rmul__(self, other: Any) -> Loss:
        return self.__mul__(other)

    def __truediv__(self, other: Any) -> Loss:
        if isinstance(other, bool) or not isinstance(other, int | float) or other == 0:
            raise TraceError(f"a loss is divided by a number that is not 0; found {other!r}")
        return self * (1.0 / other)

    def __neg__(self) -> Loss:
        return self * -1.0

    def __sub__(self, other: Any) -> Loss:
        return self + other * -1.0

    def terms(self) -> Iterator[Term]:
        """Every term, left to right."""
        raise NotImplementedError

    def live(self) -> frozenset[str]:
        """The live columns some term reads: what the model must compute."""
        return frozenset(read.column for term in self.terms() for read in term.reads if is_live(read))

    def group_key(self) -> str:
        """Column whose equal rows must stay in one micro-batch, or empty."""
        keys = {term.locality.key for term in self.terms() if term.locality.kind == "group"}
        if len(keys) > 1:
            raise ConfigError(f"the terms of a loss keep different groups together: {', '.join(sorted(keys))}")
        return next(iter(keys), "")

    def needs_whole_batch(self) -> bool:
        """Whether some term must see all rows of an optimizer step together: they are one micro-batch then."""
        return any(term.locality.kind == "batch" for term in self.terms())


def is_live(read: Read) -> bool:
    """Whether a read of a loss is computed by the model (`values=values` is live, `old_values=values` is stored)."""
    return read.param in LIVE and read.param == read.column


@dataclass(frozen=True, slots=True)
class Term(Loss):
    """One loss function with its configuration."""

    name: str
    hash: str
    config: tuple[tuple[str, Any], ...]
    reads: tuple[Read, ...]
    locality: Locality = ROW
    per: str = "token"
    """"token" or "sample": the shape of what it returns."""
    on_policy: bool = True
    """True when it is only right on tokens the trained model sampled (ratios, policy gradients)."""
    max_staleness: int | None = 0
    """Greatest staleness it tolerates by itself; None for any."""
    corrects: bool = False
    """True when it corrects for the difference between the sampling policy and the trainer's."""
    weight: bool = False
    """True when it trains nothing by itself: it multiplies another term."""
    defaults: FrozenMap = EMPTY_MAP
    """Configuration values it has unless told otherwise; the text form leaves them out of the call."""
    function: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    @property
    def short_name(self) -> str:
        return self.name.rpartition(":")[2].rpartition(".")[2]

    def terms(self) -> Iterator[Term]:
        yield self

    def __reduce__(self) -> tuple[object, ...]:
        return reduced(self)

    def resolve(self) -> Callable[..., Any]:
        if self.function is not None:
            return self.function
        found = resolve(self.name)
        if not isinstance(found, LossFunction):
            raise ConfigError(f"'{self.name}' is not a loss any more; found {type(found).__name__}")
        refuse_changed(self.name, self.hash, found.hash)
        found.validate(dict(self.config))
        return found.function


def told(call: OperatorCall | Term) -> tuple[tuple[str, Any], ...]:
    """The configuration that differs from the defaults."""
    usual = {name: repr(value) for name, value in call.defaults.items}
    return tuple((name, value) for name, value in call.config if usual.get(name) != repr(value))


def reads_of(loss: Loss) -> tuple[Read, ...]:
    """All columns a loss reads, each once."""
    seen: dict[tuple[str, str, str, bool], Read] = {}
    for term in loss.terms():
        for read in term.reads:
            seen.setdefault((read.column, read.broadcast, read.live, is_live(read)), read)
    return tuple(seen.values())


@dataclass(frozen=True, slots=True)
class Sum(Loss):
    """Terms added."""

    parts: tuple[Loss, ...]

    def terms(self) -> Iterator[Term]:
        for part in self.parts:
            yield from part.terms()

    def _simple(self) -> Loss:
        return ZERO if not self.parts else self.parts[0] if len(self.parts) == 1 else self


@dataclass(frozen=True, slots=True)
class Scale(Loss):
    """A term times a constant."""

    factor: float
    part: Loss

    def terms(self) -> Iterator[Term]:
        yield from self.part.terms()


@dataclass(frozen=True, slots=True)
class Product(Loss):
    """Two terms multiplied token by token, e.g. a clipped objective times importance weights."""

    left: Loss
    right: Loss

    def terms(self) -> Iterator[Term]:
        yield from self.left.terms()
        yield from self.right.terms()


ZERO = Sum(())
"""What `0 * loss` gives."""


def _parts(loss: Loss) -> tuple[Loss, ...]:
    return loss.parts if isinstance(loss, Sum) else (loss,)


def tolerated_staleness(loss: Loss) -> int | None:
    """Greatest staleness a loss tolerates; None for any. A sum tolerates what its strictest part does, a product with a
    correction what the correction does."""
    match loss:
        case Term():
            return loss.max_staleness
        case Sum(parts):
            found = [tolerated_staleness(part) for part in parts]
            known = [f for f in found if f is not None]
            return min(known) if known else None
        case Scale(_, part):
            return tolerated_staleness(part)
        case Product(left, right):
            corrections = [side for side in (left, right) if is_correction(side)]
            return tolerated_staleness(corrections[0] if corrections else left)
    raise TypeError(f"no staleness for {type(loss).__name__}")


def is_correction(loss: Loss) -> bool:
    """Whether every term corrects for off-policy sampling."""
    return all(term.corrects for term in loss.terms())


def refuse_lone_weights(loss: Loss) -> None:
    """Errors: ConfigError where weights are added to a loss, or are all there is, instead of multiplying one."""
    alone = _lone_weights(loss)
    if not alone:
        return
    names = " * ".join(f"{term.short_name}(...)" for term in alone)
    trains = next((term.short_name for term in loss.terms() if not term.weight), "ppo_clip")
    raise ConfigError(
        f"{' and '.join(repr(term.short_name) for term in alone)} only weigh{'s' if len(alone) == 1 else ''} a loss, and here "
        f"nothing is multiplied with {'it' if len(alone) == 1 else 'them'}; write {trains}(...) * {names}, and + between "
        "losses alone"
    )


def _lone_weights(loss: Loss) -> tuple[Term, ...]:
    """The terms of a product of weights alone that the loss, written as a sum of products, has; none where there is none."""
    match loss:
        case Term():
            return (loss,) if loss.weight else ()
        case Sum(parts):
            return next((found for part in parts if (found := _lone_weights(part))), ())
        case Scale(_, part):
            return _lone_weights(part)
        case Product(left, right):
            one, other = _lone_weights(left), _lone_weights(right)
            return (*one, *other) if one and other else ()
    raise TypeError(f"no rule for weights in {type(loss).__name__}")


def uncorrected(loss: Loss) -> tuple[Term, ...]:
    """On-policy terms that no correction multiplies."""
    match loss:
        case Term():
            return (loss,) if loss.on_policy and not loss.corrects else ()
        case Sum(parts):
            return tuple(term for part in parts for term in uncorrected(part))
        case Scale(_, part):
            return uncorrected(part)
        case Product(left, right):
            if any(term.corrects for term in loss.terms()):
                return ()
            return (*uncorrected(left), *uncorrected(right))
    raise TypeError(f"no correction rule for {type(loss).__name__}")


class LossFunction(Decorated):
    """A loss function with its declaration; calling it with configuration gives a term. Made by `@fr.loss`."""

    def __init__(
        self,
        function: Callable[..., Any],
        names: Mapping[str, Any],
        *,
        locality: Locality,
        per: str,
        on_policy: bool,
        max_staleness: int | None,
        corrects: bool,
        weight: bool | None,
        check: Callable[..., object] | None,
    ) -> None:
        if locality.kind == "stateful":
            raise ConfigError(
                "a loss keeps no state: locality is 'row', fr.group(key) or 'batch'; keep state in an operator"
            )
        if per not in ("token", "sample"):
            raise ConfigError(f"a loss is per='token' or per='sample'; found {per!r}")
        super().__init__(function)
        self.reads, self.defaults, state, self.asked = read_signature(function, names, kind="loss")
        if state:
            raise ConfigError(f"loss '{function.__name__}' asks for fr.State; keep state in an operator")
        self.properties: dict[str, Any] = {
            "locality": locality,
            "per": per,
            "on_policy": on_policy,
            "max_staleness": max_staleness,
            "corrects": corrects,
            "weight": corrects if weight is None else weight,
        }
        self.check = check

    @property
    def hash(self) -> str:
        spec = (
            [str(read) for read in self.reads],
            sorted((name, repr(value)) for name, value in self.defaults.items()),
            sorted((name, str(value)) for name, value in self.properties.items()),
            code_hash(self.function),
        )
        return digest(repr(spec))

    def validate(self, config: Mapping[str, Any]) -> None:
        """Look at all configuration values. Errors: ConfigError for those that make no sense."""
        refuse_misfit(self.__name__, config, self.asked, self.defaults)
        if self.check is not None:
            self.check(**config)

    def __call__(self, *args: Any, **config: Any) -> Any:
        """A term from configuration; with tensors as first arguments, the plain function."""
        if any(hasattr(value, "requires_grad") for value in (*args, *config.values())):
            given = {**self.defaults, **{name: value for name, value in config.items() if name in self.defaults}}
            if not any(value is REQUIRED for value in given.values()):  # else Python says which is missing
                self.validate(given)
            return self.function(*args, **config)
        full = freeze_config(self.__name__, self.defaults, args, config)
        self.validate(full)
        reads = tuple(resolve_read(read, full, self.__name__) for read in self.reads if read.param != SEGMENTS)
        return Term(
            self.name,
            self.hash,
            tuple(sorted(full.items())),
            reads,
            defaults=frozen_defaults(self.defaults),
            function=self.function,
            **self.properties,
        )

    def __repr__(self) -> str:
        return f"<loss {self.name} ({', '.join(map(str, self.reads))})>"


def loss(
    function: Callable[..., Any] | None = None,
    /,
    *,
    locality: Locality | str = "row",
    per: str = "token",
    on_policy: bool = True,
    max_staleness: int | None = 0,
    corrects: bool = False,
    weight: bool | None = None,
    check: Callable[..., object] | None = None,
) -> Any:
    """Declare a loss term.

    Args:
        locality: `"row"`; `fr.group(key)` when rows with equal `key` must be in one micro-batch (preference pairs); `"batch"`
            when all rows of an optimizer step must (statistics over its tokens): the step's activations are then held at
            once, so keep the step small (`fr.repeat(minibatches=...)`) or checkpoint activations.
        per: `"token"` when it returns [T], `"sample"` when it returns [N].
        on_policy: only right on tokens that the trained model sampled (checked: FR-M01).
        max_staleness: greatest staleness it tolerates by itself (checked: FR-V02); None for any.
        corrects: it weighs for the difference between the sampling policy and the trainer's (asked for by FR-V01).
        weight: it trains nothing by itself and multiplies another term; `fr.update` and `fr.apply_loss` refuse it as a part of a
            sum. None: what `corrects` says.
        check: called with all configuration values by name, before there is any tensor; raises ConfigError for those that make
            no sense. No part of what the loss is: its hash does not cover it.

    Positional parameters are columns: `logprobs`, `entropy`, `values`, `logits`, `scores` are live (computed with
    gradient), others stored. A parameter named `segments` gets the row boundaries (`flowrl.engines.segments.Segments`).
    Returns the loss to minimise, or `(loss, {"name": per-token or per-row numbers to log})`.
    """
    frame = sys._getframe(1)
    names = {**frame.f_globals, **frame.f_locals}
    place = locality if isinstance(locality, Locality) else Locality(locality)

    def make(f: Callable[..., Any]) -> LossFunction:
        return LossFunction(
            f,
            names,
            locality=place,
            per=per,
            on_policy=on_policy,
            max_staleness=max_staleness,
            corrects=corrects,
            weight=weight,
            check=check,
        )

    return make(function) if function is not None else make
