"""One rank of the tests of a head that is cut by tokens: as `mesh_worker`, with work of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flowrl as fr
from flowrl.engines import forward as forward_module
from flowrl.engines.forward import Forward
from flowrl.engines.mesh.host import MeshHost, open_on_mesh
from flowrl.engines.mesh.ranks import RankMesh
from flowrl.engines.mesh.styles import LOGITS
from flowrl.engines.mesh.vocabulary import HeadPart, VocabularyForward, stats_of_part, top_of_part
from flowrl.engines.protocol import UpdateJob
from flowrl.model import Model
from flowrl.schema.ragged import Ragged
from tests.distributed import mesh_worker
from tests.distributed.mesh_cases import ROTARY, Case, job_of, llama, metrics_of, model_of, rows_of, train

HIDDEN, TOKENS, TOP = 12, 23, 5


@dataclass(frozen=True)
class Head:
    """A head and what is asked of it."""

    rows: int = 40
    vocab_size: int = 40
    has_bias: bool = False
    has_temperature: bool = True
    dtype: torch.dtype = torch.float32
    slice: int = TOKENS
    with_entropy: bool = True
    never: int | None = None
    """A token whose logit is -inf."""

    def made(self) -> tuple[nn.Linear, Tensor, Tensor, Tensor | None]:
        """The whole head, hidden states, targets, temperature."""
        draw = torch.Generator().manual_seed(7)
        head = nn.Linear(HIDDEN, self.rows, bias=self.has_bias)
        with torch.no_grad():
            for param in head.parameters():
                param.copy_(torch.randn(param.shape, generator=draw))
            if self.never is not None:
                head.bias[self.never] = -torch.inf
        hidden = torch.randn(TOKENS, HIDDEN, generator=draw)
        targets = torch.randint(self.vocab_size, (TOKENS,), generator=draw)
        targets[:2] = torch.tensor([0, self.vocab_size - 1])
        if self.never is not None:
            targets[targets == self.never] = 0
        temperature = 0.5 + torch.rand(TOKENS, generator=draw) if self.has_temperature else None
        return head.to(self.dtype), hidden.to(self.dtype), targets, temperature

    def weights(self) -> tuple[Tensor, Tensor]:
        """Of log-probabilities and entropies in what is differentiated."""
        draw = torch.Generator().manual_seed(8)
        return torch.randn(TOKENS, generator=draw), torch.randn(TOKENS, generator=draw)


HEADS: dict[str, Head] = {
    "plain": Head(has_temperature=False),
    "temperature": Head(),
    "bias": Head(has_bias=True),
    "slices": Head(has_bias=True, slice=5),
    "no entropy": Head(slice=5, with_entropy=False),
    "padded": Head(vocab_size=37, slice=5),
    "a rank without tokens": Head(vocab_size=19, has_bias=True),
    "a rank without tokens, slices": Head(vocab_size=19, slice=5),
    "one token": Head(slice=1),
    "bf16": Head(has_bias=True, dtype=torch.bfloat16),
    "bf16 slices": Head(dtype=torch.bfloat16, slice=5),
    "never": Head(has_bias=True, never=3),
}


def cut(head: nn.Linear, mesh: RankMesh, vocab_size: int) -> HeadPart:
    LOGITS.apply(head, mesh.tp_axis)
    part = HeadPart.of(head, vocab_size)
    assert part is not None
    return part


def slices(size: int, total: int = TOKENS) -> list[slice]:
    return [slice(start, start + size) for start in range(0, total, size)]


def heads(mesh: RankMesh, folder: Path) -> Any:
    """Values, gradients and top tokens of each head."""
    found = {}
    for name, case in HEADS.items():
        head, hidden, targets, temperature = case.made()
        part = cut(head, mesh, case.vocab_size)
        hidden.requires_grad_()
        logprobs, entropy = stats_of_part(
            part, hidden, targets, temperature, slices(case.slice), with_entropy=case.with_entropy
        )
        first, second = case.weights()
        total = logprobs @ first
        if entropy is not None:
            total = total + entropy @ second
        total.backward()
        ids, nats = top_of_part(part, hidden.detach(), temperature, TOP)
        found[name] = {
            "logprobs": logprobs.detach(),
            "entropy": None if entropy is None else entropy.detach(),
            "hidden": hidden.grad,
            "head": {key: local(param.grad) for key, param in head.named_parameters()},
            "ids": ids,
            "nats": nats.detach(),
        }
    return found


def local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def edges(mesh: RankMesh, folder: Path) -> Any:
    """No tokens, a part of the gradients, an id that no rank has, a NaN of one rank, a frozen head, all tokens as top ones."""
    case = Head()
    head, hidden, targets, temperature = case.made()
    part = cut(head, mesh, case.vocab_size)
    none = hidden[:0].requires_grad_()
    empty, _ = stats_of_part(part, none, targets[:0], None, [], with_entropy=True)
    empty.sum().backward()
    found: dict[str, Any] = {"none": (empty.detach(), none.grad, local(head.weight.grad).abs().max())}

    hidden.requires_grad_()
    for name, index in (("logprobs", 0), ("entropy", 1)):
        both = stats_of_part(part, hidden, targets, temperature, slices(5), with_entropy=True)
        picked = both[index]
        assert picked is not None
        found[name] = torch.autograd.grad(picked.sum(), hidden)[0]
    again, _ = stats_of_part(part, hidden, targets, temperature, slices(TOKENS), with_entropy=False)
    found["twice"] = [torch.autograd.grad(again.sum(), hidden, retain_graph=True)[0] for _ in range(2)]
    frozen = HeadPart(part.weight.detach(), None, part.group, case.vocab_size)
    of_frozen, _ = stats_of_part(frozen, hidden, targets, temperature, slices(5), with_entropy=False)
    found["frozen"] = torch.autograd.grad(of_frozen.sum(), hidden)[0]

    too_high = targets.clone()
    too_high[4] = case.vocab_size - 2
    less = HeadPart(part.weight, None, part.group, case.vocab_size - 2)
    try:
        stats_of_part(less, hidden, too_high, temperature, slices(5), with_entropy=False)
        found["id"] = "no error"
    except IndexError as error:
        found["id"] = str(error)

    found["all"] = [one.detach() for one in top_of_part(part, hidden, temperature, case.vocab_size)]
    with torch.no_grad():
        if mesh.rank == 1:
            part.weight[0, 0] = torch.nan
        found["nan"] = stats_of_part(part, hidden, targets, temperature, slices(5), with_entropy=True)
    return found


# --- models -----------------------------------------------------------------------------------------------------------

VOCAB = 480
WIDE = Case("llama", num_rows=24, budget=4000)
"""All rows in one block."""
SLICE = 7
HEADED: dict[str, dict[str, Any]] = {
    "untied": {"vocab_size": VOCAB},
    "tied": {"vocab_size": VOCAB, "tie_word_embeddings": True},
    "uneven": {"vocab_size": VOCAB + 1},
}


@fr.loss
def of_whole_rows(logprobs, logits, entropy):
    """Reads logits: of all tokens, wherever they are."""
    return logits.logsumexp(-1) * 0.1 - logits[:, 0] - logprobs - 0.1 * entropy


def wide_model(options: dict[str, Any]) -> Model:
    return replace(model_of(WIDE), source=lambda: llama(num_key_value_heads=4, **options))


USES = frozenset({"update", "logprobs", "top_logprobs"})


def opened(mesh: RankMesh, options: dict[str, Any]) -> MeshHost:
    return open_on_mesh("wide", wide_model(options), USES, mesh, seed=0)


def models(mesh: RankMesh, folder: Path) -> Any:
    """Training, scores and top tokens, all at once and in slices."""
    found = {}
    for name, options in HEADED.items():
        for size in (None, SLICE):
            elements = 2**26 if size is None else size * VOCAB
            with mock.patch.object(forward_module, "SLICE_ELEMENTS", elements):
                host = opened(mesh, options)
                made = train(host, WIDE, steps=3)
                made["top"] = [one.values for one in host.top_logprobs(rows_of(WIDE, 50), TOP)]
                found[f"{name} {size}"] = made
    return found


def whole_rows(mesh: RankMesh, folder: Path) -> Any:
    host = opened(mesh, HEADED["tied"])
    return [metrics_of(host.update(whole_rows_job(seed))) for seed in range(2)], host.full_state()["weights"]


def whole_rows_job(seed: int) -> UpdateJob:
    return replace(job_of(WIDE, seed), loss=of_whole_rows())


class Sizes(TorchDispatchMode):
    """Shapes of the floating tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, Tensor) and one.is_floating_point():
                self.shapes.add(tuple(one.shape))
        return found

    def largest(self) -> int:
        return max(int(np.prod(shape)) for shape in self.shapes)

    def rows_of(self, width: int) -> int:
        """Of the largest tensor of so wide rows; weights, transposed, left out."""
        found = (shape[0] for shape in self.shapes if len(shape) == 2 and shape[1] == width)
        return max((rows for rows in found if rows != ROTARY["hidden_size"]), default=0)


def sizes(mesh: RankMesh, folder: Path) -> Any:
    """What is made while a model trains, scores and finds top tokens; and, for comparison, where rows are gathered."""
    found: dict[str, Any] = {}
    job = job_of(WIDE, 0)
    rows = rows_of(WIDE, 50)
    tokens = {"update": int(job.mask.values.sum()), "logprobs": len(rows.response_ids.values)}
    tokens["top"] = tokens["logprobs"]
    for name, elements, gathers in (("once", 2**26, False), ("slices", SLICE * VOCAB, False), ("whole", 2**26, True)):
        host = opened(mesh, HEADED["tied"])
        with (
            mock.patch.object(forward_module, "SLICE_ELEMENTS", elements),
            mock.patch.object(VocabularyForward, "stats", Forward.stats if gathers else VocabularyForward.stats),
            mock.patch.object(VocabularyForward, "top", Forward.top if gathers else VocabularyForward.top),
        ):
            for work, run in (
                ("update", lambda host=host: host.update(job)),
                ("logprobs", lambda host=host: host.logprobs(rows)),
                ("top", lambda host=host: host.top_logprobs(rows, TOP)),
            ):
                seen = Sizes()
                with seen:
                    run()
                found[f"{name} {work}"] = {
                    "tokens": tokens[work],
                    "largest": seen.largest(),
                    "whole_rows": seen.rows_of(VOCAB),
                    "part_rows": seen.rows_of(VOCAB // mesh.layout.tp),
                }
    return found


def no_tokens(mesh: RankMesh, folder: Path) -> Any:
    """A block of no rows on one share of the ranks meets a block of one row on the other."""
    host = opened(mesh, HEADED["untied"])
    one = replace(WIDE, num_rows=1)
    job = job_of(one, 0)
    report = metrics_of(host.update(replace(job, mask=Ragged.like(np.ones_like(job.mask.values), job.mask))))
    assert dist.is_initialized()
    return report, host.full_state()["weights"]


mesh_worker.EXTRAS.update({one.__name__: one for one in (heads, edges, models, whole_rows, sizes, no_tokens)})

if __name__ == "__main__":
    mesh_worker.main(sys.argv[1])
